"""One run of the reference loop in a process of its own, for the resume check: ``python -m … REQUEST.json``.

The request holds the options of the run, where to put the diary, and the state to drop. The diary has one line per
optimizer step: its number, the mean loss of its window, the rate, and a fingerprint of all parameters.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from stepscope.errors import EXIT_COULD_NOT_RUN, StepscopeError
from stepscope.reference.build import build
from stepscope.reference.checkpoint import random_states
from stepscope.reference.config import TraceConfig
from stepscope.reference.run import Prepared, prepare

if TYPE_CHECKING:
    from stepscope.reference.loop import MicroStep, WindowEnd


def run(request: dict[str, Any]) -> None:
    """Train as asked and write the diary."""
    torch.set_num_threads(1)
    config = TraceConfig(**request["config"])
    prepared = prepare(config)
    if request["drop"]:
        drop(prepared, request["drop"])
    diary: list[dict[str, Any]] = []
    losses: list[torch.Tensor] = []
    done = prepared.resumed["position"]["batches"] if prepared.resumed else 0

    def note_loss(info: MicroStep) -> None:
        losses.append(info.loss * info.window_size)

    def note_window(info: WindowEnd) -> None:
        diary.append(
            {
                "step": done // config.accumulation_steps + len(diary) + 1,
                "loss": float(torch.stack(losses).mean()),
                "lr": prepared.parts.optimizer.param_groups[0]["lr"],
                "parameters": fingerprint(prepared.parts.model),
            }
        )
        losses.clear()

    result = prepared.train(on_micro_step=note_loss, on_window=note_window)
    checkpoints = [str(path) for path in result.checkpoints]
    Path(request["diary"]).write_text(json.dumps({"steps": diary, "checkpoints": checkpoints}), "utf-8")


def drop(prepared: Prepared, part: str) -> None:
    """Put one part of a resumed run back to how a fresh run has it."""
    assert prepared.resumed is not None
    fresh = build(replace(prepared.config, resume=None))
    parts = prepared.parts
    if part == "optimizer":
        parts.optimizer.load_state_dict({**parts.optimizer.state_dict(), "state": {}})
    elif part == "scheduler" and parts.scheduler is not None and fresh.scheduler is not None:
        parts.scheduler.load_state_dict(fresh.scheduler.state_dict())
    elif part == "scaler":
        parts.scaler.load_state_dict(fresh.scaler.state_dict())
    elif part == "rng":
        build(replace(prepared.config, resume=None))  # building seeds every generator
        prepared.resumed["random"] = random_states()
    elif part == "sampler":
        stream = parts.data.stream
        parts.data.stream = lambda start=0: stream(0)  # type: ignore[method-assign]
    elif part == "model":
        parts.model.load_state_dict(fresh.model.state_dict())


def fingerprint(model: torch.nn.Module) -> str:
    """SHA-256 over the bytes of all parameters."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def main(path: str) -> int:
    """Run the request in `path`; a mistake of the user is one line on stderr."""
    try:
        run(json.loads(Path(path).read_text("utf-8")))
    except StepscopeError as error:
        print(f"stepscope: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_COULD_NOT_RUN
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
