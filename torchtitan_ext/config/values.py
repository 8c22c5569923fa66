"""Settings as a TOML file and flags write them, checked against the fields of the config.

This module imports neither torch nor torchtitan, so that a slip in the TOML file is told at once.
Flags are parsed here and not by tyro, for two reasons: a check of settings without effect has to
know which of them came from a flag, and a refusal is one line.
"""

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from torchtitan_ext.config.error import ConfigError, as_toml, did_you_mean, refusal

REPOSITORY_ROOT = Path(__file__).resolve().parents[2]

_EXPECTED = {bool: "true or false", int: "an integer", float: "a number", str: "a string"}


@dataclass(frozen=True)
class Source:
    """What the user wrote, before it is compared with the fields there are."""

    toml: dict[str, Any]
    flags: list[tuple[str, str | None]]
    """Dotted keys with the text of their values, in order; None for a flag without a value."""


@dataclass(frozen=True)
class Settings:
    """Checked values by dotted key ("training.steps"), apart by where they were set."""

    toml: dict[str, Any]
    flags: dict[str, Any]

    @property
    def values(self) -> dict[str, Any]:
        return {**self.toml, **self.flags}


def find_path(path: str) -> str | None:
    """Find an input file or folder: as written, else in the repository's root, else None.

    A relative path means the user's current folder first. The second place makes the shipped
    defaults (``./train_configs/...``, ``./tests/assets/tokenizer``) work from any folder.
    """
    if Path(path).exists():
        return path
    fallback = REPOSITORY_ROOT / path
    return str(fallback) if fallback.exists() else None


def read_source(args: list[str]) -> Source:
    """Split flags into keys and texts, and parse the TOML file that ``job.config_file`` names.

    Raises ConfigError for an argument that is no flag, and for a missing or malformed file.
    """
    flags = list(split_flags(args))
    path = dict(flags).get("job.config_file")
    return Source(toml=_read_toml(path) if path is not None else {}, flags=flags)


def split_flags(args: list[str]) -> Iterator[tuple[str, str | None]]:
    """Yields each flag's dotted name and its text, None without one. Raises ConfigError."""
    remaining = list(args)
    while remaining:
        arg = remaining.pop(0)
        if not arg.startswith("--"):
            raise ConfigError(f'unexpected argument "{arg}": must be --section.key=value')
        name, has_value, text = arg[2:].partition("=")
        key = name.replace("-", "_")
        if has_value:
            yield key, text
        elif remaining and not remaining[0].startswith("--"):
            yield key, remaining.pop(0)
        else:
            yield key, None


def _read_toml(path: str) -> dict[str, Any]:
    found = find_path(path)
    if found is None or not Path(found).is_file():
        raise refusal("job.config_file", path, "no such file")
    try:
        return tomllib.loads(Path(found).read_text(encoding="utf-8"))
    except ValueError as error:  # tomllib's message ends with the line and the column
        raise refusal("job.config_file", path, f"not valid TOML: {error}") from None


def check_settings(source: Source, config_cls: type) -> Settings:
    """Check names and types of everything in ``source`` against the fields of ``config_cls``.

    Raises ConfigError that names an unknown key and the nearest valid one, or a wrong value and
    what it must be.
    """
    types = leaf_types(config_cls)
    toml = {key: check_type(key, value, types[key]) for key, value in _flatten(source.toml, types)}
    flags = dict(_read_flag(name, text, types) for name, text in source.flags)
    return Settings(toml=toml, flags=flags)


def build_config(config_cls: type, values: dict[str, Any], section: str = "") -> Any:
    """Make the dataclass ``config_cls`` and its sections from values by dotted key."""
    arguments: dict[str, Any] = {}
    for f in fields(config_cls):
        key = section + f.name
        if is_dataclass(f.type):
            arguments[f.name] = build_config(f.type, values, f"{key}.")  # type: ignore[arg-type]
        elif key in values:
            arguments[f.name] = values[key]
    return config_cls(**arguments)


def leaf_types(config_cls: type, section: str = "") -> dict[str, Any]:
    """Return the type of every key of a config class, by dotted key."""
    types: dict[str, Any] = {}
    for f in fields(config_cls):
        key = section + f.name
        if is_dataclass(f.type):
            types |= leaf_types(f.type, f"{key}.")  # type: ignore[arg-type]
        else:
            types[key] = f.type
    return types


def get_value(config: Any, key: str) -> Any:
    """Return the value of a dotted key of a config."""
    for name in key.split("."):
        config = getattr(config, name)
    return config


def _flatten(
    table: dict[str, Any], types: dict[str, Any], section: str = ""
) -> Iterator[tuple[str, Any]]:
    sections = _sections(types)
    for name, value in table.items():
        key = section + name
        if key in types:
            yield key, value
        elif key in sections and isinstance(value, dict):
            yield from _flatten(value, types, f"{key}.")
        elif key in sections:
            raise ConfigError(f"{name} = {as_toml(value)}: must be a section, [{key}]")
        else:
            raise _unknown_key(key, value, types)


def _sections(types: dict[str, Any]) -> set[str]:
    parts = [key.split(".") for key in types]
    return {".".join(names[:depth]) for names in parts for depth in range(1, len(names))}


def _unknown_key(key: str, value: Any, types: dict[str, Any]) -> ConfigError:
    section, _, name = key.rpartition(".")
    if isinstance(value, dict):
        section, name = key, ""
    elsewhere = [k for k in types if k.endswith(f".{name}")]
    if not section:
        place = f" (did you mean [{elsewhere[0].rpartition('.')[0]}]?)" if elsewhere else ""
        return ConfigError(f"{name} = {as_toml(value)}: must be inside a section{place}")
    sections = _sections(types)
    if section not in sections:
        hint = did_you_mean(section, sections, "[{}]")
        return ConfigError(f"[{section}]: unknown section{hint}")
    siblings = [k.rpartition(".")[2] for k in types if k.rpartition(".")[0] == section]
    hint = did_you_mean(name, siblings)
    if not hint and elsewhere:
        hint = f" (did you mean {name} of [{elsewhere[0].rpartition('.')[0]}]?)"
    return refusal(key, value, f"unknown key{hint}")


def _read_flag(name: str, text: str | None, types: dict[str, Any]) -> tuple[str, Any]:
    """Return a flag's dotted key and checked value."""
    section, _, leaf = name.rpartition(".")
    positive = f"{section}.{leaf.removeprefix('no_')}"
    if name not in types and types.get(positive) is bool:
        if text is not None:
            raise refusal(name, text, f"takes no value; write --{positive}=true or =false")
        return positive, False
    if name not in types:
        raise _unknown_key(name, _literal(text or ""), types)
    tp = types[name]
    if text is None:
        if tp is bool:
            return name, True
        raise ConfigError(f"[{section}] {leaf}: needs a value, --{name}=...")
    return name, check_type(name, _from_text(name, text, tp), tp)


def _literal(text: str) -> Any:
    """Read a flag's text as TOML would: a boolean, a number, or else a string."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return text


def _from_text(key: str, text: str, tp: Any) -> Any:
    """Read a flag's text as a value of type ``tp`` where it can be, for check_type to judge."""
    members = get_args(tp) if get_origin(tp) in (Union, UnionType) else (tp,)
    if text == "None" and NoneType in members:
        return None
    for member in members:
        if member == list[str]:
            return text.split(",") if text else []
        if get_origin(member) is list:
            raise refusal(key, text, "cannot be a flag: write it in the TOML file")
    if str in members or any(get_origin(member) is Literal for member in members):
        return text
    return _literal(text)


def check_type(key: str, value: Any, tp: Any) -> Any:
    """Return ``value`` if it fits the annotation ``tp`` (an integer for a float is converted).

    Raises ConfigError otherwise.
    """
    if not _fits(value, tp):
        choices = get_args(tp) if get_origin(tp) is Literal else ()
        raise refusal(key, value, f"must be {_expected(tp)}{did_you_mean(value, choices)}")
    return float(value) if tp is float else value


def _fits(value: Any, tp: Any) -> bool:
    origin = get_origin(tp)
    if origin in (Union, UnionType):
        return any(_fits(value, member) for member in get_args(tp))
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in get_args(tp))
    if origin is list:
        (item_type,) = get_args(tp)
        # What a table holds is checked by the section that owns it.
        return isinstance(value, list) and (
            is_dataclass(item_type) or all(_fits(item, item_type) for item in value)
        )
    if tp is float:
        return type(value) in (int, float)
    return type(value) is tp  # bool is no int here


def _expected(tp: Any) -> str:
    """Say what a type allows, as the end of "must be ..."."""
    origin = get_origin(tp)
    if origin in (Union, UnionType):
        members = [member for member in get_args(tp) if member is not NoneType]
        return " or ".join(dict.fromkeys(_expected(member) for member in members))
    if origin is Literal:
        return f"one of {', '.join(map(str, get_args(tp)))}"
    if origin is list:
        (item_type,) = get_args(tp)
        return {str: "a list of strings"}.get(item_type, "a list of tables or lists")
    return _EXPECTED[tp]
