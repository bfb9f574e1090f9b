"""What the trace says about parameters as a whole, against what the loop knows itself."""

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepscope
from stepscope.patterns import names_match
from stepscope.watch.leaves import leaves

pytestmark = pytest.mark.filterwarnings("ignore")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def train(model, optimizer, steps=5, before_step=lambda step: None):
    for step in range(steps):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        F.cross_entropy(model(x), torch.arange(6) % 3).backward()
        before_step(step)
        optimizer.step()


def summaries(loop, **options):
    gc.collect()
    with stepscope.watch(**options) as watching:
        loop()
    assert not watching.trace.meta["probes_off"]
    return [e["detail"] for e in watching.trace.details("parameters")]


def test_a_plain_loop_has_nothing_to_tell():
    def loop():
        model = net()
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))

    last = summaries(loop)[-1]
    assert last == {"attempts": 4, "trainable": 4, "counts": {}}


def test_parameters_of_no_optimizer_are_listed_with_what_happened_to_them():
    def loop():
        model = net()
        optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)

        def move(step):
            with torch.no_grad():
                model[0].bias.add_(1.0)

        train(model, optimizer, before_step=move)

    listed = {p["param"]: p for p in summaries(loop)[-1]["unoptimized"]}
    assert set(listed) == {"0.weight", "0.bias"}
    assert (listed["0.weight"]["moved"], listed["0.bias"]["moved"]) == (False, True)
    assert (listed["0.weight"]["shape"], listed["0.weight"]["dtype"]) == ("5x4", "float32")


def test_moving_through_data_is_seen_too():
    """A write through ``.data`` leaves no trace on the tensor's version: values are compared."""

    def loop():
        model = net()
        optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
        train(model, optimizer, before_step=lambda step: model[0].weight.data.mul_(0.9))

    listed = {p["param"]: p["moved"] for p in summaries(loop)[-1]["unoptimized"]}
    assert listed == {"0.weight": True, "0.bias": False}


def test_a_parameter_that_joins_later_is_not_listed_any_more():
    def loop():
        model = net()
        optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
        train(model, optimizer, steps=3)
        optimizer.add_param_group({"params": model[0].parameters()})
        train(model, optimizer, steps=7)

    told = summaries(loop)
    assert "unoptimized" in told[0]
    assert "unoptimized" not in told[-1]


def test_tensors_that_no_model_has_are_told_apart_by_their_gradients():
    def loop():
        model = net()
        master, unused = nn.Parameter(torch.zeros(5, 4)), nn.Parameter(torch.zeros(7))
        optimizer = torch.optim.SGD([*model[2].parameters(), master, unused], lr=0.1)

        def feed(step):
            master.grad = torch.ones(5, 4)

        train(model, optimizer, before_step=feed)

    last = summaries(loop)[-1]
    assert last["fed_by_hand"] == ["5x4"]
    assert last["stale"] == [{"optimizer": "SGD/0", "shape": "7"}]


def test_the_summary_survives_a_kill_before_the_end(tmp_path):
    """Events are written at micro-steps 3, 9, 27, ...: one is on disk although the recording was never stopped."""
    gc.collect()
    watching = stepscope.watch(out=tmp_path / "t").start()
    model = net()
    train(model, torch.optim.SGD(model[2].parameters(), lr=0.1), steps=4)
    watching._recorder.hand_over()
    read = stepscope.Trace.load(tmp_path / "t")
    watching.stop()
    assert not read.whole
    assert [p["param"] for p in read.details("parameters")[-1]["detail"]["unoptimized"]] == ["0.weight", "0.bias"]


def test_summaries_come_ever_more_rarely():
    def loop():
        model = net()
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=100)

    assert [s["attempts"] for s in summaries(loop)] == [2, 8, 24, 74, 99]


def test_models_are_not_kept_alive():
    import weakref

    gc.collect()
    with stepscope.watch():
        model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.1), nn.Linear(5, 3))
        average = copy.deepcopy(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, optimizer)
        held = weakref.ref(model), weakref.ref(average)
        del model, average, optimizer
        gc.collect()
        assert [ref() for ref in held] == [None, None]


def test_leaves_are_those_that_get_gradients():
    a, b, c = (nn.Parameter(torch.ones(2)) for _ in range(3))
    x = torch.ones(2, requires_grad=True)
    loss = ((a * x).sum() + b.detach().sum()) * torch.relu(c).sum()
    assert {id(t) for t in leaves([loss])} == {id(a), id(x), id(c)}


@pytest.mark.parametrize(
    ("name", "pattern", "fits"),
    [
        ("backbone.0.weight", "backbone", True),
        ("backbone.0.weight", "backbone.*", True),
        ("backbone2.weight", "backbone", False),
        ("head.weight", "backbone,head", True),
        ("layer.1.bias", r"layer\.[01]\..*", True),
        ("layer.2.bias", r"layer\.[01]\..*", False),
        ("a0", "a[0", False),
        ("weight", "", False),
    ],
)
def test_patterns_of_names(name, pattern, fits):
    assert names_match(name, pattern) is fits
