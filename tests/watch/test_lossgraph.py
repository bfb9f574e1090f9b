"""The loss graph against weights worked out by hand: a root is the sum of weight times loss over its targets.

`_CASES` gives for each loss what a backward on ``loss / 5`` must show. Expected numbers follow from the definition of the
loss alone: a mean over n valid targets gives each of them 1/(5 n), a sum 1/5.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import stepscope

if TYPE_CHECKING:
    from collections.abc import Iterable

N, C = 6, 4
IGNORE = -100


class Data:
    """Logits of one linear layer in float64, and every kind of target."""

    def __init__(self) -> None:
        gen = torch.Generator().manual_seed(3)
        self.layer = nn.Linear(5, C, dtype=torch.float64)
        self.x = torch.randn(N, 5, generator=gen, dtype=torch.float64)
        self.labels = torch.tensor([0, 1, 2, 3, 1, 2])
        self.holes = torch.tensor([0, IGNORE, 2, IGNORE, 1, 2])
        self.mask = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0, 1.0], dtype=torch.float64)
        self.class_weight = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)
        self.y = torch.randn(N, C, generator=gen, dtype=torch.float64)
        self.binary = torch.randint(0, 2, (N, C), generator=gen).double()
        self.soft = torch.softmax(torch.randn(N, C, generator=gen, dtype=torch.float64), -1)

    @property
    def out(self) -> torch.Tensor:
        return self.layer(self.x)


def observe(roots: Iterable[Any], layer: nn.Module, scaler: Any = None) -> list[dict[str, Any]]:
    """The rows of backward passes on each of the roots (or on what a function returns)."""
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    with stepscope.watch() as watching:
        for root in roots:
            value = root() if callable(root) else root
            (scaler.scale(value) if scaler is not None else value).backward()
            optimizer.step()
            optimizer.zero_grad()
    frame = watching.trace.steps
    assert not watching.trace.meta["probes_off"]
    return [{k: None if v is pd.NA else v for k, v in row.items()} for row in frame.to_dict("records")]


@dataclass
class Case:
    """What a backward on ``loss / 5`` must show."""

    name: str
    loss: Any
    weight: float | None
    count: float | None
    target: float | None


def _elementwise(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (out - y).abs().exp()


def _bce_rows(d: Data) -> torch.Tensor:
    """Shape ``(N,)``."""
    return F.binary_cross_entropy_with_logits(d.out, d.binary, reduction="none").sum(1)


_ALL, _VALID = N * C, 4

_CASES = [
    # torch's own losses over class targets: a mean over n targets weighs 1/5, each target 1/(5 n)
    Case("ce mean", lambda d: F.cross_entropy(d.out, d.labels), 1 / 5, N, 1 / 5 / N),
    Case("ce mean ignored", lambda d: F.cross_entropy(d.out, d.holes), 1 / 5, _VALID, 1 / 5 / _VALID),
    Case("ce sum", lambda d: F.cross_entropy(d.out, d.labels, reduction="sum"), 1 / 5, N, 1 / 5),
    Case("ce sum ignored", lambda d: F.cross_entropy(d.out, d.holes, reduction="sum"), 4 / 5, _VALID, 1 / 5),
    Case("ce none mean", lambda d: F.cross_entropy(d.out, d.labels, reduction="none").mean(), 1 / 5, N, 1 / 5 / N),
    # .mean() divides by all six positions, four of which count: 4/6 of a mean
    Case(
        "ce none mean ignored",
        lambda d: F.cross_entropy(d.out, d.holes, reduction="none").mean(),
        4 / 30,
        _VALID,
        1 / 30,
    ),
    Case("ce none sum", lambda d: F.cross_entropy(d.out, d.labels, reduction="none").sum(), 1 / 5, N, 1 / 5),
    Case("ce class weights", lambda d: F.cross_entropy(d.out, d.labels, d.class_weight), 1 / 5, N, None),
    Case("ce class weights ignored", lambda d: F.cross_entropy(d.out, d.holes, d.class_weight), 1 / 5, _VALID, None),
    Case(
        "ce 2d",
        lambda d: F.cross_entropy(d.out.view(2, 3, C).transpose(1, 2), d.holes.view(2, 3)),
        1 / 5,
        _VALID,
        1 / 5 / _VALID,
    ),
    Case("nll", lambda d: F.nll_loss(F.log_softmax(d.out, -1), d.holes), 1 / 5, _VALID, 1 / 5 / _VALID),
    Case("smoothing mean", lambda d: F.cross_entropy(d.out, d.labels, label_smoothing=0.1), 1 / 5, N, 1 / 5 / N),
    Case(
        "smoothing ignored",
        lambda d: F.cross_entropy(d.out, d.holes, label_smoothing=0.1),
        1 / 5,
        _VALID,
        1 / 5 / _VALID,
    ),
    Case(
        "smoothing sum",
        lambda d: F.cross_entropy(d.out, d.holes, label_smoothing=0.1, reduction="sum"),
        4 / 5,
        _VALID,
        1 / 5,
    ),
    Case(
        "smoothing none",
        lambda d: F.cross_entropy(d.out, d.holes, label_smoothing=0.1, reduction="none").sum() / 4,
        1 / 5,
        _VALID,
        1 / 20,
    ),
    Case("soft mean", lambda d: F.cross_entropy(d.out, d.soft), 1 / 5, N, 1 / 5 / N),
    Case("soft smoothing", lambda d: F.cross_entropy(d.out, d.soft, label_smoothing=0.1), 1 / 5, N, 1 / 5 / N),
    Case("soft sum", lambda d: F.cross_entropy(d.out, d.soft, reduction="sum") / 6, 1 / 5, N, 1 / 30),
    Case("soft none", lambda d: F.cross_entropy(d.out, d.soft, reduction="none").mean(), 1 / 5, N, 1 / 5 / N),
    # losses over elements
    Case("mse mean", lambda d: F.mse_loss(d.out, d.y), 1 / 5, _ALL, 1 / 5 / _ALL),
    Case("mse sum", lambda d: F.mse_loss(d.out, d.y, reduction="sum"), 1 / 5, _ALL, 1 / 5),
    Case("mse none mean", lambda d: F.mse_loss(d.out, d.y, reduction="none").mean(), 1 / 5, _ALL, 1 / 5 / _ALL),
    Case("l1 mean", lambda d: F.l1_loss(d.out, d.y), 1 / 5, _ALL, 1 / 5 / _ALL),
    Case("huber", lambda d: F.huber_loss(d.out, d.y), 1 / 5, _ALL, 1 / 5 / _ALL),
    Case("smooth l1", lambda d: F.smooth_l1_loss(d.out, d.y), 1 / 5, _ALL, 1 / 5 / _ALL),
    Case("bce logits", lambda d: F.binary_cross_entropy_with_logits(d.out, d.binary), 1 / 5, _ALL, 1 / 5 / _ALL),
    Case("bce", lambda d: F.binary_cross_entropy(torch.sigmoid(d.out), d.binary), 1 / 5, _ALL, 1 / 5 / _ALL),
    # a weight of zeros and ones is a mask: 16 of 24 elements count, but the mean divides by all
    Case(
        "bce masked by weight",
        lambda d: F.binary_cross_entropy_with_logits(d.out, d.binary, d.mask[:, None]),
        1 / 5,
        16,
        1 / 5 / _ALL,
    ),
    # summed over each row, then the mean over the rows: what the script calls the loss is that mean; a target weighs 1/(5 N)
    Case("bce rows", lambda d: _bce_rows(d).mean(), 1 / 5, _ALL, 1 / 5 / N),
    Case("bce rows and a term", lambda d: (_bce_rows(d) + d.out.pow(2).sum(1)).mean(), 1 / 5, _ALL, 1 / 5 / N),
    Case("bce rows halved inside", lambda d: (_bce_rows(d) / 2).mean(), 1 / 5, _ALL, 1 / 10 / N),
    Case("bce rows by their length", lambda d: (_bce_rows(d) / C).mean(), 1 / 5, _ALL, 1 / 5 / _ALL),
    Case("soft margin", lambda d: F.soft_margin_loss(d.out, d.binary * 2 - 1), 1 / 5, _ALL, 1 / 5 / _ALL),
    Case("multi margin", lambda d: F.multi_margin_loss(d.out, d.labels), 1 / 5, N, 1 / 5 / N),
    Case("poisson", lambda d: F.poisson_nll_loss(d.out, d.y.abs()), 1 / 5, _ALL, 1 / 5 / _ALL),
    Case(
        "kl mean",
        lambda d: F.kl_div(F.log_softmax(d.out, -1), d.soft, reduction="none").mean(),
        1 / 5,
        _ALL,
        1 / 5 / _ALL,
    ),
    Case(
        "kl batchmean",
        lambda d: F.kl_div(F.log_softmax(d.out, -1), d.soft, reduction="batchmean"),
        1 / 30,
        None,
        1 / 30,
    ),
    # written in the script
    Case("own mean", lambda d: _elementwise(d.out, d.y).mean(), 1 / 5, _ALL, 1 / 5 / _ALL),
    Case("own negative mean", lambda d: -(F.log_softmax(d.out, -1) * d.y).mean(), 1 / 5, _ALL, None),
    Case("own sum", lambda d: _elementwise(d.out, d.y).sum(), 1 / 5, None, 1 / 5),
    Case("own sum over elements", lambda d: _elementwise(d.out, d.y).sum() / _ALL, 1 / 5, _ALL, 1 / 5 / _ALL),
    Case(
        "own masked mean",
        lambda d: (_elementwise(d.out, d.y).mean(-1) * d.mask).sum() / d.mask.sum(),
        1 / 5,
        _VALID,
        1 / 5 / _VALID,
    ),
    Case(
        "own masked mean of elements",
        lambda d: (_elementwise(d.out, d.y) * d.mask[:, None]).sum() / (C * d.mask.sum()),
        1 / 5,
        16,
        1 / 5 / 16,
    ),
    Case(
        "masked cross entropy",
        lambda d: (F.cross_entropy(d.out, d.labels, reduction="none") * d.mask).sum() / d.mask.sum(),
        1 / 5,
        _VALID,
        1 / 5 / _VALID,
    ),
    Case(
        "selected mean",
        lambda d: F.cross_entropy(d.out, d.labels, reduction="none")[d.mask.bool()].mean(),
        1 / 5,
        _VALID,
        1 / 5 / _VALID,
    ),
    Case(
        "masked fill",
        lambda d: _elementwise(d.out, d.y).mean(-1).masked_fill(d.mask == 0, 0).sum() / 4,
        1 / 5,
        _VALID,
        1 / 5 / _VALID,
    ),
    Case(
        "where",
        lambda d: torch.where(d.mask > 0, _elementwise(d.out, d.y).mean(-1), 0.0).sum() / 4,
        1 / 5,
        _VALID,
        1 / 5 / _VALID,
    ),
    # a mask that the graph hides: the elements that count cannot be known, the weight of one can
    Case(
        "hidden mask",
        lambda d: ((d.out - d.y) * d.mask[:, None]).pow(2).sum() / (C * d.mask.sum()),
        1 / 80,
        None,
        1 / 80,
    ),
    # weights of one's own for each target: there is no single weight of a target
    Case(
        "importance weights",
        lambda d: (F.cross_entropy(d.out, d.labels, reduction="none") * d.y[:, 0].abs()).sum() / d.y[:, 0].abs().sum(),
        1 / 5,
        N,
        None,
    ),
    # a function of a mean: what the script divides is the root, not the mean below it
    Case("root of a mean", lambda d: F.mse_loss(d.out, d.y).sqrt(), 1 / 5, None, None),
    Case("logsumexp", lambda d: torch.logsumexp(d.out.flatten(), 0), 1 / 5, None, None),
]


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    """All cases in one run: a backward each."""
    torch.manual_seed(0)
    data = Data()
    seen = observe([lambda c=case: c.loss(data) / 5 for case in _CASES], data.layer)
    return dict(zip([c.name for c in _CASES], seen, strict=True))


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in _CASES])
def test_weight_count_and_weight_per_target(case: Case, rows: dict[str, dict[str, Any]]) -> None:
    """A loss divided by five shows its weight, its targets and the weight of one, or null where that cannot be known."""
    row = rows[case.name]
    expected = {"loss_weight": case.weight, "num_items": case.count, "target_weight": case.target}
    for column, value in expected.items():
        assert row[column] == (None if value is None else pytest.approx(value, rel=1e-9)), column


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name) for c in _CASES if c.name.startswith(("bce rows", "ce mean"))]
)
def test_loss_is_what_the_script_calls_the_loss(case: Case, rows: dict[str, dict[str, Any]]) -> None:
    """Undivided, whatever lies inside it: the rows are those of the same data."""
    torch.manual_seed(0)
    assert rows[case.name]["loss"] == pytest.approx(float(case.loss(Data()).detach()), rel=1e-9)


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in _CASES])
def test_divisor_is_what_the_script_divided_by(case: Case, rows: dict[str, dict[str, Any]]) -> None:
    """Five, times the divisions that the loss itself is written with."""
    own = {"soft sum": 6, "smoothing none": 4, "kl batchmean": N, "own sum over elements": _ALL, "masked fill": 4, "where": 4,
           "own masked mean": 4, "bce rows by their length": C, "own masked mean of elements": 16, "masked cross entropy": 4, "hidden mask": 16}  # fmt: skip
    if case.name != "importance weights":
        assert rows[case.name]["loss_divisor"] == pytest.approx(5 * own.get(case.name, 1))


def one(root: Any, layer: nn.Module, scaler: Any = None) -> dict[str, Any]:
    """The row of a single backward."""
    return observe([root], layer, scaler)[0]


def test_equal_terms_share_their_weight() -> None:
    """A stack of losses, averaged and divided by K: each of the two has weight 1/2 of 1/4."""
    d = Data()
    row = one(
        lambda: torch.stack([F.cross_entropy(d.out, d.labels), F.cross_entropy(d.out, d.holes)]).mean() / 4, d.layer
    )
    assert row["loss_weight"] == pytest.approx(1 / 8)
    assert json.loads(row["loss_term_weights"]) == pytest.approx([1 / 8, 1 / 8])
    assert row["loss_terms"] == 2
    assert row["num_items"] is None


def test_an_auxiliary_term_does_not_hide_the_loss_and_its_weight_is_kept() -> None:
    """(cross entropy / 4) + 0.1 * mean of squares: the weights of both terms are recorded, the loss's own is 1/4."""
    d = Data()
    row = one(lambda: F.cross_entropy(d.out, d.labels) / 4 + 0.1 * d.out.square().mean(), d.layer)
    assert row["loss_weight"] == pytest.approx(0.25)
    assert sorted(json.loads(row["loss_term_weights"])) == pytest.approx([0.1, 0.25])
    assert row["loss"] is None  # the root is a sum: the loss alone was not seen


def test_terms_of_unequal_weight_without_a_loss_node_have_no_single_weight() -> None:
    """Two means that the script wrote, added with different coefficients: null, with the reason."""
    d = Data()
    optimizer = torch.optim.SGD(d.layer.parameters(), lr=0.0)
    with stepscope.watch() as watching:
        (d.out.square().mean() + 0.1 * d.out.abs().mean()).backward()
        optimizer.step()
    trace = watching.trace
    assert trace.steps["loss_weight"].isna().all()
    assert trace.meta["not_observed"]["loss_weight"] == "several losses of different weight enter backward"


def test_the_loss_scale_is_taken_off() -> None:
    """A scaler multiplies the root by 1024; weights do not see it, and the value is the undivided loss."""
    d = Data()
    d.layer.float()
    d.x = d.x.float()
    expected = F.cross_entropy(d.out, d.holes).item()
    row = one(lambda: F.cross_entropy(d.out, d.holes) / 4, d.layer, torch.amp.GradScaler("cpu", init_scale=1024.0))
    assert row["loss_weight"] == pytest.approx(0.25)
    assert row["target_weight"] == pytest.approx(0.25 / 4)
    assert row["loss_scaled"] == pytest.approx(expected / 4 * 1024, rel=1e-6)
    assert row["loss"] == pytest.approx(expected, rel=1e-6)


class _Output(dict[str, Any]):
    """An output as libraries return them: a dict with attributes."""

    def __getattr__(self, name: str) -> Any:
        return self.get(name)


class _WithLoss(nn.Module):
    """A model that computes its own loss by a function that leaves no loss node."""

    def __init__(self, loss: Any, wrap: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(5, C, dtype=torch.float64)
        self.loss, self.wrap = loss, wrap

    def forward(self, x: torch.Tensor) -> Any:
        return self.wrap(self.loss(self.layer(x)))


class _MeanOfSquares(torch.autograd.Function):
    """A fused loss: the graph shows one opaque node."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.square().mean()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 2 * x / x.numel()


@pytest.mark.parametrize(
    "wrap",
    [
        pytest.param(lambda loss: loss, id="scalar"),
        pytest.param(lambda loss: (None, loss), id="tuple"),
        pytest.param(lambda loss: {"loss": loss}, id="dict"),
        pytest.param(lambda loss: _Output(loss=loss), id="output object"),
    ],
)
def test_a_fused_loss_that_the_model_returns(wrap: Any) -> None:
    """Weight and value are those of what the model returned; its targets are not known."""
    model = _WithLoss(_MeanOfSquares.apply, wrap)
    x = torch.randn(N, 5, dtype=torch.float64)

    def pick(output: Any) -> torch.Tensor:
        return (
            output if isinstance(output, torch.Tensor) else output[1] if isinstance(output, tuple) else output["loss"]
        )

    expected = pick(model(x)).item()
    row = one(lambda: pick(model(x)) / 3, model)
    assert row["loss_kind"] == "returned"
    assert row["loss_weight"] == pytest.approx(1 / 3)
    assert row["loss"] == pytest.approx(expected)
    assert row["num_items"] is None


def test_a_fused_loss_in_the_script() -> None:
    """An autograd function of the script's own: its weight is what the script multiplied it by."""
    d = Data()
    row = one(lambda: _MeanOfSquares.apply(d.out) / 3, d.layer)
    assert (row["loss_kind"], row["loss_weight"]) == ("custom", pytest.approx(1 / 3))
    assert row["loss"] == pytest.approx(d.out.square().mean().item())


def test_learned_weights_are_a_product_and_not_two_losses() -> None:
    """exp(-s) * loss / 2 with a learned s: what arrives at the loss is exp(-s) / 2."""
    d = Data()
    s = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
    d.layer.register_parameter("s", s)
    row = one(lambda: torch.exp(-s) * F.mse_loss(d.out, d.y) / 2, d.layer)
    assert row["loss_weight"] == pytest.approx(math.exp(-0.7) / 2)
    assert row["loss_terms"] == 1


def test_several_roots() -> None:
    """torch.autograd.backward on two losses: both are terms of one micro-step."""
    d = Data()
    optimizer = torch.optim.SGD(d.layer.parameters(), lr=0.0)
    with stepscope.watch() as watching:
        torch.autograd.backward([F.cross_entropy(d.out, d.labels) / 2, F.mse_loss(d.out, d.y) / 2])
        optimizer.step()
    row = watching.trace.steps.iloc[0]
    assert row["loss_weight"] == pytest.approx(0.5)
    assert row["loss_terms"] == 2


def test_no_valid_target() -> None:
    """All labels ignored: a NaN loss over 0 targets; a mask of zeros: a divisor of 0. Weights of targets are null."""
    d = Data()
    nothing = torch.full_like(d.labels, IGNORE)
    empty = torch.zeros_like(d.mask)
    rows = observe(
        [
            lambda: F.cross_entropy(d.out, nothing),
            lambda: (F.cross_entropy(d.out, d.labels, reduction="none") * empty).sum() / empty.sum(),
            lambda: F.cross_entropy(d.out, d.labels, reduction="none")[empty.bool()].mean(),
        ],
        d.layer,
    )
    assert all(math.isnan(r["loss"]) for r in rows)
    assert (rows[0]["num_items"], rows[0]["target_weight"]) == (0, None)
    assert (rows[1]["num_items"], rows[1]["loss_divisor"]) == (None, 0)
    assert rows[2]["num_items"] == 0


def test_nothing_that_a_checkpoint_packed_is_recomputed() -> None:
    """A loss inside a checkpointed segment: the segment runs once forward and once in backward, as without watching."""
    d = Data()
    calls = []

    def segment(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return F.cross_entropy(d.layer(x), d.labels)

    x = d.x.clone().requires_grad_()
    row = one(lambda: torch.utils.checkpoint.checkpoint(segment, x, use_reentrant=False) / 4, d.layer)
    assert len(calls) == 2
    assert row["loss_weight"] == pytest.approx(0.25)
    assert row["num_items"] is None


def test_a_compiled_model_leaves_the_loss_visible() -> None:
    """torch.compile around the model: the criterion's node is outside of it."""
    d = Data()
    compiled = torch.compile(d.layer, backend="eager")
    row = one(lambda: F.cross_entropy(compiled(d.x), d.holes) / 4, d.layer)
    assert (row["loss_weight"], row["num_items"]) == (pytest.approx(0.25), 4)


def test_a_graph_that_is_kept_carries_no_hook_into_its_second_backward() -> None:
    """retain_graph: each backward is weighed by itself."""
    d = Data()
    optimizer = torch.optim.SGD(d.layer.parameters(), lr=0.0)
    loss = F.cross_entropy(d.out, d.labels)
    with stepscope.watch() as watching:
        (loss / 2).backward(retain_graph=True)
        (loss / 3).backward()
        optimizer.step()
    assert watching.trace.steps["loss_weight"].tolist() == pytest.approx([1 / 2, 1 / 3])


def test_autograd_grad_is_no_backward_and_is_not_weighed() -> None:
    """A gradient penalty: autograd.grad runs through the loss's node before backward; the weight is backward's."""
    d = Data()

    def penalised() -> torch.Tensor:
        x = d.x.clone().requires_grad_()
        loss = F.mse_loss(d.layer(x), d.y)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss / 2 + 0.01 * gradient.norm()

    row = one(penalised, d.layer)
    assert row["loss_weight"] == pytest.approx(0.5)


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("normalise", ["mean", "window"])
def test_window_sums_of_weights(k: int, normalise: str) -> None:
    """Means divided by K, and sums divided by the window's targets, both come to one; targets of the latter weigh alike."""
    d = Data()
    parts = [d.labels if i % 2 else d.holes for i in range(k)]
    targets = sum(int((p != IGNORE).sum()) for p in parts)
    optimizer = torch.optim.SGD(d.layer.parameters(), lr=0.0)
    with stepscope.watch() as watching:
        for part in parts:
            if normalise == "mean":
                (F.cross_entropy(d.out, part) / k).backward()
            else:
                (F.cross_entropy(d.out, part, reduction="sum") / targets).backward()
        optimizer.step()
    steps = watching.trace.steps
    assert steps["loss_weight_sum"].iloc[-1] == pytest.approx(1.0)
    assert (steps["target_weight"] * steps["num_items"]).sum() == pytest.approx(1.0)
    if normalise == "window":
        assert steps["target_weight"].tolist() == pytest.approx([1 / targets] * k)
