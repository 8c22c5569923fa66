"""Profiler traces on every device, with torchtitan's keys."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule, supported_activities
from torchtitan.config import Profiling
from torchtitan.tools.logging import logger


@contextmanager
def maybe_profile(config: Profiling, folder: str) -> Iterator[profile | None]:
    """Profiles every ``profile_freq`` steps if enabled; call ``step()`` after each training step.

    Writes ``folder/<save_traces_folder>/iteration_N/rankR_trace.json`` (Chrome trace format).
    """
    if not config.enable_profiling:
        yield None
        return

    def write_trace(profiler: profile) -> None:
        iteration = os.path.join(
            folder, config.save_traces_folder, f"iteration_{profiler.step_num}"
        )
        os.makedirs(iteration, exist_ok=True)
        path = os.path.join(iteration, f"rank{dist.get_rank()}_trace.json")
        profiler.export_chrome_trace(path)
        logger.info(f"Wrote profiler trace {path}")

    wait = config.profile_freq - config.profiler_warmup - config.profiler_active
    activities = {ProfilerActivity.CPU}
    if torch.accelerator.is_available():
        activities = supported_activities()
    with profile(
        activities=activities,
        schedule=schedule(wait=wait, warmup=config.profiler_warmup, active=config.profiler_active),
        on_trace_ready=write_trace,
        record_shapes=True,
    ) as profiler:
        yield profiler
