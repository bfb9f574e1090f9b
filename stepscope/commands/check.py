"""``stepscope check``: experiments with a verdict. Each runs a step in two ways and compares."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stepscope.errors import FAIL_ON, StepscopeError, require_one_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from stepscope.rules.outcome import Outcome


Target = Annotated[
    str,
    typer.Argument(
        metavar="[TARGET]",
        help="file.py:make or pkg.mod:make, which returns model, batch, loss_fn and optionally window. "
        "Without it: the reference model.",
        show_default=False,
    ),
]
Format = Annotated[str, typer.Option("--format", help="text, json, junit, github or html.")]
Output = Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="Where to; - is stdout.")]
FailOn = Annotated[
    str, typer.Option(metavar="SEVERITY", help="Exit 1 from this severity on: error, warning, notice or never.")
]
Steps = Annotated[list[int], typer.Option("--accumulation-steps", "-k", metavar="K", help="Micro-batches of a window.")]
Seed = Annotated[int, typer.Option(help="Of the random state and the reorderings.")]


def register(app: typer.Typer) -> None:
    """Add ``check`` and its subcommands."""
    group = typer.Typer(no_args_is_help=True, help="Experiments with a verdict: run a step in two ways and compare.")
    for command in (accumulation, resume, schedule, mechanics, ddp):
        group.command(command.__name__)(command)
    app.add_typer(group, name="check")


def accumulation(
    target: Target = "",
    accumulation_steps: Steps = [4],  # noqa: B006 (typer copies it)
    dtype: Annotated[list[str], typer.Option(help="Working dtype; may be repeated.")] = [  # noqa: B006
        "float32",
        "bfloat16",
        "float16",
    ],
    normalisation: Annotated[
        str, typer.Option(help="How the tool's own window weighs a loss: auto, mean (1/K), sum (1), targets (n_i/N).")
    ] = "auto",
    tail: Annotated[int, typer.Option(metavar="R", help="Check a last window of R micro-batches.")] = 0,
    tail_divisor: Annotated[
        str, typer.Option(help="The tool's own window divides a tail by its own size (remainder) or by K (full).")
    ] = "remainder",
    keep_dropout: Annotated[bool, typer.Option("--keep-dropout", help="Leave dropout on.")] = False,
    moe: Annotated[bool, typer.Option("--moe", help="Reference model: a mixture of experts.")] = False,
    padded: Annotated[bool, typer.Option("--padded", help="Reference model: rows of different length.")] = False,
    seed: Seed = 0,
    format: Format = "text",  # noqa: A002
    output: Output = "-",
    fail_on: FailOn = "error",
) -> int:
    """Does accumulating K micro-batches give the gradient of the large batch?

    float64 decides between equal and different; in a working dtype the rest is rounding, below a bound that is derived.
    """
    require_one_of("--tail-divisor", tail_divisor, ("remainder", "full"))

    def outcomes() -> list[Outcome]:
        from stepscope.checks.accumulation import Settings, check_accumulation
        from stepscope.checks.accumulation.settings import normalisation_named
        from stepscope.checks.experiment import load_experiment
        from stepscope.checks.reference import reference_experiment

        experiment = load_experiment(target) if target else reference_experiment(moe=moe, padded=padded)
        return [
            check_accumulation(
                experiment,
                Settings(
                    K,
                    tail=tail,
                    full_divisor=tail_divisor == "full",
                    normalisation=normalisation_named(normalisation),
                    dtypes=tuple(dtype),
                    keep_dropout=keep_dropout,
                    seed=seed,
                ),
            )
            for K in accumulation_steps
        ]

    return _run(outcomes, f"check accumulation {target}", format, output, fail_on)


def resume(
    steps: Annotated[int, typer.Option(help="Optimizer steps of the whole run; the resumed one starts at half.")] = 8,
    drop: Annotated[
        str, typer.Option(metavar="PART", help="Resume without it: model, optimizer, scheduler, scaler, rng, sampler.")
    ] = "",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.", show_default="float32")] = "",
    data: Annotated[str, typer.Option(metavar="FILE", help="Text for the reference run.")] = "",
    command: Annotated[
        list[str] | None,
        typer.Option(metavar="CMD", help="A command line of your own: the whole run first, then those of the resume."),
    ] = None,
    checkpoint: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Given twice: last checkpoint of the whole run, then of the resumed one."),
    ] = None,
    trace: Annotated[
        list[Path] | None, typer.Option(metavar="DIR", help="Given twice: traces of both runs, compared as well.")
    ] = None,
    format: Format = "text",  # noqa: A002
    output: Output = "-",
    fail_on: FailOn = "error",
) -> int:
    """Is a run that was stopped and resumed the same, bit for bit, as one that was not?"""

    def outcomes() -> list[Outcome]:
        from stepscope.checks.resume import check_resume, check_resume_commands

        if command or checkpoint or trace:
            return [check_resume_commands(command or [], checkpoint or [], trace or [])]
        options = {name: value for name, value in (("dtype", dtype), ("data", data)) if value}
        return [check_resume(steps, drop, options)]

    return _run(outcomes, "check resume", format, output, fail_on)


def schedule(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Trace directory.")],
    formula: Annotated[
        str, typer.Option(metavar="NAME|EXPR", help="A known schedule, or an expression in s, T, lr, w and r.")
    ] = "",
    values: Annotated[
        list[str] | None, typer.Option("--set", metavar="K=V", help="T, lr, w or r, where it is known.")
    ] = None,
    unit: Annotated[
        str, typer.Option(help="What s counts: micro-step or optimizer-step. Both are tried if empty.")
    ] = "",
    first: Annotated[int | None, typer.Option(help="s of the first step: 0 or 1. Both are tried if absent.")] = None,
    column: Annotated[str, typer.Option(help="Column of the rates; lr/pg2 is the second parameter group.")] = "lr",
    format: Format = "text",  # noqa: A002
    output: Output = "-",
    fail_on: FailOn = "error",
) -> int:
    """Do the recorded learning rates follow a formula, in which unit, and up to where?"""

    def outcomes() -> list[Outcome]:
        from stepscope.checks.schedule import Rates, check_schedule
        from stepscope.store.trace import Trace

        rates = Rates.of_trace(Trace.load(folder), column)
        return [check_schedule(rates, formula, dict(map(_setting, values or [])), unit, first)]

    return _run(outcomes, f"check schedule {folder}", format, output, fail_on)


def mechanics(
    impl: Annotated[
        str, typer.Option(metavar="FILE", help="A file with the lesson's functions. Without it: the reference loop.")
    ] = "",
    format: Format = "text",  # noqa: A002
    output: Output = "-",
    fail_on: FailOn = "error",
) -> int:
    """The lesson's alignment test of cosine_lr, the loss scaling, the step and tail conditions, and train_one_epoch."""

    def outcomes() -> list[Outcome]:
        from stepscope.checks.mechanics import check_mechanics, load_functions, reference_functions

        if impl:
            return [check_mechanics(load_functions(impl), impl)]
        return [check_mechanics(reference_functions())]

    return _run(outcomes, "check mechanics", format, output, fail_on)


def ddp(
    target: Target = "",
    nproc: Annotated[int, typer.Option(metavar="N", help="Processes.")] = 2,
    accumulation_steps: Annotated[
        int, typer.Option("--accumulation-steps", "-k", metavar="K", help="Micro-batches on each rank.")
    ] = 2,
    normalisation: Annotated[
        str, typer.Option(help="mean (1/K) or targets (weighted by all ranks' targets).")
    ] = "mean",
    backend: Annotated[str, typer.Option(help="gloo or nccl; chosen by the devices if empty.")] = "",
    seed: Seed = 0,
    format: Format = "text",  # noqa: A002
    output: Output = "-",
    fail_on: FailOn = "error",
) -> int:
    """Do N processes give the gradient of one process with the joint batch, and keep the same parameters?"""
    require_one_of("--normalisation", normalisation, ("mean", "targets"))
    require_one_of("--backend", backend, ("", "gloo", "nccl"))

    def outcomes() -> list[Outcome]:
        from stepscope.checks.ddp import check_ddp

        return [
            check_ddp(
                target,
                nproc=nproc,
                accumulation_steps=accumulation_steps,
                normalisation="targets" if normalisation == "targets" else "mean",
                backend=backend,
                seed=seed,
            )
        ]

    return _run(outcomes, f"check ddp {target}", format, output, fail_on)


def _run(outcomes: Callable[[], Sequence[Outcome]], title: str, name: str, output: str, fail_on: str) -> int:
    """Run a check, deliver what it says, and turn it into an exit code."""
    from stepscope.checks.report import FORMATS, render_checks
    from stepscope.commands.finish import exit_code

    require_one_of("--format", name, FORMATS)
    require_one_of("--fail-on", fail_on, FAIL_ON)
    found = outcomes()
    text = render_checks(found, name, title=title.strip())
    if output == "-":
        sys.stdout.write(text)
    else:
        from stepscope.render.formats import write

        write(Path(output), text)
    return exit_code((f for outcome in found for f in outcome.findings), fail_on)


def _setting(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(json.loads(value))
    except (ValueError, TypeError) as error:
        raise StepscopeError(f"--set {text!r} is not of the form NAME=NUMBER", hint="--set T=1000") from error
