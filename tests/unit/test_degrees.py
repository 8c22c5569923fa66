"""What each refusal of degrees, batches and devices says."""

import pytest

from tests.fake_model import load, refusal_of

pytestmark = pytest.mark.usefixtures("run_folder")


@pytest.mark.parametrize(
    ("world_size", "degrees", "message"),
    [
        (4, {"data_parallel_shard": 3}, "shard_degree = 3: the product of the degrees must be the"),
        (
            4,
            {"data_parallel_shard": 3, "data_parallel_replicate": 2},
            "must be 2 (or -1) on 4 ranks with data_parallel_replicate_degree = 2",
        ),
        (1, {"data_parallel_shard": 2}, "must be 1 (or -1) on 1 rank"),
        (4, {"data_parallel_replicate": 3}, "replicate_degree = 3: must divide the number of ran"),
        (4, {"data_parallel_replicate": 3}, "1, 2 or 4 on 4 ranks"),
        (4, {"data_parallel_replicate": 8, "data_parallel_shard": 1}, "replicate_degree = 8:"),
        (4, {"data_parallel_shard": 0}, "shard_degree = 0: must be -1 or at least 1"),
        (4, {"data_parallel_replicate": 0}, "replicate_degree = 0: must be at least 1"),
        (8, {"expert_parallel": 3}, "expert_parallel_degree = 3: must divide the 8 ranks"),
        (8, {"expert_parallel": 3}, "one replica: 1, 2, 4 or 8"),
        (8, {"data_parallel_replicate": 2, "expert_parallel": 8}, "divide the 4 ranks"),
    ],
)
def test_degrees_not_fitting_are_refused(
    world_size: int, degrees: dict[str, int], message: str
) -> None:
    flags = [f"--parallelism.{name}_degree={degree}" for name, degree in degrees.items()]
    refused = refusal_of(*flags, world_size=world_size)
    assert refused.startswith("[parallelism] ")
    assert message in refused


@pytest.mark.parametrize(
    ("replicate", "shard", "expert"), [(1, -1, 4), (1, 4, 1), (2, 2, 2), (4, 1, 1), (2, -1, 2)]
)
def test_degrees_fitting_are_accepted(replicate: int, shard: int, expert: int) -> None:
    load(
        f"--parallelism.data_parallel_replicate_degree={replicate}",
        f"--parallelism.data_parallel_shard_degree={shard}",
        f"--parallelism.expert_parallel_degree={expert}",
    )


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (10, "must be -1 or a multiple of 8 (local_batch_size 2 x 4 data parallel ranks)"),
        (10, "nearest: 8 or 16"),
        (3, "nearest: 8"),
        (16, None),
        (-1, None),
    ],
)
def test_global_batch_size_must_be_whole(size: int, message: str | None) -> None:
    flags = (f"--training.global_batch_size={size}", "--training.local_batch_size=2")
    if message is None:
        load(*flags)
    else:
        assert message in refusal_of(*flags)


@pytest.mark.parametrize(
    "flags",
    [
        ["--profiling.enable_memory_snapshot"],
        ["--training.dataloader.pin_memory"],
        ["--training.enable_cpu_offload", "--parallelism.tensor_parallel_degree=2"],
        ["--validation.dataloader.pin_memory", "--validation.enable"],
        ["--checkpoint.async_mode=async_with_pinned_mem", "--checkpoint.enable"],
    ],
)
def test_accelerator_feature_on_cpu_is_refused(flags: list[str]) -> None:
    assert "needs an accelerator" in refusal_of(*flags)
    load(*flags, device_type="cuda")


@pytest.mark.parametrize(
    ("flags", "world_size"), [([], 1), (["--parallelism.data_parallel_replicate_degree=2"], 2)]
)
def test_offload_of_parameters_that_are_not_sharded_is_refused(
    flags: list[str], world_size: int
) -> None:
    offload = [*flags, "--training.enable_cpu_offload"]
    assert "has no effect, as FSDP shards no" in refusal_of(
        *offload, world_size=world_size, device_type="cuda"
    )
    load(*offload, world_size=4, device_type="cuda")
