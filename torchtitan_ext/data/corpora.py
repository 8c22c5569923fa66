"""Where documents come from: the data sets that the TOML key `dataset` can name.

| name                      | documents                                          | needs          |
|---------------------------|----------------------------------------------------|----------------|
| `cpython_docs`            | Python's help topics, standard-library docstrings  | nothing        |
| `cpython_docs_validation` | every 20th of these documents, held out of them    | nothing        |
| `local`                   | .txt, JSON lines and .parquet files                | `dataset_path` |
| `c4`, `c4_validation`     | the English part of C4, streamed from the hub      | network        |

To add a data set, add an entry to `_OPENERS`, or to `_HUB_OPENERS` if it is a stream. This module
imports neither torch nor `datasets` until a corpus needs them: a configuration can be checked at
once.
"""

from __future__ import annotations

import ast
import difflib
import functools
import gzip
import itertools
import json
import random
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from datasets import IterableDataset

Cursor = Any
"""Where a document stands in its corpus, as data that can be saved. None is the first document."""


class Corpus(Protocol):
    """Documents in a fixed order, readable from any of them on."""

    @property
    def is_split_over_ranks(self) -> bool:
        """Whether each data-parallel rank reads other documents, or all of them read every one."""

    @property
    def is_split_over_workers(self) -> bool:
        """The same of the dataloader workers of a rank."""

    def documents(self, start: Cursor = None) -> Iterator[tuple[Cursor, str]]:
        """Yield (cursor, text); `documents(cursor)` begins with that same document again."""


@dataclass(frozen=True)
class IndexedCorpus:
    """Documents that `read()` gives in the same order every time; the cursor is their index."""

    read: Callable[[], Iterable[str]]
    is_split_over_ranks = False
    is_split_over_workers = False

    def documents(self, start: Cursor = None) -> Iterator[tuple[Cursor, str]]:
        return itertools.islice(enumerate(self.read()), start or 0, None)

    @functools.cached_property
    def texts(self) -> Sequence[str]:
        """All documents, in any order one likes. Keeps the whole corpus in memory."""
        return list(self.read())


@dataclass(frozen=True)
class HubCorpus:
    """A stream of the `datasets` library; the cursor is the stream's own state."""

    stream: IterableDataset
    is_split_over_ranks: bool = False
    is_split_over_workers = True  # the library hands each worker its own files

    def documents(self, start: Cursor = None) -> Iterator[tuple[Cursor, str]]:
        # An empty state is the beginning. `set_epoch` would rewind too, but it also reorders the
        # files, and its counter is shared by the workers, which reach their ends at other times.
        self.stream.load_state_dict(start or {})
        cursor = start
        for example in self.stream:
            yield cursor, example["text"]
            cursor = self.stream.state_dict()

    def split(self, dp_rank: int, dp_world_size: int) -> HubCorpus:
        """Return the share of the documents that data-parallel rank `dp_rank` reads."""
        from datasets.distributed import split_dataset_by_node

        share = split_dataset_by_node(self.stream, dp_rank, dp_world_size)
        return HubCorpus(share, is_split_over_ranks=True)


def check_dataset(section: str, name: str, path: str | None) -> None:
    """Check all of a data set's configuration that needs no reading of contents.

    Args:
        section: the TOML section that the keys are in, "training" or "validation".
        name: value of the key `dataset`.
        path: value of the key `dataset_path`, None if it is not set.

    Raises:
        ValueError: unknown name; path missing, not there, of no supported type, or without effect.
    """
    if name not in DATASET_NAMES:
        nearest = difflib.get_close_matches(name, DATASET_NAMES, n=1)
        choices = ", ".join(dict.fromkeys([*nearest, *DATASET_NAMES]))
        raise ValueError(
            f'[{section}] dataset = "{name}": not a known data set; choose one of {choices}'
        )
    if name == "local":
        _check_path(section, path)
    elif path:
        raise ValueError(
            f'[{section}] dataset_path = "{path}": has no effect with dataset = "{name}"'
        )


def open_corpus(section: str, name: str, path: str | None = None) -> Corpus:
    """Return the corpus that the configuration names; the arguments are those of `check_dataset`.

    Documents are read later, as they are asked for. A file that turns out to be malformed raises
    a ValueError then, which names the key, the file and the line.

    Raises:
        ValueError: see `check_dataset`.
    """
    check_dataset(section, name, path)
    if path:  # checked above: only "local" has one
        return IndexedCorpus(functools.partial(_read_files, section, path))
    return _OPENERS[name]()


# --- c4


def _open_c4(split: str) -> HubCorpus:
    from datasets import load_dataset

    return HubCorpus(load_dataset("allenai/c4", name="en", split=split, streaming=True))


# --- local
#
# The files are read directly: `datasets.load_dataset` would first copy them to a cache outside
# the folder of the run.


def _check_path(section: str, path: str | None) -> None:
    if not path:
        raise ValueError(f'[{section}] dataset_path: needed with dataset = "local"')
    root, key = Path(path), f'[{section}] dataset_path = "{path}"'
    supported = f"{', '.join(list(_READERS)[:-1])} or {list(_READERS)[-1]}"
    if not root.exists():
        raise ValueError(f"{key}: no such file or folder")
    if root.is_dir() and not _find_files(root):
        raise ValueError(f"{key}: a folder without {supported} files")
    if root.is_file() and _file_type(root) is None:
        raise ValueError(f'{key}: unsupported file type "{root.suffix}"; use {supported}')


def _find_files(root: Path) -> list[Path]:
    """Return `root` itself, or the supported files below it ordered by relative path."""
    if root.is_file():
        return [root]
    files = [path for path in root.rglob("*") if path.is_file() and _file_type(path)]
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def _file_type(path: Path) -> str | None:
    return next((ending for ending in _READERS if path.name.endswith(ending)), None)


def _read_files(section: str, path: str) -> Iterator[str]:
    """Yield the documents of a file, or of all files below a folder."""
    root = Path(path)
    for file in _find_files(root):
        reader = _READERS[_file_type(file) or ""]
        try:
            yield from reader(file)
        except (ValueError, OSError, EOFError, zlib.error) as error:
            place = "" if file == root else f"{file.relative_to(root).as_posix()}: "
            raise ValueError(f'[{section}] dataset_path = "{path}": {place}{error}') from error


def _read_txt(path: Path) -> Iterator[str]:
    yield path.read_text(encoding="utf-8")


def _read_json_lines(path: Path) -> Iterator[str]:
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _text_of_line(line, number)


def _text_of_line(line: bytes, number: int) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:  # malformed JSON or malformed UTF-8
        raise ValueError(f"line {number} is not valid JSON") from error
    return _require_text(row.get("text") if isinstance(row, dict) else None, f"line {number}")


def _read_parquet(path: Path) -> Iterator[str]:
    from pyarrow.parquet import ParquetFile

    with ParquetFile(path) as table:
        if "text" not in table.schema_arrow.names:
            raise ValueError('no "text" column')
        batches = table.iter_batches(columns=["text"])
        texts = itertools.chain.from_iterable(batch["text"].to_pylist() for batch in batches)
        for number, text in enumerate(texts, start=1):
            yield _require_text(text, f"row {number}")


def _require_text(value: object, place: str) -> str:
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:  # JSON can spell half of a surrogate pair; a tokenizer can't
            raise ValueError(f"{place} has text that is not valid Unicode") from None
        return value
    problem = "no" if value is None else "a non-string"
    raise ValueError(f'{place} has {problem} "text" field')


# ".json" files hold one object a line, as those of C4 do.
_READERS: dict[str, Callable[[Path], Iterator[str]]] = {
    ".txt": _read_txt,
    ".jsonl": _read_json_lines,
    ".json": _read_json_lines,
    ".json.gz": _read_json_lines,
    ".jsonl.gz": _read_json_lines,
    ".parquet": _read_parquet,
}


# --- cpython_docs

_MIN_CHARACTERS = 200
_HELD_OUT_EVERY = 20
_SKIPPED_FOLDERS = frozenset(
    ["site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"]
)
_DOCUMENTED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _open_cpython_docs(held_out: bool) -> IndexedCorpus:
    return IndexedCorpus(functools.partial(_cpython_part, held_out))


def _cpython_part(held_out: bool) -> list[str]:
    """Return the validation documents, or all others. Both depend on the version of Python."""
    documents = enumerate(_cpython_documents())
    return [text for index, text in documents if (index % _HELD_OUT_EVERY == 0) == held_out]


@functools.cache
def _cpython_documents() -> tuple[str, ...]:
    """Return the text that ships with Python: a document a help topic, and one a module."""
    from pydoc_data.topics import topics

    # Some topics ("if", "else") have the same text, which must not be on both sides of the split.
    documents = list(dict.fromkeys([*topics.values(), *_module_docstrings()]))
    documents = [text for text in documents if len(text) >= _MIN_CHARACTERS]
    random.Random(0).shuffle(documents)  # so that topics and modules mix
    return tuple(documents)


def _module_docstrings() -> Iterator[str]:
    """Yield the joined docstrings of each standard-library module, without importing it."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        if _SKIPPED_FOLDERS.isdisjoint(path.relative_to(root).parts):
            yield "\n\n".join(_docstrings(ast.parse(path.read_bytes())))


def _docstrings(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef,
) -> Iterator[str]:
    """Yield the docstring of `node`, then those of the classes and functions in its body."""
    docstring = ast.get_docstring(node)  # cleaned with inspect.cleandoc
    if docstring:
        yield docstring
    for child in node.body:
        if isinstance(child, _DOCUMENTED):
            yield from _docstrings(child)


_HUB_OPENERS: dict[str, Callable[[], Corpus]] = {
    "c4": functools.partial(_open_c4, "train"),
    "c4_validation": functools.partial(_open_c4, "validation"),
}
_OPENERS: dict[str, Callable[[], Corpus]] = {
    **_HUB_OPENERS,
    "cpython_docs": functools.partial(_open_cpython_docs, held_out=False),
    "cpython_docs_validation": functools.partial(_open_cpython_docs, held_out=True),
}

DATASET_NAMES = (*_OPENERS, "local")
HUB_DATASET_NAMES = tuple(_HUB_OPENERS)  # streams: what comes later can't be read before
