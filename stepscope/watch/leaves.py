"""The tensors that a backward pass ends at, and modules that ran where no backward can reach them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

_MOST_NODES = 200_000
"""The walk ends here: a graph this large is walked in a fraction of a second, and only at a few micro-steps."""


def leaves(roots: Iterable[Tensor]) -> list[Tensor]:
    """The leaf tensors whose gradients a backward from `roots` accumulates, each once.

    What a reentrant checkpoint recomputes during the backward is not in the graph yet and not found.
    """
    stack = [r.grad_fn for r in roots if r.grad_fn is not None]
    seen = set(stack)
    found: dict[int, Tensor] = {}
    while stack and len(seen) < _MOST_NODES:
        node = stack.pop()
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found[id(leaf)] = leaf
        fresh = [n for n, _ in node.next_functions if n is not None and n not in seen]
        seen.update(fresh)
        stack.extend(fresh)
    return list(found.values())


def cut_off() -> bool:
    """Whether the code that is running was called by an autograd function of which no input requires a gradient.

    That is how activation checkpointing runs a segment without a graph: the segment runs without gradients, and since
    the function has nothing to differentiate, backward never runs it again. The function is recognised by its context,
    not by its name, so that a script's own checkpointing is seen as torch's is.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and code.co_argcount and code.co_varnames[0] != "self":
            context = frame.f_locals.get(code.co_varnames[0])
            if isinstance(context, torch.autograd.function.FunctionCtx):
                return not any(getattr(context, "needs_input_grad", ()))
        frame = frame.f_back
    return False
