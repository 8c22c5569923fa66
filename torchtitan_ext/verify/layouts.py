"""Does a layout compute what one process computes? Parameter by parameter."""

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch

from torchtitan_ext.config.effects import GOVERNED
from torchtitan_ext.config.values import split_flags

from .step import (
    NEGLIGIBLE,
    StepRecord,
    gradient_errors,
    in_float32,
    largest_gradient,
    obvious_fault,
    relative_error,
)

# Names of degrees in a layout, and the keys they stand for.
DEGREES = {
    "dp_replicate": "data_parallel_replicate_degree",
    "dp_shard": "data_parallel_shard_degree",
    "ep": "expert_parallel_degree",
    "etp": "expert_tensor_parallel_degree",
    "tp": "tensor_parallel_degree",
    "cp": "context_parallel_degree",
    "pp": "pipeline_parallel_degree",
}
# dp_shard = -1 is what the other degrees leave of the ranks.
_NO_DEGREES = {name: -1 if name == "dp_shard" else 1 for name in DEGREES}
# How much further than the reordered sums of one process a layout's may lie from them.
_MARGIN = 20
_LEAST_BOUND = 1e-5
# torch sums the squares of a large float32 tensor, BERT's embedding, up to 3e-4 off on a CPU.
_NORM_BOUND = 1e-3
_SAME_RATIO = 1e-3
_LEARNING_RATE = 0.1


@dataclass(frozen=True)
class Layout:
    """Degrees other than 1, by their short names, and a ZeRO stage."""

    name: str
    degrees: dict[str, int] = field(default_factory=dict)
    zero: int = 3

    @property
    def flags(self) -> list[str]:
        """All degrees: those that the layout does not name are not the TOML file's."""
        degrees = {**_NO_DEGREES, **self.degrees}
        flags = [f"--parallelism.{DEGREES[name]}={degree}" for name, degree in degrees.items()]
        return [*flags, f"--zero.stage={self.zero}"]

    def applied_to(self, flags: list[str]) -> list[str]:
        """The layout's flags after those of ``flags`` that speak of no parallelism it lacks."""
        off = {f"parallelism.{key}" for name, key in DEGREES.items() if name not in self.degrees}
        kept = []
        for name, text in split_flags(flags):
            switches = GOVERNED.get(name.replace(".no_", "."), ())
            if not any(off.issuperset(switch.keys) for switch in switches):
                kept.append(f"--{name}" if text is None else f"--{name}={text}")
        return [*kept, *self.flags]


@dataclass
class LayoutVerdict:
    """A layout beside one process."""

    layout: str
    verdict: str
    """"equal" in every bit, "rounding", or "wrong"."""
    reason: str
    worst_parameter: str | None
    """None, as all that follows, if the step fails."""
    error: float | None
    """Of its gradient, over the gradient's largest element."""
    bound: float | None
    """What counts as rounding."""
    ratio: float | None
    """By what its gradient is too large, if it is a multiple of the right one."""
    loss: float | None
    grad_norm: float | None


def parse_layouts(text: str) -> list[Layout]:
    """Reads "ep=2,dp_replicate=2:ep=2,zero=1"; "fsdp" is the one that only shards.

    Raises:
        ValueError: names what is no layout.
    """
    return [_parse_layout(part.strip()) for part in text.split(",")]


def _parse_layout(text: str) -> Layout:
    numbers: dict[str, int] = {}
    for part in [] if text == "fsdp" else text.split(":"):
        name, _, number = part.partition("=")
        if not number.isdecimal() or name not in (*DEGREES, "zero"):
            raise ValueError(
                f"{text!r}: must be fsdp, or degrees such as ep=2 or dp_replicate=2:ep=2; "
                f"known are {', '.join(DEGREES)} and zero"
            )
        if name in numbers:
            raise ValueError(f"{text!r}: {name} is given twice")
        numbers[name] = int(number)
    zero = numbers.pop("zero", 3)
    return Layout(text, numbers, zero)


def all_layouts(num_ranks: int) -> list[Layout]:
    """Every way to fill the ranks, the ones that are not supported too, and ZeRO's stages."""
    layouts = [Layout("fsdp")]
    layouts += [Layout(f"zero={stage}", {}, stage) for stage in (1, 2)]
    divisors = [d for d in range(1, num_ranks + 1) if num_ranks % d == 0]
    for pp, cp, tp, replicate in itertools.product(divisors, repeat=4):
        if num_ranks % (pp * cp * tp * replicate):
            continue
        # What is left shards. Experts are dealt out over all ranks that share one replica.
        sharing = num_ranks // (pp * replicate)
        for ep, etp in itertools.product(divisors, sorted({1, tp})):
            if sharing % (ep * etp) or (ep == 1 and etp > 1):
                continue
            degrees = {"dp_replicate": replicate, "pp": pp, "cp": cp, "tp": tp, "ep": ep}
            degrees = {name: d for name, d in (degrees | {"etp": etp}).items() if d > 1}
            if degrees:
                layouts.append(Layout(_name(degrees), degrees))
    return layouts


def _name(degrees: dict[str, int]) -> str:
    return ":".join(f"{name}={degree}" for name, degree in degrees.items())


def for_comparison(config: Any) -> Any:
    """The same configuration, with what would hide or blur a wrong gradient taken out.

    float32, no clipping, plain SGD (Adam divides a wrong scale away), and no dropout: data ranks
    draw masks of their own.
    """
    config = in_float32(config)
    config.optimizer.name, config.optimizer.lr = "SGD", _LEARNING_RATE
    config.optimizer.weight_decay = 0.0
    config.lr_scheduler.warmup_steps = 0
    for site in ("embedding", "attention", "residual"):
        setattr(config.dropout, site, 0.0)
    return config


def rounding_bounds(reference: StepRecord, reordered: StepRecord) -> dict[str, float]:
    """What the same sums in another order can differ by, for each parameter.

    Over its gradient's largest element. Where the true gradient is zero, all of it is rounding.

    Raises:
        ValueError: one process itself computes what is no number.
    """
    for name, gradient in reference.gradients.items():
        if not gradient.isfinite().all():
            raise ValueError(f"gradient of {name} is not finite on one process")
    return {
        name: max(_MARGIN * error, _LEAST_BOUND)
        for name, error in gradient_errors(reordered, reference).items()
    }


def judge(
    layout: Layout,
    actual: StepRecord,
    reference: StepRecord,
    bounds: dict[str, float],
    num_ranks: int,
) -> LayoutVerdict:
    """Compares gradients, new weights, loss, norm and expert counts with one process's."""
    errors = gradient_errors(actual, reference)
    # The first that is wrong, in the model's order; else the worst.
    wrong = [name for name, error in errors.items() if error > bounds.get(name, _LEAST_BOUND)]
    worst = wrong[0] if wrong else max(errors, key=lambda name: errors[name])
    ratio = None
    if wrong:
        found, expected = actual.gradients.get(worst), reference.gradients.get(worst)
        fault = obvious_fault(found, expected)
        if not fault:
            ratio = _ratio(found, expected)
            fault = _named(ratio, layout, num_ranks)
        others = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        reason = f"gradient of {worst} {fault}{others}"
    else:
        reason = _other_fault(actual, reference, bounds)
    is_equal = not reason and all(
        torch.equal(actual.gradients[name], gradient)
        for name, gradient in reference.gradients.items()
    )
    return LayoutVerdict(
        layout=layout.name,
        verdict="wrong" if reason else "equal" if is_equal else "rounding",
        reason=reason,
        worst_parameter=worst,
        error=errors[worst],
        bound=bounds.get(worst, _LEAST_BOUND),
        ratio=ratio,
        loss=actual.loss,
        grad_norm=actual.grad_norm,
    )


def failed(layout: Layout, reason: str) -> LayoutVerdict:
    """The verdict on a layout whose step fails."""
    return LayoutVerdict(layout.name, "wrong", reason, None, None, None, None, None, None)


def _other_fault(actual: StepRecord, reference: StepRecord, bounds: dict[str, float]) -> str:
    """What is wrong though the first rank's gradients are right; empty if nothing is."""
    for name in actual.unequal_gradients:
        return f"gradient of {name} is not the same on all replicas"
    if actual.counts != reference.counts:
        return "tokens per expert are not one process's"
    if not _relative(actual.loss, reference.loss) <= _LEAST_BOUND:
        return f"loss is {actual.loss:.6f}, one process's {reference.loss:.6f}"
    expected_norm = norm_of(reference)
    if not _relative(actual.grad_norm, expected_norm) <= _NORM_BOUND:
        return f"gradient norm is {actual.grad_norm:.6f}, one process's {expected_norm:.6f}"
    return _wrong_weight(actual, reference, bounds)


def norm_of(record: StepRecord) -> float:
    """The norm of all gradients, summed in float64."""
    norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in record.gradients.values()]
    return float(torch.linalg.vector_norm(torch.stack(norms)))


def _wrong_weight(actual: StepRecord, reference: StepRecord, bounds: dict[str, float]) -> str:
    for name in actual.unequal_weights:
        return f"{name} is not the same on all replicas after the step"
    # A bias that began with 0 is as large as its step.
    negligible = _LEARNING_RATE * largest_gradient(reference) * NEGLIGIBLE
    for name, expected in reference.weights.items():
        error = relative_error(actual.weights.get(name), expected, negligible)
        if error > bounds.get(name, _LEAST_BOUND):
            though = ", though its gradient is" if name in reference.gradients else ""
            return f"{name} is not one process's after the step{though}"
    return ""


def _named(ratio: float | None, layout: Layout, num_ranks: int) -> str:
    """Says a ratio, and which degree it is if it is one."""
    if ratio is None:
        return "is not a multiple of the right one"
    degrees = {DEGREES[name]: degree for name, degree in layout.degrees.items()}
    degrees["the number of ranks"] = num_ranks
    for name, degree in degrees.items():
        for value, text in ((degree, name), (1 / degree, f"1 / {name}")):
            if abs(ratio / value - 1) <= _SAME_RATIO and degree > 1:
                return f"is {value:g} times the right one: exactly {value:g} = {text}"
    return f"is {ratio:.4g} times the right one"


def _ratio(found: Any, expected: Any) -> float | None:
    """The factor between two tensors, if one is a multiple of the other."""
    ratio = float((found.double() * expected).sum() / (expected.double() ** 2).sum())
    return ratio if relative_error(found, expected * ratio, 1e-30) <= _SAME_RATIO else None


def _relative(found: float, expected: float) -> float:
    return abs(found - expected) / max(abs(expected), 1e-12)
