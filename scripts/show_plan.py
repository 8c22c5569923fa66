#!/usr/bin/env python3
"""Shows which parts of a configuration go together.

    python scripts/show_plan.py --support

prints a matrix: a row for each feature and model, a column for each parallelism, and the reasons
of what is refused. A configuration that asks for such a pair is refused with the same reason,
before anything is started.

The last line printed is one JSON object.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torchtitan_ext.command_line import print_json, script_parser, wrapped


def main() -> int:
    parser = script_parser(__doc__)
    parser.add_argument(
        "--support", action="store_true", required=True, help="the matrix of what goes together"
    )
    parser.parse_args()
    print_json(_support())
    return 0


def _support() -> dict[str, Any]:
    # Imported late, as torch takes seconds; and the device before torchtitan, which binds it.
    import torchtitan_ext.device  # noqa: F401  isort:skip
    from torchtitan.protocols.train_spec import _extra_train_specs

    import models  # noqa: F401  registers them
    from torchtitan_ext.distributed.support import (
        CONDITIONS,
        FEATURES,
        PARALLELISMS,
        UNSUPPORTED,
    )

    of_models = {f"model {name}": spec.unsupported for name, spec in _extra_train_specs.items()}
    of_pairs = {(m, f): reason for m, reasons in of_models.items() for f, reason in reasons.items()}
    refused, partly = (
        [{"a": a, "b": b, "reason": reason} for (a, b), reason in pairs.items()]
        for pairs in ({**UNSUPPORTED, **of_pairs}, CONDITIONS)
    )
    _show_matrix([*FEATURES, *of_models], list(PARALLELISMS), refused, partly)
    keys = {name: feature.key for name, feature in FEATURES.items()}
    return {
        "features": keys,
        "models": list(_extra_train_specs),
        "refused": refused,
        "partly": partly,
    }


def _show_matrix(
    rows: list[str],
    columns: list[str],
    refused: list[dict[str, str]],
    partly: list[dict[str, str]],
) -> None:
    """A line for each feature, a column for each parallelism, and the numbered reasons."""
    reasons = list(dict.fromkeys(pair["reason"] for pair in [*refused, *partly]))
    number = {
        frozenset((pair["a"], pair["b"])): f"{answer} ({reasons.index(pair['reason']) + 1})"
        for answer, pairs in (("no", refused), ("yes", partly))
        for pair in pairs
    }
    width = max(map(len, rows)) + 2
    print(" " * width + "  ".join(f"{name:<7}" for name in columns).rstrip())
    for row in rows:
        cells = [
            "-" if row == column else number.get(frozenset((row, column)), "yes")
            for column in columns
        ]
        line = "  ".join(
            f"{cell:<{max(7, len(column))}}" for cell, column in zip(cells, columns, strict=True)
        )
        print(f"{row:<{width}}{line}".rstrip())
    for position, reason in enumerate(reasons, start=1):
        print(wrapped(f"({position}) {reason}"))


if __name__ == "__main__":
    sys.exit(main())
