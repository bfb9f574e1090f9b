"""Loops that accumulate gradients, right and wrong. Each function returns a loop that takes no arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

Loop = Callable[[], None]
Batch = tuple[torch.Tensor, torch.Tensor]

VOCABULARY, IGNORE = 11, -100


def classes(n: int, size: int = 6, last: int | None = None) -> list[Batch]:
    """`n` batches for `classifier`; the last one of `last` samples."""
    gen = torch.Generator().manual_seed(1)
    sizes = [size] * (n - 1) + [last or size]
    return [(torch.randn(s, 5, generator=gen), torch.randint(0, 3, (s,), generator=gen)) for s in sizes]


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def sentences(n: int, lengths: tuple[int, ...] = (3, 9, 5, 2, 7), rows: int = 2) -> list[Batch]:
    """`n` padded batches whose numbers of targets follow `lengths`."""
    gen = torch.Generator().manual_seed(2)
    out = []
    for i in range(n):
        ids = torch.randint(0, VOCABULARY, (rows, 10), generator=gen)
        labels = ids.clone()
        labels[:, lengths[i % len(lengths)] :] = IGNORE
        out.append((ids, labels))
    return out


def language_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCABULARY, 6), nn.Linear(6, VOCABULARY))


def cross_entropy(output: torch.Tensor, y: torch.Tensor, **options: Any) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, -2), y.flatten(), ignore_index=IGNORE, **options)


def masked_mean(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    mask = (y != IGNORE).flatten()
    each = F.cross_entropy(output.flatten(0, -2), y.clamp(min=0).flatten(), reduction="none")
    return (each * mask).sum() / mask.sum()


def squares(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A mean that leaves no loss node."""
    return (output - F.one_hot(y, 3)).square().mean()


def mean_of_two(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """One loss of two terms, as a symmetric contrastive loss has them."""
    return 0.5 * (F.cross_entropy(output, y) + F.cross_entropy(-output, y))


def sum_of_two(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """One loss that adds two terms."""
    return F.cross_entropy(output, y) + F.cross_entropy(-output, y)


def labelled_and_unlabelled() -> Loop:
    """Two losses of different kind in one window: a mean over labelled data, and one over those of which some count."""

    def loop() -> None:
        torch.manual_seed(0)
        net = classifier()
        opt = torch.optim.SGD(net.parameters(), lr=1e-2)
        for _ in range(8):
            for x, y in classes(2):
                (F.cross_entropy(net(x), y) / 2).backward()
            for x, y in classes(4):
                sure = (torch.rand(len(y)) > 0.4).float()
                ((F.cross_entropy(net(x), y, reduction="none") * sure).mean() / 4).backward()
            opt.step()
            opt.zero_grad()

    return loop


def critic_in_waiting() -> Loop:
    """A generator learns through a critic whose own optimizer has not begun yet."""

    def loop() -> None:
        torch.manual_seed(0)
        generator, critic = nn.Linear(3, 5), nn.Linear(5, 1)
        own, waiting = torch.optim.SGD(generator.parameters(), lr=0.1), torch.optim.SGD(critic.parameters(), lr=0.1)
        for _ in range(6):
            own.zero_grad()
            waiting.zero_grad()
            critic(generator(torch.randn(4, 3))).mean().backward()
            own.step()

    return loop


def elements_per_row(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Summed over the elements of a row, then the mean over the rows: the likelihood of an autoencoder."""
    target = F.one_hot(y, 3).float()
    return F.binary_cross_entropy_with_logits(output, target, reduction="none").sum(1).mean()


def valid(y: torch.Tensor) -> int:
    return int((y != IGNORE).sum())


def each_nth(k: int) -> Callable[[int, int], bool]:
    """Step when k micro-steps are done, and on the tail."""
    return lambda i, n: (i + 1) % k == 0 or i + 1 == n


def never_flushed(k: int) -> Callable[[int, int], bool]:
    return lambda i, n: (i + 1) % k == 0


def by_window(k: int) -> Callable[[int, int], float]:
    """One over the number of micro-steps of the window that i is in."""
    return lambda i, n: 1.0 / min(k, n - i // k * k)


def constant(weight: float) -> Callable[[int, int], float]:
    return lambda i, n: weight


QUARTER, EACH_FOURTH = constant(0.25), each_nth(4)


def accumulate(
    *,
    batches: list[Batch] | None = None,
    model: Callable[[], nn.Module] = classifier,
    criterion: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = F.cross_entropy,
    weight: Callable[[int, int], float] = QUARTER,
    boundary: Callable[[int, int], bool] = EACH_FOURTH,
    epochs: int = 3,
    loader: bool = False,
    clear: str = "after",
    to_none: bool = True,
    optimizer: Any = torch.optim.SGD,
    clip: float | None = None,
    scaler: bool = False,
    before_step: Callable[[nn.Module], None] | None = None,
    guard: Callable[[int], bool] | None = None,
    counter: bool = False,
) -> Loop:
    """A loop over `epochs` of `batches`.

    Args:
        batches: the data; 8 batches of six samples by default.
        model: makes the model.
        criterion: loss of an output and its targets.
        weight: factor of the loss, by index of the micro-step in its epoch and number of them.
        boundary: whether to step after it.
        epochs: how many.
        loader: draw the batches through a DataLoader, so that epochs can be seen.
        clear: ``after`` the step, ``top`` of each micro-step, ``epoch`` (once at its start), ``both`` (after, and at the
            start of an epoch) or ``never``.
        to_none: of ``zero_grad``.
        optimizer: class of the optimizer.
        clip: limit of a clip by norm.
        scaler: run under a GradScaler.
        before_step: called between the last backward and the clip.
        guard: whether to drop the gradients of a micro-step (by its number over the run) instead of stepping.
        counter: `boundary` and `weight` see the number of the micro-step over the run.
    """

    def loop() -> None:
        torch.manual_seed(0)
        net = model()
        opt = optimizer(net.parameters(), lr=1e-2)
        scale = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scaler)
        data = classes(8) if batches is None else batches
        total, done = len(data) * epochs if counter else len(data), 0
        for _ in range(epochs):
            if clear in ("epoch", "both"):
                opt.zero_grad(set_to_none=to_none)
            for i, (x, y) in enumerate(_through(data) if loader else data):
                i = done if counter else i
                done += 1
                if clear == "top":
                    opt.zero_grad(set_to_none=to_none)
                scale.scale(criterion(net(x), y) * weight(i, total)).backward()
                if guard is not None and guard(done - 1):
                    opt.zero_grad()
                    continue
                if boundary(i, total):
                    _step(net, opt, scale, clip, before_step)
                    if clear in ("after", "both"):
                        opt.zero_grad(set_to_none=to_none)

    return loop


def _step(net: nn.Module, opt: Any, scale: Any, clip: float | None, before_step: Any) -> None:
    if before_step is not None or clip is not None:
        scale.unscale_(opt)
    if before_step is not None:
        before_step(net)
    if clip is not None:
        nn.utils.clip_grad_norm_(net.parameters(), clip)
    scale.step(opt)
    scale.update()


def _through(data: list[Batch]) -> DataLoader[Any]:
    return DataLoader(data, batch_size=None)


def divided_by(k: float, how: str = "inplace") -> Callable[[nn.Module], None]:
    """Divide every gradient: in place, through .data, or by a new tensor."""

    def divide(net: nn.Module) -> None:
        for p in net.parameters():
            if how == "inplace":
                p.grad /= k
            elif how == "data":
                p.grad.data.div_(k)
            elif how == "new":
                p.grad = p.grad / k
            else:
                torch._foreach_div_([p.grad], k)

    return divide


def token_loop(
    normalise: str, *, k: int = 4, lengths: tuple[int, ...] = (3, 9, 5, 2, 7), scaler: bool = False, windows: int = 5
) -> Loop:
    """A language model over windows of k padded batches.

    `normalise`: ``mean`` (of each micro-step, over K), ``masked`` (the same by hand), ``window`` (sums over the window's
    targets), ``share`` (means times their share of the targets), ``late`` (sums; gradients divided before the step),
    ``numel`` (sums over all positions, padding too), ``unshifted`` (sums over targets and one more a row).
    """

    def loop() -> None:
        torch.manual_seed(0)
        net = language_model()
        opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
        scale = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scaler)
        data = sentences(k * windows, lengths)
        for start in range(0, len(data), k):
            window = data[start : start + k]
            total = sum(valid(y) for _, y in window)
            for x, y in window:
                scale.scale(_normalised(normalise, net(x), y, total, window)).backward()
            scale.unscale_(opt)
            if normalise == "late":
                divided_by(total)(net)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scale.step(opt)
            scale.update()
            opt.zero_grad()

    return loop


def _normalised(how: str, output: torch.Tensor, y: torch.Tensor, total: int, window: list[Batch]) -> torch.Tensor:
    if how == "mean":
        return cross_entropy(output, y) / len(window)
    if how == "masked":
        return masked_mean(output, y) / len(window)
    if how == "share":
        return cross_entropy(output, y) * (valid(y) / total)
    summed = cross_entropy(output, y, reduction="sum")
    rows = sum(len(b) for _, b in window)
    divisors = {"window": total, "late": 1, "numel": sum(b.numel() for _, b in window), "unshifted": total + rows}
    return summed / divisors[how]


def main_grad(k: int = 4, windows: int = 4) -> Loop:
    """The sum is kept beside .grad, which is cleared at each micro-step, and put back before the step: right."""

    def loop() -> None:
        torch.manual_seed(0)
        net = classifier()
        opt = torch.optim.SGD(net.parameters(), lr=1e-2)
        for _ in range(windows):
            kept = [torch.zeros_like(p) for p in net.parameters()]
            for x, y in classes(k):
                (F.cross_entropy(net(x), y) / k).backward()
                for held, p in zip(kept, net.parameters(), strict=True):
                    held += p.grad
                    p.grad = None
            for held, p in zip(kept, net.parameters(), strict=True):
                p.grad = held
            opt.step()
            opt.zero_grad()

    return loop


def stepping_in_backward(*, k: int, weight: float, optimizer: Any = torch.optim.Adam, windows: int = 5) -> Loop:
    """An optimizer for each tensor that steps as soon as its gradient is there."""

    def loop() -> None:
        torch.manual_seed(0)
        net = classifier()
        own = {p: optimizer([p], lr=1e-3) for p in net.parameters()}

        def hook(p: torch.Tensor) -> None:
            own[p].step()
            own[p].zero_grad()

        for p in net.parameters():
            p.register_post_accumulate_grad_hook(hook)
        for x, y in classes(k * windows):
            (F.cross_entropy(net(x), y) * weight).backward()

    return loop


def multi_task(weight: float = 1.0, windows: int = 6) -> Loop:
    """Two losses of different kind on one batch, a backward each: a sum that is meant."""

    def loop() -> None:
        torch.manual_seed(0)
        net = nn.Linear(5, 4)
        opt = torch.optim.Adam(net.parameters(), lr=1e-3)
        for x, y in classes(windows):
            (F.cross_entropy(net(x)[:, :3], y) * weight).backward()
            (F.mse_loss(net(x)[:, 3], x[:, 0]) * weight).backward()
            opt.step()
            opt.zero_grad()

    return loop


def two_heads(windows: int = 6) -> Loop:
    """Pixels and images: two losses with numbers of targets that always differ, by design."""

    def loop() -> None:
        torch.manual_seed(0)
        net = nn.Linear(5, 3)
        opt = torch.optim.Adam(net.parameters(), lr=1e-3)
        for x, y in classes(windows):
            (F.cross_entropy(net(x), y) / 2).backward()
            (F.cross_entropy(net(x.repeat(9, 1)), y.repeat(9)) / 2).backward()
            opt.step()
            opt.zero_grad()

    return loop


def growing_windows(windows: tuple[int, ...] = (1, 1, 2, 2, 3, 4, 4, 4), weight: float | None = None) -> Loop:
    """K grows in the beginning; each loss is divided by its own window's K, or multiplied by a constant."""

    def loop() -> None:
        torch.manual_seed(0)
        net = classifier()
        opt = torch.optim.SGD(net.parameters(), lr=1e-2)
        data = iter(classes(sum(windows)))
        for k in windows:
            for _ in range(k):
                x, y = next(data)
                (F.cross_entropy(net(x), y) * (weight or 1.0 / k)).backward()
            opt.step()
            opt.zero_grad()

    return loop


def dataset(n: int, batch_size: int) -> DataLoader[Any]:
    """A DataLoader without drop_last."""
    x, y = zip(*classes(1, size=n), strict=True)
    return DataLoader(TensorDataset(x[0], y[0]), batch_size=batch_size)


def smaller_last_batch(k: int = 2, epochs: int = 3, batch_size: int = 5, n: int = 22) -> Loop:
    """What every DataLoader without drop_last gives: the last batch of an epoch has fewer samples."""

    def loop() -> None:
        torch.manual_seed(0)
        net = classifier()
        opt = torch.optim.Adam(net.parameters(), lr=1e-3)
        data = dataset(n, batch_size)
        for _ in range(epochs):
            for i, (x, y) in enumerate(data):
                window = min(k, len(data) - i // k * k)
                (F.cross_entropy(net(x), y) / window).backward()
                if (i + 1) % k == 0 or i + 1 == len(data):
                    opt.step()
                    opt.zero_grad()

    return loop
