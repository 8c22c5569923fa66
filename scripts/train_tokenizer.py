"""Train the tokenizers of the tests and small configs, on text shipped with Python or one's own.

    python scripts/train_tokenizer.py --vocab-size 2048 --output tests/assets/tokenizer
    python scripts/train_tokenizer.py --type wordpiece --vocab-size 4096 \\
        --output tests/assets/wordpiece

The first is a byte-level BPE for causal language models, the second a lowercase WordPiece for BERT.
Python's text is too short for BERT's 30,522 tokens (it gives about 15,000); text of one's own does:

    python scripts/train_tokenizer.py --type wordpiece --vocab-size 30522 \\
        --dataset-path my/text --output my/wordpiece

Writes `tokenizer.json` and `tokenizer_config.json`, which torchtitan reads from the folder that
`[model] hf_assets_path` names. The same version of Python and of `tokenizers` gives the same bytes.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

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

WORDPIECE_PAD, UNK, CLS, SEP, MASK = "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"
WORDPIECE_SPECIAL_TOKENS = [WORDPIECE_PAD, UNK, CLS, SEP, MASK]
CONTINUES = "##"
WORDPIECE_CONFIG = {
    "tokenizer_class": "BertTokenizerFast",
    "do_lower_case": True,
    "pad_token": WORDPIECE_PAD,
    "unk_token": UNK,
    "cls_token": CLS,
    "sep_token": SEP,
    "mask_token": MASK,
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
    _check_size(tokenizer, vocab_size)
    return tokenizer


def train_wordpiece(documents: Sequence[str], vocab_size: int) -> Tokenizer:
    """Return BERT's lowercase WordPiece of `vocab_size` tokens: special tokens ([PAD] is 0), pieces
    of one character that continue words, the alphabet, then merges.

    Like BERT's own file, tokenizer.json has a post-processor that adds [CLS] and [SEP] where an
    encoding asks for special tokens.

    Raises:
        ValueError: `vocab_size` below the number of special tokens and characters, or more than
            the documents have merges for.
    """
    tokenizer = _empty_wordpiece({})
    pieces = sorted(_continuing_pieces(documents, tokenizer))
    # The trainer numbers the pieces "##x" in the order of a hash map, which differs from run to
    # run, and breaks ties between merges by number. It keeps the numbers of special tokens, so
    # here they are special while training.
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*WORDPIECE_SPECIAL_TOKENS, *pieces],
        continuing_subword_prefix=CONTINUES,
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    if tokenizer.get_vocab_size() > vocab_size:  # it never leaves out characters
        raise ValueError(
            f"--vocab-size {vocab_size}: must be at least {tokenizer.get_vocab_size()}"
        )
    _check_size(tokenizer, vocab_size)
    return _empty_wordpiece(tokenizer.get_vocab(with_added_tokens=False))


def _empty_wordpiece(vocabulary: dict[str, int]) -> Tokenizer:
    """Return a WordPiece tokenizer with BERT's rules around `vocabulary`."""
    model = models.WordPiece(vocabulary, unk_token=UNK, continuing_subword_prefix=CONTINUES)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix=CONTINUES)
    if vocabulary:
        tokenizer.add_special_tokens(WORDPIECE_SPECIAL_TOKENS)
        tokenizer.post_processor = processors.BertProcessing(
            (SEP, vocabulary[SEP]), (CLS, vocabulary[CLS])
        )
    return tokenizer


def _continuing_pieces(documents: Iterable[str], tokenizer: Tokenizer) -> set[str]:
    """Return every character, with "##" before it, that is not the first one of some word."""
    characters: set[str] = set()
    for document in documents:
        text = tokenizer.normalizer.normalize_str(document)
        for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text):
            characters.update(word[1:])
    return {CONTINUES + character for character in characters}


def _check_size(tokenizer: Tokenizer, vocab_size: int) -> None:
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(
            f"--vocab-size {vocab_size}: the text gives only {tokenizer.get_vocab_size()} tokens"
        )


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the two files that torchtitan's `HuggingFaceTokenizer` reads."""
    is_wordpiece = isinstance(tokenizer.model, models.WordPiece)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.dumps(WORDPIECE_CONFIG if is_wordpiece else TOKENIZER_CONFIG, indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(config, encoding="utf-8")


TRAINERS = {"bpe": train_tokenizer, "wordpiece": train_wordpiece}


def main() -> None:
    parser = OneLineParser(
        description="Train a tokenizer, on the text shipped with Python or other"
    )
    parser.add_argument(
        "--type",
        choices=TRAINERS,
        default="bpe",
        help="byte-level BPE, or BERT's lowercase WordPiece (default: bpe)",
    )
    parser.add_argument("--vocab-size", type=int, default=2048, help="tokens (default: 2048)")
    parser.add_argument(
        "--dataset-path",
        type=Path,
        help="file or folder of text to train on, as [training] dataset_path (default: Python's)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("tests/assets/tokenizer"),
        help="folder to write to (default: tests/assets/tokenizer)",
    )
    args = parser.parse_args()
    try:
        tokenizer = TRAINERS[args.type](_read_documents(args.dataset_path), args.vocab_size)
        save_tokenizer(tokenizer, args.output)
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"--output {args.output}: {error.strerror}")
    print(f"Wrote a tokenizer of {args.vocab_size} tokens to {args.output}")


def _read_documents(path: Path | None) -> list[str]:
    if path is None:
        corpus = open_corpus("training", "cpython_docs")
        return [text for _, text in corpus.documents()]
    try:
        return [text for _, text in open_corpus("training", "local", str(path)).documents()]
    except ValueError as error:  # names the key of a configuration
        key = f'[training] dataset_path = "{path}"'
        raise ValueError(str(error).replace(key, f"--dataset-path {path}")) from error


if __name__ == "__main__":
    main()
