"""`planner models`, `planner devices`, `planner schema`."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.profiler.catalogue import names
from planner.spec import SCHEMAS, DeviceSpec, read
from planner.spec.calibration import constants_for
from planner.spec.devices import catalogue
from tests.cli.support import Command

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def test_devices(planner: Command) -> None:
    """Every device is listed, in SI units with --json."""
    assert all(identifier in planner("devices").out for identifier in catalogue())
    found = {device["id"]: device for device in planner("devices", "--json").json}
    assert set(found) == set(catalogue())
    h100 = found["h100-sxm5-80gb"]
    assert h100["memory_bytes"] == catalogue()["h100-sxm5-80gb"].spec.memory_bytes
    assert (
        h100["intra_node"]["bandwidth_bytes_per_second"]
        > h100["inter_node"]["bandwidth_bytes_per_second"]
    )


def test_one_device(planner: Command) -> None:
    """A device by id is shown with every figure and its source; with --json it is the entry of the list."""
    shown = planner("devices", "gb200-nvl72-186gb").out
    assert "scale-up, 72 behind a switch" in shown
    assert "2.50 PFLOP/s  NVIDIA GB200 NVL72 data sheet" in shown
    listed = {device["id"]: device for device in planner("devices", "--json").json}
    assert planner("devices", "l4-24gb", "--json").json == listed["l4-24gb"]


def test_devices_tell_what_products_reach(planner: Command) -> None:
    """The curve is the cost model's: it rises to the fitted best where runs of the architecture were measured, to the
    median of all where none were; the source says which."""
    told = planner("devices", "h100-sxm5-80gb", "--json").json["matrix_products"]
    hopper = constants_for("*", "Hopper")
    best = 0.803 * hopper.matmul_fraction
    assert {int(size): fraction for size, fraction in told["fractions"].items()} == {
        size: pytest.approx(best / (1 + 3 * hopper.matmul_edge / size))
        for size in map(int, told["fractions"])
    }
    assert told["source"].startswith(
        "fitted to runs of all frameworks on Hopper; measured: "
    )
    assert (
        f" 128       {100 * told['fractions']['128']:.1f} %"
        in planner("devices", "h100-sxm5-80gb").out
    )
    other = planner("devices", "mi300x-192gb", "--json").json["matrix_products"]
    assert (
        other["source"]
        == "nobody measured runs on CDNA3: the median of Ampere, Blackwell, Hopper, Volta"
    )
    own = planner("devices", "--file", EXAMPLES / "device.yaml", "--json").json
    assert "matrix_products" not in own


def test_own_device(planner: Command) -> None:
    """A device of a file is checked and shown, and its JSON is a document that can be read again."""
    shown = planner("devices", "--file", EXAMPLES / "device.yaml").out
    assert "800 TFLOP/s  data sheet" in shown
    found = planner("devices", "--file", EXAMPLES / "device.yaml", "--json").json
    assert DeviceSpec.model_validate(found) == read(
        DeviceSpec, EXAMPLES / "device.yaml"
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("h100",),
            "Did you mean h100-sxm5-80gb, h100-sxm5-96gb, h100-pcie-80gb, h100-nvl-94gb?",
        ),
        (("--file", "absent.yaml"), "absent.yaml: there is no such file"),
        (
            ("l4-24gb", "--file", EXAMPLES / "device.yaml"),
            "leave out the id, or --file",
        ),
        (("--file", EXAMPLES / "a100x8.yaml"), "node_groups: unknown field"),
    ],
)
def test_wrong_devices(
    planner: Command, words: tuple[str | Path, ...], told: str
) -> None:
    """What is no device is told with its hint."""
    ended = planner("devices", *words)
    assert (ended.code, ended.out) == (2, "")
    assert told in ended.err


def test_models(planner: Command) -> None:
    """Every catalogue model is listed with its parameters."""
    assert all(name in planner("models").out for name in names())
    found = {model["name"]: model for model in planner("models", "--json").json}
    assert tuple(found) == names()
    assert found["gpt2"]["parameters"] == 124_439_808


def test_models_of_a_family(planner: Command) -> None:
    """A family stands under its name with its sources; the others are left out, as JSON too."""
    shown = planner("models", "--family", "mixtral").out
    assert (
        "mixtral-8x7b       46.7 B     12.9 B      32             32768  Jiang et al. 2024; mistralai/"
        in shown
    )
    assert "gpt2" not in shown
    found = planner("models", "--family", "LLAMA", "--json").json
    assert {model["family"] for model in found} == {"Llama 2", "Llama 3.1", "Llama 3.2"}


def test_unknown_family(planner: Command) -> None:
    """The families that there are are listed."""
    ended = planner("models", "--family", "lama3")
    assert ended.code == 2
    assert "Llama 3.1" in ended.err


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas(planner: Command, name: str) -> None:
    """Every schema is JSON, forbids unknown fields, and tells its fields by the names used in files."""
    schema = planner("schema", name).json
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) == {
        field.alias or key for key, field in SCHEMAS[name].model_fields.items()
    }


def test_schema_list(planner: Command) -> None:
    """Without a name the documents are listed."""
    assert set(planner("schema", "--json").json) == set(SCHEMAS)
    assert all(name in planner("schema").out for name in SCHEMAS)


def test_unknown_schema(planner: Command) -> None:
    """A misspelt name is answered with the right one."""
    ended = planner("schema", "custer")
    assert ended.code == 2
    assert "did you mean 'cluster'" in ended.err
