"""Validation on text, the same sequences every time."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims

# Labels that come with the inputs, as they are not one a token.
_LABELS = ("next_sentence_labels",)


class TextValidator(Validator):
    """torchtitan's validation loop over this project's data sets: the loss on tokens alone.

    The loop runs the model in evaluation mode, outside the trainer's step: what the forward
    counts is not added to the experts' load.
    """

    def __init__(
        self,
        job_config: JobConfig,
        dp_world_size: int,
        dp_rank: int,
        tokenizer: BaseTokenizer,
        parallel_dims: ParallelDims,
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

    def post_dataloading_process(
        self,
        input_dict: dict[str, torch.Tensor],
        labels: torch.Tensor,
        model_parts: list[nn.Module],
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], dict[str, Any]]:
        inputs = {name: value for name, value in input_dict.items() if name not in _LABELS}
        return inputs.pop("input"), labels, inputs, {}
