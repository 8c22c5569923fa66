"""Runs whose routers do not choose: replayed records, and loads of a known shape."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.ranks import run_ranks
from tests.tiny import (
    SGD,
    Run,
    assert_same,
    build_trainer,
    finish,
    moe_layers,
    observe,
    steps,
    train,
)

EP2 = ["--parallelism.expert_parallel_degree=2", "--training.local_batch_size=4"]
FULL = ["--activation_checkpoint.mode=full"]
AOT_EAGER = ["--compile.enable", "--compile.components=model", "--compile.backend=aot_eager"]
TOKENS = 8 * 32


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """A run on two ranks of expert parallelism, and the folder with its record."""
    folder = tmp_path_factory.mktemp("recorded")
    flags = [*EP2, *SGD, "--routing.record", "--training.steps=2"]
    return folder, run_ranks(train, 2, flags, str(folder))[0]


def replay(recorded: tuple[Path, Run], *flags: str) -> list[str]:
    return [f"--routing.replay={recorded[0]}", "--training.steps=2", *SGD, *flags]


@pytest.mark.parametrize("wrap", [[], FULL, [*FULL, *AOT_EAGER]], ids=["none", "full", "compiled"])
def test_replay_gives_the_recorded_run(
    recorded: tuple[Path, Run], tmp_path: Path, wrap: list[str]
) -> None:
    run = run_ranks(train, 2, replay(recorded, *EP2, *wrap), str(tmp_path))[0]
    if not any("compile" in flag for flag in wrap):
        assert run.losses == recorded[1].losses  # in every bit
        assert run.grad_norms == recorded[1].grad_norms
    assert_same(run, recorded[1])
    assert run.graph_breaks == {}


def test_replay_on_another_layout_gives_the_recorded_run(
    recorded: tuple[Path, Run], tmp_path: Path
) -> None:
    accumulate = ["--training.local_batch_size=2", "--training.global_batch_size=8"]
    run = run_ranks(train, 1, replay(recorded, *accumulate), str(tmp_path))[0]
    assert_same(run, recorded[1])


LAYOUTS = {
    "tp2": (2, ["--parallelism.tensor_parallel_degree=2", "--training.local_batch_size=8"]),
    "tp2_ep2": (
        2,
        [
            "--parallelism.tensor_parallel_degree=2",
            "--parallelism.expert_parallel_degree=2",
            "--training.local_batch_size=8",
        ],
    ),
    "cp2_tp2_ep4": (
        4,
        [
            "--parallelism.context_parallel_degree=2",
            "--parallelism.tensor_parallel_degree=2",
            "--parallelism.expert_parallel_degree=4",
            "--training.local_batch_size=8",
        ],
    ),
    "pp2": (
        2,
        [
            "--parallelism.pipeline_parallel_degree=2",
            "--training.local_batch_size=4",
            "--training.global_batch_size=8",
        ],
    ),
    "pp2_cp2": (
        4,
        [
            "--parallelism.pipeline_parallel_degree=2",
            "--parallelism.context_parallel_degree=2",
            "--training.local_batch_size=8",
        ],
    ),
}
"""Ranks that share sequences; each routes a part of the tokens, or in a part of the layers."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_that_share_sequences_replay_and_record(
    recorded: tuple[Path, Run], tmp_path: Path, layout: str
) -> None:
    """With gates of their own they follow the record, and write the same one."""
    num_ranks, flags = LAYOUTS[layout]
    flags = [*replay(recorded, *flags), "--routing.record"]
    run = run_ranks(train_with_other_gates, num_ranks, flags, str(tmp_path))[0]
    assert run.counts == recorded[1].counts
    again, first = (decisions(folder) for folder in (tmp_path, recorded[0]))
    assert list(again) == list(range(2 * 8))  # of both steps
    assert all(torch.equal(again[i], first[i]) for i in first)


def decisions(folder: Path) -> dict[int, torch.Tensor]:
    """The recorded expert ids of each sequence, numbered through the steps."""
    rows = {}
    for path in (folder / "routing").glob("step-*/rank-*.safetensors"):
        record, step = load_file(path), int(path.parent.name.removeprefix("step-"))
        numbers = (8 * (step - 1) + number for number in record["number"].tolist())
        rows |= dict(zip(numbers, record["expert_ids"], strict=True))
    return dict(sorted(rows.items()))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_replay_on_ranks_that_share_sequences_gives_the_recorded_run(
    recorded: tuple[Path, Run], tmp_path: Path, layout: str
) -> None:
    num_ranks, flags = LAYOUTS[layout]
    run = run_ranks(train, num_ranks, replay(recorded, *flags), str(tmp_path))[0]
    assert_same(run, recorded[1])


def train_with_other_gates(flags: list[str], folder: str) -> Run | None:
    trainer = build_trainer(flags, folder)
    for moe in moe_layers(trainer):
        torch.nn.init.normal_(moe.router.gate.weight, std=1.0)
    run = observe(trainer)
    for _ in steps(trainer, 2):
        pass
    return finish(trainer, run)


def test_replay_does_not_ask_the_routers(recorded: tuple[Path, Run], tmp_path: Path) -> None:
    batch = "--training.local_batch_size=8"
    run = run_ranks(train_with_other_gates, 1, replay(recorded, batch), str(tmp_path))[0]
    assert run.counts == recorded[1].counts
    free = run_ranks(train_with_other_gates, 1, [batch, *SGD], str(tmp_path))[0]
    assert free.counts != recorded[1].counts


def test_replay_of_other_data_fails(recorded: tuple[Path, Run], tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("Other words than those of the record. " * 400)
    flags = replay(recorded, f"--training.dataset_path={tmp_path}", "--training.local_batch_size=8")
    with pytest.raises(RuntimeError, match="sequence 0 of step 1 has other tokens"):
        run_ranks(train, 1, flags, str(tmp_path))


def expected_counts(preset: str, step: int) -> list[int]:
    """Of a layer, all ranks together."""
    if preset == "bursts":
        preset = "hot_rank" if step % 4 == 0 else "balanced"
    return {
        "balanced": [TOKENS * 3 // 8] * 8,
        "hot_expert": [TOKENS, 74, 73, 73, 73, 73, 73, 73],
        "hot_rank": [TOKENS * 3 // 4] * 4 + [0] * 4,
        "empty_rank": [TOKENS * 3 // 4] * 4 + [0] * 4,
    }[preset]


@pytest.mark.parametrize(
    "preset",
    [
        "balanced",
        pytest.param("hot_expert", marks=pytest.mark.slow),
        pytest.param("hot_rank", marks=pytest.mark.slow),
        "empty_rank",
        "bursts",  # holds a hot rank, too
    ],
)
def test_preset_sets_the_load_and_compiles_once(tmp_path: Path, preset: str) -> None:
    flags = [*EP2, *FULL, *AOT_EAGER, f"--routing.preset={preset}"]
    run = run_ranks(train, 2, flags, str(tmp_path), num_steps=5)[0]
    for step, counts in enumerate(run.counts, start=1):
        assert counts == [expected_counts(preset, step)] * 2
    assert run.num_graphs[0] > 0
    assert run.num_graphs[-1] == run.num_graphs[0]  # no other load compiles anew


def test_forced_balance_of_torchtitan_is_the_balanced_preset(tmp_path: Path) -> None:
    run = run_ranks(train, 2, [*EP2, "--debug.moe_force_load_balance"], str(tmp_path))[0]
    assert run.counts == [[expected_counts("balanced", 1)] * 2] * 2
