"""The recorded values for other tools (CSV, TensorBoard, W&B, MLflow); each library is imported when asked for."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from stepscope.errors import StepscopeError
from stepscope.render.rows import Rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from stepscope.store.trace import Trace

NAMES = {"lr": "learning_rate"}
"""What a column is called in the tools' own tongue."""


def export(trace: Trace, name: str, output: str | None) -> str:
    """Hand on the steps of `trace` and say in one line where they went.

    Args:
        trace: the recorded run.
        name: ``csv``, ``tensorboard``, ``wandb`` or ``mlflow``.
        output: file (csv; None or ``-`` for stdout) or directory (tensorboard); project or experiment for the others.

    Raises:
        StepscopeError: the library is not installed, or the place cannot be written.
    """
    made = {"csv": _csv, "tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}
    try:
        return made[name](trace, output)
    except OSError as error:
        raise StepscopeError(
            f"cannot write {output}: {error.strerror or error}", hint="give another place with -o"
        ) from error


def scalars(trace: Trace) -> Iterator[tuple[int, dict[str, float]]]:
    """Micro-step and the observed numbers of each row of the first process, optimizers told apart by a prefix."""
    rows = Rows(trace)
    names = _numeric(trace)
    mine = [t for t in rows.optimizers if t.rank == rows.processes[0].rank] if len(rows) else []
    for track in mine:
        prefix = f"{track.optimizer}/" if len(mine) > 1 else ""
        columns = [(f"{prefix}{NAMES.get(n, n)}", *rows.column(n)) for n in names]
        for place in track.index.tolist():
            yield int(rows.micro_step[place]), {n: float(v[place]) for n, v, seen in columns if seen[place]}


def _numeric(trace: Trace) -> list[str]:
    schema = trace.tables["steps"].schema
    return [f.name for f in schema if not pa.types.is_string(f.type) and f.name not in ("rank", "micro_step")]


def _csv(trace: Trace, output: str | None) -> str:
    from pyarrow import csv

    table = trace.tables["steps"]
    if output in (None, "-"):
        csv.write_csv(table, sys.stdout.buffer)
        return f"{len(table)} rows of steps"
    csv.write_csv(table, str(output))
    return f"wrote {output}: {len(table)} rows of steps"


def _tensorboard(trace: Trace, output: str | None) -> str:
    """Event files by tensorboard's own writer; the step is the micro-step."""
    writers = _library("tensorboard.summary.writer.event_file_writer", "tensorboard")
    protos = [_library(f"tensorboard.compat.proto.{n}_pb2", "tensorboard") for n in ("event", "summary")]
    folder = Path(output or "runs")
    writer = writers.EventFileWriter(str(folder))
    count = 0
    for step, values in scalars(trace):
        tags = [protos[1].Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        writer.add_event(protos[0].Event(step=step, summary=protos[1].Summary(value=tags)))
        count += 1
    writer.close()
    return f"wrote {folder}: {count} steps as TensorBoard events"


def _wandb(trace: Trace, output: str | None) -> str:
    wandb = _library("wandb", "wandb")
    run = wandb.init(project=output or "stepscope", config=_settings(trace), job_type="stepscope")
    for step, values in _by_step(scalars(trace)):
        run.log(values, step=step)
    run.finish()
    return f"logged to the project {output or 'stepscope'}"


def _mlflow(trace: Trace, output: str | None) -> str:
    mlflow = _library("mlflow", "mlflow")
    mlflow.set_experiment(output or "stepscope")
    with mlflow.start_run():
        mlflow.log_params(_settings(trace))
        for step, values in _by_step(scalars(trace)):
            mlflow.log_metrics(values, step=step)
    return f"logged to the experiment {output or 'stepscope'}"


def _by_step(rows: Iterable[tuple[int, dict[str, float]]]) -> Iterable[tuple[int, dict[str, float]]]:
    """Rows of one micro-step together and in order, as logs that only move forward need them."""
    together: dict[int, dict[str, float]] = {}
    for step, values in rows:
        together.setdefault(step, {}).update(values)
    return sorted(together.items())


def _settings(trace: Trace) -> dict[str, Any]:
    """The plain settings of the run."""
    return {k: v for k, v in (trace.meta.get("settings") or {}).items() if isinstance(v, str | int | float | bool)}


def _library(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise StepscopeError(f"this export needs the package {package}", hint=f"pip install {package}") from error
