"""One file per subject: each listener turns what the patches tell it into entries in the books and events."""

from stepscope.watch.listeners.clipping import ClipListener
from stepscope.watch.listeners.scaler import ScalerListener
from stepscope.watch.listeners.schedule import ScheduleListener
from stepscope.watch.listeners.state import StateListener
from stepscope.watch.listeners.steps import StepListener
from stepscope.watch.listeners.surroundings import SurroundingsListener

LISTENERS = (StepListener, ScalerListener, ClipListener, ScheduleListener, SurroundingsListener, StateListener)
"""Every listener there is."""

__all__ = ["LISTENERS"]
