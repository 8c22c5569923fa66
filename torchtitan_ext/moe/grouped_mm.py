"""Products of consecutive row groups with one matrix per group.

Shapes: R rows, e groups (local experts), I input width, O output width.

``torch._grouped_mm`` does this in one kernel, but it refuses zero rows, and its shape check under
torch.compile refuses float32 on a CPU. Wrapped as an operator of our own it has neither limit.
"""

from typing import Any

import torch


@torch.library.custom_op("torchtitan_ext::grouped_mm", mutates_args=())
def _grouped_mm(
    x_RI: torch.Tensor, weight_eIO: torch.Tensor, offsets_e: torch.Tensor
) -> torch.Tensor:
    if x_RI.shape[0] == 0:
        return x_RI.new_empty(0, weight_eIO.shape[-1])
    return torch._grouped_mm(x_RI.contiguous(), weight_eIO, offs=offsets_e)


@_grouped_mm.register_fake
def _(x_RI: torch.Tensor, weight_eIO: torch.Tensor, offsets_e: torch.Tensor) -> torch.Tensor:
    return x_RI.new_empty(x_RI.shape[0], weight_eIO.shape[-1])


@torch.library.custom_op("torchtitan_ext::grouped_outer", mutates_args=())
def _grouped_outer(x_RI: torch.Tensor, y_RO: torch.Tensor, offsets_e: torch.Tensor) -> torch.Tensor:
    """``x.T @ y`` of each row group: the gradient of the weight, (e, I, O). Empty groups get 0."""
    if x_RI.shape[0] == 0:
        return x_RI.new_zeros(offsets_e.shape[0], x_RI.shape[1], y_RO.shape[1])
    return torch._grouped_mm(x_RI.contiguous().t(), y_RO.contiguous(), offs=offsets_e)


@_grouped_outer.register_fake
def _(x_RI: torch.Tensor, y_RO: torch.Tensor, offsets_e: torch.Tensor) -> torch.Tensor:
    return x_RI.new_empty(offsets_e.shape[0], x_RI.shape[1], y_RO.shape[1])


def _save_inputs(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad_RO: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
    x_RI, weight_eIO, offsets_e = ctx.saved_tensors
    grad_x_RI = _grouped_mm(grad_RO, weight_eIO.transpose(-2, -1), offsets_e)
    # Computed as (e, O, I) and transposed: the layout of the parameter, see GroupedExperts.
    grad_weight_eIO = _grouped_outer(grad_RO, x_RI, offsets_e).transpose(-2, -1)
    return grad_x_RI, grad_weight_eIO, None


_grouped_mm.register_autograd(_backward, setup_context=_save_inputs)
for _device_type in ("cpu", "cuda"):
    _grouped_mm.register_autocast(_device_type, torch.bfloat16)


def grouped_mm(
    x_RI: torch.Tensor, weight_eIO: torch.Tensor, tokens_per_expert_e: torch.Tensor
) -> torch.Tensor:
    """Multiplies each group of consecutive rows with its own matrix.

    Args:
        x_RI: rows, group after group.
        weight_eIO: a matrix per group.
        tokens_per_expert_e: rows of each group, integers that sum to R.

    Returns:
        (R, O), in the type of ``x_RI``.
    """
    offsets_e = tokens_per_expert_e.cumsum(0).to(torch.int32)
    return _grouped_mm(x_RI, weight_eIO, offsets_e)


def grouped_mm_loop(
    x_RI: torch.Tensor, weight_eIO: torch.Tensor, tokens_per_expert_e: torch.Tensor
) -> torch.Tensor:
    """The same, one product after the other: the reference, and the way for any type and width."""
    groups = x_RI.split(tokens_per_expert_e.tolist())
    # unbind: indexing weight[i] would build a full-size gradient for every group
    return torch.cat([rows @ w for rows, w in zip(groups, weight_eIO.unbind(0), strict=True)])


def has_grouped_mm(device: torch.device, dtype: torch.dtype, *widths: int) -> bool:
    """Whether the one-kernel product runs for this device, type and these matrix widths."""
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False
    if device.type == "cuda" and (
        dtype != torch.bfloat16 or torch.cuda.get_device_capability(device) < (8, 0)
    ):
        return False
    # every row must start at a multiple of 16 bytes
    return all(width * dtype.itemsize % 16 == 0 for width in widths)
