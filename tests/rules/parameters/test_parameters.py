"""Which parameters train: each fault is named in several shapes, and loops that look like it stay silent."""

import pytest
import torch

from tests.rules.loops import parameters as loops
from tests.rules.support import findings, judged, loud, record

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("loop", loops.FAULTS, ids=lambda f: f.__name__)
def test_a_fault_is_named_and_nothing_else(loop):
    name = loops.FAULTS[loop]
    found = findings(loop)
    assert name in found
    assert set(loud(found)) <= {name}


@pytest.mark.parametrize("loop", loops.RIGHT, ids=lambda f: f.__name__)
def test_a_right_loop_stays_silent(loop):
    assert loud(findings(loop)) == {}


def test_a_forgotten_part_is_named_with_its_shapes():
    evidence = findings(loops.names_filter_forgets_the_middle)["param-missing-from-optimizer"].evidence
    assert evidence["rows"] == [
        {"param": "2.weight", "shape": "8x8", "where": "model"},
        {"param": "2.bias", "shape": "8", "where": "model"},
    ]


def test_layers_in_a_list_are_named_by_their_class_since_no_model_has_them():
    evidence = findings(loops.layers_in_a_plain_list)["param-missing-from-optimizer"].evidence
    assert sorted(r["shape"] for r in evidence["rows"]) == ["6", "6", "6x6", "6x6"]
    assert {r["param"] for r in evidence["rows"]} == {"Linear.weight", "Linear.bias"}
    assert {r["where"] for r in evidence["rows"]} == {"graph"}


def test_a_plain_tensor_is_named_by_its_attribute():
    finding = findings(loops.scale_is_no_parameter)["param-missing-from-optimizer"]
    assert finding.evidence["rows"] == [{"param": "scale", "shape": "3", "where": "attribute"}]


def test_a_fixed_network_in_eval_mode_is_a_notice():
    assert findings(loops.perceptual_network_in_eval_mode)["param-missing-from-optimizer"].severity == "notice"


def test_what_is_declared_frozen_may_be_in_no_optimizer():
    declared = {"frozen": "2"}
    assert loud(findings(loops.names_filter_forgets_the_middle, declared)) == {}


def test_a_stale_optimizer_folds_the_missing_parameters_into_its_finding():
    found = findings(loops.weights_assigned_after_the_optimizer_was_built)
    assert found["param-stale-ref"].evidence["observed"] == 6
    assert "param-missing-from-optimizer" not in found


def test_the_change_of_frozen_parameters_is_their_decay():
    """A frozen tensor with zero gradients under AdamW shrinks by lr * weight_decay = 0.001 of its norm at each step."""
    finding = findings(loops.zero_gradients_for_all)["frozen-still-updated"]
    first = loops.mlp()[0]
    norm = float(torch.cat([first.weight.flatten(), first.bias]).double().norm())
    assert finding.evidence["observed"] == pytest.approx(0.001 * norm, rel=1e-3)
    assert finding.evidence["params"] == ["0.weight", "0.bias"]
    assert finding.evidence["micro_steps"] == [1, 2, 3, 4, 5, 6]


def test_steps_before_the_freeze_are_not_cited():
    finding = findings(loops.frozen_with_zero_gradients)["frozen-still-updated"]
    assert (finding.first_step, finding.last_step) == (4, 9)


@pytest.mark.parametrize("pattern", ["0", "0.*", r"0\.(weight|bias)", "nothing, 0.*"])
def test_declared_frozen_names_what_moved_all_the_same(pattern):
    found = findings(loops.flag_set_back_by_a_later_call, {"frozen": pattern})
    assert found["frozen-still-updated"].evidence["params"] == ["0.weight", "0.bias"]


def test_declared_frozen_can_be_stated_after_the_run():
    trace = record(loops.flag_set_back_by_a_later_call)
    assert "frozen-still-updated" in judged(trace, {"frozen": "0"})
    assert "frozen-still-updated" not in judged(record(loops.frozen_backbone_in_eval_mode), {"frozen": "0"})


def test_norms_are_named():
    assert findings(loops.backbone_frozen_on_the_way)["frozen-bn-stats"].evidence["modules"] == ["0.1"]


def test_a_repeated_parameter_is_named_with_its_count():
    evidence = findings(loops.listed_twice)["param-duplicate"].evidence
    assert (evidence["params"], evidence["observed"]) == (["2.weight", "2.bias"], 2)


def test_decay_counts():
    evidence = findings(loops.decay_exemption_misses_the_norm)["weight-decay-groups"].evidence
    assert evidence["params"] == ["1.weight"]
    assert evidence["rows"] == [
        {"weight_decay": 0.1, "vectors": 1, "matrices": 2},
        {"weight_decay": 0.0, "vectors": 3, "matrices": 0},
    ]


def test_parameters_without_a_graph_are_counted():
    finding = findings(loops.own_checkpoint_without_a_graph)["ckpt-reentrant-no-grad"]
    assert finding.evidence["params"] == [f"layers.{n}.0.{p}" for n in (0, 1) for p in ("weight", "bias")]
