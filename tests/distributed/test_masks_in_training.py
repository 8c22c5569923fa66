"""BERT's trainer with dropout: what is recomputed, compiled or resumed draws the same masks."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from tests.bert import CONFIG, PLAIN
from tests.ranks import run_ranks
from tests.tiny import build_trainer, finish, observe, steps

# A raised learning rate: a gradient that is wrong anywhere shows in the next losses.
FLAGS = [
    *CONFIG,
    "--training.local_batch_size=4",
    "--training.seq_len=32",
    "--metrics.log_freq=1",
    "--lr_scheduler.warmup_steps=10",
    "--optimizer.lr=2e-3",
    # Adam divides by the gradient's size: a tiny eps would turn rounding into different steps.
    "--optimizer.eps=1e-5",
]
FULL = ["--activation_checkpoint.mode=full"]
NONE = ["--activation_checkpoint.mode=none"]
OP = ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"]
COMPILED = ["--compile.enable", "--compile.components=model"]
EAGER = ["--compile.no-enable"]


def losses_of(flags: list[str], folder: str, num_steps: int) -> tuple[list[float], int]:
    counters.clear()
    trainer = build_trainer(flags, folder)
    run = observe(trainer)
    for step in steps(trainer, num_steps):
        assert step
    trainer.close()
    return run.losses, run.num_graphs[-1]


def train_bert(folder: Path, *flags: str, num_steps: int = 200) -> list[float]:
    losses, num_graphs = run_ranks(losses_of, 1, [*FLAGS, *flags], str(folder), num_steps)[0]
    assert (num_graphs > 0) == ("--compile.enable" in flags)
    return losses


@pytest.fixture(scope="module")
def compiled_losses(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return train_bert(tmp_path_factory.mktemp("compiled"), *COMPILED, *NONE)


@pytest.mark.parametrize("checkpoint", [FULL, OP], ids=["full", "op"])
def test_compiled_and_checkpointed_losses_are_those_without_checkpoint(
    tmp_path: Path, compiled_losses: list[float], checkpoint: list[str]
) -> None:
    losses = train_bert(tmp_path, *COMPILED, *checkpoint)
    torch.testing.assert_close(losses, compiled_losses, rtol=1e-6, atol=0)
    assert losses[-1] < losses[0] - 1


def test_compiled_losses_match_eager_ones_with_eager_random_numbers(tmp_path: Path) -> None:
    # Fused kernels round otherwise than eager ones; at this rate training does not enlarge that.
    slowly = "--optimizer.lr=2e-4"
    eager = train_bert(tmp_path, *EAGER, *FULL, slowly)
    matched = train_bert(tmp_path, *COMPILED, *FULL, slowly, "--layer_wrap.match_eager_rng")
    torch.testing.assert_close(matched, eager, rtol=1e-5, atol=0)
    # Without the option inductor draws masks of its own.
    own = train_bert(tmp_path, *COMPILED, *FULL, slowly, num_steps=20)
    assert (torch.tensor(own) - torch.tensor(eager[:20])).abs().max() > 1e-3


def resumed(flags: list[str], folder: str, stop_at: int, num_steps: int) -> Any:
    """Trains to ``stop_at`` and saves, then lets a new trainer go on from there."""
    first = build_trainer(flags, folder)
    for step in steps(first, stop_at):
        assert step
    first.checkpointer.save(stop_at, last_step=True)
    first.close()
    trainer = build_trainer(flags, folder)
    trainer.checkpointer.load(step=-1)
    run = observe(trainer)
    torch.rand(5)  # what else draws random numbers moves no mask
    for step in steps(trainer, num_steps - stop_at):
        assert step > stop_at
    return finish(trainer, run)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_resumed_run_draws_the_masks_of_the_uninterrupted_one(
    tmp_path: Path, num_ranks: int
) -> None:
    flags = [*FLAGS, *PLAIN, "--checkpoint.enable", "--checkpoint.interval=100"]
    flags += ["--checkpoint.async_mode=disabled"]
    whole = run_ranks(losses_of, num_ranks, flags, str(tmp_path / "whole"), 6)[0][0]
    rest = run_ranks(resumed, num_ranks, flags, str(tmp_path / "parts"), 3, 6)[0]
    assert rest.losses == whole[3:]
