"""`planner models`, `planner devices`, `planner schema`."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from planner.cli.main import planner as planner_group
from planner.profiler.catalogue import names
from planner.spec import SCHEMAS, DeviceSpec, read
from planner.spec.calibration import constants_for, shipped
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
    assert "scale-up, 72 (switch)" in shown
    assert "2.50 PFLOP/s  NVIDIA GB200 NVL72 data sheet" in shown
    listed = {device["id"]: device for device in planner("devices", "--json").json}
    assert planner("devices", "l4-24gb", "--json").json == listed["l4-24gb"]


def test_efficiency_of_matrix_products(planner: Command) -> None:
    """The curve is the cost model's; the source says whether runs of the architecture are behind it."""
    products = planner("devices", "h100-sxm5-80gb", "--json").json["matrix_products"]
    hopper = constants_for("planner", "Hopper")
    best = 0.803 * hopper.matmul_fraction * hopper.kernel_fraction
    assert {int(size): each for size, each in products["fractions"].items()} == {
        size: pytest.approx(best / (1 + 3 * hopper.matmul_edge / size))
        for size in map(int, products["fractions"])
    }
    runs = shipped().rows.architecture["Hopper"]
    assert products["source"] == f"fitted to {runs} measured runs on Hopper"
    shown = planner("devices", "h100-sxm5-80gb").out
    assert f"of the peak  {100 * products['fractions']['128']:.1f} %" in shown
    other = planner("devices", "mi300x-192gb", "--json").json["matrix_products"]
    assert "on CDNA3: fitted to runs on" in other["source"]
    assert "Hopper" in other["source"]
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
    ("words", "named"),
    [
        (
            ("h100",),
            "did you mean h100-sxm5-80gb, h100-sxm5-96gb, h100-pcie-80gb, h100-nvl-94gb?",
        ),
        (("--file", "absent.yaml"), "absent.yaml: there is no such file"),
        (
            ("l4-24gb", "--file", EXAMPLES / "device.yaml"),
            "--file: cannot be combined with ID",
        ),
        (
            ("--file", EXAMPLES / "a100x8.yaml"),
            "a100x8.yaml: is a cluster, not a device",
        ),
    ],
)
def test_wrong_devices(
    planner: Command, words: tuple[str | Path, ...], named: str
) -> None:
    """The error names what is not a device, and what is near."""
    ended = planner("devices", *words)
    assert (ended.code, ended.out) == (2, "")
    assert named in ended.err


def test_models(planner: Command) -> None:
    """Every catalogue model is listed with its parameters."""
    assert all(name in planner("models").out for name in names())
    found = {model["name"]: model for model in planner("models", "--json").json}
    assert tuple(found) == names()
    assert found["gpt2"]["parameters"] == 124_439_808


def test_models_of_a_family(planner: Command) -> None:
    """Only models of the family are listed, under its name and with their sources."""
    shown = planner("models", "--family", "mixtral").out
    assert "mixtral-8x7b       46.7 B  12.9 B      32     32768  mistralai/" in shown
    assert "gpt2" not in shown
    found = planner("models", "--family", "LLAMA", "--json").json
    assert {model["family"] for model in found} == {"Llama 2", "Llama 3.1", "Llama 3.2"}


def test_unknown_family(planner: Command) -> None:
    """The error lists the families, the nearest first."""
    ended = planner("models", "--family", "lama3")
    assert ended.code == 2
    assert "did you mean 'Llama 3" in ended.err
    assert "GPT-2" in ended.err


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas(planner: Command, name: str) -> None:
    """Every schema is JSON, forbids unknown fields, and has the field names of files."""
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
    """A misspelled name is answered with the nearest one."""
    ended = planner("schema", "custer")
    assert ended.code == 2
    assert "did you mean 'cluster'" in ended.err


@pytest.mark.parametrize(
    ("words", "incomplete", "name"),
    [
        (("profile",), "gpt2-m", "gpt2-medium"),
        (("devices",), "h100", "h100-sxm5-80gb"),
        (("plan", "gpt2", "--devices"), "64xh100", "64xh100-sxm5-80gb"),
        (("schedule",), "zb", "zb-h1"),
        (("schema",), "cl", "cluster"),
        (("partition", "--method"), "h", "histogram"),
    ],
)
def test_completion(words: tuple[str, ...], incomplete: str, name: str) -> None:
    """The shell completes names of models, devices, schedules and documents."""
    shell = ShellComplete(planner_group, {}, "planner", "_PLANNER_COMPLETE")
    found = shell.get_completions(list(words), incomplete)
    assert name in [each.value for each in found]
    assert all(each.value.startswith(incomplete) for each in found)
