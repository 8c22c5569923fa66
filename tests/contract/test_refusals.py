"""Refusals that need the real model, tokenizer and text: one line, before any rank starts."""

from pathlib import Path

import pytest

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
