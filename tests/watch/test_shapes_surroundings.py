"""What surrounds a loop: devices, dtypes, threads, copies, checkpoints, compiled and sharded models, schedulers."""

from __future__ import annotations

import copy
import gc
import io
import threading
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import stepscope
from tests.watch.shapes import ABSENT, Story, check


def net(width: int = 4) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))


def batch(n: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 3), torch.randn(n, 2)


def plain(story: Story, model: nn.Module, steps: int = 3, **expected) -> None:
    """A plain loop of `steps` steps on what `model` gives."""
    optimizer = story.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    for _ in range(steps):
        x, y = batch()
        loss = F.mse_loss(model(x), y)
        story.backward(loss, optimizer, cells={"loss": loss.item(), "loss_weight": 1.0})
        story.step(optimizer, **expected)
        optimizer.zero_grad()
    story.keep(model, optimizer)


def test_default_dtype_of_float64():
    """Norms and losses are those of float64, to its precision."""

    def loop():
        story = Story()
        plain(story, net())
        return story

    torch.set_default_dtype(torch.float64)
    try:
        trace = check(loop)
    finally:
        torch.set_default_dtype(torch.float32)
    assert trace.params["dtype"].unique().tolist() == ["float64"]


def test_a_default_device_for_new_tensors():
    """What stepscope makes for itself does not land on the script's default device (meta: it could not be read)."""

    def loop():
        story = Story()
        with torch.device("cpu"):
            model = net()
        optimizer = story.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            x, y = torch.randn(4, 3, device="cpu"), torch.randn(4, 2, device="cpu")
            loss = F.mse_loss(model(x), y)
            story.backward(loss, optimizer, cells={"loss": loss.item(), "loss_weight": 1.0})
            story.step(optimizer)
            optimizer.zero_grad()
        with torch.device("cpu"):
            story.keep(model, optimizer)
        return story

    torch.set_default_device("meta")
    try:
        check(loop)
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluations_are_no_micro_steps(mode):
    """Not even with a criterion; in either of torch's modes without gradients."""

    def loop():
        story, model = Story(), net()
        optimizer = story.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            x, y = batch()
            loss = F.mse_loss(model(x), y)
            story.backward(loss, optimizer, cells={"loss": loss.item()})
            story.step(optimizer, calls="FBSZ")
            optimizer.zero_grad()
            model.eval()
            with mode():
                nn.MSELoss()(model(x), y)
            model.train()
        story.keep(model)
        return story

    check(loop)


def test_forwards_in_other_threads():
    """As DataParallel has them: both replicas' forwards belong to the one backward."""

    def loop():
        story, model = Story(), net()
        replicas = [copy.deepcopy(model) for _ in range(2)]
        optimizer = story.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            x, y = batch()
            halves: list[torch.Tensor] = [x, x]

            def forward(k, x=x, halves=halves):
                given = dict(model.named_parameters())
                halves[k] = torch.func.functional_call(replicas[k], given, (x[2 * k : 2 * k + 2],))

            for k in range(2):
                thread = threading.Thread(target=forward, args=(k,))
                thread.start()
                thread.join()
            loss = F.mse_loss(torch.cat(halves), y)
            story.backward(loss, optimizer, cells={"loss": loss.item(), "loss_weight": 1.0})
            story.step(optimizer, calls="FFBSZ")
            optimizer.zero_grad()
        story.keep(model)
        return story

    assert check(loop).params["param"].unique().tolist() == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_what_is_saved_is_the_same_bytes():
    """Models and optimizers pickled while they are watched hold nothing of stepscope."""

    def loop():
        story, model = Story(), net()
        optimizer = story.optimizer(torch.optim.Adam(model.parameters(), lr=0.1))
        x, y = batch()
        story.backward(F.mse_loss(model(x), y), optimizer)
        story.step(optimizer)
        for thing in (model, optimizer, {"model": model.state_dict(), "optimizer": optimizer.state_dict()}):
            file = io.BytesIO()
            torch.save(thing, file)
            story.state.append(torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8))
        return story

    check(loop)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_segments(reentrant):
    """What a backward computes again is part of that backward."""

    def loop():
        story = Story()
        torch.manual_seed(0)
        stem, block = nn.Linear(3, 3), nn.Sequential(net(), nn.Dropout(0.2))
        optimizer = story.optimizer(torch.optim.SGD([*stem.parameters(), *block.parameters()], lr=0.1))
        for _ in range(3):
            x, y = batch()
            loss = F.mse_loss(checkpoint(block, stem(x), use_reentrant=reentrant), y)
            story.backward(loss, optimizer, cells={"loss": loss.item(), "loss_weight": 1.0})
            story.step(optimizer, grad_params=6)
            optimizer.zero_grad()
        story.keep(stem, block)
        return story

    check(loop)


def test_a_compiled_model_has_its_own_names():
    """Without the prefix that torch.compile puts before them."""

    def loop():
        story, model = Story(), net()
        compiled = torch.compile(model, backend="eager")
        optimizer = story.optimizer(torch.optim.SGD(compiled.parameters(), lr=0.1))
        for _ in range(2):
            x, y = batch()
            loss = F.mse_loss(compiled(x), y)
            story.backward(loss, optimizer, cells={"loss": loss.item(), "loss_weight": 1.0})
            story.step(optimizer)
            optimizer.zero_grad()
        story.keep(model)
        return story

    torch._dynamo.reset()
    assert check(loop).params["param"].unique().tolist() == ["0.weight", "0.bias", "2.weight", "2.bias"]
    torch._dynamo.reset()


SCHEDULERS = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda s: 1 / (s + 1)),
    "step": lambda o: lr_scheduler.StepLR(o, 2),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda s: 0.9),
    "cosine restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=10),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.5)], optimizer=o
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers(kind):
    """The rate that the step used, whoever wrote it; one call of a scheduler is one call, whatever it calls inside."""

    def loop():
        story, model = Story(), net()
        optimizer = story.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        scheduler = SCHEDULERS[kind](optimizer)
        for _ in range(5):
            x, y = batch()
            story.backward(F.mse_loss(model(x), y), optimizer, cells={"calls": "FBSLZ"})
            story.step(optimizer)
            scheduler.step(*([1.0] if kind == "plateau" else []))
            optimizer.zero_grad()
        story.keep(model, optimizer)
        return story

    trace = check(loop)
    assert trace.steps["lr"].nunique() > 1


def test_a_region_of_autocast_around_everything():
    """Step, clip and averages inside the region; a disabled scaler has no scale and finds nothing."""

    def loop():
        story, model = Story(), net()
        optimizer = story.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        average, scaler = AveragedModel(model), torch.amp.GradScaler("cpu", enabled=False)
        for i in range(6):
            x, y = batch()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.mse_loss(model(x).float(), y)
                cells = {"loss": loss.item(), "loss_weight": 0.5, "loss_scale_before": None, "found_inf": None}
                story.backward(scaler.scale(loss / 2), optimizer, cells=cells)
                if i % 2:
                    scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                    step = {"calls": "FBCSZE", "clip_max_norm": 0.01, "autocast_step": True}
                    story.step(optimizer, call=lambda: scaler.step(optimizer), **step)
                    scaler.update()
                    optimizer.zero_grad()
                    average.update_parameters(model)
        story.keep(model, average)
        return story

    check(loop)


def test_gradients_divided_and_cleared_by_hand():
    """Through .data and by assigning None: neither method of the optimizer is called."""

    def loop():
        story, model = Story(), net()
        optimizer = story.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for i in range(6):
            x, y = batch()
            before = ABSENT if i % 2 else 0.0
            story.backward(F.mse_loss(model(x), y), optimizer, cells={"grad_norm_before": before, "calls": "FB"})
            if i % 2:
                for p in model.parameters():
                    p.grad.data.div_(2)
                story.step(optimizer, calls="FBS")
                for p in model.parameters():
                    p.grad = None
        story.keep(model)
        return story

    trace = check(loop)
    ends = trace.steps[trace.steps["sync_gradients"]]
    assert ends["grad_norm_clipped"].tolist() == pytest.approx((ends["grad_norm"] / 2).tolist())


def test_only_the_given_optimizer():
    """What belongs to others has a row without an optimizer, and no window of the one that is watched."""
    model, other = net(), net(5)
    mine = torch.optim.SGD(model.parameters(), lr=0.1)
    theirs = torch.optim.SGD(other.parameters(), lr=0.1)
    with stepscope.watch(model, mine) as watching:
        for _ in range(3):
            x, y = batch()
            for network, optimizer in ((other, theirs), (model, mine)):
                F.mse_loss(network(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
    steps = watching.trace.steps.sort_values("micro_step")
    assert steps["optimizer"].isna().tolist() == [True, False] * 3
    assert steps[steps["optimizer"].notna()]["global_step"].tolist() == [1, 2, 3]
    assert [o["name"] for o in watching.trace.meta["optimizers"]] == ["SGD/0"]


@pytest.fixture
def one_process(tmp_path):
    """A process group of one."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("how", ["no_sync", "flag"])
def test_distributed_data_parallel(one_process, how):
    """Held back by no_sync or by its flag: windows are those of the optimizer, names those of the model."""

    def loop():
        story, model = Story(), net()
        wrapped = nn.parallel.DistributedDataParallel(model)
        optimizer = story.optimizer(torch.optim.SGD(wrapped.parameters(), lr=0.1))
        for i in range(6):
            x, y = batch()
            last = i % 3 == 2
            wrapped.require_backward_grad_sync = last or how == "no_sync"
            with wrapped.no_sync() if how == "no_sync" and not last else nullcontext():
                loss = F.mse_loss(wrapped(x), y)
                story.backward(loss / 3, optimizer, cells={"loss": loss.item(), "loss_weight": 1 / 3, "calls": "FB"})
            if last:
                story.step(optimizer, loss_weight_sum=1.0, calls="FBSZ")
                optimizer.zero_grad()
        story.keep(model)
        return story

    assert check(loop).params["param"].unique().tolist() == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_fully_sharded(one_process):
    """Names survive the exchange of parameters; the norm that a clip found on one process is its own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    norms: list[float] = []

    def loop():
        norms.clear()
        story, model = Story(), net()
        mesh = init_device_mesh("cpu", (1,))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = story.optimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
        for _ in range(3):
            x, y = batch()
            F.mse_loss(model(x), y).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).to_local().item())
            optimizer.step()
            optimizer.zero_grad()
        story.keep(*(p.to_local() for p in model.parameters()))
        return story

    trace = check(loop)
    assert trace.params["param"].unique().tolist() == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert trace.steps["clip_norm"].tolist() == pytest.approx(norms)
    assert trace.steps["grad_norm_clipped"].tolist() == pytest.approx([0.1] * 3, rel=1e-4)


def test_nothing_is_kept_alive():
    """Models, optimizers, schedulers, scalers and losses go when the script lets go of them, not when it ends."""
    with stepscope.watch():
        model, scaler = net(), torch.amp.GradScaler("cpu")
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        scheduler = lr_scheduler.ExponentialLR(optimizer, 0.9)
        for _ in range(5):
            x, y = batch()
            loss = scaler.scale(F.mse_loss(model(x), y))
            loss.backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
        held = [weakref.ref(o) for o in (model, optimizer, scheduler, scaler, x, loss, *model.parameters())]
        del model, optimizer, scheduler, scaler, x, loss
        gc.collect()
        assert [ref() for ref in held if ref() is not None] == []


def test_no_tensors_pile_up(tmp_path):
    """Over 500 steps with a criterion made anew at each and an optimizer at every fiftieth."""

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    counts = []
    with stepscope.watch(out=tmp_path / "trace") as watching:
        model = net()
        for i in range(601):
            if i % 50 == 0:
                optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            x, y = batch()
            nn.MSELoss()(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if i in (101, 601 - 1):
                assert len(watching.trace.steps) == i
                counts.append(tensors())
    # an optimizer one step old holds as many tensors as one two steps old, and nothing of the others is left
    assert counts[1] <= counts[0]
