"""Mixture of experts in plain torch: route, dispatch, compute, combine."""

from .args import MoEArgs
from .dispatch import AllToAllDispatcher, Dispatcher, DispatchState, LocalDispatcher
from .experts import GroupedExperts
from .layer import FeedForward, MoE, moe_layers
from .router import Routing, TokenChoiceRouter

__all__ = [
    "AllToAllDispatcher",
    "DispatchState",
    "Dispatcher",
    "FeedForward",
    "GroupedExperts",
    "LocalDispatcher",
    "MoE",
    "MoEArgs",
    "Routing",
    "TokenChoiceRouter",
    "moe_layers",
]
