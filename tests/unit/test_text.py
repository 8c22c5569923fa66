"""Packing gives every layout the same sequences, and resumes at exactly the next one."""

import gzip
import itertools
import json
import logging
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest
import torch
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import JobConfig

from torchtitan_ext.data.corpora import HubCorpus, IndexedCorpus
from torchtitan_ext.data.text import (
    PackedTextDataset,
    Sample,
    build_text_dataloader,
    build_text_validation_dataloader,
)

BOS, EOS = 256, 257
SEQ_LEN = 6
SOURCE = '[training] dataset = "local"'

# 4 + 36 + 3 + 11 + 2 = 56 tokens: 8 windows of 7. Sequences begin and end inside documents, on
# their borders, and document 1 spans several.
TEXTS = ["ab", "a longer document, with 34 letters", "c", "nine char", ""]


class BytesTokenizer(BaseTokenizer):
    """One token a byte."""

    def encode(self, text: str, add_bos: bool, add_eos: bool) -> list[int]:
        return [BOS] * add_bos + list(text.encode()) + [EOS] * add_eos

    def decode(self, tokens: list[int]) -> str:
        return bytes(token for token in tokens if token < BOS).decode()

    def get_vocab_size(self) -> int:
        return 258


def make_dataset(texts: list[str] = TEXTS, **kwargs) -> PackedTextDataset:
    kwargs = {"source": SOURCE, "seq_len": SEQ_LEN, **kwargs}
    return PackedTextDataset(IndexedCorpus(lambda: texts), BytesTokenizer(), **kwargs)


def windows(texts: list[str], count: int, window: int = SEQ_LEN + 1) -> list[list[int]]:
    """Return the first `count` windows of the endless stream of `texts`, the slow way."""
    stream = [token for text in texts for token in (BOS, *text.encode(), EOS)]
    tokens = itertools.islice(itertools.cycle(stream), count * window)
    return [list(itertools.islice(tokens, window)) for _ in range(count)]


def window_of(sample: Sample) -> list[int]:
    """Join an input and its labels to the window they were cut from."""
    inputs, labels = sample[0]["input"], sample[1]
    assert inputs.dtype == labels.dtype == torch.int64
    assert inputs[1:].tolist() == labels[:-1].tolist()
    return [*inputs.tolist(), labels[-1].item()]


def take(samples: Iterator[Sample], count: int) -> list[list[int]]:
    return [window_of(sample) for sample in itertools.islice(samples, count)]


def take_batches(loader: ParallelAwareDataloader, count: int = 1000) -> list:
    """Return the batches as nested lists of (input, labels); no finite corpus here has 1000."""
    batches = itertools.islice(iter(loader), count)
    return [(inputs["input"].tolist(), labels.tolist()) for inputs, labels in batches]


# --- packing


def test_labels_are_inputs_shifted_by_one() -> None:
    inputs, labels = next(iter(make_dataset(["abcdefgh"])))
    assert list(inputs) == ["input"]
    assert inputs["input"].tolist() == [BOS, *b"abcde"]
    assert labels.tolist() == [*b"abcdef"]


def test_documents_are_joined_with_bos_and_eos_and_cut_without_overlap() -> None:
    assert take(iter(make_dataset()), 99) == windows(TEXTS, 8)


@pytest.mark.parametrize("local_batch_size", [1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_global_batches_are_the_same_for_every_layout(
    world_size: int, local_batch_size: int
) -> None:
    global_batch_size, steps = world_size * local_batch_size, 5
    ranks = [
        iter(make_dataset(infinite=True, dp_rank=rank, dp_world_size=world_size))
        for rank in range(world_size)
    ]
    expected = windows(TEXTS, global_batch_size * steps)
    for step in range(steps):
        batch = [take(rank, local_batch_size) for rank in ranks]
        flat = [sequence for row in zip(*batch, strict=True) for sequence in row]
        assert flat == expected[step * global_batch_size :][:global_batch_size]


def test_one_document_feeds_every_rank() -> None:
    text = "".join(map(chr, range(32, 127)))
    for rank in range(3):
        dataset = make_dataset([text], dp_rank=rank, dp_world_size=3)
        assert take(iter(dataset), 99) == windows([text], 12)[rank::3]


def test_infinite_stream_starts_over_and_logs_the_epoch(caplog: pytest.LogCaptureFixture) -> None:
    texts = ["ten tokens"]  # 12 tokens, so that epochs end inside of sequences
    dataset = make_dataset(texts, infinite=True)
    with caplog.at_level(logging.INFO):
        assert take(iter(dataset), 5) == windows(texts, 5)
    assert dataset.state_dict()["epoch"] == 2
    messages = [record.getMessage() for record in caplog.records if "epoch" in record.getMessage()]
    assert messages == [f"{SOURCE}: end of the data, starting epoch {epoch}" for epoch in (1, 2)]


def test_iterating_again_starts_at_the_beginning() -> None:
    dataset = make_dataset(infinite=True)
    first = take(iter(dataset), 3)
    assert take(iter(dataset), 3) == first
    dataset.load_state_dict(dataset.state_dict())
    assert take(iter(dataset), 3) != first
    assert take(iter(dataset), 3) == first


# --- too little text


@pytest.mark.parametrize(
    ("kwargs", "found", "needed"),
    [
        ({"infinite": True}, 6, "one sequence on every rank takes 7"),
        ({"infinite": True, "dp_world_size": 3}, 6, "one sequence on every rank takes 21"),
        ({"infinite": False, "batch_size": 2}, 6, "one batch of 2 on every rank takes 14"),
    ],
)
def test_too_short_corpus_is_an_error(kwargs: dict, found: int, needed: str) -> None:
    degree = kwargs.get("dp_world_size", 1)
    for rank in range(degree):
        with pytest.raises(ValueError) as error:
            next(iter(make_dataset(["four"], dp_rank=rank, **kwargs)))
        assert str(error.value) == (
            f"{SOURCE}: {found} tokens found, but {needed} "
            f"(seq_len = {SEQ_LEN}, data-parallel degree {degree})"
        )


@pytest.mark.parametrize("infinite", [True, False])
def test_empty_corpus_is_an_error(infinite: bool) -> None:
    with pytest.raises(ValueError, match="0 tokens found"):
        next(iter(make_dataset([], infinite=infinite)))


def test_finite_corpus_of_less_than_a_batch_counts_all_its_tokens() -> None:
    dataset = make_dataset(batch_size=9)
    with pytest.raises(ValueError, match=r"56 tokens found, but one batch of 9 .* takes 63 "):
        list(dataset)


# --- resuming


@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (0, 2), (1, 2), (2, 3)])
def test_resume_at_every_position_gives_the_next_sequences(rank: int, world_size: int) -> None:
    share = {"dp_rank": rank, "dp_world_size": world_size, "infinite": True}
    length = 30  # at least three epochs
    expected = take(iter(make_dataset(**share)), length)
    source = make_dataset(**share)
    samples = iter(source)
    for position in range(length):
        state = json.loads(json.dumps(source.state_dict()))
        resumed = make_dataset(**share)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        assert take(iter(resumed), length - position) == expected[position:]
        next(samples)


def test_resume_of_a_finite_dataset_ends_with_the_data() -> None:
    dataset = make_dataset()
    samples = iter(dataset)
    for position in range(9):
        resumed = make_dataset()
        resumed.load_state_dict(dataset.state_dict())
        assert take(iter(resumed), 99) == windows(TEXTS, 8)[position:]
        next(samples, None)


def test_state_does_not_grow_with_the_document() -> None:
    dataset = make_dataset(["x" * 100_000], infinite=True)
    next(iter(dataset))
    assert len(pickle.dumps(dataset.state_dict())) < 200


# --- dataloaders


@pytest.fixture
def job_config(tmp_path: Path) -> JobConfig:
    """Both sections read TEXTS from a file, in batches of 2."""
    path = tmp_path / "texts.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps({"text": t}) + "\n" for t in TEXTS).encode()))
    config = JobConfig()
    for section in (config.training, config.validation):
        section.dataset, section.dataset_path = "local", str(path)
        section.local_batch_size, section.seq_len = 2, SEQ_LEN
    return config


def training_loader(config: JobConfig, rank: int = 0, degree: int = 1) -> ParallelAwareDataloader:
    return build_text_dataloader(degree, rank, BytesTokenizer(), config)


def validation_batches(config: JobConfig, degree: int) -> list[list]:
    """Return the batches of each rank."""
    return [
        take_batches(build_text_validation_dataloader(degree, rank, BytesTokenizer(), config))
        for rank in range(degree)
    ]


def test_training_loader_yields_batches_of_the_stream(job_config: JobConfig) -> None:
    expected = windows(TEXTS, 20)
    inputs, labels = next(itertools.islice(training_loader(job_config, 1, 2), 4, None))
    assert inputs["input"].tolist() == [expected[17][:-1], expected[19][:-1]]
    assert labels.tolist() == [expected[17][1:], expected[19][1:]]


def test_workers_keep_the_order_of_a_single_process(job_config: JobConfig) -> None:
    expected = take_batches(training_loader(job_config, 1, 2), 9)
    job_config.training.dataloader.num_workers = 2
    assert take_batches(training_loader(job_config, 1, 2), 9) == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_training_loader_resumes_at_the_next_batch(job_config: JobConfig, num_workers: int) -> None:
    length = 10  # more than two epochs
    job_config.training.dataloader.num_workers = num_workers
    expected = take_batches(training_loader(job_config), length)
    source = training_loader(job_config)
    batches = iter(source)
    for position in range(6):  # an epoch has 4 batches
        resumed = training_loader(job_config)
        resumed.load_state_dict(source.state_dict())
        assert take_batches(resumed, length - position) == expected[position:]
        next(batches)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("seq_len", [3, 4, 6])
def test_validation_ranks_yield_equally_many_full_batches(
    job_config: JobConfig, num_workers: int, seq_len: int
) -> None:
    job_config.validation.seq_len = seq_len
    job_config.validation.dataloader.num_workers = num_workers
    ranks = validation_batches(job_config, degree=3)
    assert len({len(batches) for batches in ranks}) == 1
    num_rounds = 56 // (3 * (seq_len + 1))
    assert len(ranks[0]) == num_rounds // 2
    assert all(len(inputs) == 2 for batches in ranks for inputs, _ in batches)


def test_every_validation_measures_the_same_text(job_config: JobConfig) -> None:
    loader = build_text_validation_dataloader(1, 0, BytesTokenizer(), job_config)
    assert take_batches(loader, 3) == take_batches(loader)[:3]
    assert len(take_batches(loader)) == 4


def test_validation_can_be_infinite(job_config: JobConfig) -> None:
    loader = build_text_validation_dataloader(1, 0, BytesTokenizer(), job_config, infinite=True)
    assert len(take_batches(loader, 50)) == 50


def test_place_in_other_data_is_not_gone_on_from(job_config: JobConfig) -> None:
    loader = training_loader(job_config)
    first = take_batches(loader, 3)
    state = loader.state_dict()
    again = training_loader(job_config)
    again.load_state_dict(state)
    assert take_batches(again, 1) != first[:1]
    job_config.training.seq_len += 1
    changed, fresh = training_loader(job_config), training_loader(job_config)
    changed.load_state_dict(state)
    assert take_batches(changed, 3) == take_batches(fresh, 3)


def test_loader_errors_name_their_section(job_config: JobConfig) -> None:
    job_config.validation.seq_len = job_config.training.seq_len = 60
    key = re.escape('[training] dataset = "local": 56 tokens found')
    with pytest.raises(ValueError, match=f"^{key}"):
        next(iter(training_loader(job_config)))
    key = re.escape('[validation] dataset = "local": 56 tokens found')
    with pytest.raises(ValueError, match=f"^{key}"):
        validation_batches(job_config, degree=1)
    job_config.training.dataset = job_config.validation.dataset = "foo"
    with pytest.raises(ValueError, match=r"^\[training\] dataset = \"foo\": not a known"):
        training_loader(job_config)
    with pytest.raises(ValueError, match=r"^\[validation\] dataset = \"foo\": not a known"):
        validation_batches(job_config, degree=1)


# --- hub streams, with a small one in place of c4

# No part of them repeats, so that sequences can be told apart.
HUB_TEXTS = [" ".join(str(100 * index + word) for word in range(3 * index)) for index in range(12)]


def shard_texts(*shards: int) -> list[str]:
    """Return the documents of these of the 4 files that HUB_TEXTS lie in."""
    return [text for shard in shards for text in HUB_TEXTS[3 * shard :][:3]]


def inputs_of(batches: list) -> list[list[int]]:
    return [row for inputs, _ in batches for row in inputs]


@pytest.fixture
def hub_config(monkeypatch: pytest.MonkeyPatch, job_config: JobConfig) -> JobConfig:
    """Both sections stream HUB_TEXTS, which lie in 4 files."""

    def fake_load_dataset(*args: str, **kwargs: object) -> datasets.IterableDataset:
        return datasets.Dataset.from_dict({"text": HUB_TEXTS}).to_iterable_dataset(num_shards=4)

    monkeypatch.setattr(datasets, "load_dataset", fake_load_dataset)
    job_config.training.dataset, job_config.validation.dataset = "c4", "c4_validation"
    job_config.training.dataset_path = job_config.validation.dataset_path = None
    return job_config


def test_hub_stream_is_split_by_document(hub_config: JobConfig) -> None:
    for rank in range(2):
        expected = windows(shard_texts(rank, rank + 2), 40)
        batches = take_batches(training_loader(hub_config, rank, 2), 20)
        assert inputs_of(batches) == [window[:-1] for window in expected]


def test_hub_workers_read_documents_of_their_own(hub_config: JobConfig) -> None:
    hub_config.training.dataloader.num_workers = 2
    batches = take_batches(training_loader(hub_config), 20)
    for worker in range(2):
        expected = windows(shard_texts(worker, worker + 2), 20)
        assert inputs_of(batches[worker::2]) == [window[:-1] for window in expected]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_hub_stream_resumes_at_the_next_batch(hub_config: JobConfig, num_workers: int) -> None:
    positions = 40 if num_workers == 0 else 6
    hub_config.training.dataloader.num_workers = num_workers
    expected = take_batches(training_loader(hub_config, 1, 2), positions + 20)  # ~9 an epoch
    source = training_loader(hub_config, 1, 2)
    batches = iter(source)
    for position in range(positions):
        resumed = training_loader(hub_config, 1, 2)
        resumed.load_state_dict(source.state_dict())
        assert take_batches(resumed, 20) == expected[position : position + 20]
        next(batches)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_finite_hub_stream_gives_every_rank_equally_many_batches(
    hub_config: JobConfig, num_workers: int
) -> None:
    hub_config.validation.dataloader.num_workers = num_workers
    ranks = validation_batches(hub_config, degree=3)
    assert len({len(batches) for batches in ranks}) == 1
    sequences = [tuple(row) for batches in ranks for row in inputs_of(batches)]
    assert len(set(sequences)) == len(sequences) > 20


def test_hub_documents_start_at_a_cursor() -> None:
    stream = datasets.Dataset.from_dict({"text": HUB_TEXTS}).to_iterable_dataset(num_shards=4)
    corpus = HubCorpus(stream)
    documents = list(corpus.documents())
    assert [text for _, text in documents] == HUB_TEXTS
    for index, (cursor, _) in enumerate(documents):
        assert [text for _, text in corpus.documents(cursor)] == HUB_TEXTS[index:]
