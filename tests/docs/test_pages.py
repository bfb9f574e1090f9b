"""The generated pages are current, and every rule explains itself under the fixed headings."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from stepscope.rules.base import HEADINGS
from stepscope.rules.engine import all_rules, rule_text

ROOT = Path(__file__).parents[2]
REQUIRED = HEADINGS[:4]


def test_the_pages_are_current():
    """What docs/build.py would write is what is there."""
    done = subprocess.run(
        [sys.executable, "docs/build.py", "--check"], cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert done.stdout == ""
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("rule", all_rules(), ids=lambda r: r.name)
def test_a_rule_explains_itself(rule):
    """A summary of one sentence, the required headings with text, a code of the right form."""
    text = rule_text(rule.name)

    assert text["Summary"].endswith(".")
    assert all(text.get(h, "").strip() for h in REQUIRED)
    assert re.fullmatch(r"[A-Z]{3}\d{3}", rule.code)
    assert rule.channel != "check" or rule.advice


def test_codes_and_names_are_unique():
    """Each is an address."""
    rules = all_rules()

    assert len({r.code for r in rules}) == len(rules) == len({r.name for r in rules})


def test_what_a_rule_folds_in_exists():
    """`explains` names rules."""
    names = {r.name for r in all_rules()}

    assert not {n for r in all_rules() for n in r.explains} - names


def commands():
    """Every command line of ours in the code blocks of the pages, fenced or indented, without comments and output."""
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        text = path.read_text("utf-8").replace("\\\n", " ")
        for line in re.findall(r"^(?: {4}|\$ | *entry: | *- run: )?(stepscope [^\n]*)", text, re.MULTILINE):
            bare = line.split(" #")[0].split(" > ")[0].replace("$S", "")
            if "[" not in bare and not bare.endswith(":"):  # a synopsis, or prose
                yield pytest.param(bare, id=f"{path.name}: {bare[:60]}")


@pytest.mark.parametrize("line", list(commands()))
def test_commands_of_the_pages_are_understood(line):
    """Commands and options exist and values have the right form; nothing is run."""
    from typer.main import get_command

    from stepscope.cli import app

    _, *words = (word for word in shlex.split(line) if word not in ("…", "·"))
    command, name = get_command(app), "stepscope"
    while hasattr(command, "commands"):
        name, *words = words
        command = command.commands[name]
    command.make_context(name, words)


@pytest.mark.parametrize("path", [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")], ids=lambda p: p.name)
def test_links_lead_somewhere(path):
    """Relative links of every page."""
    for target in re.findall(r"\]\(([^)#]+)", path.read_text("utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), target
