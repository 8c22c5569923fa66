"""The debug model learns, and its experts are worth having."""

import math
import statistics
from pathlib import Path

import pytest

from tests.integration.test_training import losses, run_train

VOCABULARY = 2048


def final_loss(folder: Path) -> float:
    return statistics.mean(loss for loss, _ in list(losses(folder).values())[-20:])


@pytest.mark.slow
def test_experts_learn_more_than_the_dense_twin(tmp_path: Path) -> None:
    real = ["--training.seq_len=256", "--training.local_batch_size=4", "--training.steps=200"]
    final = {}
    for name in ("debug", "debug_dense"):
        config = f"train_configs/deepseek_v3_{name}.toml"
        done = run_train(tmp_path / name, *real, CONFIG_FILE=config, timeout=3600)
        assert done.returncode == 0, done.stdout + done.stderr
        final[name] = final_loss(tmp_path / name)
    assert final["debug"] < math.log(VOCABULARY) - 2
    assert final["debug"] < final["debug_dense"]
