"""The compiler's caches serve nothing that an earlier version of the code has left in them."""

import shutil
from pathlib import Path

import pytest
import torch

from torchtitan_ext.distributed import compile_cache
from torchtitan_ext.distributed.compile_cache import source_hash, tag_compile_caches


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the package, in place of it."""
    copy = tmp_path / "torchtitan_ext"
    shutil.copytree(compile_cache._PACKAGE, copy)
    monkeypatch.setattr(compile_cache, "_PACKAGE", copy)
    return copy


def test_source_hash_changes_with_any_file_and_with_nothing_else(package: Path) -> None:
    before = source_hash()
    (package / "notes.txt").write_text("not code")
    assert source_hash() == before
    gradient = package / "moe" / "grouped_mm.py"
    gradient.write_text(gradient.read_text().replace("transpose(-2, -1)", "transpose(-1, -2)", 1))
    edited = source_hash()
    assert edited != before
    (package / "moe" / "router.py").rename(package / "moe" / "routers.py")
    assert source_hash() not in (before, edited)


def test_tag_is_there_once_with_the_rank_and_the_users_own() -> None:
    with torch.compiler.config.patch(cache_key_tag="mine"):
        tag_compile_caches()
        tag_compile_caches(tensor_rank=3)
        assert torch.compiler.config.cache_key_tag == f"minetorchtitan_ext-{source_hash()}-tp3"
