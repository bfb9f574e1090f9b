"""``stepscope run``: watch a script as it is."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from stepscope.commands.finish import finish, say
from stepscope.commands.processes import Processes, this_process, undisturbed
from stepscope.commands.recording import Recording
from stepscope.errors import FAIL_ON, StepscopeError, require_one_of

if TYPE_CHECKING:
    from stepscope.watch.launcher import Exit, Target

EPILOG = """
Examples:  stepscope run train.py --epochs 1   ·   stepscope run --declare accumulation_steps=4 -m package.train   ·
torchrun --nproc-per-node 2 -m stepscope run train.py
"""


def register(app: typer.Typer) -> None:
    """Add the command. Everything after the script belongs to the script."""
    settings = {"allow_extra_args": True, "allow_interspersed_args": False}
    app.command("run", cls=_LeavesTheRest, help=_HELP, epilog=EPILOG, context_settings=settings)(run)


class _LeavesTheRest(TyperCommand):
    """Leaves to the program what follows ``-m MODULE`` or ``-c CODE``, as ``python`` does, options included."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Mark where the options of ``run`` end."""
        return super().parse_args(ctx, _end_options(args, takes_value=self._valued()))

    def _valued(self) -> set[str]:
        return {name for p in self.params if not getattr(p, "is_flag", False) for name in p.opts}


def _end_options(args: list[str], takes_value: set[str]) -> list[str]:
    """Put ``--`` behind the value of the first ``-m`` or ``-c`` that stands before any script."""
    place = 0
    while place < len(args) and args[place].startswith("-") and args[place] != "--":
        word = args[place]
        place += 2 if word in takes_value else 1
        if word[:2] in ("-m", "-c") and place <= len(args):
            return [*args[:place], "--", *args[place:]]
    return args


_HELP = "Watch a training script as it is, and say what is mechanically wrong. Its output and exit code stay its own."


def run(
    context: typer.Context,
    module: Annotated[
        str | None, typer.Option("-m", help="Run a module, as `python -m` does.", metavar="MODULE")
    ] = None,
    code: Annotated[
        str | None, typer.Option("-c", help="Run a piece of code, as `python -c` does.", metavar="CODE")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the trace.  [default: reports/NAME]", envvar="STEPSCOPE_OUT")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a trace that is there.")] = False,
    declare: Annotated[
        list[str], typer.Option(help="State an intent, e.g. accumulation_steps=4.", metavar="KEY=VALUE")
    ] = [],  # noqa: B006
    after: Annotated[Path | None, typer.Option(help="This run resumes the one recorded in DIR.", metavar="DIR")] = None,
    every: Annotated[
        int, typer.Option(help="Parameter-level rows at every N-th window only; 0: all early, then fewer.", min=0)
    ] = 0,
    max_steps: Annotated[
        int, typer.Option(help="Stop recording (not the script) after N micro-steps; 0: never.", min=0)
    ] = 0,
    fail_on: Annotated[
        str | None, typer.Option(help="Exit 1 on findings from: error, warning, notice; or never.")
    ] = None,
    select: Annotated[list[str], typer.Option(help="Judge only by these rules (codes, prefixes or names).")] = [],  # noqa: B006
    ignore: Annotated[list[str], typer.Option(help="Leave these rules out.")] = [],  # noqa: B006
    report: Annotated[bool, typer.Option("--report/--no-report", help="Write the HTML report.")] = True,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors.")] = False,
) -> int:
    """Run the script under watch, then judge."""
    from stepscope.config import load_config, parse_declarations

    config = load_config()
    target = _target(module, code, context.args)
    declared = {**config.declare, **parse_declarations(declare)}
    level = fail_on or config.fail_on
    require_one_of("--fail-on", level, FAIL_ON)
    if after is not None and not any(after.glob("*meta.json")):
        raise StepscopeError(
            f"--after {after} is not a trace directory", hint="give the --out folder of the earlier run"
        )
    processes = this_process()
    folder = (
        out if out is not None else _default_folder(target, processes)
    ).absolute()  # the script may change directory
    facts = {"after": str(after.resolve())} if after is not None else {}
    options = {"force": force, "every": every or config.every, "max_steps": max_steps}
    ended = _watched(target, folder, declared, processes, facts, **options)
    if ended.forked or (processes.several and not processes.judges(folder, failed=ended.code != 0)):
        return ended.code
    with undisturbed() if processes.several else nullcontext():
        if processes.rank == 0 and processes.several:
            processes.wait_for_parts(folder, failed=ended.code != 0)
        try:
            verdict = finish(
                folder,
                declared=declared,
                select=select or config.select,
                ignore=ignore or config.ignore,
                accepted=config.accept,
                fail_on=level,
                after=after,
                report=report,
                quiet=quiet or processes.rank != 0,
            )
        except Exception as error:  # the script's own exit code must not be lost to a fault in judging
            if not ended.code:
                raise
            say(f"stepscope: the run could not be judged: {type(error).__name__}: {error}")
            return ended.code
    return ended.code or verdict


def _target(module: str | None, code: str | None, words: list[str]) -> Target:
    """What to run: the first word is the script unless -m or -c says otherwise."""
    from stepscope.watch.launcher import Target

    if module is not None and code is not None:
        raise StepscopeError("both -m and -c were given", hint="choose one")
    if module is not None:
        return Target("module", module, tuple(words))
    if code is not None:
        return Target("code", code, tuple(words))
    if not words:
        raise StepscopeError("no script was given", hint="stepscope run [options] SCRIPT [its arguments]")
    return Target("script", words[0], tuple(words[1:]))


def _default_folder(target: Target, processes: Processes) -> Path:
    from stepscope.store.folder import free_folder

    name = {"module": target.name, "code": "command"}.get(target.kind, Path(target.name).stem) or "run"
    return processes.share_folder(Path("reports"), name) if processes.several else free_folder(Path("reports"), name)


def _watched(
    target: Target,
    folder: Path,
    declared: dict[str, Any],
    processes: Processes,
    facts: dict[str, Any],
    **options: Any,
) -> Exit:
    """Run the target with everything in place, and write the end of the trace whatever happens."""
    from stepscope.store.folder import prepare_folder
    from stepscope.watch.launcher import execute
    from stepscope.watch.printed import listen_for_losses

    rank, world_size = processes.rank, processes.world_size
    prepare_folder(folder, force=options["force"], rank=rank, world_size=world_size)
    meta = {"kind": "run", "script": target.name, "command": [target.name, *target.args], **facts}
    if processes.several:
        meta["run_id"] = processes.run_id
    recording = Recording(out=folder, declare=declared, meta=meta, rank=rank, world_size=world_size, **options)
    with recording, listen_for_losses(declared.get("logged_loss"), recording.note):
        recording.ended = execute(target)
    return recording.ended
