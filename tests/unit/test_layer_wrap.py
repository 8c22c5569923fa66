"""Checkpoint and compile, layer by layer: who is wrapped how, and what is really recomputed."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.config import JobConfig

from models.deepseek_v3 import DeepSeekV3Model
from tests.tiny import clean, tiny_args
from torchtitan_ext.config import LayerRule, LayerWrap
from torchtitan_ext.distributed.checkpoint_policy import (
    DEFAULT_SAVE_OPS,
    SaveOps,
    is_routing_decision,
)
from torchtitan_ext.distributed.layer_wrap import apply_layer_wrap, resolve_layer_plans

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
ext = torch.ops.torchtitan_ext

LAYERS, MOE_LAYERS = [0, 1, 2, 3], {2, 3}


def make_config(
    mode: str = "none",
    option: str = "2",
    *rules: LayerRule,
    compile: bool = False,
    save_ops: tuple[str, ...] = (),
) -> JobConfig:
    job_config = JobConfig()
    job_config.activation_checkpoint.mode = mode  # type: ignore[assignment]
    job_config.activation_checkpoint.selective_ac_option = option
    job_config.compile.enable = compile
    job_config.compile.backend = "aot_eager"
    job_config.layer_wrap = LayerWrap(  # type: ignore[attr-defined]
        rules=list(rules), save_ops=list(save_ops)
    )
    return job_config


# Decisions --------------------------------------------------------------------------------------


def decisions(job_config: JobConfig) -> list[tuple[str, bool]]:
    plans = resolve_layer_plans(job_config, LAYERS, MOE_LAYERS)
    assert [plan.layer_id for plan in plans] == LAYERS
    assert [plan.moe_enabled for plan in plans] == [False, False, True, True]
    return [(plan.checkpoint, plan.compile) for plan in plans]


@pytest.mark.parametrize(
    ("mode", "option", "expected"),
    [
        ("none", "2", ["none"] * 4),
        ("full", "2", ["full"] * 4),
        ("selective", "op", ["op"] * 4),
        ("selective", "1", ["full"] * 4),
        ("selective", "2", ["none", "full", "none", "full"]),
        ("selective", "3", ["none", "none", "full", "none"]),
    ],
)
@pytest.mark.parametrize("compile", [False, True])
def test_plans_without_rules_follow_the_mode(
    mode: str, option: str, compile: bool, expected: list[str]
) -> None:
    job_config = make_config(mode, option, compile=compile)
    assert decisions(job_config) == [(checkpoint, compile) for checkpoint in expected]


def test_plans_selective_count_positions_not_layer_numbers() -> None:
    plans = resolve_layer_plans(make_config("selective", "2"), [3, 4, 5], set())
    assert [(plan.layer_id, plan.checkpoint) for plan in plans] == [
        (3, "none"),
        (4, "full"),
        (5, "none"),
    ]


def test_plans_selective_beyond_the_last_layer_is_refused() -> None:
    assert decisions(make_config("selective", "4"))[-1] == ("full", False)
    with pytest.raises(ValueError, match=r'selective_ac_option = "5": checkpoints no layer'):
        decisions(make_config("selective", "5"))


def test_plans_compile_only_the_loss_compiles_no_layer() -> None:
    job_config = make_config(compile=True)
    job_config.compile.components = ["loss"]
    assert decisions(job_config) == [("none", False)] * 4


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (
            [LayerRule("moe", checkpoint="op")],
            [("full", False), ("full", False), ("op", False), ("op", False)],
        ),
        (
            [LayerRule("dense", compile=True)],
            [("full", True), ("full", True), ("full", False), ("full", False)],
        ),
        (
            [LayerRule("0,2-3", checkpoint="none", compile=True)],
            [("none", True), ("full", False), ("none", True), ("none", True)],
        ),
        # in order, the last wins; what it leaves open stays as the earlier one said
        (
            [LayerRule("*", checkpoint="none", compile=True), LayerRule("1-2", checkpoint="op")],
            [("none", True), ("op", True), ("op", True), ("none", True)],
        ),
        (
            [LayerRule("1-2", checkpoint="op"), LayerRule("*", checkpoint="none", compile=True)],
            [("none", True)] * 4,
        ),
        (
            [LayerRule("*", compile=True), LayerRule("3", compile=False)],
            [("full", True), ("full", True), ("full", True), ("full", False)],
        ),
    ],
)
def test_plans_rules_apply_in_order(
    rules: list[LayerRule], expected: list[tuple[str, bool]]
) -> None:
    assert decisions(make_config("full", "2", *rules)) == expected


@pytest.mark.parametrize("pattern", ["4", "7-9", "moe"])
def test_plans_rule_that_matches_no_layer_is_refused(pattern: str) -> None:
    rules = [LayerRule("0", compile=True), LayerRule(pattern, compile=True)]
    with pytest.raises(ValueError) as refused:
        resolve_layer_plans(make_config("none", "2", *rules), LAYERS, set())
    message = str(refused.value)
    assert message.startswith(f'[layer_wrap] rules[1].layers = "{pattern}": matches no layer')
    assert "0-3" in message


# Names of operators ------------------------------------------------------------------------------


def kept(names: list[str]) -> set[object]:
    """Which of the operators of these tests SaveOps keeps."""
    save_ops = SaveOps(names)
    asked = {aten.add.Tensor, aten.add.Scalar, ext.grouped_outer.default, *DEFAULT_SAVE_OPS}
    return {op for op in asked if save_ops.keep(op)}


def test_save_ops_none_are_the_default_ones() -> None:
    assert kept([]) == DEFAULT_SAVE_OPS
    assert ext.grouped_mm.default in DEFAULT_SAVE_OPS


def test_save_op_with_overload_is_that_one() -> None:
    assert kept(["aten.add.Tensor"]) - DEFAULT_SAVE_OPS == {aten.add.Tensor}


def test_save_op_without_overload_is_all_of_them() -> None:
    added = kept(["aten.add", "torchtitan_ext.grouped_outer"]) - DEFAULT_SAVE_OPS
    assert added == {aten.add.Tensor, aten.add.Scalar, ext.grouped_outer.default}


@pytest.mark.parametrize("name", ["aten.softmax", "aten.linear", "aten.matmul"])
def test_save_op_that_a_policy_never_sees_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is made of other operators"):
        SaveOps([name])


def test_save_op_that_no_layer_calls_is_refused_after_the_first_forward() -> None:
    config = make_config("selective", "op", save_ops=("aten.cos",))
    model = build(config, max_seq_len=16, original_seq_len=16)
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    with torch.no_grad():
        model(tokens)  # nothing is checkpointed: no verdict yet
    with pytest.raises(ValueError, match=r'save_ops = "aten.cos": matches no operator'):
        model(tokens)


def test_save_op_that_a_layer_calls_is_accepted() -> None:
    config = make_config("selective", "op", save_ops=("aten.silu",))
    build(config, max_seq_len=16, original_seq_len=16)(torch.zeros(1, 16, dtype=torch.int64))


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("aten.sillu", "aten.silu"),
        ("atenn.silu", "aten.silu"),
        ("aten::silu", "aten.silu"),
        ("aten.silu.Tensr", "aten.silu"),
        ("silu", "aten.silu"),
        ("torchtitan_ext.groupd_mm", "torchtitan_ext.grouped_mm"),
    ],
)
def test_save_op_unknown_is_refused_with_the_nearest_name(name: str, nearest: str) -> None:
    with pytest.raises(ValueError) as refused:
        SaveOps(["aten.silu", name])
    assert str(refused.value) == (
        f'[layer_wrap] save_ops = "{name}": no such operator (did you mean "{nearest}"?)'
    )


@pytest.mark.parametrize("name", ["", "aten", "aten.", "aten.name", "aten.__class__", "ops.mm"])
def test_save_op_that_is_no_name_of_an_operator_is_refused(name: str) -> None:
    with pytest.raises(ValueError) as refused:
        SaveOps([name])
    assert str(refused.value).startswith(f'[layer_wrap] save_ops = "{name}": no such operator')


@pytest.mark.parametrize(
    ("op", "tensor", "device", "expected"),
    [
        (aten.topk.default, torch.ones(2), None, True),
        (c10d.all_to_all_single.default, torch.ones(2, dtype=torch.int64), None, True),
        (c10d.all_to_all_single.default, torch.ones(2), None, False),
        (c10d.wait_tensor.default, torch.ones(2, dtype=torch.int64), None, True),
        (c10d.wait_tensor.default, torch.ones(2), None, False),
        (aten._to_copy.default, torch.ones(2, dtype=torch.int64, device="meta"), "cpu", True),
        (aten._to_copy.default, torch.ones(2, device="meta"), "cpu", False),
        (aten._to_copy.default, torch.ones(2, dtype=torch.int64), "cpu", False),
        (aten._to_copy.default, torch.ones(2, dtype=torch.int64), None, False),
        (aten.mm.default, torch.ones(2, 2), None, False),
    ],
)
def test_routing_decisions_are_the_choice_and_integer_exchanges(
    op: Any, tensor: torch.Tensor, device: str | None, expected: bool
) -> None:
    kwargs = {} if device is None else {"device": torch.device(device)}
    assert is_routing_decision(op, (tensor,), kwargs) is expected


# What is recomputed -----------------------------------------------------------------------------


class CountOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func] += 1
        return func(*args, **(kwargs or {}))


def build(job_config: JobConfig, **changes: Any) -> DeepSeekV3Model:
    model = DeepSeekV3Model(tiny_args(**changes))
    model.init_weights()
    apply_layer_wrap(model, job_config)
    return model


def count_layer(job_config: JobConfig, layer_id: str) -> tuple[Counter[Any], Counter[Any]]:
    """Calls of each operator in one block's forward, and in its backward."""
    model = build(job_config, max_seq_len=16, original_seq_len=16)
    block, x = model.layers[layer_id], torch.randn(2, 16, 64, requires_grad=True)
    with CountOps() as forward:
        y, *_ = block(x, model.rope)
    loss = y.square().sum()
    with CountOps() as backward:
        loss.backward()
    return forward.calls, backward.calls


DENSE, MOE = "0", "1"
# attention's five projections and the feed-forward's three; scores and weighted values
DENSE_FORWARD = {aten.mm.default: 8, aten.bmm.default: 2, aten.silu.default: 1}
# one mm more, the gate's; the experts' three products; best of a group, groups, experts
MOE_FORWARD = {
    aten.mm.default: 9,
    aten.bmm.default: 2,
    ext.grouped_mm.default: 3,
    aten.topk.default: 3,
    aten.silu.default: 2,
}


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
@pytest.mark.parametrize(("layer_id", "expected"), [(DENSE, DENSE_FORWARD), (MOE, MOE_FORWARD)])
def test_forward_runs_every_operator_once(
    mode: str, layer_id: str, expected: dict[Any, int]
) -> None:
    forward, _ = count_layer(make_config(mode, "op"), layer_id)
    assert {op: forward[op] for op in expected} == expected


@pytest.mark.parametrize(
    ("mode", "layer_id", "expected"),
    [
        ("full", DENSE, DENSE_FORWARD),
        ("full", MOE, MOE_FORWARD | {aten.topk.default: 0}),
        # every second mm
        ("selective", DENSE, DENSE_FORWARD | {aten.mm.default: 4, aten.bmm.default: 0}),
        # and the gate's, which torchtitan's setting has recomputed
        (
            "selective",
            MOE,
            MOE_FORWARD
            | {
                aten.mm.default: 5,
                aten.bmm.default: 0,
                ext.grouped_mm.default: 0,
                aten.topk.default: 0,
            },
        ),
    ],
)
def test_backward_recomputes_what_the_policy_says(
    mode: str, layer_id: str, expected: dict[Any, int]
) -> None:
    _, without = count_layer(make_config("none"), layer_id)
    _, with_checkpoint = count_layer(make_config(mode, "op"), layer_id)
    recomputed = {op: with_checkpoint[op] - without[op] for op in expected}
    assert recomputed == expected


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("moe", [{}, {"score_func": "softmax"}, {"num_limited_groups": 4}])
def test_routing_of_a_step_is_decided_once(mode: str, moe: dict[str, Any]) -> None:
    tokens = torch.randint(2048, (2, 16))
    calls = []
    for checkpoint in ("none", mode):
        model = build(make_config(checkpoint, "op"), **moe)
        with CountOps() as step:
            model(tokens).logits.square().sum().backward()
        calls.append(step.calls[aten.topk.default])
    assert calls[0] == calls[1] == (2 if "num_limited_groups" in moe else 6)


def test_save_ops_of_the_config_are_not_recomputed() -> None:
    _, default = count_layer(make_config("selective", "op"), MOE)
    _, saved = count_layer(make_config("selective", "op", save_ops=("aten.silu",)), MOE)
    assert default[aten.silu.default] == 2
    assert saved[aten.silu.default] == 0


def test_shapes_to_recompute_of_the_config_are_recomputed() -> None:
    job_config = make_config("selective", "op")
    fqns = job_config.activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns
    fqns += ["layers.0.feed_forward.w1"]  # w3 has the same shape
    _, without = count_layer(make_config("none"), DENSE)
    _, recomputing = count_layer(job_config, DENSE)
    # w1, w3, and every second one of the other six
    assert recomputing[aten.mm.default] - without[aten.mm.default] == 2 + 3


def loss_and_gradients(job_config: JobConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch._dynamo.reset()
    model = build(job_config)
    tokens = torch.randint(2048, (2, 16), generator=torch.Generator().manual_seed(1))
    loss = model(tokens).logits.square().sum()
    loss.backward()
    return loss.detach(), {clean(name): p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("mode", "option"), [("full", "2"), ("selective", "op"), ("selective", "2")]
)
def test_checkpoint_changes_no_bit_of_loss_and_gradients(mode: str, option: str) -> None:
    loss, gradients = loss_and_gradients(make_config(mode, option))
    expected_loss, expected = loss_and_gradients(make_config("none"))
    assert torch.equal(loss, expected_loss)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(gradients[name], gradient), name


# The wrapped model ------------------------------------------------------------------------------


def test_wrap_makes_each_layer_what_its_plan_says() -> None:
    rules = [LayerRule("1", compile=True), LayerRule("2", checkpoint="none", compile=True)]
    model = build(make_config("full", "2", *rules))
    found = {
        name: (isinstance(block, CheckpointWrapper), block._compiled_call_impl is not None)
        for name, block in model.layers.named_children()
    }
    assert found == {"0": (True, False), "1": (True, True), "2": (False, True)}


def test_wrap_none_leaves_the_model_as_it_was() -> None:
    model = DeepSeekV3Model(tiny_args())
    blocks = dict(model.layers.named_children())
    apply_layer_wrap(model, make_config("none"))
    assert dict(model.layers.named_children()) == blocks


def test_wrap_keeps_the_names_in_the_state_dict() -> None:
    plain = build(make_config("none")).state_dict()
    wrapped = build(make_config("full", "2", compile=True)).state_dict()
    assert list(wrapped) == list(plain)


def test_wrapped_models_do_not_share_a_count() -> None:
    """Which mm is every second one is counted in each block's call, not across calls or models."""
    job_config = make_config("selective", "op", LayerRule("0", checkpoint="none"))
    first, second = count_layer(job_config, MOE), count_layer(job_config, MOE)
    assert first == second


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_compiled_layers_give_the_same_loss_and_gradients(mode: str) -> None:
    loss, gradients = loss_and_gradients(make_config(mode, "op", compile=True))
    expected_loss, expected = loss_and_gradients(make_config("none"))
    torch.testing.assert_close(loss, expected_loss)
    for name, gradient in expected.items():
        error = (gradients[name] - gradient).abs().max() / gradient.abs().max()
        assert error < 1e-4, f"{name}: {error:.1e} of the gradient's maximum"
