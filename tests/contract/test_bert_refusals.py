"""What BERT's configurations are refused for: one line, before any rank starts."""

from pathlib import Path

import pytest

from tests.contract.test_refusals import DEBUG, refusal_of
from torchtitan_ext.config.load import load_job_config, save_resolved_config

BERT = "--job.config_file=train_configs/bert_tiny.toml"


# Each trains to a finite loss with wrong gradients, if it is let.
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--compile.enable", "--compile.backend=eager"],
            '[compile] backend = "eager": must be inductor or aot_eager where layers are recomput',
        ),
        (
            ["--activation_checkpoint.no-preserve_rng_state"],
            "[activation_checkpoint] preserve_rng_state = false: must be true",
        ),
        (
            ["--activation_checkpoint.mode=memory_budget"],
            '[activation_checkpoint] mode = "memory_budget": must be none, selective or full',
        ),
        (
            [
                "--activation_checkpoint.mode=selective",
                "--activation_checkpoint.selective_ac_option=op",
                "--layer_wrap.save_ops=aten.native_dropout",
            ],
            '[layer_wrap] save_ops = "aten.native_dropout": draws random numbers',
        ),
    ],
)
def test_combination_that_recomputes_other_masks_is_refused(flags: list[str], message: str) -> None:
    assert refusal_of(BERT, *flags).startswith(message)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--zero.stage=4"], "[zero] stage = 4: must be 1, 2 or 3"),
        (
            ["--parallelism.data_parallel_replicate_degree=2"],
            "[zero] stage = 1: has no effect, as every rank holds a replica",
        ),
        (
            ["--parallelism.fsdp_reshard_after_forward=always"],
            '[parallelism] fsdp_reshard_after_forward = "always": must be left out with [zero] sta',
        ),
        (["--parallelism.expert_parallel_degree=2"], "[parallelism] expert_parallel_degree = 2"),
        (["--metrics.log_experts"], "[metrics] log_experts = true: has no effect"),
        (["--training.seq_len=513"], "[training] seq_len = 513: must be at most 512"),
        (
            ["--validation.enable", "--validation.seq_len=1024"],
            "[validation] seq_len = 1024: must be at most 512",
        ),
        (["--mlm.mask_probability=0"], "[mlm] mask_probability = 0.0: must be greater than 0"),
        (["--mlm.mask_probability=1"], "[mlm] mask_probability = 1.0: must be greater than 0"),
        (["--dropout.residual=1"], "[dropout] residual = 1.0: must be at least 0 and below 1"),
        (["--dropout.attention=-0.1"], "[dropout] attention = -0.1: must be at least 0"),
        (
            ["--layer_wrap.match_eager_rng", "--compile.no-enable"],
            "[layer_wrap] match_eager_rng = true: has no effect while nothing is compiled",
        ),
        (
            ["--layer_wrap.match_eager_rng", "--compile.backend=aot_eager"],
            "[layer_wrap] match_eager_rng = true: has no effect unless compile.backend is ",
        ),
        (
            ["--mlm.next_sentence", "--mlm.no-packing"],
            "[mlm] packing = false: has no effect while mlm.next_sentence is true",
        ),
        (["--model.flavor=tny"], '[model] flavor = "tny": must be one of'),
    ],
)
def test_option_that_bert_cannot_honour_is_refused(flags: list[str], message: str) -> None:
    assert refusal_of(BERT, *flags).startswith(message)


@pytest.mark.parametrize("flag", ["--mlm.whole_word", "--dropout.residual=0.2"])
def test_option_of_bert_is_refused_for_another_model(flag: str) -> None:
    assert 'has no effect: model "deepseek_v3" has no use for it' in refusal_of(DEBUG, flag)


@pytest.mark.parametrize("config", [BERT, DEBUG])
def test_resolved_configuration_is_accepted_again(tmp_path: Path, config: str) -> None:
    first = load_job_config([config], world_size=2, device_type="cpu")
    save_resolved_config(first, tmp_path / "config.toml")
    again = load_job_config(
        [f"--job.config_file={tmp_path / 'config.toml'}"], world_size=2, device_type="cpu"
    )
    again.job.config_file = first.job.config_file
    assert again == first
