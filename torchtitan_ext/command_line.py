"""What the scripts' command lines have in common."""

import argparse
import json
import math
import sys
import textwrap
from typing import Any, NoReturn

_COLUMNS = 100


class OneLineParser(argparse.ArgumentParser):
    """Reports bad arguments in one line, ``error: ...``, and exits 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def script_parser(description: str | None) -> OneLineParser:
    """A parser for a script whose help is its docstring, and whose last line is JSON."""
    parser = OneLineParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--json", action="store_true", help="accepted; the last line is JSON anyway"
    )
    return parser


def at_least_one(text: str) -> int:
    """The type of an option that counts something."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def wrapped(text: str, indent: int = 4) -> str:
    """The text in lines of at most 100 columns, the second and later ones indented."""
    lines = textwrap.wrap(
        text,
        _COLUMNS,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(lines)


def show(text: str, indent: int = 4) -> None:
    """Prints a line for people to stderr, wrapped."""
    print(wrapped(text, indent), file=sys.stderr, flush=True)


def print_json(summary: dict[str, Any]) -> None:
    """Prints one line of strict JSON to stdout; a number that is not finite becomes null."""
    print(json.dumps(_finite(summary), allow_nan=False), flush=True)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
