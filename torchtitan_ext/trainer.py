"""The trainer: torchtitan's, with what the model's forward returns put to use."""

import gc
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.profiler import profile
from torchtitan.config import JobConfig
from torchtitan.tools import utils as torchtitan_utils
from torchtitan.tools.logging import logger
from torchtitan.train import Trainer

from .components.load_balance import ExpertLoad
from .components.loss import next_sentence_loss
from .components.metrics import ExtMetricsProcessor
from .components.profiling import maybe_profile
from .components.random_state import Place, seed_step
from .components.routing import StepRouting
from .device import DEVICE_TYPE, keep_freed_memory
from .distributed.context_parallel import share_batch
from .distributed.mesh import ExtParallelDims
from .distributed.pipeline import Pipeline, without_false_warnings
from .distributed.zero import StateBytes, share_micro_batch

Batch = tuple[dict[str, torch.Tensor], torch.Tensor]


class ExtTrainer(Trainer):
    """Knows no model: it asks one for a :class:`ModelOutput` and hands the parts on."""

    metrics_processor: ExtMetricsProcessor
    parallel_dims: ExtParallelDims

    def __init__(self, job_config: JobConfig) -> None:
        with without_false_warnings():
            super().__init__(job_config)
        self.pipeline: Pipeline | None = getattr(self, "pp_schedule", None)
        if self.parallel_dims.data_parallel_enabled:
            # FSDP2 casts parameters, also where it replicates them: autocast would cast again.
            self._disable_autocast()
        pp_mesh = self.parallel_dims.get_optional_mesh("pp")
        self.expert_load = ExpertLoad(self.model_parts, self._meshes_of_tokens(), pp_mesh)
        self.metrics_processor.expert_load = self.expert_load
        # Before the step's metrics are logged, and before the next forward reads the biases.
        self.optimizers.register_step_pre_hook(lambda *_: self.expert_load.finish_step())
        self.seed = job_config.debug.seed or 0
        """What every random number of the training comes from."""
        self.place = Place(*(self._rank_on(axis) for axis in ("batch", "cp", "tp", "pp")))
        self.routing = StepRouting(job_config, self.model_parts, self.parallel_dims, self.place)
        self._zero_stage = job_config.zero.stage if self.parallel_dims.fsdp_enabled else 1
        self._micro_batch = 0
        self.state_bytes = StateBytes()
        """What this rank held in its first step."""
        self._measures_state = True
        self._profiler: profile | None = None

    @property
    def global_batch_size(self) -> int:
        """Sequences of all ranks in one optimizer step."""
        local_batch_size = self.job_config.training.local_batch_size
        num_data_ranks = self.parallel_dims.num_data_ranks
        return local_batch_size * self.gradient_accumulation_steps * num_data_ranks

    def _rank_on(self, axis: str) -> int:
        mesh = self.parallel_dims.get_optional_mesh(axis)
        return 0 if mesh is None else mesh.get_local_rank()

    def _meshes_of_tokens(self) -> list[DeviceMesh]:
        """Axes whose ranks route different tokens of a step."""
        axes = ["loss", "tp"] if self.parallel_dims.tensor_parallel_splits_tokens else ["loss"]
        meshes = (self.parallel_dims.get_optional_mesh(axis) for axis in axes)
        return [mesh for mesh in meshes if mesh is not None]

    def init_distributed(self) -> ExtParallelDims:
        if DEVICE_TYPE == "cpu":
            # Only NCCL has a flight recorder: don't leave an empty folder for its traces.
            self.job_config.comm.trace_buf_size = 0
            keep_freed_memory()
        return ExtParallelDims.extending(super().init_distributed())

    def forward_backward_step(
        self,
        *,
        input_dict: dict[str, torch.Tensor],
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor,
    ) -> torch.Tensor:
        """One micro-batch; returns this rank's share of the batch's mean loss."""
        tokens = input_dict["input"]
        inputs, labels, extra_inputs, extra_kwargs = self.post_dataloading_process(
            input_dict, labels
        )
        next_sentence_labels = extra_inputs.pop("next_sentence_labels", None)
        if self._micro_batch == 0:
            # Here and not earlier: the dataloader draws a random number when it starts.
            seed_step(self.seed, self.place, self.step)
        extra_kwargs |= self.routing.arguments(self.step, self._micro_batch, tokens)
        self._micro_batch += 1
        # Not by zero, though a batch of padded text may have nothing to predict.
        num_labels = torch.as_tensor(global_valid_tokens).clamp(min=1)
        if self.pipeline is not None:
            loss = self._pipeline_step(inputs, labels, num_labels, **extra_inputs, **extra_kwargs)
            if self.routing.records:
                self.routing.add(tokens, self.pipeline.expert_ids())
            return loss
        (model,) = self.model_parts
        is_last = self._micro_batch == self.gradient_accumulation_steps
        share_micro_batch(model, self._zero_stage, is_last=is_last)
        with self.train_context():
            with self.maybe_enable_amp:
                output = model(inputs, **extra_inputs, **extra_kwargs)
                loss = self.loss_fn(output, labels) / num_labels
                if next_sentence_labels is not None:
                    loss += (
                        next_sentence_loss(output, next_sentence_labels, self.place)
                        / self.global_batch_size
                    )
            if output.tokens_per_expert is not None:
                self.expert_load.add(output.tokens_per_expert)
                self.routing.add(tokens, output.expert_ids)
            if self._measures_state:
                self.state_bytes.after_forward(model)
            del output  # the logits are the step's largest tensor: free them before the backward
            loss.backward()
        if self._measures_state:
            self.state_bytes.after_backward(model)
        return loss

    def post_dataloading_process(
        self, input_dict: dict[str, torch.Tensor], labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor], dict[str, Any]]:
        """This rank's part of a batch: inputs, labels, further inputs, and nothing else."""
        if self.parallel_dims.cp_enabled:
            input_dict, labels = share_batch(input_dict, labels, self.parallel_dims.get_mesh("cp"))
        extra_inputs = {name: value for name, value in input_dict.items() if name != "input"}
        return input_dict["input"], labels, extra_inputs, {}

    def _pipeline_step(
        self,
        inputs: torch.Tensor,
        labels: torch.Tensor,
        num_labels: torch.Tensor,
        **kwargs: Any,
    ) -> torch.Tensor:
        """As :meth:`forward_backward_step`; the loss is that of all stages' ranks."""
        assert self.pipeline is not None
        parts = self.model_parts
        if self._measures_state:
            self.pipeline.on_forward = lambda: self.state_bytes.after_forward(*parts)
        with self.train_context():
            loss = self.pipeline.step(inputs, labels, num_labels, **kwargs)
        self.pipeline.on_forward = None
        tokens_per_expert = self.pipeline.tokens_per_expert()
        if tokens_per_expert is not None:
            self.expert_load.add(tokens_per_expert)
        if self._measures_state:
            self.state_bytes.after_backward(*parts)
        return loss

    def batch_generator(self, data_iterable: Iterable[Batch]) -> Iterator[Batch]:
        # torchtitan calls this once, between loading a checkpoint and the first step.
        self.metrics_processor.start(self.step)
        self.routing.start(self.step)
        if self._profiler is not None:
            self._profiler.step_num = self.step
        return super().batch_generator(data_iterable)

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        self._micro_batch = 0
        super().train_step(data_iterator)
        self.routing.finish_step(self.step)
        if self._measures_state:
            self._measures_state = False
            self.state_bytes.after_step(self.optimizers)
            logger.info(f"Held by a rank: {self.state_bytes}")
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

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "seed": self.seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if state_dict["seed"] != self.seed:
            logger.warning(
                f"The checkpoint's run had [debug] seed = {state_dict['seed']}, this one has "
                f"{self.seed}: from here on it draws other random numbers"
            )

    @staticmethod
    def synchronize() -> None:
        """Waits for the device to finish what it was given; for timing."""
        torchtitan_utils.device_module.synchronize()

    def close(self) -> None:
        super().close()
        # A compiled model that outlives the process group can end in std::terminate.
        self.model_parts.clear()
        self.pipeline = None
        for holder in ("pp_schedule", "validator"):
            self.__dict__.pop(holder, None)
        torch._dynamo.reset()
        gc.collect()

    def _disable_autocast(self) -> None:
        self.maybe_enable_amp = nullcontext()
        if self.job_config.validation.enable:
            self.validator.maybe_enable_amp = self.maybe_enable_amp
