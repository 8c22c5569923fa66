"""Parameters that are DTensors, in modules that compute on plain tensors."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, distribute_tensor

# Attributes of a module: the getters of its parts by name (of its class), and parts already made.
_GETTERS = "_local_parameter_getters"
_MADE = "_local_parameters_made"

PartGetter = Callable[[nn.Module], torch.Tensor]


def distribute_parameters(
    module: nn.Module,
    mesh: DeviceMesh,
    placements: Mapping[str, Sequence[Placement]],
    on_first_rank: frozenset[str] = frozenset(),
) -> None:
    """Distributes the module's own parameters over ``mesh``, and shows it plain tensors.

    As an attribute, a parameter then is this rank's part of it, so the module's code need not know.
    One that all ranks of an axis hold gets a partial gradient from each: FSDP sums them.

    Args:
        module: on the meta device, or with the same values on every rank.
        placements: by name of the parameter, one for each axis of the mesh; others are replicated.
        on_first_rank: replicated parameters that all ranks but the first see as zeros, since what
            they are added to is summed over ranks.
    """
    own = dict(module.named_parameters(recurse=False))
    for name, parameter in own.items():
        # Every rank has the whole parameter: no need to send the first one's.
        distributed = distribute_tensor(
            parameter,
            mesh,
            placements.get(name, [Replicate()] * mesh.ndim),
            src_data_rank=None,
        )
        module.register_parameter(name, nn.Parameter(distributed, parameter.requires_grad))
    if own:
        is_first = all(mesh.get_local_rank(axis) == 0 for axis in range(mesh.ndim))
        zeros = frozenset() if is_first else on_first_rank
        cls: Any = type(module)
        module.__class__ = _subclass(cls, mesh.ndim, frozenset(own), zeros)


@functools.cache  # one for all modules that are alike: compiled code is bound to the class
def _subclass(cls: type, ndim: int, names: frozenset[str], zeros: frozenset[str]) -> type:
    """A subclass, as fully_shard makes one, whose attributes ``names`` are plain tensors."""
    getters = {name: _part_getter(name, ndim, name in zeros) for name in sorted(names)}
    properties = {name: property(_made_or(name, getter)) for name, getter in getters.items()}
    return type(f"Distributed{cls.__name__}", (cls,), {**properties, _GETTERS: getters})


def _part_getter(name: str, ndim: int, is_zero: bool) -> PartGetter:
    def part(self: nn.Module) -> torch.Tensor:
        parameter = self._parameters[name]
        assert isinstance(parameter, DTensor)
        if parameter.device_mesh.ndim != ndim:
            # Sharded by FSDP, which asks for its own parameter: nothing computes now.
            return parameter
        gradients = [Partial() if p.is_replicate() else p for p in parameter.placements]
        local = parameter.to_local(grad_placements=gradients)
        return local * 0 if is_zero else local

    return part


def _made_or(name: str, getter: PartGetter) -> PartGetter:
    def part(self: nn.Module) -> torch.Tensor:
        made = self.__dict__.get(_MADE)
        return getter(self) if made is None else made[name]

    return part


def make_parts_before_forward(block: nn.Module) -> None:
    """For a block that is compiled: its graph gets the plain parts, made outside of it.

    A DTensor would bring its mesh into the graph, as a value to save for the backward. torch 2.13
    takes such a value for a tensor where random states are saved, too, for a recomputed dropout.
    """
    modules = [module for module in block.modules() if hasattr(module, _GETTERS)]

    @torch.compiler.disable
    def make(*_: Any) -> None:
        for module in modules:
            getters = getattr(module, _GETTERS)
            module.__dict__[_MADE] = {name: getter(module) for name, getter in getters.items()}

    @torch.compiler.disable
    def forget(*_: Any) -> None:
        for module in modules:
            module.__dict__.pop(_MADE, None)

    if modules:
        block.register_forward_pre_hook(make)
        block.register_forward_hook(forget, always_call=True)
