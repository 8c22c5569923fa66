"""What happens inside the blocks of a model, in the forward and in its recomputation.

Works on eager blocks: a compiled one shows nothing of its inside.
"""

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from torchtitan_ext.distributed.checkpoint_policy import (
    DEFAULT_SAVE_OPS,
    draws_random_numbers,
    is_always_kept,
)
from torchtitan_ext.distributed.collectives import kind_of_collective
from torchtitan_ext.moe.router import TokenChoiceRouter

_ATTRIBUTES_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}


@dataclass(eq=False)
class Visit:
    """One run of a block: a forward, or a recomputation of one."""

    masks: list[str] = field(default_factory=list)
    """Hashes of what was dropped, in the order of the draws."""
    routing: list[str] = field(default_factory=list)
    """Hashes of expert ids and counts, a router each."""
    output: str | None = None
    """Hash of the block's output; None if the run ended early."""
    ops: list[str] = field(default_factory=list)
    """Operators that a policy could keep."""
    pinned: Counter[str] = field(default_factory=Counter)
    """Those among them that every policy keeps, such as what decides where tokens go."""
    collectives: Counter[str] = field(default_factory=Counter)
    writes: list[str] = field(default_factory=list)
    """Attributes and buffers of the block's modules that were other ones afterwards.

    Those of a module's class, too, and those of an object that a module has."""


@dataclass
class BlockRecord:
    """All runs of a block in a step, in order."""

    forwards: list[Visit] = field(default_factory=list)
    recomputations: list[Visit] = field(default_factory=list)
    backward_collectives: Counter[str] = field(default_factory=Counter)
    saved_bytes: int = 0
    """Of what the forward computed inside the block, what is there when all forwards have ended."""


class RegionRecorder(TorchDispatchMode):
    """Records every block of ``model.layers`` while it is entered.

    Args:
        save_ops: names of operators that the user's policy keeps, as "aten.silu.default".
    """

    def __init__(self, model: nn.Module, save_ops: frozenset[Any] = frozenset()) -> None:
        super().__init__()
        self.blocks: dict[str, BlockRecord] = {}
        self._watched_ops = DEFAULT_SAVE_OPS | save_ops
        self._current: tuple[BlockRecord, Visit] | None = None
        self._before: dict[str, Any] = {}
        self._backward_block: BlockRecord | None = None
        self._storages: list[tuple[BlockRecord, StorageWeakRef, int]] = []
        self._seen_storages: set[int] = set()
        for name, wrapped in model.get_submodule("layers").named_children():
            record = self.blocks[f"layers.{name}"] = BlockRecord()
            self._watch(getattr(wrapped, "_checkpoint_wrapped_module", wrapped), record)

    def end_of_forwards(self) -> None:
        """To be called between a forward and its backward: counts what blocks hold."""
        for record, storage, size in self._storages:
            if not storage.expired():
                record.saved_bytes += size
        self._storages.clear()
        self._seen_storages.clear()

    def _watch(self, block: nn.Module, record: BlockRecord) -> None:
        def before(*_: Any) -> None:
            # A forward in a backward is a recomputation.
            visits = record.recomputations if _is_in_backward() else record.forwards
            visits.append(Visit())
            self._before = _state_of(block)
            self._current = (record, visits[-1])

        def after(module: nn.Module, args: Any, output: Any) -> None:
            assert self._current is not None
            visit, self._current = self._current[1], None
            state = _state_of(block)
            visit.writes = sorted(
                name
                for name in state.keys() | self._before.keys()
                if state.get(name) != self._before.get(name)
            )
            if output is None:  # ended by the checkpoint, which needed no more
                return
            visit.output = hash_tensors(output)
            first = output[0] if isinstance(output, tuple) else output
            if first.requires_grad and visit in record.forwards:
                first.register_hook(lambda _: self._enter_backward(record))

        block.register_forward_pre_hook(before)
        block.register_forward_hook(after, always_call=True)
        for module in block.modules():
            if isinstance(module, TokenChoiceRouter):
                module.register_forward_hook(self._after_router)

    def _after_router(self, module: nn.Module, args: Any, routing: Any) -> None:
        if self._current is not None:
            chosen = (routing.topk_expert_ids_TK, routing.tokens_per_expert_E)
            self._current[1].routing.append(hash_tensors(chosen))

    def _enter_backward(self, record: BlockRecord) -> None:
        self._backward_block = record

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        kind = kind_of_collective(func)
        if self._current is None:
            if kind is not None and self._backward_block is not None and _is_in_backward():
                self._backward_block.backward_collectives[kind] += 1
            return output
        record, visit = self._current
        if kind is not None:
            visit.collectives[kind] += 1
        if draws_random_numbers(func, args, kwargs):
            visit.masks.append(hash_tensors(output, zeros_only=True))
        pinned = is_always_kept(func, args, kwargs)
        if pinned or func in self._watched_ops:
            visit.ops.append(str(func))
            visit.pinned[str(func)] += pinned
        if visit in record.forwards:
            self._remember_storages(record, args, output)
        return output

    def _remember_storages(self, record: BlockRecord, args: Any, output: Any) -> None:
        # What an operator takes is not new: a parameter, the block's input, an earlier result.
        self._seen_storages.update(t.untyped_storage()._cdata for t in tensors_in(args))
        for tensor in tensors_in(output):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._seen_storages:
                self._seen_storages.add(storage._cdata)
                self._storages.append((record, StorageWeakRef(storage), storage.nbytes()))


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() >= 0


def _state_of(block: nn.Module) -> dict[str, Any]:
    """Fingerprints of what a forward could leave on the modules of a block, by name."""
    state = {}
    for prefix, module in block.named_modules():
        values = {
            name: value
            for name, value in vars(module).items()
            if name not in _ATTRIBUTES_OF_EVERY_MODULE
        }
        for name, value in (values | module._buffers).items():
            state[f"{prefix}.{name}".lstrip(".")] = _fingerprint(value)
    for of in {of for module in block.modules() for of in type(module).__mro__}:
        if not _is_of_torch(of):
            state |= {f"{of.__name__}.{name}": _fingerprint(v) for name, v in _data_of(of)}
    return state


def _is_of_torch(of: type) -> bool:
    """Or Python's own; such objects may have caches."""
    return of.__module__.split(".")[0] in ("torch", "builtins")


def _data_of(of: type) -> list[tuple[str, Any]]:
    """The attributes of a class that are no methods and not Python's own."""
    return [
        (name, value)
        for name, value in vars(of).items()
        if not name.startswith("__") and not hasattr(value, "__get__")
    ]


def _fingerprint(value: Any, *, inside: bool = True) -> Any:
    if inside and _is_plain_object(value):
        return id(value), {n: _fingerprint(v, inside=False) for n, v in vars(value).items()}
    if isinstance(value, torch.Tensor):
        return id(value), hash_tensors(value)
    if isinstance(value, list | tuple | set | dict):
        return id(value), repr(value)
    # A number is compared as one, anything else by which object it is.
    return value if isinstance(value, int | float | str | bool | None) else id(value)


def _is_plain_object(value: Any) -> bool:
    """Whether it is of a class of the user's, and no module or callable."""
    return hasattr(value, "__dict__") and not (
        _is_of_torch(type(value))
        or callable(value)
        or isinstance(value, torch.nn.Module | torch.Tensor)
    )


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of what a module takes or returns."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    return []


def hash_tensors(value: Any, *, zeros_only: bool = False) -> str:
    """A hash of all bits and shapes of what a module takes or returns, or of where it is zero."""
    digest = hashlib.sha256()
    with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
        for tensor in tensors_in(value):
            local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            data = (local != 0) if zeros_only else local.detach()
            digest.update(str(tuple(data.shape)).encode())
            digest.update(data.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
