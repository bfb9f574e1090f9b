"""Device scalars and vectors to the host in batches: one copy for each device and dtype, never one for each value."""

from __future__ import annotations

from typing import Any


class Transfer:
    """Starts copying every tensor found in `values` (dicts and lists are searched) and puts numbers in their place when asked.

    On CUDA the copy runs while training goes on; `result` waits for it, by which time it has long ended. Values of which
    this process holds only a part (a norm over sharded parameters) become None: to know them takes a collective.
    """

    def __init__(self, values: Any) -> None:
        self._values = values
        self._tensors: dict[int, Any] = {}
        self._slots: list[tuple[Any, Any, int]] = []
        _collect(values, self._tensors, self._slots)
        self._host: list[tuple[list[int], list[tuple[int, ...]], Any]] = []
        self._done: Any = None
        self._start()

    def _start(self) -> None:
        import torch

        kinds: dict[tuple[Any, Any], list[Any]] = {}
        for key, tensor in self._tensors.items():
            known = _known_here(tensor)
            if known is not None:
                kinds.setdefault((known.device, known.dtype), []).append((key, known))
        for (device, _), keyed in kinds.items():
            tensors = [t for _, t in keyed]
            flat = torch.cat([t.detach().reshape(-1) for t in tensors])
            if device.type == "cuda":
                pinned = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
                pinned.copy_(flat, non_blocking=True)
                self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._done.record(torch.cuda.current_stream(device))
                flat = pinned
            self._host.append(([k for k, _ in keyed], [tuple(t.shape) for t in tensors], flat))

    @property
    def in_flight(self) -> bool:
        """Whether a device is still copying, or may be."""
        return self._done is not None and not self._done.query()

    def result(self) -> Any:
        """The values with Python numbers for scalars and lists for vectors."""
        if self._done is not None:
            self._done.synchronize()
        found: dict[int, Any] = dict.fromkeys(self._tensors)
        for ids, shapes, flat in self._host:
            numbers = flat.tolist()
            place = 0
            for key, shape in zip(ids, shapes, strict=True):
                size = 1
                for n in shape:
                    size *= n
                part = numbers[place : place + size]
                found[key] = part[0] if not shape else part
                place += size
        for container, key, tensor in self._slots:
            container[key] = found[tensor]
        self._tensors.clear()
        self._slots.clear()
        return self._values


def _known_here(tensor: Any) -> Any:
    """A tensor as this process has it; None where it is spread over several."""
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return tensor
    alone = tensor.device_mesh.size() == 1 or all(p.is_replicate() for p in placements)
    return tensor.to_local() if alone else None


_PLAIN = frozenset({float, int, bool, str, type(None)})


def _collect(container: Any, tensors: dict[int, Any], slots: list[tuple[Any, Any, int]]) -> None:
    """The tensors in a dict or list and in what it holds, and the places where they stand; tuples become lists."""
    for key, value in container.items() if isinstance(container, dict) else enumerate(container):
        kind = type(value)
        if kind in _PLAIN:
            continue
        if kind is tuple:
            value = container[key] = list(value)
        if isinstance(value, dict | list):
            _collect(value, tensors, slots)
        elif hasattr(value, "element_size") and hasattr(value, "reshape"):
            tensors[id(value)] = value
            slots.append((container, key, id(value)))
