"""Watching reads no value from a device in the loop: as many host reads with it as without."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import stepscope
from tests.watch import loops


class CountReads(TorchDispatchMode):
    """Counts what would make the host wait on an asynchronous device (``.item()``, ``bool(t)``, ``float(t)``)."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def reads(dtype: str, fused: bool, *, watched: bool) -> int:
    net = loops.model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, enabled=dtype == "float16")
    with CountReads() as counter:
        if watched:
            with stepscope.watch():
                loops.train(net, optimizer, scaler, dtype=dtype, micro_steps=150)
        else:
            loops.train(net, optimizer, scaler, dtype=dtype, micro_steps=150)
    return counter.reads


@pytest.mark.parametrize(("dtype", "fused"), [("float32", False), ("float16", False), ("float16", True)])
def test_no_host_read_of_our_own(dtype, fused):
    """The loop's own reads (its losses, the scaler's found_inf) are all there are; several batches of rows travel."""
    plain = reads(dtype, fused, watched=False)

    assert plain >= 150
    assert reads(dtype, fused, watched=True) == plain
