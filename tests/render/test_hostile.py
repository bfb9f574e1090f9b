"""Names, arguments and messages that someone else chose stay text in every format."""

import json
from xml.etree import ElementTree as ET

import pytest
from bs4 import BeautifulSoup

from stepscope.render.formats import render
from stepscope.rules.outcome import Finding, failed, passed, skipped

NASTY = [
    "</script><img src=x onerror=alert(1)>",
    "\"'><svg onload=alert(1)>",
    "{{ 7*7 }}{% raw %}",
    "\u202egnp.exe\u2066",
    "\x1b[31mred\x1b[0m\x07",
    "]]><x>&amp;&#0;",
    "<!--<script>",
    "<a href='javascript:alert(1)'>x</a>",
]


@pytest.fixture(scope="module")
def nasty(build):
    outcomes = [
        failed(
            text,
            text,
            Finding(
                text,
                text,
                "error",
                text,
                3,
                4,
                {
                    "observed": text,
                    text: text,
                    "columns": ["loss", text],
                    "micro_steps": [3],
                    "rows": [{text: text}],
                    "params": [text],
                    "also": [text],
                },
            ),
        )
        for text in NASTY
    ]
    outcomes += [passed(t, t, t) for t in NASTY] + [skipped(t, t, t) for t in NASTY]
    return build(
        outcomes=outcomes,
        params=tuple(NASTY),
        optimizers=tuple(NASTY[:2]),
        meta={
            "script": NASTY[0],
            "command": NASTY,
            "declared": {t: t for t in NASTY},
            "not_observed": {t: t for t in NASTY},
            "probes_off": {t: t for t in NASTY},
            "versions": {t: t for t in NASTY},
        },
    )


def test_html_has_no_element_or_attribute_that_a_name_brought_in(nasty, light_page):
    text = render(nasty, "html", plotly="plotly.js")
    dangerous = BeautifulSoup(text, "html5lib")
    harmless = BeautifulSoup(light_page, "html5lib")
    assert not [e for e in dangerous.find_all(True) if any(a.startswith("on") for a in e.attrs)]
    assert not dangerous.find_all(["img", "iframe", "object", "embed", "base", "link"])
    assert len(dangerous.find_all("script")) == len(harmless.find_all("script"))
    assert all(a["href"].startswith("#") for a in dangerous.find_all("a"))
    assert "49" not in dangerous.title.text
    shown = dangerous.find(id="findings").get_text()
    assert "<img src=x onerror=alert(1)>" in shown, "it is shown as what it is"
    assert not set("\u202e\u2066\x1b\x07") & set(text)


def test_the_check_above_sees_an_injection(light_page):
    broken = light_page.replace("accum-missing-divide", NASTY[0])
    assert BeautifulSoup(broken, "html5lib").find_all("img")


def test_data_in_scripts_stays_data(nasty):
    soup = BeautifulSoup(render(nasty, "html", plotly="plotly.js"), "html5lib")
    content = soup.find(id="chart-data").string
    assert not set("<>&") & set(content)
    json.loads(content)


@pytest.mark.parametrize("name", ["text", "json", "junit", "github"])
def test_no_format_lets_a_control_character_out(nasty, name):
    text = render(nasty, name)
    assert not [c for c in text if (ord(c) < 32 and c != "\n") or 0x7F <= ord(c) < 0xA0 or c in "\u202e\u2066"]


def test_junit_stays_well_formed(nasty):
    root = ET.fromstring(render(nasty, "junit"))
    assert root.get("failures") == str(len(NASTY))
    assert NASTY[0] in {c.get("name") for c in root.iter("testcase")}


def test_annotations_stay_one_line_each(nasty):
    lines = render(nasty, "github").splitlines()
    assert len(lines) == len(NASTY) + 1
    assert all(line.startswith(("::error title=", "::notice title=")) for line in lines)


def test_json_gives_the_names_back_unchanged(nasty):
    content = json.loads(render(nasty, "json"))
    assert {f["name"] for f in content["findings"]} == set(NASTY)
