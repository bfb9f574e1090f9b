"""The pytest plugin: a fixture with assertions, and a marker that watches a test's training loop.

Importing it imports no torch, so that it costs nothing in suites that do not use it.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from stepscope.rules.outcome import Severity

MARKER = "stepscope(declare={}, select=(), ignore=(), fail_on=...): watch the training loop in this test"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the plugin, all with the prefix ``--stepscope``."""
    group = parser.getgroup("stepscope", "training loops")
    group.addoption(
        "--stepscope-fail-on",
        default="error",
        choices=("error", "warning", "notice"),
        help="severity from which on a finding fails a test (default: error)",
    )
    group.addoption("--stepscope-out", metavar="DIR", default=None, help="keep the traces of watched tests in DIR")
    group.addoption("--stepscope-ignore", metavar="CODE", action="append", default=[], help="leave out these rules")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line("markers", MARKER)


class Stepscope:
    """What the fixture ``stepscope`` gives: the assertions of `stepscope.testing`, with the options of this run."""

    def __init__(self, fail_on: Severity, ignore: list[str], out: Path | None) -> None:
        self._fail_on = fail_on
        self._ignore = ignore
        self._out = out

    @property
    def assert_accumulation_equals_large_batch(self) -> Callable[..., Any]:
        """See `stepscope.testing.assert_accumulation_equals_large_batch`."""
        return self._bound("assert_accumulation_equals_large_batch")

    @property
    def assert_resume_equals_uninterrupted(self) -> Callable[..., Any]:
        """See `stepscope.testing.assert_resume_equals_uninterrupted`."""
        return self._bound("assert_resume_equals_uninterrupted")

    @property
    def assert_lr_follows(self) -> Callable[..., Any]:
        """See `stepscope.testing.assert_lr_follows`."""
        return self._bound("assert_lr_follows")

    def watch(self, model: Any = None, optimizer: Any = None, **options: Any) -> Any:
        """A context manager that fails on findings; see `stepscope.testing.watching`."""
        defaults = {"fail_on": self._fail_on, "ignore": self._ignore, "out": self._out, "force": True}
        return self._bound("watching", **defaults)(model, optimizer, **options)

    def _bound(self, name: str, **defaults: Any) -> Callable[..., Any]:
        from stepscope import testing

        return partial(getattr(testing, name), **(defaults or {"fail_on": self._fail_on}))


@pytest.fixture
def stepscope(request: pytest.FixtureRequest) -> Stepscope:
    """Assertions about training loops: accumulation, resume, learning rates, and `watch`."""
    return _assertions(request.node)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Watch the body of a marked test, and fail it on what is found."""
    marker = item.get_closest_marker("stepscope")
    if marker is None:
        return (yield)
    from stepscope.testing import FindingsError

    try:
        with _assertions(item).watch(**marker.kwargs):
            return (yield)
    except FindingsError as error:
        pytest.fail(str(error), pytrace=False)


def _assertions(item: pytest.Item) -> Stepscope:
    out = item.config.getoption("--stepscope-out")
    folder = Path(out) / re.sub(r"[^\w.-]+", "_", item.nodeid) if out else None
    return Stepscope(item.config.getoption("--stepscope-fail-on"), item.config.getoption("--stepscope-ignore"), folder)
