"""Tracer against loops written out by hand: the same parameters, and a tail that weighs as it should."""

from __future__ import annotations

import copy
from collections import UserDict, namedtuple
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepscope
from stepscope.errors import StepscopeError
from stepscope.rules.engine import judge

torch.set_num_threads(1)

K = 3


class Regression(nn.Module):
    """Returns its loss, in whatever shape `form` gives it."""

    def __init__(self, form=lambda loss, out: loss):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(3, 4)
        self.head = nn.Linear(4, 1)
        self.form = form

    def forward(self, x, y):
        out = self.head(torch.tanh(self.body(x)))
        return self.form(F.mse_loss(out.float(), y), out)


def batches(count: int = 2 * K) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 3, generator=generator), torch.randn(4, 1, generator=generator)) for _ in range(count)]


def by_hand(model, optimizer, data, *, dtype="float32", max_norm=None, k=K, scaler=None):
    """The textbook loop; a tail of r micro-batches is divided by r."""
    enabled = dtype != "float32"
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=dtype == "float16")
    for i, (x, y) in enumerate(data):
        size = min(k, len(data) - i // k * k)
        with torch.autocast("cpu", dtype=getattr(torch, dtype) if enabled else torch.bfloat16, enabled=enabled):
            loss = model(x, y)
        scaler.scale(loss / size).backward()
        if i % k == k - 1 or i + 1 == len(data):
            if max_norm is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


OPTIMIZERS = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "groups": lambda m: torch.optim.SGD(
        [{"params": m.body.parameters(), "lr": 0.1}, {"params": m.head.parameters(), "lr": 0.01}], momentum=0.9
    ),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_same_bits_as_the_textbook_loop(dtype, kind):
    """With accumulation, autocast, a scaler that skips at first, and a clip."""
    model = Regression()
    twin = copy.deepcopy(model)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**20, enabled=dtype == "float16") for _ in range(2)]
    data = batches(6 * K)
    by_hand(twin, OPTIMIZERS[kind](twin), data, dtype=dtype, max_norm=0.1, scaler=scalers[0])
    optimizer = OPTIMIZERS[kind](model)
    tracer = stepscope.Tracer(model, optimizer, dtype=dtype, accumulation_steps=K, max_norm=0.1, scaler=scalers[1])
    with tracer:
        losses = [tracer.step(batch) for batch in data]

    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    steps = tracer.trace.steps
    assert steps["loss"].tolist() == pytest.approx([float(loss) for loss in losses], rel=1e-5)
    assert steps["window_size"].dropna().tolist() == [K] * 6
    assert steps["loss_weight_sum"].dropna().tolist() == pytest.approx([1.0] * 6)
    assert steps["calls"].tolist()[K - 1] in (["FBUCSPZ", "FBUCKPZ"] if dtype == "float16" else ["FBCSZ"])
    assert not tracer.trace.meta["probes_off"]


@pytest.mark.parametrize("announced", [True, False])
def test_a_tail_weighs_as_much_as_a_window(announced):
    """Two batches in a window for three: divided by two when announced, multiplied by 3/2 when it ends early."""
    model = Regression()
    twin = copy.deepcopy(model)
    data = batches(K + 2)
    by_hand(twin, torch.optim.SGD(twin.parameters(), lr=0.1), data)
    tracer = stepscope.Tracer(model, torch.optim.SGD(model.parameters(), lr=0.1), accumulation_steps=K)
    with tracer:
        for i, batch in enumerate(data):
            tracer.step(batch, window=2 if announced and i == K else None)

    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-8)
    steps = tracer.trace.steps
    assert steps["tail"].dropna().tolist() == [False, True]
    assert steps["window_size"].dropna().tolist() == [K, 2]
    found = [f for o in judge(tracer.trace) for f in o.findings if f.severity != "notice"]
    assert found == []


def test_a_tail_that_is_not_reweighted_would_be_seen(monkeypatch):
    """The comparison above is sharp: without the factor 3/2 the parameters differ by far more than rounding."""
    monkeypatch.setattr(stepscope.Tracer, "_reweight", lambda self, factor: None)
    model = Regression()
    twin = copy.deepcopy(model)
    data = batches(2)
    by_hand(twin, torch.optim.SGD(twin.parameters(), lr=0.1), data)
    with stepscope.Tracer(model, torch.optim.SGD(model.parameters(), lr=0.1), accumulation_steps=K) as tracer:
        for batch in data:
            tracer.step(batch)
    assert not torch.allclose(model.head.weight, twin.head.weight, rtol=1e-3)


def test_a_scheduler_moves_only_after_applied_steps():
    """Four attempts of which the first two are skipped: two moves."""
    model = Regression()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20)
    tracer = stepscope.Tracer(model, optimizer, dtype="float16", scaler=scaler, scheduler=scheduler)
    with tracer:
        for batch in batches(40):
            tracer.step(batch)
    steps = tracer.trace.steps
    applied = int((~steps["step_skipped"].astype(bool)).sum())
    assert 0 < applied < 40
    assert optimizer.param_groups[0]["lr"] == 0.5**applied


Pair = namedtuple("Pair", ["x", "y"])


class Encoding(UserDict):
    """As tokenizers return it: a mapping that is no dict, with a `to` of its own."""

    def to(self, device):
        return Encoding({k: v.to(device) for k, v in self.items()})


BATCHES = {
    "tuple": lambda x, y: (x, y),
    "list": lambda x, y: [x, y],
    "dict": lambda x, y: {"x": x, "y": y},
    "named tuple": Pair,
    "encoding": lambda x, y: Encoding({"x": x, "y": y}),
}

OUTPUTS = {
    "scalar": lambda loss, out: loss,
    "one element": lambda loss, out: loss.reshape(1),
    "output": lambda loss, out: SimpleNamespace(loss=loss, logits=out),
    "dict": lambda loss, out: {"loss": loss, "logits": out},
    "tuple": lambda loss, out: (loss, out),
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("output", OUTPUTS)
def test_batches_and_outputs_of_every_kind(batch, output):
    """The loss that is returned is the model's own."""
    model = Regression(OUTPUTS[output])
    x, y = batches(1)[0]
    expected = F.mse_loss(model.head(torch.tanh(model.body(x))), y).item()
    with stepscope.Tracer(model, torch.optim.SGD(model.parameters(), lr=0.1)) as tracer:
        loss = tracer.step(BATCHES[batch](x, y))
    assert loss.shape == ()
    assert loss.item() == pytest.approx(expected)
    assert tracer.trace.steps["loss"].tolist() == pytest.approx([expected])


def test_a_criterion_of_ones_own():
    """loss_fn(model, batch) where the model gives no loss."""
    model = nn.Linear(3, 2)
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 1, 0])
    expected = F.cross_entropy(model(x), y).item()
    tracer = stepscope.Tracer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=lambda m, b: F.cross_entropy(m(b[0]), b[1])
    )
    with tracer:
        assert tracer.step((x, y)).item() == pytest.approx(expected)


@pytest.mark.parametrize("inside", [True, False])
def test_an_auxiliary_loss_counts_once(inside):
    """Beside the loss it is added; where the model has added it already it is not added again."""

    def form(loss, out):
        aux = out.pow(2).mean()
        return SimpleNamespace(loss=loss + 0.5 * aux if inside else loss, aux_loss=aux)

    model = Regression(form)
    twin = copy.deepcopy(model)
    x, y = batches(1)[0]
    output = twin(x, y)
    (output.loss if inside else output.loss + output.aux_loss).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [p.detach().clone() for p in model.parameters()]
    with stepscope.Tracer(model, optimizer) as tracer:
        tracer.step((x, y))
    for p, old, q in zip(model.parameters(), before, twin.parameters(), strict=True):
        assert torch.allclose(old - p, q.grad, rtol=1e-4, atol=1e-7)
    assert tracer.trace.steps["aux_loss"].tolist() == pytest.approx([output.aux_loss.item()])


class Mixed(nn.Module):
    """A frozen layer, tied weights and a table with sparse gradients."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(6, 3, sparse=True)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.one, self.two = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.two.weight = self.one.weight

    def forward(self, ids):
        return self.two(self.one(self.frozen(self.table(ids)))).pow(2).mean()


def test_frozen_tied_and_sparse_parameters():
    """The tail of one is multiplied by two, sparse gradients too."""
    model = Mixed()
    twin = copy.deepcopy(model)
    ids = [torch.tensor([1, 1, 2]), torch.tensor([0, 5]), torch.tensor([2, 3])]
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for window in (ids[:2], ids[2:]):
        for one in window:
            (twin(one) / len(window)).backward()
        optimizer.step()
        optimizer.zero_grad()
    with stepscope.Tracer(model, torch.optim.SGD(model.parameters(), lr=0.1), accumulation_steps=2) as tracer:
        for one in ids:
            tracer.step(one)
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=1e-6, atol=1e-8)
    names = tracer.trace.params["param"].unique().tolist()
    assert names == ["table.weight", "frozen.weight", "frozen.bias", "one.weight"]
    assert not tracer.trace.meta["probes_off"]


MODEL = Regression()
SGD = torch.optim.SGD(MODEL.parameters(), lr=0.1)

MISTAKES = {
    "dtype": ({"dtype": "fp8"}, "dtype 'fp8' is not known"),
    "accumulation": ({"accumulation_steps": 0}, "accumulation_steps is 0"),
    "accumulation of half": ({"accumulation_steps": 1.5}, "accumulation_steps is 1.5"),
    "max_norm": ({"max_norm": -1.0}, "max_norm is -1.0"),
    "max_norm of words": ({"max_norm": "1"}, "max_norm is '1'"),
    "loss_fn": ({"loss_fn": 3}, "loss_fn is a int"),
    "device": ({"device": "gpu0"}, "device 'gpu0' is not known to torch"),
    "model": ({"model": print}, "model is a builtin_function_or_method, not a torch.nn.Module"),
    "optimizer": ({"optimizer": MODEL}, "optimizer is a Regression, not a torch.optim.Optimizer"),
    "several": ({"optimizer": [SGD]}, "Tracer takes one model and one optimizer"),
    "closure": ({"optimizer": torch.optim.LBFGS(MODEL.parameters())}, "LBFGS needs a closure"),
    "stranger": ({"optimizer": torch.optim.SGD([torch.ones(1)], lr=1.0)}, "holds none of the model's parameters"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_bad_input_is_one_clear_line(mistake, tmp_path):
    """Before anything is written."""
    options, words = MISTAKES[mistake]
    given = {"model": MODEL, "optimizer": SGD, **options}
    with pytest.raises(StepscopeError) as caught:
        stepscope.Tracer(given.pop("model"), given.pop("optimizer"), out=tmp_path / "trace", **given)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (lambda loss, out: out, "the model returned a tensor of shape (4, 1), not a loss"),
        (lambda loss, out: None, "the model returned a NoneType, not a loss"),
        (lambda loss, out: loss.item(), "the model returned a float, not a loss"),
        (lambda loss, out: loss.detach(), "the loss does not require a gradient"),
    ],
)
def test_what_is_no_loss(form, words):
    """Said by name, with what to do."""
    model = Regression(form)
    with (
        pytest.raises(StepscopeError, match=words.replace("(", r"\(").replace(")", r"\)")),
        stepscope.Tracer(model, torch.optim.SGD(model.parameters(), lr=0.1)) as tracer,
    ):
        tracer.step(batches(1)[0])


def test_a_step_outside_of_the_block_and_a_bad_window():
    """Nothing would be recorded; a window has at least one micro-step."""
    model = Regression()
    tracer = stepscope.Tracer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(StepscopeError, match="outside of its with block"):
        tracer.step(batches(1)[0])
    with pytest.raises(StepscopeError, match="window is 0"), tracer:
        tracer.step(batches(1)[0], window=0)
