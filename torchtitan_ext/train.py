"""Entry point of a rank: ``torchrun -m torchtitan_ext.train [--section.key=value ...]``."""

import os
import sys

from . import device  # isort:skip  comes before any other part of torchtitan

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record
from torchtitan.config import JobConfig
from torchtitan.tools.logging import init_logger, logger

from .config.error import ConfigError
from .config.load import load_job_config, save_resolved_config
from .launch import ignore_harmless_warnings
from .trainer import ExtTrainer


@record
def main() -> None:
    """Trains as the flags and the TOML say. Exits 2 if the configuration is refused."""
    init_logger()
    ignore_harmless_warnings()
    world_size = int(os.environ["WORLD_SIZE"])
    try:
        job_config = load_job_config(
            sys.argv[1:], world_size=world_size, device_type=device.DEVICE_TYPE
        )
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    run(job_config)


def run(job_config: JobConfig) -> None:
    """Trains, or writes a seed checkpoint, and leaves no process group behind."""
    if os.environ["RANK"] == "0":
        path = os.path.join(job_config.job.dump_folder, "config.toml")
        save_resolved_config(job_config, path)
    trainer = None
    try:
        trainer = ExtTrainer(job_config)
        if job_config.checkpoint.create_seed_checkpoint:
            trainer.checkpointer.save(curr_step=0, last_step=True)
            logger.info("Created seed checkpoint")
        else:
            trainer.train()
    finally:
        if trainer is not None:
            trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
