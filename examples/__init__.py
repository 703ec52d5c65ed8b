"""Documents and scripts to start from."""
