"""The figures of a report against a plain loop over the rows."""

import math

import pytest


def by_hand(trace):
    """The figures, row by row, from the DataFrame."""
    out = {
        "steps": set(), "tried": 0, "skipped": 0, "tails": 0, "targets": 0, "losses": [], "rates": [], "scales": [],
        "bound": [], "norms": [], "ratios": [],
    }  # fmt: skip
    for row in trace.tables["steps"].to_pylist():
        out["steps"].add(row["micro_step"])
        out["tried"] += row["sync_gradients"]
        out["skipped"] += bool(row["step_skipped"])
        out["tails"] += bool(row["tail"])
        out["targets"] += row["num_items"]
        out["losses"].append(row["loss"])
        out["rates"].append(row["lr"])
        for key, column in (
            ("scales", "loss_scale_before"),
            ("bound", "clip_bound"),
            ("norms", "grad_norm"),
            ("ratios", "update_ratio"),
        ):
            if row[column] is not None:
                out[key].append(row[column])
    return out


def finite(values):
    return [v for v in values if math.isfinite(v)]


@pytest.mark.parametrize(
    "changes", [{}, {"nan_loss": (1, 7, 50)}, {"tail": 0, "skips": ()}, {"weight": 1.0, "clip": 0.3}]
)
def test_numbers_of_a_run(factory, build, changes):
    trace, hand = factory.make(**changes), by_hand(factory.make(**changes))
    told = {n.key: n.value for n in build(**changes).numbers}
    assert trace.tables["steps"].num_rows == len(hand["losses"])
    assert told["micro_steps"] == len(hand["steps"])
    assert told["optimizer_steps"] == hand["tried"]
    assert told["skipped_steps"] == hand["skipped"]
    assert told["applied_steps"] == hand["tried"] - hand["skipped"]
    assert told["tail_windows"] == hand["tails"]
    assert told["targets"] == hand["targets"]
    assert told["first_loss"] == finite(hand["losses"])[0]
    assert told["last_loss"] == finite(hand["losses"])[-1]
    assert told["nonfinite_losses"] == len(hand["losses"]) - len(finite(hand["losses"]))
    assert (told["lr_min"], told["lr_max"]) == (min(hand["rates"]), max(hand["rates"]))
    assert told["peak_loss_scale"] == max(hand["scales"])
    assert told["clip_bound_share"] == pytest.approx(sum(hand["bound"]) / len(hand["bound"]), rel=1e-15)
    assert told["grad_norm_max"] == max(finite(hand["norms"]))
    assert told["update_ratio_max"] == max(hand["ratios"])


def test_targets_count_once_where_each_optimizer_has_a_row(build):
    one = {n.key: n.value for n in build().numbers}
    two = {n.key: n.value for n in build(optimizers=("AdamW/0", "SGD/1")).numbers}
    assert two["targets"] == one["targets"]
    assert two["optimizer_steps"] == 2 * one["optimizer_steps"]


def test_targets_of_all_processes_are_added(build):
    one = {n.key: n.value for n in build().numbers}
    two = {n.key: n.value for n in build(ranks=2).numbers}
    assert two["targets"] == 2 * one["targets"]
    for key in ("micro_steps", "optimizer_steps", "skipped_steps", "tail_windows"):
        assert two[key] == one[key]


def test_what_was_not_observed_has_no_number(factory):
    from stepscope.render.model import build_model
    from stepscope.store.trace import Trace

    trace = factory.make()
    bare = Trace({"steps": trace.tables["steps"].select(["rank", "micro_step", "loss"])}, trace.meta)
    told = {n.key: n for n in build_model(bare, ()).numbers}
    assert told["skipped_steps"].value is None
    assert told["skipped_steps"].text == "not observed"
    assert told["clip_bound_share"].value is None
    assert told["first_loss"].value is not None
