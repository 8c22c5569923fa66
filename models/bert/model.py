"""BERT (arXiv:1810.04805) as single-device code: no rank, mesh or process group.

Shapes: B batch, S sequence, D model, H heads, K width of a head, V vocabulary, M masked positions.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torchtitan.protocols import ModelProtocol

from torchtitan_ext.components.attention import BidirectionalAttention
from torchtitan_ext.components.initialize import (
    Initializer,
    Ones,
    TruncatedNormal,
    Zeros,
    init_parameters,
)
from torchtitan_ext.model_output import ModelOutput

from .args import BertModelArgs


class Attention(nn.Module):
    """Self-attention in both directions."""

    def __init__(self, args: BertModelArgs) -> None:
        super().__init__()
        self.head_dim = args.dim // args.n_heads
        self.wq = nn.Linear(args.dim, args.dim)
        self.wk = nn.Linear(args.dim, args.dim)
        self.wv = nn.Linear(args.dim, args.dim)
        self.core = BidirectionalAttention(args.attention_dropout)
        self.wo = nn.Linear(args.dim, args.dim)

    def forward(self, x_BSD: torch.Tensor, is_token_B11S: torch.Tensor | None) -> torch.Tensor:
        q_BHSK, k_BHSK, v_BHSK = (
            projection(x_BSD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.wq, self.wk, self.wv)
        )
        out_BHSK = self.core(q_BHSK, k_BHSK, v_BHSK, is_token_B11S)
        return self.wo(out_BHSK.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """Two layers with an exact GELU between them."""

    def __init__(self, args: BertModelArgs) -> None:
        super().__init__()
        self.w1 = nn.Linear(args.dim, args.hidden_dim)
        self.w2 = nn.Linear(args.hidden_dim, args.dim)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        return self.w2(F.gelu(self.w1(x_BSD)))


class TransformerBlock(nn.Module):
    """Attention, then feed-forward; the norms come after the residual sums."""

    def __init__(self, args: BertModelArgs) -> None:
        super().__init__()
        self.attention = Attention(args)
        self.attention_norm = nn.LayerNorm(args.dim, eps=args.norm_eps)
        self.feed_forward = FeedForward(args)
        self.ffn_norm = nn.LayerNorm(args.dim, eps=args.norm_eps)
        self.dropout = nn.Dropout(args.residual_dropout)

    def forward(self, x_BSD: torch.Tensor, is_token_B11S: torch.Tensor | None) -> torch.Tensor:
        attended_BSD = self.attention(x_BSD, is_token_B11S)
        x_BSD = self.attention_norm(x_BSD + self.dropout(attended_BSD))
        return self.ffn_norm(x_BSD + self.dropout(self.feed_forward(x_BSD)))


class MaskedLMHead(nn.Module):
    """What comes before the product with the embedding, which is the decoder's weight, too."""

    def __init__(self, args: BertModelArgs) -> None:
        super().__init__()
        self.dense = nn.Linear(args.dim, args.dim)
        self.norm = nn.LayerNorm(args.dim, eps=args.norm_eps)
        self.bias = nn.Parameter(torch.empty(args.vocab_size))

    def forward(
        self,
        x_BSD: torch.Tensor,
        masked_positions: torch.Tensor | None,
        embedding_VD: torch.Tensor,
    ) -> torch.Tensor:
        x_BMD = x_BSD
        if masked_positions is not None:
            # The product with the vocabulary is most of a small model's work: spare it the rest.
            x_BMD = x_BSD.gather(1, masked_positions.unsqueeze(-1).expand(-1, -1, x_BSD.shape[-1]))
        x_BMD = self.norm(F.gelu(self.dense(x_BMD)))
        return F.linear(x_BMD, embedding_VD, self.bias)


class NextSentenceHead(nn.Module):
    """From the first token, [CLS]: class 0 if the second segment follows the first, else 1."""

    def __init__(self, args: BertModelArgs) -> None:
        super().__init__()
        self.pooler = nn.Linear(args.dim, args.dim)
        self.classifier = nn.Linear(args.dim, 2)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        return self.classifier(torch.tanh(self.pooler(x_BSD[:, 0])))


class BertModel(ModelProtocol):
    """Token ids in, :class:`ModelOutput` out."""

    def __init__(self, model_args: BertModelArgs) -> None:
        super().__init__(model_args)
        self.model_args = args = model_args
        self.tok_embeddings = nn.Embedding(args.vocab_size, args.dim)
        self.position_embeddings = nn.Embedding(args.max_seq_len, args.dim)
        self.token_type_embeddings = nn.Embedding(args.num_token_types, args.dim)
        self.embedding_norm = nn.LayerNorm(args.dim, eps=args.norm_eps)
        self.embedding_dropout = nn.Dropout(args.embedding_dropout)
        self.layers = nn.ModuleDict(
            {str(layer_id): TransformerBlock(args) for layer_id in range(args.n_layers)}
        )
        self.mlm_head = MaskedLMHead(args)
        self.next_sentence_head = NextSentenceHead(args) if args.next_sentence else None

    def forward(
        self,
        tokens: torch.Tensor,
        masked_positions: torch.Tensor | None = None,
        token_types: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> ModelOutput:
        """Computes logits at the masked positions, or at all if none are given.

        Args:
            tokens: (B, S) int64.
            masked_positions: (B, M) int64.
            token_types: (B, S) int64, which segment a token is of; None for the first.
            attention_mask: (B, S) bool, False at padding; None without padding.
        """
        x_BSD = self._embed(tokens, token_types)
        is_token_B11S = None if attention_mask is None else attention_mask[:, None, None]
        for layer in self.layers.values():
            x_BSD = layer(x_BSD, is_token_B11S)
        next_sentence_logits = None
        if self.next_sentence_head is not None:
            next_sentence_logits = self.next_sentence_head(x_BSD)
        logits = self.mlm_head(x_BSD, masked_positions, self.tok_embeddings.weight)
        return ModelOutput(
            logits, label_positions=masked_positions, next_sentence_logits=next_sentence_logits
        )

    def _embed(self, tokens_BS: torch.Tensor, types_BS: torch.Tensor | None) -> torch.Tensor:
        positions_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        types_BS = torch.zeros_like(tokens_BS) if types_BS is None else types_BS
        x_BSD = (
            self.tok_embeddings(tokens_BS)
            + self.token_type_embeddings(types_BS)
            + self.position_embeddings(positions_S)
        )
        return self.embedding_dropout(self.embedding_norm(x_BSD))

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Fills the parameters of a materialised model.

        ======================  =================================
        matrices, embeddings    truncated normal, std 0.02
        biases                  zeros
        norms                   ones, zeros
        ======================  =================================
        """
        init_parameters(self, self.model_args.init_seed, _initializer)


def _initializer(name: str) -> Initializer:
    if name.endswith("bias"):
        return Zeros()
    if name.endswith("norm.weight"):
        return Ones()
    return TruncatedNormal(std=0.02)
