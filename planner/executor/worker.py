"""What torchrun starts on every rank: ``python -m planner.executor.worker plan.json --model MODEL ...``"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from planner.errors import FinishedError
from planner.executor.checkpoint.folder import final_path
from planner.executor.failures.doing import now
from planner.executor.failures.failure import (
    STOPPED,
    write_failure,
    write_stopped,
    write_whole,
)
from planner.executor.failures.last_words import last_words
from planner.executor.failures.orphans import end_with_parent
from planner.executor.failures.stopping import leaving_in_time
from planner.executor.failures.unfinished import StepLog, why_of
from planner.executor.settings import RunSettings
from planner.executor.train.metrics import Metrics
from planner.spec.measured import MeasuredRun
from planner.spec.plan import Plan

if TYPE_CHECKING:
    from planner.executor.executor import Executor


def main(arguments: Sequence[str] | None = None) -> int:
    """Train as the plan says; rank 0 prints one JSON line per step and writes the report.

    Returns:
        0, also when there was nothing left to train; or `STOPPED`, when the run was told to stop before its last step.
    """
    parser = argparse.ArgumentParser(
        description="Train one rank of a plan; start it with torchrun."
    )
    parser.add_argument("plan", help="plan.json")
    parser.add_argument("--output", help="where rank 0 writes measured.json")
    parser.add_argument("--metrics", help="where rank 0 writes one JSON line per step")
    parser.add_argument(
        "--failures", type=Path, help="folder for word of a rank that fails or stops"
    )
    RunSettings.add_arguments(parser)
    options = parser.parse_args(arguments)
    with last_words(options.failures, int(os.environ.get("RANK", "0"))):
        return _train(options)


def _train(options: argparse.Namespace) -> int:
    settings = RunSettings.from_arguments(options)
    executor = make_executor(options.plan, settings)
    policy = settings.checkpoints
    stop = (
        None
        if policy is None
        else leaving_in_time(settings.grace_seconds, policy.directory, options.failures)
    )
    log = StepLog(executor.plan)

    def on_step(metrics: Metrics) -> None:
        log.record(metrics)
        print_step(metrics)

    try:
        with nullcontext() if stop is None else stop:
            measured = executor.train(
                settings.steps,
                metrics=options.metrics,
                on_step=on_step,
                checkpoints=policy,
                validation=settings.validation,
                asked_to_stop=stop,
            )
    except FinishedError as finished:
        _tell_finished(finished, executor.mesh.rank, options.failures)
        executor.close()
        return 0
    except Exception as error:
        trained = log.segment()
        if trained is not None and options.output:
            _write(options.output, executor.unfinished(trained, why_of(error)))
        raise
    if executor.mesh.rank == 0 and options.output:
        _write(options.output, measured)
    if (
        executor.mesh.rank == 0
        and executor.stopped
        and policy is not None
        and options.failures is not None
    ):
        step = measured.first_step + measured.steps
        write_stopped(options.failures, step, final_path(policy.directory, step))
    executor.close()
    return STOPPED if executor.stopped else 0


def _tell_finished(finished: FinishedError, rank: int, failures: Path | None) -> None:
    """A launcher looks for word of it; who has started torchrun himself reads what rank 0 says."""
    if failures is not None:
        write_failure(failures, rank, finished)
    elif rank == 0:
        sys.stderr.write(f"{finished}\n")


def _write(path: str, measured: MeasuredRun) -> None:
    write_whole(Path(path), measured.model_dump_json(indent=1))


def make_executor(plan: Plan | str, settings: RunSettings) -> Executor:
    """This rank's executor."""
    now("while it imported torch and the executor")
    from planner.executor.executor import Executor

    return Executor(
        plan,
        settings.model,
        data=settings.data,
        loss=settings.loss,
        seed=settings.seed,
        learning_rate=settings.learning_rates,
        optimizer_options=settings.optimizer_options,
        max_gradient_norm=settings.max_gradient_norm,
        device=settings.device,
        timeout_seconds=settings.timeout_seconds,
        weights=settings.weights,
        deterministic=settings.deterministic,
    )


def print_step(metrics: Metrics) -> None:
    """One line of JSON, for the launcher to read."""
    sys.stdout.write(metrics.to_line())
    sys.stdout.flush()


if __name__ == "__main__":
    end_with_parent()
    sys.exit(main())
