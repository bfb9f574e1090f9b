"""Writes the generated pages: ``docs/rules/`` from the rules, ``docs/columns.md`` from the probes.

usage: python docs/build.py [--check]

With ``--check`` nothing is written; the exit code is 1 if a page is not current, and the pages are named.
"""

from __future__ import annotations

import sys
from pathlib import Path

from stepscope.probes import param_columns, step_columns
from stepscope.rules.base import HEADINGS, Rule
from stepscope.rules.engine import all_rules, rule_text
from stepscope.schema import EVENT_COLUMNS, Column

HERE = Path(__file__).parent

CHANNELS = {
    "run": "watching one run tells",
    "declare": "an intent must be declared (`--declare`)",
    "resume": "an earlier trace is needed (`--after DIR`)",
    "ranks": "several processes are needed",
    "check": "only an experiment decides",
}


def rule_page(rule: Rule) -> str:
    """One rule as Markdown."""
    text = rule_text(rule.name)
    facts = [f"**{rule.severity}**", CHANNELS[rule.channel]]
    lines = [f"# {rule.code} {rule.name}", "", text["Summary"], "", " · ".join(facts), ""]
    for heading in HEADINGS:
        if heading in text:
            lines += [f"## {heading}", "", text[heading], ""]
    if rule.needs:
        lines += ["## Needs", "", "Columns " + ", ".join(f"`{c}`" for c in rule.needs) + ".", ""]
    if rule.explains:
        lines += ["Folds in: " + ", ".join(f"[{n}]({n}.md)" for n in rule.explains) + ".", ""]
    if rule.advice:
        lines += [f"Decided by: {rule.advice}", ""]
    return "\n".join(lines)


def rule_index() -> str:
    """The list of rules."""
    lines = ["# Rules", "", "| code | name | severity | what |", "| --- | --- | --- | --- |"]
    for rule in all_rules():
        summary = " ".join(rule_text(rule.name)["Summary"].split())
        lines.append(f"| {rule.code} | [{rule.name}]({rule.name}.md) | {rule.severity} | {summary} |")
    return "\n".join(lines) + "\n"


def column_page() -> str:
    """Every column of a trace."""
    tables = {"steps": step_columns(), "params": param_columns(), "events": list(EVENT_COLUMNS)}
    lines = [
        "# Columns of a trace",
        "",
        'Null is "not observed", with the reason given here; NaN is a value that was seen.',
        "",
    ]
    for name, columns in tables.items():
        lines += [f"## {name}", "", "| column | type | unit | meaning | null when |", "| --- | --- | --- | --- | --- |"]
        lines += [_row(c) for c in columns] + [""]
    return "\n".join(lines)


def _row(column: Column) -> str:
    cells = (f"`{column.name}`", column.dtype, column.unit, column.meaning, column.null_when or "never")
    return "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |"


def pages() -> dict[Path, str]:
    """Every generated page by path."""
    out = {HERE / "rules" / f"{rule.name}.md": rule_page(rule) for rule in all_rules()}
    out[HERE / "rules" / "README.md"] = rule_index()
    out[HERE / "columns.md"] = column_page()
    return out


def stale() -> list[Path]:
    """Pages that are not what the code says now, and pages of rules that are gone."""
    wanted = pages()
    held = set((HERE / "rules").glob("*.md")) if (HERE / "rules").is_dir() else set()
    wrong = [p for p, text in wanted.items() if not p.exists() or p.read_text("utf-8") != text]
    return sorted(wrong + [p for p in held if p not in wanted])


def main() -> int:
    """Write the pages, or check them."""
    if "--check" in sys.argv[1:]:
        for path in stale():
            print(f"not current: {path.relative_to(HERE.parent)}; run python docs/build.py")
        return 1 if stale() else 0
    for path in stale():
        path.unlink(missing_ok=True)
    for path, text in pages().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
