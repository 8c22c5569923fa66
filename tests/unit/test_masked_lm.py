"""Masks follow BERT's rules and depend on nothing but the seed and a sequence's number."""

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest
import torch
from tokenizers import Tokenizer
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.config import JobConfig

from torchtitan_ext.config.sections import Mlm
from torchtitan_ext.data.corpora import IndexedCorpus
from torchtitan_ext.data.dataset import Sample
from torchtitan_ext.data.masked_lm import (
    build_masked_lm_dataloader,
    build_masked_lm_validation_dataloader,
    check_masked_lm,
)
from torchtitan_ext.data.masking import IGNORED, Masking, MaskingVocabulary
from torchtitan_ext.data.sentence_pairs import SentencePairs, _trim, split_sentences

ASSETS = Path(__file__).parents[1] / "assets"
PAD, UNK, CLS, SEP, MASK = range(5)
SPECIAL = torch.arange(5)
SEQ_LEN = 16
MAX_MASKED = 2  # 16 * 0.15 = 2.4

# Words of one token and of several; one document without text, one shorter than a sequence, and
# one with special tokens of its own, some of them unknown characters.
TEXTS = [
    "".join(f"The number {word} is an object that counts. It has methods!\n" for word in range(9)),
    "",
    "A short one.",
    "Literal [MASK] and [CLS] in the text, 漢字 and 漢字 unknown. " * 4,
    "Tokenization of uncharacteristically polysyllabic vocabulary. " * 8,
]

LAYOUTS = {
    "packed": Mlm(),
    "whole_word": Mlm(whole_word=True),
    "padded": Mlm(packing=False),
    "pairs": Mlm(next_sentence=True),
}


@pytest.fixture(scope="module")
def tokenizer() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(str(ASSETS / "wordpiece"))


@pytest.fixture(params=LAYOUTS)
def mlm(request: pytest.FixtureRequest) -> Mlm:
    return LAYOUTS[request.param]


def write_texts(folder: Path, texts: list[str]) -> str:
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


@pytest.fixture
def job_config(tmp_path: Path) -> JobConfig:
    """Both sections read TEXTS from a file, in batches of 2."""
    config = JobConfig()
    config.mlm = Mlm()
    config.model.hf_assets_path = "the/assets"
    path = write_texts(tmp_path, TEXTS)
    for section in (config.training, config.validation):
        section.dataset, section.dataset_path = "local", path
        section.local_batch_size, section.seq_len = 2, SEQ_LEN
    return config


@pytest.fixture
def docs_config(job_config: JobConfig) -> JobConfig:
    """Trains on the embedded corpus, for statistics: 80 tokens a sequence, of which 12 are 15%."""
    job_config.training.dataset, job_config.training.dataset_path = "cpython_docs", None
    job_config.training.local_batch_size, job_config.training.seq_len = 8, 82
    return job_config


def training_batches(
    config: JobConfig, tokenizer: HuggingFaceTokenizer, count: int, rank: int = 0, degree: int = 1
) -> list[Sample]:
    loader = build_masked_lm_dataloader(degree, rank, tokenizer, config)
    return list(itertools.islice(iter(loader), count))


def as_lists(batches: list[Sample]) -> list[dict[str, list]]:
    return [
        {name: tensor.tolist() for name, tensor in {**inputs, "labels": labels}.items()}
        for inputs, labels in batches
    ]


def sequences(batches: list[Sample]) -> Iterator[dict[str, list]]:
    for batch in as_lists(batches):
        for values in zip(*batch.values(), strict=True):
            yield dict(zip(batch, values, strict=True))


def originals(batches: list[Sample]) -> list[list[int]]:
    """Return the sequences as they were before masking."""
    rows = []
    for inputs, labels in batches:
        rows += torch.where(labels == -100, inputs["input"], labels).tolist()
    return rows


def stack(batches: list[Sample]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return inputs, labels and masked positions of all sequences."""
    return (
        torch.cat([inputs["input"] for inputs, _ in batches]),
        torch.cat([labels for _, labels in batches]),
        torch.cat([inputs["masked_positions"] for inputs, _ in batches]),
    )


# --- what is masked


def test_share_and_replacements_are_berts(
    docs_config: JobConfig, tokenizer: HuggingFaceTokenizer
) -> None:
    batches = training_batches(docs_config, tokenizer, 400)
    inputs, labels, _ = stack(batches)
    is_masked = labels != -100
    ordinary = ~torch.isin(torch.tensor(originals(batches)), SPECIAL)
    assert is_masked.sum() / ordinary.sum() == pytest.approx(0.15, abs=0.003)
    shown, original = inputs[is_masked], labels[is_masked]
    count = len(shown)  # about 38,000: a share has a standard deviation of 0.002
    assert (shown == MASK).sum() / count == pytest.approx(0.8, abs=0.01)
    assert (shown == original).sum() / count == pytest.approx(0.1, abs=0.01)
    others = shown[(shown != MASK) & (shown != original)]
    assert len(others) / count == pytest.approx(0.1, abs=0.01)
    assert not torch.isin(others, SPECIAL).any()
    assert len(others.unique()) > 0.4 * 4096  # of 3,800 draws from all the vocabulary


def test_every_place_is_masked_alike(
    docs_config: JobConfig, tokenizer: HuggingFaceTokenizer
) -> None:
    _, labels, _ = stack(training_batches(docs_config, tokenizer, 400))
    per_place = (labels != -100).float().mean(0)[1:-1]
    assert per_place.min() > 0.11
    assert per_place.max() < 0.19


@pytest.mark.parametrize("probability", [0.15, 0.5])
def test_labels_are_the_originals_at_masked_positions(
    job_config: JobConfig, tokenizer: HuggingFaceTokenizer, mlm: Mlm, probability: float
) -> None:
    job_config.mlm = Mlm(**{**vars(mlm), "mask_probability": probability})
    batches = training_batches(job_config, tokenizer, 40)
    max_masked = round((SEQ_LEN - 2) * probability)  # [CLS] and [SEP] are never masked
    for sequence in sequences(batches):
        assert len(sequence["masked_positions"]) == max_masked
        positions = [place for place in sequence["masked_positions"] if place]
        filled = positions + [0] * (max_masked - len(positions))
        assert sequence["masked_positions"] == filled
        assert positions == [at for at, label in enumerate(sequence["labels"]) if label != -100]
        assert sequence["labels"][0] == -100
        row = [
            shown if label == -100 else label
            for shown, label in zip(sequence["input"], sequence["labels"], strict=True)
        ]
        num_ordinary = sum(token > MASK for token in row)
        budget = min(max_masked, max(1, round(num_ordinary * probability)))
        if mlm.whole_word:
            assert min(1, num_ordinary) <= len(positions) <= budget
        else:
            assert len(positions) == min(budget, num_ordinary)


def test_originals_are_the_text(job_config: JobConfig, tokenizer: HuggingFaceTokenizer) -> None:
    vocabulary = MaskingVocabulary(tokenizer)
    stream = [token for text in TEXTS if text for token in (*vocabulary.encode(text), SEP)]
    window = SEQ_LEN - 2
    expected = [
        [CLS, *itertools.islice(itertools.cycle(stream), start, start + window), SEP]
        for start in range(0, 60 * window, window)
    ]
    assert originals(training_batches(job_config, tokenizer, 30)) == expected


def test_special_tokens_are_never_masked(
    job_config: JobConfig, tokenizer: HuggingFaceTokenizer, mlm: Mlm
) -> None:
    job_config.mlm = Mlm(**{**vars(mlm), "mask_probability": 0.9})
    batches = training_batches(job_config, tokenizer, 60)
    rows = torch.tensor(originals(batches))
    _, labels, _ = stack(batches)
    assert {UNK, CLS, SEP, MASK} <= set(rows.flatten().tolist())  # also from the text
    assert not torch.isin(labels, SPECIAL).any()
    assert (labels != -100).any(1).float().mean() > 0.8


def test_sequence_of_special_tokens_has_no_labels(tokenizer: HuggingFaceTokenizer) -> None:
    for whole_word in (False, True):
        masking = Masking(MaskingVocabulary(tokenizer), 4, 0.5, whole_word, 0)
        inputs, labels = masking.apply([CLS, UNK, UNK, SEP], 0)
        assert inputs["input"].tolist() == [CLS, UNK, UNK, SEP]
        assert inputs["masked_positions"].tolist() == [0]
        assert labels.tolist() == [-100] * 4


def test_words_are_masked_whole(docs_config: JobConfig, tokenizer: HuggingFaceTokenizer) -> None:
    docs_config.mlm = Mlm(whole_word=True)
    num_pieces = num_cut = 0
    batches = training_batches(docs_config, tokenizer, 100)
    for row, sequence in zip(originals(batches), sequences(batches), strict=True):
        masked = [label != -100 for label in sequence["labels"]]
        for at in range(2, len(row)):
            goes_on = tokenizer.id_to_token(row[at]).startswith("##")
            if goes_on and row[at - 1] > MASK:
                num_pieces += masked[at]
                num_cut += masked[at] != masked[at - 1]
    assert num_pieces > 500
    assert num_cut == 0


def test_whole_words_reach_the_share(
    docs_config: JobConfig, tokenizer: HuggingFaceTokenizer
) -> None:
    docs_config.mlm = Mlm(whole_word=True)
    batches = training_batches(docs_config, tokenizer, 100)
    _, labels, _ = stack(batches)
    ordinary = ~torch.isin(torch.tensor(originals(batches)), SPECIAL)
    assert (labels != -100).sum() / ordinary.sum() == pytest.approx(0.15, abs=0.005)


def test_word_longer_than_the_budget_is_masked_in_part(tokenizer: HuggingFaceTokenizer) -> None:
    vocabulary = MaskingVocabulary(tokenizer)
    word = vocabulary.encode("uncharacteristically")
    assert len(word) > 3
    masking = Masking(vocabulary, len(word) + 2, 0.4, True, 0)
    _, labels = masking.apply([CLS, *word, SEP], 0)
    assert (labels != -100).sum() == round(len(word) * 0.4)
    assert labels[1] == word[0]


def test_words_do_not_go_on_across_special_tokens(tokenizer: HuggingFaceTokenizer) -> None:
    vocabulary = MaskingVocabulary(tokenizer)
    start, piece = vocabulary.encode("tokenization")
    masking = Masking(vocabulary, 5, 0.4, True, 0)
    places = set()
    for number in range(20):
        _, labels = masking.apply([CLS, start, SEP, piece, SEP], number)
        places.add(tuple(torch.nonzero(labels != -100).flatten().tolist()))
    assert places == {(1,), (3,)}  # one word of two tokens would only give the first


# --- layouts


def test_packed_sequences_need_no_more_inputs(
    job_config: JobConfig, tokenizer: HuggingFaceTokenizer
) -> None:
    inputs, labels = training_batches(job_config, tokenizer, 1)[0]
    assert list(inputs) == ["input", "masked_positions"]
    assert inputs["input"].shape == labels.shape == (2, SEQ_LEN)
    assert inputs["masked_positions"].shape == (2, MAX_MASKED)
    assert {tensor.dtype for tensor in (*inputs.values(), labels)} == {torch.int64}


def test_parts_of_documents_are_padded(
    job_config: JobConfig, tokenizer: HuggingFaceTokenizer
) -> None:
    job_config.mlm, size = LAYOUTS["padded"], SEQ_LEN - 2
    expected = []
    for text in TEXTS:
        tokens = MaskingVocabulary(tokenizer).encode(text)
        for start in range(0, len(tokens), size):
            part = tokens[start : start + size]
            expected.append([CLS, *part, SEP] + [PAD] * (size - len(part)))
    num_batches = len(expected) // 2
    batches = training_batches(job_config, tokenizer, num_batches)
    assert originals(batches) == expected[: 2 * num_batches]
    for inputs, _ in batches:
        assert list(inputs) == ["input", "masked_positions", "attention_mask"]
        assert inputs["attention_mask"].dtype == torch.bool
    masks = torch.cat([inputs["attention_mask"] for inputs, _ in batches])
    assert masks.tolist() == [[token != PAD for token in row] for row in expected[: len(masks)]]
    assert not masks.all()


def segments_of(row: list[int], sequence: dict[str, list]) -> tuple[list[int], list[int]]:
    """Return A and B of a pair, checking its frame."""
    types, num_tokens = sequence["token_types"], sum(sequence["attention_mask"])
    assert sequence["attention_mask"] == [True] * num_tokens + [False] * (len(row) - num_tokens)
    assert row[num_tokens:] == [PAD] * (len(row) - num_tokens)
    num_first = types.index(1)
    num_second = num_tokens - num_first
    assert types == [0] * num_first + [1] * num_second + [0] * (len(row) - num_tokens)
    assert (row[0], row[num_first - 1], row[num_tokens - 1]) == (CLS, SEP, SEP)
    return row[1 : num_first - 1], row[num_first : num_tokens - 1]


def test_pairs_follow_or_come_from_another_document(
    job_config: JobConfig, tokenizer: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    texts = [f"{digit} {digit} {digit} {digit}\n" * 40 for digit in range(10)]
    job_config.training.dataset_path = write_texts(tmp_path, ["", *texts, " \n"])
    job_config.training.seq_len, job_config.mlm = 32, LAYOUTS["pairs"]
    batches = training_batches(job_config, tokenizer, 1000)
    num_random, sources = 0, set()
    for row, sequence in zip(originals(batches), sequences(batches), strict=True):
        first, second = (set(segment) for segment in segments_of(row, sequence))
        assert len(first) == len(second) == 1
        is_random = sequence["next_sentence_labels"]
        assert is_random == (first != second)
        num_random += is_random
        if is_random:
            sources |= {(*first, *second)}
    # 2,000 pairs: a standard deviation of 0.011. A last sentence alone must take a random one.
    assert num_random / 2000 == pytest.approx(0.5, abs=0.06)
    assert len(sources) == 90  # every document with every other


def test_second_segment_is_what_follows_and_no_sentence_is_lost(
    job_config: JobConfig, tokenizer: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    # A sentence is one token here, so that no pair needs trimming.
    words = [word for word in tokenizer.get_vocab() if len(word) > 3 and word.isalpha()][:300]
    job_config.validation.dataset_path = write_texts(tmp_path, ["\n".join(words), "x\n" * 30])
    job_config.validation.seq_len, job_config.mlm = 32, LAYOUTS["pairs"]
    job_config.validation.local_batch_size = 1
    batches = list(build_masked_lm_validation_dataloader(1, 0, tokenizer, job_config))
    stream = [tokenizer.token_to_id(word) for word in words]
    at, num_following = 0, 0
    for row, sequence in zip(originals(batches), sequences(batches), strict=True):
        if at == len(stream):
            break  # pairs of the second document
        first, second = segments_of(row, sequence)
        if not sequence["next_sentence_labels"]:
            first, num_following = first + second, num_following + 1
        assert first == stream[at : at + len(first)]  # a true B that was displaced comes next
        at += len(first)
    assert at == len(stream)
    assert num_following > 3


def test_one_pair_in_ten_is_short() -> None:
    pairs = SentencePairs(IndexedCorpus(list), "", encode=lambda text: [], room=100, seed=0)
    cuts = [pairs._cut([[7]] * 100, 0, number) for number in range(3000)]
    lengths = [used for pair, used in cuts if pair.second is not None]
    short = [length for length in lengths if length < 100]
    assert len(short) / len(lengths) == pytest.approx(0.1, abs=0.025)
    assert min(short) < 10
    assert max(short) > 90


def test_trimming_shortens_the_longer_segment_at_both_ends() -> None:
    first, second = list(range(100)), list(range(100, 103))
    a, b = _trim(first, second, 20, random.Random(0))
    assert (len(a), b) == (17, second)
    assert a == list(range(a[0], a[0] + 17))
    assert 20 < a[0] < 63
    assert _trim(first, second, 103, random.Random(0)) == (first, second)
    a, b = _trim(first, list(range(100, 200)), 21, random.Random(0))
    assert {len(a), len(b)} == {10, 11}


def test_sentences_end_at_marks_and_lines() -> None:
    text = "One. Two, e.g.this? Three!\n\n  four\nfive 1.5 six.\n"
    assert split_sentences(text) == ["One.", "Two, e.g.this?", "Three!", "four", "five 1.5 six."]
    assert split_sentences(" \n ") == []


# --- masks depend on the seed and the number alone


def test_masks_do_not_depend_on_the_layout(
    job_config: JobConfig, tokenizer: HuggingFaceTokenizer, mlm: Mlm
) -> None:
    job_config.mlm = mlm
    job_config.training.local_batch_size = 4
    expected = list(sequences(training_batches(job_config, tokenizer, 30)))
    job_config.training.local_batch_size = 2
    ranks = [
        list(sequences(training_batches(job_config, tokenizer, 30, rank, 2))) for rank in (0, 1)
    ]
    assert [sequence for pair in zip(*ranks, strict=True) for sequence in pair] == expected


def test_masks_differ_between_ranks(
    job_config: JobConfig, tokenizer: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    job_config.training.dataset_path = write_texts(tmp_path, ["one " * 1399])
    ranks = [stack(training_batches(job_config, tokenizer, 25, rank, 2)) for rank in (0, 1)]
    assert (ranks[0][2] != ranks[1][2]).any(1).float().mean() > 0.9


@pytest.mark.parametrize("num_workers", [0, 2])
def test_masks_differ_between_readers_of_a_stream(
    monkeypatch: pytest.MonkeyPatch,
    job_config: JobConfig,
    tokenizer: HuggingFaceTokenizer,
    num_workers: int,
) -> None:
    # Ranks and workers read documents of their own, and each counts its rounds from 0.
    stream = datasets.Dataset.from_dict({"text": ["one " * 139] * 8}).to_iterable_dataset(4)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: stream)
    job_config.training.dataset, job_config.training.dataset_path = "c4", None
    job_config.training.dataloader.num_workers = num_workers
    job_config.mlm.mask_probability = 0.5  # 3,432 choices of 7 of 14
    places = [
        tuple(row)
        for rank in (0, 1)
        for row in stack(training_batches(job_config, tokenizer, 10, rank, 2))[2].tolist()
    ]
    assert len(set(places)) > len(places) - 3


def test_masks_differ_between_epochs(
    job_config: JobConfig, tokenizer: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    # An epoch of 10 batches, whose sequences are the same in each.
    job_config.training.dataset_path = write_texts(tmp_path, ["one " * (20 * (SEQ_LEN - 2) - 1)])
    batches = training_batches(job_config, tokenizer, 20)
    assert originals(batches[:10]) == originals(batches[10:])
    first, second = stack(batches[:10])[2], stack(batches[10:])[2]
    assert (first != second).any(1).float().mean() > 0.9


def test_seed_changes_masks_and_not_the_text(
    job_config: JobConfig, tokenizer: HuggingFaceTokenizer
) -> None:
    unseeded = training_batches(job_config, tokenizer, 10)
    job_config.debug.seed = 0
    assert as_lists(training_batches(job_config, tokenizer, 10)) == as_lists(unseeded)
    job_config.debug.seed = 1
    seeded = training_batches(job_config, tokenizer, 10)
    assert originals(seeded) == originals(unseeded)
    assert (stack(seeded)[2] != stack(unseeded)[2]).any(1).float().mean() > 0.8


def test_workers_keep_the_order_of_a_single_process(
    job_config: JobConfig, tokenizer: HuggingFaceTokenizer, mlm: Mlm
) -> None:
    job_config.mlm = mlm
    expected = as_lists(training_batches(job_config, tokenizer, 30, 1, 2))
    job_config.training.dataloader.num_workers = 2
    assert as_lists(training_batches(job_config, tokenizer, 30, 1, 2)) == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resume_gives_the_same_masks(
    job_config: JobConfig, tokenizer: HuggingFaceTokenizer, mlm: Mlm, num_workers: int
) -> None:
    job_config.mlm = mlm
    job_config.training.dataloader.num_workers = num_workers
    length = 40  # more than two epochs
    expected = as_lists(training_batches(job_config, tokenizer, length, 1, 2))
    source = build_masked_lm_dataloader(2, 1, tokenizer, job_config)
    batches = iter(source)
    for position in range(36):
        if num_workers == 0 or position in (1, 17, 35):
            resumed = build_masked_lm_dataloader(2, 1, tokenizer, job_config)
            resumed.load_state_dict(source.state_dict())
            following = as_lists(list(itertools.islice(iter(resumed), length - position)))
            assert following == expected[position:]
        next(batches)
    if num_workers == 0:
        assert source.dataset.state_dict()["epoch"] >= 2


def test_finite_validation_starts_over_with_the_same_masks(
    job_config: JobConfig, tokenizer: HuggingFaceTokenizer, mlm: Mlm
) -> None:
    job_config.mlm = mlm
    loader = build_masked_lm_validation_dataloader(1, 0, tokenizer, job_config)
    first = as_lists(list(loader))
    assert 5 < len(first) < 50
    assert as_lists(list(loader)) == first
    loader = build_masked_lm_validation_dataloader(1, 0, tokenizer, job_config, infinite=True)
    assert as_lists(list(itertools.islice(iter(loader), 50)))[: len(first)] == first


# --- encoding


def test_special_tokens_and_limits_of_the_file_are_left_out(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    other = Tokenizer.from_str(tokenizer.tokenizer.to_str())
    other.enable_truncation(4)
    other.enable_padding(length=100)
    other.save(str(tmp_path / "tokenizer.json"))
    other = HuggingFaceTokenizer(str(tmp_path))
    text = "more than four tokens of text"
    assert len(other.encode(text)) == 100
    tokens = MaskingVocabulary(other).encode(text)
    assert tokens == tokenizer.encode(text)[1:-1] == MaskingVocabulary(tokenizer).encode(text)
    assert len(other.encode(text)) == 100  # the original is as it was


# --- errors before the start


def assert_refused(
    expected: str, config: JobConfig, tokenizer: HuggingFaceTokenizer, degree: int = 1
) -> None:
    with pytest.raises(ValueError) as error:
        check_masked_lm(degree, tokenizer, config)
    assert str(error.value) == expected


def test_good_configuration_passes(
    job_config: JobConfig, tokenizer: HuggingFaceTokenizer, mlm: Mlm
) -> None:
    job_config.mlm, job_config.validation.enable = mlm, True
    check_masked_lm(2, tokenizer, job_config)
    job_config.training.dataset, job_config.training.dataset_path = "cpython_docs", None
    check_masked_lm(2, tokenizer, job_config)


def test_tokenizer_without_special_tokens_is_refused(job_config: JobConfig) -> None:
    expected = (
        '[model] hf_assets_path = "the/assets": the tokenizer has no [PAD], [CLS], [SEP], [MASK], '
        "which masking needs"
    )
    tokenizer = HuggingFaceTokenizer(str(ASSETS / "tokenizer"))
    assert_refused(expected, job_config, tokenizer)
    with pytest.raises(ValueError, match="the tokenizer has no"):
        build_masked_lm_dataloader(1, 0, tokenizer, job_config)
    tokenizer.tokenizer.add_special_tokens(["[CLS]", "[SEP]", "[PAD]"])
    assert_refused(expected.replace("[PAD], [CLS], [SEP], [MASK]", "[MASK]"), job_config, tokenizer)


def test_whole_words_need_wordpiece(job_config: JobConfig, tmp_path: Path) -> None:
    content = json.loads((ASSETS / "wordpiece" / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = {token.replace("##", "@@"): at for token, at in vocabulary.items()}
    content["model"]["continuing_subword_prefix"] = "@@"
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = HuggingFaceTokenizer(str(tmp_path))
    check_masked_lm(1, tokenizer, job_config)
    job_config.mlm = LAYOUTS["whole_word"]
    expected = (
        "[mlm] whole_word = true: needs a WordPiece tokenizer, but no token of "
        '[model] hf_assets_path = "the/assets" starts with "##"'
    )
    assert_refused(expected, job_config, tokenizer)


def test_sequence_without_room_is_refused(
    job_config: JobConfig, tokenizer: HuggingFaceTokenizer
) -> None:
    job_config.training.seq_len = 2
    expected = "[training] seq_len = 2: [CLS] A [SEP] takes at least 3"
    assert_refused(expected, job_config, tokenizer)
    job_config.training.seq_len, job_config.mlm = 4, LAYOUTS["pairs"]
    expected = "[training] seq_len = 4: [CLS] A [SEP] B [SEP] takes at least 5"
    assert_refused(expected, job_config, tokenizer)


@pytest.mark.parametrize(("name", "seq_len"), [("packed", 3), ("padded", 3), ("pairs", 5)])
def test_shortest_sequences_work(
    job_config: JobConfig, tokenizer: HuggingFaceTokenizer, name: str, seq_len: int
) -> None:
    job_config.training.seq_len, job_config.mlm = seq_len, LAYOUTS[name]
    check_masked_lm(1, tokenizer, job_config)
    inputs, _, positions = stack(training_batches(job_config, tokenizer, 200))
    assert inputs.shape == (400, seq_len)
    assert positions.shape == (400, 1)


def test_pairs_of_a_stream_are_refused(
    job_config: JobConfig, tokenizer: HuggingFaceTokenizer
) -> None:
    job_config.mlm, job_config.validation.enable = LAYOUTS["pairs"], True
    job_config.validation.dataset, job_config.validation.dataset_path = "c4_validation", None
    expected = (
        '[validation] dataset = "c4_validation": is a stream, but with [mlm] next_sentence = true '
        "documents are read in random order"
    )
    assert_refused(expected, job_config, tokenizer)
    with pytest.raises(ValueError, match="is a stream"):
        build_masked_lm_validation_dataloader(1, 0, tokenizer, job_config)
    job_config.validation.enable = False
    check_masked_lm(1, tokenizer, job_config)


@pytest.mark.parametrize("texts", [[], ["One. Two. Three. " * 20, " ", ""]])
def test_pairs_of_a_single_document_are_refused(
    job_config: JobConfig, tokenizer: HuggingFaceTokenizer, tmp_path: Path, texts: list[str]
) -> None:
    job_config.training.dataset_path = write_texts(tmp_path, texts)
    job_config.mlm = LAYOUTS["pairs"]
    expected = (
        '[training] dataset = "local": fewer than 2 documents with text found, but with [mlm] '
        "next_sentence = true half of the pairs take a segment of another document"
    )
    assert_refused(expected, job_config, tokenizer)
    if texts:
        with pytest.raises(ValueError, match="fewer than 2 documents with text"):
            training_batches(job_config, tokenizer, 20)


def test_unreadable_text_is_refused(
    job_config: JobConfig, tokenizer: HuggingFaceTokenizer, mlm: Mlm, tmp_path: Path
) -> None:
    job_config.mlm = mlm
    path = tmp_path / "texts.jsonl"
    path.write_text("{}\n")
    expected = f'[training] dataset_path = "{path}": line 1 has no "text" field'
    assert_refused(expected, job_config, tokenizer)
    path.unlink()
    expected = f'[training] dataset_path = "{path}": no such file or folder'
    assert_refused(expected, job_config, tokenizer)


def test_too_short_text_is_refused(
    job_config: JobConfig, tokenizer: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    job_config.training.dataset_path = write_texts(tmp_path, ["one two three", "", "four"])
    prefix, suffix = '[training] dataset = "local": ', "(seq_len = 16, data-parallel degree 3)"
    expected = f"{prefix}6 maskable tokens found, but one sequence on every rank takes 42 {suffix}"
    assert_refused(expected, job_config, tokenizer, degree=3)
    for name, unit in (("padded", "maskable sequences"), ("pairs", "sequences")):
        expected = f"{prefix}2 {unit} found, but one sequence on every rank takes 3 {suffix}"
        job_config.mlm = LAYOUTS[name]
        assert_refused(expected, job_config, tokenizer, degree=3)


@pytest.mark.parametrize("name", ["packed", "padded"])
@pytest.mark.parametrize("text", ["\u2603 " * 500, "[MASK] [SEP] [PAD] " * 200])
def test_text_without_a_token_to_mask_is_refused(
    job_config: JobConfig, tokenizer: HuggingFaceTokenizer, tmp_path: Path, name: str, text: str
) -> None:
    job_config.mlm = LAYOUTS[name]
    job_config.training.dataset_path = write_texts(tmp_path, [text, text])
    with pytest.raises(
        ValueError, match=r"dataset = \"local\": \d+ maskable (tokens|sequences) found"
    ):
        check_masked_lm(1, tokenizer, job_config)


@pytest.mark.parametrize("name", ["packed", "padded"])
def test_sequences_without_a_token_to_mask_are_left_out(
    job_config: JobConfig, tokenizer: HuggingFaceTokenizer, tmp_path: Path, name: str
) -> None:
    job_config.mlm = LAYOUTS[name]
    snow = "\u2603 " * 60
    texts = [text for word in ("one", "two", "three") for text in (f"{word} " * 14, snow)]
    job_config.training.dataset_path = write_texts(tmp_path, texts)
    for inputs, labels in training_batches(job_config, tokenizer, 12):
        assert (labels != IGNORED).any(dim=1).all(), inputs


@pytest.mark.parametrize("local_batch_size", [1, 500])
def test_finite_validation_needs_one_batch(
    job_config: JobConfig, tokenizer: HuggingFaceTokenizer, local_batch_size: int
) -> None:
    validation = job_config.validation
    validation.enable, validation.steps = True, -1
    validation.dataset, validation.dataset_path = "local", job_config.training.dataset_path
    validation.seq_len, validation.local_batch_size = 16, local_batch_size
    if local_batch_size == 1:
        check_masked_lm(1, tokenizer, job_config)
        return
    with pytest.raises(ValueError, match=r"\[validation\] .* one batch of 500 on every rank takes"):
        check_masked_lm(1, tokenizer, job_config)
    validation.steps = 2  # then it is repeated
    check_masked_lm(1, tokenizer, job_config)
