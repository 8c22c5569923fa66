"""What the scripts' command lines have in common."""

import argparse
from typing import NoReturn


class OneLineParser(argparse.ArgumentParser):
    """Reports bad arguments in one line, ``error: ...``, and exits 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def at_least_one(text: str) -> int:
    """The type of an option that counts something."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)
