"""What every test starts from, and what none may leave behind."""

import torchtitan_ext.device  # noqa: F401  isort:skip  comes before any other part of torchtitan

import sys
from collections.abc import Iterator

import pytest
import torch

from torchtitan_ext.distributed.compile_cache import tag_compile_caches

torch.set_num_threads(1)
# Some tests compile a block without what a trainer does before.
tag_compile_caches()


@pytest.fixture(autouse=True)
def reproducible_and_clean() -> Iterator[None]:
    """Seeds torch, and checks that no switch of dynamo's stays turned on for the next test."""
    torch.manual_seed(0)
    yield
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        assert dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint is False
