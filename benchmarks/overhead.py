"""What watching costs: the same loop watched and unwatched, interleaved in one process, as a ratio.

Usage: python benchmarks/overhead.py [--device cpu] [--windows N] [--sizes small,medium,large] [--json FILE]

Each round trains a few windows of the reference model unwatched and a few watched, in turn; the ratio of the medians is
reported with the milliseconds. Timings decide no test.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import stepscope
from stepscope.reference.config import ModelConfig
from stepscope.reference.model import CausalLM

SIZES = {"small": (64, 2), "medium": (256, 4), "large": (512, 8)}
TARGETS = {"small": 1.08, "medium": 1.03, "large": 1.03}
K = 4
_FIRST = 10
"""Windows at the beginning of a recording in which more is looked at than later (see docs/how-it-works.md)."""


class Loop:
    """A training loop on random tokens: float32, accumulation over K, clip, AdamW."""

    def __init__(self, hidden: int, layers: int, device: str, batch: int, length: int) -> None:
        torch.manual_seed(0)
        config = ModelConfig(vocab_size=259, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=4)
        self.model = CausalLM(config).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = torch.randint(0, 259, (batch, length), device=device)
        self.device = device

    def window(self) -> None:
        """K micro-steps and one optimizer step."""
        for _ in range(K):
            loss = self.model(self.batch, labels=self.batch).loss / K
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def timed(self, windows: int) -> list[float]:
        """Milliseconds of each of a number of windows."""
        out = []
        for _ in range(windows):
            _wait(self.device)
            begin = time.perf_counter()
            self.window()
            _wait(self.device)
            out.append((time.perf_counter() - begin) * 1e3)
        return out


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def measure(size: str, device: str, rounds: int, windows: int) -> dict[str, Any]:
    """The ratio for one size; rounds alternate so that a busy machine disturbs both alike."""
    hidden, layers = SIZES[size]
    loop = Loop(hidden, layers, device, batch=4, length=128)
    loop.timed(2)
    plain: list[float] = []
    seen: list[float] = []
    first: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            plain += loop.timed(windows)
            watching = stepscope.watch(loop.model, loop.optimizer, out=Path(folder) / str(number))
            watching.start()
            first += loop.timed(_FIRST)  # looked at more closely: once a run, whatever its length
            seen += loop.timed(windows)
            watching.stop()
        written = sum(p.stat().st_size for p in Path(folder).glob("*/journal/*steps*"))
    a, b = statistics.median(plain), statistics.median(seen)
    parameters = sum(p.numel() for p in loop.model.parameters())
    rows = rounds * (windows + _FIRST) * K
    return {
        "size": size,
        "hidden": hidden,
        "layers": layers,
        "parameters": parameters,
        "unwatched_ms": round(a, 3),
        "watched_ms": round(b, 3),
        "ratio": round(b / a, 4),
        "ratio_of_first_windows": round(statistics.fmean(first) / a, 4),
        "ratio_of_minima": round(min(seen) / min(plain), 4),
        "aim": TARGETS[size],
        "steps_bytes_per_micro_step": round(written / rows),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--windows", type=int, default=0, help="windows a round; 0: by size")
    parser.add_argument("--sizes", default="small,medium,large")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for size in args.sizes.split(","):
        windows = args.windows or {"small": 20, "medium": 5, "large": 2}[size]
        row = measure(size, args.device, args.rounds, windows)
        rows.append(row)
        print(
            f"{size:<7} {row['parameters'] / 1e6:7.2f} M parameters   unwatched {row['unwatched_ms']:9.2f} ms   "
            f"watched {row['watched_ms']:9.2f} ms   ratio {row['ratio']:.4f} (aim {row['aim']})   "
            f"{row['steps_bytes_per_micro_step']} bytes/micro-step",
            flush=True,
        )
    if args.json is not None:
        args.json.write_text(json.dumps({"device": args.device, "torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
