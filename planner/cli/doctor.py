"""`planner doctor`: what this machine and this installation can do, and what is broken."""

from __future__ import annotations

import argparse

from planner.cli.arguments import add_json
from planner.cli.console import Progress, data, to_json
from planner.cli.doctor_checks import CHECKS, Finding
from planner.cli.failures import DONE, FAILED


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    add_json(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print every finding; exit 1 when something needed is broken."""
    findings = examine()
    broken = [finding for finding in findings if finding.status == "broken"]
    if arguments.json:
        data(
            to_json(
                {
                    "ok": not broken,
                    "checks": [finding.document() for finding in findings],
                }
            )
        )
    else:
        data("\n".join(line for finding in findings for line in _lines(finding)))
    return FAILED if broken else DONE


def examine() -> list[Finding]:
    """Run every check, in order; a check that raises is a broken part, not a broken doctor."""
    findings = []
    with Progress("examining") as progress:
        for done, (name, check) in enumerate(CHECKS.items()):
            progress.update(done, len(CHECKS), name)
            try:
                findings.append(check(name))
            except Exception as error:
                message = " ".join(str(error).split()) or type(error).__name__
                findings.append(Finding(name, "broken", message))
    return findings


def _lines(finding: Finding) -> list[str]:
    lines = [f"{finding.status:<8}{finding.name:<13}{finding.detail}"]
    return [*lines, f"{'':<21}hint: {finding.hint}"] if finding.hint else lines
