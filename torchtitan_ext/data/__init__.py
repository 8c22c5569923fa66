"""Text for training: `corpora` says where documents come from, `text` packs them into sequences.

Nothing is imported here, so that `corpora` stays importable without torch.
"""
