"""Several optimizers that hold the same parameters: whose step used a window's gradients?"""

from __future__ import annotations

import torch
from torch import nn

import stepscope


def parts() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Linear(3, 1), torch.randn(8, 3), torch.randn(8, 1)


def windows(trace: stepscope.Trace, label: str) -> list[int]:
    """Sizes of the attempted windows of an optimizer."""
    rows = trace.steps[trace.steps["optimizer"] == label]
    return [int(size) for size in rows.loc[rows["sync_gradients"], "window_size"]]


def elsewhere(trace: stepscope.Trace, label: str) -> int:
    rows = trace.steps[trace.steps["optimizer"] == label]
    return int(rows["used_elsewhere"].fillna(False).sum())


def test_one_phase_after_the_other():
    """Adam first, LBFGS after: both exist all the time, and each has the windows that its own steps used."""
    model, x, y = parts()
    adam = torch.optim.Adam(model.parameters(), lr=1e-2)
    lbfgs = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        lbfgs.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss

    with stepscope.watch(model, [adam, lbfgs]) as watching:
        for _ in range(5):
            for part in range(2):
                (nn.functional.mse_loss(model(x[part::2]), y[part::2]) / 2).backward()
            adam.step()
            adam.zero_grad()
        lbfgs.step(closure)
        lbfgs.step(closure)
    trace = watching.trace
    evaluations = len(trace.steps[trace.steps["micro_step"] > 10]["micro_step"].unique())
    assert windows(trace, "Adam/0") == [2] * 5
    assert sum(windows(trace, "LBFGS/1")) == evaluations
    assert elsewhere(trace, "LBFGS/1") == 5
    assert trace.steps.loc[trace.steps["optimizer"] == "LBFGS/1", "before_closure"].dropna().tolist() == [0, 0]
    assert trace.findings.empty, trace.findings["message"].tolist()


def test_an_optimizer_that_was_replaced_and_lives_on():
    """The scheduler of the first phase keeps its optimizer alive; what follows is not the old one's."""
    model, x, y = parts()
    old = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(old, 100)
    new = None
    with stepscope.watch(model) as watching:
        for step in range(9):
            if step == 3:
                new = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
            optimizer = new if new is not None else old
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if new is None:
                scheduler.step()
    trace = watching.trace
    names = trace.steps.loc[trace.steps["sync_gradients"], "optimizer"].tolist()
    assert [names.count(name) for name in dict.fromkeys(names)] == [3, 6]
    assert elsewhere(trace, names[0]) == 6
    found = set(trace.findings["name"]) - {"optimizer-recreated"}
    assert not found, trace.findings["message"].tolist()


def test_both_use_the_same_gradient():
    """The head is in both optimizers and both step on it: each has its windows."""
    model, x, y = parts()
    everything = torch.optim.SGD(model.parameters(), lr=0.1)
    head = torch.optim.SGD([model.weight], lr=0.1)
    with stepscope.watch(model, [everything, head]) as watching:
        for _ in range(3):
            nn.functional.mse_loss(model(x), y).backward()
            before = model.weight.detach().clone()
            gradient = model.weight.grad.clone()
            everything.step()
            head.step()
            assert torch.allclose(model.weight, before - 0.2 * gradient)
            everything.zero_grad()
    trace = watching.trace
    assert windows(trace, "SGD/0") == windows(trace, "SGD/1") == [1, 1, 1]
    assert elsewhere(trace, "SGD/1") == 0
    assert "step_without_backward" not in trace.events["event"].tolist()


def test_optimizers_that_are_not_used_leave_no_trace():
    """A notebook holds optimizers of earlier cells: labels, facts and events are those of the loop that runs."""
    model, x, y = parts()
    stale = [torch.optim.Adam(nn.Linear(2, 2).parameters()) for _ in range(3)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with stepscope.watch() as watching:
        for _ in range(4):
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    trace = watching.trace
    assert len(stale) == 3
    assert [o["name"] for o in trace.meta["optimizers"]] == ["SGD/0"]
    assert set(trace.steps["optimizer"]) == {"SGD/0"}
    assert set(trace.events["optimizer"].dropna()) == {"SGD/0"}
    assert trace.steps["grad_norm_before"].tolist() == [0.0] * 4
    assert trace.steps["lr"].tolist() == [0.1, 0.1, 0.1 * 0.1, 0.1 * 0.1]


def test_an_optimizer_without_a_module_is_found_at_its_step():
    """Nothing tells before the first step that the tensor is the optimizer's: the micro-steps are its own all the same."""
    weight = torch.zeros(3, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    with stepscope.watch() as watching:
        for _ in range(3):
            for _ in range(2):
                ((weight - 1.0) ** 2).mean().div(2).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert windows(watching.trace, "SGD/0") == [2, 2, 2]
