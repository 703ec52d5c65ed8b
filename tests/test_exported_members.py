"""The names that `import planner` offers: documented, and loaded on first use."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import planner

ROOT = Path(__file__).resolve().parent.parent
NAMES = {
    "NoPlanError",
    "Plan",
    "PlannerError",
    "Prediction",
    "__version__",
    "load",
    "plan",
    "predict",
    "profile",
}
HEAVY = ("fastapi", "numpy", "ortools", "pydantic", "rich", "torch", "transformers")


def fresh(code: str) -> str:
    """Standard output of Python code in a new interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_all_names_are_exported() -> None:
    """`__all__` has exactly the documented names, each once."""
    assert set(planner.__all__) == NAMES
    assert len(planner.__all__) == len(NAMES)


def test_every_name_is_found_without_another_import() -> None:
    """`from planner import NAME` works in a fresh interpreter, for all names."""
    code = (
        "import json, planner\n"
        "found = [name for name in planner.__all__ if hasattr(planner, name)]\n"
        "print(json.dumps(found))"
    )
    assert set(json.loads(fresh(code))) == NAMES
    for name in sorted(NAMES):
        fresh(f"from planner import {name}")


def test_names_are_listed() -> None:
    """`dir(planner)` lists names that are not loaded yet, for completion."""
    listed = json.loads(fresh("import json, planner\nprint(json.dumps(dir(planner)))"))
    assert set(listed) >= NAMES


@pytest.mark.parametrize("name", ["", "__version__", "PlannerError", "NoPlanError"])
def test_light_names_load_nothing_heavy(name: str) -> None:
    """Neither `import planner` nor its errors load the solver, pydantic or torch."""
    use = f"planner.{name}" if name else "planner"
    code = (
        f"import sys, planner\n{use}\n"
        f"print([module for module in {HEAVY!r} if module in sys.modules])"
    )
    assert fresh(code) == "[]"


def test_no_name_loads_torch() -> None:
    """Looking up every name loads neither torch nor the web framework."""
    code = (
        "import sys, planner\n"
        "for name in planner.__all__: getattr(planner, name)\n"
        "heavy = ('torch', 'transformers', 'fastapi', 'uvicorn')\n"
        "print([module for module in heavy if module in sys.modules])"
    )
    assert fresh(code) == "[]"


def test_an_unknown_name_is_an_attribute_error() -> None:
    """A misspelled name raises AttributeError, which names module and attribute."""
    misspelled = "plann"
    with pytest.raises(AttributeError, match=r"planner.*plann"):
        getattr(planner, misspelled)


def test_no_module_hides_a_name() -> None:
    """After every sub-package was imported, the names are still the functions."""
    code = (
        "import importlib, inspect, pkgutil, planner\n"
        "for module in pkgutil.iter_modules(planner.__path__):\n"
        "    if module.name != '__main__':\n"
        "        importlib.import_module('planner.' + module.name)\n"
        "names = ('plan', 'predict', 'profile', 'load')\n"
        "print([name for name in names if inspect.ismodule(getattr(planner, name))])"
    )
    assert fresh(code) == "[]"


@pytest.mark.parametrize("name", sorted(NAMES - {"__version__"}))
def test_names_are_documented(name: str) -> None:
    """Every class and function has a docstring; functions are typed."""
    value = getattr(planner, name)
    assert inspect.getdoc(value)
    if inspect.isfunction(value):
        parameters = inspect.signature(value).parameters
        assert set(parameters) <= set(value.__annotations__)
        assert "return" in value.__annotations__
