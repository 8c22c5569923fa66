"""Pairs of segments for next sentence prediction, chosen as BERT's published code does.

A segment is some consecutive sentences of a document, a sentence whatever ends with ".", "!", "?"
or a line. A chunk of sentences is cut at random into A and B. Half of the time B is replaced by
sentences of another document, and the sentences of the true B go back, to begin the next chunk.
A chunk of one sentence has no true B, so that a little over half of the pairs are random.
"""

import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torchtitan_ext.data.corpora import Cursor, IndexedCorpus
from torchtitan_ext.data.dataset import Place, Segments
from torchtitan_ext.data.masking import seeded

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\s*\n\s*")
_SHORT = 0.1  # share of pairs that don't fill a sequence, so that short ones are learned, too


@dataclass(frozen=True)
class SentencePair:
    """A pair before B is looked up in another document, and before both are trimmed."""

    first: list[int]
    """Tokens of A."""
    second: list[int] | None
    """Tokens of the B that follows, or None if it is to come from another document."""
    document: int
    """Index of the document of A."""
    target: int
    """Tokens of A and B together that are sought."""


@dataclass(frozen=True)
class SentencePairs:
    """Cuts each document into pairs of segments. The unit of an offset is the sentence."""

    corpus: IndexedCorpus
    source: str
    """Names the corpus in messages."""
    encode: Callable[[str], list[int]]
    room: int
    """The most tokens of A and B together, at least 2."""
    seed: int

    unit = "sequences"
    units_per_sequence = 1

    def segments(
        self,
        documents: Iterable[tuple[Cursor, str]],
        offset: int,
        rest: list[int],
        number: int,
    ) -> Segments:
        for index, text in documents:
            sentences = list(self._encode_each(split_sentences(text)))
            while offset < len(sentences):
                # No more than can be needed: a document may be a whole book.
                pair, used = self._cut(sentences[offset : offset + self.room], index, number)
                offset, number = offset + used, number + 1
                yield pair, Place(index, offset)
            offset = 0
        return []

    def complete(self, pair: SentencePair, number: int) -> tuple[list[int], list[int]]:
        """Return A and B of sequence `number`, trimmed to `room` tokens together.

        Raises:
            ValueError: B is to come from another document, and no other one holds text.
        """
        generator = seeded(self.seed, number, "complete pair")
        second = pair.second
        if second is None:
            wanted = max(1, pair.target - len(pair.first))
            second = self._read_other(pair.document, wanted, generator)
        return _trim(pair.first, second, self.room, generator)

    def _cut(self, sentences: list[list[int]], index: int, number: int) -> tuple[SentencePair, int]:
        """Return the first pair of `sentences`, and how many of them it uses up."""
        generator = seeded(self.seed, number, "cut pair")
        is_short = generator.random() < _SHORT
        target = generator.randint(2, self.room) if is_short else self.room
        size = _count_until(sentences, target)
        num_first = generator.randint(1, size - 1) if size > 1 else 1
        is_random = generator.random() < 0.5 or size == 1
        first, second = _join(sentences[:num_first]), _join(sentences[num_first:size])
        if is_random:
            return SentencePair(first, None, index, target), num_first
        return SentencePair(first, second, index, target), size

    def _read_other(self, document: int, wanted: int, generator: random.Random) -> list[int]:
        """Return sentences of another document from a random one on, until `wanted` tokens."""
        texts = self.corpus.texts
        num_others = len(texts) - 1
        first = generator.randrange(max(1, num_others))
        # All others in a circle, as the one that was drawn may have no text.
        for step in range(first, first + num_others):
            other = (document + 1 + step % num_others) % len(texts)
            sentences = split_sentences(texts[other])
            start = generator.randrange(max(1, len(sentences)))
            segment = self._read(sentences[start:], wanted) or self._read(sentences, wanted)
            if segment:
                return segment
        raise no_other_document(self.source)

    def _read(self, sentences: list[str], wanted: int) -> list[int]:
        """Return the tokens of the first sentences, as many as it takes to have `wanted`."""
        tokens: list[int] = []
        for sentence in self._encode_each(sentences):
            tokens += sentence
            if len(tokens) >= wanted:
                break
        return tokens

    def _encode_each(self, sentences: list[str]) -> Iterator[list[int]]:
        return filter(None, map(self.encode, sentences))  # some have only characters to drop


def no_other_document(source: str) -> ValueError:
    return ValueError(
        f"{source}: fewer than 2 documents with text found, but with [mlm] next_sentence = true "
        "half of the pairs take a segment of another document"
    )


def split_sentences(text: str) -> list[str]:
    return [sentence for sentence in _SENTENCE_END.split(text) if sentence]


def _count_until(sentences: list[list[int]], target: int) -> int:
    """Return how many sentences, of at least one, it takes to have `target` tokens."""
    total = 0
    for count, sentence in enumerate(sentences, start=1):
        total += len(sentence)
        if total >= target:
            return count
    return len(sentences)


def _join(sentences: list[list[int]]) -> list[int]:
    return [token for sentence in sentences for token in sentence]


def _trim(
    first: list[int], second: list[int], room: int, generator: random.Random
) -> tuple[list[int], list[int]]:
    """Drop tokens of the longer segment, from its front or end at random, until both fit."""
    ends = [[0, len(first)], [0, len(second)]]
    for _ in range(len(first) + len(second) - room):
        longer = ends[0] if ends[0][1] - ends[0][0] > ends[1][1] - ends[1][0] else ends[1]
        if generator.random() < 0.5:
            longer[0] += 1
        else:
            longer[1] -= 1
    return first[slice(*ends[0])], second[slice(*ends[1])]
