"""Every layout, checkpoint policy and compilation computes what one eager process computes.

Real trainers run the same global batches from the same initial weights. Compared are losses,
gradient norms, every parameter's clipped gradient, the updated weights, and the experts' counts;
with AdamW, and with SGD, as Adam hides a gradient of the wrong scale.
"""

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.tiny import SGD, Run, assert_same, train

GLOBAL_BATCH = 8
GLOBAL = "--training.global_batch_size"

TP = {"tensor_parallel_degree": 2}
ETP = {"expert_parallel_degree": 2, "expert_tensor_parallel_degree": 2}
CP = {"context_parallel_degree": 2}
# ranks, and the degrees in force
LAYOUTS = {
    "one_rank": (1, {}),
    "fsdp2": (2, {}),
    "ddp2": (2, {"data_parallel_replicate_degree": 2}),
    "ep2": (2, {"expert_parallel_degree": 2}),
    "efsdp2_ep2": (4, {"expert_parallel_degree": 2}),
    "ep4": (4, {"expert_parallel_degree": 4}),
    "hsdp2x2": (4, {"data_parallel_replicate_degree": 2}),
    "hsdp2x2_ep2": (4, {"data_parallel_replicate_degree": 2, "expert_parallel_degree": 2}),
    "tp2": (2, TP),
    "tp2_ep2": (2, {**TP, "expert_parallel_degree": 2}),
    "fsdp2_tp2_ep2": (4, {**TP, "expert_parallel_degree": 2}),
    "fsdp2_tp2_ep4": (4, {**TP, "expert_parallel_degree": 4}),
    "fsdp2_tp2_ep2_etp2": (4, {**TP, **ETP}),
    "tp4_ep2": (4, {"tensor_parallel_degree": 4, "expert_parallel_degree": 2}),
    "hsdp_tp2_ep2": (4, {**TP, "data_parallel_replicate_degree": 2, "expert_parallel_degree": 2}),
    "cp2": (2, CP),
    "cp2_ep2": (2, {**CP, "expert_parallel_degree": 2}),
    "cp4": (4, {"context_parallel_degree": 4}),
    "cp2_tp2": (4, {**CP, **TP}),
    "cp2_tp2_ep4": (4, {**CP, **TP, "expert_parallel_degree": 4}),
    "cp2_tp2_ep2_etp2": (4, {**CP, **TP, **ETP}),
    "hsdp_cp2_ep2": (4, {**CP, "data_parallel_replicate_degree": 2, "expert_parallel_degree": 2}),
}
CHECKPOINTS = {
    "none": {"mode": "none"},
    "full": {"mode": "full"},
    "op": {"mode": "selective", "selective_ac_option": "op"},
    "every_2nd": {"mode": "selective", "selective_ac_option": "2"},
}


def run_tiny(
    folder: Path,
    layout: str,
    checkpoint: str,
    backend: str | None,
    optimizer: str,
    further_flags: Sequence[str] = (),
) -> Run:
    num_ranks, degrees = LAYOUTS[layout]
    sharing = degrees.get("tensor_parallel_degree", 1) * degrees.get("context_parallel_degree", 1)
    flags = [f"--training.local_batch_size={GLOBAL_BATCH * sharing // num_ranks}"]
    flags += [f"--parallelism.{key}={degree}" for key, degree in degrees.items()]
    flags += [
        f"--activation_checkpoint.{key}={value}" for key, value in CHECKPOINTS[checkpoint].items()
    ]
    if backend is not None:
        flags += ["--compile.enable", f"--compile.backend={backend}", "--compile.components=model"]
    flags += {
        "AdamW": [],
        "SGD": SGD,
    }[optimizer]
    flags += further_flags
    return run_ranks(train, num_ranks, flags, str(folder), timeout=600)[0]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """One process, no checkpoint, eager; by optimizer."""
    folder = tmp_path_factory.mktemp("reference")
    return {name: run_tiny(folder, "one_rank", "none", None, name) for name in ("AdamW", "SGD")}


# Every layout with every checkpoint policy is seen, eager.
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@pytest.mark.parametrize(
    ("layout", "checkpoint"),
    [
        ("one_rank", "full"),
        ("fsdp2", "none"),
        ("ddp2", "full"),
        ("ep2", "none"),
        ("ep2", "full"),
        ("ep2", "op"),
        ("ep2", "every_2nd"),
        ("efsdp2_ep2", "full"),
        ("ep4", "op"),
        ("hsdp2x2", "none"),
        ("hsdp2x2_ep2", "full"),
        ("tp2", "full"),
        ("fsdp2_tp2_ep2", "op"),
        ("fsdp2_tp2_ep2_etp2", "full"),
        pytest.param("tp4_ep2", "none", marks=pytest.mark.slow),
        pytest.param("cp2", "full", marks=pytest.mark.slow),
        ("cp2_tp2_ep4", "full"),
    ],
)
def test_eager_layout_equals_one_process(
    references: dict[str, Run], tmp_path: Path, layout: str, checkpoint: str, optimizer: str
) -> None:
    run = run_tiny(tmp_path, layout, checkpoint, None, optimizer)
    assert_same(run, references[optimizer])
    assert run.num_graphs[-1] == 0


@pytest.mark.parametrize(
    ("layout", "checkpoint", "backend"),
    [
        ("one_rank", "op", "aot_eager"),
        pytest.param("ep2", "none", "aot_eager", marks=pytest.mark.slow),
        ("ep2", "op", "aot_eager"),
        pytest.param("ep2", "every_2nd", "aot_eager", marks=pytest.mark.slow),
        ("hsdp2x2_ep2", "full", "aot_eager"),
        ("cp2_tp2_ep4", "op", "aot_eager"),
        pytest.param("tp2_ep2", "full", "inductor", marks=pytest.mark.slow),
        pytest.param("cp2_ep2", "full", "inductor", marks=pytest.mark.slow),
        ("ep2", "full", "inductor"),
    ],
)
def test_compiled_layout_equals_one_process(
    references: dict[str, Run], tmp_path: Path, layout: str, checkpoint: str, backend: str
) -> None:
    run = run_tiny(tmp_path, layout, checkpoint, backend, "SGD")
    assert_same(run, references["SGD"])
    assert run.num_graphs[-1] > 0
    assert run.graph_breaks == {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "checkpoint", "backend", "optimizer"),
    list(itertools.product(LAYOUTS, CHECKPOINTS, [None, "inductor"], ["AdamW", "SGD"])),
)
def test_product_equals_one_process(
    references: dict[str, Run],
    tmp_path: Path,
    layout: str,
    checkpoint: str,
    backend: str | None,
    optimizer: str,
) -> None:
    run = run_tiny(tmp_path, layout, checkpoint, backend, optimizer)
    assert_same(run, references[optimizer])
    assert (run.num_graphs[-1] > 0) == (backend is not None)


ALLTOALL = "--parallelism.context_parallel_rotate_method=alltoall"
WHOLE_LOGITS = "--parallelism.disable_loss_parallel"


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        ("cp2_ep2", [ALLTOALL]),
        ("cp2_tp2", [ALLTOALL, WHOLE_LOGITS, "--activation_checkpoint.mode=full"]),
        # A micro-batch is reduced at once, with stage 1 all of them are together.
        ("tp2_ep2", ["--training.local_batch_size=2", f"{GLOBAL}=8", "--zero.stage=1"]),
        ("cp2_ep2", ["--training.local_batch_size=2", f"{GLOBAL}=8"]),
    ],
)
def test_option_of_a_layout_changes_no_number(
    references: dict[str, Run], tmp_path: Path, layout: str, flags: list[str]
) -> None:
    assert_same(run_tiny(tmp_path, layout, "none", None, "SGD", flags), references["SGD"])


def test_sequence_that_does_not_divide_is_split_all_the_same(tmp_path: Path) -> None:
    """31 tokens over 2 and over 4 ranks: some have one more than others."""
    flags = ["--training.seq_len=31"]
    reference = run_ranks(train, 1, [*flags, *SGD], str(tmp_path))[0]
    for layout in ("fsdp2_tp2_ep4", "tp4_ep2"):
        assert_same(run_tiny(tmp_path, layout, "full", None, "SGD", flags), reference)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_sequence_for_the_fused_kernel_is_shared(tmp_path: Path, backend: str | None) -> None:
    """A rank's last queries have more keys than the explicit way takes, its first ones fewer."""
    flags = ["--training.seq_len=1040", "--training.local_batch_size=2", f"{GLOBAL}=2"]
    reference = run_ranks(train, 1, [*flags, *SGD], str(tmp_path))[0]
    run = run_tiny(tmp_path, "cp2_ep2", "full", backend, "SGD", flags)
    assert_same(run, reference)


def test_second_start_takes_no_graph_of_another_rank(
    references: dict[str, Run], tmp_path: Path
) -> None:
    """Of a compiled loss along the vocabulary; the first start fills the compiler's cache."""
    flags = ["--parallelism.tensor_parallel_degree=2", "--training.local_batch_size=8", *SGD]
    flags += ["--compile.enable", "--compile.components=loss"]
    for start in ("first", "second"):
        folder = str(tmp_path / start)
        run = run_ranks(train_with_cache, 2, flags, folder, str(tmp_path / "cache"), timeout=600)[0]
        assert_same(run, references["SGD"])


def train_with_cache(flags: list[str], folder: str, cache: str) -> Run:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    return train(flags, folder)


@pytest.mark.parametrize(
    ("num_ranks", "replicas"), [(4, 1), pytest.param(8, 2, marks=pytest.mark.slow)]
)
def test_experts_shared_by_ranks_equal_one_process(
    tmp_path: Path, num_ranks: int, replicas: int
) -> None:
    """Fewer experts than ranks: FSDP shards each expert along its second dim."""
    few = {"num_experts": 2, "top_k": 1, "num_expert_groups": 1, "num_limited_groups": 1}
    few |= {"route_norm": False}  # a single score over itself is 1, without a gradient
    flags = ["--optimizer.name=SGD", "--optimizer.lr=1.0"]
    local_batch_size = GLOBAL_BATCH // num_ranks
    sharded = ["--parallelism.expert_parallel_degree=2"]
    sharded += [f"--training.local_batch_size={local_batch_size}"]
    sharded += [f"--parallelism.data_parallel_replicate_degree={replicas}"]
    sharded += ["--activation_checkpoint.mode=full"]
    reference = run_ranks(train, 1, flags, str(tmp_path), **few)[0]
    run = run_ranks(train, num_ranks, [*flags, *sharded], str(tmp_path), **few)[0]
    assert_same(run, reference)


@pytest.mark.parametrize("checkpoint", ["none", "full"])
def test_accumulated_micro_batches_equal_one_batch(
    references: dict[str, Run], tmp_path: Path, checkpoint: str
) -> None:
    accumulate = ["--training.local_batch_size=1", f"--training.global_batch_size={GLOBAL_BATCH}"]
    run = run_tiny(tmp_path, "ep2", checkpoint, None, "SGD", accumulate)
    assert_same(run, references["SGD"])


def test_reference_steps_move_the_weights(references: dict[str, Run], tmp_path: Path) -> None:
    """The comparison above would pass between runs that learn nothing."""
    for reference in references.values():
        assert reference.losses[1] < reference.losses[0]
        assert all(norm > 0 for norm in reference.grad_norms)
        assert all(gradient.abs().max() > 0 for gradient in reference.gradients[0].values())
