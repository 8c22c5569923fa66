"""Refusals that need the real model, tokenizer and text: one line, before any rank starts."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from torchtitan_ext import check_config
from torchtitan_ext.config.error import ConfigError
from torchtitan_ext.config.load import load_job_config

DEBUG = "--job.config_file=train_configs/deepseek_v3_debug.toml"
DENSE = "--job.config_file=train_configs/deepseek_v3_debug_dense.toml"


def refusal_of(*flags: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load_job_config(list(flags), world_size=2, device_type="cpu")
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([DEBUG, "--parallelism.expert_parallel_degree=1", "--metrics.log_experts"], None),
        ([DENSE, "--metrics.log_experts"], "[metrics] log_experts = true: has no effect"),
        ([DENSE, "--debug.moe_force_load_balance"], "[debug] moe_force_load_balance = true: has"),
        ([DENSE, "--routing.record"], "[routing] record = true: has no effect, as flavor"),
        ([DENSE, "--routing.preset=balanced"], '[routing] preset = "balanced": has no effect'),
        ([DENSE, "--routing.replay=x"], '[routing] replay = "x": has no effect'),
        ([DENSE, "--parallelism.expert_parallel_degree=2"], "must be 1, as the model has no exp"),
        (
            [
                DEBUG,
                "--activation_checkpoint.mode=selective",
                "--activation_checkpoint.selective_ac_option=9",
            ],
            '[activation_checkpoint] selective_ac_option = "9": checkpoints no layer',
        ),
        ([DEBUG, "--activation_checkpoint.debug"], "[activation_checkpoint] debug = true: not su"),
    ],
)
def test_option_without_effect_on_the_model_is_refused(
    flags: list[str], message: str | None
) -> None:
    if message is None:
        load_job_config(flags, world_size=2, device_type="cpu")
    else:
        assert message in refusal_of(*flags)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("short.txt", b"Too short.", "tokens found, but one sequence on every rank takes 514"),
        ("empty.txt", b"", "tokens found"),
        ("latin.txt", b"caf\xe9", "utf-8"),
        ("bad.jsonl", b'{"text": "fine"}\n{"text": \n', "line 2 is not valid JSON"),
        ("other.jsonl", b'{"body": "x"}\n', 'line 1 has no "text" field'),
        ("junk.parquet", b"not a parquet file", "arquet"),
    ],
)
def test_text_that_cannot_be_trained_on_is_refused(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    path = f"--training.dataset_path={tmp_path / name}"
    refused = refusal_of(DEBUG, "--training.dataset=local", path)
    assert refused.startswith("[training] dataset")
    assert message in refused


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--lr_scheduler.total_steps=5", "--lr_scheduler.decay_ratio=0.5"],
            "[lr_scheduler] total_steps = 5: must be at least [training] steps = 200",
        ),
        (
            ["--checkpoint.enable", "--checkpoint.initial_load_path=tests/assets"],
            '[checkpoint] initial_load_path = "tests/assets": holds no checkpoint',
        ),
        (
            ["--checkpoint.enable", "--checkpoint.initial_load_in_hf"],
            "[checkpoint] initial_load_in_hf = true: no .safetensors in",
        ),
    ],
)
def test_run_that_would_end_in_a_crash_is_refused(
    tmp_path: Path, flags: list[str], message: str
) -> None:
    dump_folder = f"--job.dump_folder={tmp_path}"
    assert refusal_of(DEBUG, dump_folder, *flags).startswith(message)


def test_fake_ranks_are_started_by_their_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [DEBUG, "--comm.mode=fake_backend"]
    monkeypatch.setenv("NGPU", "2")
    monkeypatch.setenv("COMM_MODE", "fake_backend")
    assert check_config.main(flags) == 0
    monkeypatch.delenv("COMM_MODE")
    assert check_config.main(flags) == 2
    assert capsys.readouterr().err.startswith('error: [comm] mode = "fake_backend": must be set by')


def test_tokenizer_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    refused = refusal_of(DEBUG, f"--model.hf_assets_path={tmp_path}")
    assert refused.startswith(f'[model] hf_assets_path = "{tmp_path}": the tokenizer can')


def test_key_of_another_way_is_no_preset(tmp_path: Path) -> None:
    toml = Path("train_configs/deepseek_v3_debug.toml").read_text()
    (tmp_path / "run.toml").write_text(toml + '\n[layer_wrap]\nsave_ops = ["aten.silu"]\n')
    refused = refusal_of(f"--job.config_file={tmp_path / 'run.toml'}")
    assert refused.startswith("[layer_wrap] save_ops = ")
    assert "has no effect" in refused


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """A dump folder with a record of two steps of the debug model's shape."""
    folder = tmp_path / "recorded" / "routing"
    for step in (1, 2):
        (folder / f"step-{step}").mkdir(parents=True)
        save_file({"number": torch.arange(8)}, folder / f"step-{step}" / "rank-0.safetensors")
    shape = {"moe_layers": 5, "num_experts": 8, "top_k": 3, "seq_len": 256}
    (folder / "routing.json").write_text(json.dumps(shape | {"global_batch_size": 8}))
    return folder.parent


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--training.steps=2"], None),
        (["--training.steps=3"], "step 3 was not recorded, or not all of it (steps 1 to 2 were)"),
        (["--training.seq_len=128"], "was recorded with seq_len = 256, and this run has 128"),
        (
            ["--training.global_batch_size=16"],
            "was recorded with global_batch_size = 8, and this run has 16",
        ),
        (["--model.flavor=16B"], "was recorded with moe_layers = 5, and this run has 26"),
    ],
)
def test_record_that_does_not_fit_the_run_is_refused(
    record: Path, flags: list[str], message: str | None
) -> None:
    args = [DEBUG, f"--routing.replay={record}", "--training.local_batch_size=4", *flags]
    if message is None:
        load_job_config(args, world_size=2, device_type="cpu")
    else:
        assert refusal_of(*args) == f'[routing] replay = "{record}": {message}'


def test_record_that_was_interrupted_is_refused(record: Path) -> None:
    file = record / "routing" / "step-2" / "rank-0.safetensors"
    save_file({"number": torch.arange(4)}, file)
    args = [DEBUG, f"--routing.replay={record}", "--training.local_batch_size=4"]
    assert "step 2 was not recorded, or not all of it (steps 1 to 1 were)" in refusal_of(*args)
    file.unlink()
    assert "step 2 was not recorded, or not all of it (steps 1 to 1 were)" in refusal_of(*args)


def test_record_is_not_replayed_over_itself(record: Path) -> None:
    folders = [f"--routing.replay={record}", f"--job.dump_folder={record}/../{record.name}"]
    refused = refusal_of(DEBUG, *folders, "--routing.record", "--training.local_batch_size=4")
    assert refused.startswith(f'[routing] replay = "{record}": is this run\'s own dump folder')


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--routing.replay=outputs/none"],
            "no record of routing: outputs/none/routing/routing.js",
        ),
        (["--routing.preset=hot"], 'preset = "hot": must be one of none, balanced, hot_expert'),
        (
            ["--routing.preset=hot_rank", "--parallelism.expert_parallel_degree=1"],
            'preset = "hot_rank": needs [parallelism] expert_parallel_degree of at least 2',
        ),
        (["--routing.preset=bursts", "--routing.replay=x"], 'preset = "bursts": must be none with'),
        (
            ["--routing.preset=bursts", "--debug.moe_force_load_balance"],
            "[debug] moe_force_load_balance = true: is another name of preset = ",
        ),
    ],
)
def test_routing_that_cannot_be_is_refused(flags: list[str], message: str) -> None:
    assert message in refusal_of(DEBUG, *flags)


TP, CP = "--parallelism.tensor_parallel_degree", "--parallelism.context_parallel_degree"
NO_EP = "--parallelism.expert_parallel_degree=1"
ETP = "--parallelism.expert_tensor_parallel_degree"
EP, PP = "--parallelism.expert_parallel_degree", "--parallelism.pipeline_parallel_degree"
DPR = "--parallelism.data_parallel_replicate_degree"
RESHARD = "--parallelism.fsdp_reshard_after_forward"
LONG, SHORT = "--validation.seq_len=8192", "--validation.seq_len=512"
ALLTOALL = "--parallelism.context_parallel_rotate_method=alltoall"


@pytest.mark.parametrize(
    ("num_ranks", "flags", "message"),
    [
        (4, [f"{TP}=2", f"{CP}=2", ALLTOALL], None),
        (4, [f"{TP}=2", f"{ETP}=2"], None),
        (4, [f"{TP}=4", f"{ETP}=2"], "expert_tensor_parallel_degree = 2: must be 1 or tensor_par"),
        (4, [f"{TP}=2", f"{ETP}=2", NO_EP], "expert_tensor_parallel_degree = 2: has no effect whi"),
        (
            32,
            [f"{TP}=32"],
            "tensor_parallel_degree = 32: must divide the model's 16 attention heads",
        ),
        (
            2,
            [f"{CP}=2", "--training.seq_len=258"],
            "[training] seq_len = 258: must be a multiple of 4 with context_parallel_degree = 2",
        ),
        (
            4,
            [f"{TP}=4", "--training.seq_len=3"],
            "[training] seq_len = 3: must be at least 4, a token for each rank",
        ),
        (
            6,
            [f"{CP}=3", ALLTOALL, "--training.seq_len=258"],
            "context_parallel_degree = 3 must divide the 16 heads of a rank",
        ),
        # What other degrees take is said, and only what would be accepted is offered.
        (4, [f"{TP}=4", NO_EP, f"{DPR}=2"], "1 on 4 ranks, of which other degrees take 4"),
        (4, [f"{TP}=2", f"{ETP}=2", f"{EP}=4"], "after expert_tensor_parallel_degree = 2: 2"),
        (2, [f"{TP}=2", f"{ETP}=2"], "degree = 2: they leave none for a degree above 1"),
        (2, [f"{PP}=2"], "must be 1 on the 1 rank of one stage of a replica"),
        (2, [f"{PP}=2", NO_EP, f"{RESHARD}=never"], "has no effect, as no parameter is sharded"),
        (
            4,
            [f"{CP}=2", f"{DPR}=2", "--zero.stage=1", "--validation.enable", LONG],
            "[validation] seq_len = 8192: must be at most 4096 with [training] seq_len = 256",
        ),
        (4, [f"{CP}=2", f"{DPR}=2", "--zero.stage=1", "--validation.enable", SHORT], None),
        (2, [ALLTOALL], "has no effect while parallelism.context_parallel_degree is 1"),
    ],
)
def test_split_of_a_sequence_or_of_weights_that_cannot_be_is_refused(
    num_ranks: int, flags: list[str], message: str | None
) -> None:
    if message is None:
        load_job_config([DEBUG, *flags], world_size=num_ranks, device_type="cpu")
        return
    with pytest.raises(ConfigError) as refused:
        load_job_config([DEBUG, *flags], world_size=num_ranks, device_type="cpu")
    assert message in str(refused.value)
