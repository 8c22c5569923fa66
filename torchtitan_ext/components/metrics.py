"""Metrics: torchtitan's console line and TensorBoard, and one JSON object a step for programs."""

import os
import time
from typing import Any

import torch.distributed as dist
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config import JobConfig

from torchtitan_ext.distributed.mesh import ExtParallelDims
from torchtitan_ext.metrics_file import METRICS_FILE, json_line

from .load_balance import ExpertLoad


class ExtMetricsProcessor(MetricsProcessor):
    """Adds ``<dump_folder>/metrics.jsonl`` to torchtitan's output, at full precision."""

    parallel_dims: ExtParallelDims

    def __init__(self, job_config: JobConfig, parallel_dims: ExtParallelDims) -> None:
        super().__init__(job_config, parallel_dims)
        self.expert_load: ExpertLoad | None = None
        self._last_logged_step = 0
        self._file = None
        if dist.get_rank() == 0:
            os.makedirs(job_config.job.dump_folder, exist_ok=True)
            path = os.path.join(job_config.job.dump_folder, METRICS_FILE)
            self._file = open(path, "a", buffering=1)  # noqa: SIM115  closed in close()

    def start(self, step: int) -> None:
        """Starts the clock: what comes before the first step is not a step's time."""
        self._last_logged_step = step
        self.time_last_log = time.perf_counter()

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        extra_metrics = dict(extra_metrics or {})
        # torchtitan sums over the ranks that share sequences, too; each has counted all of them.
        extra_metrics["n_tokens_seen"] = (
            int(extra_metrics["n_tokens_seen"]) // self.parallel_dims.cp
        )
        num_steps = step - self._last_logged_step
        seconds = time.perf_counter() - self.time_last_log
        record = {
            "step": step,
            "loss": global_avg_loss,
            "grad_norm": grad_norm,
            "lr": extra_metrics["lr"],
            "tokens_per_second": self.ntokens_since_last_log
            * self.parallel_dims.num_data_ranks
            / seconds,
            "tokens_seen": extra_metrics["n_tokens_seen"],
            "step_seconds": seconds / num_steps,
            "data_seconds": sum(self.data_loading_times) / num_steps,
            "peak_memory_gib": self.device_memory_monitor.get_peak_stats().max_reserved_gib,
            "time": time.time(),
        }
        if self.expert_load is not None and self.expert_load.last_step_LE is not None:
            loads = self.expert_load.max_over_mean_L()
            record["expert_load_max_over_mean"] = max(loads)
            extra_metrics |= {
                f"expert_load_max_over_mean/moe_layer_{i}": load for i, load in enumerate(loads)
            }
            if self.job_config.metrics.log_experts:
                record["tokens_per_expert"] = self.expert_load.last_step_LE.tolist()
        self._write(record)
        self._last_logged_step = step
        super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)

    def log_validation(
        self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None
    ) -> None:
        self._write({"step": step, "validation_loss": loss, "time": time.time()})
        super().log_validation(loss, step, extra_metrics)
        # It starts the clock anew, so the next line speaks of the steps after this one.
        self._last_logged_step = step
        self.data_loading_times.clear()

    def close(self) -> None:
        super().close()
        if self._file is not None:
            self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json_line(record))


def build_metrics_processor(
    job_config: JobConfig, parallel_dims: ExtParallelDims, model_args: Any = None
) -> ExtMetricsProcessor:
    """For TrainSpec.build_metrics_processor_fn."""
    return ExtMetricsProcessor(job_config, parallel_dims)
