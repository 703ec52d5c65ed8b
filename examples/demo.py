"""Profile, plan over HTTP, train, compare with the prediction, lose a rank (`make demo`).

Every step is a command or a request that you can repeat by hand; the demo prints each one
before it runs it, and writes its files to demo-output/.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from planner.client import Client
from planner.errors import PlannerError
from planner.spec import Infeasible, Plan
from planner.spec.plan import Stage

OUTPUT = Path("demo-output")
MODEL = "gpt2"
RANKS = 4
CONCURRENCY = min(RANKS, os.cpu_count() or 1)
"""Ranks that compute at the same time; the others wait for their neighbours or for a core."""
SEQUENCE_LENGTH = 64
GLOBAL_BATCH_SIZE = 8
MICRO_BATCH_SIZES = "1,2,4"
STEPS = 20
REFERENCE_STEPS = 3
PLAN_SECONDS = 120.0
"""Longest wait for a plan."""
SURVIVED_STEPS = 10
CHECKPOINT_EVERY = 4
TOLERANCE = 0.02
"""Largest difference of a loss under another plan: dropout is drawn per micro-batch, whose size may change."""
DEVICE_MEMORY_FRACTION = 0.8
"""Memory of a device, as a fraction of the whole model's states: the model must be split."""
ADAMW_FP32_BYTES = 16
"""Bytes per parameter: value, gradient and two optimizer states of 4 bytes each."""


def main() -> int:
    """Run all steps; return the exit code of the step that failed, or 0."""
    started = time.monotonic()
    OUTPUT.mkdir(exist_ok=True)
    title(
        "1. Profile GPT-2 small (124 M parameters) on this machine's CPU, with as many busy cores as in the run"
    )
    planner("profile", MODEL, "--device", "cpu", "--sequence-length", str(SEQUENCE_LENGTH), "--micro-batch-sizes",
            MICRO_BATCH_SIZES, "--concurrency", str(CONCURRENCY), "-o", OUTPUT / "profile.json")  # fmt: skip
    title("2. Measure the links between four local ranks under torchrun (gloo)")
    planner("links", "--ranks", str(RANKS), "-o", OUTPUT / "links.json", shown=8)
    title("3. Start the service and ask it over HTTP for a plan")
    write("job.json", job())
    write("cluster.json", cluster())
    if CONCURRENCY < RANKS:
        write(
            "profile.json",
            on_shared_cores(
                read("profile.json"), read("links.json")["pipeline_slowdown"]
            ),
        )
    with service() as client:
        plan = request_plan(client)
    title(
        f"4. Train {STEPS} steps by that stage map under torchrun, on the sources of Python's standard library"
    )
    planner("run", OUTPUT / "plan.json", "--model", MODEL, "--steps", str(STEPS), "--reference-steps",
            str(REFERENCE_STEPS), "-o", OUTPUT / "measured.json", "--metrics", OUTPUT / "metrics.jsonl")  # fmt: skip
    title("5. Draw what was predicted and what was measured")
    draw()
    title(
        f"6. Train the first {SURVIVED_STEPS} of these steps again, and kill a rank on the way"
    )
    difference = survive()
    return finish(plan, difference, time.monotonic() - started)


def job() -> dict[str, Any]:
    """Return the job document."""
    shared = CONCURRENCY < RANKS
    return {
        "global_batch_size": GLOBAL_BATCH_SIZE,
        "sequence_length": SEQUENCE_LENGTH,
        "precision": "fp32",
        "optimizer": "adamw",
        # The cost of shared cores was measured in a pipeline of all ranks, in which some
        # always wait. One rank may be lost; ranks that all compute at once would be slower.
        "constraints": {
            "pipeline_parallel_degree": {"min": RANKS - 1},
            "schedule": "1f1b",
        }
        if shared
        else {},
    }


def cluster() -> dict[str, Any]:
    """Return the cluster of four measured CPU ranks, each too small for the whole model."""
    profile = read("profile.json")
    whole = ADAMW_FP32_BYTES * (
        sum(layer["parameters"] for layer in profile["layers"])
        - shared_parameters(profile)
    )
    device = profile["device_spec"]
    limit = int(DEVICE_MEMORY_FRACTION * (whole + (device["reserved_bytes"] or 0)))
    say(
        f"each of {RANKS} devices has {limit / 1e9:.2f} GB; the model's states alone need {whole / 1e9:.2f} GB"
    )
    group = {
        "name": "this-machine",
        "device": device | {"memory_bytes": limit},
        "nodes": 1,
        "devices_per_node": RANKS,
        "intra_node": read("links.json"),
    }
    return {"name": "four-local-ranks", "node_groups": [group]}


def on_shared_cores(profile: dict[str, Any], slowdown: float) -> dict[str, Any]:
    """Lengthen the seconds of the profile: layers were timed with a core each, and ranks share cores."""
    say(
        f"{RANKS} ranks share {CONCURRENCY} cores: a pipeline of them is {slowdown:.2f} x slower, as measured"
    )
    say("the job is constrained to such a pipeline")
    rows = [row for layer in profile["layers"] for row in layer["measurements"]]
    for row in rows:
        row |= {
            name: value * slowdown
            for name, value in row.items()
            if name.endswith("_seconds") and value
        }
    return profile


def shared_parameters(profile: dict[str, Any]) -> int:
    """Return the number of parameters that the profile lists twice: GPT-2's head is its token embedding."""
    return sum(
        shared["parameters"] * (len(shared["layers"]) - 1)
        for shared in profile["shared_parameters"]
    )


@contextmanager
def service() -> Iterator[Client]:
    """Run the service on a free port; yield a client of it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [*command_line("serve"), "--port", str(port)]
    command += ["--database", str(OUTPUT / "planner.db")]
    show(command)
    log_path = OUTPUT / "service.log"
    with (
        log_path.open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
        Client(f"http://127.0.0.1:{port}") as client,
    ):
        try:
            client.wait_until_ready(timeout_seconds=30)
            yield client
        except PlannerError as error:
            sys.exit(f"{error}\nsee {log_path}")
        finally:
            process.terminate()


def request_plan(client: Client) -> dict[str, Any]:
    """Ask for a plan: first with the whole model on every device, which does not fit,
    then within the job's constraints."""
    names = ("profile", "cluster", "job")
    body = {name: read(f"{name}.json") for name in names}
    single = {
        "pipeline_parallel_degree": 1,
        "tensor_parallel_degree": 1,
        "zero_stage": 0,
    }
    undivided = body | {"job": body["job"] | {"constraints": single}}
    alone = client.plan(undivided, timeout_seconds=PLAN_SECONDS)
    if isinstance(alone, Plan):
        sys.exit("the whole model fits on a device")
    say(f"without a split: infeasible, {alone.reasons[0]}")
    begun = time.monotonic()
    plan = client.plan(body, timeout_seconds=PLAN_SECONDS)
    if isinstance(plan, Infeasible):
        sys.exit(f"no plan: {plan.reasons[0]}")
    say(f"with a split: plan {plan.id[:12]} after {time.monotonic() - begun:.2f} s")
    begun = time.monotonic()
    again = client.submit(body)
    seconds = time.monotonic() - begun
    say(f"the same request again: known after {seconds:.2f} s: {again == plan}")
    write("plan.json", plan.to_json())
    for sentence in plan.explanation:
        say(sentence)
    for stage in plan.stages:
        say(in_words(stage))
    return plan.to_json()


def in_words(stage: Stage) -> str:
    """Return the ranks and layers of a stage."""
    names = [layer.name for layer in stage.layers]
    recomputed = sum(layer.recompute != "none" for layer in stage.layers)
    return (
        f"stage {stage.index} on ranks {list(stage.ranks)}: {names[0]} .. {names[-1]}, "
        f"{len(names)} layers, {recomputed} recomputed"
    )


def draw() -> None:
    """Write Chrome traces of the predicted and the measured step, and pictures of both."""
    plan, measured = OUTPUT / "plan.json", OUTPUT / "measured.json"
    planner("timeline", plan, "-o", OUTPUT / "predicted-trace.json")
    planner("timeline", measured, "-o", OUTPUT / "measured-trace.json")
    for name in ("timeline.html", "timeline.svg"):
        planner("timeline", plan, measured, "-o", OUTPUT / name)


def survive() -> float:
    """Kill a rank while training; return the largest difference of a loss from the undisturbed run.

    The run plans again for the remaining devices. Checkpoints are stored by the names of
    the model's parameters, so that another stage map loads them.
    """
    checkpoints = OUTPUT / "checkpoints"
    shutil.rmtree(checkpoints, ignore_errors=True)
    command = [
        *command_line("run"),
        str(OUTPUT / "plan.json"),
        "--model",
        MODEL,
        "--steps",
        str(SURVIVED_STEPS),
    ]
    command += [
        "--checkpoint-dir",
        str(checkpoints),
        "--checkpoint-every",
        str(CHECKPOINT_EVERY),
        "--keep",
        "1",
    ]
    command += ["--elastic", "--json", "-o", str(OUTPUT / "survived.json")]
    show(command)
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        killed = False
        for line in process.stderr:
            print(line, end="", flush=True)
            if (
                not killed
                and line.startswith("step ")
                and list(checkpoints.glob("step-*"))
            ):
                killed = kill_a_rank(process.pid)
    if process.returncode != 0:
        sys.exit(process.returncode)
    kept = sum(file.stat().st_size for file in checkpoints.rglob("*") if file.is_file())
    say(f"the last checkpoint, {kept / 1e9:.1f} GB, is removed")
    shutil.rmtree(checkpoints)
    survived = read("survived.json")
    by_step: dict[int, float] = {}
    for part in (*survived["segments"], survived):
        by_step |= dict(enumerate(part["losses"], part["first_step"]))
    undisturbed: list[float] = read("measured.json")["losses"]
    return max(abs(loss - undisturbed[step]) for step, loss in by_step.items())


def kill_a_rank(launcher: int) -> bool:
    """Send SIGKILL to one rank of a run; return False if the system does not list processes."""
    parents = dict(process_parents())
    for pid in sorted(parents, reverse=True):
        if parents.get(parents[pid]) == launcher:  # planner -> torchrun -> rank
            say(f"kill -9 {pid}")
            os.kill(pid, signal.SIGKILL)
            return True
    say("no rank was killed: this system has no /proc")
    return False


def process_parents() -> Iterator[tuple[int, int]]:
    """Yield every process and its parent, from /proc."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            yield (
                int(path.parent.name),
                int(path.read_text().rpartition(")")[2].split()[1]),
            )


def finish(plan: dict[str, Any], difference: float, seconds: float) -> int:
    """Print the results; return 1 if the loss did not fall or the disturbed run differs."""
    measured = read("measured.json")
    predicted, real = (
        plan["prediction"]["step_seconds"],
        measured["median_step_seconds"],
    )
    say(
        f"step: predicted {predicted:.3f} s, measured {real:.3f} s ({100 * (predicted / real - 1):+.1f} %)"
    )
    say(
        f"loss: {measured['losses'][0]:.3f} -> {measured['losses'][-1]:.3f} after {measured['steps']} steps"
    )
    say(f"with a rank killed, losses differ by at most {difference:.1e} from the undisturbed run "
        "(dropout is drawn per micro-batch, whose size another plan may change)")  # fmt: skip
    say(
        f"the demo took {seconds:.0f} s; see {OUTPUT / 'timeline.html'}, or open the traces in ui.perfetto.dev"
    )
    return (
        0
        if measured["losses"][-1] < measured["losses"][0] and difference < TOLERANCE
        else 1
    )


def planner(*arguments: object, shown: int | None = None) -> None:
    """Run a `planner` command; print only the first `shown` lines of its output, if given."""
    command = [*command_line(str(arguments[0])), *map(str, arguments[1:])]
    show(command)
    done = subprocess.run(
        command, stdout=subprocess.PIPE if shown is not None else None, text=True
    )
    if shown is not None:
        print("\n".join(done.stdout.splitlines()[:shown]), flush=True)
    if done.returncode != 0:
        sys.exit(done.returncode)


def command_line(verb: str) -> list[str]:
    """Return the command line of a verb of `planner`."""
    return [str(Path(sys.executable).parent / "planner"), verb]


def show(command: Sequence[str]) -> None:
    """Print a command as a user would type it."""
    print(f"$ {shlex.join(['planner', *command[1:]])}", flush=True)


def title(text: str) -> None:
    """Print the title of a step."""
    print(f"\n== {text}", flush=True)


def say(text: str) -> None:
    """Print one line."""
    print(f"   {text}", flush=True)


def read(name: str) -> Any:
    """Read a JSON document of the output folder."""
    return json.loads((OUTPUT / name).read_text(encoding="utf-8"))


def write(name: str, document: Any) -> None:
    """Write a JSON document to the output folder."""
    (OUTPUT / name).write_text(json.dumps(document, indent=1), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
