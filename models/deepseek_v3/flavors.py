"""The sizes of DeepSeek-V3 that can be trained, by name."""

from torchtitan_ext.flavors import Flavors
from torchtitan_ext.moe import MoEArgs

from .args import DeepSeekV3ModelArgs


def _debug() -> DeepSeekV3ModelArgs:
    """Trains on a laptop; the numbers of torchtitan's debug model."""
    return DeepSeekV3ModelArgs(
        vocab_size=2048,
        dim=256,
        inter_dim=1024,
        moe_inter_dim=256,
        n_layers=6,
        n_dense_layers=1,
        n_heads=16,
        moe_args=MoEArgs(num_experts=8, num_shared_experts=2, top_k=3, score_func="softmax"),
        q_lora_rank=0,
        mscale=0.70,
    )


def _debug_dense() -> DeepSeekV3ModelArgs:
    """The debug model's dense twin: as many parameters as the other has active per token."""
    args = _debug()
    experts_per_token = args.moe_args.top_k + args.moe_args.num_shared_experts
    args.inter_dim = args.moe_inter_dim * experts_per_token
    args.n_dense_layers = args.n_layers
    return args


def _16b() -> DeepSeekV3ModelArgs:
    """DeepSeek-V2-Lite (arXiv:2405.04434, appendix B)."""
    return DeepSeekV3ModelArgs(
        vocab_size=102400,
        dim=2048,
        inter_dim=10944,
        moe_inter_dim=1408,
        n_layers=27,
        n_dense_layers=1,
        n_heads=16,
        moe_args=MoEArgs(num_experts=64, num_shared_experts=2, top_k=6, score_func="softmax"),
        q_lora_rank=0,
        mscale=0.707,
    )


def _671b() -> DeepSeekV3ModelArgs:
    """DeepSeek-V3 (arXiv:2412.19437, 4.2)."""
    return DeepSeekV3ModelArgs(
        moe_args=MoEArgs(
            num_experts=256,
            num_shared_experts=1,
            top_k=8,
            score_func="sigmoid",
            route_norm=True,
            route_scale=2.5,
            num_expert_groups=8,
            num_limited_groups=4,
        ),
    )


FLAVORS = Flavors(
    {"debugmodel": _debug, "debugmodel_dense": _debug_dense, "16B": _16b, "671B": _671b}
)
