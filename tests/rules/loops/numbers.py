"""Loops with a fault in modes, lost updates and averages, and loops that look like it and are right."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.rules.loops.parameters import STEPS, batch, mlp, train


def dropout_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


def norm_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


@torch.no_grad()
def evaluate(model):
    model.eval()
    return float(F.cross_entropy(model(batch(99)[0]), batch(99)[1]))


# ---- modes ----------------------------------------------------------------------------------------------------------


def evaluated_before_the_first_step():
    model = dropout_net()
    evaluate(model)
    train(model, torch.optim.Adam(model.parameters(), lr=1e-2))


def norms_left_in_eval_with_accumulation():
    model = norm_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window in range(5):
        for micro in range(2):
            x, y = batch(2 * window + micro)
            (F.cross_entropy(model(x), y) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        if window == 1:
            evaluate(model)


class Encoder(nn.Module):
    """An encoder with Dropout and a head."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.relu(self.encoder(x)))


def encoder_left_in_eval():
    """Only a part was evaluated, the model as a whole stays in train mode."""
    torch.manual_seed(0)
    model = Encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer, steps=3)
    model.encoder.eval()
    with torch.no_grad():
        model.encoder(batch(99)[0])
    train(model, optimizer, begin=3)


def evaluated_and_set_back():
    model = dropout_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        model.train()
        train(model, optimizer, steps=2, begin=2 * epoch)
        evaluate(model)


def statistics_kept_on_purpose():
    """Norms in eval mode in a model in train mode."""
    model = norm_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        model.train()
        if step >= 3:
            model[1].eval()
        train(model, optimizer, steps=1, begin=step)


def frozen_encoder_with_dropout():
    torch.manual_seed(0)
    model = Encoder()
    model.encoder.requires_grad_(False)
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    model.train()
    train(model, optimizer, steps=2)
    model.encoder.eval()
    train(model, optimizer, begin=2)


def adversarial_examples():
    """The attack runs in eval mode, once by autograd.grad and once by backward; the step trains in train mode."""
    model = dropout_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        x, y = batch(step)
        model.eval()
        x.requires_grad_()
        if step % 2:
            (slope,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
        else:
            F.cross_entropy(model(x), y).backward()
            slope = x.grad
        x = (x + 0.1 * slope.sign()).detach()
        model.train()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def no_part_depends_on_the_mode():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Dropout(0.0), nn.InstanceNorm1d(8), nn.Linear(8, 3))
    model[3] = nn.Identity()
    evaluate(model)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def generator_in_eval_while_the_critic_trains():
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 6))
    critic = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(), nn.Linear(8, 1))
    g_step, c_step = (torch.optim.Adam(m.parameters(), lr=1e-3) for m in (generator, critic))
    for step in range(STEPS):
        generator.eval()
        c_step.zero_grad()
        (critic(generator(torch.randn(8, 4)).detach()).mean() - critic(batch(step)[0]).mean()).backward()
        c_step.step()
        generator.train()
        g_step.zero_grad()
        (-critic(generator(torch.randn(8, 4))).mean()).backward()
        g_step.step()


# ---- lost updates ---------------------------------------------------------------------------------------------------


def half_net(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3)).to(dtype)


def train_half(model, optimizer, steps=8):
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        x, y = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x.to(dtype)).float(), y).backward()
        optimizer.step()


def plain_sgd_in_bfloat16():
    model = half_net()
    train_half(model, torch.optim.SGD(model.parameters(), lr=1e-4))


def adam_in_float16():
    model = half_net(torch.float16)
    train_half(model, torch.optim.Adam(model.parameters(), lr=1e-6, eps=1e-4))


def only_the_norm_is_stuck():
    """Few elements, and all of the norm's: its weights are 1, where 1.7e-3 is less than half a spacing; others are small."""
    model = half_net()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name != "1.weight":
                parameter.mul_(0.05)
    train_half(model, torch.optim.AdamW(model.parameters(), lr=1.7e-3, weight_decay=0.0))


def large_steps_in_bfloat16():
    model = half_net()
    train_half(model, torch.optim.SGD(model.parameters(), lr=0.5))


def tiny_steps_in_float32():
    model = half_net(torch.float32)
    train_half(model, torch.optim.AdamW(model.parameters(), lr=1e-9))


class Compensated(torch.optim.Optimizer):
    """Keeps what rounding took, and gives it back (Kahan)."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                kept = self.state[p].setdefault("compensation", torch.zeros_like(p))
                kept.sub_(group["lr"] * p.grad.sign())
                before = p.clone()
                p.add_(kept)
                kept.sub_(p - before)


def compensated_in_bfloat16():
    model = half_net()
    train_half(model, Compensated(model.parameters(), lr=1e-4))


class Stochastic(torch.optim.Optimizer):
    """Rounds up or down by chance, so that the mean is right."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                exact = p.float() - group["lr"] * p.grad.float().sign()
                bits = exact.view(torch.int32) + torch.randint(1 << 16, exact.shape, dtype=torch.int32)
                p.copy_((bits & -65536).view(torch.float32))


def stochastic_in_bfloat16():
    model = half_net()
    train_half(model, Stochastic(model.parameters(), lr=1e-4), steps=12)


# ---- averages -------------------------------------------------------------------------------------------------------


def accumulate(model, update, *, every_micro_step, windows=6, size=3, prepare=None):
    """Windows of micro-steps; `update` runs after every micro-step, or after the step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window in range(windows):
        for micro in range(size):
            x, y = batch(size * window + micro)
            (F.cross_entropy(model(x), y) / size).backward()
            if every_micro_step:
                update()
        optimizer.step()
        optimizer.zero_grad()
        if not every_micro_step:
            update()


@torch.no_grad()
def blend(slow, fast, decay):
    for a, b in zip(slow.parameters(), fast.parameters(), strict=True):
        a.lerp_(b, 1 - decay)


def copied_module(*, every_micro_step, decay=0.9):
    model = mlp()
    average = copy.deepcopy(model).requires_grad_(False)
    accumulate(model, lambda: blend(average, model, decay), every_micro_step=every_micro_step)


class Shadow:
    """Keeps new tensors in a dict by name."""

    def __init__(self, model, decay):
        self.model, self.decay = model, decay
        self.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}

    def update(self):
        for n, p in self.model.named_parameters():
            self.shadow[n] = self.decay * self.shadow[n] + (1.0 - self.decay) * p.detach()


def dict_of_tensors(*, every_micro_step):
    model = mlp()
    accumulate(model, Shadow(model, 0.9).update, every_micro_step=every_micro_step)


def list_of_tensors(*, every_micro_step):
    model = mlp()
    shadow = [p.detach().clone() for p in model.parameters()]

    def update():
        for s, p in zip(shadow, model.parameters(), strict=True):
            s.data.sub_(0.1 * (s - p.data))

    accumulate(model, update, every_micro_step=every_micro_step)


class Buffers(nn.Module):
    """Keeps the average in buffers, whose names may have no dots."""

    def __init__(self, model):
        super().__init__()
        for n, p in model.named_parameters():
            self.register_buffer(n.replace(".", ""), p.detach().clone())

    @torch.no_grad()
    def forward(self, model):
        held = dict(self.named_buffers())
        for n, p in model.named_parameters():
            held[n.replace(".", "")].mul_(0.9).add_(p, alpha=0.1)


def module_of_buffers(*, every_micro_step):
    model = mlp()
    average = Buffers(model)
    accumulate(model, lambda: average(model), every_micro_step=every_micro_step)


def averaged_model(*, every_micro_step):
    model = mlp()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    accumulate(model, lambda: average.update_parameters(model), every_micro_step=every_micro_step)


def gradients_summed_by_hand():
    """A dict by name that changes at every micro-step and is no average."""
    model = mlp()
    total = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window in range(6):
        for micro in range(3):
            x, y = batch(3 * window + micro)
            (F.cross_entropy(model(x), y) / 3).backward()
            for n, p in model.named_parameters():
                total[n] = total[n] + p.grad
        optimizer.step()
        optimizer.zero_grad()


def target_network_copied_now_and_then():
    model = mlp()
    target = copy.deepcopy(model)

    def update():
        target.load_state_dict(model.state_dict())

    accumulate(model, update, every_micro_step=True)


def average_with_two_optimizers():
    """The critic accumulates; the average of the generator moves after each of its steps, in the critic's window."""
    torch.manual_seed(0)
    generator, critic = nn.Linear(4, 6), nn.Linear(6, 1)
    average = AveragedModel(generator, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    g_step, c_step = (torch.optim.SGD(m.parameters(), lr=0.01) for m in (generator, critic))
    for step in range(12):
        (critic(generator(torch.randn(8, 4)).detach()).mean() - critic(batch(step)[0]).mean()).backward()
        if step % 2:
            c_step.step()
            c_step.zero_grad()
        held = [p.grad for p in critic.parameters()]
        (-critic(generator(torch.randn(8, 4))).mean()).backward(inputs=list(generator.parameters()))
        assert [p.grad for p in critic.parameters()] == held
        g_step.step()
        g_step.zero_grad()
        average.update_parameters(generator)


AVERAGES = (copied_module, dict_of_tensors, list_of_tensors, module_of_buffers, averaged_model)

FAULTS = {
    evaluated_before_the_first_step: "eval-mode-left-on",
    norms_left_in_eval_with_accumulation: "eval-mode-left-on",
    encoder_left_in_eval: "eval-mode-left-on",
    plain_sgd_in_bfloat16: "bf16-update-lost",
    adam_in_float16: "bf16-update-lost",
    only_the_norm_is_stuck: "bf16-update-lost",
}

RIGHT = (
    evaluated_and_set_back,
    statistics_kept_on_purpose,
    frozen_encoder_with_dropout,
    adversarial_examples,
    no_part_depends_on_the_mode,
    generator_in_eval_while_the_critic_trains,
    large_steps_in_bfloat16,
    tiny_steps_in_float32,
    compensated_in_bfloat16,
    stochastic_in_bfloat16,
    gradients_summed_by_hand,
    target_network_copied_now_and_then,
    average_with_two_optimizers,
)
