"""Check a configuration without starting it: ``python -m torchtitan_ext.check_config [flags]``.

Silent, with status 0, if it can be run; otherwise the last line on stderr is ``error: ...`` and the
status is 2. The number of ranks is NGPU x NNODES, from the environment.
"""

import os
import sys
from collections.abc import Mapping

from torchtitan_ext.config.error import ConfigError, refusal
from torchtitan_ext.config.values import read_source

_WHOLE_NUMBERS = {"NGPU": 1, "NNODES": 1, "NODE_RANK": 0, "MAX_RESTARTS": 0}
"""Variables of run_train.sh that hold an integer, and the least they may be."""


def main(args: list[str]) -> int:
    """Check the environment and the configuration, and return the exit status."""
    try:
        world_size = check_environment(os.environ)
        if not {"-h", "--help"} & set(args):
            read_source(args)  # Importing torch takes seconds: tell slips in the TOML file first.
        _load(args, world_size)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def check_environment(environment: Mapping[str, str]) -> int:
    """Check the variables of run_train.sh, and return the number of ranks they ask for.

    Raises ConfigError that names the variable.
    """
    numbers = {}
    for name, least in _WHOLE_NUMBERS.items():
        text = environment.get(name, str(least))
        if not text.isdecimal() or int(text) < least:
            raise ConfigError(f'{name} = "{text}": must be an integer of at least {least}')
        numbers[name] = int(text)
    if numbers["NODE_RANK"] >= numbers["NNODES"]:
        raise ConfigError(f"NODE_RANK = {numbers['NODE_RANK']}: must be below NNODES")
    log_rank = environment.get("LOG_RANK", "0")
    for rank in log_rank.split(","):
        if not rank.isdecimal() or int(rank) >= numbers["NGPU"]:
            raise ConfigError(
                f'LOG_RANK = "{log_rank}": must be ranks below NGPU = {numbers["NGPU"]}, '
                "separated by commas"
            )
    return numbers["NGPU"] * numbers["NNODES"]


def _load(args: list[str], world_size: int) -> None:
    from torchtitan_ext.launch import load_config

    config = load_config(args, world_size)
    if config.comm.mode == "fake_backend" and os.environ.get("COMM_MODE") != "fake_backend":
        raise refusal(
            "comm.mode",
            "fake_backend",
            "must be set by COMM_MODE=fake_backend before ./run_train.sh, which then starts one "
            "process: several would each play rank 0",
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
