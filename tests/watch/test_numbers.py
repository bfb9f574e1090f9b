"""Every reported number against a second computation: float64, one parameter at a time, from inside the loop."""

from __future__ import annotations

import math

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import stepscope
from tests.watch import loops


def norm64(tensors) -> float:
    return math.sqrt(sum(float((t.double() ** 2).sum()) for t in tensors if t is not None))


class Truth:
    """A loop that writes down by itself what stepscope should see."""

    def __init__(self, dtype: str, fused: bool, micro_steps: int = 14, init_scale: float = 2.0**19) -> None:
        self.net = loops.model()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2, fused=fused)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=2, enabled=dtype == "float16")
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.5)
        self.dtype, self.micro_steps = dtype, micro_steps
        self.rows: list[dict] = []
        self.params: list[dict] = []

    def run(self) -> None:
        torch.manual_seed(3)
        applied = 0
        for i in range(self.micro_steps):
            x, y = torch.randn(5, 6) * 3, torch.randint(0, 4, (5,))
            y[: i % 3] = -100
            window = min(loops.K, self.micro_steps - i // loops.K * loops.K)
            with loops.autocast(self.dtype):
                loss = F.cross_entropy(self.net(x).float(), y)
            scaled = self.scaler.scale(loss / window)
            row = {"loss": loss.item(), "loss_weight": 1 / window, "loss_scaled": scaled.item(), "num_items": 5 - i % 3}
            row["target_weight"] = 1 / window / (5 - i % 3)
            scale = self.scaler.get_scale()
            row["loss_scale_before"] = scale if self.dtype == "float16" else None
            scaled.backward()
            if (i + 1) % loops.K == 0 or i + 1 == self.micro_steps:
                applied += self.step(row, scale)
                row["applied_steps"] = applied
            self.rows.append(row)

    def step(self, row: dict, scale: float) -> int:
        """The window's end; returns 1 if the step was applied."""
        self.attempts = row["attempt"] = getattr(self, "attempts", 0) + 1
        grads = [p.grad for p in self.net.parameters()]
        row["grad_norm_scaled"] = norm64(grads)
        self.scaler.unscale_(self.optimizer)
        row["grad_norm"] = norm64(grads)
        row["grad_nonfinite"] = sum(int((~torch.isfinite(g)).sum()) for g in grads)
        nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
        row["grad_norm_clipped"] = norm64(grads)
        before = [p.detach().clone() for p in self.net.parameters()]
        gradients = [g.clone() for g in grads]
        row["lr"] = self.optimizer.param_groups[0]["lr"]
        self.scaler.step(self.optimizer)
        changes = [p.detach().double() - b.double() for p, b in zip(self.net.parameters(), before, strict=True)]
        self.scaler.update()
        row["step_skipped"] = not all(torch.isfinite(g).all() for g in gradients)
        row["loss_scale_after"] = self.scaler.get_scale() if self.dtype == "float16" else None
        row["param_norm"], row["update_norm"] = norm64(before), norm64(changes)
        row["update_max"] = max(float(c.abs().max()) for c in changes)
        row["update_ratio"] = row["update_norm"] / row["param_norm"]
        lost = sum(int(((g != 0) & (c == 0)).sum()) for g, c in zip(gradients, changes, strict=True))
        row["lost_update_frac"] = lost / max(1, sum(int((g != 0).sum()) for g in gradients))
        if not row["step_skipped"]:
            self.schedule.step()
            for (name, _), b, c, g in zip(self.net.named_parameters(), before, changes, gradients, strict=True):
                self.params.append({"param": name, "param_norm": norm64([b]), "update_norm": norm64([c]),
                                    "update_max": float(c.abs().max()), "grad_norm_clipped": norm64([g])})  # fmt: skip
        self.optimizer.zero_grad()
        return 0 if row["step_skipped"] else 1


@pytest.fixture(params=[("float32", False), ("bfloat16", True), ("float16", False), ("float16", True)], ids=str)
def truth_and_trace(request):
    truth = Truth(*request.param)
    with stepscope.watch(truth.net, truth.optimizer) as watching:
        truth.run()
    return truth, watching.trace


EXACT = ("num_items", "step_skipped", "loss_scale_before", "loss_scale_after", "grad_nonfinite", "applied_steps", "lr")
CLOSE = ("loss", "loss_weight", "loss_scaled", "target_weight", "grad_norm_scaled", "grad_norm", "grad_norm_clipped",
         "param_norm", "update_norm", "update_max", "update_ratio", "lost_update_frac")  # fmt: skip


def test_there_is_something_to_see(truth_and_trace):
    """The float16 runs must skip at first and then train, or the comparison below shows little."""
    truth, _ = truth_and_trace
    skipped = [r["step_skipped"] for r in truth.rows if "step_skipped" in r]
    if truth.dtype == "float16":
        assert any(skipped)
    assert not all(skipped)


@pytest.mark.parametrize("column", EXACT + CLOSE)
def test_a_column_tells_the_truth(truth_and_trace, column):
    """Null exactly where the loop had nothing to say; else the same number."""
    truth, trace = truth_and_trace
    seen = trace.steps[column].tolist()
    for row, value in zip(truth.rows, seen, strict=True):
        expected = row.get(column)
        skipped_unfused = row.get("step_skipped") and not truth.optimizer.defaults["fused"]
        if skipped_unfused and column in ("param_norm", "update_norm", "update_max", "update_ratio", "lost_update_frac",
                                          "grad_norm_clipped", "grad_nonfinite"):  # fmt: skip
            continue  # the optimizer was not called: see test_a_skip_without_a_call
        if column in ("applied_steps", "lr") and expected is None:
            continue  # on rows without a step: the count so far, and the rate at backward
        if column == "lost_update_frac" and row.get("attempt", 0) > 3:
            expected = None  # float32 parameters are counted in the first three windows and every tenth
        if expected is None:
            assert value is pd.NA
        elif column in EXACT:
            assert value == expected
        elif math.isnan(expected) or math.isinf(expected):
            assert str(float(value)) == str(expected)
        else:
            assert value == pytest.approx(expected, rel=2e-5, abs=1e-12)


def test_a_skip_without_a_call_leaves_null(truth_and_trace):
    """An unfused optimizer is not called on overflow: what a step does was not observed, so it is null and not zero."""
    truth, trace = truth_and_trace
    if truth.dtype != "float16" or truth.optimizer.defaults["fused"]:
        return
    skipped = trace.steps[trace.steps["step_skipped"] == True]  # noqa: E712
    assert len(skipped)
    assert skipped["update_norm"].isna().all()
    assert skipped["skip_reason"].tolist() == ["gradients not finite"] * len(skipped)


def test_parameters_one_by_one(truth_and_trace):
    """The table of parameters, against each parameter's own float64 norms."""
    truth, trace = truth_and_trace
    rows = trace.params
    rows = rows[rows["update_norm"].notna() & (rows["update_max"] > 0)]
    assert rows["param"].tolist() == [p["param"] for p in truth.params]
    for column in ("param_norm", "update_norm", "update_max", "grad_norm_clipped"):
        assert rows[column].tolist() == pytest.approx([p[column] for p in truth.params], rel=2e-5)


def test_window_sums(truth_and_trace):
    """The weights of each window add up to one, also those of the tail of two."""
    _, trace = truth_and_trace
    ends = trace.steps[trace.steps["sync_gradients"]]
    assert ends["loss_weight_sum"].tolist() == pytest.approx([1.0] * 5)
    assert ends["window_size"].tolist() == [3, 3, 3, 3, 2]
    assert ends["tail"].tolist() == [False] * 4 + [True]
