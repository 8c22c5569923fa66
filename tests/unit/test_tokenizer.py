"""The tokenizer asset suits torchtitan, and the script that wrote it checks its input."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from torchtitan.components.tokenizer import HuggingFaceTokenizer

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "train_tokenizer.py"
DOCUMENTS = [f"the text of document {index}: {'lorem ipsum dolor ' * 3}" for index in range(50)]
TEXTS = [
    "",
    "  two spaces, a tab\t, a newline\n\nand a trailing space ",
    "def f(x: int) -> int:\n    return x ** 2\n",
    "naïve Ελληνικά русский 漢字 かな 한국어 עברית",
    "🎉👩‍👩‍👧‍👦 e\u0301 \u00a0 \x00 \x7f \U0010ffff",
]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_tokenizer", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def asset() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(str(ROOT / "tests" / "assets" / "tokenizer"))


@pytest.fixture(scope="module", params=["asset", "just_trained"])
def tokenizer(
    request: pytest.FixtureRequest,
    asset: HuggingFaceTokenizer,
    script: ModuleType,
    tmp_path_factory: pytest.TempPathFactory,
) -> HuggingFaceTokenizer:
    """The asset, and what the script writes now: the two must not drift apart."""
    if request.param == "asset":
        return asset
    folder = tmp_path_factory.mktemp("tokenizer")
    script.save_tokenizer(script.train_tokenizer(DOCUMENTS, 280), folder)
    return HuggingFaceTokenizer(str(folder))


def test_asset_has_2048_tokens(asset: HuggingFaceTokenizer) -> None:
    assert asset.get_vocab_size() == 2048
    assert sorted(asset.get_vocab().values()) == list(range(2048))


def test_special_tokens_are_the_first(tokenizer: HuggingFaceTokenizer) -> None:
    assert (tokenizer.bos_id, tokenizer.eos_id) == (0, 1)
    assert tokenizer.token_to_id("<|pad|>") == 2


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_survives_encoding_and_decoding(
    tokenizer: HuggingFaceTokenizer, text: str
) -> None:
    tokens = tokenizer.encode(text)
    assert (tokens[0], tokens[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
    assert tokenizer.decode(tokens) == text


def test_bos_and_eos_are_added_once_and_only_if_asked(tokenizer: HuggingFaceTokenizer) -> None:
    plain = tokenizer.encode("some text", add_bos=False, add_eos=False)
    assert not {tokenizer.bos_id, tokenizer.eos_id} & set(plain)
    assert tokenizer.encode("some text", add_bos=True, add_eos=True) == [0, *plain, 1]
    assert tokenizer.encode("some text") == [0, *plain, 1]


def test_asset_compresses_documentation(asset: HuggingFaceTokenizer) -> None:
    text = "Return the number of items in a container, or raise a TypeError if it has none."
    assert len(asset.encode(text)) < len(text) / 2.5


def test_training_twice_gives_the_same_bytes(script: ModuleType, tmp_path: Path) -> None:
    for folder in ("first", "second"):
        script.save_tokenizer(script.train_tokenizer(DOCUMENTS, 280), tmp_path / folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        first, second = (tmp_path / folder / name for folder in ("first", "second"))
        assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(
    ("vocab_size", "message"),
    [
        (258, "--vocab-size 258: must be at least 259"),
        (9999, r"--vocab-size 9999: the text gives only \d+ tokens"),
    ],
)
def test_impossible_vocabulary_size_is_an_error(
    script: ModuleType, vocab_size: int, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        script.train_tokenizer(DOCUMENTS, vocab_size)


# --- WordPiece


@pytest.fixture(scope="module")
def wordpiece() -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(str(ROOT / "tests" / "assets" / "wordpiece"))


def test_wordpiece_has_4096_tokens_and_berts_special_ones_first(
    wordpiece: HuggingFaceTokenizer,
) -> None:
    assert sorted(wordpiece.get_vocab().values()) == list(range(4096))
    first = [wordpiece.id_to_token(index) for index in range(5)]
    assert first == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    added = wordpiece.tokenizer.get_added_tokens_decoder()
    assert [token.content for token in added.values()] == first  # "##a" is no special token


def test_wordpiece_is_lowercase_and_splits_words(wordpiece: HuggingFaceTokenizer) -> None:
    assert wordpiece.encode("The NAÏVE\tobject!") == wordpiece.encode("the naive object !")
    tokens = [wordpiece.id_to_token(index) for index in wordpiece.encode("uncharacteristic object")]
    assert (tokens[0], tokens[-1]) == ("[CLS]", "[SEP]")
    assert all(token.startswith("##") for token in tokens[2:-2])
    assert tokens[-2] == "object"
    assert wordpiece.decode(wordpiece.encode("an object")) == "an object"


def test_training_wordpiece_in_two_processes_gives_the_same_bytes(tmp_path: Path) -> None:
    # Hash maps, whose order must not matter, differ between processes.
    documents = tmp_path / "text.txt"
    documents.write_text(" ".join(sorted(ROOT.joinpath("README.md").read_text().split())))
    options = ["--type=wordpiece", "--vocab-size=400", f"--dataset-path={documents}"]
    for name in ("first", "second"):
        output = f"--output={tmp_path / name}"
        subprocess.run([sys.executable, str(SCRIPT), *options, output], check=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        first, second = (tmp_path / folder / name for folder in ("first", "second"))
        assert first.read_bytes() == second.read_bytes()


def test_wordpiece_asset_is_what_the_script_writes_but_for_the_text(
    script: ModuleType, wordpiece: HuggingFaceTokenizer
) -> None:
    parts = []
    for tokenizer in (script.train_wordpiece(DOCUMENTS, 60), wordpiece.tokenizer):
        content = json.loads(tokenizer.to_str())
        del content["model"]["vocab"]
        parts.append(content)
    assert parts[0] == parts[1]


@pytest.mark.parametrize(
    ("vocab_size", "message"),
    [
        (10, r"--vocab-size 10: must be at least \d+"),
        (9999, r"--vocab-size 9999: the text gives only \d+ tokens"),
    ],
)
def test_impossible_size_of_wordpiece_is_an_error(
    script: ModuleType, vocab_size: int, message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        script.train_wordpiece(DOCUMENTS, vocab_size)


# --- command line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vocab-size", "2"], "error: --vocab-size 2: must be at least 259"),
        (["--dataset-path", "x/y"], "error: --dataset-path x/y: no such file or folder"),
        (["--vocab-size", "x"], "error: argument --vocab-size: invalid int value: 'x'"),
        (["--output", __file__, "--vocab-size", "300"], f"error: --output {__file__}: File exists"),
    ],
)
def test_script_exits_2_with_one_line(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    with pytest.raises(SystemExit) as stop:
        script.main()
    assert stop.value.code == 2
    assert capsys.readouterr().err == message + "\n"


def test_script_writes_both_files(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arguments = ["--vocab-size", "300", "--output", str(tmp_path / "new" / "folder")]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    script.main()
    assert HuggingFaceTokenizer(str(tmp_path / "new" / "folder")).get_vocab_size() == 300


def test_script_help_names_the_options() -> None:
    result = subprocess.run(
        [sys.executable, str(SCRIPT), "--help"],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert "--vocab-size" in result.stdout
    assert "--output" in result.stdout
