"""Measures and counts what every layer of a model costs, and how fast devices reach each other."""
