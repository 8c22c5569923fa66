"""Which routing decisions a rank makes for the sequences that it shares with other ranks.

Stages of a pipeline decide for some layers, ranks of context and tensor parallelism for some
positions.

Shapes: B sequences of S tokens (s of them routed on this rank), T = B * S, t = B * s, L MoE layers
(l of them on this rank), K top-k.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchtitan_ext.moe import MoEArgs, moe_layers

from .context_parallel import SharedSequence
from .mesh import ExtParallelDims
from .split_sequence import SplitSequence


class MoELayersOfStages:
    """The MoE layers of a model, and which of them this rank's stages have; a collective.

    Args:
        model_parts: with their blocks in ``layers``.
        pp_mesh: the ranks that hold the other stages; None without a pipeline.
    """

    def __init__(self, model_parts: Sequence[nn.Module], pp_mesh: DeviceMesh | None) -> None:
        own = [layer for part in model_parts for layer in _numbered_moe_layers(part)]
        ranks = [own]
        if pp_mesh is not None:
            ranks = [[] for _ in range(pp_mesh.size())]
            dist.all_gather_object(ranks, own, group=pp_mesh.get_group())
        numbers = sorted(number for rank in ranks for number, _ in rank)
        self.num_layers = len(numbers)
        self.names = [str(number) for number, _ in own]
        """Of this rank's blocks, in the order of its parts."""
        self.rows = [numbers.index(number) for number, _ in own]
        """Their places among the MoE layers of the whole model."""
        self.args = next((args for rank in ranks for _, args in rank), None)
        """Those of any layer; None if there is none."""


def _numbered_moe_layers(part: nn.Module) -> list[tuple[int, MoEArgs]]:
    blocks = part.get_submodule("layers").named_children()
    return [(int(n), moe.router.args) for n, block in blocks for moe in moe_layers(block)]


class RoutedPart:
    """The layers and positions for which this rank's routers decide; building one is a collective.

    Args:
        model_parts: of this rank.
    """

    def __init__(
        self, model_parts: Sequence[nn.Module], parallel_dims: ExtParallelDims, seq_len: int
    ) -> None:
        dims = parallel_dims
        self.layers = MoELayersOfStages(model_parts, dims.get_optional_mesh("pp"))
        self._positions_s = torch.arange(seq_len)
        axes = [name for name in ("pp", "cp") if dims.get_optional_mesh(name) is not None]
        if dims.cp_enabled:
            shared = SharedSequence(dims.get_mesh("cp").get_group(), seq_len)
            self._positions_s = shared.own_positions(torch.device("cpu"))
        if dims.tensor_parallel_splits_tokens:
            axes.append("tp")
            split = SplitSequence(dims.get_mesh("tp").get_group(), len(self._positions_s))
            self._positions_s = split.own_part(self._positions_s)
        self._meshes = [dims.get_mesh(axis) for axis in axes]
        self._seq_len = seq_len

    def own(self, expert_ids: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """This rank's share, (t, K) a layer by its name, of the (T, K) ids of each MoE layer."""
        ids_of_rows = (expert_ids[row] for row in self.layers.rows)
        return {
            name: ids_TK.unflatten(0, (-1, self._seq_len))[:, self._positions_s].flatten(0, 1)
            for name, ids_TK in zip(self.layers.names, ids_of_rows, strict=True)
        }

    def split_sequences(self, ids_ltK: torch.Tensor) -> torch.Tensor:
        """(l, B, s, K) of the (l, t, K) ids that this rank's layers returned."""
        return ids_ltK.unflatten(1, (-1, len(self._positions_s)))

    def gather(self, ids_lBsK: torch.Tensor | None) -> torch.Tensor:
        """(L, B, S, K) of the shares of all ranks, on the CPU; a collective.

        Args:
            ids_lBsK: None from a rank without MoE layers.
        """
        shares = []
        if ids_lBsK is not None:
            shares.append((self.layers.rows, self._positions_s, ids_lBsK.cpu()))
        for mesh in self._meshes:
            ranks: list[list[tuple[list[int], torch.Tensor, torch.Tensor]]]
            ranks = [[] for _ in range(mesh.size())]
            dist.all_gather_object(ranks, shares, group=mesh.get_group())
            shares = [share for rank in ranks for share in rank]
        ids = shares[0][2]
        whole = ids.new_empty(self.layers.num_layers, ids.shape[1], self._seq_len, ids.shape[3])
        for rows, positions_s, ids_lBsK in shares:
            for row, ids_BsK in zip(rows, ids_lBsK, strict=True):
                whole[row][:, positions_s] = ids_BsK
        return whole
