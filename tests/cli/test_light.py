"""The command line answers without loading what it does not need."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = {"torch", "pandas", "plotly", "pyarrow", "numpy"}


def loaded(code: str) -> set[str]:
    """The heavy packages that are in sys.modules after `code`."""
    tail = "\nimport json, sys\nprint('\\n' + json.dumps(sorted(m for m in sys.modules if '.' not in m)))"
    done = subprocess.run([sys.executable, "-c", code + tail], capture_output=True, text=True, check=True)
    return HEAVY & set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("words", [["--help"], ["trace", "--help"], ["run", "--help"], ["report", "--help"]])
def test_help_loads_nothing_heavy(words):
    """``--help`` of the app and of a command imports no torch, pandas, plotly, pyarrow or numpy."""
    assert loaded(f"from stepscope.cli import main; assert main({words!r}) == 0") == set()


def test_importing_stepscope_loads_nothing_heavy():
    """Public names come when they are used."""
    assert loaded("import stepscope; stepscope.__all__; dir(stepscope)") == set()


def test_reading_a_trace_needs_no_torch(tmp_path):
    """Rules, reports and comparison read the trace directory alone."""
    code = "from stepscope.store.trace import Trace; import stepscope.rules.engine as e; e.all_rules()"
    assert "torch" not in loaded(code)
