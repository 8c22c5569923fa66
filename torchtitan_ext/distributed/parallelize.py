"""One ordered list applies every parallelism to a model."""

from torch import nn
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims

from .expert_parallel import apply_expert_parallel
from .fsdp import apply_data_parallel
from .layer_wrap import apply_layer_wrap


def parallelize(model: nn.Module, parallel_dims: ParallelDims, job_config: JobConfig) -> nn.Module:
    """Applies what the configuration asks for, in place; for TrainSpec.parallelize_fn.

    The order matters: expert parallelism replaces weights, so it comes before anything holds on
    to them. Checkpoint and compile wrap a block whose collectives are already in place. FSDP
    comes last, so that its hooks run outside of the compiled graphs.

    Args:
        model: on the meta device, with its blocks in ``model.layers``.
    """
    if parallel_dims.ep_enabled:
        apply_expert_parallel(model, parallel_dims.get_mesh("ep"))
    apply_layer_wrap(model, job_config)
    apply_data_parallel(model, parallel_dims, job_config)
    return model
