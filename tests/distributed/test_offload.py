"""Parameters kept on the host, as far as a CPU can show it: there both places are one device."""

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp import CPUOffloadPolicy

from tests import tiny
from tests.ranks import run_ranks
from tests.tiny import SGD, Run, assert_same, train
from torchtitan_ext.distributed import fsdp


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """One process."""
    flags = ["--training.local_batch_size=8", *SGD]
    return run_ranks(train, 1, flags, str(tmp_path_factory.mktemp("reference")))[0]


def train_offloaded(flags: list[str], folder: str) -> Any:
    """Trains as on an accelerator, but without its pinned memory; counts what is offloaded."""
    policies = []

    def policy_of_host() -> CPUOffloadPolicy:
        policies.append(CPUOffloadPolicy(pin_memory=False))
        return policies[-1]

    load_job_config = tiny.load_job_config
    fsdp.CPUOffloadPolicy = policy_of_host
    tiny.load_job_config = lambda *args, **kwargs: load_job_config(
        *args, **{**kwargs, "device_type": "cuda"}
    )
    return train(flags, folder), len(policies)


@pytest.mark.parametrize(
    "flags",
    [
        ["--training.local_batch_size=4", "--parallelism.expert_parallel_degree=2"],
        ["--training.local_batch_size=8", "--parallelism.tensor_parallel_degree=2"],
    ],
)
def test_offloaded_parameters_train_the_same(
    reference: Run, tmp_path: Path, flags: list[str]
) -> None:
    offload = "--training.enable_cpu_offload"
    run, num_policies = run_ranks(train_offloaded, 2, [*flags, *SGD, offload], str(tmp_path))[0]
    assert num_policies == 1
    assert_same(run, reference)
