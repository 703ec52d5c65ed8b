"""Which split of a PyTorch model over a cluster trains fastest, how we know, and how to run it."""

__version__ = "0.1.0"
