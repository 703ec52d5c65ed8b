"""Runtimes by name, release and settings."""

from __future__ import annotations

from dataclasses import fields
from importlib.resources import files
from typing import Any

import pytest

from planner import runtimes
from planner.errors import DocumentError, UnknownNameError
from planner.export import TARGETS
from planner.runtimes import Runtime
from planner.runtimes.registry import is_at_least
from planner.spec.job import RUNTIMES


def test_the_job_accepts_the_names_of_the_data_files() -> None:
    """`planner.spec` may not read the data files, so its list repeats their names."""
    stems = {
        entry.name.removesuffix(".toml")
        for entry in files("planner.runtimes").joinpath("data").iterdir()
        if entry.name.endswith(".toml")
    }
    aliases = {alias for name in stems for alias in runtimes.get(name).aliases}
    assert set(RUNTIMES) == stems | aliases
    assert set(runtimes.names()) == stems
    assert len(RUNTIMES) == len(stems) + len(aliases)


@pytest.mark.parametrize("name", runtimes.names())
def test_a_data_file_is_complete(name: str) -> None:
    """The name is the file's, every trait has a source, and the base and target exist."""
    found = runtimes.get(name)
    default = Runtime(name, found.source)
    changed = {
        field.name
        for field in fields(Runtime)
        if field.compare and getattr(found, field.name) != getattr(default, field.name)
    }
    traits = changed - {"based_on", "aliases", "supports"}
    assert found.name == name
    assert found.source
    assert traits <= set(found.sources)
    assert all(found.sources.values())
    assert found.based_on in ("", *runtimes.names())
    assert found.supports.target in ("", "torchrun", *TARGETS)


def test_an_alias_has_the_traits_of_its_runtime() -> None:
    """`mcore` is another name of megatron-core."""
    assert runtimes.get("mcore") == runtimes.get("megatron-core")


def test_runtimes_based_on_megatron_core_inherit_its_kernels() -> None:
    """NeMo and Megatron-Bridge use the kernels of Megatron-Core, with other defaults."""
    core = runtimes.get("megatron-core")
    for name in ("nemo", "megatron-bridge"):
        found = runtimes.get(name)
        assert found.based_on == "megatron-core"
        assert found.calibration_owner == "megatron-core"
        assert found.selective_modules == core.selective_modules == ("core_attn",)
        assert found.overlaps_reduction
        assert not core.overlaps_reduction
        assert not found.fp32_gradients
        assert core.fp32_gradients


@pytest.mark.parametrize(
    ("name", "release", "trait", "value"),
    [
        ("nemo", "24.07", "caches_weight_gradients", False),
        ("nemo", "v25.04", "caches_weight_gradients", True),
        ("nemo", "26.02.01", "caches_weight_gradients", True),
        ("nemo", "v3.1", "caches_weight_gradients", False),
        ("nemo", "", "caches_weight_gradients", True),
        ("megatron-core", "Megatron-LM 23e00ed", "caches_weight_gradients", True),
        ("megatron-core", "0.12.1", "caches_weight_gradients", False),
        ("megatron-lm", "2020-09", "overlaps_input_gradient", False),
        ("megatron-lm", "", "overlaps_input_gradient", True),
        ("nanotron", "2024-07-06", "keeps_gathered_inputs", True),
        ("nanotron", "8990860", "keeps_gathered_inputs", True),
        ("nanotron", "", "keeps_gathered_inputs", False),
        ("torchtitan", "9dec370", "stops_recompute", True),
        ("torchtitan", "0.2.2", "stops_recompute", False),
    ],
)
def test_a_trait_belongs_to_a_release(
    name: str, release: str, trait: str, value: bool
) -> None:
    """Later releases change defaults; no release means the newest."""
    assert getattr(runtimes.get(name, release=release), trait) is value


@pytest.mark.parametrize(
    ("release", "mark", "expected"),
    [
        ("24.07", "25.04", False),
        ("v25.04", "25.04", True),
        ("2025-06-13", "2025-07", False),
        ("2025-07-01", "2025-07", True),
        ("0.12", "25.04", False),
        ("5ade5c2", "25.04", True),
        ("", "25.04", True),
    ],
)
def test_releases_are_ordered(release: str, mark: str, expected: bool) -> None:
    """Numbers are compared with a mark of the same kind; a commit is the newest."""
    assert is_at_least(release, [mark]) is expected


def test_settings_replace_traits() -> None:
    """A run states where it departs from the defaults."""
    settings = {
        "overlaps_reduction": True,
        "selective_modules": ["core_attn", "moe_act"],
        "optimizer_state_bytes": 4,
        "fp8": "dynamic",
    }
    found = runtimes.get("megatron-core", settings=settings)
    assert found.overlaps_reduction
    assert found.selective_modules == ("core_attn", "moe_act")
    assert found.optimizer_state_bytes == 4
    assert found.fp8 == runtimes.get("planner").fp8
    assert found.hides_regather == runtimes.get("megatron-core").hides_regather


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("overlaps_reductions", True),
        ("name", "mine"),
        ("overlaps_reduction", 1),
        ("dispatcher", "pigeon"),
        ("recompute_fraction", "half"),
        ("fp8", "hybrid"),
    ],
)
def test_a_wrong_setting_is_refused(setting: str, value: Any) -> None:
    """The error names the setting and gives a hint."""
    with pytest.raises(DocumentError) as raised:
        runtimes.get("nemo", settings={setting: value}, field="run.runtime")
    problem = raised.value.problems[0]
    assert problem.field == f"run.runtime.settings.{setting}"
    assert problem.hint


def test_an_unknown_runtime_is_refused() -> None:
    """The hint suggests the nearest name."""
    with pytest.raises(UnknownNameError) as raised:
        runtimes.get("torchtitan-main", field="run.runtime.name")
    problem = raised.value.problems[0]
    assert problem.field == "run.runtime.name"
    assert "'torchtitan'" in problem.hint


def test_a_planned_run_has_the_settings_of_its_export() -> None:
    """The export for Megatron-LM turns on overlap and reduces in bf16."""
    found = runtimes.planned("megatron-core")
    assert found.overlaps_reduction
    assert found.overlaps_gathers
    assert not found.fp32_gradients


def test_gathered_parameters_are_retained_in_pipelines() -> None:
    """torchtitan does not reshard after the forward if there are pipeline stages."""
    found = runtimes.get("torchtitan")
    assert found.retains_gathered(2)
    assert not found.retains_gathered(1)
