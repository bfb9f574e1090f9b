"""One file per measured thing; each probe declares its columns and turns events into cells.

Importing the probes needs no torch: `stepscope columns` reads their declarations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepscope.probes.averages import Averages
from stepscope.probes.batch import Batch
from stepscope.probes.census import Census
from stepscope.probes.clip import Clip
from stepscope.probes.grad_norm import GradNorm
from stepscope.probes.learning_rate import LearningRate
from stepscope.probes.loss import Loss
from stepscope.probes.loss_scale import LossScale
from stepscope.probes.modes import Modes
from stepscope.probes.precision import Precision
from stepscope.probes.progress import Progress
from stepscope.probes.ranks import Ranks
from stepscope.probes.schedule import Schedule
from stepscope.probes.state import State
from stepscope.probes.timing import Timing
from stepscope.probes.updates import Updates
from stepscope.schema import KEYS, Column

if TYPE_CHECKING:
    from stepscope.probes.base import Probe

ALL: tuple[type[Probe], ...] = (
    LossScale,
    GradNorm,
    Loss,
    Progress,
    LearningRate,
    Clip,
    Updates,
    Timing,
    Precision,
    Modes,
    Batch,
    Schedule,
    Ranks,
    Averages,
    Census,
    State,
)
"""Every probe, in the order in which rows are resolved: later ones may use the cells of earlier ones."""

PARAM_KEYS = (
    *KEYS,
    Column("global_step", "int64", "optimizer steps", "attempts of the optimizer up to and with this step"),
    Column("optimizer", "string", "", "class and index of the optimizer"),
    Column("param", "string", "", "name of the parameter in the model; by group and index where no model has it"),
    Column("group", "int64", "1", "parameter group, from 1"),
    Column("shape", "string", "", "shape, e.g. 64x128; empty for a scalar"),
    Column("dtype", "string", "", "dtype of the parameter"),
)


def step_columns() -> list[Column]:
    """Columns of the table of steps, in order."""
    order = ("progress", "learning_rate", "loss", "loss_scale", "grad_norm", "clip", "updates", "timing")
    ranked = sorted(ALL, key=lambda p: order.index(p.name) if p.name in order else len(order))
    return [column for probe in ranked for column in probe.columns]


def param_columns() -> list[Column]:
    """Columns of the table of parameters, in order."""
    return [*PARAM_KEYS, *(column for probe in ALL for column in probe.param_columns)]
