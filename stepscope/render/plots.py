"""What the overview charts show: columns, stages, units, and how to read each in plain words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepscope.render.chart import Style


@dataclass(frozen=True, slots=True)
class Line:
    """One column in a plot.

    Attributes:
        column: column of `steps`.
        name: legend: what it is, with its stage.
        style: how it is drawn.
        muted: a limit or reference, drawn in grey.
        term: a part of something larger, not drawn where it is zero throughout: it would only flatten the rest.
    """

    column: str
    name: str
    style: Style = "line"
    muted: bool = False
    term: bool = False


@dataclass(frozen=True, slots=True)
class Plot:
    """One chart of the overview.

    Attributes:
        id: anchor in the page.
        title: heading.
        unit: label of the y axis with the stage.
        per: ``micro-step`` where every backward pass has a value, ``optimizer step`` where the window has one.
        lines: its columns; the first decides whether there is anything to show.
        reading: how to read it, with the formula.
        skips: whether skipped optimizer steps are marked.
        log: whether the axis may become logarithmic.
    """

    id: str
    title: str
    unit: str
    per: str
    lines: tuple[Line, ...]
    reading: str
    skips: bool = True
    log: bool = True


PLOTS = (
    Plot(
        "fig-loss",
        "Loss",
        "loss, unscaled and undivided",
        "micro-step",
        (Line("loss", "loss"), Line("aux_loss", "auxiliary loss", term=True)),
        "The loss as the model or criterion gave it, before it is divided by the window size K and before the loss "
        "scale. It should fall, with noise. A cross on the strip is a value that is NaN or infinite.",
        skips=False,
        log=False,
    ),
    Plot(
        "fig-loss-scaled",
        "Value that backward was called on",
        "loss × loss weight × loss scale",
        "micro-step",
        (Line("loss_scaled", "root of backward"),),
        "loss_scaled = (loss + auxiliary loss) × loss weight × loss scale. With K micro-steps in a window it is the "
        "loss divided by K, times the scale of the GradScaler. Without a scaler and with K = 1 it equals the loss. "
        "A jump by two follows the loss scale and is no fault.",
    ),
    Plot(
        "fig-loss-weight",
        "Loss weights",
        "factor before the loss, loss scale excluded",
        "micro-step",
        (Line("loss_weight_sum", "sum over the window", "dots"), Line("loss_weight", "of the micro-step", "dots")),
        "The loss weight is the factor with which a micro-step's loss enters backward: 1/K in a plain window of K. The "
        "weights of a window of mean losses must add up to 1. A sum of K means that the division by K was forgotten, "
        "1/K that it was done twice, r/K that a tail of r micro-steps was divided by the full K. Where losses are sums "
        "over targets, weights are 1 / targets and the sum says nothing.",
        skips=False,
    ),
    Plot(
        "fig-lr",
        "Learning rate",
        "learning rate that the step used",
        "optimizer step",
        (Line("lr", "lr"),),
        "The rate in param_groups at the moment the optimizer stepped: this step's rate, not the next one's. On other "
        "micro-steps it is the rate at backward. Where the schedule's formula is known, it is drawn beside it as a "
        "dashed line and should lie exactly on it.",
        log=False,
    ),
    Plot(
        "fig-loss-scale",
        "Loss scale",
        "GradScaler scale before update",
        "optimizer step",
        (Line("loss_scale_before", "scale that backward used", "stairs"),),
        "The GradScaler multiplies the loss by this factor so that small float16 gradients do not vanish. It halves it "
        "when a gradient is not finite, and the optimizer step is then skipped; it doubles it after growth_interval "
        "steps without one (2000 by default). A few skips at the start and one now and then are right. A scale that "
        "falls without end is a fault.",
    ),
    Plot(
        "fig-grad-norm",
        "Gradient norm before and after the clip",
        "L2 norm, unscaled",
        "optimizer step",
        (
            Line("grad_norm", "before the clip"),
            Line("grad_norm_clipped", "as the step used it"),
            Line("clip_max_norm", "limit of the clip", "dashed", muted=True),
        ),
        "grad_norm = √(Σ g²) over the parameters of the optimizer, after the loss scale was divided out. Where it lies "
        "above the limit, the clip multiplies every gradient by limit / norm, and the second line lies on the limit. A "
        "clip that binds nearly always sets the step length by itself; one that acts before the loss scale is divided "
        "out leaves a norm of limit / scale.",
    ),
    Plot(
        "fig-update-ratio",
        "Update ratio",
        "L2 of the change / L2 of the parameters",
        "optimizer step",
        (Line("update_ratio", "update ratio"),),
        "update_ratio = ‖Δw‖ / ‖w‖, both measured on the parameters themselves. Around 1e-3 is usual; 0 means that "
        "nothing moved, which is right only for a skipped step or a rate of 0.",
    ),
    Plot(
        "fig-lost-update",
        "Lost updates",
        "share of elements",
        "optimizer step",
        (Line("lost_update_frac", "gradient, but no change"), Line("grad_zero_frac", "gradient exactly 0")),
        "Elements that had a gradient and did not move because the change was smaller than the spacing of their dtype: "
        "in bfloat16 near 1.0 that is 2⁻⁸. A share near 1 means that training stands still.",
        log=False,
    ),
    Plot(
        "fig-items",
        "Targets",
        "targets that counted in the loss",
        "micro-step",
        (Line("num_items", "targets"),),
        "How many targets entered the loss of each micro-step (labels that are not ignored). Where they differ inside "
        "a window, an average of averages weights targets unequally.",
        skips=False,
        log=False,
    ),
    Plot(
        "fig-times",
        "Time",
        "ms, as seen by the process",
        "micro-step",
        (Line("forward_ms", "forward"), Line("backward_ms", "backward"), Line("step_ms", "optimizer step")),
        "Wall clock between calls. On a GPU, calls return before the work is done: then these are times of launching.",
        skips=False,
    ),
)
