"""Deals the sequences of a corpus to ranks and dataloader workers, whatever they are made of.

A `Segmenter` cuts documents into sequences, `make_sample` turns one into tensors, and `TextDataset`
does the rest: order, shares, positions to resume from. `text` and `masked_lm` are built on it.
"""

import itertools
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import IterableDataset, get_worker_info
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.config import JobConfig
from torchtitan.config.job_config import Training, Validation
from torchtitan.tools.logging import logger

from torchtitan_ext.data.corpora import Corpus, Cursor, HubCorpus, open_corpus

Sample = tuple[dict[str, torch.Tensor], torch.Tensor]
"""The model's arguments by name, and the labels."""


class Place(NamedTuple):
    """A place in a corpus where the next sequence begins."""

    document: Cursor
    offset: int
    """How much of that document is used, in units of the segmenter (tokens, sentences)."""


Segments = Generator[tuple[Any, Place], None, list[int]]
"""Yields sequences, each with the place after it; returns the tokens left at the end."""


class Segmenter(Protocol):
    """Cuts documents into sequences. It keeps nothing between calls: a run may resume anywhere."""

    @property
    def unit(self) -> str:
        """What too short a corpus is measured in, "tokens" or "sequences"."""

    @property
    def units_per_sequence(self) -> int:
        """How many of them a sequence takes."""

    def segments(
        self,
        documents: Iterable[tuple[Cursor, str]],
        offset: int,
        rest: list[int],
        number: int,
    ) -> Segments:
        """Cut one pass over a corpus.

        Args:
            documents: the corpus from some document on.
            offset: how much of the first one is used.
            rest: tokens left at the end of the pass before.
            number: of the first sequence, in the run.
        """


@dataclass(frozen=True)
class PackedStream:
    """Joins all documents to one stream of tokens and cuts it into windows without overlap.

    The unit of an offset is the token.
    """

    encode: Callable[[str], list[int]]
    """The tokens of a document, with what comes between two of them."""

    window: int
    """Tokens of a sequence."""

    unit = "tokens"

    @property
    def units_per_sequence(self) -> int:
        return self.window

    def segments(
        self,
        documents: Iterable[tuple[Cursor, str]],
        offset: int,
        rest: list[int],
        number: int,
    ) -> Segments:
        window = self.window
        for cursor, text in documents:
            tokens = rest + self.encode(text)[offset:]
            # A window that ends in this document has used up `rest`. So what comes after it is
            # described by an offset into this one document.
            offset -= len(rest)
            end = len(tokens) - len(tokens) % window
            for cut in range(window, end + 1, window):
                yield tokens[cut - window : cut], Place(cursor, offset + cut)
            rest, offset = tokens[end:], 0
        return rest


@dataclass(frozen=True)
class _Position:
    """The place in the corpus where the next round begins."""

    epoch: int = 0
    document: Cursor = None
    offset: int = 0
    """How much of that document is used. The tokens themselves are not saved: to encode one
    document again is cheaper than to write what may be a whole book every step."""
    round: int = 0


class TextDataset(IterableDataset[Sample], Stateful):
    """Deals the sequences of a corpus to ranks: the same sequences for every number of ranks.

    Sequence number i of the whole corpus goes to data-parallel rank i % dp_world_size. So a global
    batch holds the same sequences on 1 rank with a local batch of 4 as on 2 ranks with 2, losses
    can be compared across layouts, and one large file feeds every rank. The cost: every rank, and
    every dataloader worker of it, encodes the whole corpus. Where that is too slow (see
    `build_loader`), a corpus gives each rank documents of its own (`is_split_over_ranks`).

    The unit of work is a round: the next sequence of every rank. Only whole rounds are used, so
    all ranks yield equally many sequences and none is left waiting in a collective. Workers take
    turns by the batch, which keeps the order that a single process would have.

    An infinite dataset starts over at the end of the corpus, and joins the tokens left there to
    its beginning. `state_dict` is a position in the corpus; after `load_state_dict` the next
    iteration yields exactly what would have come next. Any other iteration starts at the beginning.

    Args:
        corpus: the documents.
        segmenter: cuts them into sequences.
        make_sample: turns a sequence into tensors. Its second argument is the number of the
            sequence in the run, which goes on growing over epochs: no two sequences share one.
        source: names the corpus in messages, such as `[training] dataset = "local"`.
        seq_len: tokens of an input, for messages.
        batch_size: sequences of a local batch, for the turns of the workers.
        dp_rank, dp_world_size: the share of the sequences to yield.
        infinite: start over at the end of the corpus.

    Raises:
        ValueError: while iterating, if the corpus is too short for one sequence on each rank, or
            for one batch if the dataset is finite.
    """

    def __init__(
        self,
        corpus: Corpus,
        segmenter: Segmenter,
        make_sample: Callable[[Any, int], Sample],
        *,
        source: str,
        seq_len: int,
        batch_size: int = 1,
        dp_rank: int = 0,
        dp_world_size: int = 1,
        infinite: bool = False,
    ) -> None:
        self._corpus = corpus
        self._segmenter = segmenter
        self._make_sample = make_sample
        self._source = source
        self._seq_len = seq_len
        self._batch_size = batch_size
        self._dp_rank = dp_rank
        self._dp_world_size = dp_world_size
        self._infinite = infinite
        self._round_size = 1 if corpus.is_split_over_ranks else dp_world_size
        self._identity = (
            f"{source}, {segmenter.units_per_sequence} {segmenter.unit} a sequence of {seq_len}"
        )
        self._start = self._position = _Position()

    def __iter__(self) -> Iterator[Sample]:
        # Not a generator: the loaded position must be in place before the first sample is drawn,
        # because a dataloader asks for the state then.
        self._position, self._start = self._start, _Position()
        return self._samples(self._position)

    def state_dict(self) -> dict[str, Any]:
        return {**asdict(self._position), "data": self._identity}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        position = dict(state_dict)
        saved = position.pop("data", "not said")
        if saved != self._identity:
            # A place in other sequences would be one at random in these.
            logger.warning(
                f"The checkpoint's place is one in other data ({saved}): these ({self._identity}) "
                "start at their beginning"
            )
            position = asdict(_Position())
        self._start = self._position = _Position(**position)

    def _samples(self, start: _Position) -> Iterator[Sample]:
        """Yield this rank's sequence of every round that is this worker's turn."""
        worker, num_workers = _worker_share()
        split = self._corpus.is_split_over_workers
        mine = self._dp_rank % self._round_size
        for number, sequences in self._rounds(start):
            if split:  # all turns are this worker's, and the others count from 0 as well
                yield self._sample(sequences[mine], number * num_workers + worker)
            elif number // self._batch_size % num_workers == worker:
                yield self._sample(sequences[mine], number)

    def _sample(self, sequence: Any, round_number: int) -> Sample:
        return self._make_sample(sequence, round_number * self._dp_world_size + self._dp_rank)

    def _rounds(self, start: _Position) -> Iterator[tuple[int, list[Any]]]:
        """Yield (number, sequences) of each round from `start` on."""
        number, sequences = start.round, []
        for epoch, sequence, place in self._sequences(start):
            sequences.append(sequence)
            if len(sequences) == self._round_size:
                self._position = _Position(epoch, place.document, place.offset, number + 1)
                yield number, sequences
                number, sequences = number + 1, []

    def _sequences(self, start: _Position) -> Iterator[tuple[int, Any, Place]]:
        """Yield (epoch, sequence, place after it) of each sequence from `start` on."""
        epoch, document, offset = start.epoch, start.document, start.offset
        number = start.round * self._round_size
        rest: list[int] = []  # tokens of earlier documents, too few for a sequence
        while True:
            documents = self._corpus.documents(document)
            segments = self._segmenter.segments(documents, offset, rest, number)
            while True:
                try:
                    sequence, place = next(segments)
                except StopIteration as end:
                    rest = end.value
                    break
                yield epoch, sequence, place
                number += 1
            self._check_length(number, len(rest))
            if not self._infinite:
                return
            epoch, document, offset = epoch + 1, None, 0
            logger.info(f"{self._source}: end of the data, starting epoch {epoch}")

    def _check_length(self, num_sequences: int, num_left: int) -> None:
        """Raise if there is nothing to train on: an infinite loop would never yield."""
        rounds_needed = 1 if self._infinite else self._batch_size
        if num_sequences // self._round_size >= rounds_needed:
            return
        size = self._segmenter.units_per_sequence
        unit = "sequence" if self._infinite else f"batch of {self._batch_size}"
        raise ValueError(
            f"{self._source}: {num_sequences * size + num_left} {self._segmenter.unit} found, "
            f"but one {unit} on every rank takes {rounds_needed * self._round_size * size} "
            f"(seq_len = {self._seq_len}, data-parallel degree {self._round_size})"
        )


def build_loader(
    make_dataset: Callable[..., TextDataset],
    section: str,
    config: Training | Validation,
    dp_world_size: int,
    dp_rank: int,
    *,
    infinite: bool,
) -> ParallelAwareDataloader:
    """Build the dataloader of the keys dataset, dataset_path, local_batch_size, seq_len and
    dataloader of a section.

    An infinite hub data set (c4) is split over the ranks by document: a stream of that size costs
    too much to download and encode on every rank. What a rank sees then depends on the number of
    ranks. A finite one is read whole by every rank, so that all of them count alike.

    Args:
        make_dataset: takes the corpus, and by name all arguments of `TextDataset` but `segmenter`
            and `make_sample`.
        section: the TOML section that `config` is, "training" or "validation".

    Raises:
        ValueError: bad `dataset` or `dataset_path`, see `corpora.check_dataset`.
    """
    corpus = open_corpus(section, config.dataset, config.dataset_path)
    if infinite and isinstance(corpus, HubCorpus):
        corpus = corpus.split(dp_rank, dp_world_size)
    dataset = make_dataset(
        corpus,
        source=f'[{section}] dataset = "{config.dataset}"',
        seq_len=config.seq_len,
        batch_size=config.local_batch_size,
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
        infinite=infinite,
    )
    return ParallelAwareDataloader(
        dataset,
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
        batch_size=config.local_batch_size,
        drop_last=True,
        **asdict(config.dataloader),
    )


def sections_with_data(job_config: JobConfig) -> dict[str, Training | Validation]:
    """The sections whose data a run reads, by name."""
    sections: dict[str, Training | Validation] = {"training": job_config.training}
    if job_config.validation.enable:
        sections["validation"] = job_config.validation
    return sections


def is_infinite(section: str, job_config: JobConfig) -> bool:
    """Whether the data of a section is repeated: all but that of a validation with steps = -1."""
    return section == "training" or job_config.validation.steps != -1


def read_first_batch(loader: ParallelAwareDataloader, config: Training | Validation) -> None:
    """Reads what the first rank's first batch takes; raises ValueError if it isn't there."""
    for _ in itertools.islice(iter(loader.dataset), config.local_batch_size):
        pass


def _worker_share() -> tuple[int, int]:
    info = get_worker_info()
    return (0, 1) if info is None else (info.id, info.num_workers)
