"""Plausible traces without a recorder: float16 training with accumulation, skips, a clip and a tail, in numpy alone."""

import json
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa

from stepscope.rules.outcome import Finding, failed, passed, skipped
from stepscope.schema import EVENT_COLUMNS, Column
from stepscope.store.journal import arrow_schema
from stepscope.store.trace import Trace

STEPS = (
    Column("rank", "int64", "1", "process that recorded the row"),
    Column("micro_step", "int64", "micro-steps", "number of the backward pass, from 1 over the run"),
    Column("optimizer", "string", "", "optimizer"),
    Column("window_step", "int64", "micro-steps", "place in the window from 1"),
    Column("window_size", "int64", "micro-steps", "micro-steps in the window", "not the last row of a window"),
    Column("global_step", "int64", "steps", "attempts of the optimizer"),
    Column("applied_steps", "int64", "steps", "attempts that changed parameters"),
    Column("sync_gradients", "bool", "", "a step was attempted after this micro-step"),
    Column("tail", "bool", "", "the window is shorter than K", "not the last row of a window"),
    Column("calls", "string", "", "calls up to the next micro-step, a letter each"),
    Column("lr", "float64", "1", "rate that the step used"),
    Column("loss", "float64", "1", "as the model gave it: unscaled, undivided"),
    Column("loss_weight", "float64", "1", "factor with which the loss enters backward"),
    Column("loss_weight_sum", "float64", "1", "sum over the window", "not the last row of a window"),
    Column("loss_scaled", "float64", "1", "the value backward was called on"),
    Column("num_items", "int64", "targets", "targets that counted in the loss"),
    Column("loss_scale_before", "float64", "1", "GradScaler scale before update", "not the last row of a window"),
    Column("loss_scale_after", "float64", "1", "GradScaler scale after update", "not the last row of a window"),
    Column("found_inf", "bool", "", "a gradient was not finite", "not the last row of a window"),
    Column("step_skipped", "bool", "", "the step was left out", "not the last row of a window"),
    Column("grad_norm", "float64", "1", "L2, unscaled, before the clip", "not the last row of a window"),
    Column("grad_norm_clipped", "float64", "1", "L2 as the step used it", "not the last row of a window"),
    Column("clip_max_norm", "float64", "1", "limit", "not the last row of a window"),
    Column("clip_bound", "bool", "", "the limit bound", "not the last row of a window"),
    Column("param_norm", "float64", "1", "L2 of the parameters", "not the last row of a window"),
    Column("update_norm", "float64", "1", "L2 of the change", "not the last row of a window"),
    Column("update_ratio", "float64", "1", "L2 ratio", "not the last row of a window"),
    Column("backward_ms", "float64", "ms", "time of backward"),
)

PARAMS = (
    Column("rank", "int64", "1", "process"),
    Column("micro_step", "int64", "micro-steps", "last backward of the window"),
    Column("global_step", "int64", "steps", "attempts"),
    Column("param", "string", "", "name"),
    Column("group", "int64", "1", "parameter group from 1"),
    Column("grad_norm", "float64", "1", "L2, unscaled, before the clip"),
    Column("update_ratio", "float64", "1", "L2 ratio"),
    Column("lost_update_frac", "float64", "1", "share without change"),
    Column("grad_zero_frac", "float64", "1", "share exactly 0"),
    Column("grad_nonfinite", "int64", "elements", "not finite"),
)


@dataclass(frozen=True)
class Run:
    """What the made-up run was like."""

    windows: int = 12
    K: int = 4
    tail: int = 2
    skips: tuple[int, ...] = (1, 2)  # windows whose step was skipped, from 1
    nan_loss: tuple[int, ...] = ()  # micro-steps
    weight: float | None = None  # loss weight; 1/K if None
    clip: float = 1.0
    base_lr: float = 5e-4
    scale: float = 65536.0
    ranks: int = 1
    optimizers: tuple[str, ...] = ("AdamW:0",)
    params: tuple[str, ...] = ("embed.weight", "layers.0.attn.q.weight", "layers.0.mlp.up.weight", "norm.weight")
    every: int = 1  # parameter rows every so many windows
    seed: int = 0
    events: bool = True
    lr_offset: float = 0.0  # added to the rate of the last rank
    meta: dict = field(default_factory=dict)

    @property
    def micro_steps(self):
        return self.windows * self.K + self.tail


def make(run: Run = Run(), **changes) -> Trace:
    """The trace of a run."""
    run = replace(run, **changes)
    tracks = [(r, o) for r in range(run.ranks) for o in run.optimizers]
    steps = pa.concat_tables([_steps(run, rank, optimizer) for rank, optimizer in tracks])
    tables = {"steps": steps}
    if run.params:
        tables["params"] = pa.concat_tables([_params(run, rank) for rank in range(run.ranks)])
    if run.events:
        tables["events"] = _events(run)
    return Trace(tables, _meta(run), whole=True)


def _steps(run: Run, rank: int, optimizer: str) -> pa.Table:
    n = run.micro_steps
    rng = np.random.default_rng([run.seed, rank])
    micro = np.arange(1, n + 1)
    window = (micro - 1) // run.K + 1
    place = (micro - 1) % run.K + 1
    last = (place == run.K) | (micro == n)
    size = np.where(window > run.windows, run.tail, run.K)
    skipped = np.isin(window, run.skips)
    halved = np.cumsum(skipped & last) - (skipped & last)
    scale = run.scale * 0.5 ** halved.astype(float)
    weight = np.full(n, 1 / run.K if run.weight is None else run.weight)
    loss = 5.5 - 2.5 * micro / n + 0.2 * rng.standard_normal(n)
    loss[np.isin(micro, run.nan_loss)] = np.nan
    norm = np.exp(0.4 * rng.standard_normal(n)) * (run.K * weight)
    norm[skipped] = np.inf
    lr = run.base_lr * (0.1 + 0.45 * (1 + np.cos(np.pi * micro / n)))
    lr = lr + (run.lr_offset if rank == run.ranks - 1 else 0.0)
    clipped = np.minimum(norm, run.clip)
    always = np.ones(n, dtype=bool)
    cells = {
        "rank": (np.full(n, rank), always),
        "micro_step": (micro, always),
        "optimizer": (np.full(n, optimizer, dtype=object), always),
        "window_step": (place, always),
        "window_size": (size, last),
        "global_step": (window, always),
        "applied_steps": (np.cumsum(last & ~skipped), always),
        "sync_gradients": (last, always),
        "tail": (size < run.K, last),
        "calls": (_calls(run, last, skipped), always),
        "lr": (lr, always),
        "loss": (loss, always),
        "loss_weight": (weight, always),
        "loss_weight_sum": (weight * size, last),
        "loss_scaled": (loss * weight * scale, always),
        "num_items": (508 - micro % 3, always),
        "loss_scale_before": (scale, last),
        "loss_scale_after": (np.where(skipped, scale / 2, scale), last),
        "found_inf": (skipped, last),
        "step_skipped": (skipped, last),
        "grad_norm": (norm, last),
        "grad_norm_clipped": (clipped, last & ~skipped),
        "clip_max_norm": (np.full(n, run.clip), last),
        "clip_bound": (norm > run.clip, last & ~skipped),
        "param_norm": (np.full(n, 80.0), last),
        "update_norm": (np.where(skipped, 0.0, 80 * lr), last),
        "update_ratio": (np.where(skipped, 0.0, lr), last),
        "backward_ms": (4 + rng.random(n), always),
    }
    return _table(STEPS, cells)


def _table(columns, cells) -> pa.Table:
    schema = arrow_schema(columns)
    arrays = [
        pa.array(_same_everywhere(values), type=f.type, mask=~seen, from_pandas=False)
        for f, (values, seen) in zip(schema, (cells[f.name] for f in schema), strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def _same_everywhere(values):
    """Without the last bits, in which numpy's exp and cos differ between processors: the gold files need the same trace."""
    if values.dtype != np.float64:
        return values
    with np.errstate(all="ignore"):
        scale = 10.0 ** (7 - np.floor(np.log10(np.abs(values))))
        rounded = np.rint(values * scale) / scale
    return np.where(np.isfinite(rounded) & (np.abs(values) < 1e7), rounded, values)


def _params(run: Run, rank: int) -> pa.Table:
    recorded = np.arange(1, run.windows + 1)[:: run.every]
    p, w = len(run.params), len(recorded)
    rng = np.random.default_rng([run.seed, rank, 1])
    window = np.repeat(recorded, p)
    skipped = np.isin(window, run.skips)
    always = np.ones(p * w, dtype=bool)
    norm = np.exp(rng.standard_normal(p * w))
    norm[skipped & (np.tile(np.arange(p), w) == 0)] = np.inf
    cells = {
        "rank": (np.full(p * w, rank), always),
        "micro_step": (window * run.K, always),
        "global_step": (window, always),
        "param": (np.tile(np.array(run.params, dtype=object), w), always),
        "group": (np.tile(1 + np.arange(p) % 2, w), always),
        "grad_norm": (norm, always),
        "update_ratio": (np.where(skipped, 0.0, 1e-3 * np.exp(rng.standard_normal(p * w))), always),
        "lost_update_frac": (np.zeros(p * w), always),
        "grad_zero_frac": (np.full(p * w, 0.01), always),
        "grad_nonfinite": (np.where(np.isinf(norm), 3, 0), always),
    }
    return _table(PARAMS, cells)


def _calls(run: Run, last, skipped):
    """The letters of the textbook loop's calls."""
    return np.where(last, np.where(skipped, "FBUCKPZ", "FBUCSPZ"), "FB").astype(object)


def _events(run: Run) -> pa.Table:
    schema = arrow_schema(EVENT_COLUMNS)
    cells = ([0], [1], [0], [run.optimizers[0]], ["optimizer_built"], [json.dumps({"groups": 1})])
    return pa.Table.from_arrays([pa.array(v, type=f.type) for f, v in zip(schema, cells, strict=True)], schema=schema)


def _meta(run: Run) -> dict:
    return {
        "format": 1,
        "stepscope": "0.1.0",
        "status": "complete",
        "exit_code": 0,
        "kind": "trace",
        "command": ["stepscope", "trace", "--dtype", "float16"],
        "script": "train.py",
        "rank": 0,
        "world_size": run.ranks,
        "versions": {"python": "3.11.9", "torch": "2.13.0"},
        "device": "cpu",
        "started": "2026-01-02T03:04:05+00:00",
        "seconds": 12.5,
        "settings": {"every": run.every},
        "optimizers": [
            {
                "name": name,
                "class": "AdamW",
                "fused": False,
                "groups": [{"lr": run.base_lr, "weight_decay": 0.1, "params": 3}],
            }
            for name in run.optimizers
        ],
        "parameters": {
            name: {"shape": [64, 16 * (i + 1)], "dtype": "torch.float32", "numel": 1024 * (i + 1)}
            for i, name in enumerate(run.params)
        },
        "not_observed": {"aux_loss": "the model returns none"},
        "reference": {"schedule": "minimind-cosine", "learning_rate": run.base_lr, "total_steps": run.micro_steps},
    } | run.meta


def outcomes(run: Run = Run(), **evidence):
    """Two findings, two passed rules and a skipped one."""
    K = run.K
    weight = Finding(
        "ACC101",
        "accum-missing-divide",
        "error",
        f"The loss weights of a window add up to {K} instead of 1 in windows 4 to 6: the loss was not divided by {K}.",
        3 * K + 1,
        6 * K,
        {
            "observed": float(K),
            "expected": 1.0,
            "columns": ["loss_weight_sum", "loss_weight", "grad_norm"],
            "micro_steps": [4 * K, 5 * K, 6 * K],
            "rows": [
                {"micro_step": 4 * K, "loss_weight_sum": float(K), "grad_norm": 3.91},
                {"micro_step": 5 * K, "loss_weight_sum": float(K), "grad_norm": float("inf")},
            ],
            "params": ["embed.weight"],
            "also": ["clip-always-binds"],
        }
        | evidence,
    )
    note = Finding("SCL301", "scaler-first-skips", "notice", "The scale settled after two skips.", K, 2 * K, {})
    return (
        failed("ACC101", "accum-missing-divide", weight),
        failed("SCL301", "scaler-first-skips", note),
        passed("CLP101", "clip-before-unscale"),
        passed("CLR101", "zero-grad-missing", "gradients were clear before each of 13 windows"),
        skipped("DDP101", "ddp-token-mean", "needs at least two processes"),
    )


def save(trace: Trace, folder, findings=None):
    """Write `trace` as a trace directory; findings.json if outcomes are given."""
    from stepscope.render.envelope import write_findings
    from stepscope.store.jsonio import write_json

    journal = folder / "journal"
    journal.mkdir(parents=True)
    for name, table in trace.tables.items():
        if len(table):
            with pa.ipc.new_stream(str(journal / f"rank0-{name}-000.arrows"), table.schema) as stream:
                stream.write_table(table)
    write_json(folder / "meta.json", trace.meta)
    if findings is not None:
        write_findings(folder, findings, complete=True)
    return folder
