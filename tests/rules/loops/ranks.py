"""Loops of two processes, each recorded on its own: ``torchrun --nproc-per-node 2 -m tests.rules.loops.ranks OUT``."""

from __future__ import annotations

import gc
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817 - as everybody does
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

STEPS = 5


def rank():
    return dist.get_rank()


def world():
    return dist.get_world_size()


def batch(seed, size=6):
    """Data that differ between processes."""
    generator = torch.Generator().manual_seed(1000 * (rank() + 1) + seed)
    return torch.randn(size, 6, generator=generator), torch.randint(3, (size,), generator=generator)


def ragged(seed):
    """Labels of which a different number counts in each process."""
    x, y = batch(seed)
    y[: 1 + (seed + 2 * rank()) % 4] = -100
    return x, y


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def ddp_loop(loss_fn=F.cross_entropy, after=None, optimizer=torch.optim.SGD, data=batch):
    model = DDP(net())
    stepper = optimizer(model.parameters(), lr=0.1)
    for step in range(STEPS):
        x, y = data(step)
        stepper.zero_grad()
        loss_fn(model(x), y).backward()
        if after:
            after(model)
        stepper.step()


def accumulate(context, *, size=3, windows=4, scale=None, flush=False, before_step=None, late=False):
    """Windows of micro-steps under DDP; `context(model, micro)` is what forward runs in."""
    model = DDP(net())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    total = size * windows + (1 if flush else 0)
    for i in range(total):
        x, y = batch(i)
        with context(model, i % size == size - 1):
            loss = F.cross_entropy(model(x), y) * (1.0 if scale is None else scale)
            (loss / (1 if late else size)).backward()
        if i % size == size - 1 or i == total - 1:
            if before_step:
                before_step(model)
            optimizer.step()
            optimizer.zero_grad()


def manual(reduce, loss_fn=F.cross_entropy, data=batch):
    """Gradients reduced by hand, no wrapper."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        x, y = data(step)
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        reduce([p.grad for p in model.parameters()])
        optimizer.step()


def divide(gradients, by):
    for g in gradients:
        g.div_(by)


def sum_over_ranks(gradients):
    for g in gradients:
        dist.all_reduce(g)


# ---- no_sync --------------------------------------------------------------------------------------------------------


def flag_down_at_the_last_micro_step():
    def context(model, last):
        model.require_backward_grad_sync = not last
        return nullcontext()

    accumulate(context)


def tail_flushed_without_sync():
    accumulate(lambda model, last: nullcontext() if last else model.no_sync(), flush=True)


def no_sync_around_backward_alone():
    model = DDP(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y) / 2
        with nullcontext() if step % 2 else model.no_sync():
            loss.backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()


def one_of_two_wrappers_not_synchronised():
    body, head = DDP(nn.Linear(6, 8)), DDP(nn.Linear(8, 3))
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.1)
    for step in range(STEPS):
        x, y = batch(step)
        with body.no_sync():
            hidden = torch.tanh(body(x))
        F.cross_entropy(head(hidden), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def synchronised_at_the_last_micro_step():
    accumulate(lambda model, last: nullcontext() if last else model.no_sync())


def synchronised_at_every_micro_step():
    accumulate(lambda model, last: nullcontext(), flush=False)


# ---- past the wrapper -----------------------------------------------------------------------------------------------


class WithLoss(nn.Module):
    """Has a method that is not forward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))

    def loss(self, x, y):
        return F.cross_entropy(self.head(torch.tanh(self.body(x))), y)


def method_of_the_wrapped_module():
    model = DDP(WithLoss())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        model.module.loss(*batch(step)).backward()
        optimizer.step()


def model_kept_beside_its_wrapper():
    model = net()
    wrapped = DDP(model)
    optimizer = torch.optim.Adam(wrapped.parameters(), lr=1e-2)
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def evaluated_past_the_wrapper():
    model = DDP(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            model.module(x)


def weights_assigned_after_wrapping():
    model = DDP(net())
    state = {k: v.clone() for k, v in model.module.state_dict().items()}
    model.module.load_state_dict(state, assign=True)
    model.module.requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


# ---- averaging over targets and processes ---------------------------------------------------------------------------


def own_count(logits, y):
    return F.cross_entropy(logits, y, reduction="sum") / (y != -100).sum()


def global_count(y):
    count = (y != -100).sum()
    dist.all_reduce(count)
    return count


def each_divides_by_its_own_count():
    ddp_loop(own_count, data=ragged)


def means_reduced_by_hand():
    def reduce(gradients):
        sum_over_ranks(gradients)
        divide(gradients, world())

    manual(reduce, data=ragged)


def window_divided_by_its_own_count():
    """Right within a process: all targets of its window weigh the same."""
    model = DDP(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for window in range(4):
        parts = [ragged(2 * window + i) for i in range(2)]
        count = sum((y != -100).sum() for _, y in parts)
        for i, (x, y) in enumerate(parts):
            with nullcontext() if i else model.no_sync():
                (F.cross_entropy(model(x), y, reduction="sum") / count).backward()
        optimizer.step()
        optimizer.zero_grad()


def global_count_times_world():
    ddp_loop(lambda z, y: F.cross_entropy(z, y, reduction="sum") * world() / global_count(y), data=ragged)


def global_count_summed_by_hand():
    manual(sum_over_ranks, lambda z, y: F.cross_entropy(z, y, reduction="sum") / global_count(y), ragged)


def one_smaller_last_batch():
    ddp_loop(data=lambda step: batch(step, 3 if step == STEPS - 1 and rank() else 6))


# ---- the factor -----------------------------------------------------------------------------------------------------


def mean_times_world_with_accumulation():
    accumulate(lambda model, last: nullcontext() if last else model.no_sync(), scale=world())


def sum_not_divided():
    manual(sum_over_ranks)


def sum_of_a_flat_buffer_not_divided():
    def reduce(gradients):
        flat = torch.cat([g.reshape(-1) for g in gradients])
        dist.all_reduce(flat)
        place = 0
        for g in gradients:
            g.copy_(flat[place : place + g.numel()].view_as(g))
            place += g.numel()

    manual(reduce)


def sum_without_waiting_not_divided():
    def reduce(gradients):
        for handle in [dist.all_reduce(g, async_op=True) for g in gradients]:
            handle.wait()

    manual(reduce, data=lambda step: (batch(0)[0] * 0.1 + 1.0, torch.zeros(6, dtype=torch.long)))


def sum_over_global_count_averaged():
    """DDP divides by the world size, which nothing makes up for."""
    ddp_loop(lambda z, y: F.cross_entropy(z, y, reduction="sum") / global_count(y), data=ragged)


def divided_before_the_sum():
    def reduce(gradients):
        divide(gradients, world())
        sum_over_ranks(gradients)

    manual(reduce)


def summed_and_divided():
    def reduce(gradients):
        sum_over_ranks(gradients)
        divide(gradients, world())

    manual(reduce)


def summed_without_waiting_and_divided():
    def reduce(gradients):
        for handle in [dist.all_reduce(g, async_op=True) for g in gradients]:
            handle.wait()
        divide(gradients, world())

    manual(reduce)


def divided_late_by_the_window():
    """As many micro-steps as processes, and gradients divided by their number before the step."""
    accumulate(
        lambda model, last: nullcontext() if last else model.no_sync(),
        size=2,
        late=True,
        before_step=lambda model: divide([p.grad for p in model.parameters()], 2),
    )


def loss_divided_by_world_and_clipped():
    ddp_loop(
        lambda z, y: F.cross_entropy(z, y) / world(),
        after=lambda model: clip_grad_norm_(model.parameters(), 0.1),
        optimizer=torch.optim.Adam,
    )


def summed_and_divided_twice():
    def reduce(gradients):
        divide(gradients, world())
        sum_over_ranks(gradients)
        divide(gradients, world())

    manual(reduce)


def scaled(after=None):
    """float16 with a GradScaler under DDP."""
    model = DDP(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if after:
            after(model)
        clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()


def scaled_and_divided_again():
    scaled(lambda model: divide([p.grad for p in model.parameters()], world()))


def adversarial_under_two_wrappers():
    torch.manual_seed(0)
    generator, critic = DDP(nn.Linear(4, 6)), DDP(nn.Linear(6, 1), broadcast_buffers=False)
    g_step, c_step = (torch.optim.Adam(m.parameters(), lr=1e-3) for m in (generator, critic))
    noise = torch.Generator().manual_seed(rank())
    for step in range(STEPS):
        c_step.zero_grad()
        fake = generator(torch.randn(6, 4, generator=noise)).detach()
        (critic(fake).mean() - critic(batch(step)[0]).mean()).backward()
        c_step.step()
        g_step.zero_grad()
        (-critic(generator(torch.randn(6, 4, generator=noise))).mean()).backward()
        g_step.step()


# ---- shards ---------------------------------------------------------------------------------------------------------


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def sharded(clip):
    """Half of the hidden units in each process."""
    torch.manual_seed(0)
    up, down = torch.randn(8, 6) * 0.4, torch.randn(3, 8) * 0.4
    mine = slice(4 * rank(), 4 * rank() + 4)
    up, down = nn.Parameter(up[mine].clone()), nn.Parameter(down[:, mine].clone())
    optimizer = torch.optim.SGD([up, down], lr=0.1)
    generator = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        x = torch.randn(6, 6, generator=generator)
        optimizer.zero_grad()
        out = Sum.apply(torch.tanh(Copy.apply(x) @ up.t()) @ down.t())
        F.mse_loss(out, 4 * x[:, :3]).backward()
        clip([up, down])
        optimizer.step()


def own_norm(params, limit=0.5, *, whole=False):
    squared = sum(p.grad.square().sum() for p in params)
    if whole:
        dist.all_reduce(squared)
    for p in params:
        p.grad.mul_(torch.clamp(limit / (squared.sqrt() + 1e-6), max=1.0))


def shards_clipped_by_hand():
    sharded(own_norm)


def shards_clipped_by_the_norm_of_all():
    sharded(lambda params: own_norm(params, whole=True))


def partitioned(whole):
    """Each process steps its own layers of a model that all hold, and sends them to the others."""
    model = net()
    layers = [model[0], model[2]]
    mine = list(layers[rank()].parameters())
    optimizer = torch.optim.Adam(mine, lr=1e-2)
    for step in range(STEPS):
        x, y = batch(step)
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad.div_(world())
        if whole:
            squared = get_total_norm([p.grad for p in mine]) ** 2
            dist.all_reduce(squared)
            clip_grads_with_norm_(mine, 0.1, squared.sqrt())
        else:
            clip_grad_norm_(mine, 0.1)
        optimizer.step()
        for owner, layer in enumerate(layers):
            for p in layer.parameters():
                dist.broadcast(p.data, owner)


def partitions_clipped_apart():
    partitioned(whole=False)


def partitions_clipped_together():
    partitioned(whole=True)


def models_of_their_own():
    """No word between processes; one of them trains longer."""
    model = net(seed=rank())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS + 3 * rank()):
        x, y = batch(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


FAULTS = {
    flag_down_at_the_last_micro_step: "nosync-misuse",
    tail_flushed_without_sync: "nosync-misuse",
    no_sync_around_backward_alone: "nosync-misuse",
    one_of_two_wrappers_not_synchronised: "nosync-misuse",
    method_of_the_wrapped_module: "model-bypasses-ddp",
    model_kept_beside_its_wrapper: "model-bypasses-ddp",
    weights_assigned_after_wrapping: "ddp-params-moved",
    each_divides_by_its_own_count: "ddp-token-mean",
    means_reduced_by_hand: "ddp-token-mean",
    window_divided_by_its_own_count: "ddp-token-mean",
    mean_times_world_with_accumulation: "ddp-world-factor",
    sum_not_divided: "ddp-world-factor",
    sum_of_a_flat_buffer_not_divided: "ddp-world-factor",
    sum_without_waiting_not_divided: "ddp-world-factor",
    sum_over_global_count_averaged: "ddp-world-factor",
    loss_divided_by_world_and_clipped: "ddp-double-average",
    summed_and_divided_twice: "ddp-double-average",
    scaled_and_divided_again: "ddp-double-average",
    shards_clipped_by_hand: "clip-local-shard",
    partitions_clipped_apart: "clip-local-shard",
}

RIGHT = (
    synchronised_at_the_last_micro_step,
    synchronised_at_every_micro_step,
    evaluated_past_the_wrapper,
    global_count_times_world,
    global_count_summed_by_hand,
    one_smaller_last_batch,
    divided_before_the_sum,
    summed_and_divided,
    summed_without_waiting_and_divided,
    divided_late_by_the_window,
    scaled,
    adversarial_under_two_wrappers,
    shards_clipped_by_the_norm_of_all,
    partitions_clipped_together,
    models_of_their_own,
)


def main(out):
    """Record every loop."""
    import stepscope

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for loop in (*FAULTS, *RIGHT):
        gc.collect()
        with stepscope.watch(out=Path(out) / loop.__name__, rank=rank(), world_size=world()):
            loop()
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
