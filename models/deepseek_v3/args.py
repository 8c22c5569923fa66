"""Numbers that define a DeepSeek-V3 model."""

from dataclasses import dataclass, field

from torch import nn
from torchtitan.config import JobConfig
from torchtitan.models.utils import get_moe_model_nparams_and_flops
from torchtitan.protocols import BaseModelArgs

from torchtitan_ext.moe import MoEArgs


@dataclass
class DeepSeekV3ModelArgs(BaseModelArgs):
    """Architecture of one flavor. Names follow torchtitan 0.2.2, defaults follow DeepSeek-V3."""

    vocab_size: int = 129280
    dim: int = 7168
    inter_dim: int = 18432
    """Hidden width of the dense layers' feed-forward."""
    moe_inter_dim: int = 2048
    """Hidden width of one expert."""
    n_layers: int = 61
    n_dense_layers: int = 3
    """The first layers, which have a dense feed-forward instead of experts."""
    n_heads: int = 128
    norm_eps: float = 1e-6
    moe_args: MoEArgs = field(default_factory=MoEArgs)

    # Multi-head latent attention
    q_lora_rank: int = 1536
    """Width of the queries' latent; 0 projects queries directly."""
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    """Part of a query or key head without position."""
    qk_rope_head_dim: int = 64
    """Part of a query or key head that is rotated by position."""
    v_head_dim: int = 128

    # Rotary positions, stretched by YaRN (arXiv:2309.00071) beyond original_seq_len
    max_seq_len: int = 4096
    """Longest sequence; the run sets it from [training] and [validation] seq_len."""
    original_seq_len: int = 4096
    rope_theta: float = 10000.0
    rope_factor: float = 40.0
    beta_fast: int = 32
    beta_slow: int = 1
    mscale: float = 1.0

    init_seed: int = 0
    """Seed of the initial weights; the run sets it from [debug] seed."""

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def uses_yarn(self) -> bool:
        return self.max_seq_len > self.original_seq_len

    def update_from_config(self, job_config: JobConfig, **kwargs: object) -> None:
        self.max_seq_len = job_config.training.seq_len
        if job_config.validation.enable:
            self.max_seq_len = max(self.max_seq_len, job_config.validation.seq_len)
        self.init_seed = job_config.debug.seed or 0

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Parameters in all, and floating point operations per token, forward and backward."""
        return get_moe_model_nparams_and_flops(
            self, model, self.qk_head_dim + self.v_head_dim, seq_len
        )
