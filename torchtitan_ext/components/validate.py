"""Validation on text, the same sequences every time."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config import JobConfig
from torchtitan.distributed.utils import dist_sum

from torchtitan_ext.device import DEVICE_TYPE
from torchtitan_ext.distributed.context_parallel import share_batch
from torchtitan_ext.distributed.mesh import ExtParallelDims

# Labels that come with the inputs, as they are not one a token.
_LABELS = ("next_sentence_labels",)


class TextValidator(Validator):
    """Validation over this project's data sets: the loss on tokens alone.

    It runs the model in evaluation mode, outside the trainer's step: what the forward
    counts is not added to the experts' load.
    """

    def __init__(
        self,
        job_config: JobConfig,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: BaseTokenizer,
        parallel_dims: ExtParallelDims,
        build_dataloader: Callable[..., Any],
        **attributes: Any,
    ) -> None:
        # Not super().__init__: it would build torchtitan's data set.
        self.job_config = job_config
        self.tokenizer = tokenizer
        self.parallel_dims = parallel_dims
        self.__dict__.update(attributes)
        # Every iteration over it starts at the beginning, so one serves all validations.
        self.validation_dataloader = build_dataloader(
            job_config=job_config,
            dp_world_size=dp_world_size,
            dp_rank=dp_rank,
            tokenizer=tokenizer,
            infinite=job_config.validation.steps != -1,
        )

    @torch.no_grad()
    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        """Logs the mean over batches of the loss per label; a collective.

        Not torchtitan's own loop, which counts the labels of one rank's part of a sequence as if
        they were all of it.
        """
        for part in model_parts:
            part.eval()
        num_steps = self.job_config.validation.steps
        batches = itertools.islice(
            self.validation_dataloader, num_steps if num_steps != -1 else None
        )
        losses = [self._loss(model_parts, inputs, labels) for inputs, labels in batches]
        loss = torch.stack(losses).mean()
        loss_mesh = self.parallel_dims.get_optional_mesh("loss")
        self.metrics_processor.log_validation(loss=dist_sum(loss, loss_mesh), step=step)
        for part in model_parts:
            part.train()

    def _loss(
        self,
        model_parts: list[nn.Module],
        inputs: dict[str, torch.Tensor],
        labels_BS: torch.Tensor,
    ) -> torch.Tensor:
        """This rank's share of a global batch's loss."""
        self.metrics_processor.ntokens_since_last_log += labels_BS.numel()
        labels_BS = labels_BS.to(DEVICE_TYPE)
        inputs = {n: value.to(DEVICE_TYPE) for n, value in inputs.items() if n not in _LABELS}
        num_labels = dist_sum(
            (labels_BS != IGNORE_INDEX).sum(), self.parallel_dims.get_optional_mesh("batch")
        )
        if self.parallel_dims.cp_enabled:
            inputs, labels_BS = share_batch(inputs, labels_BS, self.parallel_dims.get_mesh("cp"))
        tokens_BS = inputs.pop("input")
        with self.validation_context(), self.maybe_enable_amp:
            if self.pp_schedule is not None:
                return self.pp_schedule.evaluate(tokens_BS, labels_BS, num_labels, **inputs)
            (model,) = model_parts
            return self.loss_fn(model(tokens_BS, **inputs), labels_BS) / num_labels
