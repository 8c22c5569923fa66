"""Which operators' outputs a checkpointed block keeps instead of recomputing them."""

import difflib
from typing import Any

import torch

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional

# What selective "op" checkpointing keeps: results that are dear to compute or to communicate.
DEFAULT_SAVE_OPS = frozenset(
    {
        _aten.mm.default,
        _aten.bmm.default,
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


def resolve_save_ops(names: list[str]) -> set[Any]:
    """The default operators and those that [layer_wrap] save_ops names.

    Args:
        names: such as "aten.silu", "aten.add.Tensor" or "torchtitan_ext.grouped_mm"; without an
            overload all of them are meant.

    Raises:
        ValueError: a name is no operator.
    """
    return set(DEFAULT_SAVE_OPS).union(*(_overloads(name) for name in names))


def _overloads(name: str) -> list[Any]:
    namespace, _, rest = name.partition(".")
    packet_name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, namespace), packet_name or "?", None)
    overloads = packet.overloads() if packet is not None else []
    if overload:
        overloads = [found for found in overloads if found == overload]
    if not overloads:
        raise ValueError(f'[layer_wrap] save_ops = "{name}": no such operator{_hint(name)}')
    return [getattr(packet, found) for found in overloads]


def _hint(name: str) -> str:
    known = {schema.name.replace("::", ".") for schema in torch._C._jit_get_all_schemas()}
    nearest = difflib.get_close_matches(name, known, n=1)
    return f' (did you mean "{nearest[0]}"?)' if nearest else ""
