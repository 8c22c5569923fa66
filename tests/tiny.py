"""A DeepSeek-V3 small enough to run dozens of layouts, and one trainer run of it as data."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from models.deepseek_v3 import FLAVORS, DeepSeekV3ModelArgs
from torchtitan_ext.components.initialize import CHECKPOINT_PREFIX
from torchtitan_ext.config.load import load_job_config
from torchtitan_ext.moe import MoEArgs
from torchtitan_ext.moe import moe_layers as find_moe_layers
from torchtitan_ext.trainer import ExtTrainer
from torchtitan_ext.verify.step import full_tensors as gather_tensors

CONFIG = "tests/assets/deepseek_v3_tiny.toml"

# A rate at which two steps of SGD move the weights about as far as Adam's.
SGD = ["--optimizer.name=SGD", "--optimizer.lr=1.0"]


@dataclass
class Run:
    """What a few optimizer steps leave to compare. Tensors are full ones, by parameter name."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    """After clipping, one dictionary a step."""
    counts: list[list[list[int]]] = field(default_factory=list)
    """Tokens per expert of all ranks: steps x layers x experts."""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """Parameters and buffers after the last step."""
    num_graphs: list[int] = field(default_factory=list)
    """Graphs compiled so far, after each step."""
    graph_breaks: dict[str, int] = field(default_factory=dict)


def tiny_args(**changes: Any) -> DeepSeekV3ModelArgs:
    """One dense and two MoE layers, sigmoid scores, node-limited groups.

    Args:
        changes: fields of DeepSeekV3ModelArgs or of MoEArgs.
    """
    moe: dict[str, Any] = {
        "num_experts": 8,
        "num_shared_experts": 1,
        "top_k": 3,
        "score_func": "sigmoid",
        "route_norm": True,
        "route_scale": 2.5,
        "num_expert_groups": 4,
        "num_limited_groups": 2,
        "load_balance_coeff": 1e-2,
    }
    model: dict[str, Any] = {
        "vocab_size": 2048,
        "dim": 64,
        "inter_dim": 96,
        "moe_inter_dim": 32,
        "n_layers": 3,
        "n_dense_layers": 1,
        "n_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    }
    moe_fields = {f.name for f in fields(MoEArgs)}
    for name, value in changes.items():
        (moe if name in moe_fields else model)[name] = value
    return DeepSeekV3ModelArgs(**model, moe_args=MoEArgs(**moe))


def build_trainer(flags: Sequence[str], dump_folder: str, **flavor: Any) -> ExtTrainer:
    """A real trainer for the tiny TOML with flags, on the ranks that exist."""
    FLAVORS.add("tiny", lambda: tiny_args(**flavor))
    args = [f"--job.config_file={CONFIG}", f"--job.dump_folder={dump_folder}", *flags]
    job_config = load_job_config(args, world_size=dist.get_world_size(), device_type="cpu")
    return ExtTrainer(job_config)


def steps(trainer: ExtTrainer, num_steps: int) -> Iterator[int]:
    """Trains a step each time it is advanced, after yielding the step's number."""
    batches = trainer.batch_generator(trainer.dataloader)
    for _ in range(num_steps):
        trainer.step += 1
        yield trainer.step
        trainer.train_step(batches)


def train(
    flags: Sequence[str],
    dump_folder: str,
    num_steps: int = 2,
    before_step: Callable[[ExtTrainer, int], None] = lambda trainer, step: None,
    **flavor: Any,
) -> Run | None:
    """Trains some steps; the first rank returns what there is to compare."""
    trainer = build_trainer(flags, dump_folder, **flavor)
    run = observe(trainer)
    for step in steps(trainer, num_steps):
        before_step(trainer, step)
    return finish(trainer, run)


def observe(trainer: ExtTrainer) -> Run:
    """A record that grows with every step the trainer makes from now on."""
    run = Run()

    def before_update(*_: Any) -> None:
        run.gradients.append(full_tensors(*trainer.model_parts, gradients=True))

    def log(
        step: int, loss: float, max_loss: float, grad_norm: float, extra_metrics: Any = None
    ) -> None:
        run.losses.append(loss)
        run.grad_norms.append(grad_norm)
        run.num_graphs.append(counters["stats"]["unique_graphs"])
        if trainer.expert_load.last_step_LE is not None:
            run.counts.append(trainer.expert_load.last_step_LE.tolist())

    trainer.optimizers.register_step_pre_hook(before_update)
    trainer.metrics_processor.log = log  # type: ignore[method-assign]
    return run


def finish(trainer: ExtTrainer, run: Run) -> Run | None:
    assert not torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint
    buffers = {n: b for part in trainer.model_parts for n, b in part.named_buffers()}
    run.weights = full_tensors(*trainer.model_parts) | gather_tensors(buffers)[0]
    run.graph_breaks = dict(counters["graph_break"])
    return run if dist.get_rank() == 0 else None


def full_tensors(*parts: torch.nn.Module, gradients: bool = False) -> dict[str, torch.Tensor]:
    """Every parameter, or its gradient, gathered from all ranks; on rank 0 of all stages, too."""
    tensors: dict[str, torch.Tensor | None] = {}
    for name, parameter in (pair for part in parts for pair in part.named_parameters()):
        tensor = parameter.grad if gradients else parameter
        assert tensor is not None, f"{name} has no gradient"
        tensors[name] = tensor
    full, unequal = gather_tensors(tensors)
    assert unequal == [], "ranks hold different values"
    return full


def clean(name: str) -> str:
    return name.replace(CHECKPOINT_PREFIX, "")


def moe_layers(trainer: ExtTrainer) -> list[Any]:
    """The trainer's MoE layers, in order."""
    return [moe for part in trainer.model_parts for moe in find_moe_layers(part)]


def assert_same(run: Run, reference: Run, tolerance: float = 1e-4) -> None:
    """Losses, norms, clipped gradients and new weights within a tolerance; counts exactly."""
    assert run.counts == reference.counts
    torch.testing.assert_close(run.losses, reference.losses, rtol=tolerance, atol=0)
    torch.testing.assert_close(run.grad_norms, reference.grad_norms, rtol=tolerance, atol=0)
    for step, gradients in enumerate(reference.gradients):
        assert_same_tensors(run.gradients[step], gradients, tolerance, f"gradient of step {step}")
    assert_same_tensors(run.weights, reference.weights, tolerance, "new weight")


def assert_same_tensors(
    actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float, what: str
) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        # "not <=" and not ">": a NaN is no match either
        error = (actual[name] - tensor).abs().max() / tensor.abs().max().clamp_min(1e-12)
        assert error <= tolerance, f"{what} of {name}: relative error {error:.2e}"
