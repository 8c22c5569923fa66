"""What a model package registers: torchtitan's TrainSpec, and a check of configurations."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.train_spec import TrainSpec


@dataclass
class ExtTrainSpec(TrainSpec):
    """A TrainSpec that says what its model reads of a configuration, and what it refuses."""

    sections: frozenset[str] = frozenset()
    """Sections of the configuration that the model reads, of those that only some models do."""

    unsupported: Mapping[str, str] = field(default_factory=dict)
    """Features, by their names in distributed/support.py, that the model can't have, and why."""

    check_config: Callable[[JobConfig, ParallelDims], None] | None = None
    """
    Runs before any process group exists. Raises ValueError, as ``[section] key = value: rule``, for
    what the model can't do.
    """
