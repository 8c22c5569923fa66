"""Train the byte-level BPE tokenizer of the tests and small configs, on text shipped with Python.

    python scripts/train_tokenizer.py --vocab-size 2048 --output tests/assets/tokenizer

Writes `tokenizer.json` and `tokenizer_config.json`, which torchtitan reads from the folder that
`[model] hf_assets_path` names. The same version of Python and of `tokenizers` gives the same bytes.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from torchtitan_ext.command_line import OneLineParser
from torchtitan_ext.data.corpora import open_corpus

BOS, EOS, PAD = "<|begin_of_text|>", "<|end_of_text|>", "<|pad|>"
SPECIAL_TOKENS = [BOS, EOS, PAD]
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
MIN_VOCAB_SIZE = len(BYTES) + len(SPECIAL_TOKENS)

# BOS and EOS are added by torchtitan's tokenizer as this file says, so tokenizer.json has no
# post-processor that would add them.
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": BOS,
    "eos_token": EOS,
    "pad_token": PAD,
    "add_bos_token": True,
    "add_eos_token": True,
}


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> Tokenizer:
    """Return a byte-level BPE of `vocab_size` tokens: special tokens, 256 bytes, then merges.

    Any text survives encoding and decoding: no normalizer, no prefix space, every byte a token.

    Raises:
        ValueError: `vocab_size` below `MIN_VOCAB_SIZE`, or more than the documents have merges for.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"--vocab-size {vocab_size}: must be at least {MIN_VOCAB_SIZE}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=BYTES,
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"--vocab-size {vocab_size}: the text gives only {tokenizer.get_vocab_size()} tokens"
        )
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the two files that torchtitan's `HuggingFaceTokenizer` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.dumps(TOKENIZER_CONFIG, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(config, encoding="utf-8")


def main() -> None:
    parser = OneLineParser(
        description="Train a byte-level BPE tokenizer on the text shipped with Python"
    )
    parser.add_argument("--vocab-size", type=int, default=2048, help="tokens (default: 2048)")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("tests/assets/tokenizer"),
        help="folder to write to (default: tests/assets/tokenizer)",
    )
    args = parser.parse_args()
    corpus = open_corpus("training", "cpython_docs")
    try:
        tokenizer = train_tokenizer((text for _, text in corpus.documents()), args.vocab_size)
        save_tokenizer(tokenizer, args.output)
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"--output {args.output}: {error.strerror}")
    print(f"Wrote a tokenizer of {args.vocab_size} tokens to {args.output}")


if __name__ == "__main__":
    main()
