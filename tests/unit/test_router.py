"""The router: scores, choice, weights and counts, against numbers worked out by hand."""

from typing import Any

import pytest
import torch

from torchtitan_ext.moe import MoEArgs, TokenChoiceRouter
from torchtitan_ext.moe.router import count_tokens


def router_with_logits(logits: list[list[float]], **args: Any) -> tuple[Any, torch.Tensor]:
    """A router and inputs whose gate gives exactly these logits: the gate is the identity."""
    x_TD = torch.tensor(logits)
    num_experts = x_TD.shape[1]
    router = TokenChoiceRouter(MoEArgs(num_experts=num_experts, **args), num_experts)
    with torch.no_grad():
        router.gate.weight.copy_(torch.eye(num_experts))
    return router, x_TD


def test_scores_sigmoid_match_hand_computation() -> None:
    # logit ln(p / (1 - p)) has the sigmoid p
    logits = torch.tensor([0.1, 0.7, 0.4, 0.6]).logit()
    router, x_TD = router_with_logits([logits.tolist()], top_k=2, score_func="sigmoid")
    routing = router(x_TD, None)
    assert routing.topk_expert_ids_TK.tolist() == [[1, 3]]
    torch.testing.assert_close(routing.topk_scores_TK, torch.tensor([[0.7, 0.6]]))


def test_scores_softmax_match_hand_computation() -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4]).log() + 5  # a shift does not change a softmax
    router, x_TD = router_with_logits([logits.tolist()], top_k=3, score_func="softmax")
    routing = router(x_TD, None)
    assert routing.topk_expert_ids_TK.tolist() == [[3, 2, 1]]
    torch.testing.assert_close(routing.topk_scores_TK, torch.tensor([[0.4, 0.3, 0.2]]))


@pytest.mark.parametrize("score_func", ["sigmoid", "softmax"])
def test_bias_changes_the_choice_not_the_weights(score_func: str) -> None:
    logits = torch.tensor([0.1, 0.2, 0.3, 0.4])
    logits = logits.logit() if score_func == "sigmoid" else logits.log()
    router, x_TD = router_with_logits([logits.tolist()], top_k=2, score_func=score_func)
    routing = router(x_TD, torch.tensor([10.0, 0.0, 0.0, 0.0]))
    assert routing.topk_expert_ids_TK.tolist() == [[0, 3]]
    torch.testing.assert_close(routing.topk_scores_TK, torch.tensor([[0.1, 0.4]]))


@pytest.mark.parametrize("score_func", ["sigmoid", "softmax"])
def test_bias_equal_for_all_changes_nothing(score_func: str) -> None:
    router = TokenChoiceRouter(MoEArgs(num_experts=8, top_k=3, score_func=score_func), 16)
    x_TD = torch.randn(20, 16)
    plain, biased = router(x_TD, None), router(x_TD, torch.full((8,), 0.5))
    assert torch.equal(plain.topk_expert_ids_TK, biased.topk_expert_ids_TK)
    assert torch.equal(plain.topk_scores_TK, biased.topk_scores_TK)


# Three groups of three experts. By its best expert group 0 wins, then group 1 (0.8); by the sum
# of its best two group 2 (1.4) wins, then group 1 (1.3), then group 0 (1.0).
GROUP_SCORES = [0.9, 0.1, 0.05, 0.8, 0.5, 0.06, 0.73, 0.67, 0.6]


@pytest.mark.parametrize(
    ("score_func", "num_limited_groups", "expected"),
    [
        ("softmax", 1, [0, 1, 2]),
        ("softmax", 2, [0, 3, 4]),
        ("softmax", 3, [0, 3, 6]),
        ("sigmoid", 1, [6, 7, 8]),
        ("sigmoid", 2, [3, 6, 7]),
        ("sigmoid", 3, [0, 3, 6]),
    ],
)
def test_node_limited_groups_follow_the_table(
    score_func: str, num_limited_groups: int, expected: list[int]
) -> None:
    scores = torch.tensor(GROUP_SCORES)
    logits = scores.logit() if score_func == "sigmoid" else scores.log()
    router, x_TD = router_with_logits(
        [logits.tolist()],
        top_k=3,
        score_func=score_func,
        num_expert_groups=3,
        num_limited_groups=num_limited_groups,
    )
    assert router(x_TD, None).topk_expert_ids_TK.tolist() == [expected]


def test_node_limited_groups_are_chosen_with_the_bias() -> None:
    logits = torch.tensor(GROUP_SCORES).logit().tolist()
    router, x_TD = router_with_logits(
        [logits], top_k=3, score_func="sigmoid", num_expert_groups=3, num_limited_groups=1
    )
    bias = torch.tensor([0.0, 0.45, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0])
    # group 0 is now worth 0.9 + 0.55 = 1.45, more than group 2's 1.4
    routing = router(x_TD, bias)
    assert routing.topk_expert_ids_TK.tolist() == [[0, 1, 2]]
    torch.testing.assert_close(routing.topk_scores_TK, torch.tensor([[0.9, 0.1, 0.05]]))


def test_node_limited_groups_of_one_expert_are_worth_their_expert() -> None:
    logits = torch.tensor([0.2, 0.9, 0.4, 0.6]).logit().tolist()
    router, x_TD = router_with_logits(
        [logits], top_k=2, score_func="sigmoid", num_expert_groups=4, num_limited_groups=2
    )
    assert router(x_TD, None).topk_expert_ids_TK.tolist() == [[1, 3]]


def test_node_limited_groups_negative_biased_scores_stay_in_their_group() -> None:
    """Even when every kept score is below 0, no expert of a dropped group comes in."""
    logits = torch.tensor([0.5, 0.4, 0.3, 0.2]).logit().tolist()
    router, x_TD = router_with_logits(
        [logits], top_k=2, score_func="sigmoid", num_expert_groups=2, num_limited_groups=1
    )
    routing = router(x_TD, torch.full((4,), -1.0))
    assert routing.topk_expert_ids_TK.tolist() == [[0, 1]]


@pytest.mark.parametrize(
    ("route_norm", "route_scale", "expected"),
    [
        (False, 1.0, [0.6, 0.2]),
        (False, 2.5, [1.5, 0.5]),
        (True, 1.0, [0.75, 0.25]),
        (True, 2.0, [1.5, 0.5]),
    ],
)
def test_route_norm_and_scale_shape_the_weights(
    route_norm: bool, route_scale: float, expected: list[float]
) -> None:
    logits = torch.tensor([0.1, 0.2, 0.6]).logit().tolist()
    router, x_TD = router_with_logits(
        [logits], top_k=2, score_func="sigmoid", route_norm=route_norm, route_scale=route_scale
    )
    torch.testing.assert_close(router(x_TD, None).topk_scores_TK, torch.tensor([expected]))


def test_route_norm_all_scores_zero_stays_finite() -> None:
    router, x_TD = router_with_logits([[-1e4] * 4], top_k=2, route_norm=True)
    assert router(x_TD, None).topk_scores_TK.tolist() == [[0.0, 0.0]]


def test_given_experts_replace_the_choice_and_weigh_by_their_scores() -> None:
    router, x_TD = router_with_logits(
        torch.tensor([[0.1, 0.2, 0.3, 0.4]] * 2).logit().tolist(), top_k=2
    )
    given = torch.tensor([[0, 1], [2, 0]])
    routing = router(x_TD, torch.full((4,), 9.0), given)
    assert routing.topk_expert_ids_TK.tolist() == given.tolist()
    assert routing.tokens_per_expert_E.tolist() == [2, 1, 1, 0]
    torch.testing.assert_close(routing.topk_scores_TK, torch.tensor([[0.1, 0.2], [0.3, 0.1]]))


def test_counts_of_a_table_are_exact() -> None:
    counts = count_tokens(torch.tensor([[0, 2], [2, 5], [2, 0]]), 7)
    assert counts.dtype == torch.int64
    assert counts.tolist() == [2, 0, 3, 0, 0, 1, 0]


def test_counts_of_no_tokens_are_zero() -> None:
    assert count_tokens(torch.empty(0, 2, dtype=torch.int64), 3).tolist() == [0, 0, 0]


@pytest.mark.parametrize("num_tokens", [1, 5, 64])
def test_counts_match_the_ids_and_sum_to_tokens_times_top_k(num_tokens: int) -> None:
    router = TokenChoiceRouter(MoEArgs(num_experts=8, top_k=3), 16)
    routing = router(torch.randn(num_tokens, 16), None)
    ids = routing.topk_expert_ids_TK.flatten().tolist()
    assert routing.tokens_per_expert_E.tolist() == [ids.count(expert) for expert in range(8)]
    assert routing.tokens_per_expert_E.sum() == num_tokens * 3


def test_scores_of_bf16_inputs_are_float32() -> None:
    router = TokenChoiceRouter(MoEArgs(num_experts=8, top_k=3), 16).bfloat16()
    routing = router(torch.randn(4, 16, dtype=torch.bfloat16), torch.zeros(8))
    assert routing.topk_scores_TK.dtype == torch.float32


def test_gradient_sigmoid_reaches_the_gate_through_chosen_scores_only() -> None:
    router, x_TD = router_with_logits([[0.0, 1.0, 2.0, -1.0]], top_k=2, score_func="sigmoid")
    bias = torch.zeros(4, requires_grad=True)
    routing = router(x_TD, bias)
    (routing.topk_scores_TK * torch.tensor([[3.0, 5.0]])).sum().backward()
    score = x_TD[0].sigmoid()
    slope = score * (1 - score)
    expected = torch.zeros(4, 4)
    expected[2] = 3.0 * slope[2] * x_TD[0]
    expected[1] = 5.0 * slope[1] * x_TD[0]
    torch.testing.assert_close(router.gate.weight.grad, expected)
    assert bias.grad is None


def test_gradient_softmax_matches_autograd_of_the_plain_formula() -> None:
    router, x_TD = router_with_logits([[0.0, 1.0, 2.0, -1.0]], top_k=2, score_func="softmax")
    router(x_TD, None).topk_scores_TK.square().sum().backward()
    weight = torch.eye(4, requires_grad=True)
    (x_TD @ weight.t()).softmax(-1)[:, [2, 1]].square().sum().backward()
    torch.testing.assert_close(router.gate.weight.grad, weight.grad)


@pytest.mark.parametrize(
    "numbers",
    [
        {"top_k": 9},
        {"top_k": 0},
        {"num_expert_groups": 3},
        {"num_expert_groups": 4, "num_limited_groups": 5},
        {"num_expert_groups": 4, "num_limited_groups": 0},
        {"top_k": 3, "num_expert_groups": 4, "num_limited_groups": 1},
    ],
)
def test_args_that_contradict_each_other_are_refused(numbers: dict[str, int]) -> None:
    with pytest.raises(AssertionError):
        MoEArgs(num_experts=8, **numbers)


def test_scores_under_autocast_are_those_of_float32() -> None:
    """A single process trains under autocast; rounded to bf16 the two best would tie."""
    router, x_TD = router_with_logits([[1.0, 1.001, -1.0]], top_k=1, score_func="sigmoid")
    with torch.autocast("cpu", torch.bfloat16):
        routing = router(x_TD, None)
    assert routing.topk_expert_ids_TK.tolist() == [[1]]
    assert routing.topk_scores_TK.dtype == torch.float32
    torch.testing.assert_close(routing.topk_scores_TK, torch.tensor([[1.001]]).sigmoid())
