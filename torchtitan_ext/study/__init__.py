"""Several training runs, set side by side."""
