"""The mesh axes of a run: torchtitan's, with one rule more."""

from dataclasses import fields

from torchtitan.distributed import ParallelDims


class ExtParallelDims(ParallelDims):
    """Has the axis "fsdp" also where its size is 1, under tensor parallelism.

    FSDP then runs on one rank, where it still casts parameters to the training type, sums the
    partial gradients of tensor parallelism, and shards experts over ranks that the other parameters
    don't have.
    """

    @classmethod
    def extending(cls, dims: ParallelDims) -> "ExtParallelDims":
        """The same degrees; before a mesh is built."""
        degrees = (field.name for field in fields(dims) if not field.name.startswith("_"))
        return cls(**{name: getattr(dims, name) for name in degrees})

    def _mesh_exist(self, name: str, degree: int) -> bool:
        if name == "fsdp":
            return self.fsdp_enabled
        return super()._mesh_exist(name, degree)

    @property
    def fsdp_enabled(self) -> bool:
        return super().fsdp_enabled or self.tp_enabled

    @property
    def num_data_ranks(self) -> int:
        """Ranks that read different sequences; others share theirs."""
        return self.dp_replicate * self.dp_shard

    @property
    def data_parallel_enabled(self) -> bool:
        """Whether FSDP2 handles the parameters, by sharding or by replicating them."""
        return self.fsdp_enabled or self.dp_replicate_enabled

    @property
    def tensor_parallel_splits_tokens(self) -> bool:
        """Whether ranks that share a sequence route different tokens, each its own part."""
        return self.tp_enabled and self.ep_enabled and not self.etp_enabled
