"""What a checkpointed block keeps from its forward, operator by operator."""

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import torchtitan_ext.moe.grouped_mm  # noqa: F401  registers the operator that is named below
from torchtitan_ext.config.error import did_you_mean

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional

# What selective "op" checkpointing keeps: results that are dear to compute or to communicate.
DEFAULT_SAVE_OPS = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,  # a linear layer with a bias
        _aten.bmm.default,  # attention, where it is written out
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_flash_attention_for_cpu.default,
        _c10d.all_to_all_single.default,
        _c10d.reduce_scatter_tensor.default,
        _c10d.wait_tensor.default,
        torch.ops.torchtitan_ext.grouped_mm.default,
    }
)

# Kept under "full" as well. torch 2.13 can't compile a block that recomputes this operator beside
# an exchange of uneven splits ("expected all tensors_saved_with_vc_check to be Tensors"); remove
# this when tests/distributed/test_recompute.py passes without it.
_KEPT_FOR_THE_COMPILER = _aten._scaled_dot_product_flash_attention_for_cpu.default

# Products with a weight, and which argument the weight is.
_WEIGHT_ARGUMENT = {_aten.mm.default: 1, _aten.addmm.default: 2}

_CHOICES = frozenset({_aten.topk.default})
_INTEGER_EXCHANGES = frozenset({_c10d.all_to_all_single.default, _c10d.wait_tensor.default})


def is_routing_decision(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator call decides which token goes where.

    These are the choice of experts, the exchange of token counts, and the copy of the counts to
    the host. Recomputed, a choice between near-tied scores could fall otherwise, and rows would
    not fit the buffers that the forward laid out; all of them are small, and keeping them also
    spares a collective and a device-to-host wait.
    """
    if op in _CHOICES:
        return True
    if op in _INTEGER_EXCHANGES:
        return not args[0].is_floating_point()
    return (
        op == _aten._to_copy.default
        and not args[0].is_floating_point()
        and torch.device(kwargs.get("device") or args[0].device).type != args[0].device.type
    )


def is_always_kept(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether every policy keeps the result of an operator call, "full" too."""
    return not draws_random_numbers(op, args, kwargs) and (
        is_routing_decision(op, args, kwargs) or op == _KEPT_FOR_THE_COMPILER
    )


def draws_random_numbers(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator call moves the random state.

    A policy that kept its result would skip it in the recomputation, and every later draw of the
    block would get other numbers than in the forward. So none is ever kept; fused attention,
    otherwise worth keeping, is recomputed where it draws dropout.
    """
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    position = _dropout_argument(op)
    if position is None:
        return True
    argument = op._schema.arguments[position]
    value = args[position] if position < len(args) else kwargs.get(argument.name)
    return (argument.default_value if value is None else value) > 0


def _dropout_argument(op: Any) -> int | None:
    names = [argument.name for argument in op._schema.arguments]
    return names.index("dropout_p") if "dropout_p" in names else None


class SaveOps:
    """Operators whose outputs a policy keeps, and whether each of the user's was ever called.

    Args:
        names: [layer_wrap] save_ops, such as "aten.silu", "aten.add.Tensor" or
            "torchtitan_ext.grouped_mm"; without an overload all of them are meant.

    Raises:
        ValueError: a name is no operator, one that a policy never sees, or one that draws random
            numbers.
    """

    def __init__(self, names: list[str]) -> None:
        self._named = {name: frozenset(_find_overloads(name)) for name in names}
        self.kept = DEFAULT_SAVE_OPS.union(*self._named.values())
        """Operators whose outputs are kept."""
        self._called: set[Any] = set()

    def __reduce__(self) -> tuple[Any, ...]:
        return SaveOps, (list(self._named),)  # operators themselves can't be pickled

    def keep(self, op: Any) -> bool:
        self._called.add(op)
        return op in self.kept

    @property
    def uncalled(self) -> list[str]:
        """The names of the user's whose operators no layer has called."""
        return [name for name, ops in self._named.items() if self._called.isdisjoint(ops)]

    def check_called(self) -> None:
        """Raises ValueError for a name of the user's whose operator no layer has called."""
        for name in self.uncalled:
            raise no_operator(name)

    @property
    def is_default(self) -> bool:
        return not self._named


def no_operator(name: str) -> ValueError:
    """The error for a name of [layer_wrap] save_ops that no layer has met."""
    return ValueError(
        f'[layer_wrap] save_ops = "{name}": matches no operator of the layers with "op" '
        "checkpointing"
    )


def build_context_fn(
    save_ops: SaveOps | None = None, recompute_shapes: frozenset[tuple[int, int]] = frozenset()
) -> Callable[[], Any]:
    """The ``context_fn`` of a checkpoint: routing decisions are always kept.

    So the recomputation sends every token where the forward sent it.

    Args:
        save_ops: further operators to keep; None for full recomputation.
        recompute_shapes: shapes of right-hand matrices whose products are not kept all the same.
    """
    # A partial, as torch.compile takes no other callable object here, and its caches have to
    # pickle it, which rules out a function made on the spot.
    context_fn = functools.partial(_selective_contexts, save_ops, recompute_shapes)
    if save_ops is None or save_ops.is_default:
        # With a hash of what the policy does, AOTAutograd's cache serves the block on the next
        # start. Without one the policy is traced again, which tells whether a name was met.
        # (What this file says is part of the key already: see compile_cache.py.)
        context_fn.cache_hash = repr((save_ops is None, sorted(recompute_shapes)))  # type: ignore[attr-defined]
    return context_fn


def _selective_contexts(
    save_ops: SaveOps | None, recompute_shapes: frozenset[tuple[int, int]]
) -> Any:
    return create_selective_checkpoint_contexts(_policy(save_ops, recompute_shapes))


def _policy(
    save_ops: SaveOps | None, recompute_shapes: frozenset[tuple[int, int]]
) -> Callable[..., CheckpointPolicy]:
    num_mm: Counter[bool] = Counter()
    last_collective: Any = None

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        nonlocal last_collective
        if op.namespace == "_c10d_functional" and op != _c10d.wait_tensor.default:
            last_collective = op
        if draws_random_numbers(op, args, kwargs):
            return CheckpointPolicy.PREFER_RECOMPUTE
        if is_always_kept(op, args, kwargs):
            return CheckpointPolicy.MUST_SAVE
        if save_ops is None or not save_ops.keep(op):
            return CheckpointPolicy.PREFER_RECOMPUTE
        if op == _c10d.wait_tensor.default and last_collective not in save_ops.kept:
            # Its result is that of a collective that runs again: what a region has gathered.
            return CheckpointPolicy.PREFER_RECOMPUTE
        if op in _WEIGHT_ARGUMENT:
            if tuple(args[_WEIGHT_ARGUMENT[op]].shape) in recompute_shapes:
                return CheckpointPolicy.PREFER_RECOMPUTE
            # Every second product is kept, as in torchtitan: half the memory for half the work.
            num_mm[context.is_recompute] += 1
            if num_mm[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE

    return policy


def _find_overloads(name: str) -> list[Any]:
    namespace, _, rest = name.partition(".")
    packet_name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), packet_name or "?", None)
    overloads = []
    if isinstance(packet, torch._ops.OpOverloadPacket):
        found = [getattr(packet, found) for found in packet.overloads()]
        overloads = [op for op in found if overload in ("", op._overloadname)]
    if not overloads:
        hint = did_you_mean(name, _operator_names())
        raise ValueError(f'[layer_wrap] save_ops = "{name}": no such operator{hint}')
    if all(_is_composite(op) for op in overloads if not op._schema.is_mutable):
        raise ValueError(
            f'[layer_wrap] save_ops = "{name}": is made of other operators before a policy sees '
            "it; name one of those"
        )
    if any(_always_draws(op) for op in overloads):
        raise ValueError(
            f'[layer_wrap] save_ops = "{name}": draws random numbers; were they kept, what draws '
            "after them would get others in the recomputation than in the forward"
        )
    return overloads


def _always_draws(op: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags and _dropout_argument(op) is None


def _is_composite(op: Any) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


def _operator_names() -> set[str]:
    return {schema.name.replace("::", ".") for schema in torch._C._jit_get_all_schemas()}
