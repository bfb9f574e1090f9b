"""``stepscope trace``: run the reference loop, or a factory's parts in it, and record what each micro-step does."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from stepscope.errors import EXIT_CLEAN
from stepscope.reference.config import TraceConfig

if TYPE_CHECKING:
    from collections.abc import Callable

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
    """Prepare and train."""
    from stepscope.reference.run import Shapes, prepare

    def show_shapes(shapes: Shapes, _: object) -> None:
        for name, shape in shapes.items():
            typer.echo(f"{name}.shape = {list(shape)}")

    prepared = prepare(config)
    result = prepared.train(on_start=None if config.quiet else show_shapes)
    if not config.quiet:
        typer.echo(f"{result.micro_steps} micro-steps, {result.windows} optimizer steps attempted", err=True)
    return EXIT_CLEAN
