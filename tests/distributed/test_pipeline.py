"""Stages on different ranks compute what one process computes, and report it on every rank."""

import contextlib
import io
import itertools
import json
import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from tests.tiny import (
    CONFIG,
    FLAVORS,
    SGD,
    Run,
    assert_same,
    build_trainer,
    finish,
    steps,
    tiny_args,
    train,
)
from torchtitan_ext.config.load import load_job_config
from torchtitan_ext.verify.layouts import for_comparison
from torchtitan_ext.verify.step import StepRecord, record_step

PP2 = ["--parallelism.pipeline_parallel_degree=2"]
# 4 ranks: each stage's experts and data on two of them.
PP2_EP2 = [*PP2, "--parallelism.expert_parallel_degree=2", "--training.local_batch_size=4"]
FULL = ["--activation_checkpoint.mode=full"]
OP = ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"]
AOT_EAGER = ["--compile.enable", "--compile.components=model", "--compile.backend=aot_eager"]
OPTIMIZERS = {"AdamW": [], "SGD": SGD}
SCHEDULES = (
    *("1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS"),
    *("InterleavedZeroBubble", "ZBVZeroBubble"),
)
# Two stages a rank, all with experts; the default model has one dense layer and two with experts.
SIX_LAYERS = {"n_layers": 6, "n_dense_layers": 0}


def schedule(name: str) -> list[str]:
    return [f"--parallelism.pipeline_parallel_schedule={name}"]


class References:
    """Runs of one process, each made once."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._runs = folder, {}

    def get(self, optimizer: str = "SGD", **flavor: Any) -> Run:
        key = (optimizer, *flavor.items())
        if key not in self._runs:
            flags = OPTIMIZERS[optimizer]
            self._runs[key] = run_ranks(train, 1, flags, str(self._folder), **flavor)[0]
        return self._runs[key]


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("reference"))


def run_pipeline(
    folder: Path, flags: list[str], num_ranks: int = 2, optimizer: str = "SGD", **flavor: Any
) -> Run:
    flags = [*OPTIMIZERS[optimizer], *flags]
    return run_ranks(train, num_ranks, flags, str(folder), timeout=600, **flavor)[0]


@pytest.mark.parametrize(
    ("flags", "optimizer", "flavor"),
    [
        (PP2, "AdamW", {}),
        ([*PP2, *FULL], "SGD", {}),
        ([*PP2, *schedule("Interleaved1F1B"), *OP], "SGD", SIX_LAYERS),
        ([*PP2, *schedule("ZBVZeroBubble")], "AdamW", SIX_LAYERS),
        # no MoE layer on the first stage
        (PP2, "SGD", {"n_dense_layers": 2}),
    ],
    ids=["1f1b", "1f1b-full", "interleaved-op", "zbv", "dense_stage"],
)
def test_two_ranks_equal_one_process(
    references: References, tmp_path: Path, flags: list[str], optimizer: str, flavor: dict[str, int]
) -> None:
    run = run_pipeline(tmp_path, flags, optimizer=optimizer, **flavor)
    assert list(run.gradients[0]) == list(run.gradients[1])
    assert_same(run, references.get(optimizer, **flavor))


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_pipeline_of_expert_parallel_stages_equals_one_process(
    references: References, tmp_path: Path, optimizer: str
) -> None:
    run = run_pipeline(tmp_path, [*PP2_EP2, *FULL], 4, optimizer)
    assert_same(run, references.get(optimizer))


def test_compiled_pipeline_of_expert_parallel_stages_equals_one_process(
    references: References, tmp_path: Path
) -> None:
    run = run_pipeline(tmp_path, [*PP2_EP2, *FULL, *AOT_EAGER], 4)
    assert_same(run, references.get())
    assert run.num_graphs[-1] > 0
    assert run.graph_breaks == {}


@pytest.mark.parametrize(
    ("flags", "num_ranks", "local_batch_size"),
    [
        ([*PP2, *FULL], 2, 4),
        pytest.param([*PP2, *schedule("GPipe")], 4, 2, marks=pytest.mark.slow),
        pytest.param([*PP2_EP2, *FULL], 4, 2, marks=pytest.mark.slow),
    ],
)
def test_accumulated_local_batches_equal_one_batch(
    references: References,
    tmp_path: Path,
    flags: list[str],
    num_ranks: int,
    local_batch_size: int,
) -> None:
    sizes = [f"--training.local_batch_size={local_batch_size}", "--training.global_batch_size=8"]
    assert_same(run_pipeline(tmp_path, [*flags, *sizes], num_ranks), references.get())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout", "checkpoint", "compiled", "optimizer"),
    list(
        itertools.product(
            SCHEDULES,
            [(2, []), (4, PP2_EP2[1:]), (4, PP2_EP2[2:])],
            [[], FULL, OP],
            [[], AOT_EAGER],
            ["AdamW", "SGD"],
        )
    ),
)
def test_product_equals_one_process(
    references: References,
    tmp_path: Path,
    name: str,
    layout: tuple[int, list[str]],
    checkpoint: list[str],
    compiled: list[str],
    optimizer: str,
) -> None:
    if "ZeroBubble" in name and checkpoint and not compiled:
        pytest.skip("refused: see tests/contract/test_pipeline_refusals.py")
    num_ranks, degrees = layout
    flags = [*PP2, *schedule(name), *degrees, *checkpoint, *compiled]
    run = run_pipeline(tmp_path, flags, num_ranks, optimizer, **SIX_LAYERS)
    assert_same(run, references.get(optimizer, **SIX_LAYERS))
    assert (run.num_graphs[-1] > 0) == bool(compiled)


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_stage_of_a_pipeline_equals_one_process(
    references: References, tmp_path: Path, stage: int
) -> None:
    flags = [*PP2, "--training.local_batch_size=4", f"--zero.stage={stage}"]
    assert_same(run_pipeline(tmp_path, flags, 4), references.get())


def test_pipeline_of_replicas_equals_one_process(references: References, tmp_path: Path) -> None:
    replicas = ["--parallelism.data_parallel_replicate_degree=2", "--training.local_batch_size=4"]
    assert_same(run_pipeline(tmp_path, [*PP2, *replicas], 4), references.get())


# Where the model is cut


def write_toml(folder: Path, text: str) -> str:
    path = folder / "run.toml"
    path.write_text(Path(CONFIG).read_text() + text)
    return f"--job.config_file={path}"


def test_stages_cut_by_hand_equal_one_process(references: References, tmp_path: Path) -> None:
    """One has no layer at all."""
    cut = '[["tok_embeddings", "layers.0", "layers.1", "layers.2"], ["norm", "output"]]'
    config = write_toml(tmp_path, f"[parallelism]\nmodule_fqns_per_model_part = {cut}\n")
    assert_same(run_pipeline(tmp_path, [config, *PP2, *FULL]), references.get())


def test_fewer_layers_beside_embedding_and_head(references: References, tmp_path: Path) -> None:
    flags = [
        "--parallelism.pipeline_parallel_first_stage_less_layers=0",
        "--parallelism.pipeline_parallel_last_stage_less_layers=2",
        "--parallelism.pipeline_parallel_microbatch_size=2",
    ]
    flavor = {"n_layers": 5}
    assert_same(run_pipeline(tmp_path, [*PP2, *flags], **flavor), references.get(**flavor))


def test_schedule_of_a_file_equals_one_process(references: References, tmp_path: Path) -> None:
    """Two stages a rank; the first rank splits the backward of a micro-batch."""
    path = tmp_path / "schedule.csv"
    path.write_text(
        "0F0,0F1,2F0,2F1,2I0,2W0,2B1,0B0,0B1\n1F0,1F1,3F0,3B0,3F1,3B1,1B0,1B1\n", encoding="utf-8"
    )
    flags = [
        *schedule("PipelineScheduleMulti"),
        f"--parallelism.pipeline_parallel_schedule_csv={path}",
        "--parallelism.pipeline_parallel_microbatch_size=4",
    ]
    run = run_pipeline(tmp_path, [*PP2, *flags], **SIX_LAYERS)
    assert_same(run, references.get(**SIX_LAYERS))


def test_initial_weights_are_those_of_one_process(tmp_path: Path) -> None:
    one = run_ranks(train, 1, [], str(tmp_path), num_steps=0)[0]
    pipeline = run_ranks(train, 2, PP2, str(tmp_path), num_steps=0)[0]
    assert pipeline.weights.keys() == one.weights.keys()
    assert all(torch.equal(pipeline.weights[name], one.weights[name]) for name in one.weights)


# What layers are wrapped in


def table_of_plans(flags: list[str], folder: str) -> list[tuple[int, str]]:
    from torchtitan_ext.distributed.layer_wrap import plans_of

    trainer = build_trainer(flags, folder)
    (part,) = trainer.model_parts
    return [(p.layer_id, p.checkpoint) for p in plans_of(part, trainer.job_config)]


def test_positions_and_rules_count_in_the_whole_model(tmp_path: Path) -> None:
    every_2nd = ["--activation_checkpoint.mode=selective"]
    every_2nd += ["--activation_checkpoint.selective_ac_option=2"]
    # of three layers, two are on the first stage
    rule = '[[layer_wrap.rules]]\nlayers = "0"\ncheckpoint = "full"\n'
    flags = [write_toml(tmp_path, rule), *PP2, *every_2nd]
    first, second = run_ranks(table_of_plans, 2, flags, str(tmp_path))
    assert first == [(0, "full"), (1, "full")]
    assert second == [(2, "none")]


def train_a_step(flags: list[str], folder: str) -> str:
    try:
        train(flags, folder, num_steps=1, n_dense_layers=2)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("op", "error"),
    [
        # experts are on the second stage alone
        ("torchtitan_ext.grouped_mm", ""),
        ("aten.erfinv", '[layer_wrap] save_ops = "aten.erfinv": matches no operator of the layers'),
    ],
)
def test_op_to_keep_may_be_on_any_stage(tmp_path: Path, op: str, error: str) -> None:
    flags = [*PP2, *OP, f"--layer_wrap.save_ops={op}"]
    for found in run_ranks(train_a_step, 2, flags, str(tmp_path)):
        assert found[:60] == error[:60]


# What a run reports


REPORT = [
    "--training.steps=2",
    "--metrics.log_experts",
    "--validation.enable",
    "--validation.dataset=local",
    "--validation.dataset_path=tests/assets/text",
    "--validation.seq_len=16",
    "--validation.local_batch_size=16",
    "--validation.steps=2",
    "--validation.freq=1",
]


@contextlib.contextmanager
def captured_log() -> Iterator[io.StringIO]:
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    logger = logging.getLogger()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield text
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def train_as_a_user(flags: list[str], folder: str) -> tuple[Run | None, str]:
    """A whole run: its weights, and what this rank's console shows."""
    with captured_log() as text:
        trainer = build_trainer(flags, folder)
        trainer.train()
        return finish(trainer, Run()), text.getvalue()


def report_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_same_report(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected) > 0
    for row, other in zip(found, expected, strict=True):
        assert row.keys() == other.keys()
        for key in ("step", "tokens_seen", "tokens_per_expert", "expert_load_max_over_mean"):
            assert row.get(key) == other.get(key), key
        for key in {"loss", "grad_norm", "validation_loss"} & row.keys():
            assert row[key] == pytest.approx(other[key], rel=1e-5), key


def test_every_rank_reports_what_one_process_does(tmp_path: Path) -> None:
    """Losses, experts' load and validation; and validation changes nothing in training."""
    one, pipeline = tmp_path / "one", tmp_path / "pipeline"
    reference = run_ranks(train_as_a_user, 1, REPORT, str(one))[0][0]
    ranks = run_ranks(train_as_a_user, 2, [*PP2, *FULL, *REPORT], str(pipeline))
    assert_same_report(report_of(pipeline), report_of(one))
    assert len(report_of(one)) == 4
    assert_same(ranks[0][0], reference)
    for _, console in ranks:
        losses = [float(loss) for loss in re.findall(r"loss:\s+(\d+\.\d+)", console)]
        expected = [row.get("loss", row.get("validation_loss")) for row in report_of(one)]
        assert losses == pytest.approx(expected, abs=1e-4)
        assert "not visible" not in console
        assert "Mixed precision" not in console


@pytest.mark.parametrize(
    ("flags", "num_ranks"),
    [
        pytest.param([*PP2_EP2, *FULL], 4, marks=pytest.mark.slow),
        pytest.param([*PP2, *schedule("Interleaved1F1B")], 2, marks=pytest.mark.slow),
    ],
)
def test_validation_loss_is_that_of_one_process(
    tmp_path: Path, flags: list[str], num_ranks: int
) -> None:
    layers = SIX_LAYERS if "Interleaved" in flags[-1] else {}
    losses = [
        run_ranks(validate_between_steps, ranks, [*flags, *REPORT], str(tmp_path), **layers)
        for ranks, flags in ((1, []), (num_ranks, flags))
    ]
    (expected,) = losses[0]
    for found in losses[1]:
        assert found == pytest.approx(expected, rel=1e-5)


def validate_between_steps(flags: list[str], folder: str, **flavor: Any) -> list[float]:
    size = f"--validation.local_batch_size={16 if dist.get_world_size() < 4 else 8}"
    trainer = build_trainer([*flags, size], folder, **flavor)
    losses: list[float] = []
    trainer.metrics_processor.log_validation = lambda loss, step: losses.append(loss)
    for step in steps(trainer, 2):
        trainer.validator.validate(trainer.model_parts, step)
    return losses


def test_resumed_pipeline_goes_on_as_the_uninterrupted_one(tmp_path: Path) -> None:
    """So does one process, from the pipeline's checkpoint."""
    save = ["--checkpoint.enable", "--checkpoint.no-last_save_model_only", "--metrics.log_experts"]
    whole, resumed, alone = (tmp_path / name for name in ("whole", "resumed", "alone"))
    run_ranks(train_as_a_user, 2, [*PP2, *save, "--training.steps=3"], str(whole))
    run_ranks(train_as_a_user, 2, [*PP2, *save, "--training.steps=2"], str(resumed))
    shutil.copytree(resumed, alone)
    run_ranks(train_as_a_user, 2, [*PP2, *save, "--training.steps=3"], str(resumed))
    run_ranks(train_as_a_user, 1, [*save, "--training.steps=3"], str(alone))
    expected = report_of(whole)
    found = report_of(resumed)
    for key in ("step", "loss", "grad_norm", "tokens_per_expert"):
        assert [row[key] for row in found] == [row[key] for row in expected]
    assert_same_report(report_of(alone), expected)


def record(flags: list[str], folder: str) -> StepRecord:
    trainer_flags = [f"--job.config_file={CONFIG}", f"--job.dump_folder={folder}", *flags]
    FLAVORS.add("tiny", tiny_args)
    size = dist.get_world_size()
    config = load_job_config(trainer_flags, world_size=size, device_type="cpu")
    return record_step(for_comparison(config))


def test_first_rank_records_the_step_of_all_stages(tmp_path: Path) -> None:
    expected = run_ranks(record, 1, [], str(tmp_path))[0]
    first, second = run_ranks(record, 2, PP2, str(tmp_path))
    for name in ("gradients", "weights"):
        found, whole = getattr(first, name), getattr(expected, name)
        assert list(found) == list(whole)
        for key, tensor in whole.items():
            torch.testing.assert_close(found[key], tensor, rtol=1e-4, atol=1e-5)
    assert first.counts == second.counts == expected.counts
    assert first.loss == second.loss == pytest.approx(expected.loss, rel=1e-6)
    assert first.unequal_gradients == first.unequal_weights == []
    assert 0 < len(second.weights) < len(first.weights)


def test_stages_without_data_ranks_compute_in_the_asked_precision(
    references: References, tmp_path: Path
) -> None:
    """In one micro-batch, every product is one process's."""
    flags = ["--training.mixed_precision_param=bfloat16", *OPTIMIZERS["SGD"]]
    one_micro_batch = [*schedule("GPipe"), "--parallelism.pipeline_parallel_microbatch_size=8"]
    one = run_ranks(train, 1, flags, str(tmp_path), num_steps=1)[0]
    run = run_ranks(train, 2, [*flags, *PP2, *one_micro_batch], str(tmp_path), num_steps=1)[0]
    assert run.losses == one.losses
    assert run.losses[0] != references.get().losses[0]
