"""Patterns of names."""

import pytest

from torchtitan_ext.distributed.names import matches


@pytest.mark.parametrize(
    ("name", "fits"),
    [
        ("layers.3.attention", True),
        ("layers.31.attention", True),
        ("layers.3.attention.core.attention", False),
        ("layers.attention", False),
        ("layersX3.attention", False),
    ],
)
def test_star_is_one_part_of_a_name(name: str, fits: bool) -> None:
    assert matches(name, ["output", "layers.*.attention"]) is fits
