"""Rules of accumulation: each fires on its fault in several shapes, and is silent on loops that look like it."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

import stepscope
from stepscope.watch.printed import listen_for_losses
from tests.rules.loops import accumulation as loops
from tests.rules.loops.accumulation import accumulate, by_window, classes, constant, divided_by, each_nth, never_flushed
from tests.rules.support import findings, judged, loud, record

K4 = {"accumulation_steps": 4}
TARGETS = {"loss_average": "targets"}
smoothed = functools.partial(F.cross_entropy, label_smoothing=0.1)

FAULTS = {
    # name: (finding, severity, loop, declared)
    "undivided": ("accum-missing-divide", "error", accumulate(weight=constant(1.0)), K4),
    "undivided, adam and clip": (
        "accum-missing-divide",
        "error",
        accumulate(weight=constant(1.0), clip=0.5, optimizer=torch.optim.AdamW),
        K4,
    ),
    "undivided, scaler": ("accum-missing-divide", "error", accumulate(weight=constant(1.0), clip=0.5, scaler=True), K4),
    "undivided, smoothed": ("accum-missing-divide", "error", accumulate(weight=constant(1.0), criterion=smoothed), K4),
    "undivided, own mean": (
        "accum-missing-divide",
        "error",
        accumulate(weight=constant(1.0), criterion=loops.squares),
        K4,
    ),
    "undivided, three": (
        "accum-missing-divide",
        "error",
        accumulate(weight=constant(1.0), boundary=each_nth(3), batches=classes(9), loader=True),
        {"accumulation_steps": 3},
    ),
    "undivided, nothing declared": ("accum-missing-divide", "notice", accumulate(weight=constant(1.0)), {}),
    "undivided, mean of two terms": (
        "accum-missing-divide",
        "error",
        accumulate(weight=constant(1.0), criterion=loops.mean_of_two),
        K4,
    ),
    "undivided, sum of two terms": (
        "accum-missing-divide",
        "error",
        accumulate(weight=constant(1.0), criterion=loops.sum_of_two),
        K4,
    ),
    "divided twice, mean of two terms": (
        "accum-double-divide",
        "error",
        accumulate(weight=constant(1 / 16), criterion=loops.mean_of_two),
        K4,
    ),
    "divided twice": ("accum-double-divide", "error", accumulate(weight=constant(1 / 16)), K4),
    "divided twice, scaler": ("accum-double-divide", "error", accumulate(weight=constant(1 / 16), scaler=True), K4),
    "divided twice, three": (
        "accum-double-divide",
        "error",
        accumulate(weight=constant(1 / 9), boundary=each_nth(3), batches=classes(9), criterion=loops.squares),
        {"accumulation_steps": 3},
    ),
    "divided twice, on the gradient": ("accum-double-divide", "error", accumulate(before_step=divided_by(4)), K4),
    "divided twice, through data and clipped": (
        "accum-double-divide",
        "error",
        accumulate(before_step=divided_by(4, "data"), clip=10.0),
        K4,
    ),
    "token means": ("accum-token-mean", "warning", loops.token_loop("mean"), {}),
    "token means by hand": ("accum-token-mean", "warning", loops.token_loop("masked"), {}),
    "token means, scaler": ("accum-token-mean", "warning", loops.token_loop("mean", scaler=True, k=2), {}),
    "token means that hardly differ": ("accum-token-mean", "notice", loops.token_loop("mean", lengths=(9, 10, 9)), {}),
    "token means, declared": ("accum-token-mean", "warning", loops.token_loop("mean", lengths=(9, 10, 9)), TARGETS),
    "padding counted": ("accum-denominator-wrong", "warning", loops.token_loop("numel"), TARGETS),
    "labels not shifted": (
        "accum-denominator-wrong",
        "warning",
        loops.token_loop("unshifted", k=1, windows=8),
        TARGETS,
    ),
    "labels not shifted, scaler": (
        "accum-denominator-wrong",
        "warning",
        loops.token_loop("unshifted", scaler=True),
        TARGETS,
    ),
    "first window of one": ("accum-boundary-off-by-one", "error", accumulate(boundary=lambda i, n: i % 4 == 0), {}),
    "first window of one, loader": (
        "accum-boundary-off-by-one",
        "error",
        accumulate(boundary=lambda i, n: i % 4 == 0, loader=True, clear="both"),
        {},
    ),
    "first window of one, odd epochs": (
        "accum-boundary-off-by-one",
        "error",
        accumulate(boundary=lambda i, n: i % 4 == 0, batches=classes(10), loader=True, scaler=True, clip=1.0),
        {},
    ),
    "counted from one": (
        "accum-boundary-off-by-one",
        "error",
        accumulate(boundary=lambda i, n: (i + 2) % 4 == 0, counter=True, criterion=loops.squares),
        {},
    ),
    "one too many first": (
        "accum-boundary-off-by-one",
        "error",
        accumulate(boundary=lambda i, n: i > 0 and i % 4 == 0, counter=True),
        {},
    ),
    "inverted": ("accum-boundary-off-by-one", "error", accumulate(boundary=lambda i, n: (i + 1) % 4 != 0), {}),
    "inverted, rows summed": (
        "accum-boundary-off-by-one",
        "error",
        accumulate(boundary=lambda i, n: (i + 1) % 4 != 0, criterion=loops.elements_per_row),
        {},
    ),
    "all one too long": (
        "accum-boundary-off-by-one",
        "error",
        accumulate(boundary=lambda i, n: i % 5 == 4, batches=classes(20), counter=True),
        {},
    ),
    "without weights": (
        "accum-boundary-off-by-one",
        "error",
        accumulate(
            weight=constant(1.0),
            boundary=lambda i, n: i % 4 == 0,
            counter=True,
            criterion=functools.partial(F.mse_loss, reduction="sum"),
            model=lambda: torch.nn.Linear(5, 1),
            batches=[(x, x[:, :1]) for x, _ in classes(8)],
        ),
        {},
    ),
    "cleared at the top": ("accum-zero-grad-inside", "error", accumulate(clear="top"), {}),
    "cleared at the top to zeros": (
        "accum-zero-grad-inside",
        "error",
        accumulate(clear="top", to_none=False, clip=1.0),
        {},
    ),
    "cleared at the top, scaler": (
        "accum-zero-grad-inside",
        "error",
        accumulate(clear="top", scaler=True, clip=1.0),
        {},
    ),
    "cleared at the top, pairs": (
        "accum-zero-grad-inside",
        "error",
        accumulate(clear="top", weight=constant(0.5), boundary=each_nth(2), loader=True),
        {},
    ),
    "cleared at the top, undivided": (
        "accum-zero-grad-inside",
        "error",
        accumulate(clear="top", weight=constant(1.0)),
        K4,
    ),
    "never stepped": (
        "accum-tail-dropped",
        "warning",
        accumulate(weight=constant(1.0), boundary=lambda i, n: False, clear="never"),
        {},
    ),
    "tail cleared": (
        "accum-tail-dropped",
        "error",
        accumulate(boundary=never_flushed(4), batches=classes(10), clear="both", loader=True),
        {},
    ),
    "tail cleared, list": (
        "accum-tail-dropped",
        "error",
        accumulate(boundary=never_flushed(4), batches=classes(11), clear="both", criterion=loops.squares),
        {},
    ),
    "tail cleared, scaler": (
        "accum-tail-dropped",
        "error",
        accumulate(
            boundary=never_flushed(3), weight=constant(1 / 3), batches=classes(7), clear="both", scaler=True, clip=1.0
        ),
        {},
    ),
    "tail left at the end": (
        "accum-tail-dropped",
        "error",
        accumulate(boundary=never_flushed(4), batches=classes(10), epochs=1),
        {},
    ),
    "epoch shorter than a window": (
        "accum-tail-dropped",
        "error",
        accumulate(boundary=never_flushed(4), batches=classes(3), clear="both", loader=True),
        {},
    ),
    "tail leaks": (
        "accum-tail-leak",
        "error",
        accumulate(boundary=never_flushed(4), batches=classes(10), loader=True),
        {},
    ),
    "tail leaks, list": (
        "accum-tail-leak",
        "error",
        accumulate(boundary=never_flushed(4), batches=classes(10), epochs=4),
        {},
    ),
    "tail leaks, scaler": (
        "accum-tail-leak",
        "error",
        accumulate(
            boundary=never_flushed(3), weight=constant(1 / 3), batches=classes(7), loader=True, scaler=True, clip=1.0
        ),
        {},
    ),
    "tail leaks, one window an epoch": (
        "accum-tail-leak",
        "error",
        accumulate(boundary=never_flushed(4), batches=classes(5), loader=True, epochs=4),
        {},
    ),
    "tail divided by K": ("accum-tail-misweighted", "warning", accumulate(batches=classes(10)), K4),
    "tail divided by K, loader": (
        "accum-tail-misweighted",
        "warning",
        accumulate(batches=classes(11), loader=True, scaler=True),
        K4,
    ),
    "tail divided by K on the gradient": (
        "accum-tail-misweighted",
        "warning",
        accumulate(weight=constant(1.0), batches=classes(10), before_step=divided_by(4), clip=10.0),
        K4,
    ),
    "tail divided by K, summed losses": (
        "accum-tail-misweighted",
        "warning",
        accumulate(criterion=functools.partial(F.cross_entropy, reduction="sum"), batches=classes(10), loader=True),
        K4,
    ),
    "tail divided by K, nothing declared": (
        "accum-tail-misweighted",
        "notice",
        accumulate(batches=classes(10), loader=True),
        {},
    ),
    "steps in backward": ("optim-in-backward", "warning", loops.stepping_in_backward(k=4, weight=0.25), K4),
    "steps in backward, undivided": ("optim-in-backward", "warning", loops.stepping_in_backward(k=4, weight=1.0), K4),
}

RIGHT = {
    "divided": (accumulate(), K4),
    "divided, scaler and clip": (accumulate(scaler=True, clip=0.1), K4),
    "divided by the window": (accumulate(weight=by_window(4), batches=classes(10), loader=True), K4),
    "divided by the window, list": (accumulate(weight=by_window(4), batches=classes(11)), K4),
    "divided late": (accumulate(weight=constant(1.0), before_step=divided_by(4)), K4),
    "divided late through data": (accumulate(weight=constant(1.0), before_step=divided_by(4, "data"), clip=1.0), K4),
    "divided late into new tensors": (
        accumulate(weight=constant(1.0), before_step=divided_by(4, "new"), scaler=True),
        K4,
    ),
    "divided late, foreach": (accumulate(weight=constant(1.0), before_step=divided_by(4, "foreach"), clip=0.1), K4),
    "own mean": (accumulate(criterion=loops.squares, optimizer=torch.optim.Adam), K4),
    "mean of two terms": (accumulate(criterion=loops.mean_of_two), K4),
    "mean of two terms, not declared": (accumulate(criterion=loops.mean_of_two), {}),
    "mean of two terms, each its own window": (
        accumulate(weight=constant(1.0), boundary=each_nth(1), criterion=loops.mean_of_two),
        {"accumulation_steps": 1},
    ),
    "sum of two terms": (accumulate(criterion=loops.sum_of_two), K4),
    "sum of two terms, by the window": (
        accumulate(weight=by_window(4), batches=classes(10), loader=True, criterion=loops.sum_of_two),
        K4,
    ),
    "cleared at the start of each window": (accumulate(clear="both"), K4),
    "windows over the end of an epoch": (accumulate(batches=classes(6), counter=True, loader=True, epochs=4), K4),
    "sums over the window's targets": (loops.token_loop("window"), K4 | TARGETS),
    "shares of the window's targets": (loops.token_loop("share"), K4 | TARGETS),
    "sums divided late": (loops.token_loop("late"), K4 | TARGETS),
    "equal numbers of targets": (loops.token_loop("mean", lengths=(5,)), K4),
    "sum kept elsewhere": (loops.main_grad(), K4),
    "batch dropped by a guard": (accumulate(guard=lambda i: i == 9, epochs=6), {}),
    "window dropped by a guard": (
        accumulate(weight=constant(1.0), boundary=each_nth(1), guard=lambda i: i in (3, 11, 12)),
        {},
    ),
    "two tasks": (loops.multi_task(), {}),
    "labelled and unlabelled": (loops.labelled_and_unlabelled(), {}),
    "an optimizer whose turn does not come": (loops.critic_in_waiting(), {}),
    "two tasks of half weight": (loops.multi_task(0.5), {}),
    "pixels and images": (loops.two_heads(), {}),
    "growing windows": (loops.growing_windows(), {}),
    "growing windows of undivided losses": (loops.growing_windows(weight=1.0), {}),
    "a coefficient and no accumulation": (accumulate(weight=constant(0.5), boundary=each_nth(1)), {}),
    "a coefficient and a guard": (
        accumulate(weight=constant(0.5), boundary=each_nth(1), guard=lambda i: i in (4, 7)),
        {},
    ),
    "smaller last batch": (loops.smaller_last_batch(), {}),
    "smaller last batch, three": (loops.smaller_last_batch(k=3, n=48, batch_size=9), {}),
    "steps in backward without accumulation": (loops.stepping_in_backward(k=1, weight=1.0, windows=8), {}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fires_on_the_fault_and_on_nothing_else(name: str) -> None:
    kind, severity, loop, declared = FAULTS[name]
    found = findings(loop, declared)
    assert {n: f.severity for n, f in found.items() if f.severity != "notice" or n == kind} == {kind: severity}


@pytest.mark.parametrize("name", RIGHT)
def test_silent_on_right_loops(name: str) -> None:
    loop, declared = RIGHT[name]
    assert loud(findings(loop, declared)) == {}


def printing(logged: str, *, k: int = 4, every: int = 4) -> loops.Loop:
    """A loop that prints its loss. `logged` says what: ``mean`` of the raw losses since the last print, ``divided`` (the
    mean of the divided ones), ``sum`` of the divided ones over the window, ``last`` raw one, ``last divided``, ``smoothed``."""

    def loop() -> None:
        torch.manual_seed(0)
        net = loops.classifier()
        opt = torch.optim.SGD(net.parameters(), lr=1e-2)
        raw: list[float] = []
        smooth = 0.0
        for i, (x, y) in enumerate(classes(24)):
            loss = F.cross_entropy(net(x), y)
            (loss / k).backward()
            raw.append(loss.item())
            smooth = raw[-1] if i == 0 else 0.9 * smooth + 0.1 * raw[-1]
            if (i + 1) % k == 0:
                opt.step()
                opt.zero_grad()
            if (i + 1) % every == 0:
                mean = sum(raw[-every:]) / every
                values = {
                    "mean": mean,
                    "divided": mean / k,
                    "sum": sum(raw[-k:]) / k,
                    "last": raw[-1],
                    "last divided": raw[-1] / k,
                    "smoothed": smooth,
                    "summed": sum(raw[-k:]),
                }
                print(f"step {i + 1} train loss {values[logged]:.4f}")

    return loop


@pytest.mark.parametrize(
    ("logged", "every", "expected"),
    [
        ("mean", 4, None),
        ("sum", 8, None),
        ("last", 6, None),
        ("smoothed", 8, None),
        ("divided", 4, 1 / 4),
        ("divided", 12, 1 / 4),
        ("last divided", 4, 1 / 4),
        ("summed", 4, 4.0),
    ],
)
def test_logged_loss(logged: str, every: int, expected: float | None) -> None:
    """A value that only fits the recorded losses after multiplication by K is a fault of the log, and of nothing else."""
    declared = {"accumulation_steps": 4, "logged_loss": "train loss ([0-9.]+)"}
    watching = stepscope.watch(declare=declared)
    with watching, listen_for_losses(declared["logged_loss"], watching.note):
        printing(logged, every=every)()
    found = judged(watching.trace, declared)
    assert set(loud(found)) == (set() if expected is None else {"accum-loss-misreported"})
    if expected is not None:
        evidence = found["accum-loss-misreported"].evidence
        assert evidence["observed"] / evidence["expected"] == pytest.approx(expected, rel=0.3)


def resumed(divisor: float, *, tail: float | None = None) -> loops.Loop:
    """The rest of a run: windows of four whose losses are divided by four at first, then by `divisor`."""
    weights = [0.25] * 4 + [1.0 / divisor if divisor else float("inf")] * 8
    n = len(weights) + (2 if tail else 0)
    weights += [1.0 / tail] * 2 if tail else []
    return accumulate(batches=classes(n), epochs=1, weight=lambda i, _: weights[i], boundary=each_nth(4))


@pytest.mark.parametrize(
    ("divisor", "tail", "fires"),
    [(4, None, False), (4, 2, False), (2, None, True), (1, None, True), (2, 2, True), (0, None, True)],
)
def test_divisor_after_a_resume(divisor: float, tail: float | None, fires: bool) -> None:
    """Windows after the resume must weigh what they weighed before it; consequences are told there and not beside it."""
    found = judged(record(resumed(divisor, tail=tail), K4), K4, after=record(accumulate(), K4))
    assert ("resume-accum-factor" in loud(found)) is fires
    assert not {n for n in loud(found) if n.startswith("accum-")}
    if fires and divisor:
        assert found["resume-accum-factor"].evidence["observed"] == pytest.approx(4 / divisor)


def test_numbers_in_the_evidence() -> None:
    """Sums of weights, factors and micro-steps, against hand-computed values."""
    twice = findings(accumulate(weight=constant(1 / 16)), K4)["accum-double-divide"]
    assert twice.evidence["observed"] == pytest.approx(1 / 4)
    undivided = findings(accumulate(weight=constant(1.0)), K4)["accum-missing-divide"]
    assert undivided.evidence["observed"] == pytest.approx(4.0)
    assert undivided.evidence["micro_steps"] == [4, 8, 12, 16, 20, 24]
    tail = findings(accumulate(batches=classes(10)), K4)["accum-tail-misweighted"]
    assert tail.evidence["observed"] == pytest.approx(2 / 4)
    assert tail.evidence["micro_steps"] == [10, 20, 30]
    leak = findings(accumulate(boundary=never_flushed(4), batches=classes(10), loader=True))["accum-tail-leak"]
    assert leak.evidence["observed"] == pytest.approx(6 / 4)
    assert leak.evidence["micro_steps"] == [14, 24]
    dropped = findings(accumulate(boundary=never_flushed(4), batches=classes(10), clear="both", loader=True))
    assert dropped["accum-tail-dropped"].evidence["micro_steps"] == [9, 10, 19, 20, 29, 30]
    inside = findings(accumulate(clear="top"))["accum-zero-grad-inside"]
    assert inside.evidence["observed"] == pytest.approx(1 / 4)


def test_spread_of_token_weights_is_the_ratio_of_the_counts() -> None:
    """Windows of (6, 18, 10, 4), (14, 6, 18, 10), ... targets, two rows each: the largest ratio is 18 / 4."""
    found = findings(loops.token_loop("mean"))["accum-token-mean"]
    assert found.evidence["observed"] == pytest.approx(18 / 4)


def test_denominator_is_recovered() -> None:
    """All positions of a window of four batches of 2 x 10 are 80; 19 targets a row pair and window count."""
    found = findings(loops.token_loop("numel"), TARGETS)["accum-denominator-wrong"]
    assert found.evidence["observed"] == pytest.approx(80)
    assert found.evidence["expected"] == 2 * (3 + 9 + 5 + 2)
