"""The matrix of what goes together is what configurations are refused by."""

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import torchtitan_ext.device  # noqa: F401  isort:skip  comes before any other part of torchtitan
from torchtitan_ext.config.error import ConfigError
from torchtitan_ext.distributed.support import CONDITIONS, FEATURES, UNSUPPORTED, check_supported

OFF: dict[str, Any] = {"checkpoint": "none", "zero": 3, "preset": "none", "fake_backend": "default"}
ON: dict[str, Any] = {"checkpoint": "full", "zero": 1, "preset": "bursts", "replay": "x"}
ON |= {"fake_backend": "fake_backend"}


def config_with(*features: str) -> Any:
    """A configuration that asks for these features alone."""
    config: dict[str, Any] = {"model": SimpleNamespace(name="some")}
    for name, feature in FEATURES.items():
        is_degree = feature.key.startswith("parallelism.")
        value = ON.get(name, 2 if is_degree else True)
        if name not in features:
            value = OFF.get(name, None if name == "replay" else 1 if is_degree else False)
        section, _, key = feature.key.partition(".")
        setattr(config.setdefault(section, SimpleNamespace()), key, value)
    return SimpleNamespace(**config)


@pytest.mark.parametrize("pair", UNSUPPORTED, ids="-".join)
def test_pair_of_the_table_is_refused(pair: tuple[str, str]) -> None:
    blamed, other = pair
    for alone in pair:
        check_supported(config_with(alone), {})
    with pytest.raises(ConfigError) as refused:
        check_supported(config_with(*pair), {})
    section, _, key = FEATURES[blamed].key.partition(".")
    assert str(refused.value).startswith(f"[{section}] {key} = ")
    assert FEATURES[other].key.partition(".")[2] in str(refused.value)
    assert str(refused.value).endswith(UNSUPPORTED[pair])


def test_feature_that_the_model_cannot_have_is_refused() -> None:
    check_supported(config_with("tp"), {"ep": "no experts"})
    with pytest.raises(ConfigError, match=r'not supported by "some": no experts'):
        check_supported(config_with("ep"), {"ep": "no experts"})


def test_matrix_shows_every_pair_and_reason() -> None:
    done = subprocess.run(
        [sys.executable, "scripts/show_plan.py", "--support"],
        capture_output=True,
        text=True,
        check=True,
    )
    summary = json.loads(done.stdout.splitlines()[-1])
    pairs = {(pair["a"], pair["b"]): pair["reason"] for pair in summary["refused"]}
    assert UNSUPPORTED.items() <= pairs.items()
    assert ("model bert", "pp") in pairs
    assert {(p["a"], p["b"]) for p in summary["partly"]} == set(CONDITIONS)
    lines = [line.split("  ")[0] for line in done.stdout.splitlines()]
    assert {*FEATURES, "model bert", "model deepseek_v3"} <= set(lines)
    shown = " ".join(" ".join(done.stdout.splitlines()[:-1]).split())
    assert all(reason in shown for reason in {*pairs.values(), *CONDITIONS.values()})
