"""Optimizers of every kind: several at once, own ones, wrapped ones, with closures, on odd parameters."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.watch.shapes import ABSENT, Story, check, norm64


def net(width: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))


def batch(n: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 3), torch.randn(n, 2)


def test_two_networks_where_one_leaks_into_the_other():
    """A GAN: the generator's backward gives the discriminator gradients that are cleared before its next use."""

    def loop():
        story = Story()
        torch.manual_seed(0)
        generator, critic = nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        g = story.optimizer(torch.optim.Adam(generator.parameters(), lr=0.01))
        d = story.optimizer(torch.optim.SGD(critic.parameters(), lr=0.02))
        ones, zeros = torch.ones(4, 1), torch.zeros(4, 1)
        loss = F.binary_cross_entropy_with_logits
        for i in range(3):
            d.zero_grad()
            fake = generator(torch.randn(4, 2))
            leaked = {"grad_norm_before": 0.0}
            story.backward(loss(critic(torch.randn(4, 3)), ones), d, cells=leaked)
            story.backward(loss(critic(fake.detach()), zeros), d, cells={"loss_weight": 1.0})
            story.step(d)
            g.zero_grad()
            story.backward(loss(critic(fake), ones), g, d, cells={"loss_weight": 1.0})
            d_row = story.rows[-1]
            story.step(g, grad_norm=norm64(p.grad for p in generator.parameters()))
            assert d_row["optimizer"] == "SGD/1"
            if i < 2:  # its gradient is thrown away, but its micro-step belongs to the window of the next step
                assert d_row["window_step"] == 1
        story.keep(generator, critic, g, d)
        return story

    trace = check(loop)
    sizes = trace.steps[trace.steps["sync_gradients"]].groupby("optimizer")["window_size"].apply(list)
    assert sizes["SGD/1"] == [2, 3, 3]
    assert sizes["Adam/0"] == [1, 1, 1]


def test_two_optimizers_on_one_scaler_and_one_overflow():
    """Only the optimizer whose gradients overflow skips; the scale after the one update goes down for both."""

    def loop():
        story = Story()
        torch.manual_seed(0)
        left, right = nn.Linear(3, 1), nn.Linear(3, 1)
        a = story.optimizer(torch.optim.SGD(left.parameters(), lr=0.1))
        b = story.optimizer(torch.optim.AdamW(right.parameters(), lr=0.1))
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
        for i in range(4):
            scale = scaler.get_scale()
            cells = {"loss_scale_before": scale, "loss_weight": 1.0}
            x = torch.randn(4, 3)
            story.backward(scaler.scale(left(x).pow(2).mean()), a, cells=cells)
            story.backward(scaler.scale(right(x).pow(2).mean()), b, cells=cells)
            first, second = story.rows[-2:]
            if i == 2:
                right.weight.grad[0, 0] = float("inf")
            for optimizer, row in ((a, first), (b, second)):
                skipped = i == 2 and optimizer is b
                row["grad_norm_scaled"] = (
                    ABSENT if i == 2 else norm64(p.grad for g in optimizer.param_groups for p in g["params"])
                )
                scaler.unscale_(optimizer)
                story.step(optimizer, call=lambda o=optimizer: scaler.step(o), applied=not skipped, found_inf=skipped)
                if skipped:
                    row.update(update_norm=None, grad_norm_clipped=None, skip_reason="gradients not finite")
            scaler.update()
            first["loss_scale_after"] = second["loss_scale_after"] = scaler.get_scale()
            assert scaler.get_scale() == (512.0 if i >= 2 else 1024.0)
            a.zero_grad()
            b.zero_grad()
        story.keep(left, right, a, b)
        return story

    trace = check(loop)
    assert trace.steps["step_skipped"].sum() == 1


def test_lbfgs():
    """Each evaluation of the closure is a micro-step; all of one step are one window."""

    def loop():
        story, model = Story(), net()
        x, y = batch(10)
        optimizer = story.optimizer(torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3))

        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            story.backward(loss, optimizer, cells={"loss": loss.item(), "loss_weight": 1.0, "grad_norm_before": 0.0})
            return loss

        for _ in range(3):
            story.step(optimizer, closure, closure=True, grad_norm_clipped=ABSENT, before_closure=0)
        story.keep(model)
        return story

    trace = check(loop)
    assert trace.steps["micro_step"].max() >= 6


class TwoPhase(torch.optim.Optimizer):
    """Sharpness-aware minimization: climb by the gradient, take it there, come back and let another optimizer step."""

    def __init__(self, params, rho=0.05, **settings):
        super().__init__(params, {"rho": rho, **settings})
        self.base = torch.optim.SGD(self.param_groups, **settings)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self):
        params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.norm(torch.stack([p.grad.norm() for p in params]))
        for p in params:
            self.state[p]["old"] = p.clone()
            p.add_(p.grad * (self.param_groups[0]["rho"] / (norm + 1e-12)))

    @torch.no_grad()
    def second_step(self):
        for g in self.param_groups:
            for p in g["params"]:
                p.copy_(self.state[p]["old"])
        self.base.step()

    @torch.no_grad()
    def step(self, closure):
        closure = torch.enable_grad()(closure)
        self.first_step()
        self.zero_grad()
        closure()
        self.second_step()


def test_sam_with_a_closure():
    """Two backward passes a step; the inner optimizer's step is part of the outer one and no attempt of its own."""

    def loop():
        story, model = Story(), net()
        optimizer = story.optimizer(TwoPhase(model.parameters(), lr=0.1))
        inner = story.optimizer(optimizer.base)
        for _ in range(3):
            x, y = batch()

            def closure(x=x, y=y):
                loss = F.mse_loss(model(x), y)
                story.backward(loss, optimizer, inner, cells={"loss": loss.item(), "loss_weight": 1.0})
                return loss

            closure()
            story.step(optimizer, closure, closure=True, before_closure=1, grad_norm_clipped=ABSENT)
            optimizer.zero_grad()
        story.keep(model)
        return story

    trace = check(loop)
    assert trace.steps["window_size"].dropna().tolist() == [2, 2, 2]
    assert trace.steps.groupby("optimizer")["sync_gradients"].sum().to_dict() == {"SGD/1": 0, "TwoPhase/0": 3}


def test_sam_by_two_calls():
    """first_step and second_step: what steps is the inner optimizer, and the window is its."""

    def loop():
        story, model = Story(), net()
        outer = story.optimizer(TwoPhase(model.parameters(), lr=0.1))
        inner = outer.base
        for _ in range(3):
            x, y = batch()
            for call in (outer.first_step, outer.second_step):
                F.mse_loss(model(x), y).backward()
                call()
                outer.zero_grad()
        story.keep(model, inner)
        return story

    trace = check(loop)
    inner = trace.steps[trace.steps["optimizer"] == "SGD/1"]
    assert inner["window_size"].dropna().tolist() == [2, 2, 2]
    assert not trace.steps[trace.steps["optimizer"] == "TwoPhase/0"]["sync_gradients"].any()


def test_an_optimizer_of_each_tensor_in_backward():
    """Steps in post-accumulate hooks: every optimizer has a row of its own for each backward, with its step in it."""

    def loop():
        story, model = Story(), net()
        owners = {}
        for p in model.parameters():
            owners[p] = story.optimizer(torch.optim.SGD([p], lr=0.1))
        norms = {}

        def hook(p):
            norms[p] = norm64([p.grad])
            before = p.detach().clone()
            owners[p].step()
            norms[p] = norms[p], norm64([p.detach().double() - before])
            owners[p].zero_grad()

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(hook)
        for step in range(3):
            x, y = batch()
            F.mse_loss(model(x), y).backward()
            story.micro_steps += 1
            for p, optimizer in owners.items():
                used, change = norms[p]
                story.rows.append({
                    "micro_step": step + 1, "optimizer": story.labels[id(optimizer)], "window_step": 1, "window_size": 1,
                    "global_step": step + 1, "applied_steps": step + 1, "sync_gradients": True, "lr": 0.1,
                    "grad_norm_clipped": used, "update_norm": change, "step_in_backward": True, "loss_weight": 1.0,
                })  # fmt: skip
        story.keep(model)
        return story

    check(loop)


def test_master_copies():
    """float32 copies of a bfloat16 model: the micro-steps that gave the model gradients are those of the copies."""

    def loop():
        story, model = Story(), net().bfloat16()
        masters = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
        optimizer = story.optimizer(torch.optim.AdamW(masters, lr=0.01))
        for _ in range(3):
            for _ in range(2):
                x, y = batch()
                loss = F.mse_loss(model(x.bfloat16()).float(), y)
                story.backward(
                    loss / 2, optimizer, cells={"loss": loss.item(), "loss_weight": 0.5, "grad_norm_left": ABSENT}
                )
            for p, m in zip(model.parameters(), masters, strict=True):
                m.grad = p.grad.float()
                p.grad = None
            story.step(optimizer, grad_norm=norm64(m.grad for m in masters))
            optimizer.zero_grad()
            with torch.no_grad():
                for p, m in zip(model.parameters(), masters, strict=True):
                    p.copy_(m)
        story.keep(model, optimizer)
        return story

    check(loop)


class Own(torch.optim.Optimizer):
    """A script's own optimizer: signs of gradients."""

    def __init__(self, params, lr):
        self.called = 0
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        self.called += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad.sign(), alpha=-group["lr"])


class Wrapper:
    """Another library's way: an object around the optimizer that is none itself."""

    def __init__(self, optimizer):
        self.inner = optimizer

    def step(self):
        self.inner.step()

    def zero_grad(self):
        self.inner.zero_grad()


def test_own_and_wrapped_optimizers():
    """Known by their class; a wrapper is seen through the optimizer that it calls."""

    def loop():
        story, one, two = Story(), net(), net(5)
        own = story.optimizer(Own(one.parameters(), lr=0.01))
        inner = story.optimizer(torch.optim.RMSprop(two.parameters(), lr=0.02))
        wrapper = Wrapper(inner)
        for _ in range(3):
            x, y = batch()
            story.backward(F.mse_loss(one(x), y), own)
            story.backward(F.mse_loss(two(x), y), inner)
            story.step(own)
            story.step(inner, call=wrapper.step)
            own.zero_grad()
            wrapper.zero_grad()
        story.keep(one, two, inner)
        return story

    check(loop)


def test_lookahead():
    """An optimizer around an optimizer, which shares its groups: the outer one's step is the attempt."""

    class Lookahead(torch.optim.Optimizer):
        def __init__(self, base, k=2):
            self.base, self.k, self.count = base, k, 0
            super().__init__(base.param_groups, {})
            self.param_groups = base.param_groups
            self.slow = [p.detach().clone() for g in base.param_groups for p in g["params"]]

        def step(self, closure=None):
            self.base.step()
            self.count += 1
            if self.count % self.k == 0:
                with torch.no_grad():
                    for s, p in zip(self.slow, (p for g in self.param_groups for p in g["params"]), strict=True):
                        s.add_(p - s, alpha=0.5)
                        p.copy_(s)

    def loop():
        story, model = Story(), net()
        inner = story.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        outer = story.optimizer(Lookahead(inner))
        for _ in range(4):
            x, y = batch()
            story.backward(F.mse_loss(model(x), y), outer, inner)
            story.step(outer)
            for row in story.rows[-1:]:
                assert row["optimizer"] == "SGD/0"
            outer.zero_grad()
        story.keep(model)
        return story

    trace = check(loop)
    assert trace.steps.groupby("optimizer")["sync_gradients"].sum().to_dict() == {"Lookahead/1": 4, "SGD/0": 0}


def test_schedule_free():
    """An optimizer of another library, with its switch around the evaluation."""
    schedulefree = pytest.importorskip("schedulefree")

    def loop():
        story, model = Story(), net()
        optimizer = story.optimizer(schedulefree.AdamWScheduleFree(model.parameters(), lr=0.01, warmup_steps=2))
        for i in range(4):
            optimizer.train()
            x, y = batch()
            story.backward(F.mse_loss(model(x), y), optimizer, cells={"loss_weight": 1.0})
            story.step(optimizer, optimizer_train_mode=True)
            optimizer.zero_grad()
            if i == 1:
                optimizer.eval()
                with torch.no_grad():
                    model(x)
        story.keep(model, optimizer)
        return story

    check(loop)


@pytest.mark.parametrize("kind", ["capturable", "tensor_lr", "fused", "foreach", "maximize"])
def test_kinds_of_adam(kind):
    """A rate in a tensor is read as it was when the step used it."""
    options = {
        "capturable": {"lr": torch.tensor(0.01), "foreach": False},
        "tensor_lr": {"lr": torch.tensor(0.01), "fused": True},
        "fused": {"lr": 0.01, "fused": True},
        "foreach": {"lr": 0.01, "foreach": True},
        "maximize": {"lr": 0.01, "maximize": True, "amsgrad": True},
    }[kind]

    def loop():
        story, model = Story(), net()
        optimizer = story.optimizer(torch.optim.Adam(model.parameters(), **copy.deepcopy(options)))
        for _ in range(3):
            x, y = batch()
            story.backward(F.mse_loss(model(x), y), optimizer)
            story.step(optimizer)
            optimizer.zero_grad()
            rate = optimizer.param_groups[0]["lr"]
            if isinstance(rate, torch.Tensor):
                rate.mul_(0.5)
            else:
                optimizer.param_groups[0]["lr"] = rate / 2
        story.keep(model, optimizer)
        return story

    trace = check(loop)
    assert trace.steps["lr"].tolist() == pytest.approx([0.01, 0.005, 0.0025])


class Odd(nn.Module):
    """Complex, 0-dimensional, empty, tied and float64 parameters side by side."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rotation = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 4))
        self.precise = nn.Parameter(torch.randn(2, dtype=torch.float64))
        self.first = nn.Linear(2, 2, bias=False)
        self.tied = nn.Linear(2, 2, bias=False)
        self.tied.weight = self.first.weight
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        rotated = (x.to(torch.complex64) @ self.rotation).abs()
        out = self.tied(self.first(rotated)) * self.scale + self.nothing.sum()
        return out.double() * self.precise


def test_odd_parameters():
    """Names, places and norms of each; the unused one has no gradient and does not move."""

    def loop():
        story, model = Story(), Odd()
        optimizer = story.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False))
        for _ in range(3):
            loss = model(torch.randn(4, 3)).pow(2).mean()
            story.backward(loss, optimizer, cells={"loss": loss.item(), "loss_weight": 1.0})
            story.step(optimizer, grad_params=5, grad_nonfinite=0)
            optimizer.zero_grad()
        story.keep(model, optimizer)
        return story

    trace = check(loop)
    names = ["rotation", "scale", "nothing", "precise", "unused", "first.weight"]
    assert trace.params["param"].tolist()[:6] == names
    shapes = dict(zip(trace.params["param"], trace.params["shape"], strict=True))
    assert shapes == dict(zip(names, ["3x2", "", "0x4", "2", "3", "2x2"], strict=True))
    unused = trace.params[trace.params["param"] == "unused"]
    assert unused["update_norm"].tolist() == [0.0] * 3
    assert unused["grad_norm"].isna().all()


def test_sparse_and_dense_parameters():
    """A sparse gradient's norm is that of its values after coalescing."""

    def loop():
        story = Story()
        torch.manual_seed(0)
        table, head = nn.Embedding(10, 3, sparse=True), nn.Linear(3, 1)
        a = story.optimizer(torch.optim.SparseAdam(table.parameters(), lr=0.1))
        b = story.optimizer(torch.optim.SGD(head.parameters(), lr=0.1))
        for _ in range(3):
            loss = head(table(torch.tensor([1, 2, 2, 7]))).pow(2).mean()
            story.backward(loss, a, b, cells={"loss": loss.item(), "loss_weight": 1.0})
            story.step(a)
            story.step(b)
            a.zero_grad()
            b.zero_grad()
        story.keep(table, head, b)
        return story

    check(loop)


def test_names_of_what_no_module_holds():
    """Loose tensors are named by group and index; those that the optimizer is given names for have them."""

    def loop():
        story = Story()
        torch.manual_seed(0)
        loose = [torch.randn(3, requires_grad=True), torch.randn(2, requires_grad=True)]
        other = torch.randn(4, requires_grad=True)
        optimizer = story.optimizer(torch.optim.SGD([{"params": loose}, {"params": [other], "lr": 0.5}], lr=0.1))
        for _ in range(2):
            story.backward(sum((p**2).sum() for p in (*loose, other)), optimizer, cells={"lr/pg2": 0.5})
            story.step(optimizer)
            optimizer.zero_grad()
        story.keep(*loose, other)
        return story

    trace = check(loop)
    assert trace.params["param"].tolist() == ["pg1.0", "pg1.1", "pg2.0"] * 2


def test_names_that_the_optimizer_was_given():
    """torch's own named parameters."""

    def loop():
        story = Story()
        torch.manual_seed(0)
        one = torch.randn(3, requires_grad=True)
        optimizer = story.optimizer(torch.optim.SGD([("embedding", one)], lr=0.1))
        story.backward((one**2).sum(), optimizer)
        story.step(optimizer)
        story.keep(one)
        return story

    assert check(loop).params["param"].tolist() == ["embedding"]


def test_deep_copies():
    """A copied model has parameters of its own; training both keeps them apart, and names tell which is which."""

    def loop():
        story, model = Story(), net()
        twin = copy.deepcopy(model)
        a = story.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        b = story.optimizer(torch.optim.SGD(twin.parameters(), lr=0.1))
        for _ in range(2):
            x, y = batch()
            story.backward(F.mse_loss(model(x), y), a)
            story.step(a)
            a.zero_grad()
            story.backward(F.mse_loss(twin(x), 2 * y), b)
            story.step(b)
            b.zero_grad()
        story.keep(model, twin)
        return story

    trace = check(loop)
    names = trace.params.groupby("optimizer")["param"].unique()
    assert list(names["SGD/0"]) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert not set(names["SGD/0"]) & set(names["SGD/1"])


def test_a_copied_optimizer():
    """deepcopy skips the constructor: the copy is watched from its first step on."""

    def loop():
        story, model = Story(), net()
        pair = {"model": model, "optimizer": torch.optim.Adam(model.parameters(), lr=0.1)}
        story.optimizer(pair["optimizer"])
        twin = copy.deepcopy(pair)
        copied = story.optimizer(twin["optimizer"])
        x, y = batch()
        F.mse_loss(twin["model"](x), y).backward()
        copied.step()
        copied.zero_grad()
        story.noted()
        story.rows.clear()
        story.keep(model, twin["model"], copied)
        return story

    trace = check(loop)
    assert trace.meta["optimizers"][1]["attempts"] == 1
