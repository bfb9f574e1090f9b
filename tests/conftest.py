"""Fixtures for every test: nothing of ours may be left behind, and the size of a terminal is fixed."""

from __future__ import annotations

import gc
import os
import sys

import pytest

os.environ.setdefault("COLUMNS", "100")


def pytest_addoption(parser):
    parser.addoption("--accept-gold", action="store_true", help="write the gold files instead of comparing with them")


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """After every test no patch, hook or listener of ours is in place."""
    if "torch" in sys.modules:
        gc.collect()  # optimizers of the test before must not be found by this one's recording
        if not gc.get_freeze_count():
            gc.freeze()  # it looks among all objects: those of the libraries need not be seen each time
    yield
    patches = sys.modules.get("stepscope.watch.patches")
    if patches is not None:
        import torch

        hooks = sys.modules["torch.optim.optimizer"]

        assert not patches.installed(), "a test left the patches installed"
        assert not torch.nn.modules.module._global_forward_hooks
        assert not torch.nn.modules.module._global_forward_pre_hooks
        assert not hooks._global_optimizer_pre_hooks
        assert not hooks._global_optimizer_post_hooks
