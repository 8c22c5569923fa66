"""Packs the documents of a corpus into sequences of equal length, each token to predict the next.

`dataset` deals the sequences out to ranks; the dataloaders of training and validation are built
here.
"""

import functools
from typing import Any

import torch
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import JobConfig

from torchtitan_ext.data.corpora import Corpus
from torchtitan_ext.data.dataset import (
    PackedStream,
    Sample,
    TextDataset,
    build_loader,
    is_infinite,
    read_first_batch,
    sections_with_data,
)


class PackedTextDataset(TextDataset):
    """Cuts a corpus into training sequences, the same ones for every number of ranks.

    Each document is encoded with BOS and EOS, all are joined to one stream, and the stream is cut
    into windows of `seq_len + 1` tokens that do not overlap: an input, and its labels one token on.

    Args:
        corpus: the documents.
        tokenizer: has `encode(text, add_bos=True, add_eos=True)`.
        seq_len: tokens of an input, and of its labels.
        kwargs: the other arguments of `TextDataset`, whose errors this one raises, too.
    """

    def __init__(
        self, corpus: Corpus, tokenizer: BaseTokenizer, *, seq_len: int, **kwargs: Any
    ) -> None:
        encode = functools.partial(tokenizer.encode, add_bos=True, add_eos=True)
        stream = PackedStream(encode, window=seq_len + 1)
        super().__init__(corpus, stream, _make_sample, seq_len=seq_len, **kwargs)


def _make_sample(tokens: list[int], number: int) -> Sample:
    x = torch.tensor(tokens)
    return {"input": x[:-1]}, x[1:]


def build_text_dataloader(
    dp_world_size: int,
    dp_rank: int,
    tokenizer: BaseTokenizer,
    job_config: JobConfig,
    infinite: bool = True,
) -> ParallelAwareDataloader:
    """Build the training dataloader of `[training]` dataset, dataset_path, local_batch_size,
    seq_len and dataloader.

    A hub data set (c4) is split over the ranks by document, each rank packing its own, see
    `dataset.build_loader`.

    Raises:
        ValueError: bad `dataset` or `dataset_path`, see `corpora.check_dataset`.
    """
    make_dataset = functools.partial(PackedTextDataset, tokenizer=tokenizer)
    return build_loader(
        make_dataset, "training", job_config.training, dp_world_size, dp_rank, infinite=infinite
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
    make_dataset = functools.partial(PackedTextDataset, tokenizer=tokenizer)
    return build_loader(
        make_dataset, "validation", job_config.validation, dp_world_size, dp_rank, infinite=infinite
    )


def check_text(dp_world_size: int, tokenizer: BaseTokenizer, job_config: JobConfig) -> None:
    """Reads the beginning of the user's own text, as training will.

    Raises:
        ValueError: it can't be read, or holds less than one sequence for every rank.
    """
    make_dataset = functools.partial(PackedTextDataset, tokenizer=tokenizer)
    for section, config in sections_with_data(job_config).items():
        if config.dataset == "local":
            infinite = is_infinite(section, job_config)
            loader = build_loader(
                make_dataset, section, config, dp_world_size, 0, infinite=infinite
            )
            read_first_batch(loader, config)
