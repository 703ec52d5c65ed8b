"""The documentation, and the command that generates its reference."""
