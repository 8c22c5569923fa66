"""What a model package registers: torchtitan's TrainSpec, and a check of configurations."""

from collections.abc import Callable
from dataclasses import dataclass

from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.train_spec import TrainSpec


@dataclass
class ExtTrainSpec(TrainSpec):
    """A TrainSpec with ``check_config``, which runs before any process group exists."""

    check_config: Callable[[JobConfig, ParallelDims], None] | None = None
    """Raises ValueError, as ``[section] key = value: rule``, for what this model can't do."""
