"""Fixtures of the renderers' tests: made-up traces, their models and pages, gold files, and a browser."""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import pytest

GOLD = Path(__file__).parents[1] / "gold"

RULE_TEXTS = {
    "accum-missing-divide": {
        "Summary": "K losses were added up without dividing by K.",
        "What it does": "Adds the loss weights of each window.",
        "Why it matters": "The gradient is K times too large: the clip, eps and the logged norm are all off by K.\n"
        "Under `AdamW` the update hides it.",
        "What the evidence looks like": "The weights of a window add up to K.",
        "Fix": "Divide the loss before backward:\n\n    loss = loss / K\n    scaler.scale(loss).backward()",
        "Known false alarms": "Losses that are sums over targets.",
    }
}


def _load(name):
    """A module beside this file, under a name of its own (test folders are no packages)."""
    full = f"stepscope_tests_{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, Path(__file__).parent / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[full] = module
        spec.loader.exec_module(module)
    return sys.modules[full]


def rule_text(name):
    return RULE_TEXTS.get(name, {})


@pytest.fixture(scope="session")
def factory():
    return _load("factory")


@pytest.fixture(scope="session")
def build(factory):
    """From changes of the standard run to its ReportModel."""
    from stepscope.render.model import build_model

    def made(outcomes=None, **changes):
        run = factory.Run(**changes)
        found = factory.outcomes(run) if outcomes is None else outcomes
        return build_model(factory.make(run), found, rule_text=rule_text)

    return made


@pytest.fixture(scope="session")
def model(build):
    """The standard run: float16, K = 4, 12 windows and a tail of 2, two skips, one NaN loss."""
    return build(nan_loss=(7,))


@pytest.fixture(scope="session")
def page(model):
    from stepscope.render.html import render_html

    return render_html(model)


@pytest.fixture(scope="session")
def light_page(model):
    """The page without the bundle of plotly.js, which takes parsers of HTML their time."""
    from stepscope.render.html import PLOTLY, render_html

    return render_html(model, plotly=PLOTLY)


@pytest.fixture
def run_command():
    """Runs one command of the command line in this process; returns its exit code."""
    import typer

    from stepscope.commands import columns, compare, report
    from stepscope.errors import StepscopeError

    app = typer.Typer()
    for command in (report, compare, columns):
        command.register(app)

    def run(*args):
        try:
            return app(args=[str(a) for a in args], standalone_mode=False) or 0
        except StepscopeError as error:
            print(f"stepscope: {error}", file=sys.stderr)
            return error.exit_code

    return run


@pytest.fixture(scope="session")
def chromium():
    """A headless browser; absent, tests are skipped on a desk and fail in CI."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        message = "no Chromium on PATH"
        pytest.fail(message) if os.environ.get("CI") else pytest.skip(message)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        browser = playwright.chromium.launch(executable_path=path, args=flags)
        yield browser
        browser.close()
