"""Text for training: `corpora` says where documents come from, `dataset` deals sequences to ranks.

`text` cuts documents into sequences for causal models, `masked_lm` for masked ones.

Nothing is imported here, so that `corpora` stays importable without torch.
"""
