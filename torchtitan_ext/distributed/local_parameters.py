"""Parameters that are DTensors, in modules that compute on plain tensors."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, distribute_tensor


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
    properties = {name: property(_part_getter(name, ndim, name in zeros)) for name in sorted(names)}
    return type(f"Distributed{cls.__name__}", (cls,), properties)


def _part_getter(name: str, ndim: int, is_zero: bool) -> Callable[[nn.Module], torch.Tensor]:
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
