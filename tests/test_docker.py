"""The container files, as far as they can be checked without a container engine."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from planner.api.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
DOCKERFILES = sorted((ROOT / "docker").glob("Dockerfile.*"))
COMPOSE = ROOT / "docker" / "compose.yaml"
INSTRUCTIONS = {
    *("FROM", "WORKDIR", "RUN", "COPY", "LABEL", "ENV", "USER", "VOLUME"),
    *("EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"),
}


def instructions(path: Path) -> list[tuple[str, str]]:
    """(name, arguments) of every instruction, continued lines joined, comments left out."""
    lines = [
        line
        for line in path.read_text(encoding="utf-8").splitlines()
        if not line.lstrip().startswith("#")
    ]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    parts = [line.split(maxsplit=1) for line in joined.splitlines() if line.strip()]
    return [(name, rest) for name, rest in parts]


def stages(path: Path) -> dict[str, list[tuple[str, str]]]:
    """Instructions by stage; a stage without a name is called by its number."""
    found: dict[str, list[tuple[str, str]]] = {}
    for name, rest in instructions(path):
        if name == "FROM":
            alias = re.search(r"\bAS (\w+)$", rest)
            found[alias[1] if alias else str(len(found))] = []
        list(found.values())[-1].append((name, rest))
    return found


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfiles_parse(path: Path) -> None:
    """Every line is a known instruction, the first is FROM, and lists in exec form are JSON."""
    found = instructions(path)
    assert found[0][0] == "FROM"
    assert {name for name, _ in found} <= INSTRUCTIONS
    for name, rest in found:
        if name in ("ENTRYPOINT", "CMD"):
            assert all(isinstance(word, str) for word in json.loads(rest))


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_copied_files_exist(path: Path) -> None:
    """Every COPY source is in the checkout, or made by an earlier stage."""
    earlier: set[str] = set()
    for stage, found in stages(path).items():
        for rest in [rest for name, rest in found if name == "COPY"]:
            words = shlex.split(rest)
            if words[0].startswith("--from="):
                assert words[0].removeprefix("--from=") in earlier
                continue
            assert [
                source for source in words[:-1] if not (ROOT / source).exists()
            ] == []
        earlier.add(stage)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_images_hold_every_package(path: Path) -> None:
    """What the wheel packs is copied into the build."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    copied = {
        word
        for name, rest in instructions(path)
        if name == "COPY"
        for word in shlex.split(rest)[:-1]
    }
    assert (
        set(pyproject["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])
        <= copied
    )


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_what_an_image_copies_builds_a_whole_wheel(path: Path, tmp_path: Path) -> None:
    """The links to `api` and `profiler` resolve among the files that COPY brings."""
    source = tmp_path / "src"
    source.mkdir()
    for name, rest in instructions(path):
        if name == "COPY" and not rest.startswith("--from="):
            *names, _ = shlex.split(rest)
            for each in names:
                copy_into_image(ROOT / each, source / each)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", str(source)]
    done = subprocess.run(
        [*build, "--outdir", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    expected = {"planner/py.typed", "planner/api/app.py", "planner/profiler/links.py"}
    assert expected <= set(names)


def copy_into_image(source: Path, target: Path) -> None:
    """Copy as COPY does: symbolic links stay links, ignored files stay behind."""
    if source.is_dir():
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(source, target, symlinks=True, ignore=ignored)
    else:
        shutil.copy(source, target)


def test_service_image() -> None:
    """The service's image installs no torch, does not run as root, and sets only settings that exist."""
    found = instructions(ROOT / "docker" / "Dockerfile.api")
    assert not any("torch" in rest for name, rest in found if name == "RUN")
    assert dict(found)["USER"] != "root"
    variables = re.findall(r"\bPLANNER_(\w+)=", dict(found)["ENV"])
    assert variables
    assert {name.lower() for name in variables} <= set(Settings.model_fields)


def test_health_check_is_valid_python() -> None:
    """The health check is a command in exec form whose program compiles."""
    check = dict(instructions(ROOT / "docker" / "Dockerfile.api"))["HEALTHCHECK"]
    command = json.loads(check[check.index("CMD ") + 4 :])
    compile(command[-1], "healthcheck", "exec")
    assert "/healthz" in command[-1]


def test_executor_image_has_the_pinned_torch() -> None:
    """The base image's torch is the version that constraints.txt pins."""
    base = dict(instructions(ROOT / "docker" / "Dockerfile.executor"))["FROM"]
    pinned = re.search(
        r"^torch==(.+)$",
        (ROOT / "constraints.txt").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    assert pinned is not None
    assert f"pytorch:{pinned[1]}-" in base


def test_compose_file() -> None:
    """Every service has an image or a file to build it from, and every named volume is declared."""
    compose: dict[str, Any] = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))
    for service in compose["services"].values():
        assert "image" in service or "build" in service
        if "build" in service:
            context = COMPOSE.parent / service["build"]["context"]
            assert (context / service["build"]["dockerfile"]).is_file()
        named = {volume.split(":")[0] for volume in service.get("volumes", ())}
        assert named - {".."} <= set(compose["volumes"])
        assert set(service.get("depends_on", ())) <= set(compose["services"])


def test_compose_services_share_one_database() -> None:
    """Service and workers have the same URL, whose host is the database's service; its image has the driver."""
    services = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"]
    urls = {
        services[name]["environment"]["PLANNER_DATABASE_URL"]
        for name in ("api", "worker")
    }
    (url,) = urls
    assert re.fullmatch(r"postgresql://planner:\$\{.+\}@database/planner", url)
    assert services["worker"]["command"] == ["worker"]
    assert services["database"]["environment"]["POSTGRES_DB"] == "planner"
    installs = dict(instructions(ROOT / "docker" / "Dockerfile.api"))
    assert "postgresql" in str(
        [rest for _, rest in instructions(ROOT / "docker" / "Dockerfile.api")]
    )
    assert installs["ENTRYPOINT"] == '["planner"]'


def test_compose_publishes_what_needs_no_keys_to_this_machine_only() -> None:
    """Without keys no port is open to others, and every variable of the service is one of its settings."""
    service = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"]["api"]
    settings = {
        name.removeprefix("PLANNER_").lower(): value
        for name, value in service["environment"].items()
    }
    assert Settings.model_validate(settings).without_keys
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
