"""Checkpoints that a run can continue from bit for bit, written so that a crash never leaves half a file.

A checkpoint is taken at the end of a window, when no gradient is pending. It holds every state that shapes the rest of
the run: parameters, optimizer moments, schedule, loss scale, position in the data, and the random states.
"""

from __future__ import annotations

import os
import pickle
import random
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from stepscope.errors import StepscopeError

if TYPE_CHECKING:
    from pathlib import Path

    from torch.amp import GradScaler
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

FORMAT = "stepscope-checkpoint"
FORMAT_VERSION = 1
PARTS = ("model", "optimizer", "scheduler", "scaler", "position", "random", "config")
"""What a checkpoint holds besides its format. `scheduler` is None in a run that has none."""


def capture(
    *,
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
    scaler: GradScaler,
    position: dict[str, int],
    config: dict[str, Any],
) -> dict[str, Any]:
    """Collect the state of a run at the end of a window.

    Args:
        model: parameters and buffers.
        optimizer: moments and step counts.
        scheduler: its counters.
        scaler: loss scale and growth tracker; empty when scaling is off.
        position: ``epoch``, ``step`` in the epoch, and ``batches`` taken from the data over the run.
        config: the options of the run, plain values.
    """
    return {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "scaler": scaler.state_dict(),
        "position": position,
        "random": random_states(),
        "config": config,
    }


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write `state` to a temporary file beside `path`, force it to the disk, and only then give it its name.

    Raises:
        StepscopeError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise StepscopeError(f"checkpoint {path} cannot be written: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint without running any code that it may contain.

    Raises:
        StepscopeError: the file is missing, damaged, not a checkpoint of stepscope, or lacks a part.
    """
    if not path.is_file():
        raise StepscopeError(f"{path}: no such checkpoint")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except PermissionError as error:
        raise StepscopeError(f"{path} cannot be read: {error.strerror}") from error
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, OSError) as error:
        # A truncated file makes torch seek before its start, which the system reports as an OSError.
        raise StepscopeError(f"{path} is damaged, or no checkpoint at all") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise StepscopeError(f"{path} is not a checkpoint written by stepscope", hint="--resume takes its own only")
    if state.get("version") != FORMAT_VERSION:
        raise StepscopeError(
            f"{path} has checkpoint format {state.get('version')}; this version reads {FORMAT_VERSION}"
        )
    missing = [part for part in PARTS if part not in state]
    if missing:
        raise StepscopeError(f"{path} lacks {', '.join(missing)}: a run cannot be continued from it")
    return state


def restore(
    state: dict[str, Any],
    *,
    model: nn.Module,
    optimizer: Optimizer,
    scheduler: LRScheduler | None,
    scaler: GradScaler,
) -> None:
    """Load everything but the random states, which `restore_random` sets just before training goes on.

    Raises:
        StepscopeError: a part that does not fit this run; for a parameter, the first one with both shapes.
    """
    _check_parameters(model, state["model"])
    model.load_state_dict(state["model"])
    _load("optimizer", optimizer, state["optimizer"])
    if (scheduler is None) != (state["scheduler"] is None):
        raise StepscopeError(
            "the checkpoint and this run do not both have a scheduler", hint="give the --schedule it was saved with"
        )
    if scheduler is not None:
        _load("scheduler", scheduler, state["scheduler"])
    _load("scaler", scaler, state["scaler"])


def _check_parameters(model: nn.Module, saved: dict[str, torch.Tensor]) -> None:
    current = model.state_dict()
    for name, tensor in current.items():
        if name not in saved:
            raise StepscopeError(f"the checkpoint has no parameter {name}", hint="it is of another model")
        if tensor.shape != saved[name].shape:
            raise StepscopeError(
                f"parameter {name} has shape {tuple(saved[name].shape)} in the checkpoint and {tuple(tensor.shape)} "
                "in this model",
                hint="give the model options it was saved with",
            )
    extra = next((name for name in saved if name not in current), None)
    if extra is not None:
        raise StepscopeError(f"the checkpoint's parameter {extra} is not in this model", hint="it is of another model")


def _load(part: str, target: Any, state: dict[str, Any]) -> None:
    try:
        target.load_state_dict(state)
    except (ValueError, KeyError, RuntimeError, TypeError) as error:
        raise StepscopeError(f"the checkpoint's {part} does not fit this run: {error}") from error


def random_states() -> dict[str, Any]:
    """States of every generator that training may draw from, as plain values and byte tensors."""
    version, internal, gauss_next = random.getstate()
    states: dict[str, Any] = {
        "python": [version, list(internal), gauss_next],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": None,
    }
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = numpy.random.get_state()
        states["numpy"] = [kind, keys.tolist(), *rest]
    return states


def restore_random(states: dict[str, Any]) -> None:
    """Set the generators that `random_states` captured; CUDA's only where the number of devices is the same."""
    version, internal, gauss_next = states["python"]
    random.setstate((version, tuple(internal), gauss_next))
    torch.set_rng_state(states["torch"])
    if states["cuda"] and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])
    if states["numpy"] is not None and (numpy := sys.modules.get("numpy")) is not None:
        kind, keys, *rest = states["numpy"]
        numpy.random.set_state((kind, numpy.array(keys, dtype="uint32"), *rest))
