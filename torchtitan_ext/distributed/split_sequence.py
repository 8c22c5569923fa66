"""A sequence split over the ranks of a group: parts to whole, and partial sums to parts.

The two operations are each other's gradient. Parts may differ by one position in length, so a
sequence need not divide by the number of ranks.

Shapes: B batch, S sequence (s of it on this rank), D model.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed._functional_collectives import (
    AsyncCollectiveTensor,
    all_gather_single_autograd,
    reduce_scatter_single_autograd,
)


def length_inside(tokens_or_hidden: torch.Tensor, parts: int) -> int:
    """Positions that a region of a model has, by the model's first input.

    Args:
        tokens_or_hidden: token ids (B, S); or, in a later stage of a pipeline, this rank's part
            (B, s, D) of the hidden states, which ``parts`` ranks have in equal lengths.
    """
    length = tokens_or_hidden.shape[1]
    return length * parts if tokens_or_hidden.is_floating_point() else length


@dataclass
class SplitSequence:
    """How a sequence is split: rank after rank, in consecutive parts.

    ``length`` is the number of positions that the ranks share. It is set before each forward, from
    outside of the blocks, where there is still a whole sequence to look at.
    """

    group: dist.ProcessGroup
    length: int = 0

    def __post_init__(self) -> None:
        self.rank, self.num_ranks = self.group.rank(), self.group.size()

    @property
    def sizes(self) -> list[int]:
        """Positions of each rank; the first ranks have one more if they don't divide evenly."""
        base, more = divmod(self.length, self.num_ranks)
        return [base + 1] * more + [base] * (self.num_ranks - more)

    def own_part(self, ids: torch.Tensor) -> torch.Tensor:
        """This rank's positions of a tensor whose last dim is the whole sequence."""
        sizes = self.sizes
        return ids.narrow(-1, sum(sizes[: self.rank]), sizes[self.rank])

    def gather(self, x_BsD: torch.Tensor) -> torch.Tensor:
        """The whole sequence (B, S, D) from all ranks' parts. Gradients of it are summed."""
        sizes = self.sizes
        padded = F.pad(x_BsD, (0, 0, 0, sizes[0] - x_BsD.shape[1]))
        stacked = all_gather_single_autograd(padded.contiguous(), 0, self.group)
        parts = stacked.chunk(self.num_ranks)
        return torch.cat([part[:, :size] for part, size in zip(parts, sizes, strict=True)], dim=1)

    def scatter_sum(self, x_BSD: torch.Tensor) -> torch.Tensor:
        """This rank's part (B, s, D) of the sum of all ranks' whole sequences."""
        sizes = self.sizes
        parts = [F.pad(x, (0, 0, 0, sizes[0] - x.shape[1])) for x in x_BSD.split(sizes, dim=1)]
        summed = reduce_scatter_single_autograd(torch.cat(parts), "sum", 0, self.group)
        if isinstance(summed, AsyncCollectiveTensor):
            # A real operator: as it is, the tensor would lose its gradient where it enters a
            # compiled block.
            summed = summed + 0
        return summed[:, : sizes[self.rank]]
