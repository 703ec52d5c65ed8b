"""`planner models`: the catalogue of models that can be planned for without torch and without a download."""

from __future__ import annotations

import argparse

from planner.cli.arguments import add_json


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    add_json(parser)
