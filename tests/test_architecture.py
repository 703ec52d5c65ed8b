"""The rules of the house that a machine can hold: floors, names, docstrings, and what the install declares."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TypeGuard

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("planner", "profiler", "api")

BASE = {"planner.version", "planner.errors", "planner.spec"}
RUNTIMES = BASE | {"planner.runtimes"}
SEARCH_SIDE = RUNTIMES | {"planner.schedule", "planner.partition", "planner.cost"}
SERVICE_SIDE = SEARCH_SIDE | {"planner.search", "planner.check", "planner.export"}
MAY_IMPORT: dict[str, set[str]] = {
    "planner": {"planner.version", "planner.errors", "planner.interface"},
    "planner.__main__": {"planner.cli"},
    "planner.version": set(),
    "planner.errors": set(),
    "planner.spec": {"planner.errors"},
    "planner.runtimes": BASE,
    "planner.schedule": BASE,
    "planner.partition": BASE,
    "planner.cost": RUNTIMES | {"planner.schedule", "planner.partition"},
    "planner.calibrate": RUNTIMES | {"planner.schedule", "planner.cost"},
    "planner.search": SEARCH_SIDE | {"planner.check"},
    # The checker shares no code with cost model and search: else both could be wrong
    # in the same way.
    "planner.check": RUNTIMES | {"planner.schedule"},
    "planner.export": RUNTIMES | {"planner.schedule"},
    "planner.executor": BASE | {"planner", "planner.schedule", "planner.profiler"},
    "planner.profiler": RUNTIMES | {"planner.schedule"},
    "planner.api": SERVICE_SIDE | {"planner.profiler", "planner.calibrate"},
    "planner.client": {"planner.errors", "planner.spec"},
    # Finds plans for the executor, which cannot: the executor knows only its interfaces.
    "planner.replan": SEARCH_SIDE
    | {"planner.search", "planner.profiler", "planner.executor", "planner.client"},
    "planner.profiling": BASE | {"planner.cost", "planner.profiler"},
    "planner.interface": SERVICE_SIDE
    | {"planner.profiling", "planner.profiler", "planner.executor"},
    "planner.cli": SERVICE_SIDE
    | {"planner.profiling"}
    | {"planner.executor", "planner.profiler", "planner.api"}
    | {"planner.client", "planner.replan", "planner.calibrate"},
}
"""The layers: what each package may import besides itself. Any other import is an error."""

WITHOUT_TORCH = (
    "planner.errors",
    "planner.spec",
    "planner.runtimes",
    "planner.cost",
    "planner.schedule",
    "planner.partition",
    "planner.calibrate",
    "planner.search",
    "planner.check",
    "planner.export",
    "planner.client",
    "planner.replan",
    "planner.profiling",
    "planner.interface",
    "planner.cli",
    "planner.api",
)
HEAVY = {"torch", "transformers", "safetensors"}

Function = ast.FunctionDef | ast.AsyncFunctionDef
Documented = ast.Module | ast.ClassDef | Function


@cache
def sources(*folders: str) -> tuple[Path, ...]:
    """Every Python file in these folders."""
    return tuple(
        path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))
    )


@cache
def tree(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def module_name(path: Path) -> str:
    """``planner/spec/plan.py`` -> ``planner.spec.plan``; a package is named without ``__init__``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[0] in ("api", "profiler"):  # planner/api and planner/profiler link to them
        parts = ("planner", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def floor_of(module: str) -> str | None:
    """The longest row of the table that the module stands in; None for modules of others."""
    fitting = [
        row
        for row in MAY_IMPORT
        if row != "planner" and (module == row or module.startswith(f"{row}."))
    ]
    return (
        max(fitting, key=len) if fitting else "planner" if module == "planner" else None
    )


def imported_modules(nodes: Iterator[ast.AST]) -> Iterator[str]:
    """Absolute names that import statements bring in; ``from package import module`` counts as the module."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if floor_of(whole) != floor_of(node.module) else node.module


def at_module_level(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run when the module is imported: neither inside functions nor under ``if TYPE_CHECKING``."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.Lambda) or _is_type_checking(child):
            continue
        yield child
        yield from at_module_level(child)


def _is_type_checking(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )


def functions(path: Path) -> list[Function]:
    """Every function of a file, nested ones too."""
    return [node for node in ast.walk(tree(path)) if isinstance(node, Function)]


def where(path: Path, node: ast.AST) -> str:
    """``file:line`` for the message."""
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


# One test per rule, over all files: a test per rule and file were two thousand, which took longer than the rules.
def test_imports_stay_on_their_floor() -> None:
    """A file imports only its own floor and those below, even inside functions."""
    assert [told for path in sources(*PACKAGES) for told in off_their_floor(path)] == []


def off_their_floor(path: Path) -> Iterator[str]:
    """What the file imports from where it may not, in words."""
    floor = floor_of(module_name(path))
    if floor is None:
        yield f"{module_name(path)} stands on no floor: add it to MAY_IMPORT"
        return
    reached = {
        floor_of(module) for module in imported_modules(iter(ast.walk(tree(path))))
    } - {None, floor}
    yield from (
        f"{module_name(path)} may not import {each}"
        for each in sorted(map(str, reached - MAY_IMPORT[floor]))
    )


SERVICE_LAYERS = ("storage", "http", "solving", "pages", "routes")
"""Sub-packages of the service, lowest first."""


def test_sub_packages_of_the_service_have_layers() -> None:
    """None imports one above it."""
    upward = []
    for number, layer in enumerate(SERVICE_LAYERS):
        above = tuple(f"planner.api.{name}" for name in SERVICE_LAYERS[number + 1 :])
        for path in sources(f"api/{layer}"):
            for module in imported_modules(iter(ast.walk(tree(path)))):
                if f"{module}.".startswith(tuple(f"{name}." for name in above)):
                    upward.append(f"{module_name(path)} imports {module}")
    assert upward == []


def test_every_part_has_its_row() -> None:
    """No row of the floor table names a part that does not exist."""
    missing = [
        row
        for row in MAY_IMPORT
        if not (ROOT / row.replace(".", "/")).with_suffix(".py").exists()
    ]
    assert [
        row
        for row in missing
        if not (ROOT / row.replace(".", "/") / "__init__.py").exists()
    ] == []


@pytest.mark.parametrize("part", WITHOUT_TORCH)
def test_no_torch_at_module_level(part: str) -> None:
    """Planning and serving from a saved profile never load torch."""
    folder = ROOT / part.replace(".", "/")
    for path in (
        [folder.with_suffix(".py")]
        if folder.with_suffix(".py").exists()
        else sources(str(folder))
    ):
        heavy = {
            module.partition(".")[0]
            for module in imported_modules(at_module_level(tree(path)))
        } & HEAVY
        assert not heavy, f"{path.relative_to(ROOT)} imports {heavy} at module level"


@pytest.mark.parametrize(
    "module",
    [
        "planner.cli.main",
        "planner.search",
        "planner.cost",
        "planner.check",
        "planner.profiler.counted",
        "planner.api.app",
    ],
)
def test_imports_without_torch(module: str) -> None:
    """Importing the torch-free side in a fresh interpreter loads no torch through any detour."""
    code = f"import sys, {module}; print(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


@pytest.mark.parametrize(
    "command", [["--help"], ["devices"], ["plan", "--help"]], ids=" ".join
)
def test_fast_path_loads_nothing_heavy(command: list[str]) -> None:
    """Help and catalogues need neither torch, nor the solver, nor the web framework."""
    heavy = HEAVY | {"ortools", "fastapi", "uvicorn"}
    code = (
        "import sys\nfrom planner.cli.main import main\n"
        f"main({command!r})\nprint(sorted({heavy!r} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert (done.returncode, done.stderr.strip()) == (0, "[]")


def test_public_names_are_documented() -> None:
    """Every module, and every public class, function and method outside of functions, has a docstring."""
    nodes = [
        (path, node) for path in sources(*PACKAGES) for node in public_nodes(tree(path))
    ]
    assert [
        where(path, node) for path, node in nodes if not ast.get_docstring(node)
    ] == []


def public_nodes(node: Documented) -> Iterator[Documented]:
    """The node, and the public classes, functions and methods in its body."""
    yield node
    for child in node.body if isinstance(node, ast.Module | ast.ClassDef) else ():
        if isinstance(child, ast.ClassDef | Function) and not child.name.startswith(
            "_"
        ):
            yield from public_nodes(child)


def test_tests_say_what_is_true() -> None:
    """Every test function has a docstring of its own."""
    tests = [
        (path, each)
        for path in sources("tests")
        for each in functions(path)
        if each.name.startswith("test_")
    ]
    assert [
        f"{where(path, each)} {each.name}"
        for path, each in tests
        if not ast.get_docstring(each)
    ] == []


def packages() -> list[str]:
    """Every package: folders with an ``__init__.py``."""
    inits = [path for path in sources(*PACKAGES) if path.name == "__init__.py"]
    return [module_name(path) for path in inits]


@pytest.mark.parametrize("name", packages())
def test_public_surface(name: str) -> None:
    """``__all__`` is sorted and is exactly what the package offers; nothing, without it."""
    module = importlib.import_module(name)
    exported = list(getattr(module, "__all__", []))
    assert exported == sorted(exported, key=lambda each: (case_of(each), each))
    if "__getattr__" in vars(module):  # names that are loaded on first use
        assert [each for each in exported if not hasattr(module, each)] == []
    else:
        assert set(exported) == offered(module)


def case_of(name: str) -> int:
    """Constants stand before classes, classes before functions, as ruff's RUF022 sorts."""
    return 0 if name.isupper() else 1 if name[0].isupper() else 2


def offered(module: ModuleType) -> set[str]:
    """Public names of a package that are its own or come from inside it."""
    path = ROOT / module.__name__.replace(".", "/") / "__init__.py"
    foreign = set()
    for node in at_module_level(tree(path)):
        if isinstance(node, ast.Import) or is_from_outside(node, module.__name__):
            foreign |= {
                alias.asname or alias.name.partition(".")[0] for alias in node.names
            }
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not isinstance(value, ModuleType)
        and name not in foreign
    }


def is_from_outside(node: ast.AST, package: str) -> TypeGuard[ast.ImportFrom]:
    """True for ``from other import name``, where `other` is not inside the package."""
    if not isinstance(node, ast.ImportFrom):
        return False
    return not f"{node.module}.".startswith(f"{package}.")


def tracked_texts() -> list[Path]:
    """Files that git tracks or would add."""
    done = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    if done.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / line for line in done.stdout.splitlines() if (ROOT / line).is_file()]


def test_nothing_names_this_machine() -> None:
    """No file holds a path of the machine it was written on, nor anything that looks like a key."""
    machine = re.compile(
        r"(?<![\w.])/(?:work|root|home/\w+|Users/\w+)/|\.\./" + "shared" + r"\b"
    )
    secret = re.compile(
        r"-----BEGIN [A-Z ]*PRIVATE KEY|\bAKIA[0-9A-Z]{16}\b|\bhf_[A-Za-z]{30,}|\bghp_\w{30,}"
    )
    found = []
    for path in tracked_texts():
        text = path.read_text(encoding="utf-8", errors="ignore")
        found += [
            f"{path.relative_to(ROOT)}: {hit[0]}"
            for rule in (machine, secret)
            for hit in rule.finditer(text)
        ]
    assert found == []


DISTRIBUTION = {"prometheus_client": "prometheus-client", "yaml": "pyyaml"}
"""Import names that differ from the name of their distribution."""


def test_install_declares_what_is_imported() -> None:
    """pyproject's dependencies, extras included, are exactly the packages that the code imports."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]
    wanted = [
        *project["dependencies"],
        *(
            each
            for extra in project["optional-dependencies"].values()
            for each in extra
        ),
    ]
    declared = {
        re.split(r"[<>=!~\[; ]", each, maxsplit=1)[0].lower() for each in wanted
    }
    modules = {
        module.partition(".")[0]
        for path in sources(*PACKAGES)
        for module in imported_modules(iter(ast.walk(tree(path))))
    }
    imported = {
        DISTRIBUTION.get(each, each)
        for each in modules - set(sys.stdlib_module_names) - set(PACKAGES)
    }
    # starlette comes with fastapi and pydantic_core with pydantic: their types.
    assert imported - {"starlette", "pydantic_core"} == declared


def test_versions_are_pinned_once() -> None:
    """constraints.txt pins every declared dependency, dev ones included, except stubs."""
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    project = pyproject["project"]
    wanted = [
        *project["dependencies"],
        *(
            each
            for extra in project["optional-dependencies"].values()
            for each in extra
        ),
        *pyproject["dependency-groups"]["dev"],
    ]
    names = {re.split(r"[<>=!~\[; ]", each, maxsplit=1)[0] for each in wanted}
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {line.partition("==")[0] for line in lines if "==" in line}
    assert {name for name in names if not name.startswith("types-")} <= pinned
