"""``stepscope rules`` lists the rules, ``stepscope rule NAME`` explains one."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add both commands."""
    app.command("rules", help="List every rule: code, severity, name, and what it needs.")(rules)
    app.command("rule", help="Explain a rule: what it does, why it matters, evidence, fix, known false alarms.")(rule)


def rules(as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False) -> int:
    """List the rules."""
    from stepscope.rules.engine import all_rules, rule_text
    from stepscope.store.jsonio import dumps

    listed = [
        {
            "code": r.code,
            "name": r.name,
            "severity": r.severity,
            "channel": r.channel,
            "needs": list(r.needs),
            "summary": rule_text(r.name)["Summary"],
        }
        for r in all_rules()
    ]
    if as_json:
        typer.echo(dumps(listed, indent=1))
        return 0
    for row in listed:
        typer.echo(f"{row['code']}  {row['severity']:<8}{row['channel']:<9}{row['name']:<30}{row['summary']}")
    return 0


def rule(name: Annotated[str, typer.Argument(help="Code or name of a rule.")]) -> int:
    """Explain one rule."""
    from stepscope.rules.engine import find_rule, rule_text

    found = find_rule(name)
    typer.echo(f"{found.code} {found.name} ({found.severity})\n")
    for heading, text in rule_text(found.name).items():
        typer.echo(text if heading == "Summary" else f"\n{heading}\n{'-' * len(heading)}\n{text}")
    if found.needs:
        typer.echo(f"\nNeeds the columns {', '.join(found.needs)}.")
    if found.advice:
        typer.echo(f"\nDecided by: {found.advice}")
    return 0
