"""Losses on a model's output."""

from collections.abc import Callable

import torch
from torchtitan.components.loss import build_cross_entropy_loss
from torchtitan.config import JobConfig

from torchtitan_ext.model_output import ModelOutput


def build_loss(job_config: JobConfig, **kwargs: object) -> Callable[..., torch.Tensor]:
    """Cross entropy summed over the labels that count; for TrainSpec.build_loss_fn."""
    cross_entropy = build_cross_entropy_loss(job_config)

    def loss(output: ModelOutput, labels_BS: torch.Tensor) -> torch.Tensor:
        return cross_entropy(output.logits, labels_BS)

    return loss
