"""[[layer_wrap.rules]]: patterns of layers, and what a malformed rule is told."""

import pytest

from torchtitan_ext.config import LayerRule, LayerWrap, match_layers

LAYERS = [0, 1, 2, 3, 4, 5]
MOE_LAYERS = {1, 2, 3, 4, 5}


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("0", [0]),
        ("0-3", [0, 1, 2, 3]),
        ("0,2,4-5", [0, 2, 4, 5]),
        ("4 - 5", None),
        ("0, 2", [0, 2]),
        ("5,0", [0, 5]),
        ("3-9", [3, 4, 5]),
        ("7", []),
        ("*", LAYERS),
        ("dense", [0]),
        ("moe", [1, 2, 3, 4, 5]),
        ("", None),
        ("3-1", None),
        ("-1", None),
        ("mo", None),
        ("0,moe", None),
        ("1,", None),
    ],
)
def test_match_layers_pattern(pattern: str, expected: list[int] | None) -> None:
    if expected is None:
        with pytest.raises(ValueError):
            match_layers(pattern, LAYERS, MOE_LAYERS)
    else:
        assert match_layers(pattern, LAYERS, MOE_LAYERS) == expected


def test_match_layers_subset_of_layers_keeps_numbers() -> None:
    assert match_layers("0-4", [4, 3], {3}) == [4, 3]
    assert match_layers("dense", [4, 3], {3}) == [4]


def test_layer_wrap_tables_become_rules() -> None:
    wrap = LayerWrap(
        rules=[{"layers": "0-3", "checkpoint": "full"}, {"layers": "moe", "compile": True}]
    )  # type: ignore[list-item]
    assert wrap.rules == [LayerRule("0-3", checkpoint="full"), LayerRule("moe", compile=True)]
    assert LayerWrap(rules=wrap.rules) == wrap


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"layers": "0", "checkpoint": "ful"},
            'rules[1].checkpoint = "ful": must be one of none, full, op (did you mean "full"?)',
        ),
        ({"layers": "0", "checkpoint": True}, "rules[1].checkpoint = true: must be one of"),
        ({"layers": "0", "compile": "yes"}, 'rules[1].compile = "yes": must be true or false'),
        ({"layers": "0", "compile": 1}, "rules[1].compile = 1: must be true or false"),
        ({"layers": 0, "compile": True}, "rules[1].layers = 0: must be a string"),
        ({"layers": "mo", "compile": True}, 'rules[1].layers = "mo": must be layer numbers'),
        ({"layers": "3-1", "compile": True}, "rules[1].layers = "),
        ({"compile": True}, "rules[1]: needs the key layers"),
        ({"layers": "0"}, "rules[1]: needs checkpoint or compile"),
        (
            {"layers": "0", "chekpoint": "full"},
            'rules[1].chekpoint: unknown key (did you mean "checkpoint"?)',
        ),
        ("0-3", 'rules[1] = "0-3": must be a table'),
    ],
)
def test_layer_wrap_malformed_rule_is_named(table: object, message: str) -> None:
    with pytest.raises(ValueError) as refused:
        LayerWrap(rules=[{"layers": "0", "compile": True}, table])  # type: ignore[list-item]
    assert str(refused.value).startswith("[layer_wrap] ")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
