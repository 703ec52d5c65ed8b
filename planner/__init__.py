"""Find the fastest way to train a PyTorch model on a cluster, prove it, and run it."""

from planner.version import __version__ as __version__
