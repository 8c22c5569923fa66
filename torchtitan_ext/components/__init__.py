"""Parts that the trainer is assembled from."""
