"""Entry point of the `planner` command: find the verb, run it, return its exit code.

Only the chosen verb's module is imported, so that `planner --help` starts at once and
never loads torch. Exit codes: 0 done, 1 failed, 2 wrong usage or bad input, 3 no feasible
plan; 130 after Ctrl-C and 141 when the reader of stdout went away, as shells report these
two.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click
from click.shell_completion import shell_complete

from planner.cli.failures import INTERRUPTED, PIPE_CLOSED, report, report_interrupt
from planner.cli.options import error_of_usage, nearest
from planner.errors import UnknownNameError
from planner.version import __version__

SECTIONS: dict[str, dict[str, str]] = {
    "Plan": {
        "plan": "Find the fastest layout that fits in memory",
        "predict": "Predict step time and memory of one layout",
        "sweep": "Plan several models, clusters and batches in one table",
        "diff": "Compare two plans",
        "export": "Write a plan for another framework or launcher",
    },
    "Train": {
        "run": "Train a model by a plan, under torchrun",
        "check": "Recompute a plan independently and validate it",
        "weights": "Write the trained weights of a checkpoint as safetensors",
        "timeline": "Draw predicted and measured steps",
    },
    "Measure": {
        "profile": "Count or measure what every layer of a model costs",
        "links": "Measure latency and bandwidth between ranks",
        "calibrate": "Fit the cost model's constants to measured runs",
    },
    "Serve": {
        "serve": "Serve plans over HTTP",
        "worker": "Run the jobs of services that share PostgreSQL",
    },
    "Reference": {
        "models": "List the models of the catalogue",
        "devices": "List the devices of the catalogue",
        "schema": "Print the JSON Schema of a document",
        "init": "Write the documents of a planning request",
        "schedule": "Simulate a pipeline schedule",
        "partition": "Split a list of layer costs into balanced parts",
        "doctor": "Check this machine and this installation",
    },
}
"""Verbs by section of the help; each has a module of its name with a `command`."""

VERBS: dict[str, str] = {
    verb: summary for verbs in SECTIONS.values() for verb, summary in verbs.items()
}

COMPLETION_VARIABLE = "_PLANNER_COMPLETE"
START = (
    "Start: planner plan llama-3.1-70b --devices 64xh100-sxm5-80gb "
    "--batch 128 --sequence 8192"
)
ENVIRONMENT = """\
Exit codes: 0 done, 1 failed, 2 wrong usage or bad input, 3 no feasible plan
Environment: NO_COLOR=1 disables colour, PLANNER_DEBUG=1 prints tracebacks
Completion: eval "$(_PLANNER_COMPLETE=bash_source planner)"   (or zsh_source)"""


class Verbs(click.Group):
    """The group of all verbs; a verb's module is imported when the verb is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of all verbs."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a verb; None if there is no such verb."""
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"planner.cli.{cmd_name}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the verb.

        Raises:
            UnknownNameError: there is none of this name; names the nearest.
        """
        name = args[0]
        if name not in VERBS and not name.startswith("-") and not ctx.resilient_parsing:
            raise UnknownNameError(
                f"no command {name!r}.",
                hint=nearest(name, VERBS, "see `planner --help`."),
            )
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the verbs by section."""
        usage = "Usage: planner COMMAND [ARGS]"
        formatter.write(
            f"{usage}     Plan, check and run distributed training of PyTorch models.\n"
        )
        for section, verbs in SECTIONS.items():
            formatter.write("\n")
            for index, (verb, summary) in enumerate(verbs.items()):
                heading = section if index == 0 else ""
                formatter.write(f"{heading:<11}{verb:<11}{summary}\n")
        formatter.write(f"\n{START}\n\n{ENVIRONMENT}\n")


@click.group(
    cls=Verbs,
    name="planner",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, message="planner %(version)s")
@click.pass_context
def planner(context: click.Context) -> int | None:
    """Plan, check and run distributed training of PyTorch models."""
    if context.invoked_subcommand is not None:
        return None
    click.echo(context.get_help(), err=True)
    return 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; `argv` defaults to the process' arguments."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(words)
    except KeyboardInterrupt:
        report_interrupt()
        return INTERRUPTED
    except BrokenPipeError:
        _close_stdout()
        return PIPE_CLOSED
    except click.UsageError as error:
        return report(error_of_usage(error), as_json="--json" in words)
    except Exception as error:
        return report(error, as_json="--json" in words)


def _run(words: list[str]) -> int:
    completion = os.environ.get(COMPLETION_VARIABLE)
    if completion:
        return shell_complete(planner, {}, "planner", COMPLETION_VARIABLE, completion)
    try:
        # Not `planner.main`, which ends Ctrl-C and closed pipes in a way of its own.
        with planner.make_context("planner", words) as context:
            code = planner.invoke(context)
    except click.exceptions.Exit as end:  # --help and --version
        code = end.exit_code
    sys.stdout.flush()
    return int(code or 0)


def _close_stdout() -> None:
    """Point stdout at nothing, so that the interpreter's last flush does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def entry() -> NoReturn:
    """Run as a process: ``python -m planner.cli.main``."""
    sys.exit(main())


if __name__ == "__main__":
    entry()
