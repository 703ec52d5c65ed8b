"""The package as users install it: without torch, beside modules of the same names.

Nothing is downloaded. The packages that a plain install needs are linked from this
environment, so that the new one has them and nothing else: no torch.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from planner.version import __version__

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LINKED = {"api": "planner/api", "profiler": "planner/profiler"}
"""Folders at the top level, and where they are in the installed package."""
PLAN = (
    *("plan", "llama-3.2-1b", "--devices", "8xh100-sxm5-80gb"),
    *("--batch", "64", "--sequence", "2048"),
)


def run(
    command: Sequence[str | Path], *, cwd: Path, path: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a command with no setting of this shell that changes what Python imports.

    Args:
        command: program and arguments.
        cwd: working directory.
        path: ``PYTHONPATH``; empty for none.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "PLANNER_"))
    }
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    if path:
        environment["PYTHONPATH"] = path
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def succeed(
    command: Sequence[str | Path], *, cwd: Path, path: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run a command that must exit with 0."""
    done = run(command, cwd=cwd, path=path)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT]
    succeed(build, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(distributions: Path) -> Path:
    """The wheel built from the source distribution."""
    [path] = distributions.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def dependencies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to import from: what a plain install and its build backend need."""
    folder = tmp_path_factory.mktemp("dependencies")
    roots = PROJECT["project"]["dependencies"] + ["hatchling", "editables"]
    for distribution in installed_closure(roots):
        for name in top_level_names(distribution):
            target = Path(str(distribution.locate_file(name)))
            link = folder / name
            if target.exists() and not link.exists():
                link.symlink_to(target)
    return folder


def installed_closure(
    requirements: Sequence[str],
) -> list[importlib.metadata.Distribution]:
    """Installed distributions that these requirements need, directly or not."""
    found: dict[str, importlib.metadata.Distribution] = {}
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        requirement = waiting.pop()
        name = requirement.name.lower().replace("_", "-")
        if name in found:
            continue
        distribution = importlib.metadata.distribution(requirement.name)
        found[name] = distribution
        for text in distribution.requires or ():
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                waiting.append(needed)
    return list(found.values())


def top_level_names(distribution: importlib.metadata.Distribution) -> set[str]:
    """Folders and files that a distribution adds to site-packages."""
    names = {path.parts[0] for path in distribution.files or ()}
    return names - {"..", "__pycache__"}


@pytest.fixture(scope="module", params=["wheel", "folder", "editable"])
def python(
    request: pytest.FixtureRequest,
    wheel: Path,
    dependencies: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """The interpreter of a fresh environment with the package and without torch."""
    folder = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    [site_packages] = folder.glob("lib/python*/site-packages")
    paths = site_packages / "dependencies.pth"
    paths.write_text(f"{dependencies}\n", encoding="utf-8")
    what = {"wheel": [wheel], "folder": [ROOT], "editable": ["-e", ROOT]}
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    pip = [sys.executable, "-m", "pip", "--python", python, "install", *options]
    succeed([*pip, *what[request.param]], cwd=folder)
    return python


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A user's folder with a module `api` and a package `profiler` of their own."""
    (tmp_path / "api.py").write_text("OWNER = 'user'\n", encoding="utf-8")
    package = tmp_path / "profiler"
    package.mkdir()
    (package / "__init__.py").write_text("OWNER = 'user'\n", encoding="utf-8")
    for name in ("links", "counted", "measure_load", "measure_memory"):
        text = "raise SystemExit('the user module was started')\n"
        (package / f"{name}.py").write_text(text, encoding="utf-8")
    return tmp_path


def packaged_files() -> set[str]:
    """Paths that the wheel must have: every file of the three folders."""
    listed = succeed(["git", "ls-files", "planner", *LINKED], cwd=ROOT).stdout
    paths = set()
    for line in listed.splitlines():
        top, _, rest = line.partition("/")
        path = f"{LINKED.get(top, top)}/{rest}"
        if path not in LINKED.values() and (ROOT / line).exists():
            paths.add(path)
    return paths


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_wheel_has_every_file(wheel: Path) -> None:
    """The wheel from the sdist has every file of the packages, and claims one name."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"planner", f"planner-{__version__}.dist-info"}
    assert packaged_files() <= names
    assert {
        "planner/py.typed",
        "planner/api/app.py",
        "planner/spec/devices.csv",
    } <= names


def test_wheel_metadata(wheel: Path) -> None:
    """The metadata has summary, licence, keywords and classifiers, and no torch."""
    [distribution] = importlib.metadata.distributions(path=[str(wheel)])
    metadata = distribution.metadata
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Keywords"]
    assert "Typing :: Typed" in (metadata.get_all("Classifier") or [])
    plain = [text for text in distribution.requires or () if "extra ==" not in text]
    assert {Requirement(text).name for text in plain}.isdisjoint({"torch", "scipy"})


def test_sdist_has_no_links(distributions: Path) -> None:
    """The source distribution has folders where the checkout has links."""
    [path] = distributions.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        members = archive.getmembers()
    assert [member.name for member in members if member.issym()] == []
    names = {member.name.partition("/")[2] for member in members}
    assert {"planner/api/app.py", "planner/profiler/links.py", "LICENSE"} <= names


def test_modules_of_the_user_keep_their_names(python: Path, workplace: Path) -> None:
    """`import api, profiler` gives the user's modules; ours are inside `planner`."""
    code = (
        "import api, profiler, planner, planner.profiler.counted, planner.api.app\n"
        "import importlib.util\n"
        "assert api.OWNER == profiler.OWNER == 'user'\n"
        "ours = importlib.util.find_spec('planner.profiler.links').origin\n"
        "assert not ours.startswith(profiler.__path__[0]), ours\n"
        "assert importlib.util.find_spec('torch') is None\n"
        "print(planner.__version__)\n"
    )
    beside = succeed([python, "-c", code], cwd=workplace)
    on_path = succeed([python, "-c", code], cwd=workplace.parent, path=str(workplace))
    assert beside.stdout.strip() == on_path.stdout.strip() == __version__


def test_without_user_modules_the_names_are_free(python: Path, tmp_path: Path) -> None:
    """An installation provides no module `api` and none `profiler`."""
    code = (
        "from importlib.util import find_spec\n"
        "print([name for name in ('api', 'profiler', 'tests') if find_spec(name)])\n"
    )
    done = succeed([python, "-c", code], cwd=tmp_path)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (("--version",), __version__),
        (("devices",), "h100-sxm5-80gb"),
        (("models",), "llama-3.2-1b"),
        (PLAN, "llama-3.2-1b"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_commands(
    python: Path, workplace: Path, arguments: tuple[str, ...], printed: str
) -> None:
    """The command on PATH answers beside the user's modules, without torch."""
    command = python.with_name("planner")
    done = succeed([command, *arguments], cwd=workplace, path=str(workplace))
    assert printed in done.stdout


@pytest.mark.parametrize(
    "module",
    ["planner", "planner.cli.main", "planner.profiler.counted"],
)
@pytest.mark.parametrize("options", [(), ("-P",)], ids=["", "safe-path"])
def test_modules_that_run(
    python: Path, workplace: Path, module: str, options: tuple[str, ...]
) -> None:
    """`python -m` starts our module, whatever the working directory holds."""
    command = [python, *options, "-m", module, "--help"]
    done = succeed(command, cwd=workplace, path=str(workplace))
    assert "usage:" in done.stdout.lower()
    assert "user module" not in done.stderr


@pytest.mark.torchrun
def test_links_are_measured_beside_a_profiler_of_the_user(workplace: Path) -> None:
    """`planner links` starts ranks of our module, not of the user's `profiler`."""
    sizes = ("--ranks", "2", "--sizes", "1024", "--repeats", "2", "-o", "links.json")
    command = [sys.executable, "-P", "-m", "planner", "links", *sizes]
    succeed(command, cwd=workplace, path=str(workplace))
    assert (workplace / "links.json").stat().st_size > 0


def test_citation_names_this_version() -> None:
    """CITATION.cff has the package's title, version and licence."""
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    citation = yaml.safe_load(text)
    assert citation["title"] == PROJECT["project"]["name"]
    assert citation["version"] == __version__
    assert citation["license"] == PROJECT["project"]["license"]
    assert citation["authors"]


def test_workflow_runs_ci() -> None:
    """The workflow runs `.ci/run` on every Python that the classifiers name."""
    path = ROOT / ".github" / "workflows" / "ci.yml"
    job = yaml.safe_load(path.read_text(encoding="utf-8"))["jobs"]["ci"]
    assert ".ci/run" in [step.get("run") for step in job["steps"]]
    classifiers = " ".join(PROJECT["project"]["classifiers"])
    versions = re.findall(r":: (3\.\d+)", classifiers)
    assert job["strategy"]["matrix"]["python"] == versions


@pytest.mark.parametrize(
    "path",
    sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")),
    ids=lambda path: path.name,
)
def test_issue_forms(path: Path) -> None:
    """Issue forms are YAML with a name, a description and fields that have labels."""
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path.name == "config.yml":
        assert form == {"blank_issues_enabled": True}
        return
    assert form["name"]
    assert form["description"]
    fields = [part for part in form["body"] if part["type"] != "markdown"]
    assert fields
    assert all(part["attributes"]["label"] for part in fields)
