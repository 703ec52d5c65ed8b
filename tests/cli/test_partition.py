"""`planner partition`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner.cli.main import main
from tests.cli.support import Command

COSTS = "10,40,30,10,20,50,10"


@pytest.mark.parametrize("method", ["histogram", "block", "optimal"])
def test_json(planner: Command, method: str) -> None:
    """Every method puts each layer into exactly one part, and its costs and bottleneck add up."""
    ended = planner(
        "partition", "--costs", COSTS, "--parts", "3", "--method", method, "--json"
    )
    costs = [int(cost) for cost in COSTS.split(",")]
    found = ended.json
    assert ended.code == 0
    assert [layer for part in found["parts"] for layer in part] == list(
        range(len(costs))
    )
    assert found["sizes"] == [len(part) for part in found["parts"]]
    assert found["costs"] == [
        sum(costs[layer] for layer in part) for part in found["parts"]
    ]
    assert found["bottleneck"] == max(found["costs"])


def test_optimal_is_no_worse(planner: Command) -> None:
    """No method beats the optimal one."""

    def bottleneck(method: str) -> float:
        words = (
            "--costs",
            "7,3,9,1,8,2,2,5",
            "--parts",
            "3",
            "--method",
            method,
            "--json",
        )
        value: float = planner("partition", *words).json["bottleneck"]
        return value

    assert bottleneck("optimal") <= min(bottleneck("histogram"), bottleneck("block"))


def test_text(planner: Command) -> None:
    """The table shows the parts, and how far the costliest is above the mean."""
    ended = planner(
        "partition", "--costs", COSTS, "--parts", "3", "--method", "histogram"
    )
    assert (ended.code, ended.err) == (0, "")
    assert "2-4" in ended.out
    assert "bottleneck 60 (5.9 % above the mean)" in ended.out


def test_nothing_costs_anything(planner: Command) -> None:
    """Layers without cost are split without a division by zero."""
    assert planner("partition", "--costs", "0,0,0", "--parts", "2").code == 0


def test_more_parts_than_layers(planner: Command) -> None:
    """Both numbers are named, and the hint."""
    ended = planner("partition", "--costs", "1,2", "--parts", "3")
    assert ended.code == 2
    assert "2 layers cannot make 3 parts" in ended.err


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """GPT-2 small, priced for an A100 at two sizes."""
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    words = (
        "--device",
        "analytic:a100-sxm4-80gb",
        "--sequence-length",
        "128",
        "--micro-batch-sizes",
        "1,4",
    )
    assert main(["profile", "gpt2", *words, "-o", str(path)]) == 0
    return path


@pytest.mark.parametrize("by", ["time", "memory"])
def test_a_profile_is_balanced(planner: Command, profile: Path, by: str) -> None:
    """As torchgpipe promises, the parts' costs are sums of what the profile has of their layers, and nearly equal."""
    words = (
        "partition",
        "--profile",
        profile,
        "--parts",
        "4",
        "--method",
        "block",
        "--by",
        by,
    )
    found = planner(*words, "--json").json
    layers = json.loads(profile.read_text())["layers"]
    assert [name for part in found["layers"] for name in part] == [
        layer["name"] for layer in layers
    ]
    assert (found["by"], found["micro_batch_size"], found["sequence_length"]) == (
        by,
        1,
        128,
    )
    expected = {layer["name"]: cost(layer, by) for layer in layers}
    assert found["costs"] == pytest.approx(
        [sum(expected[name] for name in part) for part in found["layers"]]
    )
    assert max(found["costs"]) - min(found["costs"]) <= max(expected.values())
    assert "embedding .." in planner(*words).out


def cost(layer: dict[str, Any], by: str) -> float:
    """Of the first row, which is the smallest micro-batch without recomputation; AdamW in bf16-mixed takes 16 bytes."""
    row = layer["measurements"][0]
    if by == "memory":
        return float(16 * layer["parameters"] + row["activation_bytes"])
    return float(
        row["forward_seconds"]
        + row["backward_input_seconds"]
        + row["backward_weight_seconds"]
    )


def test_time_and_memory_differ(planner: Command, profile: Path) -> None:
    """The embedding is heavy and quick, so parts of equal memory are not parts of equal time."""
    words = (
        "partition",
        "--profile",
        profile,
        "--parts",
        "4",
        "--method",
        "block",
        "--json",
    )
    assert (
        planner(*words, "--by", "time").json["sizes"]
        != planner(*words, "--by", "memory").json["sizes"]
    )


def test_micro_batches_in_flight_weigh_activations(
    planner: Command, profile: Path
) -> None:
    """Each further micro-batch adds the same activations; plain SGD keeps no states: 8 bytes instead of 16."""
    words = (
        "partition",
        "--profile",
        profile,
        "--parts",
        "1",
        "--by",
        "memory",
        "--json",
    )
    one, two, three = (
        planner(*words, "--micro-batches", str(n)).json["bottleneck"] for n in (1, 2, 3)
    )
    assert three - two == two - one > 0
    layers = json.loads(profile.read_text())["layers"]
    sgd = planner(*words, "--optimizer", "sgd").json["bottleneck"]
    assert one - sgd == 8 * sum(layer["parameters"] for layer in layers)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--micro-batch-size", "3"), "1 x 128, 4 x 128"),
        (("--sequence-length", "64"), "no whole row of 1 samples of 64 tokens"),
        (("--optimizer", "sgd"), "--by memory"),
        (("--by", "time", "--micro-batches", "2"), "--by memory"),
        (("--costs", "1,2"), "cannot be combined with --costs"),
        (("--method", "histgram"), "did you mean 'histogram'"),
        (("--by", "tmie"), "did you mean 'time'"),
    ],
)
def test_wrong_options_of_a_profile(
    planner: Command, profile: Path, words: tuple[str, ...], named: str
) -> None:
    """Sizes that the profile does not have, and options that would change nothing, are refused."""
    ended = planner("partition", "--profile", profile, "--parts", "2", *words)
    assert (ended.code, ended.out) == (2, "")
    assert named in ended.err


def test_options_of_a_profile_need_one(planner: Command) -> None:
    """Options that choose rows of a profile are refused with plain costs."""
    ended = planner("partition", "--costs", COSTS, "--parts", "2", "--by", "time")
    assert ended.code == 2
    assert "--profile" in ended.err


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("--parts", "2"), "--costs"),
        (("--costs", COSTS), "--parts"),
        (("--costs", "1,-2", "--parts", "2"), "--costs"),
        (("--costs", "1,,2", "--parts", "2"), "--costs"),
    ],
)
def test_wrong_costs(planner: Command, words: tuple[str, ...], field: str) -> None:
    """Missing or wrong costs and parts are named by their option."""
    ended = planner("partition", *words)
    assert (ended.code, ended.out) == (2, "")
    assert f"error: {field}" in ended.err


def test_whole_costs_stay_whole(planner: Command) -> None:
    """Costs without a decimal point are whole numbers in the JSON document too."""
    ended = planner("partition", "--costs", "1,2,2.5", "--parts", "2", "--json")
    assert ended.json["costs"] == [3, 2.5]
    assert isinstance(ended.json["costs"][0], int)


def test_a_counted_profile_has_no_time(
    planner: Command, profile: Path, tmp_path: Path
) -> None:
    """Without seconds the layers can be balanced by memory only, and the error says so."""
    document = json.loads(profile.read_text())
    for layer in document["layers"]:
        for row in layer["measurements"]:
            row |= {name: None for name in row if name.endswith("_seconds")}
    path = tmp_path / "counted.json"
    path.write_text(json.dumps(document))
    assert (
        "balance by memory"
        in planner("partition", "--profile", path, "--parts", "2").err
    )
    assert (
        planner("partition", "--profile", path, "--parts", "2", "--by", "memory").code
        == 0
    )


TRANSFERS = "1,90,1,2,70,5"


def test_transfers_move_the_cuts(planner: Command) -> None:
    """The optimum avoids costly boundaries and prints the transfers that it pays."""
    words = ("partition", "--costs", COSTS, "--parts", "3", "--transfers", TRANSFERS)
    found = planner(*words, "--json").json
    assert found["transfers"] == [1, 2]
    assert found["bottleneck"] == max(found["costs"] + found["transfers"])
    blind = planner("partition", "--costs", COSTS, "--parts", "3", "--json").json
    assert found["sizes"] != blind["sizes"]
    assert "transfers" not in blind
    assert "transfer after" in planner(*words).out


def test_text_names_the_limiting_transfer(planner: Command) -> None:
    """If a transfer sets the bottleneck, the last line says after which part."""
    words = ("--costs", "1,1,1", "--parts", "3", "--transfers", "2,9")
    ended = planner("partition", *words)
    assert "bottleneck 9 (transfer after part 1)" in ended.out


def test_exposed_transfers_add_to_the_loads(planner: Command) -> None:
    """Half of the transfers of both cuts adds to the compute of a part."""
    words = ("--costs", "10,10,10", "--parts", "3", "--transfers", "2,4", "--exposed")
    found = planner("partition", *words, "--json").json
    assert found["loads"] == [11, 13, 12]
    assert (found["exposed"], found["bottleneck"]) == (True, 13)
    assert "(part 1 with its transfers)" in planner("partition", *words).out


def test_bandwidth_prices_the_boundaries_of_a_profile(
    planner: Command, profile: Path
) -> None:
    """Activations and gradients cross each cut: twice the output bytes of the layer before it."""
    words = ("partition", "--profile", profile, "--parts", "4", "--bandwidth", "2")
    found = planner(*words, "--json").json
    layers = {each["name"]: each for each in json.loads(profile.read_text())["layers"]}
    last = [layers[names[-1]] for names in found["layers"][:-1]]
    sent = [each["measurements"][0]["output_bytes"] for each in last]
    assert found["transfers"] == pytest.approx([2 * each / 2e9 for each in sent])


@pytest.mark.parametrize(
    ("words", "field", "named"),
    [
        (("--transfers", "1,2"), "transfers", "6 boundaries, got 2 transfers"),
        (("--transfers", "1,-2"), "--transfers", "not at least 0"),
        (
            ("--transfers", TRANSFERS, "--method", "block"),
            "transfers",
            "method block ignores transfers",
        ),
        (("--transfers", TRANSFERS, "--bandwidth", "1"), "--bandwidth", "--transfers"),
        (("--bandwidth", "1"), "--bandwidth", "--profile"),
        (("--exposed",), "--exposed", "--transfers or --bandwidth"),
    ],
)
def test_wrong_transfers(
    planner: Command, words: tuple[str, ...], field: str, named: str
) -> None:
    """Transfers that do not fit or would be ignored are refused by the option's name."""
    ended = planner("partition", "--costs", COSTS, "--parts", "3", *words)
    assert (ended.code, ended.out) == (2, "")
    assert f"error: {field}" in ended.err
    assert named in ended.err


def test_transfers_are_seconds_not_bytes(planner: Command, profile: Path) -> None:
    """Memory cannot be balanced against transfers."""
    words = ("--parts", "2", "--by", "memory", "--bandwidth", "1")
    ended = planner("partition", "--profile", profile, *words)
    assert (ended.code, ended.out) == (2, "")
    assert "needs --by time" in ended.err
