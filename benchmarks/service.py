"""How fast the HTTP service answers: ``python -m benchmarks.service [--json]``.

Client, service and an empty FastAPI route for comparison run on this machine, in the same
minutes. Exit code 1: a response was wrong or missing. A target that is missed is printed
and changes no exit code, because the seconds depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.arguments import positive_seconds
from benchmarks.service_load import Load, Route, one_by_one, steady, top_rate
from planner.cli.console import note, table
from planner.cli.failures import DONE, FAILED
from planner.client import Client
from planner.spec import Plan

PLAN: dict[str, Any] = {
    "model": "llama-3.1-70b",
    "devices": "64xh100-sxm5-80gb",
    "batch": 128,
    "sequence": 8192,
}
LAYOUT = {"tp": 8, "pp": 4, "dp": 2}
START_SECONDS = 1.5
PREDICTION_MS = 30.0
RATIO = 2.0
STARTS = 3
ROUNDS = 5
"""Loads of each of two routes that are compared."""
HUGE_SECONDS = 20.0
"""Time limit of the search of a huge request."""
ANSWER_SECONDS = HUGE_SECONDS + 10.0
"""Target of the answer to a huge request; /healthz meanwhile has HEALTH_SECONDS."""
HEALTH_SECONDS = 0.3
MEMORY_BYTES = 2_000_000_000
"""Target of the peak memory of the serving process."""
LIMITED: dict[str, Any] = {
    "model": "llama-3.1-405b",
    "options": {"time_limit_seconds": HUGE_SECONDS / 2},
}
HEADER = ("case", "figure", "value", "target", "result")


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of one case."""

    case: str
    figure: str
    value: float
    unit: str
    target: float | None
    """The value is at most this; None: no target."""
    errors: int = 0

    @property
    def met(self) -> bool:
        """Whether the value is within its target."""
        return self.target is None or self.value <= self.target


@dataclass(frozen=True, slots=True)
class Service:
    """A running service."""

    address: str
    pid: int
    ready_seconds: float
    """From its start until /readyz is 200."""

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the serving process, without its solvers."""
        return 1024 * int(_status_of(self.pid)["VmHWM"].split()[0])

    @property
    def has_torch(self) -> bool:
        """Whether the serving process has loaded torch."""
        maps = Path(f"/proc/{self.pid}/maps").read_text(encoding="utf-8")
        return "libtorch" in maps


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit code."""
    arguments = _parser().parse_args(argv)
    before = os.getloadavg()[0]
    rows: list[Row] = []
    for measure in (starts, cached, predictions, huge_requests):
        if arguments.case in (None, measure.__name__.removesuffix("_requests")):
            note(f"{measure.__name__.replace('_', ' ')} ...")
            rows += measure(arguments.seconds)
    machine = {
        "cores": os.cpu_count(),
        "load_before": before,
        "load_after": os.getloadavg()[0],
    }
    if arguments.json:
        found = [asdict(row) | {"met": row.met} for row in rows]
        print(json.dumps({"machine": machine, "rows": found}, indent=2))
    else:
        print(table(HEADER, map(_cells, rows), left=(0, 1, 4)))
        print(", ".join(f"{name} {value}" for name, value in machine.items()))
    return FAILED if any(row.errors for row in rows) else DONE


def starts(seconds: float) -> list[Row]:
    """From the start of the process until it is ready, the median of a few."""
    services = []
    for _ in range(STARTS):
        with running_service() as service:
            services.append(service)
            processor_seconds = cpu_seconds(service.pid)
            loaded = service.has_torch
    times = sorted(service.ready_seconds for service in services)
    ready = Row("start", "until ready", times[STARTS // 2], "s", START_SECONDS)
    processor = Row("start", "processor until ready", processor_seconds, "s", None)
    return [ready, processor, Row("start", "torch is loaded", float(loaded), "", 0.0)]


def cached(seconds: float) -> list[Row]:
    """GET and POST of a known plan beside a route that does nothing."""
    with running_service() as service, empty_service() as empty:
        with Client(service.address) as client:
            plan = client.plan(PLAN, timeout_seconds=300)
        assert isinstance(plan, Plan)
        nothing = Route(empty.address, "GET", "/readyz")
        routes = {
            "GET of a plan": Route(service.address, "GET", f"/v1/plans/{plan.id}"),
            "POST of a known plan": Route(service.address, "POST", "/v1/plans", PLAN),
        }
        top = top_rate(nothing, seconds)
        half = top.rate / 2
        cost_ms = processor_ms(nothing, empty.pid, seconds)
        name = "empty route"
        rows = [
            Row(name, "processor per answer", cost_ms, "ms", None),
            Row(name, "top rate", top.rate, "/s", None, top.errors),
        ]
        for name, route in routes.items():
            cost = processor_ms(route, service.pid, seconds)
            own_top = top_rate(route, seconds)
            rows.append(Row(name, "processor per answer", cost, "ms", None))
            rows.append(Row(name, "top rate", own_top.rate, "/s", None, own_top.errors))
            rows += _beside(name, route, nothing, half, seconds)
            rows += _beside(name, route, nothing, own_top.rate / 2, seconds)
    return rows


def processor_ms(route: Route, pid: int, seconds: float) -> float:
    """Processor time of the server per answer, which a busy machine hardly changes."""
    before = cpu_seconds(pid)
    load = one_by_one(route, seconds)
    return 1000 * (cpu_seconds(pid) - before) / len(load.latencies_seconds)


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process so far, of user and system."""
    text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    fields = text.rpartition(")")[2].split()
    user, system = int(fields[11]), int(fields[12])
    return (user + system) / os.sysconf("SC_CLK_TCK")


def _beside(
    name: str, route: Route, empty: Route, rate: float, seconds: float
) -> list[Row]:
    """p99 of a route, and its ratio to the empty route at the same rate.

    Both are the median of rounds in turn, so that a moment in which other work has the
    processors decides neither.
    """
    pairs = [
        (steady(route, seconds / ROUNDS, rate), steady(empty, seconds / ROUNDS, rate))
        for _ in range(ROUNDS)
    ]
    ours, theirs = (
        statistics.median(load.quantile_ms(0.99) for load in loads)
        for loads in zip(*pairs, strict=True)
    )
    errors = sum(load.errors for pair in pairs for load in pair)
    at = f"at {rate:.0f}/s"
    return [
        Row(name, f"p99 {at}", ours, "ms", None, errors),
        Row(name, f"p99 / empty route {at}", ours / theirs, "", RATIO, errors),
    ]


def predictions(seconds: float) -> list[Row]:
    """Predictions of one layout, one after another."""
    with running_service() as service:
        body = PLAN | {"layout": LAYOUT}
        route = Route(service.address, "POST", "/v1/predictions", body)
        one_by_one(route, 1.0)
        load = one_by_one(route, seconds)
        median = Row("prediction", "median", load.quantile_ms(0.5), "ms", None)
        p99 = Row("prediction", "p99", *_p99(load), PREDICTION_MS, load.errors)
        return [median, p99]


def huge_requests(seconds: float) -> list[Row]:
    """Legal and huge requests: time, /healthz meanwhile, and the peak memory."""
    rows = []
    for name, make_body in HUGE.items():
        body = json.dumps(make_body()).encode()
        with running_service() as service:
            rows += _huge(name, body, service)
    return rows


def _huge(name: str, body: bytes, service: Service) -> list[Row]:
    with httpx2.Client(base_url=service.address, timeout=120) as http:
        pulse = Pulse(service.address)
        pulse.start()
        begun = time.monotonic()
        wait = f"wait={HUGE_SECONDS:g}"
        headers = {"Content-Type": "application/json", "Prefer": wait}
        response = http.post("/v1/plans", content=body, headers=headers)
        taken = time.monotonic() - begun
        longest = pulse.stop()
    answer = f"{len(body) / 1e6:.1f} MB, {response.status_code}"
    if response.status_code >= 400:
        answer += f" {response.json()['code']}"
    wrong = int(response.status_code >= 500)
    return [
        Row(name, f"answer ({answer})", taken, "s", ANSWER_SECONDS, wrong),
        Row(name, "/healthz meanwhile", longest, "s", HEALTH_SECONDS),
        Row(name, "peak memory", service.peak_bytes / 1e9, "GB", MEMORY_BYTES / 1e9),
    ]


class Pulse:
    """Asks for /healthz all the time, and notes the longest wait."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._longest_seconds = 0.0

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> float:
        """End; return the longest wait in seconds."""
        self._stop.set()
        self._thread.join()
        return self._longest_seconds

    def _run(self) -> None:
        with httpx2.Client(base_url=self._address, timeout=120) as http:
            while not self._stop.is_set():
                begun = time.monotonic()
                http.get("/healthz").raise_for_status()
                taken = time.monotonic() - begun
                self._longest_seconds = max(self._longest_seconds, taken)
                self._stop.wait(0.05)


def many_devices() -> dict[str, Any]:
    """A million devices."""
    devices = {"devices": "1000000xh100-sxm5-80gb", "batch": 1_000_000}
    return PLAN | devices | LIMITED


def most_devices() -> dict[str, Any]:
    """As many devices as the service plans for."""
    devices = {"devices": "131072xh100-sxm5-80gb", "batch": 131_072}
    return PLAN | devices | LIMITED


def many_alternatives() -> dict[str, Any]:
    """A thousand alternatives."""
    return PLAN | {"options": {"top": 1000}}


def many_layers() -> dict[str, Any]:
    """A profile of 100,000 layers."""
    return layers_request(100_000)


def most_layers() -> dict[str, Any]:
    """As many layers as the service plans for."""
    return layers_request(10_000)


def layers_request(count: int) -> dict[str, Any]:
    """A request with a profile of so many layers."""
    row = {
        "micro_batch_size": 1,
        "sequence_length": 128,
        "forward_flops": 10**9,
        "backward_input_flops": 10**9,
        "backward_weight_flops": 10**9,
        "forward_seconds": 0.01,
        "backward_input_seconds": 0.01,
        "backward_weight_seconds": 0.01,
        "activation_bytes": 1 << 20,
        "output_bytes": 1 << 16,
        "temporary_bytes": 1 << 16,
        "source": "measured",
    }
    layers = [
        {
            "name": f"block{index}",
            "kind": "block",
            "modules": [str(index)],
            "parameters": 1000,
            "measurements": [row],
        }
        for index in range(count)
    ]
    device = {"id": "cpu-rank", "memory_bytes": 1 << 34, "reserved_bytes": 0}
    link = {"latency_seconds": 1e-5, "bandwidth_bytes_per_second": 1e9}
    group = {"device": device, "nodes": 1, "devices_per_node": 2, "intra_node": link}
    return {
        "profile": {
            "model": "deep",
            "device": "cpu-rank",
            "dtype": "fp32",
            "tokens_per_sample": 128,
            "layers": layers,
        },
        "cluster": {"node_groups": [group]},
        "job": {
            "global_batch_size": 8,
            "sequence_length": 128,
            "precision": "fp32",
            "memory_headroom": 0.1,
        },
        "options": {"time_limit_seconds": HUGE_SECONDS / 2},
    }


def many_groups() -> dict[str, Any]:
    """A million empty node groups: small to send, and each of them wrong."""
    job = {"global_batch_size": 8, "sequence_length": 128}
    return {"model": "gpt2", "cluster": {"node_groups": [{}] * 1_000_000}, "job": job}


def many_fields() -> dict[str, Any]:
    """A million unknown fields."""
    return PLAN | {f"field{index}": 0 for index in range(1_000_000)}


HUGE: dict[str, Callable[[], dict[str, Any]]] = {
    "1,000,000 devices": many_devices,
    "131,072 devices": most_devices,
    "1,000 alternatives": many_alternatives,
    "100,000 layers": many_layers,
    "10,000 layers": most_layers,
    "1,000,000 node groups": many_groups,
    "1,000,000 unknown fields": many_fields,
}


@contextmanager
def running_service() -> Iterator[Service]:
    """Start a service of its own process and database; yield it once it is ready."""
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        database = Path(folder) / "planner.db"
        words = ["planner.cli.main", "serve", "--port", str(port)]
        words += ["--database", str(database)]
        begun = time.monotonic()
        with _process(words) as process:
            address = f"http://127.0.0.1:{port}"
            with Client(address) as client:
                client.wait_until_ready(timeout_seconds=60)
            yield Service(address, process.pid, time.monotonic() - begun)


@contextmanager
def empty_service() -> Iterator[Service]:
    """Serve a route that does nothing, in a process of its own."""
    port = free_port()
    begun = time.monotonic()
    with _process(["benchmarks.service_empty", str(port)]) as process:
        address = f"http://127.0.0.1:{port}"
        with Client(address) as client:
            client.wait_until_ready(timeout_seconds=60)
        yield Service(address, process.pid, time.monotonic() - begun)


@contextmanager
def _process(words: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a module; end it with the block."""
    quiet = subprocess.DEVNULL
    command = [sys.executable, "-m", *words]
    with subprocess.Popen(command, stdout=quiet, stderr=quiet) as process:
        try:
            yield process
        finally:
            process.terminate()


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _status_of(pid: int) -> dict[str, str]:
    """What Linux reports of a process."""
    text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    pairs = (line.partition(":") for line in text.splitlines())
    return {name: value.strip() for name, _, value in pairs}


def _p99(load: Load) -> tuple[float, str]:
    return load.quantile_ms(0.99), "ms"


def _cells(row: Row) -> tuple[str, ...]:
    value = f"{row.value:.4g} {row.unit}".strip()
    target = "-" if row.target is None else f"<= {row.target:g} {row.unit}".strip()
    state = "met" if row.met else "missed"
    if row.target is None:
        state = "-"
    if row.errors:
        state = f"{row.errors} errors"
    return row.case, row.figure, value, target, state


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.service", description=__doc__
    )
    cases = ("starts", "cached", "predictions", "huge")
    parser.add_argument("--case", choices=cases, help="one case only")
    parser.add_argument(
        "--seconds",
        type=positive_seconds,
        default=5.0,
        help="length of each load [default: 5]",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


if __name__ == "__main__":
    sys.exit(main())
