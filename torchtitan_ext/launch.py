"""Starts a script on several ranks of this machine, by torchrun."""

import argparse
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .config.error import ConfigError

_OF_TORCHRUN = (
    *("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)
"""How the names begin of the variables that it sets."""

# Warnings that come with every run and that nobody needs to act on.
_HARMLESS_WARNINGS = (
    "'set_vital' is deprecated",  # torchdata's own call
    "DTensor manual_seed",  # initial weights don't come from DTensor's generator
    "DTensor random operators",
    # torchtitan asks for autocast in float32, which then is off, as it should be
    "In CPU autocast, but the target dtype is not supported",
    "Set timeout is now only supported",  # torchtitan's stand-in for an axis out of use
    ".*returned a view tensor. An in-place op",  # nothing changes logits in place
)


def ignore_harmless_warnings() -> None:
    """For a process that trains."""
    for message in _HARMLESS_WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    # Says at each of several meshes that a norm, or a gathered tensor, takes two collectives.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def load_config(flags: list[str], world_size: int) -> Any:
    """The checked configuration of ``flags`` on this machine's device; raises ConfigError."""
    from . import device  # takes seconds, and comes before all of torchtitan
    from .config.load import load_job_config

    return load_job_config(flags, world_size=world_size, device_type=device.DEVICE_TYPE)


def is_rank() -> bool:
    """Whether this process was started as a rank by torchrun."""
    return "RANK" in os.environ


def lead_torchrun(options: argparse.Namespace) -> bool:
    """For a script that starts ranks of its own: what to do if torchrun has started it.

    The first rank then goes on alone, as if called with ``--ngpu`` by the number of ranks; the
    others have nothing to do.

    Returns:
        Whether this process is to go on.

    Raises:
        ConfigError: the ranks are on several hosts.
    """
    if not is_rank():
        return True
    is_first, options.ngpu = os.environ["RANK"] == "0", int(os.environ["WORLD_SIZE"])
    if int(os.environ["LOCAL_WORLD_SIZE"]) != options.ngpu:
        raise ConfigError("torchrun: this command works on the ranks of one host")
    for name in list(os.environ):
        if name.startswith(_OF_TORCHRUN):
            del os.environ[name]
    return is_first


def run_on_ranks(script: str, args: list[str], num_ranks: int) -> str:
    """Runs ``script`` on ``num_ranks`` ranks; returns what rank 0 printed on stdout.

    Raises:
        subprocess.CalledProcessError: some rank failed; its output has been shown.
    """
    with start_on_ranks(script, args, num_ranks, stdout=subprocess.PIPE) as ranks:
        output, _ = ranks.communicate()
    if ranks.returncode:
        raise subprocess.CalledProcessError(ranks.returncode, script)
    return output


@contextmanager
def start_on_ranks(
    script: str, args: list[str], num_ranks: int, *, stdout: int
) -> Iterator[subprocess.Popen[str]]:
    """Starts ``script`` on ``num_ranks`` ranks; they are ended with the context, if they run still.

    Args:
        stdout: of rank 0, as for Popen.
    """
    from .device import DEVICE_TYPE

    environment = dict(os.environ)
    if DEVICE_TYPE == "cpu":
        # Ranks that each take all cores would wait for one another at every operator.
        threads = max(1, len(os.sched_getaffinity(0)) // num_ranks)
        environment.setdefault("OMP_NUM_THREADS", str(threads))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={num_ranks}", "--local_ranks_filter=0", script, *args]
    with subprocess.Popen(command, env=environment, stdout=stdout, text=True) as ranks:
        try:
            yield ranks
        finally:
            ranks.terminate()  # torchrun then ends them
