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
    step = resumes_after(config)
    if step > 0:  # one of step 0 is a seed for the model's weights, and loaded as that
        _check_contents(checkpoint, folder / f"step-{step}", num_data_ranks)


def resumes_after(config: Any) -> int:
    """The step of the checkpoint that a run starts from; 0 if from none."""
    checkpoint = config.checkpoint
    folder = Path(config.job.dump_folder) / checkpoint.folder
    if not checkpoint.enable or not folder.is_dir():
        return 0
    steps = complete_steps(folder)
    return max(steps, default=0) if checkpoint.load_step == -1 else checkpoint.load_step


def _check_contents(settings: Any, checkpoint: Path, num_data_ranks: int) -> None:
    """Check that a checkpoint holds what [checkpoint] loads from it."""
    keys = _keys(checkpoint)
    has_optimizer = any(key.startswith("optimizer.") for key in keys)
    if "optimizer" not in settings.exclude_from_loading and not has_optimizer:
        raise refusal(
            "checkpoint.load_step",
            settings.load_step,
            f"{checkpoint} holds the model alone (last_save_model_only = true), so the run "
            "can't go on from it; load an earlier step, or start a run in another dump folder "
            "with checkpoint.initial_load_path",
        )
    places = sum(key.startswith("dataloader.dp_rank_") for key in keys)
    if "dataloader" not in settings.exclude_from_loading and places not in (0, num_data_ranks):
        raise refusal(
            "checkpoint.load_step",
            settings.load_step,
            f"{checkpoint} has a place in the data for each of {places} data parallel ranks, and "
            f"this run has {num_data_ranks}; use as many, or start over with the data by "
            'checkpoint.exclude_from_loading = ["dataloader"]',
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


def _keys(checkpoint: Path) -> list[str]:
    if not (checkpoint / ".metadata").is_file():  # Hugging Face's format has weights only
        return []
    from torch.distributed.checkpoint import FileSystemReader

    return list(FileSystemReader(checkpoint).read_metadata().state_dict_metadata)
