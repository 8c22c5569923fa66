"""What shows of compiled blocks from outside: their graphs, and what they keep for the backward."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters

from .regions import tensors_in


@dataclass
class CompiledBlock:
    """A compiled block in a step's first micro-batch."""

    runs_compiled: bool = False
    """Whether a compiled graph is what the backward goes through."""
    graphs: int = 0
    """Compiled when it was first called; 0 if it uses those of a block before it."""
    graph_breaks: int = 0
    saved_bytes: int = 0
    """Computed in its forward and kept for its backward."""


class GraphRecorder:
    """Records the compiled blocks of the parts' ``layers`` in their next forward."""

    def __init__(self, *parts: nn.Module) -> None:
        self.blocks: dict[str, CompiledBlock] = {}
        layers = [part.get_submodule("layers") for part in parts]
        for name, block in (layer for part in layers for layer in part.named_children()):
            if block._compiled_call_impl is not None:
                # Hooks would be compiled with the block.
                block._compiled_call_impl = self._watch(  # type: ignore[assignment]
                    f"layers.{name}", block._compiled_call_impl
                )

    def _watch(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if name in self.blocks or not torch.is_grad_enabled():
                return call(*args, **kwargs)
            graphs, breaks = _num_graphs(), _num_breaks()
            output = call(*args, **kwargs)
            inputs = tensors_in([args, kwargs])
            nodes = list(_nodes_between(inputs, tensors_in(output)))
            self.blocks[name] = CompiledBlock(
                runs_compiled=any("CompiledFunction" in node.name() for node in nodes),
                graphs=_num_graphs() - graphs,
                graph_breaks=_num_breaks() - breaks,
                saved_bytes=_saved_bytes(nodes, inputs),
            )
            return output

        return watched


def _num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def _num_breaks() -> int:
    return sum(counters["graph_break"].values())


def _nodes_between(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> Iterator[Any]:
    """The autograd nodes of what was computed."""
    seen = {tensor.grad_fn for tensor in inputs}
    waiting = [tensor.grad_fn for tensor in outputs]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [following for following, _ in node.next_functions]


def _saved_bytes(nodes: list[Any], inputs: list[torch.Tensor]) -> int:
    """Bytes that nodes hold, without the inputs and parameters."""
    parameters = [node.variable for node in nodes if hasattr(node, "variable")]
    known = {_storage(tensor)._cdata for tensor in [*inputs, *parameters]}
    saved = {
        _storage(tensor)._cdata: _storage(tensor).nbytes()
        for node in nodes
        for tensor in _saved_by(node)
    }
    return sum(size for storage, size in saved.items() if storage not in known)


def _saved_by(node: Any) -> list[torch.Tensor]:
    # A compiled graph is one node; it keeps some of its tensors apart.
    saved = [*getattr(node, "saved_tensors", ()), *getattr(node, "_tensors_no_vc_check", ())]
    return [tensor for tensor in saved if tensor is not None]


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.untyped_storage()
