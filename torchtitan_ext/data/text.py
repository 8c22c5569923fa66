"""Packs the documents of a corpus into sequences of equal length, and builds the dataloaders."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torch.utils.data import IterableDataset, get_worker_info
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import JobConfig
from torchtitan.config.job_config import Training, Validation
from torchtitan.tools.logging import logger

from torchtitan_ext.data.corpora import Corpus, Cursor, HubCorpus, open_corpus

Sample = tuple[dict[str, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class _Position:
    """The place in the stream of tokens where the next round begins."""

    epoch: int = 0
    document: Cursor = None
    offset: int = 0
    """Tokens of that document that are already used. The tokens themselves are not saved:
    to encode one document again is cheaper than to write what may be a whole book every step."""
    round: int = 0


class PackedTextDataset(IterableDataset[Sample], Stateful):
    """Cuts a corpus into training sequences, the same ones for every number of ranks.

    Each document is encoded with BOS and EOS, all are joined to one stream, and the stream is cut
    into windows of `seq_len + 1` tokens that do not overlap. Sequence number i of the whole stream
    goes to data-parallel rank i % dp_world_size. So a global batch holds the same sequences on
    1 rank with a local batch of 4 as on 2 ranks with 2, losses can be compared across layouts, and
    one large file feeds every rank. The cost: every rank, and every dataloader worker of it,
    encodes the whole stream. Where that is too slow (see `build_text_dataloader`), give each rank
    documents of its own and leave `dp_rank` and `dp_world_size` as they are.

    The unit of work is a round: the next sequence of every rank. Only whole rounds are used, so
    all ranks yield equally many sequences and none is left waiting in a collective. Workers take
    turns by the batch, which keeps the order that a single process would have.

    An infinite dataset starts over at the end of the corpus, and joins the tokens left there to
    its beginning. `state_dict` is a position in the corpus; after `load_state_dict` the next
    iteration yields exactly what would have come next. Any other iteration starts at the beginning.

    Args:
        corpus: the documents.
        tokenizer: has `encode(text, add_bos=True, add_eos=True)`.
        source: names the corpus in messages, such as `[training] dataset = "local"`.
        seq_len: tokens of an input, and of its labels.
        batch_size: sequences of a local batch, for the turns of the workers.
        dp_rank, dp_world_size: the share of the stream to yield.
        infinite: start over at the end of the corpus.

    Raises:
        ValueError: while iterating, if the corpus is too short for one sequence on each rank, or
            for one batch if the dataset is finite.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: BaseTokenizer,
        *,
        source: str,
        seq_len: int,
        batch_size: int = 1,
        dp_rank: int = 0,
        dp_world_size: int = 1,
        infinite: bool = False,
    ) -> None:
        self._corpus = corpus
        self._tokenizer = tokenizer
        self._source = source
        self._seq_len = seq_len
        self._batch_size = batch_size
        self._dp_rank = dp_rank
        self._dp_world_size = dp_world_size
        self._infinite = infinite
        self._round_size = dp_world_size * (seq_len + 1)
        self._start = self._position = _Position()

    def __iter__(self) -> Iterator[Sample]:
        # Not a generator: the loaded position must be in place before the first sample is drawn,
        # because a dataloader asks for the state then.
        self._position, self._start = self._start, _Position()
        return self._sequences(self._position)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self._position)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._start = self._position = _Position(**state_dict)

    def _sequences(self, start: _Position) -> Iterator[Sample]:
        """Yield this rank's sequence of every round that is this worker's turn."""
        worker, num_workers = self._worker_share()
        window = self._seq_len + 1
        first = self._dp_rank * window
        for number, tokens in self._rounds(start):
            if number // self._batch_size % num_workers == worker:
                x = torch.tensor(tokens[first : first + window])
                yield {"input": x[:-1]}, x[1:]

    def _worker_share(self) -> tuple[int, int]:
        info = get_worker_info()
        if info is None or self._corpus.is_split_over_workers:
            return 0, 1
        return info.id, info.num_workers

    def _rounds(self, start: _Position) -> Iterator[tuple[int, list[int]]]:
        """Yield (number, tokens) of each round from `start` on."""
        epoch, document, offset, number = start.epoch, start.document, start.offset, start.round
        size = self._round_size
        rest: list[int] = []  # tokens of earlier documents, too few for a round
        while True:
            for cursor, text in self._corpus.documents(document):
                tokens = rest + self._encode(text)[offset:]
                # A round that ends in this document has used up `rest`. So what comes after it
                # is described by an offset into this one document.
                offset -= len(rest)
                end = len(tokens) - len(tokens) % size
                for cut in range(size, end + 1, size):
                    self._position = _Position(epoch, cursor, offset + cut, number + 1)
                    yield number, tokens[cut - size : cut]
                    number += 1
                rest, offset = tokens[end:], 0
            self._check_length(number, len(rest))
            if not self._infinite:
                return
            epoch, document = epoch + 1, None
            logger.info(f"{self._source}: end of the data, starting epoch {epoch}")

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_bos=True, add_eos=True)

    def _check_length(self, num_rounds: int, num_left: int) -> None:
        """Raise if there is nothing to train on: an infinite loop would never yield."""
        rounds_needed = 1 if self._infinite else self._batch_size
        if num_rounds >= rounds_needed:
            return
        found = num_rounds * self._round_size + num_left
        unit = "sequence" if self._infinite else f"batch of {self._batch_size}"
        raise ValueError(
            f"{self._source}: {found} tokens found, but one {unit} on every rank takes "
            f"{rounds_needed * self._round_size} "
            f"(seq_len = {self._seq_len}, data-parallel degree {self._dp_world_size})"
        )


def build_text_dataloader(
    dp_world_size: int,
    dp_rank: int,
    tokenizer: BaseTokenizer,
    job_config: JobConfig,
    infinite: bool = True,
) -> ParallelAwareDataloader:
    """Build the training dataloader of `[training]` dataset, dataset_path, local_batch_size,
    seq_len and dataloader.

    A hub data set (c4) is split over the ranks by document, each rank packing its own: a stream
    of that size costs too much to download and encode on every rank. What a rank sees then
    depends on the number of ranks.

    Raises:
        ValueError: bad `dataset` or `dataset_path`, see `corpora.check_dataset`.
    """
    return _build(
        "training", job_config.training, dp_world_size, dp_rank, tokenizer, infinite=infinite
    )


def build_text_validation_dataloader(
    dp_world_size: int,
    dp_rank: int,
    tokenizer: BaseTokenizer,
    job_config: JobConfig,
    infinite: bool = False,
) -> ParallelAwareDataloader:
    """Build the validation dataloader of the same keys in `[validation]`.

    By default it ends with the data, after equally many full batches on every rank: what is left
    at the end is dropped, at most one batch a rank and worker. To count alike, every rank then
    reads the whole of a hub data set too. Each iteration starts at the beginning, so that all
    validations of a run measure the same text.

    Raises:
        ValueError: bad `dataset` or `dataset_path`, see `corpora.check_dataset`.
    """
    return _build(
        "validation", job_config.validation, dp_world_size, dp_rank, tokenizer, infinite=infinite
    )


def check_text(dp_world_size: int, tokenizer: BaseTokenizer, job_config: JobConfig) -> None:
    """Reads the beginning of the user's own text, as training will.

    Raises:
        ValueError: it can't be read, or holds less than one sequence for every rank.
    """
    sections = {"training": job_config.training}
    if job_config.validation.enable:
        sections["validation"] = job_config.validation
    for section, config in sections.items():
        if config.dataset == "local":
            loader = _build(section, config, dp_world_size, 0, tokenizer, infinite=True)
            next(iter(loader.dataset))


def _build(
    section: str,
    config: Training | Validation,
    dp_world_size: int,
    dp_rank: int,
    tokenizer: BaseTokenizer,
    *,
    infinite: bool,
) -> ParallelAwareDataloader:
    corpus = open_corpus(section, config.dataset, config.dataset_path)
    share = {"dp_rank": dp_rank, "dp_world_size": dp_world_size}
    if infinite and isinstance(corpus, HubCorpus):
        corpus, share = corpus.split(dp_rank, dp_world_size), {}
    dataset = PackedTextDataset(
        corpus,
        tokenizer,
        source=f'[{section}] dataset = "{config.dataset}"',
        seq_len=config.seq_len,
        batch_size=config.local_batch_size,
        infinite=infinite,
        **share,
    )
    return ParallelAwareDataloader(
        dataset,
        dp_rank=dp_rank,
        dp_world_size=dp_world_size,
        batch_size=config.local_batch_size,
        drop_last=True,
        **asdict(config.dataloader),
    )
