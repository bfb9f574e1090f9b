"""``stepscope compare``: exit codes, formats, and one line for bad input."""

import json
import sys

import pytest
import typer
from bs4 import BeautifulSoup

from stepscope.commands import compare
from stepscope.errors import StepscopeError


@pytest.fixture
def run_command():
    app = typer.Typer()
    compare.register(app)

    def run(*args):
        try:
            return app(args=[str(a) for a in args], standalone_mode=False) or 0
        except StepscopeError as error:
            print(f"stepscope: {error}", file=sys.stderr)
            return error.exit_code

    return run


@pytest.fixture
def runs(factory, tmp_path):
    made = {"a": {}, "same": {}, "clip": {"clip": 0.01}, "seed": {"seed": 1}}
    return {name: factory.save(factory.make(**changes), tmp_path / name) for name, changes in made.items()}


def test_exit_codes(run_command, runs, capsys):
    assert run_command(runs["a"], runs["same"], "--exact") == 0
    assert run_command(runs["a"], runs["clip"]) == 1
    assert run_command(runs["a"], runs["same"], runs["clip"]) == 1
    assert run_command(runs["a"], "nowhere") == 2
    assert run_command(runs["a"]) == 2


def test_text_names_step_column_and_values(run_command, runs, capsys):
    run_command(runs["a"], runs["clip"])
    text = capsys.readouterr().out
    assert text.splitlines()[0] == "They part at micro-step 4, first in clip_max_norm"
    assert "at micro-step 4 clip_max_norm is 1 and 0.01" in " ".join(text.split())


def test_json_is_plain_data(run_command, runs, capsys):
    run_command(runs["a"], runs["seed"], "--format", "json")
    content = json.loads(capsys.readouterr().out)
    assert content["same"] is False
    first = content["comparisons"][0]["partings"][0]
    assert (first["column"], first["micro_step"]) == ("loss", 1)


def test_page_overlays_all_runs_and_its_links_resolve(run_command, runs, tmp_path):
    page = tmp_path / "compare.html"
    run_command(runs["a"], runs["clip"], runs["seed"], "-o", page)
    soup = BeautifulSoup(page.read_text("utf-8"), "html.parser")
    ids = [e["id"] for e in soup.find_all(id=True)]
    assert len(ids) == len(set(ids))
    assert {a["href"][1:] for a in soup.find_all("a")} <= set(ids)
    charts = json.loads(soup.find(id="chart-data").string)
    assert [t["name"] for t in charts["fig-grad-norm"]["data"][:3]] == ["a", "clip", "seed"]
    assert soup.h1.get_text(strip=True) == "They part at micro-step 1, first in loss"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--rtol", "2"], "--rtol 2 is not between 0 and 1"),
        (["--format", "junit"], "a comparison has no format 'junit'"),
        (["--offset", "1000"], "the runs have no micro-step in common"),
    ],
)
def test_bad_input_is_one_clear_line(run_command, runs, capsys, args, said):
    assert run_command(runs["a"], runs["clip"], *args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"stepscope: {said}")
    assert err.count("\n") == 1
