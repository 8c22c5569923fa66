"""The debug model learns, and its experts are worth having."""

import json
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
    """The shipped file as it is, on held-out text. Curve in docs/numerics.md."""
    config = {"CONFIG_FILE": "train_configs/bert_tiny.toml", "NGPU": "1"}
    real = ["--training.seq_len=64", "--training.local_batch_size=32", "--training.steps=3000"]
    real += ["--lr_scheduler.warmup_steps=200"]
    done = run_train(tmp_path, *real, "--validation.enable", **config, timeout=7200)
    assert done.returncode == 0, done.stdout + done.stderr
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    validation = {r["step"]: r["validation_loss"] for r in records if "validation_loss" in r}
    assert validation[1] == pytest.approx(math.log(30522), abs=0.1)
    assert validation[3000] < 5.0
