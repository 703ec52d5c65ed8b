"""Entry point of the `planner` command: finds the verb, runs it, and turns its end into an exit code.

Only the chosen verb's module is imported, so that `planner --help` and `planner devices` start at once and never
load torch. Exit codes: 0 done, 1 failed, 2 wrong usage or bad input, 3 no feasible plan; 130 after Ctrl-C and 141 when
the reader of stdout went away, as shells report these two.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from planner.cli.failures import INTERRUPTED, PIPE_CLOSED, report, tell_interrupted
from planner.errors import SpecError
from planner.version import __version__

VERBS: dict[str, str] = {
    "profile": "Count or measure what every layer of a model costs",
    "links": "Measure latency and bandwidth between local ranks",
    "plan": "Find the fastest layout that fits, and prove it",
    "predict": "Time and memory of one given layout",
    "calibrate": "Fit the cost model's constants to measured runs",
    "check": "Recompute a plan independently and validate it",
    "run": "Train a model by a plan, under torchrun",
    "weights": "Write the trained weights of a checkpoint as safetensors",
    "timeline": "Draw predicted and measured steps, side by side",
    "export": "Write a plan for another runtime or launcher",
    "serve": "Serve plans over HTTP",
    "models": "List the models of the catalogue",
    "devices": "List the devices of the catalogue",
    "schema": "Print the JSON Schema of a document",
    "partition": "Split a list of layer costs into balanced parts",
    "schedule": "Simulate a pipeline schedule",
    "doctor": "Check this machine and this installation",
}
"""Every verb has a module of its name in this package, with `configure(parser)` and `run(arguments) -> exit code`."""

EPILOG = """\
exit codes: 0 done, 1 failed, 2 wrong usage or bad input, 3 no feasible plan
environment: NO_COLOR=1 switches colour off, PLANNER_DEBUG=1 shows tracebacks, PLANNER_API_KEY goes to the service
"""


class Parser(argparse.ArgumentParser):
    """argparse, whose usage errors travel the same way as every other error."""

    def error(self, message: str) -> NoReturn:
        """Raise `SpecError` instead of ending the process."""
        raise SpecError(
            f"{message}.", field=self.prog, hint=f"see `{self.prog} --help`."
        )


class _Help(argparse.RawDescriptionHelpFormatter):
    """Keeps the epilog's lines, and leaves room for the longest verb, whose indent argparse forgets to count."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28)
        self._action_max_length = max(map(len, VERBS)) + 4


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `argv` defaults to the process' own arguments."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(words)
    except KeyboardInterrupt:
        tell_interrupted()
        return INTERRUPTED
    except BrokenPipeError:
        _leave_stdout()
        return PIPE_CLOSED
    except Exception as error:
        return report(error, as_json="--json" in words)


def _run(words: list[str]) -> int:
    name = words[0] if words and words[0] in VERBS else None
    parser = build_parser(name)
    try:
        arguments = parser.parse_args(words)
    except SystemExit as end:  # --help and --version
        return int(end.code or 0)
    if name is None:
        parser.print_help(sys.stderr)
        return 2
    code: int = _module(name).run(arguments)
    sys.stdout.flush()
    return code


def build_parser(name: str | None = None) -> Parser:
    """The parser of the whole command, in which only the verb `name` has its options."""
    parser = Parser(
        prog="planner",
        description="Find the fastest way to train a PyTorch model on a cluster, prove it, and run it",
        epilog=EPILOG,
        formatter_class=_Help,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"planner {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="COMMAND", title="commands")
    for each, summary in VERBS.items():
        child = verbs.add_parser(
            each, help=summary, description=summary, allow_abbrev=False
        )
        if each == name:
            _module(each).configure(child)
    return parser


def _module(verb: str) -> Any:
    return importlib.import_module(f"planner.cli.{verb}")


def _leave_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush does not fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def entry() -> NoReturn:
    """Run as a process: ``python -m planner.cli.main``."""
    sys.exit(main())


if __name__ == "__main__":
    entry()
