"""Applies a plan under torchrun."""
