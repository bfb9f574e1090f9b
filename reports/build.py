"""Rebuilds the sample reports and their gallery: ``python reports/build.py``.

Each sample is recorded from ``loop.py``, right or with one fault, and rendered as `stepscope report` does. All pages share one
copy of plotly.js, which lies beside them.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from loop import K, Loop, make_model, train

import stepscope
from stepscope.render.comparison import comparison_model
from stepscope.render.comparison_formats import render_comparison
from stepscope.render.html import PLOTLY, asset, render_html
from stepscope.render.model import build_model
from stepscope.render.palette import DARK, LIGHT, css_variables
from stepscope.rules.engine import judge
from stepscope.store.trace import Trace

HERE = Path(__file__).parent
SAMPLES = HERE / "samples"


@dataclass(frozen=True)
class Sample:
    """One recorded run: name of its page, what it shows, the loop."""

    name: str
    shows: str
    loop: Loop


RIGHT = Loop()

RUNS = (
    Sample(
        "right", "float16, four micro-steps a window, a few skips at the start, clip at 0.4: nothing to find", RIGHT
    ),
    Sample("accum-missing-divide", "the loss is not divided by 4", replace(RIGHT, fault="accum-missing-divide")),
    Sample(
        "accum-token-mean", "micro-batches with unequal numbers of targets", replace(RIGHT, fault="accum-token-mean")
    ),
    Sample("accum-tail-dropped", "two micro-steps after the last full window", replace(RIGHT, tail=2)),
    Sample(
        "zero-grad-missing",
        "gradients are never cleared, in bfloat16",
        replace(RIGHT, fault="zero-grad-missing", dtype=torch.bfloat16),
    ),
    Sample("clip-before-unscale", "the clip sees scaled gradients", replace(RIGHT, fault="clip-before-unscale")),
    Sample(
        "sched-per-microbatch", "the scheduler steps at every micro-step", replace(RIGHT, fault="sched-per-microbatch")
    ),
    Sample("scaler-collapse", "the loss becomes NaN and the scale falls", replace(RIGHT, fault="scaler-collapse")),
    Sample(
        "loss-nan-empty-labels",
        "a batch without targets, in bfloat16",
        replace(RIGHT, fault="loss-nan-empty-labels", dtype=torch.bfloat16),
    ),
    Sample(
        "bf16-update-lost",
        "weights kept in bfloat16, whose small updates round away",
        replace(RIGHT, fault="bf16-update-lost", dtype=torch.bfloat16),
    ),
)

COMPARISONS = (
    ("before-and-after-a-fix", "the forgotten division, before and after", "accum-missing-divide", RIGHT),
    ("clip-0.4-and-0.01", "a clip at 0.4 and one at 0.01", "right", replace(RIGHT, max_norm=0.01)),
    ("float16-and-bfloat16", "the same loop in float16 and in bfloat16", "right", replace(RIGHT, dtype=torch.bfloat16)),
)


def record(loop: Loop, name: str, folder: Path) -> Trace:
    """Train under the watcher and read the trace back."""
    weights = torch.bfloat16 if loop.fault == "bf16-update-lost" else torch.float32
    model = make_model(weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    declared = {"accumulation_steps": K, "loss_average": "targets"}
    facts = {"script": name, "command": ["reports/build.py", name]}
    with stepscope.watch(model, optimizer, out=folder / name, declare=declared, meta=facts):
        train(loop, model, optimizer)
    return Trace.load(folder / name)


def report(sample: Sample, trace: Trace) -> dict[str, Any]:
    """Write the page of one run; returns its line in the gallery."""
    model = build_model(trace, judge(trace))
    page = SAMPLES / f"{sample.name}.html"
    page.write_text(render_html(model, plotly=PLOTLY), "utf-8")
    return {
        "page": page.name,
        "name": sample.name,
        "shows": sample.shows,
        "verdict": model.verdict,
        "found": model.findings,
    }


def compared(name: str, shows: str, runs: dict[str, Trace]) -> dict[str, Any]:
    """Write the page of one comparison; returns its line in the gallery."""
    model = comparison_model(runs)
    page = SAMPLES / f"{name}.html"
    page.write_text(render_comparison(model, "html", plotly=PLOTLY), "utf-8")
    return {"page": page.name, "name": name, "shows": shows, "heading": model.heading, "line": model.line}


def build() -> None:
    """Record every sample, write its page, and the gallery."""
    torch.set_num_threads(1)
    shutil.rmtree(SAMPLES, ignore_errors=True)
    SAMPLES.mkdir()
    (SAMPLES / PLOTLY).write_text(asset(PLOTLY) + "\n", "utf-8")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        traces = {s.name: record(s.loop, s.name, folder) for s in RUNS}
        lines = [report(s, traces[s.name]) for s in RUNS]
        pairs = [
            compared(n, shows, {first: traces[first], "other": record(loop, f"{n}-other", folder)})
            for n, shows, first, loop in COMPARISONS
        ]
    environment = Environment(loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined)
    page = environment.get_template("gallery.html.j2").render(
        runs=lines, comparisons=pairs, light=css_variables(LIGHT), dark=css_variables(DARK)
    )
    (HERE / "index.html").write_text(page + "\n", "utf-8")
    size = sum(p.stat().st_size for p in SAMPLES.iterdir())
    sys.stderr.write(f"wrote {len(lines) + len(pairs)} pages, {size / 1e6:.1f} MB, and {HERE / 'index.html'}\n")


if __name__ == "__main__":
    build()
