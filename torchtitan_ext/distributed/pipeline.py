"""Pipeline parallelism: torchtitan's stages and torch's schedules, with this project's outputs.

A stage of torch's pipelining hands one tensor on, and a schedule knows one loss. So a hook on each
stage, outside of what is checkpointed or compiled, takes :class:`ModelOutput` apart: counts are
kept for the trainer, the hidden state or the logits go on.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch._functorch.config as functorch_config
import torch.distributed as dist
from torch import nn
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.protocols import BaseModelArgs
from torchtitan.tools.logging import logger

from torchtitan_ext.model_output import ModelOutput

from .layer_wrap import check_save_ops, remember_layers
from .mesh import ExtParallelDims
from .pipeline_checks import plan_pipeline

_FALSE_WARNINGS = (
    "Pipeline Parallel loss is not visible",  # all ranks have it
    # stages without FSDP compute under autocast
    "Mixed precision training with TP or PP is only supported",
    "Mixed precision training is disabled",
)


class Pipeline:
    """The stages of this rank and their schedule, as :class:`ExtTrainer` and its validator use it.

    All ranks of a pipeline get the same inputs, and all get the loss.

    Args:
        schedule: torch's, with ``loss`` as its loss.
        stages: this rank's, in the trainer's order.
        tensor_names: parameters and buffers of the whole model, in order.
    """

    def __init__(
        self,
        schedule: Any,
        stages: list[nn.Module],
        loss: "ScaledLoss",
        group: dist.ProcessGroup,
        *,
        num_micro_batches: int,
        has_first: bool,
        has_last: bool,
        tensor_names: list[str],
    ) -> None:
        self.tensor_names = tensor_names
        self.on_forward: Callable[[], None] | None = None
        """Called after each forward of a stage in training."""
        self._schedule, self._loss, self._group = schedule, loss, group
        self._stages = stages
        self._has_first, self._has_last = has_first, has_last
        self._num_micro_batches = num_micro_batches
        self._routings: list[list[_Routing]] = [[] for _ in stages]
        self._checks_save_ops = True
        for stage, routings in zip(stages, self._routings, strict=True):
            stage.register_forward_hook(self._take_apart(routings))

    def step(
        self,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        num_labels: torch.Tensor,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Forward and backward of a batch, in the schedule's micro-batches.

        Args:
            inputs: token ids, (B, S).
            labels: (B, S).
            num_labels: what the summed loss is divided by.
            kwargs: what every stage's forward takes in addition; tensors are split along dim 0.

        Returns:
            The batch's loss, on every rank of the pipeline, without a gradient.
        """
        self._loss.num_labels = num_labels
        for routings in self._routings:
            routings.clear()
        loss = self._run(self._schedule.step, inputs, labels, **kwargs)
        if self._checks_save_ops:
            self._checks_save_ops = False
            check_save_ops(self._stages, self._group)
        return loss

    def evaluate(
        self, inputs: torch.Tensor, labels: torch.Tensor, num_labels: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        """As :meth:`step`, without a backward."""
        self._loss.num_labels = num_labels
        return self._run(self._schedule.eval, inputs, labels, **kwargs)

    def tokens_per_expert(self) -> torch.Tensor | None:
        """Counts of the last step over its micro-batches: MoE layers of this rank x experts."""
        stages = [[r.tokens_per_expert for r in routings] for routings in self._of_micro_batches()]
        sums = [torch.stack(counts).sum(0) for counts in stages]
        return torch.cat(sums) if sums else None

    def expert_ids(self) -> list[torch.Tensor]:
        """Of the last step: (T, K) for each MoE layer of this rank.

        The micro-batches are in the order in which the schedule ran them.
        """
        return [
            torch.cat(micro_batches)
            for routings in self._of_micro_batches()
            for micro_batches in zip(*(r.expert_ids for r in routings), strict=True)
        ]

    def _of_micro_batches(self) -> list[list["_Routing"]]:
        """What the stages with MoE layers returned in the last step."""
        # To learn the shapes, torch may have run a stage once more before the first micro-batch.
        return [r[-self._num_micro_batches :] for r in self._routings if r]

    def _run(
        self, run: Callable[..., Any], inputs: torch.Tensor, labels: torch.Tensor, **kwargs: Any
    ) -> torch.Tensor:
        args = (inputs,) if self._has_first else ()
        losses: list[torch.Tensor] = []
        target = labels if self._has_last else None
        run(*args, target=target, losses=losses, return_outputs=False, **kwargs)
        if self._has_last:
            loss = torch.stack(losses).sum().detach().to(labels.device)
        else:
            loss = torch.zeros((), device=labels.device)
        dist.all_reduce(loss, group=self._group)
        return loss

    def _take_apart(self, routings: list["_Routing"]) -> Callable[..., torch.Tensor]:
        def hook(stage: nn.Module, args: Any, output: ModelOutput) -> torch.Tensor:
            if stage.training:
                if output.tokens_per_expert is not None:
                    routings.append(_Routing(output.tokens_per_expert, output.expert_ids))
                if self.on_forward is not None:
                    self.on_forward()
            return output.logits

        return hook


class _Routing(NamedTuple):
    """Of a stage's forward, as in :class:`ModelOutput`."""

    tokens_per_expert: torch.Tensor
    expert_ids: tuple[torch.Tensor, ...]


class ScaledLoss:
    """A loss of logits, summed over labels, that is divided before the backward.

    torchtitan divides the loss that it reports, and leaves the gradients that much too large.
    """

    def __init__(self, loss_fn: Callable[..., torch.Tensor]) -> None:
        self._loss_fn = loss_fn
        self.num_labels = torch.ones(())

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self._loss_fn(ModelOutput(logits), labels) / self.num_labels


def pipeline(
    model: nn.Module,
    parallel_dims: ExtParallelDims,
    job_config: JobConfig,
    device: torch.device,
    model_args: BaseModelArgs,
    parallelize_fn: Callable[..., nn.Module],
    loss_fn: Callable[..., torch.Tensor],
) -> tuple[Pipeline, list[nn.Module], bool, bool]:
    """Splits the model and parallelizes this rank's stages; for TrainSpec.pipelining_fn.

    Args:
        model: on the meta device, with its blocks in ``model.layers``.

    Returns:
        The pipeline, this rank's stages, and whether it has the first and the last. To torchtitan
        every rank says yes: :class:`Pipeline` wants inputs and labels, and has a loss, on all.
    """
    plan = plan_pipeline(job_config, len(list(model.get_submodule("layers").children())))
    if plan.splits_backward:
        # A backward in two parts goes through a compiled graph twice, which must then not give
        # its saved tensors away in the first.
        functorch_config.donated_buffer = False
    remember_layers(model)
    names = [*dict(model.named_parameters()), *dict(model.named_buffers())]
    loss = ScaledLoss(loss_fn)
    schedule, stages, has_first, has_last = pipeline_llm(
        model, parallel_dims, job_config, device, model_args, parallelize_fn, loss
    )
    if (
        not parallel_dims.data_parallel_enabled
        and job_config.training.mixed_precision_param != "float32"
    ):
        _autocast(stages, job_config, device)
    pipeline = Pipeline(
        schedule,
        stages,
        loss,
        parallel_dims.get_mesh("pp").get_group(),
        num_micro_batches=plan.num_micro_batches,
        has_first=has_first,
        has_last=has_last,
        tensor_names=names,
    )
    return pipeline, stages, True, True


def _autocast(stages: list[nn.Module], job_config: JobConfig, device: torch.device) -> None:
    """Without FSDP, which casts by itself, one process computes under autocast: so do stages."""
    dtype = TORCH_DTYPE_MAP[job_config.training.mixed_precision_param]
    for stage in stages:
        stage.forward = torch.autocast(device.type, dtype=dtype)(stage.forward)


@contextmanager
def without_false_warnings() -> Iterator[None]:
    """Keeps torchtitan's constructor from warning of what does not hold here."""

    def is_true(record: logging.LogRecord) -> bool:
        return not any(text in record.getMessage() for text in _FALSE_WARNINGS)

    logger.addFilter(is_true)
    try:
        yield
    finally:
        logger.removeFilter(is_true)
