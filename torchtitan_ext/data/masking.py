"""Chooses the tokens that masked language modelling hides, and what is shown in their place.

As in BERT (arXiv:1810.04805), but anew in every epoch. All choices for a sequence come from the
seed and the number of the sequence in the run, so no random state has to be kept or saved: layout,
workers and resuming can't change them.
"""

import random
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from tokenizers import Tokenizer
from torchtitan.components.tokenizer import BaseTokenizer, HuggingFaceTokenizer

IGNORED = -100
"""The label of a token that is not to be predicted; torch's cross entropy leaves it out."""

_SHOWN_AS_MASK, _SHOWN_AS_RANDOM = 0.8, 0.1  # the others are shown as they are
_NUM_FRAMING = 2  # at least [CLS] and [SEP] are in a sequence, and never masked
_CONTINUES = "##"  # how WordPiece marks a token that goes on with a word


def seeded(seed: int, number: int, purpose: str) -> random.Random:
    """Return the random numbers of one sequence; each purpose has numbers of its own.

    Python seeds with a hash of the whole string, so near numbers give unrelated results.
    """
    return random.Random(f"{purpose} {seed} {number}")


class MaskingVocabulary:
    """A tokenizer's tokens as masking sees them; encodes text without special tokens.

    Attributes:
        pad, cls, sep, mask: ids of [PAD], [CLS], [SEP] and [MASK].
        is_special: by id, whether a token is one of these, or marked as special in the tokenizer,
            as [UNK] is: neither to be predicted, nor shown in another's place.
        continues_word: by id, whether a token goes on with the word of the token before.
        ordinary: ids of all tokens that are not special.

    Raises:
        ValueError: names the special tokens that are missing.
    """

    def __init__(self, tokenizer: BaseTokenizer) -> None:
        # A copy of our own: a file may ask for special tokens, truncation or padding, none of
        # which suits text that is cut and framed later.
        original = cast(HuggingFaceTokenizer, tokenizer).tokenizer
        self._tokenizer = Tokenizer.from_str(original.to_str())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab()
        names = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
        missing = [name for name in names if name not in vocabulary]
        if missing:
            raise ValueError(f"the tokenizer has no {', '.join(missing)}, which masking needs")
        self.pad, self.cls, self.sep, self.mask = (vocabulary[name] for name in names)
        self.is_special = np.zeros(max(vocabulary.values()) + 1, dtype=bool)
        self.continues_word = np.zeros_like(self.is_special)
        for token, index in vocabulary.items():
            self.continues_word[index] = token.startswith(_CONTINUES)
        added = self._tokenizer.get_added_tokens_decoder().items()
        marked = [index for index, token in added if token.special]
        self.is_special[[self.pad, self.cls, self.sep, self.mask, *marked]] = True
        ids = np.array(sorted(vocabulary.values()))
        self.ordinary = ids[~self.is_special[ids]]

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text` itself, without [CLS] and [SEP]."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_with_sep(self, text: str) -> list[int]:
        """Return the tokens of `text` and one [SEP], or nothing if there are none."""
        tokens = self.encode(text)
        return [*tokens, self.sep] if tokens else []


@dataclass(frozen=True)
class Masking:
    """How sequences of `seq_len` tokens are masked."""

    vocabulary: MaskingVocabulary
    seq_len: int
    probability: float
    """Share of a sequence's ordinary tokens to predict."""
    whole_word: bool
    """Mask all pieces of a word or none."""
    seed: int

    @property
    def max_masked(self) -> int:
        """The most tokens that are masked in a sequence: the length of `masked_positions`."""
        return max(1, round((self.seq_len - _NUM_FRAMING) * self.probability))

    def apply(self, tokens: list[int], number: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Mask a sequence of `seq_len` tokens that begins with [CLS].

        Args:
            tokens: the sequence, special tokens and padding included.
            number: of the sequence in the run.

        Returns:
            The arguments `input` (seq_len,) and `masked_positions` (max_masked,), in order and
            filled up with 0, the place of [CLS]; and the labels (seq_len,), which are `IGNORED`
            at all positions but the masked ones. All are int64.
        """
        shown = np.array(tokens, dtype=np.int64)
        candidates = np.flatnonzero(~self.vocabulary.is_special[shown])
        draws = _draw(seeded(self.seed, number, "mask"), len(candidates) + 2 * self.max_masked)
        masked = self._choose(shown, candidates, draws[2 * self.max_masked :])
        labels = np.full(self.seq_len, IGNORED, dtype=np.int64)
        labels[masked] = shown[masked]
        positions = np.zeros(self.max_masked, dtype=np.int64)
        positions[: len(masked)] = masked
        shown[masked] = self._replace(shown[masked], draws[: 2 * self.max_masked])
        inputs = {"input": torch.from_numpy(shown), "masked_positions": torch.from_numpy(positions)}
        return inputs, torch.from_numpy(labels)

    def _choose(self, tokens: np.ndarray, candidates: np.ndarray, draws: np.ndarray) -> np.ndarray:
        """Return the positions to mask, in order: at least one if there is a candidate."""
        num_masked = max(1, round(len(candidates) * self.probability))
        num_masked = min(num_masked, self.max_masked)
        if self.whole_word and len(candidates):
            return self._choose_words(tokens, candidates, draws, num_masked)
        return np.sort(candidates[np.argsort(draws, kind="stable")[:num_masked]])

    def _choose_words(
        self, tokens: np.ndarray, candidates: np.ndarray, draws: np.ndarray, budget: int
    ) -> np.ndarray:
        """Return the positions of whole words in random order, as far as each fits the budget."""
        # A piece goes on with a word only right after a piece of it: a special token ends words.
        is_start = ~self.vocabulary.continues_word[tokens[candidates]]
        is_start |= np.diff(candidates, prepend=-1) != 1
        bounds = [*np.flatnonzero(is_start).tolist(), len(candidates)]
        order = np.argsort(draws[: len(bounds) - 1], kind="stable").tolist()
        chosen: list[np.ndarray] = []
        left = budget
        for word in order:
            size = bounds[word + 1] - bounds[word]
            if size <= left:
                chosen.append(candidates[bounds[word] :][:size])
                left -= size
            if not left:
                break
        if not chosen:  # all words are too long: a part of one
            chosen.append(candidates[bounds[order[0]] :][:budget])
        return np.sort(np.concatenate(chosen))

    def _replace(self, tokens: np.ndarray, draws: np.ndarray) -> np.ndarray:
        """Return what is shown in place of the masked `tokens`."""
        count, ordinary = len(tokens), self.vocabulary.ordinary
        kinds, indices = draws[:count], draws[len(draws) // 2 :][:count]
        others = ordinary[(indices * len(ordinary)).astype(np.int64)]
        shown = np.where(kinds < _SHOWN_AS_MASK + _SHOWN_AS_RANDOM, others, tokens)
        return np.where(kinds < _SHOWN_AS_MASK, self.vocabulary.mask, shown)


def _draw(generator: random.Random, count: int) -> np.ndarray:
    """Return `count` numbers, uniform in [0, 1). At once: a call for each takes far longer."""
    bits = np.frombuffer(generator.randbytes(4 * count), dtype="<u4")
    return bits * 2.0**-32
