"""metrics.jsonl: strict JSON at full precision, with the documented keys."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from torchtitan_ext.components import metrics
from torchtitan_ext.components.load_balance import ExpertLoad
from torchtitan_ext.components.metrics import ExtMetricsProcessor
from torchtitan_ext.metrics_file import json_line
from torchtitan_ext.moe import MoE, MoEArgs

KEYS = {"step", "loss", "grad_norm", "lr", "tokens_per_second", "tokens_seen", "step_seconds"}
KEYS |= {"data_seconds", "peak_memory_gib", "time"}


def strict(line: str) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


def test_json_line_is_one_line_of_json() -> None:
    line = json_line({"step": 3, "loss": 1.5, "tokens_per_expert": [[1, 2], [3, 4]]})
    assert line.endswith("\n")
    assert line.count("\n") == 1
    assert strict(line) == {"step": 3, "loss": 1.5, "tokens_per_expert": [[1, 2], [3, 4]]}


@pytest.mark.parametrize("value", [1 / 3, 1e-300, 123456789.123456789, -0.0, 5e-324])
def test_json_line_keeps_every_digit(value: float) -> None:
    assert strict(json_line({"loss": value}))["loss"].hex() == value.hex()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_json_line_not_finite_becomes_null_and_is_marked(value: float) -> None:
    record = {"step": 1, "loss": value, "grad_norm": 2.0}
    assert strict(json_line(record)) == {
        "step": 1,
        "loss": None,
        "grad_norm": 2.0,
        "nonfinite": True,
    }
    assert "nonfinite" not in record


def test_json_line_finite_is_not_marked() -> None:
    assert "nonfinite" not in strict(json_line({"loss": 1.0, "note": None, "ids": [1]}))


@pytest.fixture
def processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ExtMetricsProcessor:
    """The processor without torchtitan's: no device monitor, no console."""

    def init(self: Any, job_config: Any, parallel_dims: Any) -> None:
        self.job_config, self.parallel_dims = job_config, parallel_dims
        self.device_memory_monitor = SimpleNamespace(
            get_peak_stats=lambda: SimpleNamespace(max_reserved_gib=1.25)
        )
        self.ntokens_since_last_log, self.data_loading_times = 0, []

    def log(self: Any, *args: Any) -> None:
        self.ntokens_since_last_log = 0
        self.data_loading_times.clear()
        self.time_last_log = metrics.time.perf_counter()

    def log_validation(self: Any, *args: Any) -> None:
        self.ntokens_since_last_log = 0
        self.time_last_log = metrics.time.perf_counter()

    base = metrics.MetricsProcessor
    monkeypatch.setattr(base, "__init__", init)
    monkeypatch.setattr(base, "log", log)
    monkeypatch.setattr(base, "close", lambda self: None)
    monkeypatch.setattr(base, "log_validation", log_validation)
    clock = iter([100.0, 104.0, 104.0, 105.0, 105.0])
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(metrics.dist, "get_rank", lambda: 0)
    job_config = SimpleNamespace(
        job=SimpleNamespace(dump_folder=str(tmp_path / "run")),
        metrics=SimpleNamespace(log_experts=False),
    )
    parallel_dims = SimpleNamespace(num_data_ranks=6, cp=2)
    return ExtMetricsProcessor(job_config, parallel_dims)  # type: ignore[arg-type]


def records(processor: ExtMetricsProcessor) -> list[dict[str, Any]]:
    """Read while the file is still open: each line has to be there at once."""
    path = Path(processor.job_config.job.dump_folder) / "metrics.jsonl"
    return [strict(line) for line in path.read_text().splitlines()]


def log_step(processor: ExtMetricsProcessor, step: int, loss: float = 2.5) -> None:
    processor.ntokens_since_last_log = 400
    processor.data_loading_times += [0.5, 1.5]
    # Each of the two ranks that share a sequence has counted all of it.
    processor.log(step, loss, loss, 0.75, {"n_tokens_seen": 2 * 2400.0, "lr": 1e-3})


def test_record_has_the_documented_keys_and_values(processor: ExtMetricsProcessor) -> None:
    processor.start(step=8)
    log_step(processor, step=10)
    (record,) = records(processor)
    assert record.keys() == KEYS
    assert record["time"] == pytest.approx(metrics.time.time(), abs=60)
    del record["time"]
    assert record == {
        "step": 10,
        "loss": 2.5,
        "grad_norm": 0.75,
        "lr": 1e-3,
        "tokens_per_second": 400 * 6 / 4.0,  # six ranks with data, four seconds
        "tokens_seen": 2400,
        "step_seconds": 2.0,  # of two steps
        "data_seconds": 1.0,
        "peak_memory_gib": 1.25,
    }
    assert type(record["step"]) is type(record["tokens_seen"]) is int


def test_record_of_the_next_step_starts_from_the_last(processor: ExtMetricsProcessor) -> None:
    processor.start(step=8)
    log_step(processor, step=10)
    log_step(processor, step=11, loss=math.nan)
    first, second = records(processor)
    assert second["step_seconds"] == 1.0
    assert (second["loss"], second["nonfinite"]) == (None, True)
    assert "nonfinite" not in first


def test_record_after_a_validation_speaks_of_the_steps_since(
    processor: ExtMetricsProcessor,
) -> None:
    processor.start(step=8)
    processor.data_loading_times += [7.0]  # of a step before the validation
    processor.log_validation(2.0, step=10)
    metrics.time.perf_counter()  # the clock goes from 104, at the validation, to 105
    log_step(processor, step=12)
    validation, training = records(processor)
    assert (validation["step"], validation["validation_loss"]) == (10, 2.0)
    assert training["step_seconds"] == (105.0 - 104.0) / 2
    assert training["data_seconds"] == 2.0 / 2


@pytest.mark.parametrize("log_experts", [False, True])
def test_record_of_a_moe_model_has_the_worst_load(
    processor: ExtMetricsProcessor, log_experts: bool
) -> None:
    processor.job_config.metrics.log_experts = log_experts
    layers = nn.ModuleList([MoE(MoEArgs(num_experts=3), dim=4, hidden_dim=4) for _ in range(2)])
    processor.expert_load = ExpertLoad([layers], [])
    processor.expert_load.add(counts := torch.tensor([[1, 1, 1], [0, 3, 6]]))
    processor.expert_load.finish_step()
    processor.start(step=0)
    log_step(processor, step=1)
    (record,) = records(processor)
    assert record["expert_load_max_over_mean"] == 2.0
    assert record.get("tokens_per_expert") == (counts.tolist() if log_experts else None)
    assert record.keys() - KEYS == {"expert_load_max_over_mean"} | (
        {"tokens_per_expert"} if log_experts else set()
    )


def test_record_of_a_dense_model_has_no_expert_keys(processor: ExtMetricsProcessor) -> None:
    processor.expert_load = ExpertLoad([nn.Linear(2, 2)], [])
    processor.expert_load.finish_step()
    processor.job_config.metrics.log_experts = True
    processor.start(step=0)
    log_step(processor, step=1)
    assert records(processor)[0].keys() == KEYS


def test_file_of_an_earlier_run_is_continued(processor: ExtMetricsProcessor) -> None:
    processor.log_validation(1.5, 3)
    processor.close()
    resumed = ExtMetricsProcessor(processor.job_config, processor.parallel_dims)
    resumed.log_validation(1.25, 4)
    resumed.close()
    assert [record["validation_loss"] for record in records(processor)] == [1.5, 1.25]


def test_other_ranks_write_no_file(
    processor: ExtMetricsProcessor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(metrics.dist, "get_rank", lambda: 1)
    processor.job_config.job.dump_folder = str(tmp_path / "other")
    other = ExtMetricsProcessor(processor.job_config, processor.parallel_dims)
    other.start(step=0)
    log_step(other, step=1)
    other.close()
    assert not (tmp_path / "other").exists()
