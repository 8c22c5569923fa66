"""One ordered list applies every parallelism to a model."""

from dataclasses import dataclass

from torch import nn
from torchtitan.config import JobConfig

from .compile_cache import tag_compile_caches
from .context_parallel import ContextParallelPlan, apply_context_parallel
from .expert_parallel import apply_expert_parallel
from .fsdp import apply_data_parallel
from .layer_wrap import apply_layer_wrap
from .mesh import ExtParallelDims
from .tensor_parallel import TensorParallelPlan, apply_tensor_parallel


@dataclass(frozen=True)
class ParallelPlan:
    """What of a model is split, and where. The model itself knows nothing of it."""

    tensor: TensorParallelPlan
    context: ContextParallelPlan


def parallelize(
    model: nn.Module, parallel_dims: ExtParallelDims, job_config: JobConfig, *, plan: ParallelPlan
) -> nn.Module:
    """Applies what the configuration asks for, in place; for TrainSpec.parallelize_fn.

    The order matters: expert and tensor parallelism replace weights, so they come before anything
    holds on to them. Context parallelism gathers what tensor parallelism has gathered before.
    Checkpoint and compile wrap a block whose collectives are already in place. FSDP comes last, so
    that its hooks run outside of the compiled graphs.

    Args:
        model: on the meta device, with its blocks in ``model.layers``.
        plan: the model's.
    """
    parallelism = job_config.parallelism
    tag_compile_caches(
        parallel_dims.get_mesh("tp").get_local_rank() if parallel_dims.tp_enabled else 0
    )
    apply_expert_parallel(model, parallel_dims)
    if parallel_dims.tp_enabled:
        apply_tensor_parallel(
            model,
            parallel_dims.get_mesh("tp"),
            plan.tensor,
            splits_experts=not parallel_dims.tensor_parallel_splits_tokens,
            loss_parallel=not parallelism.disable_loss_parallel,
        )
    if parallel_dims.cp_enabled:
        apply_context_parallel(
            model,
            parallel_dims.get_mesh("cp"),
            plan.context,
            method=parallelism.context_parallel_rotate_method,
            tensor_parallel_degree=parallel_dims.tp,
        )
    apply_layer_wrap(model, job_config)
    apply_data_parallel(model, parallel_dims, job_config)
    return model
