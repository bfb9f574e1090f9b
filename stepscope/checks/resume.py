"""Is a run that was stopped and resumed the same, bit for bit, as one that was not?

For the reference loop: N optimizer steps in one process, which saves after N/2; then a fresh process loads that
checkpoint and runs the rest. For scripts: command lines are run as they are, and the checkpoints that they leave are
compared. Nothing that a checkpoint holds is executed.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepscope.checks.findings import finding, outcome
from stepscope.checks.states import Difference, differences, load_state, missing_parts
from stepscope.errors import StepscopeError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from stepscope.rules.outcome import Finding, Outcome

CODE = "CHK200"
NAME = "resume"

DROPPABLE = {
    "model": "resume-differs",
    "optimizer": "resume-optim-state-lost",
    "scheduler": "resume-sched-not-restored",
    "scaler": "scaler-not-checkpointed",
    "rng": "resume-rng-sampler",
    "sampler": "resume-rng-sampler",
}
"""Part of a run that can be left out of a resume, and the finding that names its loss."""

PURPOSE = {
    "model": "the weights themselves",
    "optimizer": "the moments: without them AdamW starts again with steps of full size in every direction",
    "scheduler": "the place in the schedule: without it the warm-up runs again",
    "scaler": "the loss scale: without it the calibration runs again and its first steps are skipped",
    "rng": "the random state: without it dropout draws other masks",
    "sampler": "the place in the data: without it the run sees the same batches again",
}

SHOWS: dict[str, dict[str, Any]] = {
    "scaler": {"dtype": "float16", "init_scale": 2.0**24},
    "scheduler": {"warmup_steps": 2},
}
"""Options under which the loss of a part shows within a few steps."""

DEFAULTS: dict[str, Any] = {
    "hidden_size": 32,
    "layers": 1,
    "heads": 2,
    "batch_size": 2,
    "max_length": 32,
    "accumulation_steps": 2,
    "dropout": 0.1,
    "schedule": "warmup-cosine",
    "learning_rate": 2e-3,
}
"""A small run in which every part of the state matters."""


def check_resume(steps: int = 8, drop: str = "", options: Mapping[str, Any] | None = None) -> Outcome:
    """Run the reference loop whole and resumed, each in a process of its own, and compare every bit.

    Args:
        steps: N, optimizer steps of the whole run.
        drop: a part in `DROPPABLE` that the resumed run starts without; empty for a full resume.
        options: options of the reference run, laid over `DEFAULTS`.

    Raises:
        StepscopeError: N is below 2, the part is not known, or a run failed.
    """
    if steps < 2:
        raise StepscopeError(f"a run of {steps} optimizer steps has no half to resume from", hint="give at least 2")
    if drop and drop not in DROPPABLE:
        raise StepscopeError(f"unknown part {drop!r}", hint=f"one of {', '.join(DROPPABLE)}")
    half = steps // 2
    base = DEFAULTS | SHOWS.get(drop, {}) | dict(options or {}) | {"steps": steps}
    with tempfile.TemporaryDirectory(prefix="stepscope-resume-") as folder:
        whole = _train(Path(folder) / "whole", base | {"save_every": half})
        resumed = _train(Path(folder) / "resumed", base | {"save_every": half, "resume": whole["checkpoints"][0]}, drop)
        states = [load_state(Path(run["checkpoints"][-1])) for run in (whole, resumed)]
    states = [{key: value for key, value in state.items() if key != "config"} for state in states]
    found = list(differences(states[0], states[1]))
    return _judge(found, whole["steps"][half:], resumed["steps"], drop, half)


def check_resume_commands(commands: Sequence[str], checkpoints: Sequence[Path], traces: Sequence[Path] = ()) -> Outcome:
    """Run command lines one after the other, then compare the checkpoints of the whole and of the resumed run.

    Args:
        commands: the uninterrupted run, then whatever makes the resumed one; run without a shell. May be empty.
        checkpoints: the last checkpoint of the whole run and that of the resumed run.
        traces: trace directories of both, compared as well.

    Raises:
        StepscopeError: a command fails, or a checkpoint cannot be read.
    """
    if len(checkpoints) != 2:
        raise StepscopeError(
            f"{len(checkpoints)} checkpoints to compare", hint="name two: of the whole and the resumed run"
        )
    for command in commands:
        _run_command(command)
    whole, resumed = (load_state(path) for path in checkpoints)
    found = list(differences(whole, resumed))
    details = {"missing": missing_parts(whole), "parted": _compare_traces(traces), "differences": len(found)}
    if not found:
        return outcome(CODE, NAME, [], f"bit-identical: {checkpoints[0]} and {checkpoints[1]}", **details)
    return outcome(CODE, NAME, [_script_finding(found, details)], f"{len(found)} values differ", **details)


def _train(folder: Path, config: Mapping[str, Any], drop: str = "") -> dict[str, Any]:
    folder.mkdir()
    request = {"config": {**config, "out": str(folder / "out")}, "diary": str(folder / "diary.json"), "drop": drop}
    (folder / "request.json").write_text(json.dumps(request), "utf-8")
    command = [sys.executable, "-m", "stepscope.checks.resume_worker", str(folder / "request.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise StepscopeError(f"a run of the resume check failed: {_last_line(done.stderr)}")
    diary: dict[str, Any] = json.loads((folder / "diary.json").read_text("utf-8"))
    if not diary["checkpoints"]:
        raise StepscopeError("a run of the resume check saved no checkpoint")
    return diary


def _run_command(command: str) -> None:
    try:
        words = shlex.split(command)
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except (ValueError, OSError, IndexError) as error:
        raise StepscopeError(f"the command {command!r} cannot be run: {error}") from error
    if done.returncode:
        raise StepscopeError(f"the command {command!r} ended with {done.returncode}: {_last_line(done.stderr)}")


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1].removeprefix("stepscope: ") if lines else "it printed nothing"


def _judge(
    found: list[Difference], whole: list[dict[str, Any]], resumed: list[dict[str, Any]], drop: str, half: int
) -> Outcome:
    rows = [
        {
            "step": a["step"],
            "loss_whole": a["loss"],
            "loss_resumed": b["loss"],
            "same_loss": a["loss"] == b["loss"],
            "same_parameters": a["parameters"] == b["parameters"],
        }
        for a, b in zip(whole, resumed, strict=True)
    ]
    lines = [_row_line(row) for row in rows[:4]]
    details: dict[str, Any] = {"rows": rows, "dropped": drop, "saved_after": half, "lines": lines}
    first = next((row for row in rows if not row["same_parameters"]), None)
    if not found and first is None:
        without = f" even without {drop}" if drop else ""
        return outcome(CODE, NAME, [], f"bit-identical{without}: {len(rows)} steps after a resume at {half}", **details)
    return outcome(CODE, NAME, [_finding(found, first, drop, rows)], _summary(first, drop), **details)


def _row_line(row: dict[str, Any]) -> str:
    same = "same parameters" if row["same_parameters"] else "other parameters"
    return (
        f"  step {row['step']}: loss {row['loss_whole']:.6f} whole, {row['loss_resumed']:.6f} resumed, {same} after it"
    )


def _summary(first: dict[str, Any] | None, drop: str) -> str:
    where = "in the saved state alone" if first is None else f"from optimizer step {first['step']} on"
    return f"different {where}" + (f", resumed without {drop}" if drop else "")


def _finding(found: list[Difference], first: dict[str, Any] | None, drop: str, rows: list[dict[str, Any]]) -> Finding:
    name = DROPPABLE.get(drop, "resume-differs")
    listed = _listed(found)
    message = f"the resumed run is not the whole one: {len(found)} values differ at its end, {listed}"
    if first is not None:
        message = (
            f"optimizer step {first['step']} leaves other parameters than in the whole run{_loss_words(rows)}; "
            f"at the end {len(found)} values differ"
        )
    if drop:
        message += f". Dropped was {drop}: {PURPOSE[drop]}"
    elif first is not None:
        message += f", first {listed}"
    return finding(name, message, rows=rows, observed=len(found), expected=0)


def _loss_words(rows: list[dict[str, Any]]) -> str:
    row = next((row for row in rows if not row["same_loss"]), None)
    if row is None:
        return ""
    return f" (at step {row['step']} the loss is {row['loss_resumed']:.6g} where {row['loss_whole']:.6g} is right)"


def _listed(found: list[Difference]) -> str:
    if not found:
        return "none of them saved"
    one = found[0]
    size = f", by {one.size:.3g}" if one.size is not None else ""
    return f"{one.path} ({one.left} and {one.right}{size})"


def _script_finding(found: list[Difference], details: dict[str, Any]) -> Finding:
    parts = list(dict.fromkeys(difference.part for difference in found))
    message = f"{len(found)} values of the checkpoints differ, in {', '.join(parts)}, first {_listed(found)}"
    if details["missing"]:
        message += f". No key of the checkpoint names {', '.join(details['missing'])}: a resume cannot restore that"
    if details["parted"]:
        message += f". The traces part at {details['parted']}"
    shown = [{"path": d.path, "whole": d.left, "resumed": d.right, "distance": d.size} for d in found[:8]]
    return finding("resume-differs", message, rows=shown, observed=len(found), expected=0)


def _compare_traces(traces: Sequence[Path]) -> str:
    """Where two traces part first; empty where they do not, or none were given."""
    if len(traces) != 2:
        return ""
    from stepscope.compare import compare
    from stepscope.store.trace import Trace

    found = compare(Trace.load(traces[0]), Trace.load(traces[1]), exact=True)
    first = found.partings[0] if found.partings else None
    return "" if first is None else f"micro-step {first.micro_step}, column {first.column}"
