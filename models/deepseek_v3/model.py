"""DeepSeek-V3 (arXiv:2412.19437) as single-device code: no rank, mesh or process group.

Shapes: B batch, S sequence, D model, V vocabulary, E experts, L MoE layers, H heads,
Q query and key head width (N without position + R rotary), W value head width, C latent.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import nn
from torchtitan.protocols import ModelProtocol

from torchtitan_ext.components.attention import CausalAttention
from torchtitan_ext.components.initialize import (
    Initializer,
    Normal,
    Ones,
    TruncatedNormal,
    init_parameters,
)
from torchtitan_ext.model_output import ModelOutput
from torchtitan_ext.moe import FeedForward, MoE, moe_layers

from .args import DeepSeekV3ModelArgs
from .rope import apply_rope, attention_scale, rope_cache


class Attention(nn.Module):
    """Multi-head latent attention: keys and values are expanded from a narrow latent."""

    def __init__(self, args: DeepSeekV3ModelArgs) -> None:
        super().__init__()
        self.kv_lora_rank = args.kv_lora_rank
        self.qk_nope_head_dim = args.qk_nope_head_dim
        self.qk_rope_head_dim = args.qk_rope_head_dim
        self.qk_head_dim = args.qk_head_dim
        self.v_head_dim = args.v_head_dim
        self.has_query_latent = args.q_lora_rank > 0

        queries = args.n_heads * args.qk_head_dim
        if self.has_query_latent:
            self.wq_a = nn.Linear(args.dim, args.q_lora_rank, bias=False)
            self.q_norm = nn.RMSNorm(args.q_lora_rank, eps=args.norm_eps)
            self.wq_b = nn.Linear(args.q_lora_rank, queries, bias=False)
        else:
            self.wq = nn.Linear(args.dim, queries, bias=False)
        self.wkv_a = nn.Linear(args.dim, args.kv_lora_rank + args.qk_rope_head_dim, bias=False)
        self.kv_norm = nn.RMSNorm(args.kv_lora_rank, eps=args.norm_eps)
        keys_and_values = args.n_heads * (args.qk_nope_head_dim + args.v_head_dim)
        self.wkv_b = nn.Linear(args.kv_lora_rank, keys_and_values, bias=False)
        self.core = CausalAttention(attention_scale(args))
        self.wo = nn.Linear(args.n_heads * args.v_head_dim, args.dim, bias=False)

    def forward(self, x_BSD: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        q_BHSQ = self._queries(x_BSD, rope).transpose(1, 2)
        k_BSHQ, v_BSHW = self._keys_and_values(x_BSD, rope)
        out_BHSW = self.core(q_BHSQ, k_BSHQ.transpose(1, 2), v_BSHW.transpose(1, 2))
        return self.wo(out_BHSW.transpose(1, 2).flatten(2))

    def _queries(self, x_BSD: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        q = self.wq_b(self.q_norm(self.wq_a(x_BSD))) if self.has_query_latent else self.wq(x_BSD)
        q_BSHQ = q.unflatten(-1, (-1, self.qk_head_dim))
        q_BSHN, q_BSHR = q_BSHQ.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        return torch.cat([q_BSHN, apply_rope(q_BSHR, rope)], dim=-1)

    def _keys_and_values(
        self, x_BSD: torch.Tensor, rope: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        latent = self.wkv_a(x_BSD)
        latent_BSC, k_BSR = latent.split([self.kv_lora_rank, self.qk_rope_head_dim], dim=-1)
        kv = self.wkv_b(self.kv_norm(latent_BSC))
        kv_BSHX = kv.unflatten(-1, (-1, self.qk_nope_head_dim + self.v_head_dim))
        k_BSHN, v_BSHW = kv_BSHX.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        # One rotary key serves every head.
        k_BSHR = apply_rope(k_BSR.unsqueeze(2), rope).expand(-1, -1, k_BSHN.shape[2], -1)
        return torch.cat([k_BSHN, k_BSHR], dim=-1), v_BSHW


class TransformerBlock(nn.Module):
    """Attention, then a dense feed-forward or a mixture of experts, each on a normed residual."""

    def __init__(self, args: DeepSeekV3ModelArgs, *, moe_enabled: bool) -> None:
        super().__init__()
        self.moe_enabled = moe_enabled
        self.attention_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.attention = Attention(args)
        self.ffn_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        if moe_enabled:
            self.moe = MoE(args.moe_args, args.dim, args.moe_inter_dim)
        else:
            self.feed_forward = FeedForward(args.dim, args.inter_dim)

    def forward(
        self, x_BSD: torch.Tensor, rope: torch.Tensor, given_ids_TK: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Returns the hidden state and, from a MoE layer, what :meth:`MoE.forward` says of it."""
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), rope)
        if self.moe_enabled:
            y_BSD, tokens_per_expert_E, ids_TK = self.moe(self.ffn_norm(x_BSD), given_ids_TK)
            return x_BSD + y_BSD, tokens_per_expert_E, ids_TK
        return x_BSD + self.feed_forward(self.ffn_norm(x_BSD)), None, None


class DeepSeekV3Model(ModelProtocol):
    """Token ids in, :class:`ModelOutput` out.

    A part of the model has some of the layers, and None in place of other modules: without the
    embedding it takes a hidden state, without norm and output it returns one.
    """

    rope: torch.Tensor

    def __init__(self, model_args: DeepSeekV3ModelArgs) -> None:
        super().__init__(model_args)
        self.model_args = args = model_args
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleDict(
            {
                str(layer_id): TransformerBlock(args, moe_enabled=layer_id >= args.n_dense_layers)
                for layer_id in range(args.n_layers)
            }
        )
        self.norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        self.register_buffer("rope", rope_cache(args), persistent=False)

    def forward(
        self,
        tokens_BS: torch.Tensor,
        given_expert_ids: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> ModelOutput:
        """Runs the model.

        Args:
            tokens_BS: token ids; (B, S, D) hidden state for a part without the embedding.
            given_expert_ids: the experts of each token, (T, K), of each layer by its name in
                ``layers``; in the others the routers choose.
        """
        h_BSD = tokens_BS if self.tok_embeddings is None else self.tok_embeddings(tokens_BS)
        counts, expert_ids = [], []
        for name, layer in self.layers.items():
            h_BSD, tokens_per_expert_E, ids_TK = layer(h_BSD, self.rope, given_expert_ids.get(name))
            if tokens_per_expert_E is not None:
                counts.append(tokens_per_expert_E)
                expert_ids.append(ids_TK)
        for module in (self.norm, self.output):
            h_BSD = h_BSD if module is None else module(h_BSD)
        if not counts:
            return ModelOutput(h_BSD)
        return ModelOutput(h_BSD, torch.stack(counts), expert_ids=tuple(expert_ids))

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Fills parameters and buffers of the materialised model.

        ======================  ====================================================
        embedding               normal, std 0.02
        output                  truncated normal, std dim ** -0.5
        wo, w2 of layer i       truncated normal, std 0.02 / sqrt(2 (i + 1))
        other matrices          truncated normal, std 0.02
        norms, expert bias      ones, zeros
        ======================  ====================================================
        """
        init_parameters(self, self.model_args.init_seed, self._initializer)
        device = buffer_device or self.rope.device
        with torch.device(device):
            self.rope = rope_cache(self.model_args)
        for moe in moe_layers(self):
            if moe.expert_bias is not None:
                moe.expert_bias = torch.zeros_like(moe.expert_bias, device=device)

    def _initializer(self, name: str) -> Initializer:
        leaf = name.removesuffix(".weight").rpartition(".")[2]
        if "norm" in leaf:
            return Ones()
        if leaf == "tok_embeddings":
            return Normal(std=0.02)
        if leaf == "output":
            return TruncatedNormal(std=self.model_args.dim**-0.5)
        if leaf in ("wo", "w2"):  # they write into the residual: deeper layers write less
            layer_id = int(name.split(".")[1])
            return TruncatedNormal(std=0.02 / (2 * (layer_id + 1)) ** 0.5)
        return TruncatedNormal(std=0.02)
