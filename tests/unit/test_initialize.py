"""Initial weights: from the seed and the parameter's name alone, the same in every layout."""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torchtitan.config import JobConfig

from models.deepseek_v3 import DeepSeekV3Model
from models.deepseek_v3.plan import PARALLEL_PLAN
from tests.ranks import run_ranks
from tests.tiny import clean, full_tensors, tiny_args
from torchtitan_ext.components import initialize
from torchtitan_ext.components.initialize import Normal, Ones, TruncatedNormal, init_parameters
from torchtitan_ext.config import LayerWrap, Zero
from torchtitan_ext.distributed.mesh import ExtParallelDims
from torchtitan_ext.distributed.parallelize import parallelize


def filled(shape: tuple[int, ...], name: str = "weight", seed: int = 0, **kind: Any) -> Any:
    """The values that a parameter of this name and shape gets."""
    module = nn.ParameterDict({name: torch.full(shape, math.nan)})
    init_parameters(module, seed, kind.get("initializer_for", lambda name: Normal(1.0)))
    return module[name].detach()


# One process -----------------------------------------------------------------------------------


def test_values_depend_on_seed_and_name_only() -> None:
    first = filled((40, 30))
    torch.manual_seed(5)  # not on torch's generator
    torch.randn(7)
    assert torch.equal(filled((40, 30)), first)
    assert not torch.equal(filled((40, 30), seed=1), first)
    assert not torch.equal(filled((40, 30), name="other"), first)


def test_values_do_not_depend_on_other_parameters() -> None:
    names = ["a", "b", "c"]
    both = nn.ParameterDict({name: torch.empty(8, 8) for name in names})
    turned = nn.ParameterDict({name: torch.empty(8, 8) for name in reversed(names)})
    init_parameters(both, 0, lambda name: Normal(1.0))
    init_parameters(turned, 0, lambda name: Normal(1.0))
    for name in names:
        assert torch.equal(both[name], turned[name])
        assert torch.equal(both[name], filled((8, 8), name))


def test_values_leave_torchs_generator_alone() -> None:
    before = torch.get_rng_state()
    filled((40, 30))
    assert torch.equal(torch.get_rng_state(), before)


def test_values_in_bf16_are_the_rounded_float32_ones() -> None:
    module = nn.ParameterDict({"weight": torch.empty(40, 30, dtype=torch.bfloat16)})
    init_parameters(module, 0, lambda name: Normal(1.0))
    assert torch.equal(module["weight"], filled((40, 30)).bfloat16())


def test_name_of_a_checkpointed_block_is_the_plain_one() -> None:
    asked = []
    block = nn.ModuleDict({"_checkpoint_wrapped_module": nn.Linear(4, 4, bias=False)})
    init_parameters(nn.ModuleDict({"0": block}), 3, lambda name: asked.append(name) or Normal(1.0))
    assert asked == ["0.weight"]
    plain = nn.ModuleDict({"0": nn.Linear(4, 4, bias=False)})
    init_parameters(plain, 3, lambda name: Normal(1.0))
    found = block["_checkpoint_wrapped_module"].weight
    assert torch.equal(found, plain["0"].weight)


@pytest.mark.parametrize("shape", [(5,), (1, 3), (3, 1), (7, 6), (3, 5, 4), (2, 2, 3, 4)])
def test_every_value_is_drawn_and_no_block_repeats(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    monkeypatch.setattr(initialize, "_BLOCK_SIZE", 8)
    values = filled(shape)
    assert values.isfinite().all()
    assert values.unique().numel() == values.numel()


def test_rows_wider_than_a_block_are_drawn_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initialize, "_BLOCK_SIZE", 8)
    assert filled((3, 20)).unique().numel() == 60


@pytest.mark.parametrize("std", [1.0, 0.02])
def test_normal_has_its_mean_and_deviation(std: float) -> None:
    values = filled((1000, 300), initializer_for=lambda name: Normal(std)) / std
    assert abs(values.mean()) < 4 * 300_000**-0.5
    assert values.std() == pytest.approx(1, rel=0.006)
    assert values.abs().max() > 4


@pytest.mark.parametrize("std", [1.0, 0.02])
def test_truncated_normal_has_its_deviation_and_bound(std: float) -> None:
    values = filled((1000, 300), initializer_for=lambda name: TruncatedNormal(std)) / std
    # the deviation of a normal distribution cut at three deviations
    density = math.exp(-4.5) / math.sqrt(2 * math.pi)
    expected = math.sqrt(1 - 2 * 3 * density / math.erf(3 / math.sqrt(2)))
    assert abs(values.mean()) < 4 * 300_000**-0.5
    assert values.std() == pytest.approx(expected, rel=0.005)
    assert 2.9 < values.abs().max() <= 3.0001
    # the deviation of every block is right too, not only that of all of them
    for block in values.split(100):
        assert block.std() == pytest.approx(expected, rel=0.02)


def test_neighbouring_blocks_are_not_correlated() -> None:
    values = filled((512, 512))  # blocks of 128 rows
    blocks = values.view(4, -1)
    correlation = torch.corrcoef(blocks) - torch.eye(4)
    assert correlation.abs().max() < 5 * (128 * 512) ** -0.5


def test_ones_fill_a_norm() -> None:
    assert torch.equal(filled((7,), initializer_for=lambda name: Ones()), torch.ones(7))


# Several ranks: tensors sharded by hand ---------------------------------------------------------

SHARDED = [
    ((7, 5), Shard(0)),
    ((5, 7), Shard(1)),
    ((8, 8), Shard(0)),
    ((1, 3), Shard(0)),  # some ranks hold nothing
    ((5, 4), Shard(0)),  # on four ranks 2, 2, 1 and 0 rows
    ((5,), Shard(0)),
    ((3,), Shard(0)),
    ((6, 5, 4), Shard(0)),
    ((3, 7, 4), Shard(1)),
    ((3, 4, 7), Shard(2)),
    ((4, 3), Replicate()),
]


def wrong_shards() -> list[str]:
    """Fills a parameter sharded in each way; returns those that differ from the full one."""
    initialize._BLOCK_SIZE = 8
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    wrong = []
    for shape, placement in SHARDED:
        sharded = distribute_tensor(torch.full(shape, math.nan), mesh, [placement])
        module = nn.ParameterDict({"weight": nn.Parameter(sharded)})
        init_parameters(module, 0, lambda name: Normal(1.0))
        found = module["weight"].detach()
        expected = distribute_tensor(filled(shape), mesh, [placement], src_data_rank=None)
        gathered = found.full_tensor()  # on every rank, whatever this one finds
        same = torch.equal(found.to_local(), expected.to_local())
        if not (same and torch.equal(gathered, filled(shape))):
            wrong.append(f"{shape} {placement}")
    return wrong


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_shard_equals_the_slice_of_the_full_tensor(num_ranks: int) -> None:
    assert run_ranks(wrong_shards, num_ranks) == [[]] * num_ranks


# Several ranks: as the parallelisms shard a model -----------------------------------------------

# Sizes that two and four ranks don't divide.
UNEVEN = {"vocab_size": 2049, "dim": 66, "kv_lora_rank": 35, "q_lora_rank": 27, "inter_dim": 97}
# Fewer experts than ranks: dim 1 is sharded.
FEW_EXPERTS = {"num_experts": 2, "top_k": 1, "num_expert_groups": 1, "num_limited_groups": 1}
FEW_EXPERTS |= {"moe_inter_dim": 36}
# Three local experts on two ranks.
SIX_EXPERTS = {"num_experts": 6, "num_expert_groups": 1, "num_limited_groups": 1}

LAYOUTS: dict[str, tuple[int, dict[str, int], dict[str, int]]] = {
    "fsdp2": (2, {"dp_shard": 2}, UNEVEN),
    "ddp2": (2, {"dp_replicate": 2}, UNEVEN),
    "ep2": (2, {"dp_shard": 2, "ep": 2}, UNEVEN),
    "fsdp4": (4, {"dp_shard": 4}, UNEVEN),
    "ep4": (4, {"dp_shard": 4, "ep": 4}, UNEVEN),
    "efsdp2_ep2_dim0": (4, {"dp_shard": 4, "ep": 2}, {"dim": 64}),
    "efsdp2_ep2_dim1": (4, {"dp_shard": 4, "ep": 2}, FEW_EXPERTS),
    "hsdp2x2": (4, {"dp_replicate": 2, "dp_shard": 2}, UNEVEN),
    "hsdp2x2_ep2": (4, {"dp_replicate": 2, "dp_shard": 2, "ep": 2}, UNEVEN),
    "efsdp2_ep2_six_experts": (4, {"dp_shard": 4, "ep": 2}, SIX_EXPERTS),
}
# With tensor parallelism: only what is gathered is compared.
SPLIT_LAYOUTS: dict[str, Any] = {
    "tp2": (2, {"tp": 2}, {}),
    "fsdp2_tp2_ep2": (4, {"dp_shard": 2, "tp": 2, "ep": 2}, {}),
    "fsdp2_tp2_ep2_etp2": (4, {"dp_shard": 2, "tp": 2, "ep": 2, "etp": 2}, {}),
    "cp2_tp2_ep4": (4, {"cp": 2, "tp": 2, "ep": 4}, {}),
}
ONE = {"dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "pp": 1, "ep": 1, "etp": 1}


def build_sharded(layout: str, checkpoint: str = "none") -> tuple[nn.Module, ExtParallelDims]:
    num_ranks, degrees, changes = (LAYOUTS | SPLIT_LAYOUTS)[layout]
    with torch.device("meta"):
        model = DeepSeekV3Model(tiny_args(**changes))
    parallel_dims = ExtParallelDims(**(ONE | degrees), world_size=num_ranks)
    job_config = JobConfig()
    job_config.activation_checkpoint.mode = checkpoint
    job_config.layer_wrap = LayerWrap()  # type: ignore[attr-defined]
    job_config.zero = Zero()  # type: ignore[attr-defined]
    parallelize(model, parallel_dims, job_config, plan=PARALLEL_PLAN)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.detach().fill_(math.nan)
    model.init_weights()
    return model, parallel_dims


def expected_shard(full: torch.Tensor, name: str, dims: ExtParallelDims) -> torch.Tensor:
    """This rank's part, cut out of the full tensor with plain chunks."""
    rank = torch.distributed.get_rank() % dims.dp_shard  # ranks that replicate come last
    num_shards, dim = dims.dp_shard, 0
    if ".moe.experts." in name and dims.ep > 1:
        full = full.chunk(dims.ep)[rank % dims.ep]
        rank, num_shards = rank // dims.ep, dims.dp_shard // dims.ep
        dim = 1 if dims.dp_shard > 2 * full.shape[0] else 0
    chunks = full.chunk(num_shards, dim)
    return chunks[rank] if rank < len(chunks) else full.narrow(dim, 0, 0)


def wrong_parameters(layout: str, checkpoint: str) -> list[str]:
    """The parameters that differ from those of one process."""
    single = DeepSeekV3Model(tiny_args(**(LAYOUTS | SPLIT_LAYOUTS)[layout][2]))
    single.init_weights()
    expected = full_tensors(single)
    model, parallel_dims = build_sharded(layout, checkpoint)
    found = full_tensors(model)
    assert found.keys() == expected.keys()
    wrong = [f"{name}, gathered" for name in found if not torch.equal(found[name], expected[name])]
    for name, parameter in model.named_parameters() if layout in LAYOUTS else []:
        name = clean(name)
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        if not torch.equal(local, expected_shard(expected[name], name, parallel_dims)):
            wrong.append(f"{name}, local")
    return wrong


@pytest.mark.parametrize("layout", [*LAYOUTS, *SPLIT_LAYOUTS])
def test_model_in_a_layout_starts_from_the_weights_of_one_process(layout: str) -> None:
    num_ranks = (LAYOUTS | SPLIT_LAYOUTS)[layout][0]
    assert run_ranks(wrong_parameters, num_ranks, layout, "none") == [[]] * num_ranks


def test_model_with_checkpointed_blocks_starts_from_the_same_weights() -> None:
    assert run_ranks(wrong_parameters, 2, "fsdp2", "full") == [[]] * 2


def blocks_of_an_expert_weight(layout: str) -> tuple[list[int], int]:
    """The dims in which an expert weight is sharded, and how many blocks this rank drew for it."""
    drawn = []
    generator = initialize._generator
    initialize._generator = lambda key: drawn.append(key) or generator(key)
    initialize._BLOCK_SIZE = 4 * tiny_args().dim  # blocks of four rows of w1
    model, _ = build_sharded(layout)
    weight = model.get_parameter("layers.1.moe.experts.w1")
    blocks = [key for key in drawn if "layers.1.moe.experts.w1" in key]
    assert len(blocks) == len(set(blocks))
    return [placement.dim for placement in weight.placements], len(blocks)


@pytest.mark.parametrize(
    ("layout", "dims", "num_blocks"),
    [
        # 8 experts of 32 rows, two of them here: 64 rows in blocks of 4
        ("efsdp2_ep2_dim0", [0, 0], 16),
        # 2 experts of 36 rows, half of one of them here: 18 rows touch 5 blocks
        ("efsdp2_ep2_dim1", [1, 0], 5),
    ],
)
def test_rank_draws_no_more_blocks_than_its_part_touches(
    layout: str, dims: list[int], num_blocks: int
) -> None:
    assert run_ranks(blocks_of_an_expert_weight, 4, layout) == [(dims, num_blocks)] * 4
