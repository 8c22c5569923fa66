"""Fixtures of several files."""

from pathlib import Path

import pytest

from tests.fake_model import MODEL
from torchtitan_ext.data import corpora


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with a tokenizer, and a corpus check that refuses the name "missing"."""
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    (tmp_path / "run.toml").write_text(MODEL)

    def check_dataset(section: str, name: str, path: str | None) -> None:
        if name == "missing":
            raise ValueError(f'[{section}] dataset = "missing": no such corpus')

    monkeypatch.setattr(corpora, "check_dataset", check_dataset)
    monkeypatch.chdir(tmp_path)
    return tmp_path
