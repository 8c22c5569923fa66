"""The sizes of a model that can be trained, by name."""

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from torchtitan.protocols import BaseModelArgs

Args = TypeVar("Args", bound=BaseModelArgs)


class Flavors(Mapping[str, Args]):
    """Builds a flavor's arguments anew on every access, as a run changes them to its needs."""

    def __init__(self, builders: dict[str, Callable[[], Args]]) -> None:
        self._builders = builders

    def add(self, name: str, builder: Callable[[], Args]) -> None:
        """Makes one more flavor known under ``name``, which replaces an earlier one."""
        self._builders[name] = builder

    def __getitem__(self, name: str) -> Args:
        return self._builders[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._builders)

    def __len__(self) -> int:
        return len(self._builders)
