"""The pytest plugin: assertions, the marker, readable failures, JUnit, xdist, and its options."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

# An inner run forgets the modules that it imported first, and these cannot be imported twice in one process.
import torch._dynamo  # noqa: F401

pytest_plugins = ["pytester"]

LOOP = """
import pytest
import torch
from torch.nn import functional as F

torch.set_num_threads(1)

def loss_fn(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])

def parts():
    torch.manual_seed(0)
    return torch.nn.Linear(3, 1), (torch.randn(8, 3), torch.randn(8, 1)), loss_fn

def train(divide=True):
    model, (x, y), _ = parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        for piece in zip(x.chunk(4), y.chunk(4)):
            loss = loss_fn(model, piece)
            (loss / 4 if divide else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def run(pytester: pytest.Pytester, body: str, *options: str) -> pytest.RunResult:
    pytester.makepyfile(LOOP + body)
    plain = ("-p", "no:cacheprovider", "--strict-markers")
    return pytester.runpytest_inprocess(*plain, *options)


def test_right_code_passes_every_assertion(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
def test_accumulation(stepscope):
    stepscope.assert_accumulation_equals_large_batch(*parts(), accumulation_steps=4, dtypes=("float32",))

def test_lr(stepscope):
    stepscope.assert_lr_follows([0.1 * 0.5 ** (i // 3) for i in range(9)], "step", T=3)

def test_watch(stepscope):
    with stepscope.watch(declare={"accumulation_steps": 4}) as watching:
        train()
    assert len(watching.trace.steps) == 12

@pytest.mark.stepscope(declare={"accumulation_steps": 4})
def test_marked():
    train()
""",
    )
    result.assert_outcomes(passed=4)


def test_wrong_code_fails_with_the_finding_and_no_traceback_of_ours(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
def test_accumulation(stepscope):
    def window(model, micro_batches):
        for micro_batch in micro_batches:
            loss_fn(model, micro_batch).backward()
    stepscope.assert_accumulation_equals_large_batch(*parts(), window=window, accumulation_steps=4, dtypes=())

def test_lr(stepscope):
    stepscope.assert_lr_follows([0.1, 0.1, 0.2], "constant")

@pytest.mark.stepscope(declare={"accumulation_steps": 4})
def test_marked():
    train(divide=False)

@pytest.mark.stepscope
def test_that_trains_nothing():
    pass
""",
        "--junitxml=junit.xml",
    )
    result.assert_outcomes(failed=4)
    result.stdout.fnmatch_lines(["*accum-missing-divide: the gradient is 4 times what it should be*"])
    cases = {case.get("name"): case.find("failure") for case in ET.parse(pytester.path / "junit.xml").iter("testcase")}
    assert "accum-missing-divide" in cases["test_marked"].get("message")
    assert "pytest_plugin.py" not in (cases["test_marked"].text or "")
    assert "no training step was recorded" in cases["test_that_trains_nothing"].get("message")
    assert "schedule-differs" in cases["test_lr"].get("message")


def test_options_ignore_a_rule_and_keep_the_trace(pytester: pytest.Pytester) -> None:
    body = """
@pytest.mark.stepscope(declare={"accumulation_steps": 4})
def test_marked():
    train(divide=False)
"""
    kept = pytester.path / "traces"
    options = ("--stepscope-ignore", "accum-missing-divide", "--stepscope-out", str(kept))
    run(pytester, body, *options).assert_outcomes(passed=1)
    assert [path.parent.name for path in kept.glob("*/meta.json")] == [
        "test_options_ignore_a_rule_and_keep_the_trace.py_test_marked"
    ]


def test_severity_option_lets_a_notice_fail(pytester: pytest.Pytester) -> None:
    body = """
def test_batchnorm(stepscope):
    _, batch, loss_fn = parts()
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    stepscope.assert_accumulation_equals_large_batch(model, batch, loss_fn, dtypes=())
"""
    run(pytester, body).assert_outcomes(passed=1)
    run(pytester, body, "--stepscope-fail-on=notice").assert_outcomes(failed=1)


def test_a_test_that_fails_itself_keeps_its_own_failure(pytester: pytest.Pytester) -> None:
    body = """
@pytest.mark.stepscope
def test_own():
    train(divide=False)
    assert 1 == 2
"""
    result = run(pytester, body)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*assert 1 == 2*"])


def test_marked_tests_run_under_xdist(pytester: pytest.Pytester) -> None:
    pytest.importorskip("xdist", reason="pytest-xdist is not installed")
    pytester.makepyfile(LOOP + "@pytest.mark.stepscope\ndef test_marked():\n    train()\n")
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-n", "1")
    result.assert_outcomes(passed=1)


def test_plugin_imports_no_torch(pytester: pytest.Pytester) -> None:
    script = "import sys, stepscope.pytest_plugin; sys.exit('torch' in sys.modules)"
    assert pytester.runpython_c(script).ret == 0
