"""Initial weights that depend on the seed and the parameter's name, and on nothing else.

Every layout, number of ranks and device starts from the same full tensors, without a seed
checkpoint: a parameter's values come from generators seeded with (seed, name, block of rows), and
a rank draws only the blocks that its own part touches.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

CHECKPOINT_PREFIX = "_checkpoint_wrapped_module."

# Values drawn from one generator. Part of the definition of the weights: another size is
# another set of initial weights.
_BLOCK_SIZE = 2**16


class Initializer(Protocol):
    """Fills a tensor in place from a generator."""

    def __call__(self, values: torch.Tensor, generator: torch.Generator) -> None: ...


@dataclass(frozen=True)
class Normal:
    """Normal values around 0."""

    std: float

    def __call__(self, values: torch.Tensor, generator: torch.Generator) -> None:
        values.normal_(0.0, self.std, generator=generator)


@dataclass(frozen=True)
class TruncatedNormal:
    """Normal values around 0, none of them beyond three standard deviations."""

    std: float

    def __call__(self, values: torch.Tensor, generator: torch.Generator) -> None:
        bound = 3 * self.std
        nn.init.trunc_normal_(values, 0.0, self.std, -bound, bound, generator=generator)


@dataclass(frozen=True)
class Ones:
    """The weight of a norm."""

    def __call__(self, values: torch.Tensor, generator: torch.Generator) -> None:
        values.fill_(1.0)


@dataclass(frozen=True)
class Zeros:
    """A bias."""

    def __call__(self, values: torch.Tensor, generator: torch.Generator) -> None:
        values.zero_()


@torch.no_grad()
def init_parameters(
    model: nn.Module, seed: int, initializer_for: Callable[[str], Initializer]
) -> None:
    """Fills every parameter of a materialised model, sharded or not.

    Args:
        model: its parameters may be plain tensors or DTensors in any placement FSDP2 makes.
        seed: the run's seed.
        initializer_for: from a parameter's name (without wrapper prefixes) to its initializer.
    """
    for name, parameter in model.named_parameters():
        name = name.replace(CHECKPOINT_PREFIX, "")
        _fill(parameter, f"{seed}:{name}", initializer_for(name))


def _fill(parameter: torch.Tensor, key: str, initializer: Initializer) -> None:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if local.numel() == 0:
        return
    owned = [_owned_indices(parameter, dim) for dim in range(parameter.ndim)]
    # A tensor is drawn as rows along its last dim; a stacked expert weight (E, F, D) has E * F.
    *leading, last = parameter.shape if parameter.ndim > 1 else (1, *parameter.shape)
    owned_columns = owned[-1]
    owned_rows = _flat_rows(owned[:-1], leading)
    rows_per_block = max(1, _BLOCK_SIZE // last)
    num_rows = torch.Size(leading).numel()

    values = torch.empty(len(owned_rows), len(owned_columns))
    blocks = owned_rows // rows_per_block
    for block in blocks.unique().tolist():
        first = block * rows_per_block
        drawn = torch.empty(min(rows_per_block, num_rows - first), last)
        initializer(drawn, _generator(f"{key}:{block}"))
        mine = blocks == block
        values[mine] = drawn[owned_rows[mine] - first][:, owned_columns]
    local.copy_(values.view(local.shape))


def _generator(key: str) -> torch.Generator:
    # On the CPU for every device, so that a GPU starts from the same weights.
    digest = hashlib.sha256(key.encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def _flat_rows(owned: list[torch.Tensor], sizes: list[int]) -> torch.Tensor:
    rows = torch.zeros(1, dtype=torch.int64)
    for indices, size in zip(owned, sizes, strict=False):  # a vector owns its one row
        rows = (rows.unsqueeze(-1) * size + indices).flatten()
    return rows


def _owned_indices(parameter: torch.Tensor, dim: int) -> torch.Tensor:
    """The indices along ``dim`` of the full tensor that this rank holds, in local order."""
    indices = torch.arange(parameter.shape[dim])
    if isinstance(parameter, DTensor):
        # FSDP2 shards what the other parallelisms left on a rank, and its axes come first in the
        # mesh: so the last axis was applied first.
        for axis in reversed(range(parameter.device_mesh.ndim)):
            indices = _shard(indices, parameter.placements[axis], dim, parameter.device_mesh, axis)
    return indices


def _shard(
    indices: torch.Tensor, placement: Placement, dim: int, mesh: DeviceMesh, axis: int
) -> torch.Tensor:
    if not placement.is_shard(dim) and getattr(placement, "dim", None) != dim:
        return indices
    chunks = indices.chunk(mesh.size(axis))
    rank = mesh.get_local_rank(axis)
    return chunks[rank] if rank < len(chunks) else indices[:0]
