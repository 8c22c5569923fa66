"""A key that would not be read is refused."""

import pytest

from tests.fake_model import load, refusal_of
from torchtitan_ext.config.effects import ALWAYS_READ, GOVERNED, READ_BY_SOME_MODELS, REFUSED
from torchtitan_ext.config.values import leaf_types

pytestmark = pytest.mark.usefixtures("run_folder")


PRESETS = [
    # key, a value, the switch with its off and on states
    ("checkpoint.interval", "5", "checkpoint.enable", "false", "true"),
    ("checkpoint.folder", '"checkpoint"', "checkpoint.enable", "false", "true"),
    ("validation.freq", "5", "validation.enable", "false", "true"),
    ("profiling.profile_freq", "9", "profiling.enable_profiling", "false", "true"),
    ("profiling.profiler_active", "2", "profiling.enable_profiling", "false", "true"),
    ("compile.components", '["loss"]', "compile.enable", "false", "true"),
    ("compile.backend", '"inductor"', "compile.enable", "false", "true"),
    ("metrics.save_tb_folder", '"tb"', "metrics.enable_tensorboard", "false", "true"),
    ("metrics.save_for_all_ranks", "true", "metrics.enable_tensorboard", "false", "true"),
    ("optimizer.beta1", "0.9", "optimizer.name", '"SGD"', '"Adam"'),
    ("lr_scheduler.decay_type", '"sqrt"', "lr_scheduler.decay_ratio", "0", "0.5"),
    ("training.gc_freq", "5", "training.gc_debug", "true", "false"),
    ("debug.deterministic_warn_only", "true", "debug.deterministic", "false", "true"),
    ("comm.save_traces_folder", '"x"', "comm.trace_buf_size", "0", "10"),
    ("comm.init_timeout_seconds", "5", "comm.mode", '"fake_backend"', '"default"'),
    (
        "activation_checkpoint.selective_ac_option",
        '"2"',
        "activation_checkpoint.mode",
        '"full"',
        '"selective"',
    ),
    ("activation_checkpoint.early_stop", "true", "activation_checkpoint.mode", '"none"', '"full"'),
    (
        "layer_wrap.save_ops",
        '["aten.mm"]',
        "activation_checkpoint.selective_ac_option",
        '"2"',
        '"op"',
    ),
    (
        "training.dataloader.prefetch_factor",
        "2",
        "training.dataloader.num_workers",
        "0",
        "1",
    ),
]


def as_toml_file(**values: str) -> str:
    """TOML text from dotted keys (with __ for the dots) and literal values."""
    lines = []
    for key, value in values.items():
        section, _, name = key.replace("__", ".").rpartition(".")
        lines.append((section, f"{name} = {value}"))
    sections = dict.fromkeys(section for section, _ in lines)
    return "\n".join(
        "\n".join([f"[{section}]", *(line for s, line in lines if s == section)])
        for section in sections
    )


def as_flag(key: str, value: str) -> str:
    return f"--{key}={value.strip('[]').replace(chr(34), '')}"


@pytest.mark.parametrize(("key", "value", "switch", "off", "on"), PRESETS)
def test_governed_key_needs_its_switch(
    key: str, value: str, switch: str, off: str, on: str
) -> None:
    name = key.replace(".", "__")
    only_key = as_toml_file(**{name: value})
    with_off = as_toml_file(**{name: value, switch.replace(".", "__"): off})
    message = f"{key.rpartition('.')[2]} = "

    # Both in one file: a preset, if the switch is turned off and not to another way. By flag
    # there is nothing to keep ready.
    if off.startswith('"'):
        assert "has no effect" in refusal_of(toml=with_off)
    else:
        load(toml=with_off)
    refused = refusal_of(as_flag(key, value), as_flag(switch, off), toml="")
    assert message in refused and "has no effect" in refused
    # The switch in the other place.
    load(as_flag(switch, off), toml=only_key)
    assert "has no effect" in refusal_of(as_flag(key, value), toml=with_off)
    # On, it does not matter where.
    load(as_flag(switch, on), toml=only_key)
    load(as_flag(key, value), as_flag(switch, on), toml="")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("checkpoint.interval", "500", "while checkpoint.enable is false"),
        ("validation.dataset", '"c4_validation"', "while validation.enable is false"),
        ("profiling.save_memory_snapshot_folder", '"x"', "enable_memory_snapshot is false"),
        ("activation_checkpoint.memory_budget", "0.5", "memory budgets are not supported"),
        ("parallelism.pipeline_parallel_schedule", '"1F1B"', "pipeline_parallel_degree is 1"),
        ("parallelism.context_parallel_rotate_method", '"alltoall"', "context_parallel_degree"),
        ("parallelism.disable_loss_parallel", "true", "tensor_parallel_degree is 1"),
        ("quantize.linear.mx.recipe_name", '"x"', 'unless model.converters has "quantize.linear'),
        ("fault_tolerance.group_size", "2", "while fault_tolerance.enable is false"),
        ("memory_estimation.disable_fake_mode", "true", "memory_estimation.enable is false"),
        ("layer_wrap.save_ops", "[]", 'while no layer uses "op" checkpointing'),
    ],
)
def test_governed_key_alone_is_refused(key: str, value: str, message: str) -> None:
    refused = refusal_of(toml=as_toml_file(**{key.replace(".", "__"): value}))
    assert f"{value}: has no effect" in refused
    assert message in refused


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[checkpoint]\nenable = true\ninitial_load_model_only = false", "unless checkpoint.init"),
        ("[checkpoint]\nenable = true\nload_only = true\ninterval = 5", None),
        (
            "[checkpoint]\nenable = true\nlast_save_model_only = false\nexport_dtype = 'float16'",
            None,
        ),
        ("[checkpoint]\nenable = true\nenable_ft_dataloader_checkpoints = true", "fault_tolerance"),
        (
            '[activation_checkpoint]\nmode = "selective"\n[layer_wrap]\nsave_ops = ["x"]',
            'uses "op"',
        ),
    ],
)
def test_second_switch_counts(toml: str, message: str | None) -> None:
    if message is None:
        load(toml=toml)
    else:
        assert message in refusal_of(toml=toml)


def test_layer_rule_turns_switch_on() -> None:
    toml = '[activation_checkpoint]\nmode = "none"\nearly_stop = true\n[compile]\nenable = false\n'
    toml += '[layer_wrap]\nsave_ops = ["x"]\n[[layer_wrap.rules]]\nlayers = "0"\n'
    load("--compile.backend=aot_eager", toml=toml + 'checkpoint = "op"\ncompile = true\n')
    assert "nothing is compiled" in refusal_of(
        "--compile.backend=aot_eager", toml=toml + 'checkpoint = "op"\n'
    )


def test_every_key_is_always_read_governed_or_refused() -> None:
    keys = list(leaf_types(type(load())))
    tables = [ALWAYS_READ, set(GOVERNED), READ_BY_SOME_MODELS, set(REFUSED)]
    places = {key: sum(key in table for table in tables) for key in keys}
    assert {key: n for key, n in places.items() if n != 1} == {}
    assert set().union(*tables) == set(keys)
    assert sum(map(len, tables)) == len(keys)
