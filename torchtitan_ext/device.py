"""Which device this process trains on: the accelerator torch finds, or else the CPU.

torchtitan 0.2.2 takes "cuda" when it finds no accelerator, and several of its modules bind that
choice when they are imported. There is no hook for it, so this module, and no other, assigns into
torchtitan. It has to be imported before any other part of torchtitan.
"""

import ctypes
import math
import os
import platform
import resource
import sys
from types import SimpleNamespace
from typing import Any

import torch

DEVICE_TYPE: str = (
    torch.accelerator.current_accelerator().type  # type: ignore[union-attr]
    if torch.accelerator.is_available()
    else "cpu"
)

# These bind torchtitan's device at import: once loaded they can't be corrected any more.
_BINDS_DEVICE_AT_IMPORT = (
    "torchtitan.components.metrics",
    "torchtitan.distributed.utils",
    "torchtitan.tools.profiling",
)


class CpuDeviceModule:
    """The calls that torchtitan makes on ``torch.cuda``, for a machine without an accelerator.

    Memory is the process's: its peak resident size stands for both active and reserved bytes.
    """

    @staticmethod
    def set_device(device: torch.device | str) -> None:
        """There is one CPU device: nothing to select."""

    @staticmethod
    def synchronize(device: Any = None) -> None:
        """CPU kernels have ended when the call returns."""

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def get_device_name(device: Any = None) -> str:
        return f"CPU ({platform.machine()}, {os.cpu_count()} cores)"

    @staticmethod
    def get_device_properties(device: Any = None) -> SimpleNamespace:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return SimpleNamespace(total_memory=memory)

    @staticmethod
    def memory_stats(device: Any = None) -> dict[str, int]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {
            "active_bytes.all.peak": peak,
            "reserved_bytes.all.peak": peak,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    @staticmethod
    def reset_peak_memory_stats(device: Any = None) -> None:
        """The kernel keeps one peak for the life of the process."""

    @staticmethod
    def empty_cache() -> None:
        """The CPU's allocator keeps no cache."""


def keep_freed_memory() -> None:
    """Makes glibc keep what a step frees for the next one: torch's CPU allocator has no cache.

    Otherwise large tensors are unmapped and mapped again every step, and the kernel clears their
    pages: with two ranks on two cores that was a third of BERT-tiny's step. Of no effect under
    another C library, or with MALLOC_MMAP_MAX_ or MALLOC_TRIM_THRESHOLD_ set.
    """
    if any(name in os.environ for name in ("MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_")):
        return
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX in malloc.h
        set_option(mmap_max, 0)
        set_option(trim_threshold, -1)  # never


def _use_cpu() -> None:
    late = [name for name in _BINDS_DEVICE_AT_IMPORT if name in sys.modules]
    assert not late, f"import torchtitan_ext.device before {', '.join(late)}"

    import torchtitan.distributed.parallel_dims as parallel_dims
    import torchtitan.tools.utils as utils

    utils.device_type = parallel_dims.device_type = "cpu"
    utils.device_module = CpuDeviceModule  # type: ignore[assignment]
    # torchtitan assumes an A100's peak for a device it doesn't know, and prints an invented MFU.
    utils.get_peak_flops = lambda device_name: math.inf


if DEVICE_TYPE == "cpu":
    _use_cpu()
