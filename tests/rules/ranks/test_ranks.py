"""Several processes: each fault is named in several shapes, and loops that look like it stay silent."""

import pytest

from stepscope.store.trace import Trace
from tests.rules.loops import ranks as loops
from tests.rules.support import judged, loud

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("loop", loops.FAULTS, ids=lambda f: f.__name__)
def test_a_fault_is_named_and_nothing_else(recorded, loop):
    found = judged(Trace.load(recorded / loop.__name__))
    assert set(loud(found)) == {loops.FAULTS[loop]}


@pytest.mark.parametrize("loop", loops.RIGHT, ids=lambda f: f.__name__)
def test_a_right_loop_stays_silent(recorded, loop):
    assert loud(judged(Trace.load(recorded / loop.__name__))) == {}


def test_only_the_flushed_tail_is_cited(recorded):
    """Four windows of three, and a tail of one at micro-step 13."""
    finding = judged(Trace.load(recorded / "tail_flushed_without_sync"))["nosync-misuse"]
    assert finding.evidence["micro_steps"] == [13]


def test_a_flag_without_effect_is_a_warning(recorded):
    finding = judged(Trace.load(recorded / "no_sync_around_backward_alone"))["nosync-misuse"]
    assert (finding.severity, finding.evidence["micro_steps"]) == ("warning", [1, 3, 5])


def test_the_unfairness_is_the_ratio_of_the_counts(recorded):
    """Of six labels 1 + (step + 2 rank) mod 4 are ignored: 5 and 3 count at best, 2 and 4 at the worst."""
    finding = judged(Trace.load(recorded / "each_divides_by_its_own_count"))["ddp-token-mean"]
    assert finding.evidence["observed"] == pytest.approx(4 / 2)


def test_the_factor_is_the_number_of_processes(recorded):
    for name, factor in (("mean_times_world_with_accumulation", 2.0), ("sum_over_global_count_averaged", 0.5)):
        assert judged(Trace.load(recorded / name))["ddp-world-factor"].evidence["observed"] == factor


def test_the_norm_of_all_shards_is_that_of_one_process(recorded):
    """Shards do not overlap, so that their squared norms add up to that of the model in one piece."""
    import torch

    finding = judged(Trace.load(recorded / "shards_clipped_by_hand"))["clip-local-shard"]
    torch.manual_seed(0)
    up, down = (torch.randn(8, 6) * 0.4).double(), (torch.randn(3, 8) * 0.4).double()
    up.requires_grad_(), down.requires_grad_()
    x = torch.randn(6, 6, generator=torch.Generator().manual_seed(5)).double()
    torch.nn.functional.mse_loss(torch.tanh(x @ up.t()) @ down.t(), 4 * x[:, :3]).backward()
    whole = float(torch.cat([up.grad.flatten(), down.grad.flatten()]).norm())
    assert finding.evidence["expected"] == pytest.approx(whole, rel=1e-5)
