"""Fixtures for the reference loop: tiny models, one thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from stepscope.reference.config import TraceConfig

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small(tmp_path: Path, text_file: Path):
    """Options of a run that takes a fraction of a second; overrides go on top."""

    def make(**options: object) -> TraceConfig:
        defaults = {
            "hidden_size": 16,
            "layers": 1,
            "heads": 2,
            "batch_size": 2,
            "max_length": 16,
            "accumulation_steps": 2,
            "steps": 2,
            "device": "cpu",
            "data": None if "factory" in options else str(text_file),
            "out": str(tmp_path / "out"),
        }
        return TraceConfig(**{**defaults, **options})

    return make


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """Ten whole sequences of 14 bytes, for max_length 16."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"sentence {n:05d}" for n in range(10)))
    return path
