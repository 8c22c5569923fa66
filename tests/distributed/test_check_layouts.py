"""The layout check finds wrong gradients and names their factor, and raises no false alarm."""

import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import bert, tiny
from tests.ranks import run_ranks
from torchtitan_ext import trainer
from torchtitan_ext.components import load_balance
from torchtitan_ext.config.load import load_job_config
from torchtitan_ext.moe import experts
from torchtitan_ext.verify.layouts import (
    Layout,
    LayoutVerdict,
    all_layouts,
    for_comparison,
    judge,
    parse_layouts,
    rounding_bounds,
)
from torchtitan_ext.verify.step import StepRecord, record_step

SHIPPED = [*bert.CONFIG, "--training.seq_len=32", "--zero.stage=3"]
BERT = [*SHIPPED, "--compile.no-enable"]
COMPILED = [*SHIPPED, "--compile.backend=aot_eager"]
MOE = [f"--job.config_file={tiny.CONFIG}"]
# Padded, with a second head.
PAIRS = [*BERT, "--mlm.next_sentence"]
# Seven experts share what is not expert 0's, which no batch of these sequences divides by.
PRESET = [*MOE, "--routing.preset=hot_expert"]
FLAGS = {"bert": BERT, "compiled bert": COMPILED, "pairs": PAIRS, "moe": MOE, "preset": PRESET}


def record(flags: list[str], folder: str, plant: Callable[[], None] = lambda: None) -> StepRecord:
    tiny.FLAVORS.add("tiny", tiny.tiny_args)
    plant()
    config = load_job_config(
        [*flags, f"--job.dump_folder={folder}"],
        world_size=dist.get_world_size(),
        device_type="cpu",
    )
    return record_step(for_comparison(config))


def record_on(num_ranks: int, flags: list[str], folder: Any, *plant: Any) -> StepRecord:
    return run_ranks(record, num_ranks, flags, str(folder), *plant, timeout=300)[0]


class Reference:
    """One process's step of each model, and what is rounding."""

    def __init__(self, folder: Any) -> None:
        self.steps, self.bounds = {}, {}
        for name, flags in FLAGS.items():
            first, reordered = (
                record_on(1, [*flags, "--training.global_batch_size=8", f"{LOCAL}={size}"], folder)
                for size in (2, 1)
            )
            self.steps[name], self.bounds[name] = first, rounding_bounds(first, reordered)


LOCAL = "--training.local_batch_size"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(tmp_path_factory.mktemp("reference"))


def check(
    reference: Reference, folder: Any, model: str, name: str, num_ranks: int, *plant: Any
) -> LayoutVerdict:
    (layout,) = parse_layouts(name)
    sharing = math.prod(layout.degrees.get(name, 1) for name in ("tp", "cp", "pp"))
    flags = [*FLAGS[model], f"{LOCAL}={8 * sharing // num_ranks}", *layout.flags]
    step = record_on(num_ranks, flags, folder, *plant)
    return judge(layout, step, reference.steps[model], reference.bounds[model], num_ranks)


@pytest.mark.parametrize(
    ("model", "layout", "num_ranks"),
    [
        ("bert", "fsdp", 2),
        ("bert", "zero=1", 2),
        ("bert", "dp_replicate=2", 2),
        ("bert", "tp=2", 2),
        ("bert", "tp=2:cp=2", 4),
        ("compiled bert", "tp=2", 2),
        ("compiled bert", "cp=2", 2),
        ("pairs", "tp=2:cp=2", 4),
        ("moe", "fsdp", 2),
        ("moe", "ep=2", 2),
        ("moe", "dp_replicate=2:ep=2", 4),
        ("moe", "ep=4", 4),
        ("moe", "pp=2:tp=2:ep=2", 4),
        ("moe", "pp=2:cp=2", 4),
        ("preset", "ep=2", 2),
        pytest.param("moe", "pp=2:cp=2:tp=2:ep=4", 8, marks=pytest.mark.slow),
    ],
)
def test_layout_that_is_right_is_said_to_be(
    reference: Reference, tmp_path: Any, model: str, layout: str, num_ranks: int
) -> None:
    found = check(reference, tmp_path, model, layout, num_ranks)
    assert found.verdict in ("equal", "rounding"), found
    assert found.error <= found.bound


def test_same_step_is_equal(reference: Reference) -> None:
    step = reference.steps["moe"]
    assert judge(Layout("fsdp"), step, step, reference.bounds["moe"], 2).verdict == "equal"


def scale_experts() -> None:
    """Experts' gradients are summed over ranks, and multiplied by their number, too."""
    product = experts.grouped_mm

    def product_and_scaled(x: torch.Tensor, weight: torch.Tensor, *counts: Any) -> torch.Tensor:
        weight.register_hook(lambda gradient: gradient * dist.get_world_size())
        return product(x, weight, *counts)

    experts.grouped_mm = product_and_scaled


def let_replicas_drift() -> None:
    """The second replica's gradients are not the first's."""
    initialise = trainer.ExtTrainer.__init__

    def init(self: Any, config: Any) -> None:
        initialise(self, config)
        forward_backward = self.forward_backward_step

        def drift(**batch: Any) -> torch.Tensor:
            loss = forward_backward(**batch)
            if dist.get_rank() == 1:
                self.model_parts[0].mlm_head.norm.weight.grad.mul_(3.0)
            return loss

        self.forward_backward_step = drift

    trainer.ExtTrainer.__init__ = init  # type: ignore[method-assign]


def move_biases(move: Callable[[torch.Tensor], Any]) -> None:
    finish_step = load_balance.ExpertLoad.finish_step

    def finish(self: Any) -> None:
        finish_step(self)
        for layer in self._moe_layers:
            move(layer.expert_bias)

    load_balance.ExpertLoad.finish_step = finish  # type: ignore[method-assign]


def move_biases_of_one_rank() -> None:
    move_biases(lambda bias_E: bias_E.add_(0.1 * dist.get_rank()))


def move_all_biases_twice() -> None:
    move_biases(lambda bias_E: bias_E.mul_(dist.get_world_size()))


@pytest.mark.parametrize(
    ("plant", "model", "layout", "reason"),
    [
        (
            let_replicas_drift,
            "bert",
            "dp_replicate=2",
            "gradient of mlm_head.norm.weight is not the same on all replicas",
        ),
        (
            move_biases_of_one_rank,
            "moe",
            "ep=2",
            "layers.1.moe.expert_bias is not the same on all replicas after the step",
        ),
        (
            move_all_biases_twice,
            "moe",
            "ep=2",
            "layers.1.moe.expert_bias is not one process's after the step",
        ),
    ],
)
def test_state_that_ranks_do_not_share_is_found(
    reference: Reference, tmp_path: Any, plant: Any, model: str, layout: str, reason: str
) -> None:
    found = check(reference, tmp_path, model, layout, 2, plant)
    assert (found.verdict, found.reason) == ("wrong", reason)


def forget_one_rank() -> None:
    """A parameter whose gradient only one rank contributes to."""
    from models.bert.model import BertModel

    forward = BertModel.forward

    def forward_wrongly(self: Any, *args: Any, **kwargs: Any) -> Any:
        weight = self.embedding_norm.weight
        if dist.get_rank() > 0 and weight.requires_grad:
            weight.register_hook(torch.zeros_like)
        return forward(self, *args, **kwargs)

    BertModel.forward = forward_wrongly  # type: ignore[method-assign]


def test_experts_scaled_by_their_degree_are_named(reference: Reference, tmp_path: Any) -> None:
    found = check(reference, tmp_path, "moe", "ep=2", 2, scale_experts)
    assert found.verdict == "wrong"
    assert ".experts." in found.worst_parameter
    assert found.ratio == pytest.approx(2, rel=1e-4)
    assert "is 2 times the right one: exactly 2 = expert_parallel_degree, and" in found.reason


def test_gradient_that_misses_a_rank_is_found(reference: Reference, tmp_path: Any) -> None:
    found = check(reference, tmp_path, "bert", "fsdp", 2, forget_one_rank)
    assert found.verdict == "wrong"
    assert found.worst_parameter == "embedding_norm.weight"
    assert found.reason == "gradient of embedding_norm.weight is not a multiple of the right one"


NORM = "norm.weight"


def scaled(tensors: dict[str, torch.Tensor], factor: float) -> dict[str, torch.Tensor]:
    return {**tensors, NORM: tensors[NORM] * factor}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda step: {"grad_norm": step.grad_norm * 1.01}, "gradient norm is"),
        (lambda step: {"loss": step.loss + 0.01}, "loss is"),
        (lambda step: {"counts": [[0] * 8] * 2}, "tokens per expert are not"),
        (
            lambda step: {"weights": scaled(step.weights, 2)},
            "norm.weight is not one process's after the step, though its gradient is",
        ),
        (
            lambda step: {"gradients": scaled(step.gradients, math.nan)},
            "gradient of norm.weight is not finite",
        ),
        (
            lambda step: {"gradients": scaled(step.gradients, 0.25)},
            "gradient of norm.weight is 0.25 times the right one: exactly 0.25 = 1 / the number",
        ),
        (
            lambda step: {"gradients": {k: v for k, v in step.gradients.items() if k != NORM}},
            "gradient of norm.weight is missing",
        ),
    ],
)
def test_each_difference_is_named(reference: Reference, change: Any, reason: str) -> None:
    step = reference.steps["moe"]
    changed = StepRecord(**{**vars(step), **change(step)})
    found = judge(Layout("fsdp"), changed, step, reference.bounds["moe"], 4)
    assert found.verdict == "wrong"
    assert found.reason.startswith(reason)


def test_names_of_layouts() -> None:
    first, second, third = parse_layouts("fsdp, dp_replicate=2:ep=4,zero=1")
    assert (first.degrees, second.degrees) == ({}, {"dp_replicate": 2, "ep": 4})
    assert (first.zero, third.zero) == (3, 1)
    assert second.flags == [
        "--parallelism.data_parallel_replicate_degree=2",
        "--parallelism.data_parallel_shard_degree=-1",
        "--parallelism.expert_parallel_degree=4",
        "--parallelism.expert_tensor_parallel_degree=1",
        "--parallelism.tensor_parallel_degree=1",
        "--parallelism.context_parallel_degree=1",
        "--parallelism.pipeline_parallel_degree=1",
        "--zero.stage=3",
    ]
    assert third.flags[-1] == "--zero.stage=1"
    for twice in ("zero=1:zero=2", "ep=2:ep=4"):
        with pytest.raises(ValueError, match="is given twice"):
            parse_layouts(twice)
    for wrong in ("", "ep", "ep=", "ep=x", "foo=2", "ep=2:", "fsdp,"):
        with pytest.raises(ValueError, match="must be fsdp, or degrees such as"):
            parse_layouts(wrong)


def test_flag_of_a_parallelism_is_for_the_layouts_that_have_it() -> None:
    flags = ["--parallelism.disable-loss-parallel", "--training.steps", "2"]
    flags += ["--parallelism.context_parallel_rotate_method=alltoall"]
    both, first, neither = parse_layouts("tp=2:cp=2,tp=2,ep=2")

    def kept(layout: Layout) -> list[str]:
        applied, own = layout.applied_to(flags), len(layout.flags)
        assert applied[-own:] == layout.flags
        return applied[:-own]

    assert len(kept(both)) == 3
    assert kept(first) == ["--parallelism.disable_loss_parallel", "--training.steps=2"]
    assert kept(neither) == ["--training.steps=2"]


def test_parameter_without_gradient_is_none_in_both(reference: Reference) -> None:
    """As a frozen one; in one step alone it is a fault."""
    step, bounds = reference.steps["moe"], reference.bounds["moe"]
    gradients = {name: g for name, g in step.gradients.items() if name != NORM}
    frozen = StepRecord(**{**vars(step), "gradients": gradients})
    bounds_of_frozen = rounding_bounds(frozen, frozen)
    assert NORM not in bounds_of_frozen
    assert judge(Layout("fsdp"), frozen, frozen, bounds_of_frozen, 2).verdict == "equal"
    found = judge(Layout("fsdp"), step, frozen, bounds, 2)
    assert found.reason == "gradient of norm.weight is there, and should not be"


def test_reference_that_is_no_number_is_refused(reference: Reference) -> None:
    step = reference.steps["moe"]
    broken = StepRecord(**{**vars(step), "gradients": scaled(step.gradients, math.nan)})
    with pytest.raises(ValueError, match=r"norm\.weight is not finite on one"):
        rounding_bounds(broken, step)


@pytest.mark.parametrize(
    ("layout", "replicate", "expert"),
    [("fsdp", 1, 1), ("dp_replicate=2", 2, 1), ("ep=2", 1, 2), ("dp_replicate=2:ep=2", 2, 2)],
)
def test_layout_takes_back_the_degrees_of_the_file(
    tmp_path: Any, layout: str, replicate: int, expert: int
) -> None:
    tiny.FLAVORS.add("tiny", tiny.tiny_args)
    of_the_file = [*MOE, "--parallelism.expert_parallel_degree=4", "--zero.stage=3"]
    flags = [*of_the_file, *parse_layouts(layout)[0].flags, f"--job.dump_folder={tmp_path}"]
    degrees = load_job_config(flags, world_size=4, device_type="cpu").parallelism
    assert degrees.data_parallel_replicate_degree == replicate
    assert degrees.expert_parallel_degree == expert


def test_norm_is_compared_with_the_exact_one(reference: Reference) -> None:
    """One process's own may be off: a float32 sum over 4 million elements."""
    step = reference.steps["moe"]
    off = StepRecord(**{**vars(step), "grad_norm": step.grad_norm * 1.01})
    assert judge(Layout("fsdp"), step, off, reference.bounds["moe"], 2).verdict == "equal"


def test_all_layouts_fill_the_ranks() -> None:
    names = [layout.name for layout in all_layouts(4)]
    assert len(names) == len(set(names))
    assert {"fsdp", "zero=1", "ep=2", "ep=4", "dp_replicate=2", "dp_replicate=4"} <= set(names)
    assert "dp_replicate=2:ep=2" in names and "dp_replicate=4:ep=2" not in names
    assert {"tp=2", "pp=4", "cp=2"} <= set(names)


def test_rounding_is_known_for_each_parameter(reference: Reference) -> None:
    """All is rounding of a gradient that is zero, the keys' bias; of others next to nothing."""
    bounds = reference.bounds["bert"]
    of_others = [bound for name, bound in bounds.items() if not name.endswith("wk.bias")]
    assert max(of_others) < 1e-2
    assert statistics.median(of_others) < 1e-3
