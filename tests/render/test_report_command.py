"""``stepscope report`` and ``stepscope columns``: where output goes, exit codes, one line for bad input."""

import json
import sys
from xml.etree import ElementTree as ET

import pytest

from stepscope.render.envelope import outcomes_of
from stepscope.rules import engine


@pytest.fixture
def folder(factory, tmp_path):
    return factory.save(factory.make(), tmp_path / "run", factory.outcomes())


@pytest.fixture(autouse=True)
def stored_findings(monkeypatch):
    """These tests are about delivery: what was judged is taken from findings.json."""
    monkeypatch.setattr(engine, "judge", lambda trace, **_: list(outcomes_of(trace.verdict)))


def test_page_goes_beside_the_trace_and_stdout_stays_empty(run_command, folder, capsys):
    assert run_command("report", folder) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"wrote {folder / 'report.html'}\n"
    assert "This loop is wrong" in (folder / "report.html").read_text("utf-8")


def test_text_goes_to_stdout(run_command, folder, capsys):
    assert run_command("report", folder, "--format", "text") == 1
    out, err = capsys.readouterr()
    assert out.splitlines()[0].endswith("This loop is wrong")
    assert err == ""


def test_format_follows_the_suffix_of_the_file(run_command, folder, tmp_path):
    run_command("report", folder, "-o", tmp_path / "r.json")
    run_command("report", folder, "-o", tmp_path / "r.xml")
    assert json.loads((tmp_path / "r.json").read_text("utf-8"))["verdict"] == "findings"
    assert ET.parse(tmp_path / "r.xml").getroot().tag == "testsuites"


@pytest.mark.parametrize(
    ("fail_on", "severity", "code"),
    [
        ("error", "error", 1),
        ("error", "warning", 0),
        ("warning", "warning", 1),
        ("warning", "notice", 0),
        ("notice", "notice", 1),
        ("never", "error", 0),
    ],
)
def test_exit_code_follows_the_severity(run_command, factory, tmp_path, capsys, fail_on, severity, code):
    from stepscope.rules.outcome import Finding, failed

    outcome = failed("A001", "a", Finding("A001", "a", severity, "…"))
    folder = factory.save(factory.make(), tmp_path / "run", [outcome])
    assert run_command("report", folder, "--format", "json", "--fail-on", fail_on) == code


def test_a_shared_bundle_lies_beside_the_pages(run_command, folder):
    assert run_command("report", folder, "--plotlyjs", "directory", "--fail-on", "never") == 0
    assert (folder / "plotly-cartesian.min.js").stat().st_size > 1_000_000
    assert (folder / "report.html").stat().st_size < 400_000


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["nowhere"], "no trace directory at nowhere"),
        (["RUN", "--format", "pdf"], "no format 'pdf'"),
        (["RUN", "--fail-on", "panic"], "--fail-on 'panic' is none of error, warning, notice, never"),
        (["RUN", "--declare", "K"], "--declare 'K' is not of the form key=value"),
        (["RUN", "--plotlyjs", "cdn"], "--plotlyjs 'cdn' is none of inline, directory"),
        (["RUN", "-o", "no/such/dir/r.html"], "cannot write no/such/dir/r.html"),
    ],
)
def test_bad_input_is_one_clear_line(run_command, folder, capsys, monkeypatch, tmp_path, args, said):
    monkeypatch.chdir(tmp_path)
    assert run_command("report", *[folder if a == "RUN" else a for a in args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"stepscope: {said}")
    assert err.count("\n") == 1


@pytest.mark.parametrize("content", ['{"findings": [{"code": "A"}]}', '{"findings": 3}', "[]", "{"])
def test_damaged_findings_are_one_clear_line(run_command, folder, capsys, content):
    (folder / "findings.json").write_text(content)
    assert run_command("report", folder) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_csv_has_every_row_and_keeps_null_and_nan_apart(run_command, factory, tmp_path):
    folder = factory.save(factory.make(nan_loss=(2,)), tmp_path / "run")
    assert run_command("report", folder, "-o", tmp_path / "steps.csv") == 0
    lines = (tmp_path / "steps.csv").read_text().splitlines()
    head = [name.strip('"') for name in lines[0].split(",")]
    rows = [dict(zip(head, line.split(","), strict=True)) for line in lines[1:]]
    assert len(rows) == 50
    assert rows[1]["loss"] == "nan"
    assert rows[1]["grad_norm"] == ""
    assert rows[3]["grad_norm"] == "inf"
    assert float(rows[0]["lr"]) == factory.make().tables["steps"]["lr"][0].as_py()


class Recorder:
    """Stands in for a library that takes metrics."""

    def __init__(self):
        self.logged = []

    def init(self, **facts):
        self.facts = facts
        return self

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self):
        self.finished = True


def test_wandb_gets_each_observed_value_at_its_micro_step(run_command, folder, factory, monkeypatch):
    library = Recorder()
    monkeypatch.setitem(sys.modules, "wandb", library)
    assert run_command("report", folder, "--format", "wandb", "-o", "mine") == 0
    assert library.facts["project"] == "mine"
    assert library.finished
    rows = factory.make().tables["steps"].to_pylist()
    assert [step for step, _ in library.logged] == [r["micro_step"] for r in rows]
    for row, (_, values) in zip(rows, library.logged, strict=True):
        assert values["loss"] == row["loss"]
        assert values["learning_rate"] == row["lr"]
        assert ("grad_norm" in values) == (row["grad_norm"] is not None)


def test_a_missing_library_is_one_clear_line(run_command, folder, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    assert run_command("report", folder, "--format", "mlflow") == 2
    assert capsys.readouterr().err == "stepscope: this export needs the package mlflow (pip install mlflow)\n"


def test_tensorboard_events_can_be_read_back(run_command, folder, tmp_path, factory):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    assert run_command("report", folder, "--format", "tensorboard", "-o", tmp_path / "tb") == 0
    (path,) = (tmp_path / "tb").iterdir()
    events = [e for e in EventFileLoader(str(path)).Load() if e.HasField("summary")]
    assert [e.step for e in events] == list(range(1, 51))
    tags = {v.tag for v in events[3].summary.value}
    assert {"loss", "learning_rate", "grad_norm"} <= tags
    assert "grad_norm" not in {v.tag for v in events[0].summary.value}


def test_columns_lists_what_probes_declare(run_command, capsys):
    assert run_command("columns", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert [c["name"] for c in listed["events"]] == ["rank", "seq", "micro_step", "optimizer", "event", "detail"]
    assert run_command("columns", "--table", "steps") == 0
    text = capsys.readouterr().out
    assert all(f"  {column['name']} (" in text for column in listed["steps"])
    assert run_command("columns", "--table", "rows") == 2
    assert "no table 'rows'" in capsys.readouterr().err
