"""findings.json: the words of the verdict, the order of findings, and the way back."""

import json

from stepscope.render.envelope import envelope, outcomes_of, write_findings
from stepscope.rules.outcome import Finding, failed, passed, skipped


def finding(code, severity, step):
    return Finding(code, f"name-{code}", severity, "…", step)


def test_verdict():
    bad = failed("A001", "a", finding("A001", "notice", 1))
    assert envelope([passed("A001", "a"), bad], complete=True)["verdict"] == "findings"
    assert envelope([bad], complete=False)["verdict"] == "findings"
    assert envelope([passed("A001", "a"), skipped("A002", "b", "…")], complete=True)["verdict"] == "clean"
    assert envelope([passed("A001", "a")], complete=False)["verdict"] == "incomplete"
    assert envelope([skipped("A002", "b", "…")], complete=True)["verdict"] == "incomplete", "nothing was judged"
    assert envelope([], complete=True)["verdict"] == "incomplete"


def test_findings_come_gravest_first_then_by_step():
    found = [
        finding("B", "warning", 1),
        finding("C", "error", 9),
        finding("A", "error", 2),
        finding("D", "error", None),
    ]
    rows = envelope([failed(f.code, f.name, f) for f in found], complete=True)["findings"]
    assert [r["code"] for r in rows] == ["D", "A", "C", "B"]


def test_written_file_is_strict_json_and_keeps_what_is_not_finite(tmp_path, factory):
    outcomes = factory.outcomes(observed=float("nan"))
    write_findings(tmp_path, outcomes, complete=True)

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    content = json.loads((tmp_path / "findings.json").read_text("utf-8"), parse_constant=refuse)
    assert content["format"] == 1
    assert content["findings"][0]["evidence"]["observed"] == "NaN"
    assert content["findings"][0]["evidence"]["rows"][1]["grad_norm"] == "Infinity"
    assert [s["reason"] for s in content["skipped"]] == ["needs at least two processes"]


def test_outcomes_come_back(factory):
    outcomes = factory.outcomes()
    content = envelope(outcomes, complete=True)
    assert envelope(outcomes_of(content), complete=True) == content
