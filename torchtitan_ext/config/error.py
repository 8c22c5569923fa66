"""The one way a configuration is refused: a line that names the key, its value and the rule."""

import difflib
import json
from collections.abc import Iterable
from typing import Any


class ConfigError(ValueError):
    """A configuration that cannot be run as written; ``str()`` is one line for the user."""


def refusal(key: str, value: Any, rule: str) -> ConfigError:
    """Return the error ``[section] name = value: rule`` for a dotted ``key`` (to be raised)."""
    section, _, name = key.rpartition(".")
    return ConfigError(f"[{section}] {name} = {as_toml(value)}: {rule}")


def as_toml(value: Any) -> str:
    """Write a scalar or a list the way a TOML file spells it; None, which TOML lacks, as none."""
    if value is None:
        return "none"
    if isinstance(value, list):
        return f"[{', '.join(as_toml(item) for item in value)}]"
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False, default=str)


def did_you_mean(name: Any, choices: Iterable[str], form: str = '"{}"') -> str:
    """Return `` (did you mean ...?)`` with the choice nearest to ``name``, or an empty string."""
    nearest = difflib.get_close_matches(str(name), list(choices), n=1)
    return f" (did you mean {form.format(nearest[0])}?)" if nearest else ""


def listed(items: Iterable[Any]) -> str:
    """Return the items as prose: ``1, 2 or 4``."""
    *first, last = map(str, items)
    return f"{', '.join(first)} or {last}" if first else last


def counted(number: int, noun: str) -> str:
    """Return a number of things as prose: ``1 rank``, ``2 ranks``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
