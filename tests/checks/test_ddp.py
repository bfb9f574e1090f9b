"""Several gloo processes against one: each test starts two of them under torchrun."""

from __future__ import annotations

import pytest

from stepscope.checks.ddp import check_ddp
from stepscope.errors import StepscopeError

TARGET = """
import contextlib
import torch
from torch import nn
from torch.nn import functional as F

def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])

def make(uneven=False):
    torch.manual_seed(0)
    labels = torch.randint(0, 3, (8,))
    if uneven:
        labels[7] = -100
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.3), nn.Linear(5, 3))
    return {"model": model, "batch": (torch.randn(8, 4), labels), "loss_fn": loss_fn}

def make_uneven():
    return make(uneven=True)

def accumulate(model, micro_batches, synced, factor):
    for place, micro_batch in enumerate(micro_batches, 1):
        sync = synced and place == len(micro_batches)
        with contextlib.nullcontext() if sync else model.no_sync():
            (factor * loss_fn(model, micro_batch) / len(micro_batches)).backward()

def make_never_synced():
    return make() | {"window": lambda model, micro: accumulate(model, micro, False, 1)}

def make_times_world():
    return make() | {"window": lambda model, micro: accumulate(model, micro, True, 2)}
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("ddp") / "ddp_target.py"
    path.write_text(TARGET)
    return str(path)


@pytest.mark.parametrize(
    ("make", "normalisation", "name"),
    [
        ("make_uneven", "mean", "ddp-token-mean"),
        ("make_uneven", "targets", None),
        ("make_never_synced", "mean", "nosync-misuse"),
        ("make_times_world", "mean", "ddp-world-factor"),
    ],
)
def test_ranks_against_one_process(target: str, make: str, normalisation, name: str | None) -> None:
    outcome = check_ddp(f"{target}:{make}", nproc=2, accumulation_steps=2, normalisation=normalisation)
    assert [finding.name for finding in outcome.findings] == ([name] if name else [])
    if name is None:
        assert all(row["difference"] < 1e-13 for row in outcome.details["rows"])


def test_bad_input_is_one_line(target: str) -> None:
    with pytest.raises(StepscopeError, match="no group"):
        check_ddp(f"{target}:make", nproc=1)
    with pytest.raises(StepscopeError, match="8 rows cannot be split into 2 x 5 parts"):
        check_ddp(f"{target}:make", accumulation_steps=5)
