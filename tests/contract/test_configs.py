"""Every shipped TOML is a configuration that can be run."""

from pathlib import Path

import pytest

from torchtitan_ext.config.load import load_job_config

CONFIGS = sorted(Path("train_configs").glob("*.toml"))
NUM_RANKS = {"debug": 2, "16b": 8, "671b": 256, "tiny": 2}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_config_loads_on_an_accelerator(path: Path) -> None:
    (num_ranks,) = (ranks for size, ranks in NUM_RANKS.items() if f"_{size}" in path.stem)
    flags = [f"--job.config_file={path}"]
    if num_ranks > 2:  # the large models' tokenizers are the user's to bring
        flags += ["--model.hf_assets_path=tests/assets/tokenizer"]
    load_job_config(flags, world_size=num_ranks, device_type="cuda")


def test_there_are_configs() -> None:
    assert len(CONFIGS) >= 4
