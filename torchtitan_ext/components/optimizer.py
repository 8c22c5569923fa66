"""Optimizers: torchtitan's, and plain SGD."""

import torch
from torch import nn
from torchtitan.components.optimizer import OptimizersContainer, build_optimizers
from torchtitan.config import Optimizer
from torchtitan.distributed import ParallelDims


def build_optimizer(
    model_parts: list[nn.Module], config: Optimizer, parallel_dims: ParallelDims
) -> OptimizersContainer:
    """For TrainSpec.build_optimizers_fn. ``[optimizer] name`` is Adam, AdamW or SGD."""
    if config.name != "SGD":
        return build_optimizers(model_parts, config, parallel_dims)
    kwargs = {
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        # There is no fused SGD for sharded parameters: "fused" takes the next fastest.
        "foreach": config.implementation != "for-loop",
    }
    return OptimizersContainer(model_parts, torch.optim.SGD, kwargs)
