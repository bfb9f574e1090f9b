"""Do N processes with `DistributedDataParallel` give the gradient of one process with the joint batch?

The ranks run under torchrun's own launcher, in float64, and write what they have. One process then compares: the
reduced gradient is written as a weighted sum of all ranks' micro-batch gradients, as in the accumulation check, and
the parameters after a few optimizer steps are compared between the ranks, bit for bit.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from stepscope.checks.accumulation import diagnosis
from stepscope.checks.accumulation.exact import Evidence, measure
from stepscope.checks.accumulation.settings import Settings
from stepscope.checks.accumulation.weights import relative
from stepscope.checks.batches import batch_size
from stepscope.checks.experiment import Experiment, load_experiment
from stepscope.checks.findings import finding, outcome
from stepscope.checks.passes import Laboratory
from stepscope.checks.precision import FLOAT64
from stepscope.checks.reference import reference_experiment
from stepscope.errors import StepscopeError

if TYPE_CHECKING:
    from stepscope.rules.outcome import Finding, Outcome

CODE = "CHK500"
NAME = "ddp"
TIMEOUT = 300.0
"""Seconds after which a group of processes that does not end is given up."""

NAMES = {"accum-token-mean": "ddp-token-mean", "accum-unequal-weights": "ddp-token-mean"}
"""Finding of the accumulation check -> what it is called where the micro-batches lie on several ranks."""


def check_ddp(
    target: str = "",
    *,
    nproc: int = 2,
    accumulation_steps: int = 2,
    normalisation: Literal["mean", "targets"] = "mean",
    backend: str = "",
    seed: int = 0,
) -> Outcome:
    """Compare N processes with one.

    Args:
        target: ``file.py:make`` or ``pkg.mod:make``; empty for the reference model. Its ``window``, if any, is called
            on each rank with the DDP model and that rank's micro-batches.
        nproc: N, processes.
        accumulation_steps: K, micro-batches on each rank, with ``no_sync`` on all but the last.
        normalisation: how the tool's own window weighs a loss: ``mean`` 1/K, ``targets`` n_i·N_ranks/n.
        backend: gloo or nccl; empty takes nccl where there is a CUDA device for each process.
        seed: random state on every rank.

    Raises:
        StepscopeError: the batch is too small, or the processes could not run.
    """
    if nproc < 2:
        raise StepscopeError(f"{nproc} process is no group", hint="give --nproc 2 or more")
    experiment = load_experiment(target) if target else reference_experiment()
    if batch_size(experiment.batch) < nproc * accumulation_steps:
        raise StepscopeError(
            f"a batch of {batch_size(experiment.batch)} rows cannot be split into {nproc} x {accumulation_steps} parts"
        )
    request = {
        "target": target,
        "accumulation_steps": accumulation_steps,
        "normalisation": normalisation,
        "backend": backend or _backend(nproc),
        "seed": seed,
    }
    ranks = _launch(request, nproc)
    return _judge(experiment, ranks, nproc, accumulation_steps, seed, request)


def _backend(nproc: int) -> str:
    return "nccl" if torch.cuda.is_available() and torch.cuda.device_count() >= nproc else "gloo"


def _launch(request: dict[str, Any], nproc: int) -> list[dict[str, Tensor]]:
    """Run the ranks under torchrun and read what they saved."""
    with tempfile.TemporaryDirectory(prefix="stepscope-ddp-") as name:
        folder = Path(name)
        path = folder / "request.json"
        path.write_text(json.dumps({**request, "folder": name}), "utf-8")
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
        command = [*launcher, "-m", "stepscope.checks.ddp_worker", str(path)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT)
        except subprocess.TimeoutExpired as error:
            raise StepscopeError(
                f"the {nproc} processes did not end within {TIMEOUT:.0f} seconds",
                hint="a rank that reduces more often than the others waits for ever",
            ) from error
        if (folder / "error.txt").exists():
            raise StepscopeError((folder / "error.txt").read_text("utf-8"))
        files = [folder / f"rank{rank}.pt" for rank in range(nproc)]
        if done.returncode or not all(file.exists() for file in files):
            raise StepscopeError(f"the processes failed: {_reason(done.stderr)}")
        return [torch.load(file, weights_only=True) for file in files]


def _reason(stderr: str) -> str:
    """The last line of a traceback of a rank; torchrun prints its own summary after it."""
    errors = [line for line in stderr.splitlines() if "Error" in line and "ChildFailedError" not in line]
    return errors[-1].split("]: ")[-1].strip()[:300] if errors else "no error was printed"


def _judge(
    experiment: Experiment, ranks: list[dict[str, Tensor]], nproc: int, K: int, seed: int, request: dict[str, Any]
) -> Outcome:
    laboratory = Laboratory(replace(experiment, window=_left(ranks[0]["gradient"])), FLOAT64, seed=seed)
    settings = Settings(accumulation_steps=nproc * K, seed=seed)
    evidence = measure(laboratory, settings)
    findings = _rank_findings(ranks, evidence)
    if not findings and not evidence.equal:
        findings = _gradient_findings(evidence, laboratory, settings, nproc)
    rows = [
        {"rank": rank, "difference": relative(state["gradient"] - evidence.right, evidence.right)}
        for rank, state in enumerate(ranks)
    ]
    verdict = "different" if findings else "equal"
    summary = (
        f"{verdict}: {nproc} ranks of {K} micro-batches against one process with {batch_size(experiment.batch)} rows: "
        f"{evidence.difference:.2e} apart, bound {evidence.bound.value:.2e}"
    )
    return outcome(CODE, NAME, findings, summary, verdict=verdict, backend=request["backend"], rows=rows)


def _left(gradient: Tensor) -> Any:
    """A window that leaves the gradient that the ranks computed."""

    def window(model: nn.Module, micro_batches: list[Any]) -> None:
        parameters = [p for p in model.parameters() if p.requires_grad]
        pieces = torch.split(gradient, [p.numel() for p in parameters])
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.grad = piece.reshape(parameter.shape).to(parameter)

    return window


def _rank_findings(ranks: list[dict[str, Tensor]], evidence: Evidence) -> list[Finding]:
    """Ranks that hold another gradient than rank 0, or other parameters after the steps."""
    apart = [
        rank
        for rank, state in enumerate(ranks)
        if relative(state["gradient"] - ranks[0]["gradient"], evidence.right) > evidence.bound.value
    ]
    drift = max(float((state["parameters"] - ranks[0]["parameters"]).abs().max()) for state in ranks)
    if apart:
        return [
            finding(
                "nosync-misuse",
                f"ranks {apart} step with another gradient than rank 0: it was not reduced, or only in part; the last "
                f"micro-batch of a window must run its forward outside no_sync. Parameters drift by {drift:.2e}",
                observed=drift,
                expected=0.0,
            )
        ]
    drifting = [r for r, state in enumerate(ranks) if not torch.equal(state["parameters"], ranks[0]["parameters"])]
    if drifting:
        text = f"after some steps the parameters of ranks {drifting} differ from rank 0's by up to {drift:.2e}"
        return [finding("ddp-ranks-differ", text, observed=drift, expected=0.0)]
    return []


def _gradient_findings(evidence: Evidence, laboratory: Laboratory, settings: Settings, nproc: int) -> list[Finding]:
    """Why all ranks agree on a gradient that is not the joint batch's."""
    coupled = [diagnosis.coupling_finding(evidence, laboratory)] if evidence.coupled else []
    if evidence.mechanics_right:
        return coupled
    return [_named(found, nproc) for found in diagnosis.explain(evidence, settings, laboratory.sizes)] + coupled


def _named(found: Finding, nproc: int) -> Finding:
    """The finding by its name for several ranks."""
    factor = found.evidence.get("observed")
    if isinstance(factor, float) and abs(factor * nproc - 1) < 1e-3:
        return finding("ddp-double-average", f"{found.message}; 1/{nproc} is one average over the ranks too many")
    if isinstance(factor, float) and abs(factor / nproc - 1) < 1e-3:
        return finding("ddp-world-factor", f"{found.message}; {nproc} is the number of ranks, over which DDP averages")
    name = NAMES.get(found.name, found.name)
    return finding(name, found.message, **found.evidence)
