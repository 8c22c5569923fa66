"""Rules on degrees and numbers of ranks, and on batches that are shared by them."""

from collections.abc import Iterator
from typing import Any

from torchtitan_ext.config.error import counted, listed, refusal


def check_degrees(parallelism: Any, world_size: int) -> int:
    """Check that the degrees fill ``world_size`` ranks, and return the shard degree they leave.

    Raises ConfigError that blames the key to change and lists what it may be.
    """
    p = parallelism
    replicate, shard = p.data_parallel_replicate_degree, p.data_parallel_shard_degree
    model_parallel = _check_model_degrees(p, world_size)
    on_ranks = f"on {counted(world_size, 'rank')}"
    taken = _taken(model_parallel)
    if world_size % (replicate * model_parallel):
        choices = listed(d for d in _divisors(world_size) if world_size % (d * model_parallel) == 0)
        raise refusal(
            "parallelism.data_parallel_replicate_degree",
            replicate,
            f"must divide the number of ranks: {choices} {on_ranks}{taken}",
        )
    left = world_size // (replicate * model_parallel)
    if shard not in (-1, left):
        others = f" with data_parallel_replicate_degree = {replicate}" if replicate > 1 else ""
        raise refusal(
            "parallelism.data_parallel_shard_degree",
            shard,
            "the product of the degrees must be the number of ranks: "
            f"must be {left} (or -1) {on_ranks}{taken}{others}",
        )
    _check_expert_degree(p, left * p.context_parallel_degree * p.tensor_parallel_degree)
    return left


def _check_model_degrees(parallelism: Any, world_size: int) -> int:
    """The product of the degrees that split the model; each has to divide what others leave."""
    product = 1
    for name in ("tensor", "context", "pipeline"):
        key = f"{name}_parallel_degree"
        degree = getattr(parallelism, key)
        left = world_size // product
        if left % degree:
            raise refusal(
                f"parallelism.{key}",
                degree,
                f"must divide the number of ranks: {listed(_divisors(left))} on "
                f"{counted(world_size, 'rank')}{_taken(product)}",
            )
        product *= degree
    return product


def _taken(product: int) -> str:
    return f", of which other degrees take {product}" if product > 1 else ""


def _check_expert_degree(parallelism: Any, sharded_ranks: int) -> None:
    degree = parallelism.expert_parallel_degree
    etp, tp = parallelism.expert_tensor_parallel_degree, parallelism.tensor_parallel_degree
    if etp not in (1, tp):
        raise refusal(
            "parallelism.expert_tensor_parallel_degree",
            etp,
            f"must be 1 or tensor_parallel_degree = {tp}",
        )
    if etp > 1 and degree == 1:
        raise refusal(
            "parallelism.expert_tensor_parallel_degree",
            etp,
            "has no effect while expert_parallel_degree is 1: experts, if the model has any, are "
            "then split over the ranks of tensor parallelism anyway",
        )
    if sharded_ranks % (degree * etp):
        of = "stage of a replica" if parallelism.pipeline_parallel_degree > 1 else "replica"
        # With etp, a degree of 1 is refused as well.
        choices = [d for d in _divisors(sharded_ranks // etp) if etp == 1 or d > 1]
        ranks = f"the {counted(sharded_ranks, 'rank')} of one {of}"
        if etp > 1:
            ranks += f", after expert_tensor_parallel_degree = {etp}"
        allowed = listed(choices) if choices else "they leave none for a degree above 1"
        raise refusal(
            "parallelism.expert_parallel_degree",
            degree,
            f"must divide {ranks}: {allowed}" if sharded_ranks > 1 else f"must be 1 on {ranks}",
        )


def check_zero(stage: int, replicate_degree: int, shard_degree: int) -> None:
    """Check that there are ranks to share what a ZeRO stage shares. One rank has a share of one.

    Raises ConfigError.
    """
    if stage != 3 and replicate_degree > 1 and shard_degree == 1:
        raise refusal(
            "zero.stage",
            stage,
            "has no effect, as every rank holds a replica (data_parallel_replicate_degree = "
            f"{replicate_degree}, and no shards)",
        )


def check_reshard(choice: str, world_size: int, shard_degree: int) -> None:
    """Check that there are gathered parameters to give up. Raises ConfigError.

    Args:
        choice: [parallelism] fsdp_reshard_after_forward.
        shard_degree: ranks that FSDP shards a parameter over, with all kinds of parallelism.
    """
    if choice != "default" and world_size > 1 and shard_degree == 1:
        raise refusal(
            "parallelism.fsdp_reshard_after_forward",
            choice,
            "has no effect, as no parameter is sharded (data_parallel_shard_degree is 1)",
        )


def check_offload(enabled: bool, fsdp_enabled: bool) -> None:
    """Check that there are parameters to keep on the host. Raises ConfigError."""
    if enabled and not fsdp_enabled:
        raise refusal(
            "training.enable_cpu_offload",
            True,
            "has no effect, as FSDP shards no parameter: it needs ranks to shard over "
            "(data_parallel_shard_degree), or tensor or context parallelism",
        )


def check_batch(training: Any, data_parallel_degree: int) -> None:
    """Check that the global batch is a whole number of local batches on every rank.

    Raises ConfigError that lists the nearest valid sizes.
    """
    size = training.global_batch_size
    unit = training.local_batch_size * data_parallel_degree
    if size == -1 or size % unit == 0:
        return
    below = size // unit * unit
    nearest = [valid for valid in (below, below + unit) if valid > 0]
    raise refusal(
        "training.global_batch_size",
        size,
        f"must be -1 or a multiple of {unit} (local_batch_size {training.local_batch_size} x "
        f"{data_parallel_degree} data parallel ranks); nearest: {listed(nearest)}",
    )


def check_seed_checkpoint(config: Any, world_size: int) -> None:
    """A seed checkpoint holds whole tensors, so one rank writes it. Raises ConfigError."""
    if config.checkpoint.create_seed_checkpoint and world_size > 1:
        raise refusal(
            "checkpoint.create_seed_checkpoint", True, f"needs 1 rank, not {world_size}: NGPU=1"
        )


def _divisors(number: int) -> Iterator[int]:
    return (d for d in range(1, number + 1) if number % d == 0)
