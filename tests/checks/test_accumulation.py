"""The accumulation check beyond the matrix: single faults, dtype-only faults, coupling, dropout, and bad input."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stepscope.checks.accumulation import Experiment, Settings, check_accumulation
from stepscope.checks.experiment import as_experiment
from stepscope.cli import main
from stepscope.errors import StepscopeError

torch.set_num_threads(1)
Batch = tuple[Tensor, Tensor]
EXACT = {"dtypes": ()}


def mlp(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Dropout(dropout), nn.Linear(10, 4))


def batch(rows: int = 12) -> Batch:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 6, generator=generator), torch.randint(0, 4, (rows,), generator=generator)


def mean_loss(model: nn.Module, b: Batch) -> Tensor:
    return F.cross_entropy(model(b[0]), b[1])


def divided(model: nn.Module, micro_batches: list[Batch]) -> None:
    for micro_batch in micro_batches:
        (mean_loss(model, micro_batch) / len(micro_batches)).backward()


def cleared_inside(model: nn.Module, micro_batches: list[Batch]) -> None:
    for micro_batch in micro_batches:
        model.zero_grad()
        (mean_loss(model, micro_batch) / len(micro_batches)).backward()


def last_dropped(model: nn.Module, micro_batches: list[Batch]) -> None:
    divided(model, micro_batches[:-1])


def other_loss(model: nn.Module, micro_batches: list[Batch]) -> None:
    for x, y in micro_batches:
        (F.cross_entropy(2 * model(x), y) / len(micro_batches)).backward()


def frozen_head(model: nn.Module, micro_batches: list[Batch]) -> None:
    divided(model, micro_batches)
    model[3].weight.grad = None


def clipped_each(model: nn.Module, micro_batches: list[Batch]) -> None:
    total = [torch.zeros_like(p) for p in model.parameters()]
    for micro_batch in micro_batches:
        model.zero_grad()
        mean_loss(model, micro_batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        for kept, p in zip(total, model.parameters(), strict=True):
            kept += p.grad / len(micro_batches)
    for kept, p in zip(total, model.parameters(), strict=True):
        p.grad = kept


@pytest.mark.parametrize(
    ("window", "name", "says"),
    [
        (cleared_inside, "accum-zero-grad-inside", "only the last micro-batch"),
        (last_dropped, "accum-tail-dropped", "not in the gradient"),
        (other_loss, "accum-other-gradient", "computes another loss"),
        (frozen_head, "accum-no-gradient", "1 of 4 parameters have no accumulated gradient: 3.weight"),
        (clipped_each, "accum-unequal-weights", "unequal weight"),
    ],
)
def test_window_fault_is_named(window, name: str, says: str) -> None:
    outcome = check_accumulation(Experiment(mlp(), batch(), mean_loss, window), Settings(3, **EXACT))
    assert [finding.name for finding in outcome.findings] == [name]
    assert says in outcome.findings[0].message


def test_right_window_agrees_to_float64_rounding_and_leaves_the_model_alone() -> None:
    model = mlp(dropout=0.5)
    before = copy.deepcopy(model.state_dict())
    random_state = torch.get_rng_state()
    outcome = check_accumulation(Experiment(model, batch(), mean_loss, divided), Settings(3))
    assert outcome.status == "passed"
    assert outcome.details["dtypes"][0]["difference"] < 1e-14
    assert [row["verdict"] for row in outcome.details["dtypes"]][1:] == ["rounding"] * 3
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(random_state, torch.get_rng_state())
    assert model[2].p == 0.5
    assert all(p.grad is None for p in model.parameters())


def test_each_bound_is_far_below_a_small_fault() -> None:
    """In float32 a single weight that is 5 % off would show: 0.05/K of a part, against a bound of about 1e-6."""
    outcome = check_accumulation(Experiment(mlp(), batch(), mean_loss, divided), Settings(3))
    bounds = {row["dtype"]: row["bound"] for row in outcome.details["dtypes"]}
    assert bounds["float64"] < 1e-12
    assert bounds["float32"] < 1e-5
    assert bounds["float16"] < bounds["bfloat16"] < 0.1


def scaled_and_left(model: nn.Module, micro_batches: list[Batch], scaler: torch.amp.GradScaler) -> None:
    for micro_batch in micro_batches:
        scaler.scale(mean_loss(model, micro_batch) / len(micro_batches)).backward()


def unscaled_early(model, micro_batches, scaler, optimizer) -> None:
    """`unscale_` after the first micro-batch: the later ones stay multiplied by the loss scale."""
    for place, micro_batch in enumerate(micro_batches):
        scaler.scale(mean_loss(model, micro_batch) / len(micro_batches)).backward()
        if place == 0:
            scaler.unscale_(optimizer)


@pytest.mark.parametrize(
    ("window", "name"), [(scaled_and_left, "accum-still-scaled"), (unscaled_early, "accum-unequal-weights")]
)
def test_scaler_misuse_shows_in_float16_alone(window, name: str) -> None:
    outcome = check_accumulation(Experiment(mlp(), batch(), mean_loss, window), Settings(3))
    assert {row["dtype"]: row["verdict"] for row in outcome.details["dtypes"]} == {
        "float64": "equal",
        "float32": "rounding",
        "bfloat16": "rounding",
        "float16": "different",
    }
    assert [finding.name for finding in outcome.findings] == [name]
    assert outcome.findings[0].message.startswith("in float16 alone")


def test_a_scaler_that_is_used_rightly_passes_in_float16() -> None:
    def right(model, micro_batches, scaler, optimizer) -> None:
        scaled_and_left(model, micro_batches, scaler)
        scaler.unscale_(optimizer)

    assert check_accumulation(Experiment(mlp(), batch(), mean_loss, right), Settings(3)).status == "passed"


@pytest.mark.parametrize(("normalisation", "passes"), [("auto", False), ("mean", False), ("targets", True)])
def test_micro_batches_of_unequal_size_need_weights(normalisation: str, passes: bool) -> None:
    """12 rows in 5 parts are 3, 3, 2, 2, 2 rows: a mean of means gives a row of the small ones 1.5 times the weight."""
    settings = Settings(5, normalisation=normalisation, **EXACT)
    outcome = check_accumulation(Experiment(mlp(), batch(12), mean_loss), settings)
    assert (outcome.status == "passed") is passes
    if not passes:
        (found,) = outcome.findings
        assert found.name == "accum-token-mean"
        assert [row["needed"] for row in found.evidence["rows"]] == pytest.approx([3 / 12, 3 / 12, 1 / 6, 1 / 6, 1 / 6])
        assert "factor of 1.5" in found.message


def test_ignored_labels_are_not_counted_as_targets() -> None:
    inputs, labels = batch(8)
    labels[5:7] = -100
    outcome = check_accumulation(Experiment(mlp(), (inputs, labels), mean_loss), Settings(2, **EXACT))
    assert [row["targets"] for row in outcome.findings[0].evidence["rows"]] == [4, 2]
    assert [row["needed"] for row in outcome.findings[0].evidence["rows"]] == pytest.approx([4 / 6, 2 / 6])


def test_a_sum_over_all_targets_is_added_and_not_divided() -> None:
    def summed(model: nn.Module, b: Batch) -> Tensor:
        return F.cross_entropy(model(b[0]), b[1], reduction="sum")

    outcome = check_accumulation(Experiment(mlp(), batch(10), summed), Settings(4, **EXACT))
    assert outcome.status == "passed"
    assert outcome.details["window"] == "the losses added up"


@pytest.mark.parametrize(("full", "passes"), [(True, False), (False, True)])
def test_a_tail_divided_by_the_full_window_is_r_over_k(full: bool, passes: bool) -> None:
    settings = Settings(4, tail=3, full_divisor=full, **EXACT)
    outcome = check_accumulation(Experiment(mlp(), batch(), mean_loss), settings)
    assert (outcome.status == "passed") is passes
    if not passes:
        assert outcome.findings[0].evidence["observed"] == pytest.approx(3 / 4)
        assert outcome.findings[0].name == "accum-tail-misweighted"
        assert outcome.details["dtypes"][0]["difference"] == pytest.approx(1 / 4)


def test_adam_hides_a_forgotten_division_that_sgd_shows() -> None:
    def forgotten(model: nn.Module, micro_batches: list[Batch]) -> None:
        for micro_batch in micro_batches:
            mean_loss(model, micro_batch).backward()

    def apart(optimizer) -> float:
        experiment = Experiment(mlp(), batch(), mean_loss, forgotten, optimizer)
        return check_accumulation(experiment, Settings(3, **EXACT)).details["after_step"]["difference"]

    assert apart(lambda p: torch.optim.SGD(p, lr=0.1)) == pytest.approx(2.0)
    assert apart(lambda p: torch.optim.AdamW(p, weight_decay=0.0)) < 1e-4


class Coupled(nn.Module):
    """Centres its features on the batch's mean, as a hand-written normalisation does."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(dim=0)


def contrastive(model: nn.Module, b: Batch) -> Tensor:
    hidden = F.normalize(model(b[0]), dim=-1)
    return F.cross_entropy(hidden @ hidden.T / 0.5, torch.arange(len(hidden)))


def test_a_layer_that_couples_rows_is_named_and_is_no_fault() -> None:
    model = nn.Sequential(nn.Linear(6, 8), Coupled(), nn.Linear(8, 4))
    outcome = check_accumulation(Experiment(model, batch(), mean_loss, divided), Settings(3))
    (found,) = outcome.findings
    assert (found.name, found.severity) == ("accum-batch-coupled", "notice")
    assert found.evidence["modules"] == ["1"]
    assert all(row["verdict"] in ("equal", "rounding") for row in outcome.details["dtypes"][1:])


def test_batchnorm_is_compared_with_frozen_statistics() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    (found,) = check_accumulation(Experiment(model, batch(), mean_loss), Settings(3, **EXACT)).findings
    assert found.severity == "notice"
    assert found.evidence["modules"] == ["1"]
    assert found.evidence["frozen"] < 1e-13
    assert found.evidence["observed"] > 0.05
    model.eval()
    assert check_accumulation(Experiment(model, batch(), mean_loss), Settings(3, **EXACT)).status == "passed"


def test_a_loss_that_couples_rows_is_named() -> None:
    (found,) = check_accumulation(Experiment(mlp(), batch(), contrastive), Settings(3, **EXACT)).findings
    assert (found.name, found.evidence["modules"]) == ("accum-batch-coupled", [])
    assert "the loss" in found.message


def test_two_terms_of_one_loss_have_weights_of_their_own() -> None:
    def loss(model: nn.Module, b: Batch) -> dict[str, Tensor]:
        logits = model(b[0])
        return {"main": F.cross_entropy(logits, b[1]), "z": 0.1 * logits.logsumexp(-1).square().mean()}

    def window(model: nn.Module, micro_batches: list[Batch]) -> None:
        for micro_batch in micro_batches:
            parts = loss(model, micro_batch)
            (parts["main"] / 3 + parts["z"]).backward()

    (found,) = check_accumulation(Experiment(mlp(), batch(), loss, window), Settings(3, **EXACT)).findings
    assert found.name == "aux-loss-scaling"
    assert found.evidence["observed"] == pytest.approx({"main": 1.0, "z": 3.0})


class FunctionalDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 10), nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(self.first(F.dropout(x, 0.3, self.training)), 0.3, self.training))


def test_functional_dropout_is_switched_off_and_said_so() -> None:
    torch.manual_seed(0)
    outcome = check_accumulation(Experiment(FunctionalDropout(), batch(), mean_loss), Settings(3, **EXACT))
    assert outcome.status == "passed"
    assert "masks replaced" in outcome.details["dropout"]


def test_dropout_that_is_kept_explains_the_difference() -> None:
    torch.manual_seed(0)
    settings = Settings(3, keep_dropout=True, **EXACT)
    (found,) = check_accumulation(Experiment(FunctionalDropout(), batch(), mean_loss), settings).findings
    assert (found.name, found.severity) == ("accum-dropout", "notice")


def test_float32_inside_a_double_model_is_lifted() -> None:
    """A norm that computes in float32 whatever its input would blur float64 to 1e-7."""

    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            wide = x.to(torch.float32)
            return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x)

    model = nn.Sequential(nn.Linear(6, 8), Norm(), nn.Linear(8, 4))
    outcome = check_accumulation(Experiment(model, batch(), mean_loss), Settings(3, **EXACT))
    assert outcome.details["dtypes"][0]["difference"] < 1e-14


def stepping(model, micro_batches, optimizer) -> None:
    divided(model, micro_batches)
    optimizer.step()


def nan_micro_batch() -> Batch:
    inputs, labels = batch()
    labels[:4] = -100
    return inputs, labels


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ({"model": mlp()}, "without batch, loss_fn"),
        (7, "an object of type int without model"),
        ({"model": "x", "batch": batch(), "loss_fn": mean_loss}, "model must be a torch.nn.Module, not str"),
        ({"model": mlp(), "batch": batch(), "loss_fn": 3}, "loss_fn must be callable"),
        ({"model": mlp(), "batch": [], "loss_fn": mean_loss}, "holds no tensor"),
        ({"model": mlp(), "batch": (torch.ones(3), torch.ones(4)), "loss_fn": mean_loss}, "shapes (3,), (4,)"),
        ({"model": mlp(), "batch": batch(2), "loss_fn": mean_loss}, "2 rows cannot be split into 3"),
        ({"model": mlp(), "batch": nan_micro_batch(), "loss_fn": mean_loss}, "loss of micro-batch 1 of 3 is nan"),
        ({"model": mlp(), "batch": batch(), "loss_fn": lambda m, b: m(b[0])}, "shape (12, 4), not a scalar"),
        ({"model": mlp(), "batch": batch(), "loss_fn": lambda m, b: 1.0}, "returned a float"),
        ({"model": mlp(), "batch": batch(), "loss_fn": lambda m, b: mean_loss(m, b).detach()}, "has no gradient"),
        ({"model": mlp(), "batch": batch(), "loss_fn": lambda m, b: 1 / 0}, "ZeroDivisionError"),
        ({"model": mlp(), "batch": batch(), "loss_fn": mean_loss, "window": stepping}, "changed the parameter"),
        ({"model": mlp(), "batch": batch(), "loss_fn": mean_loss, "window": lambda m, b: None}, "no gradient"),
        ({"model": mlp().requires_grad_(False), "batch": batch(), "loss_fn": mean_loss}, "no parameter that requires"),
        (
            {"model": mlp(), "batch": batch(), "loss_fn": lambda m, b: mean_loss(m, (b[0] + torch.randn(6), b[1]))},
            "differs by",
        ),
    ],
)
def test_bad_input_is_one_clear_line(made: object, says: str) -> None:
    with pytest.raises(StepscopeError) as caught:
        check_accumulation(as_experiment(made), Settings(3, **EXACT))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"accumulation_steps": 0}, "at least 1"),
        ({"tail": 4}, "does not fit"),
        ({"normalisation": "median"}, "unknown normalisation"),
        ({"dtypes": ("float8",)}, "unknown dtype"),
    ],
)
def test_settings_that_make_no_sense_are_named(settings: dict, says: str) -> None:
    with pytest.raises(StepscopeError, match=says):
        Settings(**settings)


TARGET = """
import torch
from torch.nn import functional as F

def loss_fn(model, batch):
    return F.mse_loss(model(batch["x"]), batch["y"])

def forgotten(model, micro_batches):
    for micro_batch in micro_batches:
        loss_fn(model, micro_batch).backward()

def make():
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 3), "y": torch.randn(8, 1)}
    return {"model": torch.nn.Linear(3, 1), "batch": batch, "loss_fn": loss_fn}

def make_wrong():
    return make() | {"window": forgotten}

def make_broken():
    raise RuntimeError("no data")
"""


def test_command_line_verdicts_and_exit_codes(tmp_path, capsys) -> None:
    file = tmp_path / "target.py"
    file.write_text(TARGET)
    options = ["-k", "4", "--dtype", "float32"]
    assert main(["check", "accumulation", f"{file}:make", *options]) == 0
    assert capsys.readouterr().out.startswith("accumulation passed: ")
    assert main(["check", "accumulation", f"{file}:make_wrong", *options]) == 1
    text = capsys.readouterr().out
    assert "accum-missing-divide: the gradient is 4 times what it should be" in text
    assert len(text.splitlines()) < 10
    assert main(["check", "accumulation", f"{file}:make_broken", *options]) == 2
    assert capsys.readouterr().err == f"stepscope: {file}:make_broken raised RuntimeError: no data\n"
    assert main(["check", "accumulation", f"{file}:make", "--format", "yaml"]) == 2


@pytest.mark.parametrize("name", ["json", "junit", "github", "html"])
def test_machine_formats_carry_the_finding(name: str, tmp_path, capsys) -> None:
    file = tmp_path / "target.py"
    file.write_text(TARGET)
    assert main(["check", "accumulation", f"{file}:make_wrong", "--dtype", "float32", "--format", name]) == 1
    assert "accum-missing-divide" in capsys.readouterr().out
