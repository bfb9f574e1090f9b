"""``stepscope trace``: run the reference loop, or a factory's parts in it, and record what each micro-step does."""

from __future__ import annotations

import inspect
import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from stepscope.errors import StepscopeError
from stepscope.reference.config import TraceConfig

if TYPE_CHECKING:
    from collections.abc import Callable

    from stepscope.reference.run import Prepared

EPILOG = """
Examples:  stepscope trace --hidden-size 64 --dtype float16   ·   stepscope trace --factory train.py:make --steps 10
"""


def register(app: typer.Typer) -> None:
    """Add the command; its options are the fields of `TraceConfig`."""
    app.command(
        "trace",
        help="Run the reference training loop, or your own model in it, and record what each micro-step really does.",
        epilog=EPILOG,
        # The names of a config file or of MiniMind's scripts work as well: --batch_size.
        context_settings={"token_normalize_func": lambda token: token.replace("_", "-")},
    )(_command(lambda config: _run(config)))


def _command(body: Callable[[TraceConfig], int]) -> Callable[..., int]:
    """A function whose signature has one option for each field of `TraceConfig`."""

    def trace(**options: Any) -> int:
        return body(TraceConfig(**options))

    hints = get_type_hints(TraceConfig)
    trace.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(
                item.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=item.default,
                annotation=Annotated[hints[item.name], _option(item.metadata)],
            )
            for item in fields(TraceConfig)
        ],
        return_annotation=int,
    )
    return trace


def _option(metadata: Any) -> Any:
    return typer.Option(
        *metadata["flags"],
        help=metadata["help"],
        metavar=metadata["metavar"] or None,
        rich_help_panel=metadata["panel"],
    )


def _run(config: TraceConfig) -> int:
    """Train under watch, then judge what was recorded."""
    from stepscope.commands.finish import finish
    from stepscope.commands.live import Live
    from stepscope.config import load_config
    from stepscope.reference.run import prepare
    from stepscope.watching import Watching

    settings = load_config()
    declared = {**settings.declare, "accumulation_steps": config.accumulation_steps}
    live = Live(config.optimizer_steps or 0, quiet=config.quiet)
    out = Path(config.out)
    earlier = _earlier(config, out)
    facts = {"after": str(earlier)} if earlier is not None else {}
    watching = Watching(
        out=out,
        declare=declared,
        force=config.force,
        every=config.every,
        on_rows=live.rows,
        meta={"kind": "trace", "command": ["stepscope", *sys.argv[1:]], **facts},
    )
    with live, watching:  # before anything is built: the reference is watched as a stranger's script would be
        try:
            prepared = prepare(config)
        except StepscopeError:
            watching.discard()
            raise
        watching.facts(reference=_reference(config, prepared), device=str(prepared.parts.device))
        prepared.train(on_start=live.shapes, on_window=live.window_done)
    return finish(
        out,
        declared=declared,
        select=settings.select,
        ignore=settings.ignore,
        accepted=settings.accept,
        fail_on=config.fail_on,
        after=earlier,
        quiet=config.quiet,
    )


def _reference(config: TraceConfig, prepared: Prepared) -> dict[str, Any]:
    """What the report needs to draw the learning rate's formula beside what was observed."""
    length = prepared.parts.length
    total = length.micro_steps if config.schedule == "minimind-cosine" else length.optimizer_steps
    return {**asdict(config), "total_steps": total, "micro_steps": length.micro_steps, "windows": length.windows}


def _earlier(config: TraceConfig, out: Path) -> Path | None:
    """The trace of the run that a checkpoint comes from, where it lies beside it and is not being replaced."""
    if config.resume is None:
        return None
    folder = Path(config.resume).resolve().parent.parent
    return folder if (folder / "meta.json").exists() and folder != out.resolve() else None
