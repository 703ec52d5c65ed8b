"""Settings of the service: command line over ``PLANNER_*`` environment over a TOML file over the defaults."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from planner.errors import DocumentError, Problem
from planner.profiler.cores import available_cores
from planner.spec.document import problems_of

ENVIRONMENT_PREFIX = "PLANNER_"
MEBIBYTE = 1 << 20
GIBIBYTE = 1 << 30


class Settings(BaseModel):
    """Settings of the service.

    Every field is also an environment variable: ``PLANNER_PORT``, ``PLANNER_DATABASE``.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        validate_default=True,
        use_attribute_docstrings=True,
    )

    host: str = Field(default="127.0.0.1", min_length=1)
    """Address to listen on; 0.0.0.0 for every interface."""
    port: int = Field(default=8000, ge=0, le=65535)
    """0: any free port."""
    root_path: str = Field(default="", pattern=r"^(/[\w.~-]+)*$")
    """Path prefix that a reverse proxy adds and strips, such as ``/planner``."""
    keys_file: str = ""
    """File of API keys, one ``NAME SCOPE SHA256`` per line (`planner serve --make-key`)."""
    keys: str = ""
    """More API keys, as lines of such a file; for secrets in environment variables."""
    without_keys: bool = False
    """Allow access from other machines without API keys."""
    allowed_hosts: str = ""
    """Host names of the service besides addresses and `localhost`, comma-separated;
    ``*.example.org`` for subdomains. Empty: none on loopback without keys, else any."""
    database: Path = Path("planner.db")
    """SQLite file of plans, profiles and jobs; created if missing."""
    database_url: str = Field(default="", pattern=r"^(postgresql://.+)?$")
    """``postgresql://USER:PASSWORD@HOST/NAME`` instead of the file: several services
    share it, and `planner worker` runs the jobs."""
    worker_timeout_seconds: float = Field(default=30.0, gt=0)
    """Seconds without a sign of life after which other workers take a worker's jobs."""
    worker_heartbeat_file: str = ""
    """File that a running worker touches every few seconds, for liveness probes; empty: none."""
    metrics_port: int = Field(default=0, ge=0, le=65535)
    """Port of the metrics of `planner worker`, on the address `host`; 0: none. Services
    have them at ``/metrics``."""
    keep_plans_days: float = Field(default=0.0, ge=0)
    """Age in days at which plans without measured runs, and unused profiles, are deleted;
    0: never."""
    keep_jobs_days: float = Field(default=0.0, ge=0)
    """Days after which finished jobs are deleted; 0: never."""
    max_body_bytes: int = Field(default=32 * MEBIBYTE, ge=1024)
    """Largest request body, in bytes."""
    max_layers: int = Field(default=10_000, ge=1)
    """Largest number of layers of a profile."""
    max_devices: int = Field(default=131_072, ge=1)
    """Largest number of devices of a cluster."""
    max_solver_seconds: float = Field(default=600.0, gt=0)
    """Largest `options.time_limit_seconds` of a request, in seconds; limits predictions too."""
    solver_grace_seconds: float = Field(default=30.0, ge=0)
    """Seconds after its time limit at which a solver is killed."""
    max_solver_bytes: int = Field(default=8 * GIBIBYTE, ge=GIBIBYTE)
    """Largest address space of one solver process, in bytes."""
    concurrency: int = Field(default_factory=available_cores, ge=1)
    """Number of solver processes that run at the same time."""
    spare_solvers: int = Field(default=1, ge=0)
    """Number of idle solver processes, which have done their slow imports."""
    queue_length: int = Field(default=32, ge=0)
    """Number of jobs that may wait for a process or worker; further requests get 429."""
    max_jobs_per_client: int = Field(default=16, ge=0)
    """Jobs that one key, or one address without keys, may have; 0: any number."""
    default_wait_seconds: float = Field(default=5.0, ge=0)
    """Seconds that POST /v1/plans waits for the plan without ``Prefer: wait=N``."""
    max_wait_seconds: float = Field(default=60.0, ge=0)
    """Longest wait that a client may request, in seconds."""

    @property
    def store_place(self) -> Path | str:
        """Path of the SQLite file, or URL of PostgreSQL."""
        return self.database_url or self.database

    def without_secrets(self) -> Settings:
        """The settings as they may be printed."""
        url = re.sub(r"(?<=//)([^/@]*):[^/@]*@", r"\1:***@", self.database_url)
        return self.model_copy(update={"database_url": url})


def load_settings(
    overrides: Mapping[str, Any] | None = None,
    *,
    config: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Settings:
    """Settings from all sources.

    Args:
        overrides: from the command line; they have priority, and None is not set.
        config: path of a TOML file.
        environment: None: that of this process.

    Raises:
        DocumentError: a value is wrong, a file cannot be read, or a name is unknown; the field names its source.
    """
    environment = os.environ if environment is None else environment
    sources = [
        _from_file(Path(config)) if config is not None else {},
        _from_environment(environment),
        {
            name: (value, "")
            for name, value in (overrides or {}).items()
            if value is not None
        },
    ]
    merged = {name: found for source in sources for name, found in source.items()}
    given = {name: value for name, (value, _) in merged.items()}
    try:
        return Settings.model_validate(given)
    except ValidationError as error:
        problems = tuple(
            _with_source(problem, merged)
            for problem in problems_of(error, Settings, given)
        )
        raise DocumentError("", problems=problems) from None


def _from_file(path: Path) -> dict[str, tuple[Any, str]]:
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DocumentError(
            f"cannot be read: {error.strerror}.",
            field=str(path),
            hint="give a readable TOML file.",
        ) from None
    except ValueError as error:
        raise DocumentError(
            f"is not valid TOML: {error}.", field=str(path), hint="correct the file."
        ) from None
    return {name: (value, f"{path}: {name}") for name, value in values.items()}


def _from_environment(environment: Mapping[str, str]) -> dict[str, tuple[Any, str]]:
    """Variables of settings; others with the prefix belong to commands or Kubernetes."""
    found = {}
    for name in Settings.model_fields:
        variable = ENVIRONMENT_PREFIX + name.upper()
        if variable in environment:
            found[name] = (environment[variable], variable)
    return found


def _with_source(problem: Problem, merged: Mapping[str, tuple[Any, str]]) -> Problem:
    value, source = merged.get(problem.field, (None, ""))
    hint = problem.hint
    if isinstance(value, str) and value.startswith("tcp://"):
        hint = (
            "Kubernetes sets this variable for a Service named planner; "
            "set enableServiceLinks: false, or rename the Service."
        )
    return replace(problem, field=source or problem.field, hint=hint)
