"""Proofs about a configuration: it is run, and what it did is compared."""
