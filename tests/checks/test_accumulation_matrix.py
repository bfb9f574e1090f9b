"""Verdicts over model kind x normalisation x fault x K x dtype: right code passes, every fault is named.

The windows below are written out by hand, as loops are, and the distance in float64 is recomputed naively.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stepscope.checks.accumulation import Experiment, Settings, check_accumulation

ROWS, LENGTH, WIDTH, CLASSES = 8, 20, 8, 6
IGNORED = -100


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Dropout(0.2), nn.Linear(12, CLASSES))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | float]:
        return self.body(x), 0.0


class Conv(nn.Module):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, 6, 3, padding=1)
        self.norm = nn.BatchNorm1d(6) if norm else nn.GroupNorm(2, 6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | float]:
        hidden = F.relu(self.norm(self.conv(x.transpose(1, 2)))).transpose(1, 2)
        return self.head(hidden), 0.0


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(WIDTH, 6, batch_first=True)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | float]:
        return self.head(self.cell(x)[0]), 0.0


class Experts(nn.Module):
    """Two experts, one chosen per token; `balance` is the auxiliary loss of Switch Transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.reshape(-1, WIDTH)
        shares = self.router(tokens).softmax(-1)
        gate, chosen = shares.max(-1)
        mixed = torch.zeros_like(tokens)
        for place, expert in enumerate(self.experts):
            rows = (chosen == place).nonzero()[:, 0]
            mixed = mixed.index_add(0, rows, (expert(tokens[rows]) * gate[rows, None]).to(mixed.dtype))
        used = F.one_hot(chosen, 2).to(shares.dtype).mean(0)
        return mixed.reshape(x.shape), 2 * (used * shares.mean(0)).sum()


class Transformer(nn.Module):
    def __init__(self, moe: bool) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix = Experts() if moe else nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | float]:
        q, k, v = self.qkv(self.first(x)).chunk(3, -1)
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0, is_causal=True)
        x = x + self.out(attended)
        mixed = self.mix(self.second(x))
        mixed, balance = mixed if isinstance(mixed, tuple) else (mixed, 0.0)
        return self.head(x + mixed), balance


KINDS = {
    "mlp": Mlp,
    "conv": lambda: Conv(norm=False),
    "conv-batchnorm": lambda: Conv(norm=True),
    "lstm": Lstm,
    "transformer": lambda: Transformer(moe=False),
    "moe": lambda: Transformer(moe=True),
}
COUPLED = {"conv-batchnorm": "norm (BatchNorm1d)", "moe": "mix (Experts)"}


@dataclass(frozen=True)
class Case:
    kind: str
    normalisation: str
    fault: str
    aux: bool
    K: int

    def __str__(self) -> str:
        return f"{self.kind}-{self.normalisation}-{self.fault}{'-aux' if self.aux else ''}-K{self.K}"


FAULTS = {
    "mean": {
        "none": None,
        "forgotten": "accum-missing-divide",
        "twice": "accum-double-divide",
        "tail": "accum-tail-misweighted",
        "aux": "aux-loss-scaling",
    },
    "targets": {
        "none": None,
        "mean of means": "accum-token-mean",
        "tail": "accum-tail-misweighted",
        "aux": "aux-loss-scaling",
    },
    "sum": {"none": None, "divided": "accum-denominator-wrong", "aux": "aux-loss-scaling"},
}


def cases() -> list[Case]:
    found = []
    for kind in KINDS:
        for normalisation, faults in FAULTS.items():
            for fault in faults:
                sizes = (2, 4) if fault in ("none", "mean of means") else (4,)
                extra = [Case(kind, normalisation, fault, True, 4)] if fault == "none" else []
                found += [Case(kind, normalisation, fault, fault == "aux", K) for K in sizes] + extra
    return found


def batch_for(case: Case) -> tuple[Tensor, Tensor]:
    """Inputs (rows, length, width) and labels; with `targets` the rows have counts that differ by about 5 %."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(ROWS, LENGTH, WIDTH, generator=generator)
    labels = torch.randint(0, CLASSES, (ROWS, LENGTH), generator=generator)
    if case.normalisation == "targets":
        for row in range(ROWS // 2, ROWS):
            labels[row, LENGTH - 1 :] = IGNORED
    return inputs, labels


def terms(model: nn.Module, batch: tuple[Tensor, Tensor], case: Case, reduction: str) -> tuple[Tensor, Tensor, Tensor]:
    """The main loss, a z-loss where asked for, and the router's balance, a mean in any case."""
    logits, balance = model(batch[0])
    flat = logits.reshape(-1, CLASSES).float() if logits.dtype != torch.float64 else logits.reshape(-1, CLASSES)
    main = F.cross_entropy(flat, batch[1].reshape(-1), ignore_index=IGNORED, reduction=reduction)
    squares = flat.logsumexp(-1).square()
    z_loss = 0.05 * (squares.sum() if case.normalisation == "sum" else squares.mean())
    return main, z_loss if case.aux else torch.zeros(()), torch.as_tensor(0.01 * balance)


def loss_fn(case: Case):
    reduction = "sum" if case.normalisation == "sum" else "mean"

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return sum(terms(model, batch, case, reduction))

    return loss


def window_for(case: Case):
    """A loop's window, right or with one fault, for K micro-batches."""

    def window(model: nn.Module, micro_batches: list[tuple[Tensor, Tensor]], scaler: torch.amp.GradScaler) -> None:
        count = len(micro_batches)
        divisor = {"forgotten": 1, "twice": count * count, "tail": case.K}.get(case.fault, count)
        targets = sum(int((labels != IGNORED).sum()) for _, labels in micro_batches)
        for micro_batch in micro_batches:
            summed = case.normalisation != "mean" and case.fault != "mean of means"
            main, z_loss, balance = terms(model, micro_batch, case, "sum" if summed else "mean")
            if case.normalisation == "sum":
                divisor = count if case.fault == "divided" else 1
                main, z_loss, balance = main / divisor, z_loss / divisor, balance / count / divisor
            elif summed:
                main, z_loss, balance = main / targets * (count / divisor), z_loss / divisor, balance / divisor
            else:
                main, z_loss, balance = main / divisor, z_loss / divisor, balance / divisor
            aux = (z_loss + balance) * (count if case.fault == "aux" else 1)
            scaler.scale(main + aux).backward()
        for parameter in model.parameters():
            parameter.grad /= scaler.get_scale()

    return window


def naive_difference(case: Case, model: nn.Module, batch: tuple[Tensor, Tensor]) -> float:
    """Relative distance in float64, parameter by parameter, with dropout switched off by hand."""
    model = copy.deepcopy(model).double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    attention = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = lambda q, k, v, dropout_p, is_causal: attention(q, k, v, is_causal=is_causal)
    try:
        pieces = [(x.double(), y) for x, y in zip(batch[0].chunk(case.K), batch[1].chunk(case.K), strict=True)]
        pieces = pieces[:-1] if case.fault == "tail" else pieces
        loss_fn(case)(model, (torch.cat([p[0] for p in pieces]), torch.cat([p[1] for p in pieces]))).backward()
        large = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        window_for(case)(model, pieces, torch.amp.GradScaler("cpu", enabled=False))
        squares = sum(float(((p.grad - g) ** 2).sum()) for p, g in zip(model.parameters(), large, strict=True))
        return (squares / sum(float((g**2).sum()) for g in large)) ** 0.5
    finally:
        F.scaled_dot_product_attention = attention


@pytest.mark.parametrize("case", cases(), ids=str)
def test_verdict(case: Case) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model = KINDS[case.kind]()
    batch = batch_for(case)
    experiment = Experiment(model, batch, loss_fn(case), window_for(case))
    outcome = check_accumulation(experiment, Settings(case.K, tail=case.K - 1 if case.fault == "tail" else 0))
    verdicts = {row["dtype"]: row["verdict"] for row in outcome.details["dtypes"]}
    names = [finding.name for finding in outcome.findings if finding.severity == "error"]
    notices = [finding for finding in outcome.findings if finding.severity == "notice"]

    expected = naive_difference(case, model, batch)
    assert outcome.details["dtypes"][0]["difference"] == pytest.approx(expected, rel=1e-6, abs=1e-13)
    fault = FAULTS[case.normalisation][case.fault]
    assert names == ([fault] if fault else [])
    for dtype in ("float32", "bfloat16", "float16"):
        assert verdicts[dtype] in (("different",) if fault else ("equal", "rounding"))
    coupled = COUPLED.get(case.kind)
    assert verdicts["float64"] == ("different" if fault or coupled else "equal")
    assert [finding.name for finding in notices] == (["accum-batch-coupled"] if coupled else [])
    assert not coupled or coupled in notices[0].message
