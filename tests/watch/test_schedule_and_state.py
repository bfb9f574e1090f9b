"""What the trace holds of schedulers, checkpoints and the start of a run, against independent computation."""

from __future__ import annotations

import io
import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedulers

import stepscope

pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning"),
    pytest.mark.filterwarnings("ignore:To get the last learning rate:UserWarning"),
]


def net() -> nn.Module:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def train(model, optimizer, steps, after=lambda step: None, start=0):
    for step in range(start, start + steps):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        F.mse_loss(model(x), x[:, :1]).backward()
        optimizer.step()
        after(step)


def naive_fingerprint(tensor: torch.Tensor) -> int:
    """Element i's bits as a signed integer, times (i mod 65521) + 1, summed modulo 2^64; Python integers only."""
    bits = tensor.detach().numpy().reshape(-1).view(f"i{tensor.element_size()}").tolist()
    total = sum(b * (i % 65521 + 1) for i, b in enumerate(bits)) % (1 << 64)
    return total - (1 << 64) if total >= 1 << 63 else total


def only(trace, event):
    found = trace.details(event)
    assert len(found) == 1, [e["detail"] for e in found]
    return found[0]


def test_rate_is_the_one_of_the_step_and_not_of_the_next():
    """Exponential decay by 0.9: step s runs at 0.1 * 0.9^s, whatever the scheduler has written since."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = schedulers.ExponentialLR(optimizer, 0.9)
    with stepscope.watch(model, optimizer, scheduler=scheduler) as w:
        train(model, optimizer, 5, lambda _: scheduler.step())
    assert w.trace.values("lr") == pytest.approx([0.1 * 0.9**s for s in range(5)], rel=1e-12)


def test_rate_held_in_a_tensor_is_read_when_the_step_runs():
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))
    scheduler = schedulers.ExponentialLR(optimizer, 0.5)
    with stepscope.watch(model, optimizer) as w:
        train(model, optimizer, 4, lambda _: scheduler.step())
    assert w.trace.values("lr") == pytest.approx([0.1, 0.05, 0.025, 0.0125], rel=1e-6)


def test_steps_are_counted_from_outside_and_by_scheduler():
    """SequentialLR steps its parts itself: one call. Two schedulers: two calls by two schedulers."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = [schedulers.LinearLR(optimizer, 0.1, total_iters=2), schedulers.ExponentialLR(optimizer, 0.9)]
    sequence = schedulers.SequentialLR(optimizer, parts, milestones=[2])
    other = schedulers.StepLR(optimizer, 100)

    def after(step):
        sequence.step()
        if step == 2:
            other.step()
            other.step()

    with stepscope.watch(model, optimizer) as w:
        train(model, optimizer, 4, after)
    assert w.trace.values("scheduler_steps").tolist() == [1, 1, 3, 1]
    assert w.trace.values("schedulers_stepped").tolist() == [1, 1, 2, 1]
    assert w.trace.values("scheduler_position").tolist() == [1, 2, 2, 4]


def test_constructor_of_a_scheduler_is_described_with_the_rates_before_and_after():
    with stepscope.watch() as w:
        optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
        schedulers.LambdaLR(optimizer, lambda s: 0.25 + s)
    built = only(w.trace, "scheduler_built")["detail"]
    assert (built["lr_before"], built["lr"], built["class"]) == ([0.1], [0.025], "LambdaLR")
    assert built["settings"]["base_lrs"] == [0.1]


def test_milestones_are_listed_in_order_and_as_often_as_given():
    with stepscope.watch() as w:
        optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
        schedulers.MultiStepLR(optimizer, [7, 3, 3])
    assert only(w.trace, "scheduler_built")["detail"]["settings"]["milestones"] == [3, 3, 7]


def test_rate_asked_for_outside_of_a_step_is_noted_where_it_differs():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = schedulers.StepLR(optimizer, 2, gamma=0.1)
    with stepscope.watch(model, optimizer) as w:
        train(model, optimizer, 3, lambda _: (scheduler.step(), scheduler.get_lr()))
    noted = only(w.trace, "rate_of_a_further_step")
    assert noted["micro_step"] == 2
    assert (noted["detail"]["returned"], noted["detail"]["held"]) == ([pytest.approx(1e-3)], [pytest.approx(1e-2)])


def test_scheduler_of_an_idle_optimizer_is_told_once():
    model = net()
    with stepscope.watch() as w:
        idle = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = schedulers.ExponentialLR(idle, 0.9)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, optimizer, 8, lambda _: scheduler.step())
    told = only(w.trace, "scheduler_of_idle_optimizer")
    assert told["optimizer"] == "SGD/0"
    assert told["detail"]["others"] == [{"optimizer": "SGD/1", "attempts": 3, "shared": 4}]


def test_save_holds_fingerprints_of_weights_and_state_by_name():
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    kept = {}

    def after(step):
        if step == 2:
            torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, io.BytesIO())
            kept.update(
                {n: (p.detach().clone(), optimizer.state[p]["exp_avg"].clone()) for n, p in model.named_parameters()}
            )

    with stepscope.watch(model, optimizer) as w:
        train(model, optimizer, 5, after)
    saved = only(w.trace, "saved")
    assert (saved["micro_step"], saved["detail"]["attempts"], saved["detail"]["lr"]) == (3, 3, [0.1])
    for name, (weight, moment) in kept.items():
        assert saved["detail"]["params"][name] == naive_fingerprint(weight)
        assert saved["detail"]["state"][name]["exp_avg"] == naive_fingerprint(moment)
        assert saved["detail"]["state"][name]["step"] == 3
        assert saved["detail"]["norms"][name] == pytest.approx(float(np.linalg.norm(weight.numpy().astype(np.float64))))
    assert only(w.trace, "saved_again")["detail"]["holds"] == ["optimizer", "tensors"]


def test_checkpoint_of_another_writer_is_seen_by_its_state_dict():
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with stepscope.watch(model, optimizer) as w:
        train(model, optimizer, 2)
        optimizer.state_dict()
        train(model, optimizer, 1, start=2)
    assert only(w.trace, "saved")["micro_step"] == 2
    assert only(w.trace, "ended")["micro_step"] == 3


def test_weights_that_survive_rounding_are_flagged():
    model = net()
    with torch.no_grad():
        model[0].weight.copy_(model[0].weight.half())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stepscope.watch(model, optimizer) as w:
        train(model, optimizer, 1)
    started = only(w.trace, "started")["detail"]
    assert started["float16"] == {"0.weight": True, "0.bias": False, "2.weight": False, "2.bias": False}
    assert not any(started["bfloat16"].values())


def test_scale_and_tracker_are_those_of_the_moment():
    """Growth after 3 clean steps: at the save after the 4th, the scale has doubled and one clean step is counted."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    with stepscope.watch(model, optimizer, scaler=scaler) as w:
        for step in range(5):
            x = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
            scaler.scale(F.mse_loss(model(x), x[:, :1])).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if step == 3:
                torch.save(model.state_dict(), io.BytesIO())
    saved = only(w.trace, "saved")["detail"]
    assert (saved["scale"], saved["growth_tracker"]) == ([16.0], [1])


def test_parameters_taken_over_name_the_optimizer_that_moved_them():
    model = net()
    with stepscope.watch() as w:
        train(model, torch.optim.Adam(model.parameters(), lr=0.1), 2)
        train(model, torch.optim.Adam(model[2].parameters(), lr=0.1), 2)
    first, second = (e["detail"]["taken_over"] for e in w.trace.details("started"))
    assert first == {}
    assert second == {"Adam/0": {"params": 2, "stateful": True}}


def test_saves_are_thinned_in_a_loop_that_saves_at_every_step():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stepscope.watch(model, optimizer) as w:
        train(model, optimizer, 80, lambda _: torch.save(model.state_dict(), io.BytesIO()))
    whole = [e["micro_step"] for e in w.trace.details("saved") if "params" in e["detail"]]
    assert whole[:64] == list(range(1, 65))
    assert all(b >= 1.05 * a for a, b in itertools.pairwise(whole[63:]))
    assert len(whole) == 64 + math.floor((80 - 64) / 4)  # from 64 on every fourth: 68, 72, 76, 80


def test_watching_keeps_no_scheduler_or_optimizer_alive():
    import gc
    import weakref

    model = net()
    with stepscope.watch(model):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        scheduler = schedulers.ExponentialLR(optimizer, 0.9)
        train(model, optimizer, 2, lambda _, step=scheduler.step: step())
        gone = [weakref.ref(optimizer), weakref.ref(scheduler)]
        del optimizer, scheduler
        gc.collect()
        assert [ref() for ref in gone] == [None, None]
