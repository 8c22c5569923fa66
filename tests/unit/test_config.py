"""From TOML and flags to a checked configuration, and what each refusal says."""

import sys
import types
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.fake_model import load, refusal_of
from torchtitan_ext.config import LayerRule
from torchtitan_ext.config.error import ConfigError
from torchtitan_ext.config.load import load_job_config, save_resolved_config
from torchtitan_ext.config.values import REPOSITORY_ROOT, get_value

# isort: split
from torchtitan.config import ConfigManager

pytestmark = pytest.mark.usefixtures("run_folder")


# --- names and types


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        (["--training.steps=7"], "training.steps", 7),
        (["--training.steps", "7"], "training.steps", 7),
        (["--training.seq-len=64"], "training.seq_len", 64),
        (["--optimizer.lr=1e-3"], "optimizer.lr", 1e-3),
        (["--optimizer.lr=1"], "optimizer.lr", 1.0),
        (["--training.max_norm=inf"], "training.max_norm", float("inf")),
        (["--compile.enable"], "compile.enable", True),
        (["--compile.enable=true"], "compile.enable", True),
        (["--compile.enable=True"], "compile.enable", True),
        (["--compile.enable", "false"], "compile.enable", False),
        (["--compile.enable", "--compile.no-enable"], "compile.enable", False),
        (["--compile.no_enable"], "compile.enable", False),
        (["--compile.enable=false"], "compile.enable", False),
        (["--debug.seed=None"], "debug.seed", None),
        (["--debug.seed", "3"], "debug.seed", 3),
        (
            ["--parallelism.data-parallel-shard-degree", "-1"],
            "parallelism.data_parallel_shard_degree",
            -1,
        ),
        (["--job.description=12"], "job.description", "12"),
        (["--job.description=a=b"], "job.description", "a=b"),
        (
            ["--checkpoint.enable", "--checkpoint.exclude_from_loading=optimizer,dataloader"],
            "checkpoint.exclude_from_loading",
            ["optimizer", "dataloader"],
        ),
        (["--metrics.log_experts"], "metrics.log_experts", True),
        (["--training.dataloader.num_workers=2"], "training.dataloader.num_workers", 2),
        (["--training.steps=1", "--training.steps=2"], "training.steps", 2),
    ],
)
def test_flag_form_sets_value(flags: list[str], key: str, value: object) -> None:
    assert get_value(load(*flags), key) == value


def test_flags_agree_with_torchtitan() -> None:
    flags = ["--training.steps=7", "--optimizer.lr", "3", "--compile.enable", "--debug.seed=None"]
    flags += ["--training.max_norm=2", "--job.no-print-config", "--model.name=fake"]
    flags += ["--compile.components=loss", "--lr-scheduler.decay_ratio=0.5"]
    flags += ["--model.flavor=small", "--model.hf_assets_path=tokenizer"]
    flags += ["--experimental.custom_import=fake_models"]
    flags += ["--job.custom_config_module=torchtitan_ext.config"]
    ours = load_job_config(flags, world_size=1, device_type="cpu")
    assert asdict(ours) == asdict(ConfigManager().parse_args(flags))


def test_toml_agrees_with_torchtitan() -> None:
    toml = "[training]\nsteps = 5\n[optimizer]\nlr = 1\n[training.dataloader]\nnum_workers = 1\n"
    toml += '[job]\ncustom_config_module = "torchtitan_ext.config"\n'
    toml += '[[layer_wrap.rules]]\nlayers = "0"\ncheckpoint = "full"\n'
    toml += '[[layer_wrap.rules]]\nlayers = "moe"\ncompile = true\n'
    ours = load(toml=toml)
    theirs = ConfigManager().parse_args(["--job.config_file=run.toml"])
    assert asdict(ours) == asdict(theirs)
    assert ours.layer_wrap.rules == theirs.layer_wrap.rules
    assert ours.layer_wrap.rules[1] == LayerRule("moe", compile=True)


def test_modules_are_set_when_nobody_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "models", types.ModuleType("models"))
    args = ["--model.name=fake", "--model.flavor=small", "--model.hf_assets_path=tokenizer"]
    config = load_job_config(args, world_size=1, device_type="cpu")
    assert config.job.custom_config_module == "torchtitan_ext.config"
    assert config.experimental.custom_import == "models"


def test_help_is_tyros(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        load_job_config(["--help"], world_size=1, device_type="cpu")
    assert done.value.code == 0
    assert "--metrics.log-experts" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[trainning]\nsteps = 5", "[trainning]: unknown section (did you mean [training]?)"),
        (
            "[training]\nstepz = 5",
            '[training] stepz = 5: unknown key (did you mean "steps"?)',
        ),
        ("[compile]\nseq_len = 5", "[compile] seq_len = 5: unknown key (did you mean seq_len of"),
        (
            "[training.dataloadr]\nnum_workers = 1",
            "[training.dataloadr]: unknown section (did you mean [training.dataloader]?)",
        ),
        ("steps = 5", "steps = 5: must be inside a section (did you mean [training]?)"),
        ("compile = true", "compile = true: must be a section, [compile]"),
        ('[training]\nsteps = "many"', '[training] steps = "many": must be an integer'),
        ("[training]\nsteps = true", "[training] steps = true: must be an integer"),
        ("[training]\nsteps = 1.5", "[training] steps = 1.5: must be an integer"),
        ("[optimizer]\nlr = true", "[optimizer] lr = true: must be a number"),
        ('[compile]\nenable = "yes"', '[compile] enable = "yes": must be true or false'),
        ("[compile]\nenable = 1", "[compile] enable = 1: must be true or false"),
        ("[job]\ndescription = 1", "[job] description = 1: must be a string"),
        (
            '[training]\ndtype = "bfloat"',
            'dtype = "bfloat": must be one of bfloat16, float32 (did you mean "bfloat16"?)',
        ),
        ('[compile]\ncomponents = "loss"', 'components = "loss": must be a list of strings'),
        ("[compile]\ncomponents = [1]", "components = [1]: must be a list of strings"),
        ('[debug]\nseed = "x"', '[debug] seed = "x": must be an integer'),
        ('[training]\nmax_norm = "x"', '[training] max_norm = "x": must be a number'),
        ("[layer_wrap]\nrules = 3", "[layer_wrap] rules = 3: must be a list"),
        (
            '[[layer_wrap.rules]]\nlayers = "0"\ncheckpoint = "ful"',
            '[layer_wrap] rules[0].checkpoint = "ful": must be one of none, full, op',
        ),
        ('[job]\nconfig_file = "x"', "has no effect in a TOML file"),
        ('[job]\ncustom_config_module = "nowhere"', 'custom_config_module = "nowhere": no such'),
        ('[job]\ncustom_config_module = "json"', "must have a dataclass JobConfig"),
    ],
)
def test_toml_mistake_is_named(toml: str, message: str) -> None:
    assert message in refusal_of(toml=toml + "\n")


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--trainning.steps=5", "[trainning]: unknown section (did you mean [training]?)"),
        ("--training.stepz=5", '[training] stepz = 5: unknown key (did you mean "steps"?)'),
        ("--steps=5", "steps = 5: must be inside a section (did you mean [training]?)"),
        ("--training.steps=many", '[training] steps = "many": must be an integer'),
        ("--training.steps=1.5", "[training] steps = 1.5: must be an integer"),
        ("--training.steps", "[training] steps: needs a value"),
        ("--training.dtype=bfloat", 'dtype = "bfloat": must be one of bfloat16, float32 (did'),
        ("--compile.enable=yes", '[compile] enable = "yes": must be true or false'),
        ("--compile.no-enable=true", "takes no value; write --compile.enable=true"),
        ("--layer_wrap.rules=0", "cannot be a flag: write it in the TOML file"),
        ("--optimizer.lr=fast", '[optimizer] lr = "fast": must be a number'),
        ("training.steps=5", 'unexpected argument "training.steps=5"'),
    ],
)
def test_flag_mistake_is_named(flag: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_job_config([flag], world_size=1, device_type="cpu")
    assert message in str(refused.value)


def test_toml_file_missing_is_named() -> None:
    assert refusal_of("--job.config-file=x.toml") == '[job] config_file = "x.toml": no such file'


def test_toml_syntax_error_names_line() -> None:
    message = refusal_of(toml="[training]\nsteps = \n")
    assert message.startswith('[job] config_file = "run.toml": not valid TOML: ')
    assert "line 2" in message


# --- values


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--training.steps=0"], "[training] steps = 0: must be at least 1"),
        (["--training.seq_len=0"], "[training] seq_len = 0: must be at least 1"),
        (["--training.local_batch_size=-2"], "local_batch_size = -2: must be at least 1"),
        (["--training.global_batch_size=0"], "global_batch_size = 0: must be -1 or at least 1"),
        (["--training.max_norm=0"], "max_norm = 0: must be greater than 0"),
        (["--training.max_norm=nan"], "max_norm = nan: must be greater than 0"),
        (["--training.gc_freq=0"], "gc_freq = 0: must be at least 1"),
        (["--metrics.log_freq=0"], "[metrics] log_freq = 0: must be at least 1"),
        (["--optimizer.lr=0"], "[optimizer] lr = 0.0: must be greater than 0"),
        (["--optimizer.lr=inf"], "[optimizer] lr = inf: must be greater than 0"),
        (["--optimizer.beta1=1"], "beta1 = 1.0: must be at least 0 and below 1"),
        (["--optimizer.weight_decay=-1"], "weight_decay = -1.0: must be at least 0"),
        (["--optimizer.name=adamw"], "must be one of Adam, AdamW, SGD (did you mean"),
        (["--lr_scheduler.warmup_steps=-1"], "warmup_steps = -1: must be at least 0"),
        (["--lr_scheduler.decay_ratio=2"], "decay_ratio = 2: must be between 0 and 1"),
        (["--debug.seed=-1"], "[debug] seed = -1: must be at least 0"),
        (["--job.dump_folder="], '[job] dump_folder = "": must be a name, not empty'),
        (["--job.dump_folder=run.toml/x"], "is not a folder"),
        (["--model.converters=float8"], "must be a list of quantize.linear.float8"),
        (["--model.converters=quantize.linear.float8"], "not supported yet"),
        (["--metrics.enable_wandb"], "[metrics] enable_wandb = true: needs the package wandb"),
        (["--compile.enable", "--compile.backend=inductr"], '(did you mean "inductor"?)'),
        (["--compile.enable", "--compile.backend=eager"], "must be inductor or aot_eager where"),
        (["--compile.enable", "--compile.components=optim"], "must be a list of model, loss"),
        (
            ["--profiling.enable_profiling", "--profiling.profile_freq=3"],
            "profile_freq = 3: must be at least profiler_warmup + profiler_active = 4",
        ),
        (["--checkpoint.enable", "--checkpoint.interval=0"], "interval = 0: must be at least 1"),
        (["--checkpoint.enable", "--checkpoint.keep_latest_k=1"], "keep_latest_k = 1: must be 0"),
        (["--checkpoint.enable", "--checkpoint.initial_load_path=x"], '"x": no such folder'),
        (["--checkpoint.enable", "--checkpoint.exclude_from_loading=optim"], "must be a list of"),
        (["--checkpoint.enable", "--checkpoint.create_seed_checkpoint"], "needs 1 rank, not 4"),
        (
            [
                "--checkpoint.enable",
                "--checkpoint.initial_load_in_hf",
                "--checkpoint.no_initial_load_model_only",
            ],
            "initial_load_model_only = false: must be true with initial_load_in_hf",
        ),
        (["--validation.enable", "--validation.steps=0"], "steps = 0: must be -1 or at least 1"),
        (["--validation.enable", "--validation.freq=0"], "[validation] freq = 0: must be at"),
        (["--activation_checkpoint.selective_ac_option=0"], 'must be "op", or a positive integer'),
        (["--activation_checkpoint.selective_ac_option=ops"], '"ops": must be "op", or'),
        (["--activation_checkpoint.mode=memory_budget"], "nothing pins its random numbers"),
        (["--activation_checkpoint.determinism_check=x"], "must be one of default, none"),
        (["--activation_checkpoint.no_preserve_rng_state"], "draws other dropout masks"),
        (["--optimizer.early_step_in_backward"], "training.max_norm has not clipped yet"),
        (["--parallelism.pipeline_parallel_degree=3"], "pipeline_parallel_degree = 3: must divide"),
        (["--parallelism.tensor_parallel_degree=3"], "tensor_parallel_degree = 3: must divide"),
        (["--parallelism.expert_tensor_parallel_degree=2"], "must be 1 or tensor_parallel_degree"),
        (["--parallelism.disable_loss_parallel"], "while parallelism.tensor_parallel_degree is 1"),
        (
            ["--parallelism.context_parallel_load_balancer=ptrr"],
            "must be headtail: the other balancers belong to",
        ),
        (["--parallelism.enable_async_tensor_parallel"], "= true: not supported yet; use false"),
        (["--parallelism.expert_parallel_comm_backend=deepep"], 'yet; use "standard"'),
        (["--fault_tolerance.enable"], "[fault_tolerance] enable = true: not supported"),
        (["--memory_estimation.enable"], "[memory_estimation] enable = true: not supported"),
        (["--comm.mode=local_tensor"], "must be default or fake_backend: local_tensor"),
        (["--model.tokenizer_path=x"], "deprecated; use model.hf_assets_path"),
        (["--experimental.custom_args_module=x"], "deprecated; use job.custom_config_module"),
    ],
)
def test_value_out_of_range_is_refused(flags: list[str], message: str) -> None:
    assert message in refusal_of(*flags)


@pytest.mark.parametrize(
    "flags",
    [
        ["--training.max_norm=0.1", "--optimizer.name=SGD"],
        ["--checkpoint.enable", "--checkpoint.keep_latest_k=0"],
        ["--activation_checkpoint.selective_ac_option=op"],
        ["--parallelism.tensor_parallel_degree=1"],
        ["--checkpoint.enable", "--checkpoint.last_save_in_hf"],
        ["--compile.enable", "--compile.backend=eager", "--activation_checkpoint.mode=none"],
        ["--validation.enable", "--validation.steps=-1"],
        ["--comm.mode=fake_backend"],
    ],
)
def test_value_at_the_edge_is_accepted(flags: list[str]) -> None:
    load(*flags)


# --- the model, its files and its data


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model.name=fak"], '[model] name = "fak": must be one of '),
        (["--model.name=fak"], '(did you mean "fake"?)'),
        (["--model.name=llama3"], '[model] name = "llama3": must be one of '),
        (["--model.flavor=smal"], 'must be one of small (did you mean "small"?)'),
        (["--experimental.custom_import="], 'custom_import = "": must be a name, not empty'),
        (["--experimental.custom_import=nowhere"], 'custom_import = "nowhere": no such module'),
        (["--model.hf_assets_path=nowhere"], '[model] hf_assets_path = "nowhere": no such folder'),
        (["--model.hf_assets_path=."], "has no tokenizer: needs tokenizer.json"),
        (["--training.dataset=missing"], '[training] dataset = "missing": no such corpus'),
        (["--validation.enable", "--validation.dataset=missing"], "[validation] dataset = "),
        (["--model.name=fake_bare", "--validation.enable"], "fake_bare has no validator"),
        (
            ["--model.name=fake_bare", "--checkpoint.enable", "--checkpoint.last_save_in_hf"],
            "fake_bare has no conversion",
        ),
    ],
)
def test_model_mistake_is_named(flags: list[str], message: str) -> None:
    assert message in refusal_of(*flags)


def test_spec_check_config_is_called() -> None:
    assert "fewer than 64 ranks" in refusal_of(world_size=64)


def test_disabled_validation_data_is_not_checked() -> None:
    load(toml='[validation]\nenable = false\ndataset = "missing"')


def test_missing_input_path_falls_back_to_repository_root(tmp_path: Path) -> None:
    inside = next(path for path in REPOSITORY_ROOT.iterdir() if path.is_dir())
    message = refusal_of(f"--model.hf_assets_path={inside.name}")
    assert f'"{inside}": has no tokenizer' in message
    # One in the current folder comes first.
    (tmp_path / inside.name).mkdir()
    (tmp_path / inside.name / "tokenizer.json").write_text("{}")
    config = load(f"--model.hf_assets_path={inside.name}")
    assert config.model.hf_assets_path == inside.name


# --- the resolved configuration


@pytest.mark.parametrize(
    ("flags", "toml"),
    [
        ([], ""),
        (["--training.steps=3", "--optimizer.lr=1e-5", "--job.description=a \\ \"b\" 'ü'"], ""),
        (["--optimizer.name=SGD", "--training.max_norm=inf", "--debug.seed=1"], ""),
        (["--checkpoint.enable", "--checkpoint.interval=5", "--compile.enable"], ""),
        (["--checkpoint.no_enable"], "[checkpoint]\nenable = true\ninterval = 5"),
        ([], "[checkpoint]\nenable = true\nload_only = true\ninterval = 5"),
        ([], "[profiling]\nenable_profiling = false\nprofile_freq = 77"),
        (
            ["--activation_checkpoint.mode=full"],
            "[[layer_wrap.rules]]\nlayers = '0-3'\ncheckpoint = 'op'\n"
            "[[layer_wrap.rules]]\nlayers = 'moe'\ncompile = false\n",
        ),
        (["--training.dataloader.num_workers=2"], "[training.dataloader]\nprefetch_factor = 3"),
        (["--comm.mode=fake_backend"], ""),
    ],
)
def test_resolved_config_loads_to_the_same(flags: list[str], toml: str) -> None:
    config = load(*flags, toml=toml)
    save_resolved_config(config, "config.toml")
    args = ["--job.config_file=config.toml"]
    again = load_job_config(args, world_size=4, device_type="cpu")
    assert again.job.config_file == "config.toml"
    again.job.config_file = config.job.config_file
    assert again == config


def test_resolved_config_leaves_out_what_a_flag_has_put_out_of_effect() -> None:
    config = load("--activation_checkpoint.mode=none", toml="[layer_wrap]\nsave_ops = ['x']")
    save_resolved_config(config, "saved.toml")
    saved = load_job_config(["--job.config_file=saved.toml"], world_size=4, device_type="cpu")
    assert config.layer_wrap.save_ops == ["x"]
    assert saved.layer_wrap.save_ops == []
