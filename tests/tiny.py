"""A DeepSeek-V3 small enough to run dozens of layouts, and one trainer run of it as data."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

CONFIG = "tests/assets/deepseek_v3_tiny.toml"


@dataclass
class Run:
    """What a few optimizer steps leave to compare. Tensors are full ones, by parameter name."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    counts: list[list[list[int]]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    num_graphs: int = 0
    graph_breaks: dict[str, int] = field(default_factory=dict)


def build_trainer(flags: Sequence[str], dump_folder: str, **flavor: Any) -> Any:
    """A real trainer for ``tests/assets/deepseek_v3_tiny.toml`` with flags; ranks must exist.

    Args:
        flavor: fields of DeepSeekV3ModelArgs to change; names of MoEArgs go there.
    """
    import torch.distributed as dist

    from models.deepseek_v3 import FLAVORS
    from torchtitan_ext.config.load import load_job_config
    from torchtitan_ext.trainer import ExtTrainer

    FLAVORS.add("tiny", lambda: tiny_args(**flavor))
    args = [f"--job.config_file={CONFIG}", f"--job.dump_folder={dump_folder}", *flags]
    job_config = load_job_config(args, world_size=dist.get_world_size(), device_type="cpu")
    return ExtTrainer(job_config)


def tiny_args(**changes: Any) -> Any:
    """Model arguments: one dense and two MoE layers, sigmoid scores, node-limited groups."""
    from dataclasses import fields

    from models.deepseek_v3 import DeepSeekV3ModelArgs
    from torchtitan_ext.moe import MoEArgs

    moe = {
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
    model = {
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
    for name, value in changes.items():
        (moe if name in {f.name for f in fields(MoEArgs)} else model)[name] = value
    return DeepSeekV3ModelArgs(**model, moe_args=MoEArgs(**moe))


def train(flags: Sequence[str], dump_folder: str, num_steps: int = 2, **flavor: Any) -> Run | None:
    """Trains ``num_steps`` steps; the first rank returns what there is to compare."""
    from torch._dynamo.utils import counters

    trainer = build_trainer(flags, dump_folder, **flavor)
    model = trainer.model_parts[0]
    run = Run()
    trainer.optimizers.register_step_pre_hook(
        lambda *_: run.gradients.append(full_tensors(model, gradients=True))
    )
    log = trainer.metrics_processor.log

    def record(step: int, loss: float, max_loss: float, grad_norm: float, extra: Any) -> None:
        run.losses.append(loss)
        run.grad_norms.append(grad_norm)

    trainer.metrics_processor.log = lambda step, loss, top, norm, extra_metrics: record(
        step, loss, top, norm, extra_metrics
    )
    assert log is not None
    batches = trainer.batch_generator(trainer.dataloader)
    for _ in range(num_steps):
        trainer.step += 1
        trainer.train_step(batches)
        if trainer.expert_load.last_step_LE is not None:
            run.counts.append(trainer.expert_load.last_step_LE.tolist())
    run.weights = full_tensors(model) | {
        clean(name): buffer.clone() for name, buffer in model.named_buffers()
    }
    run.num_graphs = counters["stats"]["unique_graphs"]
    run.graph_breaks = dict(counters["graph_break"])
    return run if torch.distributed.get_rank() == 0 else None


def full_tensors(model: torch.nn.Module, *, gradients: bool = False) -> dict[str, torch.Tensor]:
    """Every parameter, or its gradient, gathered from all ranks."""
    full = {}
    for name, parameter in model.named_parameters():
        value = parameter.grad if gradients else parameter.detach()
        assert value is not None, f"{name} has no gradient"
        full[clean(name)] = (value.full_tensor() if isinstance(value, DTensor) else value).clone()
    return full


def clean(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "")
