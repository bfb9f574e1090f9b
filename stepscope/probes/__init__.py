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
