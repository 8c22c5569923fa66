"""The debug model learns, and its experts are worth having."""

import math
import statistics
from pathlib import Path

import pytest

from tests.integration.test_training import losses, run_train

VOCABULARY = 2048


@pytest.mark.slow
def test_experts_learn_more_than_the_dense_twin(tmp_path: Path) -> None:
    """Figures in docs/numerics.md. Batches differ by 0.3 in difficulty, hence the means."""
    real = ["--training.seq_len=256", "--training.local_batch_size=4", "--training.steps=200"]
    curves = {}
    for name in ("debug", "debug_dense"):
        config = f"train_configs/deepseek_v3_{name}.toml"
        done = run_train(tmp_path / name, *real, CONFIG_FILE=config, timeout=3600)
        assert done.returncode == 0, done.stdout + done.stderr
        curves[name] = [loss for loss, _ in losses(tmp_path / name).values()]
    best = min(statistics.mean(curves["debug"][i : i + 10]) for i in range(191))
    assert best < math.log(VOCABULARY) - 2
    final = {name: statistics.mean(curve[-20:]) for name, curve in curves.items()}
    assert final["debug"] < final["debug_dense"]


@pytest.mark.slow
def test_bert_falls_below_five_in_3000_steps(tmp_path: Path) -> None:
    """The shipped file as it is. A loss is of one batch, hence the means."""
    done = run_train(tmp_path, CONFIG_FILE="train_configs/bert_tiny.toml", timeout=7200)
    assert done.returncode == 0, done.stdout + done.stderr
    curve = [loss for loss, _ in losses(tmp_path).values()]  # every 10th step
    assert curve[0] == pytest.approx(math.log(30522), abs=0.1)
    assert statistics.mean(curve[-50:]) < 5.0
