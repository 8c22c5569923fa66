"""ZeRO's stages (arXiv:1910.02054) as policies of FSDP2: what a rank keeps between uses.

All stages have one layout of parameters, gradients and optimizer state, so clipping, checkpoints
and the optimizer are the same code.

=====  ==========================  ======================================
stage  full parameters             gradients are reduced
=====  ==========================  ======================================
1      from the first forward of   once a step; full ones are kept until
       a step to its last backward then
2      as in 1                     in every micro-batch
3      while a block needs them    in every micro-batch
=====  ==========================  ======================================
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


def share_micro_batch(model: nn.Module, stage: int, *, is_last: bool) -> None:
    """Tells FSDP2 what to reduce and what to give up after the next backward.

    Args:
        model: as ``apply_data_parallel`` left it; one without data parallelism is left alone.
        stage: [zero] stage; 1 for replicated parameters (DDP), which keep full gradients anyway.
        is_last: whether it is the step's last micro-batch.
    """
    if not isinstance(model, FSDPModule):
        return
    model.set_requires_gradient_sync(is_last or stage > 1)
    model.set_reshard_after_backward(is_last or stage > 2)


@dataclass
class StateBytes:
    """Bytes that one rank holds, at their largest over a step.

    The paper's terms for N ranks and parameters of P bytes, with Adam in the same precision:
    stage 1 keeps P + P + 2P/N, stage 2 P + P/N + 2P/N, stage 3 4P/N. FSDP2 also keeps the rank's
    own shard beside the gathered parameters: P/N, which the paper counts to the optimizer's state
    where that has a master copy.
    """

    shards: int = 0
    """Parameters that the rank owns and updates."""
    gathered: int = 0
    """Full parameters between the forward and the backward; those of a block in use not counted."""
    gradients: int = 0
    """After a micro-batch's backward."""
    optimizer: int = 0
    """The optimizer's moments."""

    def after_forward(self, *parts: nn.Module) -> None:
        """Looks at the parameters, before a backward."""
        self.shards = sum(_local_bytes(p) for part in parts for p in _shards(part))
        gathered = sum(_gathered_bytes(p) for part in parts for p in _fsdp_params(part))
        self.gathered = max(self.gathered, gathered)

    def after_backward(self, *parts: nn.Module) -> None:
        """Looks at the gradients, before they are set to None."""
        gradients = [p.grad for part in parts for p in _shards(part)]
        reduced = sum(_local_bytes(gradient) for gradient in gradients if gradient is not None)
        full = sum(_full_gradient_bytes(p) for part in parts for p in _fsdp_params(part))
        self.gradients = max(self.gradients, reduced + full)

    def after_step(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Looks at the optimizers' state."""
        self.optimizer = sum(
            _local_bytes(value)
            for optimizer in optimizers
            for state in optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.ndim > 0  # not the count of steps
        )

    def __str__(self) -> str:
        parts = {
            "parameters of its own": self.shards,
            "gathered ones": self.gathered,
            "gradients": self.gradients,
            "optimizer state": self.optimizer,
        }
        return ", ".join(f"{size / 2**20:.2f} MiB {name}" for name, size in parts.items())


def _local_bytes(tensor: torch.Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes


def _shards(model: nn.Module) -> list[torch.Tensor]:
    """The parameters that the optimizer updates, also while a module holds gathered ones."""
    if not isinstance(model, FSDPModule):
        return list(model.parameters())
    return [param.sharded_param for param in _fsdp_params(model)]


def _fsdp_params(model: nn.Module) -> Iterator[Any]:
    """FSDP2's own record of each parameter."""
    fsdp_modules = (module for module in model.modules() if isinstance(module, FSDPModule))
    # Modules that are gathered together share a state.
    for state in dict.fromkeys(module._get_fsdp_state() for module in fsdp_modules):
        for group in state._fsdp_param_groups:
            yield from group.fsdp_params


def _gathered_bytes(param: Any) -> int:
    return sum(output.untyped_storage().nbytes() for output in param.all_gather_outputs)


def _full_gradient_bytes(param: Any) -> int:
    """Gradients that wait, unreduced, for the step's last micro-batch."""
    unsharded = getattr(param, "_unsharded_param", None)
    gradients = [param.unsharded_accumulated_grad, None if unsharded is None else unsharded.grad]
    return sum(gradient.nbytes for gradient in gradients if gradient is not None)
