"""How a configuration cuts the model into stages, and what a schedule demands; no process group."""

import csv
import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    _Action,
    _add_send_recv,
    _ComputationType,
    _validate_schedule,
    get_schedule_class,
)
from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part

from torchtitan_ext.config.error import counted, refusal

from .fsdp import gives_up_parameters
from .layer_wrap import LayerPlan
from .mesh import ExtParallelDims

_SPLIT_BACKWARD = ("InterleavedZeroBubble", "ZBVZeroBubble")
_HALVES = (_ComputationType.BACKWARD_INPUT, _ComputationType.BACKWARD_WEIGHT)
_DEGREE = "parallelism.pipeline_parallel_degree"
_SCHEDULE = "parallelism.pipeline_parallel_schedule"
_CSV = "parallelism.pipeline_parallel_schedule_csv"
_MICRO_BATCH = "parallelism.pipeline_parallel_microbatch_size"
_PER_STAGE = "parallelism.pipeline_parallel_layers_per_stage"
_FQNS = "parallelism.module_fqns_per_model_part"


@dataclass(frozen=True)
class PipelinePlan:
    """What a schedule works on."""

    num_stages: int
    num_micro_batches: int
    """In one step of the schedule."""
    splits_backward: bool
    """Whether gradients of inputs and of weights are computed apart."""


def check_pipeline(
    job_config: Any, parallel_dims: ExtParallelDims, layer_plans: Collection[LayerPlan]
) -> None:
    """Checks what pipeline parallelism demands of a model with these layers.

    Raises ValueError, as ``[section] key = value: rule``.
    """
    if not parallel_dims.pp_enabled:
        return
    _check_accumulation(job_config, parallel_dims)
    plan = plan_pipeline(job_config, len(layer_plans))
    if plan.splits_backward:
        _check_split_backward(job_config, parallel_dims, layer_plans)
    _check_validation(job_config, plan)
    if job_config.routing.record and job_config.parallelism.pipeline_parallel_schedule_csv:
        raise refusal(
            "routing.record",
            True,
            "not supported with pipeline_parallel_schedule_csv, which has micro-batches in any "
            "order",
        )


def plan_pipeline(job_config: Any, num_layers: int) -> PipelinePlan:
    """Reads the keys of [parallelism]; raises ConfigError if they don't fit one another."""
    parallelism, batch = job_config.parallelism, job_config.training.local_batch_size
    size = parallelism.pipeline_parallel_microbatch_size
    if batch % size:
        raise refusal(_MICRO_BATCH, size, f"must divide [training] local_batch_size = {batch}")
    num_micro_batches = batch // size
    num_stages = _num_stages(parallelism, num_layers)
    if parallelism.pipeline_parallel_schedule_csv:
        splits = _check_csv(parallelism, num_stages, num_micro_batches)
    else:
        _check_micro_batches(parallelism, num_micro_batches)
        splits = parallelism.pipeline_parallel_schedule in _SPLIT_BACKWARD
    return PipelinePlan(num_stages, num_micro_batches, splits)


def _num_stages(parallelism: Any, num_layers: int) -> int:
    """The number of stages, in all; each has a share of the layers."""
    degree, schedule = parallelism.pipeline_parallel_degree, parallelism.pipeline_parallel_schedule
    single = issubclass(get_schedule_class(schedule), PipelineScheduleSingle)
    if parallelism.module_fqns_per_model_part is not None:
        key, value = _FQNS, parallelism.module_fqns_per_model_part
        num_stages = _check_modules(parallelism, num_layers)
    elif parallelism.pipeline_parallel_layers_per_stage is not None:
        key, value = _PER_STAGE, parallelism.pipeline_parallel_layers_per_stage
        weights = _weights(parallelism)
        num_stages = math.ceil((num_layers + sum(weights.values())) / value)
    else:
        key, value = _DEGREE, degree
        num_stages = degree if single else 2 * degree
    per_rank = num_stages / degree
    rule = "1 stage" if single else "2 stages" if schedule == "ZBVZeroBubble" else "2 or more"
    fits = per_rank == 1 if single else per_rank == 2 if rule == "2 stages" else per_rank >= 2
    if not fits or num_stages % degree:
        raise refusal(
            key,
            value,
            f"gives {counted(num_stages, 'stage')}, and {schedule} needs {rule} on each of "
            f"{degree} ranks, equally many",
        )
    if num_stages > num_layers:
        raise refusal(
            key,
            value,
            f"gives {counted(num_stages, 'stage')}, but the model has "
            f"{counted(num_layers, 'layer')}",
        )
    if key != _FQNS:
        _check_weights(parallelism, num_stages, num_layers)
    return num_stages


def _weights(parallelism: Any) -> dict[str, int]:
    return {
        f"parallelism.pipeline_parallel_{end}_stage_less_layers": getattr(
            parallelism, f"pipeline_parallel_{end}_stage_less_layers"
        )
        for end in ("first", "last")
    }


def _check_weights(parallelism: Any, num_stages: int, num_layers: int) -> None:
    weights = _weights(parallelism)
    try:
        generate_llm_fqn_per_model_part(num_stages, num_layers, *weights.values())
    except ValueError:
        key = max(weights, key=lambda name: weights[name])
        first, last = weights.values()
        raise refusal(
            key,
            weights[key],
            f"is more than a stage's share: ({num_layers} layers + {first} + {last}) / "
            f"{num_stages} stages",
        ) from None


def _check_modules(parallelism: Any, num_layers: int) -> int:
    """The number of stages of a cut by hand, which has to have every module once, in order."""
    stages = parallelism.module_fqns_per_model_part
    layers = [f"layers.{i}" for i in range(num_layers)]
    if [name for stage in stages for name in stage] != [
        "tok_embeddings",
        *layers,
        "norm",
        "output",
    ]:
        raise refusal(
            _FQNS,
            stages,
            f"must name every module once, in order: tok_embeddings, layers.0 to {layers[-1]}, "
            "norm, output",
        )
    if not all(stages):
        raise refusal(_FQNS, stages, "has a stage without any module")
    others = {_PER_STAGE: parallelism.pipeline_parallel_layers_per_stage, **_weights(parallelism)}
    for key, value in others.items():
        if value != (None if key == _PER_STAGE else 1):
            raise refusal(key, value, f"has no effect with {_FQNS}")
    return len(stages)


def _check_micro_batches(parallelism: Any, num_micro_batches: int) -> None:
    """What the named schedule demands of the number of micro-batches."""
    schedule, degree = parallelism.pipeline_parallel_schedule, parallelism.pipeline_parallel_degree
    if schedule.startswith("PipelineSchedule"):
        raise refusal(_SCHEDULE, schedule, f"needs an order of its steps: {_CSV}")
    has = f"; there are {num_micro_batches} (local_batch_size / pipeline_parallel_microbatch_size)"
    if schedule == "1F1B" and num_micro_batches < degree:
        raise refusal(_SCHEDULE, schedule, f"needs {degree} micro-batches or more, a stage{has}")
    rounds = max(1, num_micro_batches // degree)
    if schedule in ("Interleaved1F1B", "InterleavedZeroBubble") and num_micro_batches % rounds:
        rule = f"needs micro-batches in equal rounds, a multiple of {rounds} on {degree} ranks"
        raise refusal(_SCHEDULE, schedule, rule + has)


def _check_csv(parallelism: Any, num_stages: int, num_micro_batches: int) -> bool:
    """Checks a schedule's file; whether it splits the backward."""
    path, degree = parallelism.pipeline_parallel_schedule_csv, parallelism.pipeline_parallel_degree
    schedule = parallelism.pipeline_parallel_schedule
    if not schedule.startswith("PipelineSchedule"):
        raise refusal(
            _CSV,
            path,
            "needs pipeline_parallel_schedule = PipelineScheduleSingle or PipelineScheduleMulti "
            f"(one stage a rank, or several); it is {schedule}",
        )
    try:
        with open(path, newline="") as file:
            rows = [[_Action.from_str(text) for text in row] for row in csv.reader(file)]
        mapping = _validate_schedule(dict(enumerate(rows)), degree, num_stages, num_micro_batches)
    except (OSError, UnicodeDecodeError):
        raise refusal(_CSV, path, "can't be read") from None
    except (AssertionError, RuntimeError, KeyError) as error:
        what = f"unknown stage {error}" if isinstance(error, KeyError) else str(error)
        raise refusal(_CSV, path, what.splitlines()[0]) from None
    _check_order(path, rows, num_stages, mapping)
    for stage, rank in sorted(mapping.items()):
        if rank != stage % degree:
            raise refusal(
                _CSV, path, f"has stage {stage} on rank {rank}; it is on rank {stage % degree}"
            )
    return any(action and action.computation_type in _HALVES for row in rows for action in row)


def _check_split_backward(
    job_config: Any, parallel_dims: ExtParallelDims, layer_plans: Collection[LayerPlan]
) -> None:
    """Raises ConfigError for what goes wrong between the halves of a backward."""
    parallelism = job_config.parallelism
    key = _CSV if parallelism.pipeline_parallel_schedule_csv else _SCHEDULE
    value = getattr(parallelism, key.partition(".")[2])
    recomputed = [p.layer_id for p in layer_plans if p.checkpoint != "none" and not p.compile]
    if recomputed:
        raise refusal(
            key,
            value,
            "splits the backward, and torch recomputes an eager layer for one half alone: compile "
            f"the layers that are recomputed, or don't recompute; layer {recomputed[0]} is eager",
        )
    gives_up = job_config.zero.stage == 3 and gives_up_parameters(job_config)
    if parallel_dims.fsdp_enabled and gives_up:
        raise refusal(
            key,
            value,
            "splits the backward, and torch finds no gradients of parameters that FSDP has given "
            'up between the halves: fsdp_reshard_after_forward must not be "always"',
        )


def _check_order(
    path: str, rows: list[list[_Action | None]], num_stages: int, mapping: dict[int, int]
) -> None:
    """Raises ConfigError if ranks would wait for one another."""
    steps = {rank: [action for action in row if action] for rank, row in enumerate(rows)}
    try:
        _add_send_recv(steps, lambda stage: mapping[stage], num_stages)
    except AssertionError:
        raise refusal(_CSV, path, "its ranks would wait for one another forever") from None


def _check_accumulation(job_config: Any, parallel_dims: ExtParallelDims) -> None:
    if not parallel_dims.fsdp_enabled:
        return
    if job_config.zero.stage != 3 and _num_steps(job_config, parallel_dims) > 1:
        raise refusal(
            "zero.stage",
            job_config.zero.stage,
            "must be 3 with pipeline_parallel_degree > 1 and gradient accumulation: torch's "
            "schedules reduce gradients, and give parameters up, after each local batch",
        )


def _num_steps(job_config: Any, parallel_dims: ExtParallelDims) -> int:
    """Steps of the schedule in one optimizer step."""
    training = job_config.training
    batch = training.local_batch_size * parallel_dims.num_data_ranks
    return max(1, training.global_batch_size // batch)


def _check_validation(job_config: Any, plan: PipelinePlan) -> None:
    validation, schedule = job_config.validation, job_config.parallelism.pipeline_parallel_schedule
    if not validation.enable:
        return
    if schedule == "ZBVZeroBubble":
        raise refusal(
            "validation.enable",
            True,
            f'not supported with pipeline_parallel_schedule = "{schedule}": torch can\'t run it '
            "without a backward",
        )
    if validation.local_batch_size % plan.num_micro_batches:
        raise refusal(
            "validation.local_batch_size",
            validation.local_batch_size,
            f"must be a multiple of the schedule's {plan.num_micro_batches} micro-batches",
        )
