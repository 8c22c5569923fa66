"""Activation checkpointing and compilation, block by block.

A block is wrapped in a checkpoint, and the wrapper is compiled as one full graph. In that order
the compiler sees the recomputation, and replays the forward's random state in it.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torchtitan.config import JobConfig
from torchtitan.tools.logging import logger

from torchtitan_ext.config import CheckpointMode, match_layers

from .checkpoint_policy import SaveOps, build_context_fn, no_operator
from .local_parameters import make_parts_before_forward

# Attributes of a model's part: the kinds of all layers of the model, and what was to be kept.
_WHOLE = "layer_kinds_of_whole_model"
_SAVE_OPS = "layer_wrap_save_ops"


@dataclass(frozen=True)
class LayerPlan:
    """How one block is wrapped."""

    layer_id: int
    moe_enabled: bool
    checkpoint: CheckpointMode
    compile: bool


def resolve_layer_plans(
    job_config: JobConfig, layer_ids: list[int], moe_layer_ids: set[int]
) -> list[LayerPlan]:
    """Decides for each layer: [activation_checkpoint] and [compile], then the rules in order.

    Raises:
        ValueError: a rule matches no layer, or every nth layer is none.
    """
    _check_every_nth(job_config, len(layer_ids))
    compile_model = job_config.compile.enable and "model" in job_config.compile.components
    checkpoints = {
        layer_id: _default_checkpoint(job_config, position)
        for position, layer_id in enumerate(layer_ids)
    }
    compiles = dict.fromkeys(layer_ids, compile_model)
    for number, rule in enumerate(job_config.layer_wrap.rules):
        matched = match_layers(rule.layers, layer_ids, moe_layer_ids)
        if not matched:
            raise ValueError(
                f'[layer_wrap] rules[{number}].layers = "{rule.layers}": matches no layer; '
                f"the model has layers {layer_ids[0]}-{layer_ids[-1]}, "
                f"of which {len(moe_layer_ids)} are MoE layers"
            )
        for layer_id in matched:
            checkpoints[layer_id] = rule.checkpoint or checkpoints[layer_id]
            compiles[layer_id] = compiles[layer_id] if rule.compile is None else rule.compile
    return [
        LayerPlan(layer_id, layer_id in moe_layer_ids, checkpoints[layer_id], compiles[layer_id])
        for layer_id in layer_ids
    ]


def _check_every_nth(job_config: JobConfig, num_layers: int) -> None:
    ac = job_config.activation_checkpoint
    option = ac.selective_ac_option
    if ac.mode == "selective" and option.isdecimal() and int(option) > num_layers:
        raise ValueError(
            f'[activation_checkpoint] selective_ac_option = "{option}": checkpoints no layer, as '
            f"the model has {num_layers}"
        )


def _default_checkpoint(job_config: JobConfig, position: int) -> CheckpointMode:
    ac = job_config.activation_checkpoint
    if ac.mode != "selective":
        assert ac.mode in ("none", "full"), ac.mode
        return ac.mode
    if ac.selective_ac_option == "op":
        return "op"
    every = int(ac.selective_ac_option)
    return "full" if (position + 1) % every == 0 else "none"


def remember_layers(model: nn.Module) -> None:
    """To be called before a model is split: rules and positions count in all of its layers."""
    setattr(model, _WHOLE, _layer_kinds(model))


def plans_of(model: nn.Module, job_config: JobConfig) -> list[LayerPlan]:
    """How the blocks in ``model.layers`` are to be wrapped, or have been.

    The model may be a copy, with fewer layers, of one that :func:`remember_layers` has seen.
    """
    own = _layer_kinds(model)
    kinds = getattr(model, _WHOLE, own)
    plans = resolve_layer_plans(
        job_config, list(kinds), {i for i, is_moe in kinds.items() if is_moe}
    )
    return [plan for plan in plans if plan.layer_id in own]


def _layer_kinds(model: nn.Module) -> dict[int, bool]:
    """Whether each layer has experts."""
    blocks = model.get_submodule("layers").named_children()
    return {int(name): bool(getattr(block, "moe_enabled", False)) for name, block in blocks}


def apply_layer_wrap(model: nn.Module, job_config: JobConfig) -> None:
    """Wraps each block of ``model.layers`` as the configuration says, and logs the table."""
    layers = model.get_submodule("layers")
    plans = plans_of(model, job_config)
    save_ops = SaveOps(job_config.layer_wrap.save_ops)
    for plan in plans:
        block = layers.get_submodule(str(plan.layer_id))
        if plan.checkpoint != "none":
            block = _checkpoint(block, plan, job_config, save_ops)
            layers.register_module(str(plan.layer_id), block)
        if plan.compile:
            make_parts_before_forward(block)
            # block.compile(), not torch.compile(block): parameter names stay as they are
            block.compile(
                backend=job_config.compile.backend,
                fullgraph=True,
                options=_compile_options(job_config),
            )
    if hasattr(model, _WHOLE):
        setattr(model, _SAVE_OPS, save_ops)  # another part may have the layer that is meant
    else:
        _check_save_ops_after_first_forward(model, save_ops)
    logger.info(f"Applied checkpoint and compile to {len(plans)} layers:\n{_table(plans)}")


def _compile_options(job_config: JobConfig) -> dict[str, Any] | None:
    # With its own generator inductor fuses dropout; the fallback calls the one of eager.
    return {"fallback_random": True} if job_config.layer_wrap.match_eager_rng else None


def _checkpoint(
    block: nn.Module, plan: LayerPlan, job_config: JobConfig, save_ops: SaveOps
) -> nn.Module:
    ac = job_config.activation_checkpoint
    options: dict[str, Any] = {}
    if plan.checkpoint == "op":
        recompute_shapes = _force_recompute_shapes(block, plan.layer_id, ac)
        options["context_fn"] = build_context_fn(save_ops, recompute_shapes)
    elif plan.moe_enabled:
        options["context_fn"] = build_context_fn()
    return checkpoint_wrapper(
        block,
        preserve_rng_state=True,
        determinism_check=ac.determinism_check,
        early_stop=ac.early_stop,
        **options,
    )


def _check_save_ops_after_first_forward(model: nn.Module, save_ops: SaveOps) -> None:
    def check(*_: Any) -> None:
        if torch.is_grad_enabled():  # without gradients nothing is checkpointed
            handle.remove()
            save_ops.check_called()

    handle = model.register_forward_hook(check)


def check_save_ops(parts: list[nn.Module], group: dist.ProcessGroup) -> None:
    """After a forward of all parts of a model: the names of [layer_wrap] save_ops were all met.

    A collective of the ranks that hold the parts. Raises ValueError.
    """
    uncalled: list[Any] = [None] * dist.get_world_size(group)
    own = [set(getattr(part, _SAVE_OPS).uncalled) for part in parts]
    dist.all_gather_object(uncalled, set.intersection(*own), group=group)
    for name in sorted(set.intersection(*uncalled)):
        raise no_operator(name)


def _force_recompute_shapes(block: nn.Module, layer_id: int, ac: Any) -> frozenset[tuple[int, int]]:
    """Shapes of the transposed weights that [activation_checkpoint] says never to keep."""
    names = ac.per_op_sac_force_recompute_mm_shapes_by_fqns
    return frozenset(
        (module.weight.shape[1], module.weight.shape[0])  # under TP, those of this rank's part
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear)
        and any(part in f"layers.{layer_id}.{name}" for part in names)
    )


def _table(plans: list[LayerPlan]) -> str:
    """A line for each run of layers that are wrapped alike."""
    lines = [f"  {'layers':>9}  {'kind':<5}  {'checkpoint':<10}  compile"]
    start = 0
    for end in range(1, len(plans) + 1):
        first, last = plans[start], plans[end - 1]
        if end < len(plans) and _alike(first, plans[end]):
            continue
        ids = str(first.layer_id) if first == last else f"{first.layer_id}-{last.layer_id}"
        kind = "moe" if first.moe_enabled else "dense"
        compiled = "yes" if first.compile else "no"
        lines.append(f"  {ids:>9}  {kind:<5}  {first.checkpoint:<10}  {compiled}")
        start = end
    return "\n".join(lines)


def _alike(a: LayerPlan, b: LayerPlan) -> bool:
    return (a.moe_enabled, a.checkpoint, a.compile) == (b.moe_enabled, b.checkpoint, b.compile)
