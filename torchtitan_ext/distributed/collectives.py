"""Counts what a process sends through collectives. For measuring: see scripts/measure_zero.py."""

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_KINDS = {
    "all_gather": ("allgather", "all_gather"),
    "reduce_scatter": ("reduce_scatter",),
    "all_to_all": ("alltoall", "all_to_all"),
    "all_reduce": ("allreduce", "all_reduce"),
    "broadcast": ("broadcast",),
}


class CollectiveMeter(TorchDispatchMode):
    """Calls, and bytes of the larger of input and output, of each kind of collective.

    On gloo a reduce-scatter of gradients is an all-to-all (see gloo.py). torch.compile leaves
    regions under a dispatch mode to eager; their collectives are the same.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kind = kind_of_collective(func)
        if kind is not None:
            self.calls[kind] += 1
            self.bytes[kind] += max(map(_num_bytes, args[:2]))
        return func(*args, **(kwargs or {}))


def kind_of_collective(func: Any) -> str | None:
    """The kind of collective that an operator is; None if it is none, or waits for one."""
    if func.namespace not in ("c10d", "_c10d_functional"):
        return None
    name = func.__name__
    return next((kind for kind, parts in _KINDS.items() if any(p in name for p in parts)), None)


def _num_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, list):
        return sum(map(_num_bytes, value))
    return 0
