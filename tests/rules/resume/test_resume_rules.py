"""Rules of resumed runs: each fires on its fault in several shapes, and is silent on complete resumes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.rules.loops.resume import ALL, STOP, Heads, Sitting, sample
from tests.rules.support import findings, judged, loud, record

pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning"),
    pytest.mark.filterwarnings("ignore:To get the last learning rate:UserWarning"),
]


def without(*parts: str) -> tuple[str, ...]:
    return tuple(p for p in ALL if p not in parts)


def resumed(first: Sitting, **changes):
    """What the rules find in the second sitting, given the first."""
    before = record(first)
    return judged(record(first.again(**changes)), after=before)


LATE = ("model", "optimizer", "build scheduler")

FAULTS = {
    "optimizer not saved": ("resume-optim-state-lost", Sitting(saves=without("optimizer"), schedule="none"), {}),
    "optimizer not loaded": ("resume-optim-state-lost", Sitting(schedule="none"), {"loads": without("optimizer")}),
    "momentum not loaded": ("resume-optim-state-lost", Sitting(optimizer="momentum", schedule="none"), {"loads": without("optimizer")}),
    "loaded, then rebuilt": ("resume-optim-state-lost", Sitting(schedule="none"), {"rebuild": True}),
    "not loaded, pickled": ("resume-optim-state-lost", Sitting(schedule="none", writer="pickle"), {"loads": without("optimizer")}),
    "not loaded, files apart": ("resume-optim-state-lost", Sitting(schedule="none", writer="apart"), {"loads": without("optimizer")}),
    "heads in another order": ("resume-optim-state-mismatch", Sitting(schedule="none"), {"order": ("c", "b", "a")}),
    "heads in another order, momentum": ("resume-optim-state-mismatch", Sitting(optimizer="momentum"), {"order": ("b", "a", "c")}),
    "scheduler not saved, linear": ("resume-sched-not-restored", Sitting(saves=without("scheduler")), {}),
    "scheduler not loaded, cosine": ("resume-sched-not-restored", Sitting(schedule="cosine"), {"loads": without("scheduler")}),
    "scheduler not loaded, step": ("resume-sched-not-restored", Sitting(schedule="step"), {"loads": without("scheduler")}),
    "rate by hand from step 0": ("resume-sched-not-restored", Sitting(schedule="hand", data="random"), {"position": False}),
    "scheduler not loaded, stateless optimizer": ("resume-sched-not-restored", Sitting(optimizer="sgd"), {"loads": without("scheduler", "optimizer")}),
    "scheduler built after the load": ("resume-lr-reset-by-ctor", Sitting(), {"loads": LATE}),
    "one-cycle built, then loaded": ("resume-lr-reset-by-ctor", Sitting(schedule="one-cycle"), {"loads": (*LATE, "scheduler")}),
    "scheduler told a wrong position": ("resume-sched-not-restored", Sitting(), {"loads": LATE, "told": 1}),
    "scaler not saved": ("scaler-not-checkpointed", Sitting(amp=True, saves=without("scaler")), {}),
    "scaler not loaded": ("scaler-not-checkpointed", Sitting(amp=True, schedule="cosine"), {"loads": without("scaler")}),
    "weights in float16": ("resume-weights-half", Sitting(weights=torch.float16), {}),
    "weights in bfloat16": ("resume-weights-half", Sitting(weights=torch.bfloat16, optimizer="momentum"), {}),
    "weights in float16, pickled": ("resume-weights-half", Sitting(weights=torch.float16, writer="pickle"), {}),
    "dummy step after the weights": ("resume-load-steps-optimizer", Sitting(), {"dummy": "after"}),
    "dummy step on nothing": ("resume-load-steps-optimizer", Sitting(), {"dummy": "after on nothing"}),
    "position lost, indexed": ("resume-rng-sampler", Sitting(schedule="none"), {"position": False}),
    "position lost, shuffled": ("resume-rng-sampler", Sitting(data="shuffled"), {"position": False}),
    "random state lost": ("resume-rng-sampler", Sitting(data="random"), {"loads": without("rng")}),
}  # fmt: skip


@pytest.mark.parametrize("shape", FAULTS)
def test_fault_is_named_alone(shape):
    name, first, changes = FAULTS[shape]
    found = resumed(first, **changes)
    assert name in found, f"reported { ({n: f.message for n, f in found.items()}) }"
    assert list(loud(found)) == [name]


RIGHT = {
    "adam, linear": (Sitting(), {}),
    "momentum, cosine": (Sitting(optimizer="momentum", schedule="cosine"), {}),
    "sgd, step": (Sitting(optimizer="sgd", schedule="step"), {}),
    "stateless optimizer that is not saved": (Sitting(optimizer="sgd", schedule="none", saves=("model",)), {}),
    "exponential, whose counter does not matter": (Sitting(schedule="exponential"), {"loads": without("scheduler")}),
    "one-cycle": (Sitting(schedule="one-cycle"), {}),
    "by hand": (Sitting(schedule="hand"), {}),
    "built late, but loaded after": (Sitting(schedule="linear"), {"loads": ("model", "build scheduler", "optimizer", "scheduler")}),
    "built late and told its position": (Sitting(), {"loads": LATE, "told": STOP - 1}),
    "scaler": (Sitting(amp=True), {}),
    "pickled": (Sitting(writer="pickle"), {}),
    "files apart": (Sitting(writer="apart"), {}),
    "dummy step before the weights": (Sitting(), {"dummy": "before"}),
    "shuffled, with its position": (Sitting(data="shuffled"), {}),
    "fixed order, next epoch": (Sitting(data="fixed", stop=16), {}),
    "fixed order of a loader, second epoch": (Sitting(data="fixed", stop=8), {"start": 8, "stop": 16}),
    "random draws, restored": (Sitting(data="random", dropout=0.3), {}),
    "resumed from a save in the middle": (Sitting(saves_at=(8,)), {}),
    "resumed from the first of two saves": (Sitting(saves_at=(6,), stop=16, data="shuffled"), {}),
    "another rate on purpose": (Sitting(schedule="none"), {"lr": 0.002, "set_lr": 0.002}),
}  # fmt: skip


@pytest.mark.parametrize("shape", RIGHT)
def test_complete_resume_is_silent(shape):
    first, changes = RIGHT[shape]
    assert not loud(resumed(first, **changes))


def test_lost_state_says_how_far_the_counters_were():
    found = resumed(Sitting(schedule="none"), loads=without("optimizer"))["resume-optim-state-lost"]
    assert (found.severity, found.evidence["observed"], found.evidence["expected"]) == ("error", 0, STOP)
    assert len(found.evidence["params"]) == 8  # trunk and three heads, weight and bias


def test_moved_state_says_whose_it_is():
    found = resumed(Sitting(schedule="none"), order=("c", "b", "a"))["resume-optim-state-mismatch"]
    pairs = {row["param"]: row["state_of"] for row in found.evidence["rows_of_state"]}
    assert pairs == {
        f"heads.{new}.{kind}": f"heads.{old}.{kind}" for new, old in ("ca", "ac") for kind in ("weight", "bias")
    }


def test_scale_is_told_as_saved_and_as_found():
    """Growth every 5 clean steps from 2^8: two growths in 12 steps make 2^10; the second sitting begins at 2^12."""
    found = resumed(Sitting(amp=True), loads=without("scaler"))["scaler-not-checkpointed"]
    assert (found.evidence["observed"], found.evidence["expected"]) == (2.0**12, 2.0**10)


def test_equal_scale_by_chance_is_told_by_the_tracker():
    """The scale of both sittings is 2^12 where the first never grew: 12 clean steps counted, and 0 after the resume."""

    def sitting(load, held={}):  # noqa: B006 - the disk of this test
        def loop():
            torch.manual_seed(0)
            model = Heads(("a",), 0.0)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
            if load:
                model.load_state_dict(held["model"])
            for step in range(12):
                x, y = sample(torch.Generator().manual_seed(step + 100 * load))
                scaler.scale(F.mse_loss(model(x), y[:, :1])).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            torch.save({"model": model.state_dict()}, "/dev/null")
            held["model"] = {k: v.clone() for k, v in model.state_dict().items()}

        return loop

    before = record(sitting(False))
    found = judged(record(sitting(True)), after=before)["scaler-not-checkpointed"]
    assert (found.evidence["observed"], found.evidence["expected"]) == (0.0, 12.0)


def test_rate_reset_by_a_constructor_says_both_rates():
    """linear(24, 4) at 12 is 12/20 of 0.01; LambdaLR's constructor writes 1/5 of it."""
    found = resumed(Sitting(), loads=LATE)["resume-lr-reset-by-ctor"]
    assert found.evidence["expected"] == pytest.approx(0.006)
    assert found.evidence["observed"] == pytest.approx(0.002)
    assert found.evidence["also"] == ["resume-sched-not-restored"]


def test_discarded_rate_is_a_notice():
    found = resumed(Sitting(schedule="none"), lr=0.002)
    assert not loud(found)
    assert (
        found["resume-lr-overwritten"].evidence["observed"],
        found["resume-lr-overwritten"].evidence["expected"],
    ) == (0.01, 0.002)


def test_dummy_step_tells_the_change():
    """AdamW with zero gradients: every weight shrinks by lr * decay = 0.001 of itself."""
    before = record(first := Sitting(schedule="none"))
    found = judged(record(first.again(dummy="after")), after=before)["resume-load-steps-optimizer"]
    model = Heads(("a", "b", "c"), 0.0)
    model.load_state_dict(
        torch.load(__import__("io").BytesIO(first.disk["file"]))["model"]
    )  # what the second sitting saved
    saved = [e["detail"] for e in before.details("saved", "ended")][-1]
    norm = sum(float(v) ** 2 for v in saved["norms"].values()) ** 0.5
    assert found.evidence["observed"] == pytest.approx(0.001 * norm, rel=1e-3)


def test_repeated_batches_are_counted():
    found = resumed(Sitting(schedule="none"), position=False)["resume-rng-sampler"]
    assert found.evidence["count"] == STOP
    assert (found.evidence["observed"], found.evidence["expected"]) == (1, STOP + 1)


def test_lost_random_state_shows_in_the_loss():
    """The earlier run went on after its save: the same batch with the same weights has another loss under dropout."""
    found = resumed(Sitting(saves_at=(8,), dropout=0.5), start=8, loads=without("rng"))["resume-rng-sampler"]
    assert "random state" in found.message


def test_unrelated_run_is_skipped_with_the_reason():
    from stepscope.rules.engine import judge

    def other():
        torch.manual_seed(1)
        model = Heads(("a", "b", "c"), 0.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(4):
            x, y = sample(torch.Generator().manual_seed(step))
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    before = record(Sitting())
    outcomes = {o.name: o for o in judge(record(other), after=before)}
    assert outcomes["resume-optim-state-lost"].status == "skipped"
    assert "none of the states" in outcomes["resume-optim-state-lost"].reason


def recreated(times: int, *, reset: str = "", momentum: float = 0.9, keep: bool = False, phases: bool = False):
    """An optimizer that is built anew for each call; `reset` gives new weights, `keep` carries the state over."""

    def loop():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        start = {k: v.clone() for k, v in model.state_dict().items()}
        state = None
        for part in range(times):
            if reset == "load" and part:
                model.load_state_dict(start)
            elif reset == "model":
                model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
            elif reset == "parameters" and part:
                for layer in (model[0], model[2]):
                    layer.reset_parameters()
            params = list(model[2].parameters()) if phases and not part else list(model.parameters())
            optimizer = torch.optim.SGD(params, lr=0.01, momentum=momentum)
            if keep and state is not None:
                optimizer.load_state_dict(state)
            for step in range(5):
                x, y = sample(torch.Generator().manual_seed(part * 5 + step))
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
            state = optimizer.state_dict()

    return loop


def test_recreated_optimizer_is_named():
    """Four objects on the same parameters: the second begins at micro-step 6, the third at 11, the fourth at 16."""
    found = findings(recreated(4))["optimizer-recreated"]
    assert (found.severity, found.evidence["observed"]) == ("warning", 4)
    assert found.evidence["micro_steps"] == [6, 11, 16]


def test_one_new_optimizer_is_a_notice():
    assert findings(recreated(2))["optimizer-recreated"].severity == "notice"


@pytest.mark.parametrize(
    "options",
    [
        {"reset": "load"},
        {"reset": "model"},
        {"reset": "parameters"},
        {"momentum": 0.0},
        {"keep": True},
        {"phases": True, "times": 2},
    ],
    ids=str,
)
def test_new_optimizers_that_are_right(options):
    assert "optimizer-recreated" not in findings(recreated(**{"times": 4, **options}))
