"""One rank of the ddp check, started by torchrun's launcher: ``… -m stepscope.checks.ddp_worker REQUEST.json``.

It computes this rank's part of the joint batch in float64, lets `DistributedDataParallel` reduce it, and writes the
gradient and the parameters after a few optimizer steps to a file of its own.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from stepscope.checks.batches import split
from stepscope.checks.experiment import Experiment, load_experiment
from stepscope.checks.passes import Laboratory
from stepscope.checks.precision import FLOAT64
from stepscope.checks.reference import reference_experiment
from stepscope.checks.terms import count_targets, total
from stepscope.errors import EXIT_COULD_NOT_RUN, StepscopeError

STEPS = 3
"""Optimizer steps after which the ranks' parameters are compared: a drift needs two."""


def run(request: dict[str, Any]) -> None:
    """Do this rank's part and save it as ``rank<r>.pt``."""
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    experiment = load_experiment(request["target"]) if request["target"] else reference_experiment()
    laboratory = Laboratory(experiment, FLOAT64, seed=request["seed"])
    K = request["accumulation_steps"]
    mine = [laboratory.cast(m) for m in split(experiment.batch, world * K)[rank * K : (rank + 1) * K]]
    with laboratory.running():
        model = DistributedDataParallel(laboratory.model)
        gradient = _window(laboratory, model, mine, request["normalisation"])
        optimizer = laboratory.optimizer()
        for _ in range(STEPS):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            _window(laboratory, model, mine, request["normalisation"])
    torch.save({"gradient": gradient, "parameters": laboratory.values()}, Path(request["folder"]) / f"rank{rank}.pt")


def _window(laboratory: Laboratory, model: nn.Module, micro_batches: list[Any], normalisation: str) -> Tensor:
    """Accumulate over this rank's micro-batches; the reducer runs at the last one."""
    experiment = laboratory.experiment
    if experiment.window is not None:
        experiment.window(model, micro_batches, **laboratory.extras(experiment.window, 1.0))
        return laboratory.vector()
    weights = _weights(experiment, model, micro_batches, normalisation)
    for place, (micro_batch, weight) in enumerate(zip(micro_batches, weights, strict=True), 1):
        last = place == len(micro_batches)
        with nullcontext() if last else model.no_sync():  # type: ignore[operator]
            torch.autograd.backward(total(experiment.loss_fn(model, micro_batch)) * weight)
    return laboratory.vector()


def _weights(experiment: Experiment, model: nn.Module, micro_batches: list[Any], normalisation: str) -> list[float]:
    """1/K each; or n_i·W/N, for the reducer divides by the W ranks."""
    if normalisation != "targets":
        return [1.0 / len(micro_batches)] * len(micro_batches)
    counts = [_count(experiment, model, micro_batch) for micro_batch in micro_batches]
    everywhere = torch.tensor(float(sum(counts)), dtype=torch.float64)
    dist.all_reduce(everywhere)
    return [count * dist.get_world_size() / float(everywhere) for count in counts]


def _count(experiment: Experiment, model: nn.Module, micro_batch: Any) -> int:
    if experiment.num_targets is not None:
        return int(experiment.num_targets(micro_batch))
    with model.no_sync():  # type: ignore[operator]
        counted = count_targets(experiment.loss_fn(model, micro_batch))
    if counted is None:
        raise StepscopeError("the targets cannot be counted from the loss", hint="return num_targets(batch) as well")
    return counted


def main(path: str) -> int:
    """Run the request in `path` in the process group that torchrun describes."""
    request = json.loads(Path(path).read_text("utf-8"))
    dist.init_process_group(request["backend"])
    try:
        if request["backend"] == "nccl":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        run(request)
    except StepscopeError as error:
        (Path(request["folder"]) / "error.txt").write_text(str(error), "utf-8")
        return EXIT_COULD_NOT_RUN
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
