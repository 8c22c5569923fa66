"""What pipelines are refused for: one line, before any rank starts."""

from pathlib import Path

import pytest

from tests.contract.test_refusals import DEBUG
from torchtitan_ext.config.error import ConfigError
from torchtitan_ext.config.load import load_job_config, save_resolved_config

BERT = "--job.config_file=train_configs/bert_tiny.toml"
PP = "--parallelism.pipeline_parallel_"
# six layers; the TOML file has two ranks of expert parallelism, a local batch of 4, and full AC
PP2 = [DEBUG, f"{PP}degree=2", "--parallelism.expert_parallel_degree=1"]
PLAIN = [*PP2, "--activation_checkpoint.mode=none"]
COMPILED = ["--compile.enable", "--compile.components=model", "--compile.backend=aot_eager"]
SPLIT = f"{PP}schedule=InterleavedZeroBubble"
MULTI = f"{PP}schedule=PipelineScheduleMulti"


def refusal_of(*flags: str, world_size: int = 2) -> str:
    with pytest.raises(ConfigError) as refused:
        load_job_config(list(flags), world_size=world_size, device_type="cpu")
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize(
    ("flags", "world_size"),
    [
        (PP2, 2),
        ([*PP2, "--parallelism.expert_parallel_degree=2"], 4),
        ([*PLAIN, SPLIT], 2),
        ([*PP2, *COMPILED, SPLIT], 2),
        ([*PLAIN, SPLIT, "--zero.stage=2"], 4),
        ([*PLAIN, SPLIT, "--parallelism.fsdp_reshard_after_forward=never"], 4),
        ([*PP2, f"{PP}schedule=Interleaved1F1B", f"{PP}layers_per_stage=2"], 2),
        ([*PP2, "--validation.enable"], 2),
        ([*PP2, "--zero.stage=1"], 4),
    ],
)
def test_pipeline_is_accepted(flags: list[str], world_size: int) -> None:
    load_job_config(flags, world_size=world_size, device_type="cpu")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            [f"{PP}degree=3"],
            "[parallelism] pipeline_parallel_degree = 3: must divide the number of ranks",
        ),
        (
            [f"{PP}microbatch_size=3"],
            "[parallelism] pipeline_parallel_microbatch_size = 3: must divide [training] local_ba",
        ),
        (
            [f"{PP}schedule=Interleave1F1B"],
            '[parallelism] pipeline_parallel_schedule = "Interleave1F1B": must be one of 1F1B, GP',
        ),
        ([f"{PP}schedule=DualPipeV"], '[parallelism] pipeline_parallel_schedule = "DualPipeV": mu'),
        (
            ["--parallelism.no-pipeline_parallel_expert_parallel_overlap"],
            "[parallelism] pipeline_parallel_expert_parallel_overlap = false: has no effect: it i",
        ),
        (
            [f"{PP}microbatch_size=4"],
            '[parallelism] pipeline_parallel_schedule = "1F1B": needs 2 micro-batches or more, a ',
        ),
        (
            [f"{PP}schedule=Interleaved1F1B", "--training.local_batch_size=5"],
            '[parallelism] pipeline_parallel_schedule = "Interleaved1F1B": needs micro-batches in',
        ),
        (
            [SPLIT, "--training.local_batch_size=5", "--activation_checkpoint.mode=none"],
            '[parallelism] pipeline_parallel_schedule = "InterleavedZeroBubble": needs micro-batc',
        ),
        (
            [SPLIT],
            '[parallelism] pipeline_parallel_schedule = "InterleavedZeroBubble": splits the backw',
        ),
        (
            [f"{PP}schedule=ZBVZeroBubble"],
            '[parallelism] pipeline_parallel_schedule = "ZBVZeroBubble": splits the backward, and',
        ),
        (
            [f"{PP}layers_per_stage=2"],
            "[parallelism] pipeline_parallel_layers_per_stage = 2: gives 4 stages, and 1F1B needs",
        ),
        (
            [f"{PP}schedule=Interleaved1F1B", f"{PP}layers_per_stage=3"],
            "[parallelism] pipeline_parallel_layers_per_stage = 3: gives 3 stages, and Interleave",
        ),
        (
            [f"{PP}schedule=Interleaved1F1B", f"{PP}layers_per_stage=1"],
            "[parallelism] pipeline_parallel_layers_per_stage = 1: gives 8 stages, but the model ",
        ),
        (
            [f"{PP}layers_per_stage=100"],
            "[parallelism] pipeline_parallel_layers_per_stage = 100: gives 1 stage, and 1F1B need",
        ),
        (
            [f"{PP}first_stage_less_layers=8"],
            "[parallelism] pipeline_parallel_first_stage_less_layers = 8: is more than a stage's ",
        ),
        ([MULTI], '[parallelism] pipeline_parallel_schedule = "PipelineScheduleMulti": needs an '),
        (
            [MULTI, f"{PP}schedule_csv=outputs/none.csv"],
            '[parallelism] pipeline_parallel_schedule_csv = "outputs/none.csv": can\'t be read',
        ),
        (
            [f"{PP}schedule_csv=README.md"],
            '[parallelism] pipeline_parallel_schedule_csv = "README.md": needs pipeline_parallel_',
        ),
        (
            ["--validation.enable", "--validation.local_batch_size=6"],
            "[validation] local_batch_size = 6: must be a multiple of the schedule's 4 micro-batc",
        ),
        (
            [f"{PP}schedule=ZBVZeroBubble", "--validation.enable", PLAIN[-1]],
            '[validation] enable = true: not supported with pipeline_parallel_schedule = "ZBVZero',
        ),
    ],
)
def test_pipeline_is_refused(flags: list[str], message: str) -> None:
    assert refusal_of(*PP2, *flags).startswith(message)


@pytest.mark.parametrize("stage", ["1", "2"])
def test_zero_stage_that_a_schedule_ignores_is_refused(stage: str) -> None:
    flags = [f"--zero.stage={stage}", "--training.global_batch_size=16"]
    message = f"[zero] stage = {stage}: must be 3 with pipeline_parallel_degree > 1 and gradient"
    assert refusal_of(*PP2, *flags, world_size=4).startswith(message)


def test_split_backward_of_parameters_that_are_given_up_is_refused() -> None:
    always = "--parallelism.fsdp_reshard_after_forward=always"
    refused = refusal_of(*PLAIN, SPLIT, always, world_size=4)
    assert "torch finds no gradients of parameters that FSDP has given up" in refused


def test_degree_that_is_too_large_for_the_model_is_refused() -> None:
    flags = [f"{PP}degree=8", "--training.local_batch_size=8"]
    refused = refusal_of(DEBUG, "--parallelism.expert_parallel_degree=1", *flags, world_size=8)
    assert refused.startswith("[parallelism] pipeline_parallel_degree = 8: gives 8 stages, but the")


def test_key_of_a_pipeline_without_one_is_refused() -> None:
    refused = refusal_of(DEBUG, f"{PP}schedule=GPipe")
    assert refused.endswith("has no effect while parallelism.pipeline_parallel_degree is 1")


def test_unknown_schedule_is_told_the_nearest() -> None:
    refused = refusal_of(*PP2, f"{PP}schedule=Interleaved1FB")
    assert refused.endswith('(did you mean "Interleaved1F1B"?)')


def test_tied_head_is_refused() -> None:
    message = '[parallelism] pipeline_parallel_degree = 2: not supported by "bert": its decoder'
    assert refusal_of(BERT, f"{PP}degree=2").startswith(message)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ('[["tok_embeddings", "layers.0"], ["layers.2", "norm", "output"]]', "must name every mod"),
        ('[["tok_embeddings"], [LAYERS, "norm", "output"], []]', "has a stage without any module"),
        ('[["tok_embeddings", LAYERS], ["norm"], ["output"]]', "gives 3 stages, and 1F1B needs 1 "),
        ('[["tok_embeddings", LAYERS], ["norm", "output"]]', None),
    ],
)
def test_cut_by_hand_has_to_be_whole(tmp_path: Path, stages: str, message: str | None) -> None:
    layers = ", ".join(f'"layers.{i}"' for i in range(6))
    toml = Path("train_configs/deepseek_v3_debug.toml").read_text()
    cut = f"[parallelism]\nmodule_fqns_per_model_part = {stages.replace('LAYERS', layers)}"
    (tmp_path / "run.toml").write_text(toml.replace("[parallelism]", cut))
    flags = [f"--job.config_file={tmp_path / 'run.toml'}", *PP2[1:]]
    if message is not None:
        assert message in refusal_of(*flags)
    else:
        load_job_config(flags, world_size=2, device_type="cpu")
        refused = refusal_of(*flags, f"{PP}first_stage_less_layers=2")
        assert "first_stage_less_layers = 2: has no effect with" in refused


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1B0\n", None),
        ("0F0,0B0\n", "Schedule has incorrect number of ranks - expected 2, actual 1"),
        ("0F0,0B0\n1F0,1X0\n", "Invalid action string: 1X0"),
        ("0F0,0B0\n1F0,1B0,2F0,2B0\n", "unknown stage 2"),
        ("0B0,0F0\n1F0,1B0\n", "Running Full Backward for stage 0, microbatch 0 without first"),
        ("1F0,1B0\n0F0,0B0\n", "has stage 0 on rank 1; it is on rank 0"),
        ("0F0\n1F0\n", "Invalid backward microbatches for stage 0"),
        ("0F0,0I0,0W0\n1F0,1B0\n", "splits the backward, and torch recomputes an eager layer"),
    ],
)
def test_schedule_of_a_file_is_checked(tmp_path: Path, text: str, message: str | None) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text(text)
    flags = [*PP2, f"{PP}schedule=PipelineScheduleSingle", f"{PP}schedule_csv={path}"]
    flags += ["--training.local_batch_size=1"]
    if message is None:
        load_job_config(flags, world_size=2, device_type="cpu")
        refused = refusal_of(*flags, "--routing.record")
        assert refused.startswith("[routing] record = true: not supported with pipeline_parallel_s")
    else:
        assert f'pipeline_parallel_schedule_csv = "{path}": ' in refusal_of(*flags)
        assert message in refusal_of(*flags)


def test_schedule_whose_ranks_wait_for_one_another_is_refused(tmp_path: Path) -> None:
    """Each rank's second stage is to run before the first, which the other rank waits for."""
    path = tmp_path / "schedule.csv"
    path.write_text("2F0,0F0,2B0,0B0\n3F0,1F0,3B0,1B0\n")
    flags = [*PP2, MULTI, f"{PP}schedule_csv={path}", "--training.local_batch_size=1"]
    assert refusal_of(*flags).endswith("its ranks would wait for one another forever")


def test_saved_config_of_a_pipeline_is_accepted(tmp_path: Path) -> None:
    config = load_job_config([*PLAIN, SPLIT], world_size=2, device_type="cpu")
    save_resolved_config(config, tmp_path / "config.toml")
    flags = [f"--job.config_file={tmp_path / 'config.toml'}"]
    again = load_job_config(flags, world_size=2, device_type="cpu")
    assert again.parallelism == config.parallelism
