"""Right loops as people write them, of every kind: no rule may warn of any."""

# Short names are those of the papers; functions made in a loop are called in it.
# ruff: noqa: B023, E741

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.rules.loops.accumulation import Loop, classes, classifier


def vae(k: int = 1, steps: int = 8) -> Loop:
    """A VAE: two sums, over k micro-steps."""

    def loop() -> None:
        torch.manual_seed(0)
        enc = nn.Linear(6, 4)
        dec = nn.Linear(2, 6)
        ps = [*enc.parameters(), *dec.parameters()]
        o = torch.optim.Adam(ps, 1e-3)
        for i in range(steps * k):
            x = torch.rand(8, 6)
            m, lv = enc(x).chunk(2, -1)
            z = m + torch.randn_like(m) * (lv / 2).exp()
            bce = F.binary_cross_entropy_with_logits(dec(z), x, reduction="sum")
            kld = -0.5 * torch.sum(1 + lv - m.pow(2) - lv.exp())
            ((bce + kld) / k).backward()
            if (i + 1) % k == 0:
                o.step()
                o.zero_grad()

    return loop


def actor_critic() -> Loop:
    """One loss of three terms with coefficients of their own."""

    def loop() -> None:
        torch.manual_seed(0)
        body = nn.Linear(4, 8)
        pi = nn.Linear(8, 3)
        v = nn.Linear(8, 1)
        o = torch.optim.RMSprop([*body.parameters(), *pi.parameters(), *v.parameters()], 1e-3)
        for _i in range(10):
            x = torch.randn(5, 4)
            h = torch.tanh(body(x))
            d = torch.distributions.Categorical(logits=pi(h))
            a = d.sample()
            adv = torch.randn(5)
            loss = (
                -(d.log_prob(a) * adv).mean()
                + 0.5 * F.mse_loss(v(h).squeeze(-1), torch.randn(5))
                - 0.01 * d.entropy().mean()
            )
            o.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(body.parameters(), 0.5)
            o.step()

    return loop


def actor_and_critic() -> Loop:
    """Actor and critic with an optimizer and a backward each, both stepped at the end."""

    def loop() -> None:
        torch.manual_seed(0)
        body = nn.Linear(4, 8)
        pi = nn.Linear(8, 3)
        v = nn.Linear(8, 1)
        oa = torch.optim.Adam([*body.parameters(), *pi.parameters()], 1e-3)
        oc = torch.optim.Adam(v.parameters(), 1e-3)
        for _i in range(10):
            x = torch.randn(5, 4)
            h = torch.tanh(body(x))
            d = torch.distributions.Categorical(logits=pi(h))
            a = d.sample()
            val = v(h.detach()).squeeze(-1)
            adv = torch.randn(5) - val.detach()
            oa.zero_grad()
            oc.zero_grad()
            (-(d.log_prob(a) * adv).sum()).backward()
            F.mse_loss(val, torch.randn(5)).backward()
            oa.step()
            oc.step()

    return loop


def soft_actor_critic() -> Loop:
    """The actor's loss reaches the critic, which is cleared before its own backward."""

    def loop() -> None:
        torch.manual_seed(0)
        q = nn.Linear(4, 1)
        p = nn.Linear(2, 2)
        oq = torch.optim.Adam(q.parameters(), 1e-3)
        op = torch.optim.Adam(p.parameters(), 1e-3)
        for _i in range(10):
            s = torch.randn(8, 2)
            oq.zero_grad()
            F.mse_loss(q(torch.cat([s, torch.randn(8, 2)], -1)), torch.randn(8, 1)).backward()
            oq.step()
            op.zero_grad()
            (-q(torch.cat([s, torch.tanh(p(s))], -1)).mean()).backward()
            op.step()

    return loop


def ppo() -> Loop:
    """Several epochs of minibatches over one batch."""

    def loop() -> None:
        torch.manual_seed(0)
        n = classifier()
        o = torch.optim.Adam(n.parameters(), 1e-3)
        for _it in range(3):
            x, y = torch.randn(24, 5), torch.randint(0, 3, (24,))
            old = F.log_softmax(n(x), -1).gather(1, y[:, None]).detach()
            adv = torch.randn(24, 1)
            for _ep in range(3):
                for idx in torch.randperm(24).split(8):
                    lp = F.log_softmax(n(x[idx]), -1).gather(1, y[idx][:, None])
                    r = (lp - old[idx]).exp()
                    loss = -torch.min(r * adv[idx], r.clamp(0.8, 1.2) * adv[idx]).mean()
                    o.zero_grad()
                    loss.backward()
                    nn.utils.clip_grad_norm_(n.parameters(), 0.5)
                    o.step()

    return loop


def truncated(step_each: bool = True) -> Loop:
    """Truncated backpropagation: a step for each chunk, or for their sum."""

    def loop() -> None:
        torch.manual_seed(0)
        r = nn.GRU(3, 5, batch_first=True)
        h_ = nn.Linear(5, 3)
        o = torch.optim.Adam([*r.parameters(), *h_.parameters()], 1e-3)
        for _ep in range(4):
            x = torch.randn(4, 20, 3)
            h = None
            for c in x.split(5, 1):
                out, h = r(c, h)
                h = h.detach()
                F.mse_loss(h_(out)[:, :-1], c[:, 1:]).backward()
                if step_each:
                    o.step()
                    o.zero_grad()
            if not step_each:
                o.step()
                o.zero_grad()

    return loop


def gradient_penalty() -> Loop:
    """A critic with a gradient penalty; requires_grad is switched back and forth."""

    def loop() -> None:
        torch.manual_seed(0)
        g = nn.Linear(3, 2)
        d = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))
        og = torch.optim.Adam(g.parameters(), 1e-3)
        od = torch.optim.Adam(d.parameters(), 1e-3)
        for i in range(12):
            for p in d.parameters():
                p.requires_grad_(True)
            od.zero_grad()
            real = torch.randn(8, 2)
            fake = g(torch.randn(8, 3)).detach()
            mix = (0.5 * real + 0.5 * fake).requires_grad_()
            (gr,) = torch.autograd.grad(d(mix).sum(), mix, create_graph=True)
            gp = ((gr.norm(2, 1) - 1) ** 2).mean() * 10
            (d(fake).mean() - d(real).mean() + gp).backward()
            od.step()
            if i % 3 == 2:
                for p in d.parameters():
                    p.requires_grad_(False)
                og.zero_grad()
                (-d(g(torch.randn(8, 3))).mean()).backward()
                og.step()

    return loop


def critic_by_gradients() -> Loop:
    """Backward with gradients of its own, weights clamped through .data."""

    def loop() -> None:
        torch.manual_seed(0)
        g = nn.Linear(3, 2)
        d = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 1))
        og = torch.optim.RMSprop(g.parameters(), 1e-3)
        od = torch.optim.RMSprop(d.parameters(), 1e-3)
        one = torch.tensor(1.0)
        for i in range(9):
            od.zero_grad()
            d(torch.randn(8, 2)).mean().backward(-one)
            d(g(torch.randn(8, 3)).detach()).mean().backward(one)
            od.step()
            for p in d.parameters():
                p.data.clamp_(-0.1, 0.1)
            if i % 3 == 2:
                og.zero_grad()
                d(g(torch.randn(8, 3))).mean().backward(-one)
                og.step()

    return loop


def three_networks() -> Loop:
    """Three optimizers; discriminators at half weight."""

    def loop() -> None:
        torch.manual_seed(0)
        ga, gb, da, db = [nn.Linear(3, 3) for _ in range(2)] + [nn.Linear(3, 1) for _ in range(2)]
        og = torch.optim.Adam([*ga.parameters(), *gb.parameters()], 1e-3)
        oda = torch.optim.Adam(da.parameters(), 1e-3)
        odb = torch.optim.Adam(db.parameters(), 1e-3)
        for _i in range(8):
            a, b = torch.randn(6, 3), torch.randn(6, 3)
            fb, fa = ga(a), gb(b)
            one, zero = torch.ones(6, 1), torch.zeros(6, 1)
            og.zero_grad()
            (
                F.mse_loss(da(fa), one)
                + F.mse_loss(db(fb), one)
                + 10 * F.l1_loss(gb(fb), a)
                + 10 * F.l1_loss(ga(fa), b)
            ).backward()
            og.step()
            oda.zero_grad()
            (0.5 * (F.mse_loss(da(a), one) + F.mse_loss(da(fa.detach()), zero))).backward()
            oda.step()
            odb.zero_grad()
            (0.5 * (F.mse_loss(db(b), one) + F.mse_loss(db(fb.detach()), zero))).backward()
            odb.step()

    return loop


def half_weights() -> Loop:
    """Generator and discriminator losses of half weight, two backwards for the latter."""

    def loop() -> None:
        torch.manual_seed(0)
        g = nn.Linear(3, 2)
        d = nn.Linear(2, 1)
        og = torch.optim.Adam(g.parameters(), 1e-3)
        od = torch.optim.Adam(d.parameters(), 1e-3)
        for _i in range(10):
            og.zero_grad()
            fake = g(torch.randn(8, 3))
            (0.5 * F.mse_loss(d(fake), torch.ones(8, 1))).backward()
            og.step()
            od.zero_grad()
            (0.5 * F.mse_loss(d(torch.randn(8, 2)), torch.ones(8, 1))).backward()
            (0.5 * F.mse_loss(d(fake.detach()), torch.zeros(8, 1))).backward()
            od.step()

    return loop


def distilled(k: int = 4) -> Loop:
    """Distillation: a batchmean divergence and cross entropy."""

    def loop() -> None:
        torch.manual_seed(0)
        t = classifier().requires_grad_(False)
        s = classifier()
        o = torch.optim.AdamW(s.parameters(), 1e-3)
        for i, (x, y) in enumerate(classes(20)):
            kl = F.kl_div(F.log_softmax(s(x) / 2, -1), F.softmax(t(x) / 2, -1), reduction="batchmean") * 4
            ((0.7 * kl + 0.3 * F.cross_entropy(s(x), y)) / k).backward()
            if (i + 1) % k == 0:
                o.step()
                o.zero_grad()

    return loop


def distilled_only(k: int = 4) -> Loop:
    """Distillation by the divergence alone."""

    def loop() -> None:
        torch.manual_seed(0)
        t = classifier().requires_grad_(False)
        s = classifier()
        o = torch.optim.AdamW(s.parameters(), 1e-3)
        for i, (x, _y) in enumerate(classes(20)):
            (F.kl_div(F.log_softmax(s(x), -1), F.softmax(t(x), -1), reduction="batchmean") / k).backward()
            if (i + 1) % k == 0:
                o.step()
                o.zero_grad()

    return loop


def per_sample() -> Loop:
    """A backward for each sample."""

    def loop() -> None:
        torch.manual_seed(0)
        n = classifier()
        o = torch.optim.SGD(n.parameters(), 0.1)
        for x, y in classes(6):
            for a, b in zip(x.split(1), y.split(1), strict=False):
                (F.cross_entropy(n(a), b) / len(x)).backward()
            o.step()
            o.zero_grad()

    return loop


def cached_representations() -> Loop:
    """Gradients of cached representations, given back chunk by chunk."""

    def loop() -> None:
        torch.manual_seed(0)
        n = nn.Linear(5, 4)
        o = torch.optim.SGD(n.parameters(), 0.1)
        for _ in range(6):
            chunks = torch.randn(12, 5).split(3)
            with torch.no_grad():
                reps = torch.cat([n(c) for c in chunks])
            reps.requires_grad_()
            sim = reps @ reps.T / 0.1
            loss = F.cross_entropy(sim, torch.arange(12).roll(1))
            loss.backward()
            for c, g in zip(chunks, reps.grad.split(3), strict=False):
                (n(c) * g).sum().backward()
            o.step()
            o.zero_grad()

    return loop


def combined_tasks() -> Loop:
    """Gradients of tasks, combined and put back."""

    def loop() -> None:
        torch.manual_seed(0)
        n = nn.Linear(5, 4)
        o = torch.optim.Adam(n.parameters(), 1e-3)
        for x, y in classes(8):
            gs = []
            for l in (lambda: F.cross_entropy(n(x)[:, :3], y), lambda: F.mse_loss(n(x)[:, 3], x[:, 0])):
                o.zero_grad()
                l().backward()
                gs.append([p.grad.clone() for p in n.parameters()])
            for p, a, b in zip(n.parameters(), *gs, strict=False):
                p.grad = (a + b) / 2
            o.step()

    return loop


def adversarial_examples() -> Loop:
    """A first backward for adversarial examples only."""

    def loop() -> None:
        torch.manual_seed(0)
        n = classifier()
        o = torch.optim.SGD(n.parameters(), 0.1)
        for x, y in classes(8):
            x = x.clone().requires_grad_()
            F.cross_entropy(n(x), y).backward()
            adv = (x + 0.1 * x.grad.sign()).detach()
            o.zero_grad()
            (0.5 * F.cross_entropy(n(x.detach()), y) + 0.5 * F.cross_entropy(n(adv), y)).backward()
            o.step()

    return loop


def clipped_by_hand(k: int = 4) -> Loop:
    """A clip by norm written by hand."""

    def loop() -> None:
        torch.manual_seed(0)
        n = classifier()
        o = torch.optim.SGD(n.parameters(), 0.1)
        for i, (x, y) in enumerate(classes(24)):
            (F.cross_entropy(n(x), y) / k).backward()
            if (i + 1) % k == 0:
                t = torch.stack([p.grad.norm() for p in n.parameters()]).norm()
                if t > 0.05:
                    for p in n.parameters():
                        p.grad.mul_(0.05 / t)
                o.step()
                o.zero_grad()

    return loop


def sparse_embedding() -> Loop:
    """A sparse embedding with an optimizer of its own."""

    def loop() -> None:
        torch.manual_seed(0)
        e = nn.Embedding(20, 6, sparse=True)
        h = nn.Linear(6, 3)
        oe = torch.optim.SparseAdam(e.parameters(), 1e-3)
        oh = torch.optim.Adam(h.parameters(), 1e-3)
        for i in range(16):
            (F.cross_entropy(h(e(torch.randint(0, 20, (6,)))), torch.randint(0, 3, (6,))) / 2).backward()
            if i % 2:
                oe.step()
                oh.step()
                oe.zero_grad()
                oh.zero_grad()

    return loop


def learned_weights() -> Loop:
    """Learned weights of two losses."""

    def loop() -> None:
        torch.manual_seed(0)
        n = nn.Linear(5, 4)
        s = nn.Parameter(torch.zeros(2))
        o = torch.optim.Adam([*n.parameters(), s], 1e-3)
        for x, y in classes(8):
            l1 = F.cross_entropy(n(x)[:, :3], y)
            l2 = F.mse_loss(n(x)[:, 3], x[:, 0])
            (torch.exp(-s[0]) * l1 + s[0] + torch.exp(-s[1]) * l2 + s[1]).backward()
            o.step()
            o.zero_grad()

    return loop


def saliency_afterwards() -> Loop:
    """A saliency map after the training."""

    def loop() -> None:
        torch.manual_seed(0)
        n = classifier()
        o = torch.optim.SGD(n.parameters(), 0.1)
        for i, (x, y) in enumerate(classes(16)):
            (F.cross_entropy(n(x), y) / 4).backward()
            if (i + 1) % 4 == 0:
                o.step()
                o.zero_grad()
        x = torch.randn(3, 5, requires_grad=True)
        n(x)[:, 0].sum().backward()

    return loop


def mean_of_losses() -> Loop:
    """One backward on the mean of several losses."""

    def loop() -> None:
        torch.manual_seed(0)
        n = classifier()
        o = torch.optim.SGD(n.parameters(), 0.1)
        for _ in range(6):
            o.zero_grad()
            torch.stack([F.cross_entropy(n(x), y) for x, y in classes(4)]).mean().backward()
            o.step()

    return loop


def calibration_skips(k: int = 4) -> Loop:
    """Calibration skips with accumulation."""

    def loop() -> None:
        torch.manual_seed(0)
        n = classifier()
        o = torch.optim.AdamW(n.parameters(), 1e-3)
        s = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=3)
        for i, (x, y) in enumerate(classes(48)):
            with torch.autocast("cpu", dtype=torch.float16):
                l = F.cross_entropy(n(x * 30), y) / k
            s.scale(l).backward()
            if (i + 1) % k == 0:
                s.unscale_(o)
                nn.utils.clip_grad_norm_(n.parameters(), 1.0)
                s.step(o)
                s.update()
                o.zero_grad()

    return loop
