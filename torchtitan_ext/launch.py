"""Starts a script on several ranks of this machine, by torchrun."""

import os
import subprocess
import sys
from typing import Any

from .device import DEVICE_TYPE


def load_config(flags: list[str], world_size: int) -> Any:
    """The checked configuration of ``flags`` on this machine's device; raises ConfigError."""
    from .config.load import load_job_config  # takes seconds

    return load_job_config(flags, world_size=world_size, device_type=DEVICE_TYPE)


def is_rank() -> bool:
    """Whether this process was started as a rank by torchrun."""
    return "RANK" in os.environ


def run_on_ranks(script: str, args: list[str], num_ranks: int) -> str:
    """Runs ``script`` on ``num_ranks`` ranks; returns what rank 0 printed on stdout.

    Raises:
        subprocess.CalledProcessError: some rank failed; its output has been shown.
    """
    environment = dict(os.environ)
    if DEVICE_TYPE == "cpu":
        # Ranks that each take all cores would wait for one another at every operator.
        threads = max(1, len(os.sched_getaffinity(0)) // num_ranks)
        environment.setdefault("OMP_NUM_THREADS", str(threads))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={num_ranks}", "--local_ranks_filter=0", script, *args]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout
