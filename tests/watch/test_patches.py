"""Patches are put in place as one and removed without a trace."""

from __future__ import annotations

import sys

import torch
from torch.nn.utils import clip_grad_value_ as imported_early

import stepscope
from stepscope.watch import patches


def held() -> dict[str, object]:
    """What every patched attribute holds now, and whether its owner holds it itself."""
    out = {}
    for patch in patches.PATCHES:
        owner = patches._resolve(patch.owner)
        if owner is not None:
            out[f"{patch.owner}.{patch.attribute}"] = vars(owner).get(patch.attribute, "inherited")
    for cls in [torch.optim.lr_scheduler.LRScheduler, *torch.optim.lr_scheduler.LRScheduler.__subclasses__()]:
        for name in ("__init__", "step", "load_state_dict", "get_lr"):
            out[f"{cls.__name__}.{name}"] = vars(cls).get(name, "inherited")
    return out


def test_everything_is_put_back():
    """Every attribute is the very object that it was; so is its absence."""
    before = held()
    with stepscope.watch():
        during = held()
    after = held()

    assert before == after
    assert all(during[k] is not before[k] for k in before if k.split(".")[-1] == "backward")


def test_everything_is_put_back_after_an_error():
    """Also where the block raises."""
    before = held()
    try:
        with stepscope.watch():
            raise RuntimeError
    except RuntimeError:
        pass

    assert held() == before


def test_two_recordings_at_once():
    """The patches stay until the last one stops, and both see everything."""
    before = held()
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with stepscope.watch() as outer:
        with stepscope.watch() as inner:
            net(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        assert patches.installed()
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    assert held() == before
    assert len(inner.trace.steps) == 1
    assert len(outer.trace.steps) == 2


def test_every_patched_name_exists_and_has_a_reason():
    """A name that this torch has nowhere would be silently unwatched."""
    import torch.distributed  # noqa: F401 - so that its functions can be found

    there = {p.attribute for p in patches.PATCHES if hasattr(patches._resolve(p.owner), p.attribute)}

    assert {p.attribute for p in patches.PATCHES} == there
    assert all(len(p.why) > 5 for p in patches.PATCHES)


def test_names_imported_before_are_reported():
    """A function that a module holds already escapes its patch, and is named."""
    watching = stepscope.watch().start()
    watching.stop()

    assert imported_early is torch.nn.utils.clip_grad_value_
    assert f"{__name__}.imported_early" in watching.unreached
    assert sys.modules[__name__]
