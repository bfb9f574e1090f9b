"""Windows, micro-steps and attempts in loops of many shapes, against the loop's own books."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import stepscope
from tests.watch.shapes import ABSENT, Story, check, norm64


def net(width: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))


def batch(n: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 3), torch.randn(n, 2)


def test_epochs_with_a_tail_and_validation_in_between():
    """Two loaders; five batches in windows of two leave a tail of one; rates are assigned by hand."""

    def loop():
        story, model = Story(), net()
        optimizer = story.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        data = TensorDataset(*batch(20))
        train = DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(1))
        held_out = DataLoader(data, batch_size=10)
        for epoch in (1, 2, 3):
            for i, (x, y) in enumerate(train):
                size = 1 if i == 4 else 2
                loss = F.mse_loss(model(x), y)
                cells = {"epoch": epoch, "loss": loss.item(), "loss_weight": 1 / size, "lr": ABSENT, "calls": "FB"}
                if i == 2:  # in the middle of an epoch: another loader, no gradients
                    model.eval()
                    with torch.no_grad():
                        for vx, _ in held_out:
                            model(vx)
                    model.train()
                story.backward(loss / size, optimizer, cells=cells)
                if i % 2 or i == 4:
                    optimizer.param_groups[0]["lr"] = 0.1 / (epoch * 10 + i)
                    story.step(optimizer, tail=i == 4, loss_weight_sum=1.0, calls="FBSZ")
                    optimizer.zero_grad()
        story.keep(model, optimizer)
        return story

    check(loop)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_cleared_before_the_forward(set_to_none):
    """zero_grad first: its letter stands with the micro-step before it."""

    def loop():
        story, model = Story(), net()
        optimizer = story.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        for i in range(4):
            optimizer.zero_grad(set_to_none=set_to_none)
            loss = F.mse_loss(model(batch()[0]), torch.zeros(4, 2))
            cells = {"loss": loss.item(), "loss_weight": 1.0, "grad_norm_before": 0.0}
            story.backward(loss, optimizer, cells=cells)
            story.step(optimizer, calls="FBSZ" if i < 3 else "FBS", tail=False)
        story.keep(model, optimizer)
        return story

    check(loop)


def test_several_backward_calls_a_step():
    """Two losses, each with its own backward, and two at once through torch.autograd.backward."""

    def loop():
        story, model = Story(), net()
        optimizer = story.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            (x, y), (v, w) = batch(), batch()
            first, second = F.mse_loss(model(x), y), F.l1_loss(model(v), w)
            story.backward(first, optimizer, cells={"loss": first.item(), "loss_weight": 1.0, "calls": "FFB"})
            story.backward(0.5 * second, optimizer, cells={"loss": second.item(), "loss_weight": 0.5, "calls": "BS"})
            story.step(optimizer)
            optimizer.zero_grad()
            first, second = F.mse_loss(model(x), y), F.mse_loss(model(v), w)
            torch.autograd.backward([first, second])
            story.noted(optimizer, num_items=ABSENT, loss_weight=1.0)
            story.step(optimizer, calls="FFBSZ")
            optimizer.zero_grad()
        story.keep(model, optimizer)
        for row in story.rows:
            if row["calls"] == "BS":
                row["calls"] = "BSZ"
        return story

    check(loop)


def test_one_graph_twice():
    """retain_graph: the second backward through the same graph is a micro-step of its own."""

    def loop():
        story, model = Story(), net()
        optimizer = story.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            x, y = batch()
            loss = F.mse_loss(model(x), y)
            value = loss.item()
            cells = {"loss": value, "loss_weight": 1.0}
            story.backward(loss, optimizer, cells=cells, retain_graph=True)
            story.backward(loss / 4, optimizer, cells={"loss": value, "loss_weight": 0.25})
            story.step(optimizer, loss_weight_sum=1.25)
            optimizer.zero_grad()
        story.keep(model, optimizer)
        return story

    check(loop)


def test_backward_on_more_than_a_scalar():
    """gradient= gives each sample its weight; the count of targets and their weight are told."""

    def loop():
        story, model = Story(), net()
        optimizer = story.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(2):
            x, _ = batch(4)
            losses = F.cross_entropy(model(x), torch.tensor([0, 1, 1, 0]), reduction="none")
            cells = {"num_items": 4, "target_weight": 0.25, "loss_weight": 1.0}
            story.backward(losses, optimizer, cells=cells, gradient=torch.full((4,), 0.25))
            story.step(optimizer)
            optimizer.zero_grad()
        story.keep(model, optimizer)
        return story

    check(loop)


def test_backward_into_chosen_inputs():
    """inputs= leaves gradients in one layer only: the other one's optimizer has no micro-step."""

    def loop():
        story, model = Story(), net()
        head = story.optimizer(torch.optim.SGD(model[2].parameters(), lr=0.1))
        body = story.optimizer(torch.optim.SGD(model[0].parameters(), lr=0.2))
        for i in range(4):
            x, y = batch()
            loss = F.mse_loss(model(x), y)
            chosen = model[2] if i % 2 else model[0]
            owner = head if i % 2 else body
            story.backward(
                loss, owner, cells={"loss": loss.item(), "loss_weight": 1.0}, inputs=list(chosen.parameters())
            )
            story.step(owner)
            owner.zero_grad()
        story.keep(model, head, body)
        return story

    check(loop)


def test_double_backward():
    """create_graph: a gradient penalty whose inner gradient comes from autograd.grad is no micro-step."""

    def loop():
        story, model = Story(), net()
        optimizer = story.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
        for _ in range(3):
            x, y = batch()
            x.requires_grad_()
            out = model(x)
            (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            loss = F.mse_loss(out, y) + 0.1 * (slope.norm(dim=1) - 1).pow(2).mean()
            story.backward(loss, optimizer, cells={"calls": "FBSZ"})
            story.step(optimizer)
            optimizer.zero_grad()
        story.keep(model, optimizer)
        return story

    check(loop)


def test_backward_with_create_graph_then_a_second_one():
    """A penalty on .grad itself: backward(create_graph=True), then backward through the gradients."""

    def loop():
        story, model = Story(), net()
        optimizer = story.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        params = list(model.parameters())
        for _ in range(3):
            x, y = batch()
            loss = F.mse_loss(model(x), y)
            story.backward(loss, optimizer, cells={"loss": loss.item(), "loss_weight": 1.0}, create_graph=True)
            penalty = sum((p.grad**2).sum() for p in params)
            story.backward(0.1 * penalty, optimizer)
            for p in params:
                p.grad = p.grad.detach()
            story.step(optimizer)
            for p in params:
                p.grad = None
        story.keep(model, optimizer)
        return story

    check(loop)


def test_truncated_backpropagation_through_time():
    """The hidden state is detached between chunks; three chunks a step."""

    def loop():
        story = Story()
        torch.manual_seed(0)
        cell, head = nn.GRUCell(3, 4), nn.Linear(4, 1)
        optimizer = story.optimizer(torch.optim.SGD([*cell.parameters(), *head.parameters()], lr=0.1))
        for _ in range(2):
            hidden = torch.zeros(2, 4)
            for _ in range(3):
                hidden = hidden.detach()
                loss = torch.zeros(())
                for _ in range(4):
                    hidden = cell(torch.randn(2, 3), hidden)
                    loss = loss + F.mse_loss(head(hidden), torch.zeros(2, 1)) / 4
                story.backward(loss / 3, optimizer, cells={"calls": ABSENT})
            story.step(optimizer)
            optimizer.zero_grad()
        story.keep(cell, head, optimizer)
        return story

    check(loop)


def test_a_step_without_a_backward_is_an_event():
    """It counts as an attempt and has no row."""

    def loop():
        story, model = Story(), net()
        optimizer = story.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(2):
            x, y = batch()
            story.step(optimizer)
            story.backward(F.mse_loss(model(x), y), optimizer)
            story.step(optimizer)
            optimizer.zero_grad()
        story.keep(model, optimizer)
        return story

    trace = check(loop)
    named = trace.events[trace.events["event"] == "step_without_backward"]
    assert named["optimizer"].tolist() == ["SGD/0"] * 2
    assert [json.loads(d)["attempt"] for d in named["detail"]] == [1, 3]


def test_an_optimizer_of_each_epoch():
    """The old object is gone and its address may be used again: each has its own label and counts from one."""

    def loop():
        story, model = Story(), net()
        for _ in range(4):
            optimizer = story.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
            story._kept.clear()  # let it go: the next one may get its address
            for _ in range(3):
                x, y = batch()
                story.backward(F.mse_loss(model(x), y), optimizer)
                story.step(optimizer)
                optimizer.zero_grad()
            del story.labels[id(optimizer)]
            story.labels[-len(story.labels) - 1] = ""
            del optimizer
        story.keep(model)
        return story

    trace = check(loop)
    assert trace.steps["optimizer"].drop_duplicates().tolist() == [f"Adam/{i}" for i in range(4)]
    assert [(o["name"], o["attempts"]) for o in trace.meta["optimizers"]] == [(f"Adam/{i}", 3) for i in range(4)]
    assert all(o["groups"][0]["lr"] == 0.01 and o["groups"][0]["params"] == 4 for o in trace.meta["optimizers"])
    assert len(trace.params) == 4 * 3 * 4  # also what was written after its optimizer was gone


def test_groups_added_on_the_way():
    """A frozen head is thawed and added after two steps: its rate has a column from then on, its names are its own."""

    def loop():
        story, model = Story(), net()
        model[2].requires_grad_(False)
        optimizer = story.optimizer(torch.optim.SGD(model[0].parameters(), lr=0.1))
        for i in range(4):
            if i == 2:
                model[2].requires_grad_(True)
                optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.025})
            x, y = batch()
            story.backward(F.mse_loss(model(x), y), optimizer, cells={"lr/pg2": 0.025 if i >= 2 else None})
            story.step(optimizer, grad_params=4 if i >= 2 else 2)
            optimizer.zero_grad()
        story.keep(model, optimizer)
        return story

    trace = check(loop)
    body, head = ["0.weight", "0.bias"], ["2.weight", "2.bias"]
    assert trace.params["param"].tolist() == body * 2 + (body + head) * 2
    assert trace.params["group"].tolist() == [1, 1] * 2 + [1, 1, 2, 2] * 2


def test_parameters_frozen_and_thawed_midway():
    """Rows go on; a frozen parameter gets no gradient and no row of its own but stays in place."""

    def loop():
        story, model = Story(), net()
        optimizer = story.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for i in range(6):
            model[0].requires_grad_(i % 3 != 1)
            x, y = batch()
            story.backward(F.mse_loss(model(x), y), optimizer)
            story.step(optimizer, grad_params=2 if i % 3 == 1 else 4)
            optimizer.zero_grad()
        story.keep(model, optimizer)
        return story

    check(loop)


def test_resume_in_the_middle_of_a_program():
    """State is loaded into a new model and optimizer; the numbers of the new optimizer begin at one."""

    def loop():
        story, model = Story(), net()
        first = story.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
        for _ in range(2):
            x, y = batch()
            story.backward(F.mse_loss(model(x), y), first)
            story.step(first)
            first.zero_grad()
        other = net()
        other.load_state_dict(model.state_dict())
        second = story.optimizer(torch.optim.AdamW(other.parameters(), lr=0.5))
        second.load_state_dict(first.state_dict())
        for _ in range(2):
            x, y = batch()
            story.backward(F.mse_loss(other(x), y), second)
            story.step(second, lr=0.01)
            second.zero_grad()
        story.keep(model, other, first, second)
        return story

    trace = check(loop)
    assert trace.events["event"].tolist().count("optimizer_loaded") == 1


def test_reading_the_trace_in_the_middle():
    """What is finished so far is there; reading loses nothing of what comes."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    lengths = []
    with stepscope.watch() as watching:
        for _ in range(5):
            x, y = batch()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            lengths.append(len(watching.trace.steps))
    assert lengths == [0, 1, 2, 3, 4]  # the last row is still open: calls may be added to it
    assert watching.trace.steps["micro_step"].tolist() == [1, 2, 3, 4, 5]


def test_nothing_trains():
    """Evaluations only: no row, and reading the trace works."""
    model = net()
    with stepscope.watch() as watching, torch.no_grad():
        model(batch()[0])
    assert len(watching.trace.steps) == 0
    assert watching.trace.meta["micro_steps"] == 0


def test_a_loop_that_never_steps():
    """Its micro-steps are there, each in the window that never ends."""

    def loop():
        story, model = Story(), net()
        optimizer = story.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            x, y = batch()
            story.backward(F.mse_loss(model(x), y), optimizer, cells={"tail": None, "lr": 0.1})
        story.keep(model, optimizer)
        return story

    trace = check(loop)
    assert trace.steps["window_step"].tolist() == [1, 2, 3]


def test_gradients_of_no_optimizer():
    """Parameters that only a hand-written rule moves: a row without an optimizer."""

    def loop():
        story, model = Story(), net()
        for _ in range(3):
            x, y = batch()
            loss = F.mse_loss(model(x), y)
            story.backward(loss, cells={"loss": loss.item(), "loss_weight": 1.0, "lr": None, "grad_norm": None})
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
                    p.grad = None
        story.keep(model)
        return story

    check(loop)


def test_norms_of_each_backward():
    """grad_norm_left after each backward and grad_norm_before ahead of it, summed up over the window."""

    def loop():
        story, model = Story(), net()
        optimizer = story.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(2):
            for _ in range(3):
                x, y = batch()
                held = norm64(p.grad for p in model.parameters())
                story.backward(F.mse_loss(model(x), y) / 3, optimizer, cells={"grad_norm_before": held})
                story.rows[-1]["grad_norm_left"] = norm64(p.grad for p in model.parameters())
            story.step(optimizer)
            optimizer.zero_grad()
        story.keep(model, optimizer)
        return story

    check(loop)
