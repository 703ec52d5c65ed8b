"""``python -m planner`` is the command `planner`, of the Python that runs it."""

from __future__ import annotations

from planner.cli.main import entry

if __name__ == "__main__":
    entry()
