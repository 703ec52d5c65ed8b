"""A PostgreSQL server for tests and benchmarks, started as a user who is not root."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from pathlib import Path

import psycopg

DEBIAN = Path("/usr/lib/postgresql")
PATIENCE_SECONDS = 60.0
USERS = ("postgres", "nobody")


class Cluster:
    """A server that listens on a socket in its own directory only."""

    def __init__(self, binaries: Path) -> None:
        self._binaries = binaries
        self._user = user_of_server()
        # Not in pytest's directory, which only root may enter.
        self.directory = Path(tempfile.mkdtemp(prefix="planner-postgres-"))
        if self._user is not None:
            account = pwd.getpwnam(self._user)
            os.chown(self.directory, account.pw_uid, account.pw_gid)
        self._data = self.directory / "data"
        self._run(
            "initdb",
            *("-D", str(self._data), "-U", "planner", "--auth=trust"),
            *("--encoding=UTF8", "--no-sync"),
        )
        self._server: subprocess.Popen[bytes] | None = None
        self.start()

    def url(self, database: str = "postgres") -> str:
        """URL of a database."""
        return f"postgresql://planner@/{database}?host={self.directory}"

    def new_database(self) -> str:
        """URL of a new, empty database."""
        name = f"t{uuid.uuid4().hex}"
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return self.url(name)

    def start(self) -> None:
        """Start the server and wait until it answers."""
        command = [
            str(self._binaries / "postgres"),
            *("-D", str(self._data), "-k", str(self.directory)),
            *("-c", "listen_addresses=", "-c", "max_connections=300"),
            # Processes are killed, the machine is not: files need not reach the disk.
            *("-c", "fsync=off"),
        ]
        with (self.directory / "log").open("ab") as log:
            self._server = subprocess.Popen(
                command, user=self._user, stdout=log, stderr=log, cwd="/"
            )
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                psycopg.connect(self.url()).close()
                return
            except psycopg.OperationalError:
                assert time.monotonic() < deadline, (self.directory / "log").read_text()
                time.sleep(0.05)

    def kill(self) -> None:
        """Kill the server and its children, as a crash of the machine does."""
        assert self._server is not None
        children = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(self._server.pid)],
            capture_output=True,
            text=True,
            check=False,
        )
        self._server.kill()
        for pid in children.stdout.split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._server.wait()

    def restart(self) -> None:
        """Kill the server and start it again."""
        self.kill()
        self.start()

    def close(self) -> None:
        """Stop the server and delete everything."""
        if self._server is not None:
            self._server.send_signal(signal.SIGQUIT)
            self._server.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [str(self._binaries / program), *arguments],
            user=self._user,
            capture_output=True,
            text=True,
            check=False,
            cwd="/",
        )
        assert done.returncode == 0, done.stderr


def find_binaries() -> Path | None:
    """The directory of `initdb` and `postgres`, which Debian does not put on the path."""
    folders = [Path(folder) for folder in os.environ.get("PATH", "").split(":")]
    folders += sorted(DEBIAN.glob("*/bin"), reverse=True)
    for folder in folders:
        if all((folder / name).exists() for name in ("initdb", "postgres")):
            return folder
    return None


def user_of_server() -> str | None:
    """Who runs the server: None if this process may do so itself."""
    if os.geteuid() != 0:
        return None
    known = {account.pw_name for account in pwd.getpwall()}
    return next((name for name in USERS if name in known), None)
