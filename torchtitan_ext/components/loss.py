"""Losses on a model's output."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import build_cross_entropy_loss
from torchtitan.config import JobConfig

from torchtitan_ext.model_output import ModelOutput

from .random_state import Place


def build_loss(job_config: JobConfig, **kwargs: object) -> Callable[..., torch.Tensor]:
    """Cross entropy summed over the labels that count; for TrainSpec.build_loss_fn."""
    cross_entropy = build_cross_entropy_loss(job_config)

    def loss(output: ModelOutput, labels_BS: torch.Tensor) -> torch.Tensor:
        if output.label_positions is not None:
            labels_BS = labels_BS.gather(1, output.label_positions)
        total = cross_entropy(output.logits, labels_BS)
        # Of logits that tensor parallelism has split, the sum is the same on every rank.
        return total.to_local() if isinstance(total, DTensor) else total

    return loss


def next_sentence_loss(output: ModelOutput, labels_B: torch.Tensor, place: Place) -> torch.Tensor:
    """Cross entropy summed over sequences (BERT, arXiv:1810.04805, 3.1).

    Ranks that share sequences all compute this head. Its gradient comes from one of them; its value
    from those of one context parallel rank, as losses are summed over context parallel ranks and
    not over tensor parallel ones.
    """
    assert output.next_sentence_logits is not None
    loss = F.cross_entropy(output.next_sentence_logits.float(), labels_B, reduction="sum")
    if place.context > 0:
        return loss * 0
    return loss if place.tensor == 0 else loss.detach() + loss * 0
