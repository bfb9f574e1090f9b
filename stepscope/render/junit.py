"""The report as JUnit XML, one test case for each rule, for what CI systems show."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from stepscope.render.words import clean, steps_phrase

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from stepscope.render.model import ReportModel

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 cannot hold, not even as references."""


def render_junit(model: ReportModel) -> str:
    """XML text: failed rules with every finding, skipped ones with the reason.

    A rule whose findings are all notices passes; the notice stands in its output.
    """
    said = model.envelope
    by_rule: dict[tuple[str, str], list[Mapping[str, object]]] = {}
    for finding in said["findings"]:
        by_rule.setdefault((finding["code"], finding["name"]), []).append(finding)
    cases = [_failed(code, name, found) for (code, name), found in by_rule.items()]
    cases += [_case(rule["code"], rule["name"]) for rule in said["passed"]]
    cases += [_skipped(rule) for rule in said["skipped"]]
    suite = ET.Element("testsuite", {"name": _text(f"stepscope: {model.title}")} | _counts(cases))
    suite.extend(cases)
    suites = ET.Element("testsuites", _counts(cases))
    suites.append(suite)
    ET.indent(suites)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(suites, encoding="unicode") + "\n"


def _case(code: object, name: object) -> ET.Element:
    return ET.Element("testcase", classname=f"stepscope.{_text(code)}", name=_text(name), time="0")


def _failed(code: str, name: str, found: Iterable[Mapping[str, object]]) -> ET.Element:
    case = _case(code, name)
    for finding in found:
        message = f"{_where(finding)}: {_text(finding['message'])}"
        if finding["severity"] == "notice":
            ET.SubElement(case, "system-out").text = f"notice: {message}"
        else:
            ET.SubElement(case, "failure", type=str(finding["severity"]), message=message).text = message
    return case


def _skipped(rule: Mapping[str, object]) -> ET.Element:
    case = _case(rule["code"], rule["name"])
    ET.SubElement(case, "skipped", message=_text(rule["reason"]))
    return case


def _where(finding: Mapping[str, object]) -> str:
    first, last = finding["first_step"], finding["last_step"]
    return steps_phrase(first if isinstance(first, int) else None, last if isinstance(last, int) else None)


def _counts(cases: list[ET.Element]) -> dict[str, str]:
    failures = sum(case.find("failure") is not None for case in cases)
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {"tests": str(len(cases)), "failures": str(failures), "errors": "0", "skipped": str(skipped), "time": "0"}


def _text(value: object) -> str:
    return _NOT_XML.sub("?", clean(value))
