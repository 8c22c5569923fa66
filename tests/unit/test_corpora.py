"""Each data set gives its documents in a fixed order, and bad configuration names its TOML key."""

import gzip
import hashlib
import inspect
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from torchtitan_ext.data.corpora import DATASET_NAMES, check_dataset, open_corpus

SUPPORTED = ".txt, .jsonl, .json, .json.gz, .jsonl.gz or .parquet"


def read_local(path: Path) -> list[str]:
    return [text for _, text in open_corpus("training", "local", str(path)).documents()]


def json_lines(*texts: str) -> str:
    return "".join(json.dumps({"text": text, "url": "ignored"}) + "\n" for text in texts)


def write_parquet(path: Path, **columns: list) -> None:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def assert_error(expected: str, section: str, name: str, path: str | None = None) -> None:
    """Both the early check and opening must raise exactly `expected`."""
    for function in (check_dataset, open_corpus):
        with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
            function(section, name, path)


# --- local: file types


def test_txt_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("first line\n\nsecond: é 漢字 🎉\n", encoding="utf-8")
    assert read_local(tmp_path / "a.txt") == ["first line\n\nsecond: é 漢字 🎉\n"]


@pytest.mark.parametrize("ending", [".jsonl", ".json", ".json.gz", ".jsonl.gz"])
def test_json_lines_give_one_document_a_line(tmp_path: Path, ending: str) -> None:
    content = (json_lines("one", "two\nlines, é") + "\n" + json_lines("three")).encode()
    path = tmp_path / f"a{ending}"
    path.write_bytes(gzip.compress(content) if ending.endswith(".gz") else content)
    assert read_local(path) == ["one", "two\nlines, é", "three"]


def test_parquet_gives_one_document_a_row(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", id=[1, 2], text=["one", "two"])
    assert read_local(tmp_path / "a.parquet") == ["one", "two"]


def test_folder_is_searched_in_order_of_relative_path(tmp_path: Path) -> None:
    (tmp_path / "b" / "deep").mkdir(parents=True)
    (tmp_path / "a").mkdir()
    (tmp_path / "z.txt").write_text("z")
    (tmp_path / "b" / "deep" / "x.jsonl").write_text(json_lines("b/deep/x 1", "b/deep/x 2"))
    (tmp_path / "b" / "a.txt").write_text("b/a")
    write_parquet(tmp_path / "a" / "p.parquet", text=["a/p"])
    (tmp_path / "a" / "notes.md").write_text("not a supported type")
    assert read_local(tmp_path) == ["a/p", "b/a", "b/deep/x 1", "b/deep/x 2", "z"]


def test_documents_start_at_a_cursor(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json_lines("0", "1", "2", "3"))
    corpus = open_corpus("training", "local", str(tmp_path / "a.jsonl"))
    documents = list(corpus.documents())
    for index, (cursor, _) in enumerate(documents):
        assert list(corpus.documents(cursor)) == documents[index:]


# --- local: malformed contents


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"txt": "x"}', 'line 17 has no "text" field'),
        (b'{"text": null}', 'line 17 has no "text" field'),
        (b'["text"]', 'line 17 has no "text" field'),
        (b'{"text": 3}', 'line 17 has a non-string "text" field'),
        (b'{"text": "x"', "line 17 is not valid JSON"),
        (b'{"text": "\xff"}', "line 17 is not valid JSON"),
        (b'{"text": "half \\ud800 a pair"}', "line 17 has text that is not valid Unicode"),
    ],
)
def test_bad_json_line_is_named_by_number(tmp_path: Path, line: bytes, problem: str) -> None:
    path = tmp_path / "f.jsonl"
    path.write_bytes(json_lines(*["good"] * 16).encode() + line + b"\n")
    with pytest.raises(ValueError) as error:
        read_local(path)
    assert str(error.value) == f'[training] dataset_path = "{path}": {problem}'


def test_bad_file_in_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "f.jsonl").write_text("{}\n")
    corpus = open_corpus("validation", "local", str(tmp_path))
    with pytest.raises(ValueError) as error:
        list(corpus.documents())
    key = f'[validation] dataset_path = "{tmp_path}"'
    assert str(error.value) == f'{key}: sub/f.jsonl: line 1 has no "text" field'


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"body": ["x"]}, 'no "text" column'),
        ({"text": ["x", None]}, 'row 2 has no "text" field'),
        ({"text": [1]}, 'row 1 has a non-string "text" field'),
    ],
)
def test_bad_parquet_is_named_by_row(tmp_path: Path, columns: dict, problem: str) -> None:
    path = tmp_path / "f.parquet"
    write_parquet(path, **columns)
    with pytest.raises(ValueError) as error:
        read_local(path)
    assert str(error.value) == f'[training] dataset_path = "{path}": {problem}'


@pytest.mark.parametrize("name", ["f.txt", "f.json.gz", "f.parquet"])
def test_undecodable_file_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\xff\xfe not what the name says")
    key = re.escape(f'[training] dataset_path = "{tmp_path / name}": ')
    with pytest.raises(ValueError, match=f"^{key}[^\n]+$"):
        read_local(tmp_path / name)


def test_truncated_gzip_is_named(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl.gz"
    path.write_bytes(gzip.compress(json_lines("x" * 1000).encode())[:-12])
    with pytest.raises(ValueError, match=re.escape(f'dataset_path = "{path}": Compressed file')):
        read_local(path)


# --- configuration errors


@pytest.mark.parametrize("section", ["training", "validation"])
def test_unknown_name_lists_the_nearest_first(section: str) -> None:
    names = ", ".join(DATASET_NAMES)
    prefix = f'[{section}] dataset = "{{}}": not a known data set; choose one of '
    assert_error(prefix.format("foo") + names, section, "foo")
    others = ", ".join(name for name in DATASET_NAMES if name != "local")
    assert_error(prefix.format("locl") + f"local, {others}", section, "locl")


def test_missing_path_is_an_error() -> None:
    for path in (None, ""):
        assert_error(
            '[training] dataset_path: needed with dataset = "local"', "training", "local", path
        )


@pytest.mark.parametrize("name", [name for name in DATASET_NAMES if name != "local"])
def test_path_without_effect_is_an_error(name: str) -> None:
    expected = f'[validation] dataset_path = "x/y": has no effect with dataset = "{name}"'
    assert_error(expected, "validation", name, "x/y")


def test_path_that_does_not_exist_is_an_error() -> None:
    expected = '[training] dataset_path = "x/y": no such file or folder'
    assert_error(expected, "training", "local", "x/y")


def test_unsupported_file_type_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "f.csv"
    path.touch()
    expected = f'[training] dataset_path = "{path}": unsupported file type ".csv"; use {SUPPORTED}'
    assert_error(expected, "training", "local", str(path))


def test_folder_without_supported_files_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "f.csv").touch()
    expected = f'[validation] dataset_path = "{tmp_path}": a folder without {SUPPORTED} files'
    assert_error(expected, "validation", "local", str(tmp_path))


def test_good_configuration_passes(tmp_path: Path) -> None:
    (tmp_path / "f.txt").touch()
    for path in (tmp_path, tmp_path / "f.txt"):
        check_dataset("training", "local", str(path))
    for name in ("c4", "c4_validation", "cpython_docs", "cpython_docs_validation"):
        check_dataset("training", name, None)


def test_check_imports_neither_torch_nor_datasets() -> None:
    code = (
        "import sys; from torchtitan_ext.data.corpora import check_dataset; "
        "check_dataset('training', 'cpython_docs', None); "
        "sys.exit(len({'torch', 'datasets', 'pyarrow'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- cpython_docs


def read_cpython_docs() -> tuple[list[str], list[str]]:
    """Return the training documents and the held-out ones."""
    train, held_out = (
        [text for _, text in open_corpus("training", name).documents()]
        for name in ("cpython_docs", "cpython_docs_validation")
    )
    return train, held_out


def test_cpython_docs_split_shares_no_document() -> None:
    train, held_out = read_cpython_docs()
    num_documents = len(train) + len(held_out)
    assert len(train) > 300
    assert len(held_out) == math.ceil(num_documents / 20)
    assert len({*train, *held_out}) == num_documents
    assert min(map(len, train + held_out)) >= 200
    assert 1_000_000 < sum(len(text.encode()) for text in train) < 4_000_000


def test_cpython_docs_hold_topics_and_docstrings_mixed() -> None:
    train, held_out = read_cpython_docs()
    is_topic = [text in set(topics.values()) for text in train]
    assert 0 < sum(is_topic[: len(train) // 2]) < sum(is_topic)
    for documented in (json, json.JSONDecoder, json.JSONDecoder.raw_decode):
        assert any(inspect.cleandoc(documented.__doc__) in text for text in train + held_out)


def test_cpython_docs_are_the_same_in_another_process() -> None:
    code = (
        "import hashlib; from torchtitan_ext.data.corpora import open_corpus; "
        "texts = [text for _, text in open_corpus('training', 'cpython_docs').documents()]; "
        "print(hashlib.sha256(repr(texts).encode()).hexdigest())"
    )
    digest = hashlib.sha256(repr(read_cpython_docs()[0]).encode()).hexdigest()
    printed = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert printed.strip() == digest


# --- c4


def test_c4_streams_the_english_part(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fake_load_dataset(*args: str, **kwargs: object) -> datasets.IterableDataset:
        calls.append((args, kwargs))
        return datasets.Dataset.from_dict({"text": ["one", "two"]}).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", fake_load_dataset)
    for name, split in (("c4", "train"), ("c4_validation", "validation")):
        corpus = open_corpus("training", name)
        assert [text for _, text in corpus.documents()] == ["one", "two"]
        assert calls.pop() == (("allenai/c4",), {"name": "en", "split": split, "streaming": True})
