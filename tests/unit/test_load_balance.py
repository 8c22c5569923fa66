"""Load balancing: what is counted, and how the biases move."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import run_ranks
from torchtitan_ext.components.load_balance import ExpertLoad, bias_direction
from torchtitan_ext.moe import MoE, MoEArgs


@pytest.mark.parametrize(
    ("counts", "direction"),
    [
        ([1, 2, 3], [1, 0, -1]),
        ([2, 2, 2], [0, 0, 0]),
        ([0, 0, 4], [1, 1, -1]),
        ([0, 1, 1, 2], [1, 0, 0, -1]),
        ([1, 2, 2], [1, -1, -1]),  # the mean, 5 / 3, is between two counts
        ([0, 0], [0, 0]),
        # a mean that float32 can't tell from the counts
        ([2**30, 2**30 + 1, 2**30 - 1], [0, -1, 1]),
    ],
)
def test_bias_direction_table(counts: list[int], direction: list[int]) -> None:
    assert bias_direction(torch.tensor(counts)).tolist() == direction


def make_layers(*coefficients: float) -> nn.ModuleList:
    return nn.ModuleList(
        [
            MoE(MoEArgs(num_experts=3, load_balance_coeff=c), dim=4, hidden_dim=4)
            for c in coefficients
        ]
    )


def test_micro_batches_are_added_and_the_bias_moves_once() -> None:
    layers = make_layers(0.5, 0.25)
    load = ExpertLoad([layers], [])
    # alone, the first micro-batch would move layer 0 the other way, and further
    load.add(torch.tensor([[9, 0, 0], [0, 3, 6]]))
    load.add(torch.tensor([[0, 9, 9], [0, 0, 0]]))
    assert layers[0].expert_bias.tolist() == [0, 0, 0]
    load.finish_step()
    assert load.last_step_LE.tolist() == [[9, 9, 9], [0, 3, 6]]
    assert layers[0].expert_bias.tolist() == [0, 0, 0]
    assert layers[1].expert_bias.tolist() == [0.25, 0, -0.25]


def test_next_step_counts_anew_and_moves_the_bias_further() -> None:
    layers = make_layers(0.5)
    load = ExpertLoad([layers], [])
    for counts in ([[0, 3, 6]], [[0, 3, 6]], [[3, 0, 0]]):
        load.add(torch.tensor(counts))
        load.finish_step()
    assert load.last_step_LE.tolist() == [[3, 0, 0]]
    assert layers[0].expert_bias.tolist() == [0.5, 0.5, -0.5]


def test_finish_step_without_counts_changes_nothing() -> None:
    layers = make_layers(0.5)
    load = ExpertLoad([layers], [])
    load.finish_step()
    assert load.last_step_LE is None
    load.add(torch.tensor([[0, 3, 6]]))
    load.finish_step()
    load.finish_step()
    assert layers[0].expert_bias.tolist() == [0.5, 0, -0.5]
    assert load.last_step_LE.tolist() == [[0, 3, 6]]


def test_counts_given_to_add_are_not_changed() -> None:
    load = ExpertLoad([make_layers(0.5)], [])
    first, second = torch.tensor([[1, 2, 3]]), torch.tensor([[3, 2, 0]])
    load.add(first)
    load.add(second)
    load.finish_step()
    assert (first.tolist(), second.tolist()) == ([[1, 2, 3]], [[3, 2, 0]])


def test_layers_of_several_parts_are_in_order() -> None:
    parts = [make_layers(0.5), make_layers(0.25)]
    load = ExpertLoad(list(parts), [])
    load.add(torch.tensor([[0, 3, 6], [6, 3, 0]]))
    load.finish_step()
    assert parts[0][0].expert_bias.tolist() == [0.5, 0, -0.5]
    assert parts[1][0].expert_bias.tolist() == [-0.25, 0, 0.25]


def test_counts_of_another_number_of_layers_are_refused() -> None:
    with pytest.raises(AssertionError):
        ExpertLoad([make_layers(0.5)], []).add(torch.ones(2, 3, dtype=torch.int64))


def test_coefficient_zero_has_no_bias_but_counts() -> None:
    layers = make_layers(0.0)
    load = ExpertLoad([layers], [])
    load.add(torch.tensor([[0, 3, 6]]))
    load.finish_step()
    assert layers[0].expert_bias is None
    assert load.max_over_mean_L() == [2.0]


def test_bias_keeps_its_identity_and_carries_no_gradient() -> None:
    """The optimizer hook, checkpoints and the forward have to see the same tensor."""
    layers = make_layers(0.5)
    bias = layers[0].expert_bias
    load = ExpertLoad([layers], [])
    load.add(torch.tensor([[0, 3, 6]]))
    load.finish_step()
    assert layers[0].expert_bias is bias
    assert not bias.requires_grad


def test_bias_pulls_the_load_towards_balance() -> None:
    layers = nn.ModuleList([MoE(MoEArgs(num_experts=8, top_k=2, load_balance_coeff=0.005), 16, 8)])
    for parameter in layers.parameters():
        nn.init.normal_(parameter, std=0.1)
    x = torch.randn(1, 256, 16) + 1.0
    load = ExpertLoad([layers], [])
    unbalance = []
    for _ in range(60):
        load.add(layers[0](x)[1].unsqueeze(0))
        load.finish_step()
        unbalance += load.max_over_mean_L()
    assert unbalance[0] > 1.5
    assert unbalance[-1] < 1.25


def biases_of_ranks_with_different_tokens() -> list[list[float]]:
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    layers = make_layers(0.5)
    load = ExpertLoad([layers], [init_device_mesh("cpu", (num_ranks,))])
    counts = torch.tensor([[[9, 0, 0]], [[0, 4, 5]]][rank])
    load.add(counts)
    load.finish_step()
    assert counts.sum() == 9
    return [layers[0].expert_bias.tolist(), load.last_step_LE[0].tolist()]


def test_counts_of_all_ranks_are_summed_before_the_bias_moves() -> None:
    expected = [[-0.5, 0.5, 0.5], [9, 4, 5]]
    assert run_ranks(biases_of_ranks_with_different_tokens, 2) == [expected, expected]


def test_max_over_mean_by_hand() -> None:
    load = ExpertLoad([make_layers(0.5, 0.5, 0.5)], [])
    load.add(torch.tensor([[0, 0, 9], [3, 3, 3], [10, 20, 60]]))
    load.finish_step()
    assert load.max_over_mean_L() == [3.0, 1.0, 2.0]
