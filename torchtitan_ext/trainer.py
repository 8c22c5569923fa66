"""The trainer: torchtitan's, with what the model's forward returns put to use."""

import gc
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch.profiler import profile
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.tools import utils as torchtitan_utils
from torchtitan.train import Trainer

from .components.load_balance import ExpertLoad
from .components.metrics import ExtMetricsProcessor
from .components.profiling import maybe_profile
from .device import DEVICE_TYPE

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


class ExtTrainer(Trainer):
    """Knows no model: it asks one for a :class:`ModelOutput` and hands the parts on."""

    metrics_processor: ExtMetricsProcessor

    def __init__(self, job_config: JobConfig) -> None:
        super().__init__(job_config)
        if self.parallel_dims.dp_enabled:
            # FSDP2 casts parameters, also where it replicates them: autocast would cast again.
            self._disable_autocast()
        loss_mesh = self.parallel_dims.get_optional_mesh("loss")
        self.expert_load = ExpertLoad(self.model_parts, loss_mesh)
        self.metrics_processor.expert_load = self.expert_load
        # Before the step's metrics are logged, and before the next forward reads the biases.
        self.optimizers.register_step_pre_hook(lambda *_: self.expert_load.finish_step())
        self._profiler: profile | None = None

    def init_distributed(self) -> ParallelDims:
        if DEVICE_TYPE == "cpu":
            # Only NCCL has a flight recorder: don't leave an empty folder for its traces.
            self.job_config.comm.trace_buf_size = 0
        return super().init_distributed()

    def forward_backward_step(
        self,
        *,
        input_dict: dict[str, torch.Tensor],
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor,
    ) -> torch.Tensor:
        """One micro-batch; returns this rank's share of the batch's mean loss."""
        inputs, labels, extra_inputs, extra_kwargs = self.post_dataloading_process(
            input_dict, labels
        )
        (model,) = self.model_parts
        with self.train_context():
            with self.maybe_enable_amp:
                output = model(inputs, **extra_inputs, **extra_kwargs)
                loss = self.loss_fn(output, labels) / global_valid_tokens
            if output.tokens_per_expert is not None:
                self.expert_load.add(output.tokens_per_expert)
            del output  # the logits are the step's largest tensor: free them before the backward
            loss.backward()
        return loss

    def batch_generator(self, data_iterable: Iterable[Batch]) -> Iterator[Batch]:
        # torchtitan calls this once, between loading a checkpoint and the first step.
        self.metrics_processor.start(self.step)
        if self._profiler is not None:
            self._profiler.step_num = self.step
        return super().batch_generator(data_iterable)

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        super().train_step(data_iterator)
        if self._profiler is not None:
            self._profiler.step()

    def train(self) -> None:
        profiling = self.job_config.profiling
        # torchtitan's own profiler needs an accelerator: keep it off, and open ours around it.
        self.job_config.profiling = replace(profiling, enable_profiling=False)
        try:
            with maybe_profile(profiling, self.job_config.job.dump_folder) as self._profiler:
                super().train()
        finally:
            self.job_config.profiling = profiling

    @staticmethod
    def synchronize() -> None:
        """Waits for the device to finish what it was given; for timing."""
        torchtitan_utils.device_module.synchronize()

    def close(self) -> None:
        super().close()
        # A compiled model that outlives the process group can end in std::terminate.
        self.model_parts.clear()
        torch._dynamo.reset()
        gc.collect()

    def _disable_autocast(self) -> None:
        self.maybe_enable_amp = nullcontext()
        if self.job_config.validation.enable:
            self.validator.maybe_enable_amp = self.maybe_enable_amp
