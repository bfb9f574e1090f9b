"""The pieces of the accumulation check against hand computations."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stepscope.checks.accumulation.rounding import bound, gamma
from stepscope.checks.accumulation.weights import fit
from stepscope.checks.batches import join, split
from stepscope.checks.precision import WORKING, InFloat64, NoDropout
from stepscope.checks.terms import count_targets, find_terms, weighted


def test_gamma_is_highams() -> None:
    """γ_n = nu/(1 − nu): for n = 3, u = 1/8 that is (3/8)/(5/8)."""
    assert gamma(3, 1 / 8) == pytest.approx(0.6)
    assert gamma(8, 1 / 8) == float("inf")


def test_unit_roundoff_is_half_the_distance_to_the_next_number() -> None:
    assert {name: p.unit_roundoff for name, p in WORKING.items()} == {
        "float32": 2.0**-24,
        "bfloat16": 2.0**-8,
        "float16": 2.0**-11,
    }


def test_bound_adds_the_summation_and_twice_the_spread() -> None:
    """Reference (3, 4) of norm 5 from parts (6, 0) and (−3, 4): Σ|x| = (9, 4). One order is 0.5 away."""
    reference = torch.tensor([3.0, 4.0]).double()
    parts = [torch.tensor([6.0, 0.0]).double(), torch.tensor([-3.0, 4.0]).double()]
    found = bound(reference, parts, [reference + torch.tensor([0.3, 0.4])], 0.01)
    assert found.summation == pytest.approx(0.01 * (81 + 16) ** 0.5 / 5)
    assert found.reordering == pytest.approx(2 * 0.5 / 5)
    assert found.value == found.summation + found.reordering


def test_a_right_float32_sum_stays_below_its_bound_and_a_wrong_one_does_not() -> None:
    terms = torch.randn(1000, 5, generator=torch.Generator().manual_seed(0))
    exact = terms.double().sum(0)
    limit = bound(exact, list(terms.double()), [], gamma(1000, 2.0**-24))
    forwards = terms[0].clone()
    for row in terms[1:]:
        forwards += row
    norm = float(exact.norm())
    assert float((forwards.double() - exact).norm()) / norm < limit.value
    assert float((exact - terms[:999].double().sum(0)).norm()) / norm > limit.value


def test_fit_recovers_weights() -> None:
    parts = [torch.randn(50, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(3)]
    found = fit(0.5 * parts[0] + 0.25 * parts[1] - 2 * parts[2], parts, [1 / 3] * 3)
    assert found.weights == pytest.approx([0.5, 0.25, -2.0])
    assert found.residual < 1e-14


def test_weights_that_cannot_be_known_stay_at_the_guess() -> None:
    part = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert fit(part, [part, part], [0.5, 0.5]).weights == pytest.approx([0.5, 0.5])


def test_what_no_weights_explain_is_the_residual() -> None:
    """(0, 3, 4) over the part (0, 1, 0): the 4 is left, 4/5 of the gradient."""
    found = fit(torch.tensor([0.0, 3.0, 4.0]).double(), [torch.tensor([0.0, 1.0, 0.0]).double()], [0.0])
    assert found.weights == pytest.approx([3.0])
    assert found.residual == pytest.approx(0.8)


def test_split_covers_every_row_once_and_join_undoes_it() -> None:
    batch = {"x": torch.arange(22).reshape(11, 2), "y": (torch.arange(11),), "name": "kept"}
    pieces = split(batch, 4)
    assert [len(piece["x"]) for piece in pieces] == [3, 3, 3, 2]
    joined = join(pieces)
    assert torch.equal(joined["x"], batch["x"])
    assert torch.equal(joined["y"][0], batch["y"][0])
    assert joined["name"] == "kept"


def test_terms_are_found_behind_sums_and_scalings() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    loss = (F.cross_entropy(x, torch.tensor([0, 1, 2, 0])) + 0.1 * x.square().mean() - x.abs().sum()) / 2
    nodes = find_terms(loss)
    assert list(nodes) == ["cross-entropy", "term 2 (MeanBackward0)", "term 3 (SumBackward0)"]
    with weighted(nodes, {"cross-entropy": 0.0, "term 2 (MeanBackward0)": 3.0, "term 3 (SumBackward0)": 0.0}):
        loss.backward()
    torch.testing.assert_close(x.grad, 3 * 0.1 * 2 * x.detach() / 12 / 2)


def test_targets_are_counted_from_the_loss() -> None:
    logits = torch.randn(5, 3, requires_grad=True)
    labels = torch.tensor([0, -100, 2, -100, 1])
    assert count_targets(F.cross_entropy(logits, labels) / 4) == 3
    assert count_targets(F.mse_loss(logits, torch.zeros(5, 3))) == 15
    assert count_targets(logits.square().sum()) is None


@pytest.mark.parametrize(
    "layer",
    [
        nn.Dropout(0.4),
        nn.Dropout2d(0.4),
        nn.LSTM(6, 6, num_layers=2, dropout=0.4, batch_first=True),
        nn.TransformerEncoderLayer(6, 2, 8, dropout=0.4, batch_first=True),
        nn.MultiheadAttention(6, 2, dropout=0.4, batch_first=True),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_dropout_without_its_masks_is_the_layer_in_eval_mode(layer: nn.Module) -> None:
    x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(0))
    arguments = (x, x, x) if isinstance(layer, nn.MultiheadAttention) else (x,)
    with NoDropout() as mode:
        trained = layer.train()(*arguments)
    evaluated = layer.eval()(*arguments)
    first = [out[0] if isinstance(out, tuple) else out for out in (trained, evaluated)]
    torch.testing.assert_close(first[0], first[1])
    assert mode.calls > 0


def test_lower_precision_is_lifted_to_float64() -> None:
    x = torch.randn(3, 4, dtype=torch.float64)
    with InFloat64():
        assert x.to(torch.float32).dtype == torch.float64
        assert F.softmax(x, -1, dtype=torch.float32).dtype == torch.float64
        assert (x * torch.ones(4, dtype=torch.float32)).dtype == torch.float64
        assert F.cross_entropy(x, torch.zeros(3, dtype=torch.long), weight=torch.ones(4)).dtype == torch.float64
    assert x.to(torch.float32).dtype == torch.float32
