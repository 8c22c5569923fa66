"""Tensor and context parallelism: what is reported, sent, checkpointed and resumed."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from tests import tiny
from tests.distributed.test_pipeline import REPORT, assert_same_report, report_of, train_as_a_user
from tests.ranks import run_ranks
from torchtitan_ext.config.load import load_job_config
from torchtitan_ext.verify.recompute import for_comparison
from torchtitan_ext.verify.step import record_step

TP = "--parallelism.tensor_parallel_degree=2"
CP = "--parallelism.context_parallel_degree=2"
EP = "--parallelism.expert_parallel_degree=2"
ALLTOALL = "--parallelism.context_parallel_rotate_method=alltoall"
FULL = "--activation_checkpoint.mode=full"
OP = ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"]
COUNTS = ["all_gather", "reduce_scatter", "all_to_all", "all_reduce"]


# Longer than what is trained on.
REPORT = [*REPORT, "--validation.seq_len=48"]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("one")
    run_ranks(train_as_a_user, 1, REPORT, str(folder))
    return folder


@pytest.mark.parametrize("flags", [[TP, EP], [CP, FULL]], ids=["tp", "cp"])
def test_reports_are_those_of_one_process(
    one_process: Path, tmp_path: Path, flags: list[str]
) -> None:
    """Losses, tokens seen, experts' load and validation."""
    for _, console in run_ranks(train_as_a_user, 2, [*flags, *REPORT], str(tmp_path)):
        assert "Mixed precision training is disabled" not in console
    assert_same_report(report_of(tmp_path), report_of(one_process))


def collectives_of_layers(
    flags: list[str], folder: str
) -> dict[str, tuple[dict[str, int], dict[str, int], dict[str, int]]]:
    """Of this rank, by block: collectives of its forward, recomputation and backward."""
    tiny.FLAVORS.add("tiny", tiny.tiny_args)
    args = [f"--job.config_file={tiny.CONFIG}", f"--job.dump_folder={folder}", *flags]
    config = load_job_config(args, world_size=2, device_type="cpu")
    blocks = record_step(for_comparison(config), inside_blocks=True).blocks
    num_ranks = torch.distributed.get_world_size()

    def per_rank(counts: dict[str, int]) -> dict[str, int]:
        return {kind: counts[kind] // num_ranks for kind in COUNTS if counts.get(kind)}

    found = {}
    for name, block in blocks.items():
        forward, again = (
            sum((visit.collectives for visit in visits), Counter[str]())
            for visits in (block.forwards, block.recomputations)
        )
        found[name] = (per_rank(forward), per_rank(again), per_rank(block.backward_collectives))
    return found


@pytest.mark.parametrize(
    ("flags", "forward", "again", "backward"),
    [
        # Attention and the feed-forward, each a gather and a sum; five whole parameters in MoE.
        (
            [TP, EP, FULL],
            {"all_gather": 2, "reduce_scatter": 2, "all_to_all": 3},
            {"all_gather": 2, "reduce_scatter": 2, "all_to_all": 2},
            {"all_gather": 2, "reduce_scatter": 2, "all_to_all": 2, "all_reduce": 7},
        ),
        # What regions have gathered is gathered again, what was summed or sent is kept.
        (
            [TP, EP, *OP],
            {"all_gather": 2, "reduce_scatter": 2, "all_to_all": 3},
            {"all_gather": 2},
            {"all_gather": 2, "reduce_scatter": 2, "all_to_all": 2, "all_reduce": 7},
        ),
        # Routed and shared experts share a region.
        (
            [TP, FULL],
            {"all_gather": 2, "reduce_scatter": 2},
            {"all_gather": 2, "reduce_scatter": 2},
            {"all_gather": 2, "reduce_scatter": 2, "all_reduce": 7},
        ),
        ([CP, FULL], {"all_gather": 1}, {"all_gather": 1}, {"reduce_scatter": 1}),
        ([CP, ALLTOALL, FULL], {"all_to_all": 4}, {"all_to_all": 4}, {"all_to_all": 4}),
    ],
    ids=["tp-full", "tp-op", "tp-etp", "cp-allgather", "cp-alltoall"],
)
def test_collectives_of_a_moe_layer(
    tmp_path: Path,
    flags: list[str],
    forward: dict[str, int],
    again: dict[str, int],
    backward: dict[str, int],
) -> None:
    found = run_ranks(collectives_of_layers, 2, flags, str(tmp_path))[0]["layers.2"]
    fsdp = {"all_gather", "reduce_scatter", "all_to_all"} if CP in flags else set()
    assert found[:2] == (forward, again)
    # FSDP's own come on top with context parallelism: at least these.
    for kind, number in backward.items():
        assert found[2].get(kind, 0) >= number if kind in fsdp else found[2].get(kind) == number


def trained(flags: list[str], folder: str, resume_at: int) -> tuple[list[float], list[float]]:
    """Losses and norms of four steps, of which the last ones are another trainer's."""
    losses: list[float] = []
    norms: list[float] = []
    for first, last in ((0, resume_at), (resume_at, 4)):
        if first == last:
            continue
        trainer = tiny.build_trainer(flags, folder)
        if first:
            trainer.checkpointer.load(step=-1)
        run = tiny.observe(trainer)
        for step in tiny.steps(trainer, last - first):
            assert step > first
        if last < 4:
            trainer.checkpointer.save(last, last_step=True)
        losses, norms = losses + run.losses, norms + run.grad_norms
        trainer.close()
    return losses, norms


@pytest.mark.parametrize("flags", [[TP, EP], [CP, EP]], ids=["tp", "cp"])
def test_resumed_run_is_the_uninterrupted_one(tmp_path: Path, flags: list[str]) -> None:
    flags = [*flags, "--checkpoint.enable", "--checkpoint.interval=100"]
    flags += ["--checkpoint.async_mode=disabled", "--checkpoint.no-last_save_model_only"]
    whole, parts = (run_ranks(trained, 2, flags, str(tmp_path / str(at)), at)[0] for at in (4, 2))
    assert parts == whole
