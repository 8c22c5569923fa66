"""Sequences for masked language modelling (BERT, arXiv:1810.04805), and their dataloaders.

| `[mlm]`                | a sequence                                                          |
|------------------------|---------------------------------------------------------------------|
| `packing = true`       | [CLS] window [SEP], cut from all documents with a [SEP] after each  |
| `packing = false`      | [CLS] part of one document [SEP], padded                            |
| `next_sentence = true` | [CLS] segment A [SEP] segment B [SEP], padded                       |

A sample's inputs are `input` and `masked_positions` (see `masking`); of padded sequences also
`attention_mask`, false on padding; of pairs also `token_types`, 1 on B and its [SEP], else 0, and
`next_sentence_labels`, 1 where B comes from another document and 0 where it follows A. All
sequences of a run have the same shapes.
"""

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import JobConfig
from torchtitan.config.job_config import Training, Validation

from torchtitan_ext.data.corpora import (
    HUB_DATASET_NAMES,
    Corpus,
    Cursor,
    IndexedCorpus,
    open_corpus,
)
from torchtitan_ext.data.dataset import (
    PackedStream,
    Place,
    Sample,
    Segments,
    TextDataset,
    build_loader,
    is_infinite,
    read_first_batch,
    sections_with_data,
)
from torchtitan_ext.data.masking import Masking, MaskingVocabulary
from torchtitan_ext.data.sentence_pairs import SentencePair, SentencePairs, no_other_document


@dataclass(frozen=True)
class DocumentParts:
    """Cuts each document into parts of at most `size` tokens, the last often shorter.

    The unit of an offset is the token. Documents without tokens give no part.
    """

    encode: Callable[[str], list[int]]
    size: int
    unit = "sequences"
    units_per_sequence = 1

    def segments(
        self,
        documents: Iterable[tuple[Cursor, str]],
        offset: int,
        rest: list[int],
        number: int,
    ) -> Segments:
        for cursor, text in documents:
            tokens = self.encode(text)
            for start in range(offset, len(tokens), self.size):
                end = min(start + self.size, len(tokens))
                yield tokens[start:end], Place(cursor, end)
            offset = 0
        return []


@dataclass(frozen=True)
class MaskableSequences:
    """Leaves out sequences of which no token can be masked: a batch of them would have no loss.

    These are made of [UNK], such as text in a script that the tokenizer does not know.
    """

    segmenter: PackedStream | DocumentParts
    vocabulary: MaskingVocabulary

    @property
    def unit(self) -> str:
        return f"maskable {self.segmenter.unit}"

    @property
    def units_per_sequence(self) -> int:
        return self.segmenter.units_per_sequence

    def segments(
        self,
        documents: Iterable[tuple[Cursor, str]],
        offset: int,
        rest: list[int],
        number: int,
    ) -> Segments:
        sequences = self.segmenter.segments(documents, offset, rest, number)
        while True:
            try:
                tokens, place = next(sequences)
            except StopIteration as end:
                return end.value
            if not self.vocabulary.is_special[tokens].all():
                yield tokens, place


def build_masked_lm_dataloader(
    dp_world_size: int,
    dp_rank: int,
    tokenizer: BaseTokenizer,
    job_config: JobConfig,
    infinite: bool = True,
) -> ParallelAwareDataloader:
    """Build the training dataloader of `[mlm]`, `[debug]` seed, and `[training]` dataset,
    dataset_path, local_batch_size, seq_len and dataloader.

    Raises:
        ValueError: bad `dataset` or `dataset_path`, or what `check_masked_lm` refuses in the
            tokenizer and in `[mlm]`.
    """
    return _build("training", dp_world_size, dp_rank, tokenizer, job_config, infinite=infinite)


def build_masked_lm_validation_dataloader(
    dp_world_size: int,
    dp_rank: int,
    tokenizer: BaseTokenizer,
    job_config: JobConfig,
    infinite: bool = False,
) -> ParallelAwareDataloader:
    """Build the validation dataloader of `[mlm]` and the same keys in `[validation]`.

    By default it ends with the data, after equally many full batches on every rank. Each iteration
    starts at the beginning with the same masks, so that all validations of a run measure the same.

    Raises:
        ValueError: as `build_masked_lm_dataloader`.
    """
    return _build("validation", dp_world_size, dp_rank, tokenizer, job_config, infinite=infinite)


def check_masked_lm(dp_world_size: int, tokenizer: BaseTokenizer, job_config: JobConfig) -> None:
    """Check what the dataloaders need, and read the beginning of the user's own text.

    Raises:
        ValueError: the tokenizer lacks a special token, or pieces of words for whole_word; seq_len
            has no room for a token; next_sentence with a stream, or with a single document; local
            text that can't be read, or holds less than one sequence for every rank (one batch, if
            it is not repeated).
    """
    for section, config in sections_with_data(job_config).items():
        _read_masking(section, tokenizer, job_config)
        _check_order(section, config, job_config)
        if config.dataset == "local":
            if job_config.mlm.next_sentence:
                _check_documents(section, config)
            infinite = is_infinite(section, job_config)
            loader = _build(section, dp_world_size, 0, tokenizer, job_config, infinite=infinite)
            read_first_batch(loader, config)


def _build(
    section: str,
    dp_world_size: int,
    dp_rank: int,
    tokenizer: BaseTokenizer,
    job_config: JobConfig,
    *,
    infinite: bool,
) -> ParallelAwareDataloader:
    config = _section(job_config, section)
    masking = _read_masking(section, tokenizer, job_config)
    _check_order(section, config, job_config)
    if job_config.mlm.next_sentence:
        make_dataset = functools.partial(_pairs, masking)
    elif job_config.mlm.packing:
        make_dataset = functools.partial(_packed, masking)
    else:
        make_dataset = functools.partial(_padded, masking)
    return build_loader(make_dataset, section, config, dp_world_size, dp_rank, infinite=infinite)


# --- checks


def _section(job_config: JobConfig, section: str) -> Training | Validation:
    return job_config.training if section == "training" else job_config.validation


def _read_masking(section: str, tokenizer: BaseTokenizer, job_config: JobConfig) -> Masking:
    """Return how `[mlm]` masks; raise ValueError if the tokenizer or seq_len is unfit for it."""
    mlm, assets = job_config.mlm, f'[model] hf_assets_path = "{job_config.model.hf_assets_path}"'
    try:
        vocabulary = MaskingVocabulary(tokenizer)
    except ValueError as error:
        raise ValueError(f"{assets}: {error}") from error
    if mlm.whole_word and not vocabulary.continues_word.any():
        raise ValueError(
            "[mlm] whole_word = true: needs a WordPiece tokenizer, but no token of "
            f'{assets} starts with "##"'
        )
    layout, needed = ("[CLS] A [SEP] B [SEP]", 5) if mlm.next_sentence else ("[CLS] A [SEP]", 3)
    seq_len = _section(job_config, section).seq_len
    if seq_len < needed:
        raise ValueError(f"[{section}] seq_len = {seq_len}: {layout} takes at least {needed}")
    seed = job_config.debug.seed or 0
    return Masking(vocabulary, seq_len, mlm.mask_probability, mlm.whole_word, seed)


def _check_order(section: str, config: Training | Validation, job_config: JobConfig) -> None:
    if job_config.mlm.next_sentence and config.dataset in HUB_DATASET_NAMES:
        raise ValueError(
            f'[{section}] dataset = "{config.dataset}": is a stream, but with [mlm] next_sentence '
            "= true documents are read in random order"
        )


def _check_documents(section: str, config: Training | Validation) -> None:
    documents = open_corpus(section, config.dataset, config.dataset_path).documents()
    with_text = (text for _, text in documents if text.strip())
    if len(list(itertools.islice(with_text, 2))) < 2:
        raise no_other_document(f'[{section}] dataset = "{config.dataset}"')


# --- layouts
#
# A layout takes a corpus and the other arguments of `TextDataset`. Nothing here is a closure: a
# dataset must survive the way to a worker that is not a fork.


def _packed(masking: Masking, corpus: Corpus, **kwargs: Any) -> TextDataset:
    stream = PackedStream(masking.vocabulary.encode_with_sep, window=masking.seq_len - 2)
    sequences = MaskableSequences(stream, masking.vocabulary)
    return TextDataset(corpus, sequences, functools.partial(_packed_sample, masking), **kwargs)


def _padded(masking: Masking, corpus: Corpus, **kwargs: Any) -> TextDataset:
    parts = DocumentParts(masking.vocabulary.encode, size=masking.seq_len - 2)
    sequences = MaskableSequences(parts, masking.vocabulary)
    return TextDataset(corpus, sequences, functools.partial(_padded_sample, masking), **kwargs)


def _pairs(masking: Masking, corpus: Corpus, *, source: str, **kwargs: Any) -> TextDataset:
    assert isinstance(corpus, IndexedCorpus)  # `_check_order` has refused the others
    room = masking.seq_len - 3
    pairs = SentencePairs(corpus, source, masking.vocabulary.encode, room, masking.seed)
    make_sample = functools.partial(_pair_sample, masking, pairs)
    return TextDataset(corpus, pairs, make_sample, source=source, **kwargs)


def _packed_sample(masking: Masking, tokens: list[int], number: int) -> Sample:
    return masking.apply([masking.vocabulary.cls, *tokens, masking.vocabulary.sep], number)


def _padded_sample(masking: Masking, tokens: list[int], number: int) -> Sample:
    vocabulary = masking.vocabulary
    return _pad_and_mask(masking, [vocabulary.cls, *tokens, vocabulary.sep], number)


def _pair_sample(masking: Masking, pairs: SentencePairs, pair: SentencePair, number: int) -> Sample:
    vocabulary = masking.vocabulary
    first, second = pairs.complete(pair, number)
    tokens = [vocabulary.cls, *first, vocabulary.sep, *second, vocabulary.sep]
    inputs, labels = _pad_and_mask(masking, tokens, number)
    token_types = torch.zeros(masking.seq_len, dtype=torch.int64)
    token_types[len(first) + 2 : len(tokens)] = 1
    inputs["token_types"] = token_types
    inputs["next_sentence_labels"] = torch.tensor(int(pair.second is None))
    return inputs, labels


def _pad_and_mask(masking: Masking, tokens: list[int], number: int) -> Sample:
    padding = masking.seq_len - len(tokens)
    inputs, labels = masking.apply(tokens + [masking.vocabulary.pad] * padding, number)
    inputs["attention_mask"] = torch.arange(masking.seq_len) < len(tokens)
    return inputs, labels
