"""How long a million micro-steps with 200 parameters take to judge and to render, and in how much memory.

usage: python benchmarks/million.py [--micro-steps 1000000] [--json FILE]

The trace is made up: float16 with accumulation over four, calibration skips, a clip that binds now and then, a tail at
the end of each epoch, a few losses that are NaN. Judging and rendering run in a process of their own, whose peak memory
is reported. Timings decide no test.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

K = 4
PARAMETERS = 200
BATCH = 64 * 1024


def columns(first: int, size: int) -> dict[str, np.ndarray]:
    """Cells of `size` micro-steps from number `first`; NaN stands for null."""
    number = np.arange(first, first + size)
    end = number % K == 0
    attempt = (number - 1) // K + 1
    skipped = end & ((attempt <= 3) | (attempt % 2000 == 0))
    noise = np.random.default_rng(first).normal(size=size)
    last = np.where(end, 1.0, np.nan)
    scale = 2.0 ** (16 - np.minimum(attempt, 4))
    norm = np.abs(1.0 + 0.4 * noise)
    return {
        "rank": np.zeros(size), "micro_step": number, "window_step": (number - 1) % K + 1, "window_size": K * last,
        "epoch": number // 100_000 + 1, "global_step": attempt, "applied_steps": attempt, "sync_gradients": end,
        "tail": np.where(end, 0.0, np.nan), "closure": np.where(end, 0.0, np.nan), "step_in_backward": np.where(end, 0.0, np.nan),
        "lr": 1e-3 * (0.1 + 0.45 * (1 + np.cos(np.pi * number / 1e6))), "loss": 5 * np.exp(-number / 4e5) + 0.1 * noise,
        "loss_weight": np.full(size, 1 / K), "loss_weight_sum": last, "loss_weight_used": last,
        "loss_scaled": scale * 1.2, "num_items": np.full(size, 508.0), "target_weight": np.full(size, 1 / K / 508), "loss_terms": np.ones(size),
        "loss_scale_before": scale, "loss_scale_after": scale * last, "unscale_divisor": scale * last, "unscale_calls": end * 1.0,
        "update_calls": end * 1.0, "found_inf": np.where(end, skipped, np.nan), "step_skipped": np.where(end, skipped, np.nan),
        "step_in_scaler": last, "grad_scaled_at_step": np.where(end, 0.0, np.nan),
        "grad_norm_before": np.where(number % K == 1, 0.0, np.nan), "grad_norm_scaled": norm * scale * last, "grad_norm": norm * last,
        "grad_norm_clipped": np.minimum(norm, 1.0) * last, "grad_params": PARAMETERS * last, "grad_nonfinite": np.where(end, 0.0, np.nan),
        "clip_max_norm": last, "clip_norm": norm * last, "clip_coef": np.minimum(1, 1 / norm) * last, "clip_bound": np.where(end, norm > 1, np.nan),
        "clip_calls": end * 1.0, "clip_scaled": np.where(end, 0.0, np.nan), "clip_after_step": np.where(end, 0.0, np.nan), "clip_covered": last,
        "clip_overlap": np.where(end, 0.0, np.nan), "param_norm": 40 * last, "update_norm": 0.02 * last, "update_max": 1e-3 * last,
        "update_ratio": 5e-4 * last, "forward_ms": np.full(size, 3.0), "backward_ms": np.full(size, 6.0), "step_ms": 1.5 * last,
        "autocast_backward": np.zeros(size), "autocast_step": np.where(end, 0.0, np.nan), "batch_fingerprint": number * 2654435761,
        "batch_size": np.full(size, 4.0), "scheduler_steps": np.zeros(size), "average_updates": np.zeros(size), "all_reduce_calls": np.zeros(size),
        "modules_in_eval": np.zeros(size), "frozen_norms_in_train": np.zeros(size), "optimizer_state_step": attempt * last,
    }  # fmt: skip


def write(folder: Path, micro_steps: int) -> None:
    """A trace directory of the given length."""
    from stepscope.probes import param_columns, step_columns
    from stepscope.schema import EVENT_COLUMNS
    from stepscope.store.journal import arrow_schema
    from stepscope.store.writer import DirectoryStore

    store = DirectoryStore(folder)
    store.open(step_columns(), param_columns(), EVENT_COLUMNS)
    schema = arrow_schema(step_columns())
    path = folder / "journal" / "rank0-steps-000.arrows"
    with pa.ipc.new_stream(path, schema) as writer:
        for first in range(1, micro_steps + 1, BATCH):
            size = min(BATCH, micro_steps - first + 1)
            writer.write_batch(_batch(schema, columns(first, size), size))
    _write_params(folder, arrow_schema(param_columns()), micro_steps)
    store.write_meta(
        {"status": "complete", "declared": {"accumulation_steps": K}, "not_observed": {}, "probes_off": {}}
    )


def _batch(schema: pa.Schema, cells: dict[str, np.ndarray], size: int) -> pa.RecordBatch:
    texts = {
        "optimizer": "AdamW/0",
        "calls": "FB",
        "loss_reduction": "mean",
        "loss_kind": "targets",
        "autocast_dtype": "float16",
    }
    arrays = []
    for field in schema:
        if field.name in texts:
            arrays.append(pa.array([texts[field.name]] * size))
        elif field.name in cells:
            arrays.append(pa.array(np.asarray(cells[field.name], float), from_pandas=True).cast(field.type, safe=False))
        else:
            arrays.append(pa.nulls(size, field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _write_params(folder: Path, schema: pa.Schema, micro_steps: int) -> None:
    """Parameter rows in the rhythm that a recorder keeps by default."""
    windows = np.arange(1, micro_steps // K + 1)
    due = windows[(windows <= 200) | ((windows <= 10_000) & (windows % 10 == 0)) | (windows % 100 == 0)]
    names = [f"layers.{i // 8}.part{i % 8}.weight" for i in range(PARAMETERS)]
    with pa.ipc.new_stream(folder / "journal" / "rank0-params-000.arrows", schema) as writer:
        for window in due:
            noise = np.random.default_rng(int(window)).random(PARAMETERS)
            held = {"rank": 0, "micro_step": window * K, "global_step": window, "group": 1}
            text = {
                "optimizer": ["AdamW/0"] * PARAMETERS,
                "param": names,
                "shape": ["64x64"] * PARAMETERS,
                "dtype": ["float32"] * PARAMETERS,
            }
            arrays = []
            for field in schema:
                if field.name in text:
                    arrays.append(pa.array(text[field.name]))
                elif field.name in held:
                    arrays.append(pa.array(np.full(PARAMETERS, held[field.name]), field.type))
                else:
                    arrays.append(pa.array(noise, pa.float64()).cast(field.type, safe=False))
            writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))


def child(folder: Path) -> None:
    """Load, judge and render; prints figures as JSON."""
    from stepscope.render.html import render_html
    from stepscope.render.model import build_model
    from stepscope.rules.engine import all_rules, judge
    from stepscope.store.trace import Trace

    all_rules()
    times = {}
    begin = time.perf_counter()
    trace = Trace.load(folder)
    times["load_s"] = time.perf_counter() - begin
    begin = time.perf_counter()
    outcomes = judge(trace)
    times["judge_s"] = time.perf_counter() - begin
    times["judge_peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    begin = time.perf_counter()
    page = render_html(build_model(trace, outcomes))
    times["render_s"] = time.perf_counter() - begin
    times["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    times["page_mib"] = len(page) / 2**20
    broken = [o.reason for o in outcomes if "the rule itself failed" in o.reason]
    found = {f.name: f.severity for o in outcomes for f in o.findings}
    print(json.dumps({k: round(v, 2) for k, v in times.items()} | {"findings": found, "broken_rules": broken}))


def main() -> None:
    """Make the trace, measure in a child process, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--micro-steps", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", type=Path)
    args = parser.parse_args()
    if args.child is not None:
        child(args.child)
        return
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), args.micro_steps)
        size = sum(p.stat().st_size for p in Path(folder).rglob("*.arrows"))
        done = subprocess.run([sys.executable, __file__, "--child", folder], capture_output=True, text=True, check=True)
    result = {"micro_steps": args.micro_steps, "trace_mib": round(size / 2**20, 1), **json.loads(done.stdout)}
    print(json.dumps(result, indent=1))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
