"""A small BERT, and the flags that train it in tests."""

from models.bert import FLAVORS, BertModelArgs

CONFIG = ["--job.config_file=train_configs/bert_tiny.toml", "--model.flavor=test"]
"""The shipped TOML, with a vocabulary that ends with the tokenizer's."""


def _test() -> BertModelArgs:
    return BertModelArgs(vocab_size=4096, n_layers=2, dim=64, n_heads=2, hidden_dim=128)


FLAVORS.add("test", _test)

PLAIN = [
    "--activation_checkpoint.mode=none",
    "--compile.no-enable",
]
"""Neither checkpointed nor compiled."""

NO_DROPOUT = [f"--dropout.{site}=0" for site in ("embedding", "attention", "residual")]
"""Layouts can be compared only without: data ranks draw masks of their own."""
