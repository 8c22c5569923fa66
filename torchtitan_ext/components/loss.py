"""Losses on a model's output."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torchtitan.components.loss import build_cross_entropy_loss
from torchtitan.config import JobConfig

from torchtitan_ext.model_output import ModelOutput


def build_loss(job_config: JobConfig, **kwargs: object) -> Callable[..., torch.Tensor]:
    """Cross entropy summed over the labels that count; for TrainSpec.build_loss_fn."""
    cross_entropy = build_cross_entropy_loss(job_config)

    def loss(output: ModelOutput, labels_BS: torch.Tensor) -> torch.Tensor:
        if output.label_positions is not None:
            labels_BS = labels_BS.gather(1, output.label_positions)
        return cross_entropy(output.logits, labels_BS)

    return loss


def next_sentence_loss(output: ModelOutput, labels_B: torch.Tensor) -> torch.Tensor:
    """Cross entropy summed over sequences (BERT, arXiv:1810.04805, 3.1)."""
    assert output.next_sentence_logits is not None
    return F.cross_entropy(output.next_sentence_logits.float(), labels_B, reduction="sum")
