"""Whether a run can go on from the checkpoints that its dump folder holds."""

import re
from pathlib import Path
from typing import Any

from torchtitan_ext.config.error import refusal

# Of which one is written at the end of a save.
_COMPLETE = (".metadata", "model.safetensors.index.json")


def check_resumable(config: Any, num_data_ranks: int) -> None:
    """Check that the checkpoint a run would resume from exists, and can serve it.

    It has to hold more than the model, and a place in the data for each data parallel rank.

    Raises ConfigError.
    """
    checkpoint = config.checkpoint
    if not checkpoint.enable:
        return
    folder = Path(config.job.dump_folder) / checkpoint.folder
    steps = complete_steps(folder) if folder.is_dir() else []
    if checkpoint.load_step != -1 and checkpoint.load_step not in steps:
        found = ", ".join(map(str, steps)) or "none"
        raise refusal(
            "checkpoint.load_step",
            checkpoint.load_step,
            f"{folder} has no complete checkpoint of that step; it has {found}",
        )
    if not steps:
        return
    step = steps[-1] if checkpoint.load_step == -1 else checkpoint.load_step
    # A checkpoint of step 0 is a seed for the model's weights, and loaded as that.
    needs_optimizer = step > 0 and "optimizer" not in checkpoint.exclude_from_loading
    if needs_optimizer and not _holds_optimizer(folder / f"step-{step}"):
        raise refusal(
            "checkpoint.load_step",
            checkpoint.load_step,
            f"{folder}/step-{step} holds the model alone (last_save_model_only = true), so the run "
            "can't go on from it; load an earlier step, or start a run in another dump folder "
            "with checkpoint.initial_load_path",
        )
    loads_data = step > 0 and "dataloader" not in checkpoint.exclude_from_loading
    places = _num_data_ranks(folder / f"step-{step}")
    if loads_data and places not in (0, num_data_ranks):
        raise refusal(
            "checkpoint.load_step",
            checkpoint.load_step,
            f"{folder}/step-{step} has a place in the data for each of {places} data parallel "
            f"ranks, and this run has {num_data_ranks}; use as many, or start over with the data "
            'by checkpoint.exclude_from_loading = ["dataloader"]',
        )


def complete_steps(folder: Path) -> list[int]:
    """The steps of the checkpoints in ``folder`` whose saving has ended, in order."""
    steps = []
    for entry in folder.iterdir():
        match = re.fullmatch(r"step-(\d+)", entry.name)
        # Written last, so a save that was cut short has none.
        if match and any((entry / name).is_file() for name in _COMPLETE):
            steps.append(int(match[1]))
    return sorted(steps)


def _holds_optimizer(checkpoint: Path) -> bool:
    return any(key.startswith("optimizer.") for key in _keys(checkpoint))


def _num_data_ranks(checkpoint: Path) -> int:
    """Data parallel ranks whose place in the data is saved."""
    return sum(key.startswith("dataloader.dp_rank_") for key in _keys(checkpoint))


def _keys(checkpoint: Path) -> list[str]:
    if not (checkpoint / ".metadata").is_file():  # Hugging Face's format has weights only
        return []
    from torch.distributed.checkpoint import FileSystemReader

    return list(FileSystemReader(checkpoint).read_metadata().state_dict_metadata)
