"""Numbers that define a BERT model."""

from dataclasses import dataclass

from torch import nn
from torchtitan.config import JobConfig
from torchtitan.protocols import BaseModelArgs


@dataclass
class BertModelArgs(BaseModelArgs):
    """Architecture of one flavor (arXiv:1810.04805); the defaults are BERT-tiny's."""

    vocab_size: int = 30522
    dim: int = 128
    n_layers: int = 2
    n_heads: int = 2
    hidden_dim: int = 512
    """Hidden width of the feed-forward."""
    max_seq_len: int = 512
    """Number of learned positions."""
    num_token_types: int = 2
    norm_eps: float = 1e-12

    # From the run's configuration
    embedding_dropout: float = 0.1
    attention_dropout: float = 0.1
    residual_dropout: float = 0.1
    next_sentence: bool = False
    """Whether there is a head for the next-sentence task."""
    mask_probability: float = 0.15
    """Share of the positions that the head over the vocabulary runs on; for counting operations."""
    init_seed: int = 0
    """Seed of the initial weights."""

    def update_from_config(self, job_config: JobConfig, **kwargs: object) -> None:
        self.embedding_dropout = job_config.dropout.embedding
        self.attention_dropout = job_config.dropout.attention
        self.residual_dropout = job_config.dropout.residual
        self.next_sentence = job_config.mlm.next_sentence
        self.mask_probability = job_config.mlm.mask_probability
        self.init_seed = job_config.debug.seed or 0

    def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
        """Parameters in all, and floating point operations per token, forward and backward.

        Six operations for each weight of a matrix product, and twelve for each query, key and
        channel; the head over the vocabulary runs on the masked tokens alone.
        """
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        block = 4 * self.dim**2 + 2 * self.dim * self.hidden_dim
        head = self.dim**2 + self.dim * self.vocab_size
        weights = self.n_layers * block + self.mask_probability * head
        attention = 12 * self.n_layers * self.dim * seq_len
        return num_parameters, round(6 * weights + attention)
