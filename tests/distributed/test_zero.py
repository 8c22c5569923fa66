"""ZeRO stages and DDP: one gradient, one norm, one checkpoint; less memory by the paper's numbers.

BERT without dropout, as data ranks draw masks of their own. Sequences are padded, so ranks and
micro-batches have different numbers of masked tokens.
"""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.bert import CONFIG, NO_DROPOUT, PLAIN
from tests.ranks import run_ranks
from tests.tiny import (
    Run,
    assert_same,
    build_trainer,
    finish,
    full_tensors,
    observe,
    steps,
    train,
)

GLOBAL_BATCH = 16
FLAGS = [
    *CONFIG,
    f"--training.global_batch_size={GLOBAL_BATCH}",
    "--training.seq_len=32",
    "--mlm.no-packing",
    "--lr_scheduler.warmup_steps=0",
    "--training.max_norm=inf",
    "--metrics.log_freq=1",
    *NO_DROPOUT,
]
DDP = "ddp"


def flags_of(stage: int | str, num_ranks: int, micro_batches: int, optimizer: str) -> list[str]:
    flags = [*FLAGS, f"--training.local_batch_size={GLOBAL_BATCH // (num_ranks * micro_batches)}"]
    if stage == DDP:
        replicas = f"--parallelism.data_parallel_replicate_degree={num_ranks}"
        flags += ["--zero.stage=3", replicas]
    else:
        flags += [f"--zero.stage={stage}"]
    if optimizer == "SGD":
        return [*flags, "--optimizer.name=SGD", "--optimizer.lr=0.1"]
    # Adam divides by the gradient's size: a tiny eps would turn rounding into different steps.
    return [*flags, "--optimizer.eps=1e-4"]


def train_and_hash(flags: list[str], folder: str) -> tuple[Run, list[str], dict[str, Any]]:
    """A run, a hash of this rank's view of the parameters after each step, and what it held."""
    hashes: list[str] = []
    kept: dict[str, Any] = {}

    def before_step(trainer: Any, step: int) -> None:
        kept["trainer"] = trainer
        digest = hashlib.sha256()
        for tensor in full_tensors(trainer.model_parts[0]).values():
            digest.update(tensor.numpy().tobytes())
        hashes.append(digest.hexdigest())

    run = train(flags, folder, num_steps=3, before_step=before_step)
    return run, hashes, vars(kept["trainer"].state_bytes)  # type: ignore[return-value]


def assert_same_bert(run: Run, reference: Run) -> None:
    """Losses, unclipped gradients, their norm, and new weights, to 1e-5."""
    for compared in (run, reference):
        # Softmax ignores the keys' bias: its gradient is rounding around zero, and is left out.
        for tensors in [*compared.gradients, compared.weights]:
            for name in [name for name in tensors if name.endswith("wk.bias")]:
                assert tensors.pop(name).abs().max() < 1e-5
        # The norm as logged is torch's sum in float32: on a CPU up to 1e-4 off for an embedding.
        exact = [float(norm_of(gradients)) for gradients in compared.gradients]
        torch.testing.assert_close(compared.grad_norms, exact, rtol=1e-4, atol=0)
        compared.grad_norms = exact
    assert_same(run, reference, tolerance=1e-5)


def norm_of(gradients: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.stack([gradient.double().norm() for gradient in gradients.values()]).norm()


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """One process and one micro-batch, by optimizer."""
    folder = str(tmp_path_factory.mktemp("reference"))
    return {
        name: run_ranks(train_and_hash, 1, [*flags_of(3, 1, 1, name), *PLAIN], folder)[0][0]
        for name in ("AdamW", "SGD")
    }


@pytest.mark.parametrize(
    ("stage", "num_ranks", "micro_batches", "optimizer"),
    [
        *[(stage, 2, 4, "SGD") for stage in (1, 2, 3, DDP)],
        *[(stage, 4, 1, "AdamW") for stage in (1, 2, 3, DDP)],
        (1, 4, 4, "AdamW"),
        (2, 4, 4, "AdamW"),
        (1, 2, 1, "SGD"),
        *[
            pytest.param(stage, num_ranks, micro_batches, optimizer, marks=pytest.mark.slow)
            for stage in (1, 2, 3, DDP)
            for num_ranks in (2, 4)
            for micro_batches in (1, 4)
            for optimizer in ("AdamW", "SGD")
        ],
    ],
)
def test_gradients_norms_and_weights_are_those_of_one_process(
    tmp_path: Path,
    references: dict[str, Run],
    stage: int | str,
    num_ranks: int,
    micro_batches: int,
    optimizer: str,
) -> None:
    flags = [*flags_of(stage, num_ranks, micro_batches, optimizer), *PLAIN]
    ranks = run_ranks(train_and_hash, num_ranks, flags, str(tmp_path))
    assert_same_bert(ranks[0][0], references[optimizer])
    hashes = [rank_hashes for _, rank_hashes, _ in ranks]
    assert len(set(hashes[0])) == 3, "a step changes the weights"
    assert all(rank_hashes == hashes[0] for rank_hashes in hashes)


@pytest.mark.parametrize(("stage", "micro_batches"), [(1, 4), (1, 1), (2, 4), (3, 4), (DDP, 4)])
def test_bytes_are_those_of_the_paper(tmp_path: Path, stage: int | str, micro_batches: int) -> None:
    num_ranks = 2
    flags = [*flags_of(stage, num_ranks, micro_batches, "AdamW"), *PLAIN]
    (run, _, held), _ = run_ranks(train_and_hash, num_ranks, flags, str(tmp_path))
    full = sum(4 * weight.numel() for weight in run.weights.values())
    share = full / num_ranks
    blocks = sum(4 * w.numel() for name, w in run.weights.items() if name.startswith("layers."))
    expected = {
        1: {"shards": share, "gathered": full, "gradients": full, "optimizer": 2 * share},
        2: {"shards": share, "gathered": full, "gradients": share, "optimizer": 2 * share},
        # What the embedding and the tied head share stays for the whole forward.
        3: {"shards": share, "gathered": full - blocks, "gradients": share, "optimizer": 2 * share},
        # FSDP2's replicate computes with a copy, even in the same type.
        DDP: {"shards": full, "gathered": full, "gradients": full, "optimizer": 2 * full},
    }[stage]
    if stage == 1 and micro_batches == 1:
        expected["gradients"] = share  # reduced as soon as they are there
    for part, size in expected.items():
        # FSDP2 pads what it can't split evenly.
        assert held[part] == pytest.approx(size, rel=0.01, abs=16), part


def save_and_load(flags: list[str], folder: str, stages: list[list[str]]) -> list[Run | None]:
    """Trains 2 steps and saves, by the first flags; then loads and trains 2 more, by each."""
    first = build_trainer([*flags, *stages[0]], folder)
    for step in steps(first, 2):
        del step
    first.checkpointer.save(2, last_step=True)
    first.close()
    runs = []
    for further in stages:
        trainer = build_trainer([*flags, *further], folder)
        trainer.checkpointer.load(step=2)
        run = observe(trainer)
        for step in steps(trainer, 2):
            assert step > 2
        runs.append(finish(trainer, run))
        dist.barrier()
    return runs


def test_every_stage_goes_on_from_the_checkpoint_of_another(tmp_path: Path) -> None:
    stages = [flags_of(stage, 2, 4, "AdamW") for stage in (1, 2, 3, DDP)]
    checkpoint = ["--checkpoint.enable", "--checkpoint.interval=2"]
    runs = run_ranks(save_and_load, 2, [*FLAGS, *PLAIN, *checkpoint], str(tmp_path), stages)[0]
    assert len({tuple(run.losses) for run in runs}) <= 2
    for run in runs[1:]:
        assert_same_bert(run, runs[0])


def hashes_of_masks(flags: list[str], folder: str) -> list[str]:
    """The hash of the next dropout mask of this rank, before each step."""
    from torchtitan_ext.components.random_state import mask_hash, seed_step

    trainer = build_trainer(flags, folder)
    hashes = []
    for step in steps(trainer, 3):
        seed_step(trainer.seed, trainer.place, step)
        hashes.append(mask_hash())
    torch.rand(())
    return hashes


@pytest.mark.parametrize(
    "degrees",
    [
        {},
        {"data_parallel_replicate_degree": 2},
        {"tensor_parallel_degree": 2, "context_parallel_degree": 2},
    ],
)
def test_every_rank_and_step_has_masks_of_its_own(tmp_path: Path, degrees: dict[str, int]) -> None:
    flags = [*FLAGS, *PLAIN, "--training.local_batch_size=1", "--zero.stage=3"]
    flags += [f"--parallelism.{key}={value}" for key, value in degrees.items()]
    ranks = run_ranks(hashes_of_masks, 4, flags, str(tmp_path))
    assert len({mask for hashes in ranks for mask in hashes}) == 4 * 3
