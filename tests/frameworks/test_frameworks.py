"""Loops of other libraries, unchanged: watching alters nothing, and what is recorded is what the library logs.

The references are the libraries' own logs and numbers worked out by hand from the scripts' settings.
"""

import itertools
import json
import re

import pytest
import torch

from stepscope.store.trace import Trace

pytestmark = pytest.mark.frameworks

SIZES = {
    "hf_trainer": [4] * 6,
    "trl_sft": [4] * 4,
    "accelerate_loop": [4, 4, 4, 4, 2] * 2,
    "lightning_trainer": [4] * 8,
    "fabric_loop": [3] * 4,
    "globals_config": [4] * 6,
    "micro_step_schedule": [4, 4, 2] * 2,
}
"""Micro-steps in each window, from the number of batches and the settings of each script."""

TOKEN_MEANS = ("hf_trainer", "trl_sft")
"""Scripts whose loss is a sum divided by the targets of the whole window; they log the sum over its micro-steps."""


def windows(both, name):
    """Rows of the trace, one list per optimizer step."""
    steps = Trace.load(both(name)[1].folder / "trace").steps.astype(object).to_dict("records")
    return [list(rows) for _, rows in itertools.groupby(steps, key=lambda row: row["global_step"])]


def timeless(text):
    """Without what differs from run to run: measured times and speeds, and the progress bars made of them."""
    return re.sub(r"'train_(runtime|\w+_per_second)': '[^']*'", "", text)


@pytest.mark.parametrize("name", SIZES)
def test_watching_changes_nothing(name, both):
    native, watched = both(name)
    assert (native.code, watched.code) == (0, 0), watched.stderr
    assert watched.logged == native.logged
    assert timeless(watched.stdout) == timeless(native.stdout)
    left, right = (torch.load(run.folder / "final.pt", weights_only=True) for run in (native, watched))
    assert list(left) == list(right)
    assert all(torch.equal(left[key], right[key]) for key in left)


@pytest.mark.parametrize("name", SIZES)
def test_every_probe_ran_to_the_end(name, both):
    meta = Trace.load(both(name)[1].folder / "trace").meta
    assert (meta["status"], meta["probes_off"], meta["micro_steps"]) == ("complete", {}, sum(SIZES[name]))


@pytest.mark.parametrize("name", SIZES)
def test_windows_are_those_of_the_settings(name, both):
    rows = windows(both, name)
    assert [len(window) for window in rows] == SIZES[name]
    assert all([row["sync_gradients"] for row in w] == [False] * (len(w) - 1) + [True] for w in rows)
    assert [w[-1]["step_skipped"] for w in rows] == [False] * len(rows)


@pytest.mark.parametrize("name", SIZES)
def test_rate_and_norm_are_what_the_library_logs(name, both):
    logged = both(name)[1].logged
    last = [w[-1] for w in windows(both, name)]
    assert [row["lr"] for row in last] == [entry["learning_rate"] for entry in logged]
    assert [row["grad_norm"] for row in last] == pytest.approx([entry["grad_norm"] for entry in logged], rel=1e-6)


@pytest.mark.parametrize("name", [name for name in SIZES if name not in TOKEN_MEANS])
def test_loss_and_its_weight_in_a_window_of_means(name, both):
    """Each script divides by the full window, so a window of r of K micro-steps has weight r/K."""
    full = max(SIZES[name])
    for window, entry in zip(windows(both, name), both(name)[1].logged, strict=True):
        assert window[-1]["loss"] == pytest.approx(entry["loss"], rel=1e-6)
        assert [row["loss_weight"] for row in window] == pytest.approx([1 / full] * len(window))
        assert window[-1]["loss_weight_sum"] == pytest.approx(len(window) / full)
        assert bool(window[-1]["tail"]) == (len(window) < full)


@pytest.mark.parametrize("name", TOKEN_MEANS)
def test_every_target_of_a_window_weighs_the_same(name, both):
    for window, entry in zip(windows(both, name), both(name)[1].logged, strict=True):
        assert len({round(row["target_weight"], 9) for row in window}) == 1
        assert sum(row["loss_scaled"] for row in window) == pytest.approx(entry["loss"], rel=1e-5)


def test_weight_of_a_target_is_one_over_the_targets_of_the_window(both):
    for window in windows(both, "hf_trainer"):
        assert window[0]["target_weight"] == pytest.approx(1 / sum(row["num_items"] for row in window))
        assert window[-1]["loss_weight_sum"] == pytest.approx(1.0)


def test_a_mean_over_the_window_differs_from_the_mean_of_its_means(both):
    """The rows really are ragged: otherwise the two tests above would pass for a loop that weighs sequences."""
    counts = [row["num_items"] for window in windows(both, "hf_trainer") for row in window]
    assert len(set(counts)) > 3


@pytest.mark.parametrize(
    ("name", "limit"), [("lightning_trainer", 0.5), ("accelerate_loop", 1.0), ("fabric_loop", 1.0)]
)
def test_clip_of_the_library_is_seen(name, limit, both):
    for window, entry in zip(windows(both, name), both(name)[1].logged, strict=True):
        row, norm = window[-1], entry["grad_norm"]
        assert row["clip_max_norm"] == limit
        assert bool(row["clip_bound"]) == (norm > limit)
        assert row["clip_coef"] == pytest.approx(min(1.0, limit / (norm + 1e-6)), rel=1e-5)


def test_scale_of_a_scaler_is_seen_before_and_after(both):
    """Scale 1024, doubled after every third clean step."""
    rows = [w[-1] for w in windows(both, "micro_step_schedule")]
    assert [row["loss_scale_before"] for row in rows] == [1024, 1024, 1024, 2048, 2048, 2048]
    assert [row["loss_scale_after"] for row in rows] == [
        entry["scale"] for entry in both("micro_step_schedule")[1].logged
    ]
    assert rows[0]["grad_norm_scaled"] == pytest.approx(1024 * rows[0]["grad_norm"], rel=1e-5)


FINDINGS = {
    "hf_trainer": {"warmup-off-by-one"},  # its first step runs at rate 0
    "trl_sft": set(),
    "accelerate_loop": {"accum-tail-misweighted"},  # 18 batches an epoch, windows of four
    "lightning_trainer": set(),
    "fabric_loop": set(),
    "globals_config": set(),
    "micro_step_schedule": {"accum-tail-misweighted", "accum-token-mean"},  # a flushed tail; padded labels
}


@pytest.mark.parametrize("name", FINDINGS)
def test_right_loops_are_not_accused(name, both):
    """What is found is there by the script's own design, and none of it is an error."""
    findings = json.loads((both(name)[1].folder / "trace" / "findings.json").read_text("utf-8"))["findings"]
    assert {finding["name"] for finding in findings} == FINDINGS[name]
    assert {finding["severity"] for finding in findings} <= {"notice"}
