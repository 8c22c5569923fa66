"""The recomputed forward is the same forward: routing, counts, collectives and graphs."""

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from tests.ranks import run_ranks
from tests.tiny import Run, assert_same, build_trainer, finish, moe_layers, observe, steps, train
from torchtitan_ext.moe.router import TokenChoiceRouter
from torchtitan_ext.trainer import ExtTrainer

EP2 = ["--parallelism.expert_parallel_degree=2", "--training.local_batch_size=4"]
FULL = ["--activation_checkpoint.mode=full"]
OP = ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"]
AOT_EAGER = ["--compile.enable", "--compile.components=model", "--compile.backend=aot_eager"]
NUM_MOE_LAYERS = 2
NUM_EXPERTS = 8


def run_ep2(folder: Path, flags: list[str], **kwargs: Any) -> Run:
    return run_ranks(train, 2, [*EP2, *flags], str(folder), **kwargs)[0]


# Exchanges of one training step


def profile_exchanges(flags: list[str], folder: str) -> dict[str, float]:
    """All-to-alls per MoE layer and step, of token counts (a vector) and of rows (a matrix)."""
    trainer = build_trainer([*EP2, *flags], folder)
    for step in steps(trainer, 3):
        if step == 3:  # compiled and warm
            profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
            profiler.start()
    profiler.stop()
    shapes = [e.input_shapes[0] for e in profiler.events() if e.name == "c10d::alltoall_base_"]
    exchanges = Counter(
        "counts" if shape == [NUM_EXPERTS] else "rows"
        for shape in shapes
        if shape == [NUM_EXPERTS] or len(shape) == 2  # other vectors are gradients to reduce
    )
    return {name: number / NUM_MOE_LAYERS for name, number in exchanges.items()}


@pytest.mark.parametrize("compiled", [[], AOT_EAGER], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("checkpoint", "rows"),
    [
        pytest.param([], 4, id="none"),  # dispatch and combine, forward and backward
        pytest.param(FULL, 6, id="full"),  # and once more in the recomputation
        pytest.param(OP, 4, id="op"),  # whose policy keeps what all-to-alls brought
    ],
)
def test_recomputation_repeats_no_counts_exchange(
    tmp_path: Path, checkpoint: list[str], rows: int, compiled: list[str]
) -> None:
    exchanges = run_ranks(profile_exchanges, 2, [*checkpoint, *compiled], str(tmp_path))
    assert exchanges == [{"counts": 1, "rows": rows}] * 2


# Routing


def make_router_fickle() -> None:
    """Every call of a router chooses other experts than the one before."""
    calls = itertools.count()
    choose = TokenChoiceRouter._choose

    def fickle(self: Any, scores_TE: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return choose(self, scores_TE.roll(next(calls), dims=1), bias)

    TokenChoiceRouter._choose = fickle  # type: ignore[method-assign]


def train_fickle(flags: list[str], folder: str) -> Run | None:
    make_router_fickle()
    return train([*EP2, *flags], folder, num_steps=1)


@pytest.mark.parametrize("checkpoint", [FULL, OP], ids=["full", "op"])
def test_recomputation_keeps_the_forwards_routing(tmp_path: Path, checkpoint: list[str]) -> None:
    """A router that answers differently in the recomputation is not asked again."""
    expected = run_ranks(train_fickle, 2, [], str(tmp_path))[0]
    actual = run_ranks(train_fickle, 2, checkpoint, str(tmp_path))[0]
    assert_same(actual, expected, tolerance=1e-6)


def tie_all_scores(trainer: ExtTrainer, step: int) -> None:
    for moe in moe_layers(trainer):
        moe.router.gate.weight.data.zero_()
        moe.expert_bias.zero_()


def train_on_constant_tokens(flags: list[str], folder: str) -> list[float]:
    trainer = build_trainer([*EP2, *flags], folder)
    run = observe(trainer)
    run.gradients = Forgetful()
    tokens = torch.full((4, 32), 5)
    trainer.dataloader = [({"input": tokens}, tokens)] * 50
    for step in steps(trainer, 50):
        tie_all_scores(trainer, step)
    return run.losses


class Forgetful(list):  # type: ignore[type-arg]
    """Fifty steps of gradients are not needed."""

    def append(self, item: Any) -> None:
        pass


def test_tied_scores_raise_no_checkpoint_error(tmp_path: Path) -> None:
    flags = [*FULL, "--training.mixed_precision_param=bfloat16"]
    losses = run_ranks(train_on_constant_tokens, 2, flags, str(tmp_path))[0]
    assert len(losses) == 50
    assert losses[-1] < losses[0] / 10


# Counts


@pytest.mark.parametrize("compiled", [[], AOT_EAGER], ids=["eager", "compiled"])
@pytest.mark.parametrize("checkpoint", [FULL, OP], ids=["full", "op"])
def test_counts_sum_to_tokens_times_top_k(
    tmp_path: Path, checkpoint: list[str], compiled: list[str]
) -> None:
    accumulate = ["--training.global_batch_size=24", "--training.local_batch_size=4"]
    run = run_ep2(tmp_path, [*checkpoint, *compiled, *accumulate], num_steps=1)
    (layers,) = run.counts
    assert [sum(experts) for experts in layers] == [24 * 32 * 3] * NUM_MOE_LAYERS


def train_and_validate(flags: list[str], folder: str) -> Run | None:
    trainer = build_trainer([*EP2, *FULL, *flags], folder)
    run = observe(trainer)
    for step in steps(trainer, 3):
        if trainer.job_config.validation.enable:
            trainer.validator.validate(trainer.model_parts, step)
    return finish(trainer, run)


VALIDATION = [
    "--validation.enable",
    "--validation.dataset=local",
    "--validation.dataset_path=tests/assets/text",
    "--validation.seq_len=32",
    "--validation.steps=2",
]


def test_validation_changes_nothing_in_training(tmp_path: Path) -> None:
    expected = run_ranks(train_and_validate, 2, [], str(tmp_path))[0]
    actual = run_ranks(train_and_validate, 2, VALIDATION, str(tmp_path))[0]
    assert_same(actual, expected, tolerance=0)


def validate_three_times(folder: str) -> list[float]:
    trainer = build_trainer([*EP2, *VALIDATION], folder)
    losses: list[float] = []
    trainer.metrics_processor.log_validation = lambda loss, step: losses.append(loss)
    for step in range(3):
        trainer.validator.validate(trainer.model_parts, step)
    return losses


def test_validations_measure_the_same_text(tmp_path: Path) -> None:
    losses = run_ranks(validate_three_times, 2, str(tmp_path))[0]
    assert len(losses) == 3
    assert len(set(losses)) == 1


# Uneven routing


def force_routing(trainer: ExtTrainer, step: int) -> None:
    """An expert without tokens, then an idle ep rank 0, then an idle ep rank 1."""
    dropped = [slice(3, 4), slice(0, 4), slice(4, 8)][step - 1]
    for moe in moe_layers(trainer):
        moe.expert_bias.zero_()
        moe.expert_bias[dropped] = -10.0


def force_one_expert(trainer: ExtTrainer, step: int) -> None:
    for moe in moe_layers(trainer):
        moe.expert_bias.zero_()
        moe.expert_bias[5] = 10.0


def train_poisoned(flags: list[str], folder: str, **kwargs: Any) -> Run | None:
    """Memory that an operator allocates and doesn't write holds NaN."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    return train(flags, folder, **kwargs)


@pytest.mark.parametrize(
    "flags",
    [[], FULL, [*FULL, *AOT_EAGER], [*OP, *AOT_EAGER]],
    ids=["none-eager", "full-eager", "full-compiled", "op-compiled"],
)
@pytest.mark.parametrize(
    ("force", "flavor", "empty_experts"),
    [
        pytest.param(
            force_routing, {"num_expert_groups": 1, "num_limited_groups": 1}, [1, 4, 4], id="empty"
        ),
        pytest.param(
            force_one_expert,
            {"num_expert_groups": 1, "num_limited_groups": 1, "top_k": 1, "route_norm": False},
            [7, 7, 7],
            id="one_gets_all",
        ),
    ],
)
def test_uneven_routing_gives_one_process_gradients(
    tmp_path: Path, flags: list[str], force: Any, flavor: dict[str, int], empty_experts: list[int]
) -> None:
    settings = {"num_steps": 3, "before_step": force, **flavor}
    reference = run_ranks(train, 1, [], str(tmp_path), **settings)[0]
    run = run_ranks(train_poisoned, 2, [*EP2, *flags], str(tmp_path), **settings)[0]
    assert_same(run, reference)
    for layers, num_empty in zip(run.counts, empty_experts, strict=True):
        assert [experts.count(0) for experts in layers] == [num_empty] * NUM_MOE_LAYERS
    for name, gradient in run.gradients[1].items():
        if ".experts." in name:
            idle = [i for i, count in enumerate(run.counts[1][0]) if count == 0]
            assert torch.equal(gradient[idle], torch.zeros_like(gradient[idle])), name


# Graphs


def shuffle_routing(trainer: ExtTrainer, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for moe in moe_layers(trainer):
        moe.expert_bias.copy_(0.1 * torch.randn(moe.expert_bias.shape, generator=generator))


def test_varying_routing_recompiles_at_most_twice(tmp_path: Path) -> None:
    # At the other tests' rate the tokens soon look alike to the router, and go the same way.
    flags = [*FULL, *AOT_EAGER, "--optimizer.lr=1e-4"]
    run = run_ep2(tmp_path, flags, num_steps=30, before_step=shuffle_routing)
    assert run.num_graphs[0] == 2  # a dense and a MoE block
    assert run.num_graphs[-1] - run.num_graphs[0] <= 2
    loads = {tuple(experts) for layers in run.counts for experts in layers}
    assert len(loads) > 50  # the routing did vary


@pytest.mark.parametrize("num_layers", [4, 16])
def test_graphs_depend_on_kinds_of_layers_not_on_their_number(
    tmp_path: Path, num_layers: int
) -> None:
    run = run_ep2(tmp_path, [*FULL, *AOT_EAGER], n_layers=num_layers)
    assert run.num_graphs == [2, 2]
    assert run.graph_breaks == {}


def test_long_sequences_compile_on_a_cpu(tmp_path: Path) -> None:
    """Above 512 tokens the attention is one operator, which the compiler can't recompute."""
    long = ["--training.seq_len=576", "--training.local_batch_size=1"]
    eager = run_ep2(tmp_path, [*long, *FULL], num_steps=1)
    compiled = run_ep2(tmp_path, [*long, *FULL, *AOT_EAGER], num_steps=1)
    assert_same(compiled, eager)


# Repeatability


@pytest.mark.parametrize("flags", [[], [*FULL, *AOT_EAGER]], ids=["eager", "full-compiled"])
def test_same_seed_gives_the_same_bits(tmp_path: Path, flags: list[str]) -> None:
    flags = [*flags, "--debug.seed=3", "--debug.deterministic"]
    first, second = (run_ep2(tmp_path, flags) for _ in range(2))
    assert first.losses == second.losses
    assert_same(first, second, tolerance=0)
    other = run_ep2(tmp_path, [*flags, "--debug.seed=4"])
    assert other.losses[0] != first.losses[0]


# The failure that started this: a write on the module inside a checkpointed, compiled region


def test_write_on_self_is_still_refused(tmp_path: Path) -> None:
    """torch's check is on: a dispatcher that kept its state on itself would not compile."""
    with pytest.raises(RuntimeError, match=r"HOP.*side effect"):
        run_ranks(train_with_a_write, 2, str(tmp_path))


def train_with_a_write(folder: str) -> Run | None:
    choose = TokenChoiceRouter._choose

    def writing(self: Any, scores_TE: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        self.last_scores = scores_TE
        return choose(self, scores_TE, bias)

    TokenChoiceRouter._choose = writing  # type: ignore[method-assign]
    return train([*EP2, *FULL, *AOT_EAGER], folder)
