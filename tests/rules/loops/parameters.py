"""Loops with a fault in which parameters train, and loops that look like it and are right."""

from __future__ import annotations

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

STEPS = 6


def batch(seed, size=8, width=6, classes=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, width, generator=generator), torch.randint(classes, (size,), generator=generator)


def mlp(width=6, classes=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, classes))


def train(model, optimizer, *, steps=STEPS, loss_fn=F.cross_entropy, set_to_none=True, begin=0):
    for step in range(begin, begin + steps):
        x, y = batch(step)
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_fn(model(x), y).backward()
        optimizer.step()


# ---- parameters that no optimizer has -------------------------------------------------------------------------------


class PlainList(nn.Module):
    """Keeps its layers in a list, where `parameters` does not find them."""

    def __init__(self):
        super().__init__()
        self.layers = [nn.Linear(6, 6) for _ in range(2)]
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def layers_in_a_plain_list():
    torch.manual_seed(0)
    model = PlainList()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))


class Centers(nn.Module):
    """A loss with parameters of its own."""

    def __init__(self):
        super().__init__()
        self.centers = nn.Parameter(torch.randn(3, 3))

    def forward(self, features, y):
        return F.cross_entropy(features, y) + (features - self.centers[y]).square().mean()


def loss_with_parameters_left_out():
    model = mlp()
    criterion = Centers()
    train(model, torch.optim.Adam(model.parameters(), lr=1e-2), loss_fn=criterion)


class PlainTensor(nn.Module):
    """Has a scale that was meant to be a parameter."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(6, 3)
        self.scale = torch.ones(3, requires_grad=True)

    def forward(self, x):
        return self.fc(x) * self.scale


def scale_is_no_parameter():
    torch.manual_seed(0)
    model = PlainTensor()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def names_filter_forgets_the_middle():
    model = mlp()
    chosen = [p for n, p in model.named_parameters() if n.startswith(("0.", "4."))]
    optimizer = torch.optim.AdamW(chosen, lr=1e-2)
    for window in range(4):
        for micro in range(3):
            x, y = batch(window * 3 + micro)
            (F.cross_entropy(model(x), y) / 3).backward()
        optimizer.step()
        model.zero_grad()


def one_of_two_networks_left_out():
    torch.manual_seed(0)
    encoder, decoder = nn.Linear(6, 4), nn.Linear(4, 6)
    optimizer = torch.optim.Adam(decoder.parameters(), lr=1e-2)
    for step in range(STEPS):
        x, _ = batch(step)
        F.mse_loss(decoder(torch.relu(encoder(x))), x).backward()
        optimizer.step()
        for p in (*encoder.parameters(), *decoder.parameters()):
            p.grad = None


def perceptual_network_in_eval_mode():
    """Right enough: a fixed network that serves the loss."""
    model = mlp(classes=6)
    fixed = mlp().eval()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        x, _ = batch(step)
        optimizer.zero_grad()
        F.mse_loss(fixed(model(x)), fixed(x).detach()).backward()
        optimizer.step()


def weights_moved_by_hand():
    model = mlp()
    last = torch.optim.SGD(model[4].parameters(), lr=0.1)
    for step in range(STEPS):
        x, y = batch(step)
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        last.step()
        with torch.no_grad():
            for p in model[:4].parameters():
                p -= 0.1 * p.grad


def master_copies():
    """A bfloat16 model whose weights are copies of float32 ones; a tiny rate leaves the copies as they are."""
    model = mlp().to(torch.bfloat16)
    masters = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-6)
    for step in range(STEPS):
        x, y = batch(step)
        F.cross_entropy(model(x.bfloat16()).float(), y).backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad, p.grad = p.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)


def one_optimizer_for_each_tensor():
    model = mlp()
    optimizers = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
    for step in range(STEPS):
        x, y = batch(step)
        F.cross_entropy(model(x), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def learners_that_outlive_their_optimizers():
    """Reptile: copies are trained by an optimizer of their own, which is gone before they are; the first moves to each."""
    model, learners = mlp(), []
    for _ in range(20):
        learners.append(copy.deepcopy(model))
        train(learners[-1], torch.optim.SGD(learners[-1].parameters(), lr=0.05), steps=3)
        with torch.no_grad():
            for p, adapted in zip(model.parameters(), learners[-1].parameters(), strict=True):
                p.add_(adapted - p, alpha=0.5)


def inputs_that_require_gradients():
    """An input that is kept and asked for its gradient is no parameter."""
    model = mlp()
    x, y = batch(0)
    x.requires_grad_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def unfreezing_layer_by_layer():
    model = mlp()
    for p in model[:4].parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.SGD(model[4].parameters(), lr=0.1)
    train(model, optimizer, steps=3)
    for p in model[2].parameters():
        p.requires_grad_(True)
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.01})
    train(model, optimizer, begin=3)


class TwoHeads(nn.Module):
    """A head that is used now and then, and a pooler that is called and never used."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)
        self.extra, self.pooler = nn.Linear(8, 3), nn.Linear(8, 8)

    def forward(self, x, extra=False):
        h = torch.tanh(self.body(x))
        self.pooler(h)
        return self.head(h) + (self.extra(h) if extra else 0)


def heads_used_now_and_then():
    torch.manual_seed(0)
    model = TwoHeads()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x, extra=step % 3 == 2), y).backward()
        optimizer.step()


# ---- tensors that the model no longer uses --------------------------------------------------------------------------


def weights_assigned_after_the_optimizer_was_built():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    train(model, optimizer)


def model_copied_after_the_optimizer_was_built():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(copy.deepcopy(model), optimizer)


def embedding_grown_after_the_optimizer_was_built():
    torch.manual_seed(0)
    embedding, head = nn.Embedding(3, 4), nn.Linear(4, 3)
    optimizer = torch.optim.Adam([*embedding.parameters(), *head.parameters()], lr=1e-2)
    grown = torch.cat([embedding.weight.data, torch.randn(2, 4)])
    embedding.weight = nn.Parameter(grown)
    for step in range(STEPS):
        _, y = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(head(embedding(y)), y).backward()
        optimizer.step()


# ---- frozen parameters ----------------------------------------------------------------------------------------------


def frozen_with_zero_gradients():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    train(model, optimizer, steps=3)
    for p in model[0].parameters():
        p.requires_grad_(False)
    train(model, optimizer, set_to_none=False, begin=3)


def frozen_with_an_old_gradient():
    """Only trainable parameters are cleared, so that the frozen ones step along their last gradient for ever."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(8):
        x, y = batch(step)
        if step == 3:
            model[2].requires_grad_(False)
        for p in model.parameters():
            if p.requires_grad:
                p.grad = None
        F.cross_entropy(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def zero_gradients_for_all():
    """Code that flattens gradients gives every parameter one; decay moves those that were frozen from the start."""
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for p in model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        optimizer.step()


class DecaysAll(torch.optim.Optimizer):
    """Decays parameters that have no gradient too."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1 - 0.1 * group["lr"])
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad)


def decay_without_a_gradient():
    model = mlp()
    model[0].requires_grad_(False)
    train(model, DecaysAll(model.parameters(), lr=0.1))


def flag_set_back_by_a_later_call():
    """Wrong only by what was meant: ``--declare frozen=0``."""
    model = mlp()
    model[0].requires_grad_(False)
    model.requires_grad_(True)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))


def frozen_without_a_gradient():
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    train(model, optimizer, steps=3)
    model[0].requires_grad_(False)
    train(model, optimizer, begin=3)


def masters_that_require_no_gradient():
    model = mlp()
    masters = [p.detach().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1, momentum=0.9)
    for step in range(STEPS):
        x, y = batch(step)
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for master, p in zip(masters, model.parameters(), strict=True):
            master.grad = p.grad.clone()
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, model.parameters(), strict=True):
                p.copy_(master)


def adversarial_with_flags_switched():
    """A critic is frozen while the generator steps, and has BatchNorm."""
    torch.manual_seed(0)
    generator = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
    critic = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.LeakyReLU(), nn.Linear(8, 1))
    g_step = torch.optim.Adam(generator.parameters(), lr=1e-3)
    c_step = torch.optim.Adam(critic.parameters(), lr=1e-3, weight_decay=0.01)
    for step in range(STEPS):
        real, _ = batch(step)
        critic.requires_grad_(True)
        c_step.zero_grad()
        fake = generator(torch.randn(8, 4)).detach()
        mixed = (0.5 * real + 0.5 * fake).requires_grad_()
        (slope,) = torch.autograd.grad(critic(mixed).sum(), mixed, create_graph=True)
        (critic(fake).mean() - critic(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()).backward()
        c_step.step()
        critic.requires_grad_(False)
        g_step.zero_grad()
        (-critic(generator(torch.randn(8, 4))).mean()).backward()
        g_step.step()


class Contrast(nn.Module):
    """A momentum encoder inside of the model, in train mode, moved in forward."""

    def __init__(self):
        super().__init__()
        self.query = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
        self.key = copy.deepcopy(self.query).requires_grad_(False)

    def forward(self, x):
        q = F.normalize(self.query(x), dim=1)
        with torch.no_grad():
            for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
            k = F.normalize(self.key(x + 0.1), dim=1)
        return F.cross_entropy(q @ k.t() / 0.2, torch.arange(len(x)))


def momentum_encoder():
    torch.manual_seed(0)
    model = Contrast()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch(step)[0]).backward()
        optimizer.step()


# ---- norms ----------------------------------------------------------------------------------------------------------


def norm_net(affine=True):
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, affine=affine), nn.ReLU())
    return nn.Sequential(backbone, nn.Linear(8, 3))


def frozen_norm_without_parameters():
    model = norm_net(affine=False)
    model[0].requires_grad_(False)
    train(model, torch.optim.SGD(model[1].parameters(), lr=0.1))


def backbone_frozen_on_the_way():
    model = norm_net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    train(model, optimizer, steps=3)
    model[0].requires_grad_(False)
    model.train()
    train(model, optimizer, begin=3)


def frozen_backbone_in_eval_mode():
    model = norm_net()
    model[0].requires_grad_(False)
    model[0].eval()
    train(model, torch.optim.SGD(model[1].parameters(), lr=0.1))


# ---- twice ----------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """The output layer is the embedding."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(3, 4), nn.Linear(4, 3, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, y):
        return self.out(self.embed(y))


def train_tied(model, optimizer):
    for step in range(STEPS):
        _, y = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(y), y).backward()
        optimizer.step()


def untied_by_a_load():
    torch.manual_seed(0)
    model = Tied()
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    train_tied(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


def two_parameters_in_one_memory():
    torch.manual_seed(0)
    model = Tied()
    model.load_state_dict(model.state_dict(), assign=True)
    train_tied(model, torch.optim.SGD(model.parameters(), lr=0.1))


def listed_twice():
    model = mlp()
    params = [p for layer in (model[0], model[2], model[2], model[4]) for p in layer.parameters()]
    train(model, torch.optim.SGD(params, lr=0.1))


def tied_and_listed_once():
    torch.manual_seed(0)
    model = Tied()
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
    train_tied(model, torch.optim.AdamW(model.parameters(), lr=1e-2))


# ---- decay ----------------------------------------------------------------------------------------------------------


def decay_exemption_misses_the_norm():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    spared = [p for n, p in model.named_parameters() if n.endswith("bias")]
    decayed = [p for n, p in model.named_parameters() if not n.endswith("bias")]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": spared, "weight_decay": 0.0}]
    train(model, torch.optim.AdamW(groups, lr=1e-2))


def decay_by_shape():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    params = list(model.parameters())
    groups = [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    train(model, torch.optim.AdamW(groups, lr=1e-2))


# ---- checkpointing --------------------------------------------------------------------------------------------------


class OwnCheckpoint(torch.autograd.Function):
    """Activation checkpointing as a script writes it."""

    @staticmethod
    def forward(context, run, x):
        context.run = run
        context.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(context, gradient):
        (x,) = context.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = context.run(x)
        torch.autograd.backward(y, gradient)
        return None, x.grad


class Checkpointed(nn.Module):
    """A frozen embedding, checkpointed layers, a head."""

    def __init__(self, run, *, inputs_require_grad=False):
        super().__init__()
        self.embed = nn.Linear(6, 8).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.head = nn.Linear(8, 3)
        self.run, self.inputs_require_grad = run, inputs_require_grad

    def forward(self, x):
        x = self.embed(x)
        if self.inputs_require_grad:
            x = x.detach().requires_grad_()
        for layer in self.layers:
            x = self.run(layer, x)
        return self.head(x)


def reentrant(layer, x):
    return checkpoint(layer, x, use_reentrant=True)


def own_checkpoint_without_a_graph():
    torch.manual_seed(0)
    model = Checkpointed(OwnCheckpoint.apply)
    train(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2))


def checkpoint_called_from_the_loop():
    torch.manual_seed(0)
    layer, head = nn.Linear(6, 8), nn.Linear(8, 3)
    optimizer = torch.optim.SGD([*layer.parameters(), *head.parameters()], lr=0.1)
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(head(reentrant(layer, x)), y).backward()
        optimizer.step()


def reentrant_with_a_graph():
    torch.manual_seed(0)
    model = Checkpointed(reentrant, inputs_require_grad=True)
    train(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2))


class Features(nn.Module):
    """A body under no_grad although its parameters require gradients and the optimizer has them."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        with torch.no_grad():
            h = torch.tanh(self.body(x))
        return self.head(h)


def body_under_no_grad():
    torch.manual_seed(0)
    model = Features()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))


class LowRank(nn.Module):
    """An adapter beside a frozen layer; one of its factors starts at zero."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(6, 3).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, 6) / math.sqrt(6))
        self.up = nn.Parameter(torch.zeros(3, 2))

    def forward(self, x):
        return self.base(x) + x @ self.down.t() @ self.up.t()


def adapters():
    torch.manual_seed(0)
    model = LowRank()
    train(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2))


def distillation():
    """A frozen teacher called with gradients on, in eval mode, with BatchNorm and Dropout."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    teacher.requires_grad_(False).eval()
    student = mlp()
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-2)
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        out = student(x)
        (
            F.cross_entropy(out, y) + F.kl_div(out.log_softmax(1), teacher(x).softmax(1), reduction="batchmean")
        ).backward()
        optimizer.step()


FAULTS = {
    layers_in_a_plain_list: "param-missing-from-optimizer",
    loss_with_parameters_left_out: "param-missing-from-optimizer",
    scale_is_no_parameter: "param-missing-from-optimizer",
    names_filter_forgets_the_middle: "param-missing-from-optimizer",
    one_of_two_networks_left_out: "param-missing-from-optimizer",
    weights_assigned_after_the_optimizer_was_built: "param-stale-ref",
    model_copied_after_the_optimizer_was_built: "param-stale-ref",
    embedding_grown_after_the_optimizer_was_built: "param-stale-ref",
    frozen_with_zero_gradients: "frozen-still-updated",
    frozen_with_an_old_gradient: "frozen-still-updated",
    zero_gradients_for_all: "frozen-still-updated",
    decay_without_a_gradient: "frozen-still-updated",
    frozen_norm_without_parameters: "frozen-bn-stats",
    backbone_frozen_on_the_way: "frozen-bn-stats",
    untied_by_a_load: "param-duplicate",
    two_parameters_in_one_memory: "param-duplicate",
    listed_twice: "param-duplicate",
    decay_exemption_misses_the_norm: "weight-decay-groups",
    own_checkpoint_without_a_graph: "ckpt-reentrant-no-grad",
    checkpoint_called_from_the_loop: "ckpt-reentrant-no-grad",
}
"""Each with the one fault that it has."""

RIGHT = (
    perceptual_network_in_eval_mode,
    weights_moved_by_hand,
    master_copies,
    one_optimizer_for_each_tensor,
    learners_that_outlive_their_optimizers,
    inputs_that_require_gradients,
    unfreezing_layer_by_layer,
    heads_used_now_and_then,
    flag_set_back_by_a_later_call,
    frozen_without_a_gradient,
    masters_that_require_no_gradient,
    adversarial_with_flags_switched,
    momentum_encoder,
    frozen_backbone_in_eval_mode,
    tied_and_listed_once,
    decay_by_shape,
    reentrant_with_a_graph,
    body_under_no_grad,
    adapters,
    distillation,
)
