import sys
import textwrap

import pytest
import torch

from stepscope.errors import StepscopeError
from stepscope.reference.factory import FactoryBatches, load_object, load_parts, model_loss

GOOD = """
    import torch
    from torch import nn

    def make():
        model = nn.Linear(2, 1)
        data = [(torch.ones(3, 2), torch.zeros(3, 1))]
        return {"model": model, "data": data, "loss_fn": lambda m, b: (m(b[0]) - b[1]).square().mean()}
"""


@pytest.fixture(autouse=True)
def _leave_no_modules(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.endswith(("own_parts", "sibling")):
            del sys.modules[name]


@pytest.fixture
def write(tmp_path):
    def write_file(code, name="own_parts.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(code))
        return path

    return write_file


def test_object_of_a_file_and_of_a_module(write, tmp_path, monkeypatch):
    path = write("class Space:\n    value = 5\n")
    assert load_object(f"{path}:Space.value") == 5
    monkeypatch.chdir(tmp_path)
    assert load_object("own_parts:Space.value") == 5


def test_file_finds_its_neighbours_and_its_dataclasses(write):
    write("value = 7", "sibling.py")
    path = write("""
        from __future__ import annotations
        from dataclasses import dataclass
        from sibling import value

        @dataclass
        class Parts:
            value: int = value
    """)
    assert load_object(f"{path}:Parts")().value == 7


BAD_TARGETS = [
    ("own_parts.py", "names no object"),
    (":make", "names no object"),
    ("none.py:make", "none.py: no such file"),
    ("no_such_module_here:make", "no module 'no_such_module_here'"),
    ("no_such.module_here:make", "no module 'no_such.module_here'"),
]


@pytest.mark.parametrize(("target", "message"), BAD_TARGETS)
def test_target_that_is_not_there(target, message):
    with pytest.raises(StepscopeError, match=message):
        load_object(target)


def test_missing_name_offers_the_nearest(write):
    path = write("def make(): ...")
    with pytest.raises(StepscopeError, match=r"has no 'mak' \(did you mean make\?\)"):
        load_object(f"{path}:mak")


BAD_FACTORIES = [
    ("def make(:", "importing .* raised SyntaxError"),
    ("import no_such_thing_at_all", "raised ModuleNotFoundError: No module named 'no_such_thing_at_all'"),
    ("raise SystemExit(3)", "importing .* raised SystemExit: 3"),
    ("make = 5", "is a int, not a function"),
    ("def make(): return 1 / 0", "raised ZeroDivisionError: division by zero"),
    ("def make(): raise ValueError('two\\nlines')", "raised ValueError: two lines"),
    ("def make(): return None", "returned a NoneType"),
    ("def make(): return 1, 2", "returned a tuple"),
    ("def make(): return {}", "returned no 'model' .it returned nothing"),
    ("def make(): return {'model': 5, 'data': []}", "returned a int as 'model', not a torch.nn.Module"),
    ("import torch\ndef make(): return {'model': torch.nn.Linear(1, 1)}", "returned no 'data'"),
    ("import torch\ndef make(): return {'model': torch.nn.Linear(1, 1), 'data': 5}", "returned a int as 'data'"),
    (
        "import torch\ndef make(): return {'model': torch.nn.Linear(1, 1), 'data': [], 'optimizer': 'adam'}",
        "returned a str as 'optimizer', not a torch.optim.Optimizer",
    ),
    (
        "import torch\ndef make():\n"
        "    other = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=1)\n"
        "    return {'model': torch.nn.Linear(1, 1), 'data': [], 'optimizer': other}",
        "the optimizer holds none of the model's parameters",
    ),
    (
        "import torch\ndef make():\n"
        "    model = torch.nn.Linear(1, 1)\n"
        "    one, two = (torch.optim.SGD(model.parameters(), lr=1) for _ in range(2))\n"
        "    scheduler = torch.optim.lr_scheduler.ConstantLR(two)\n"
        "    return {'model': model, 'data': [], 'optimizer': one, 'scheduler': scheduler}",
        "the scheduler drives another optimizer",
    ),
]


@pytest.mark.parametrize(("code", "message"), BAD_FACTORIES)
def test_bad_factory_is_one_line(write, code, message):
    path = write(code)
    with pytest.raises(StepscopeError, match=message) as caught:
        load_parts(f"{path}:make")
    assert "\n" not in str(caught.value)


def test_parts_may_come_as_an_object(write):
    path = write(GOOD + "\n\n    class Parts:\n        def __init__(self):\n            vars(self).update(make())\n")
    parts = load_parts(f"{path}:Parts")
    (batch,) = parts.data.data
    assert parts.loss_fn(parts.model, batch).ndim == 0
    assert parts.optimizer is None


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise KeyError('x')", "model or loss_fn raised KeyError"),
        ("return 5", "loss is int, not a single number"),
        ("return m(b[0])", r"loss is shape \(3, 1\), not a single number"),
        ("return m(b[0]).mean().detach()", "depends on no parameter that requires a gradient"),
    ],
)
def test_bad_loss_is_one_line(write, body, message):
    path = write(
        GOOD.replace("lambda m, b: (m(b[0]) - b[1]).square().mean()", "loss") + f"\n    def loss(m, b): {body}\n"
    )
    parts = load_parts(f"{path}:make")
    with pytest.raises(StepscopeError, match=message):
        parts.loss_fn(parts.model, next(parts.data.stream()))


def test_loss_that_the_model_returns_is_taken_with_its_aux_loss():
    class Model(torch.nn.Module):
        def forward(self, x, y=0.0):
            return {"loss": x + y, "aux_loss": torch.tensor(0.5)}

    assert model_loss(Model(), torch.tensor(1.0)).item() == 1.5
    assert model_loss(Model(), (torch.tensor(1.0), 2.0)).item() == 3.5
    assert model_loss(Model(), {"x": torch.tensor(1.0), "y": 3.0}).item() == 4.5
    with pytest.raises(StepscopeError, match="returned a object without a loss"):
        model_loss(lambda x: object(), torch.tensor(1.0))


@pytest.mark.parametrize("data", [[1, 2, 3], lambda: iter([1, 2, 3])], ids=["list", "function"])
def test_own_data_restarts_and_streams_from_any_position(data):
    for start in range(5):
        stream = FactoryBatches(data).stream(start)
        assert [next(stream) for _ in range(5)] == [(start + i) % 3 + 1 for i in range(5)]


def test_own_data_that_cannot_restart_or_has_no_length():
    stream = FactoryBatches(iter([1])).stream()
    assert next(stream) == 1
    with pytest.raises(StepscopeError, match="empty or used up"):
        next(stream)
    with pytest.raises(StepscopeError, match=r"has no length \(use --steps"):
        len(FactoryBatches(iter([1])))
    with pytest.raises(StepscopeError, match="empty or used up"):
        next(FactoryBatches([]).stream())


def test_own_data_that_raises_is_named():
    def broken():
        yield 1
        raise OSError("disk gone")

    stream = FactoryBatches(broken).stream()
    next(stream)
    with pytest.raises(StepscopeError, match="the factory's data raised OSError: disk gone"):
        next(stream)
