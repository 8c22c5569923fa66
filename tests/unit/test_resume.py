"""What is said before a run that can't go on from its checkpoints."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from torchtitan_ext.config.error import ConfigError
from torchtitan_ext.config.resume import check_resumable, complete_steps


def config(dump_folder: Path, **checkpoint: Any) -> Any:
    settings = {"enable": True, "folder": "checkpoint", "load_step": -1, "exclude_from_loading": []}
    return SimpleNamespace(
        job=SimpleNamespace(dump_folder=str(dump_folder)),
        checkpoint=SimpleNamespace(**(settings | checkpoint)),
    )


def save(dump_folder: Path, step: int, *, full: bool) -> None:
    state = {"norm.weight": torch.ones(2)}
    if full:
        state["optimizer.state.norm.weight.exp_avg"] = torch.ones(2)
    dcp.save(state, checkpoint_id=dump_folder / "checkpoint" / f"step-{step}", no_dist=True)


def test_full_checkpoint_can_be_resumed(tmp_path: Path) -> None:
    save(tmp_path, 5, full=True)
    check_resumable(config(tmp_path), 1)
    check_resumable(config(tmp_path, load_step=5), 1)


@pytest.mark.parametrize("load_step", [-1, 10])
def test_model_alone_is_refused(tmp_path: Path, load_step: int) -> None:
    save(tmp_path, 5, full=True)
    save(tmp_path, 10, full=False)
    with pytest.raises(ConfigError, match=r"load_step = .*step-10 holds the model alone"):
        check_resumable(config(tmp_path, load_step=load_step), 1)
    check_resumable(config(tmp_path, load_step=5), 1)
    check_resumable(config(tmp_path, exclude_from_loading=["optimizer"]), 1)


def test_other_number_of_data_ranks_is_refused(tmp_path: Path) -> None:
    state = {"optimizer.state.x": torch.ones(2)}
    state |= {f"dataloader.dp_rank_{rank}": torch.ones(1) for rank in range(2)}
    dcp.save(state, checkpoint_id=tmp_path / "checkpoint" / "step-5", no_dist=True)
    check_resumable(config(tmp_path), 2)
    for num_ranks in (1, 4):
        with pytest.raises(ConfigError, match=rf"each of 2 data .* this run has {num_ranks}; use"):
            check_resumable(config(tmp_path), num_ranks)
    check_resumable(config(tmp_path, exclude_from_loading=["dataloader"]), 4)


def test_seed_checkpoint_needs_no_optimizer(tmp_path: Path) -> None:
    save(tmp_path, 0, full=False)
    check_resumable(config(tmp_path), 1)


def test_missing_step_is_refused_with_those_that_exist(tmp_path: Path) -> None:
    for step in (5, 10):
        save(tmp_path, step, full=True)
    with pytest.raises(ConfigError, match=r"load_step = 7: .* it has 5, 10"):
        check_resumable(config(tmp_path, load_step=7), 1)


def test_step_of_a_folder_without_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"load_step = 7: .* it has none"):
        check_resumable(config(tmp_path, load_step=7), 1)


def test_checkpoint_that_was_cut_short_does_not_count(tmp_path: Path) -> None:
    save(tmp_path, 5, full=True)
    save(tmp_path, 10, full=False)
    (tmp_path / "checkpoint" / "step-10" / ".metadata").unlink()
    assert complete_steps(tmp_path / "checkpoint") == [5]
    check_resumable(config(tmp_path), 1)


def test_without_checkpoints_there_is_nothing_to_check(tmp_path: Path) -> None:
    check_resumable(config(tmp_path), 1)
    (tmp_path / "checkpoint").mkdir()
    check_resumable(config(tmp_path), 1)
    save(tmp_path, 10, full=False)
    check_resumable(config(tmp_path, enable=False), 1)
