"""Training extensions for torchtitan 0.2.2: faithful recomputation under compile and checkpoint."""
