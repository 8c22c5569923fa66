"""The file in a dump folder that has one JSON object for each logged step."""

import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
_LONGEST_RECORD = 2**20  # with the counts of all experts


def json_line(record: dict[str, Any]) -> str:
    """One line of strict JSON: a number that isn't finite becomes null, and is said to be so."""
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
    }
    if finite != record:
        finite["nonfinite"] = True
    return json.dumps(finite, allow_nan=False) + "\n"


def read_records(run: Path) -> Iterator[dict[str, Any]]:
    """The records of a dump folder or of such a file, as written; none if it is not there yet.

    A line that was cut off, as the run was ended or is writing it now, is passed over; not silently
    if others follow it.

    Raises:
        ValueError: a line is no record of a step.
    """
    path = _path_of(run)
    if not path.is_file():
        return
    with open(path) as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                if line.endswith("\n"):
                    logging.getLogger(__name__).warning(
                        f"{path}, line {number}: passed over, cut off"
                    )
                continue
            if not isinstance(record, dict) or not isinstance(record.get("step"), int):
                raise ValueError(f"{path}, line {number}: is not the record of a step")
            yield record


def read_last_step(run: Path) -> int:
    """The step of the last record; 0 before the first. Reads the file's end alone."""
    path = _path_of(run)
    if not path.is_file():
        return 0
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - _LONGEST_RECORD))
        lines = file.read().split(b"\n")[:-1]  # what follows the last one is being written
    return json.loads(lines[-1])["step"] if lines else 0


def _path_of(run: Path) -> Path:
    return run / METRICS_FILE if run.is_dir() else run
