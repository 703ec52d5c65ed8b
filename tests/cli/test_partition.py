"""`planner partition`."""

from __future__ import annotations

import pytest

from tests.cli.support import Command

COSTS = "10,40,30,10,20,50,10"


@pytest.mark.parametrize("method", ["histogram", "block", "optimal"])
def test_json(planner: Command, method: str) -> None:
    """Every method puts each layer into exactly one part, and its costs and bottleneck add up."""
    ended = planner("partition", "--costs", COSTS, "--parts", "3", "--method", method, "--json")
    costs = [int(cost) for cost in COSTS.split(",")]
    found = ended.json
    assert ended.code == 0
    assert [layer for part in found["parts"] for layer in part] == list(range(len(costs)))
    assert found["sizes"] == [len(part) for part in found["parts"]]
    assert found["costs"] == [sum(costs[layer] for layer in part) for part in found["parts"]]
    assert found["bottleneck"] == max(found["costs"])


def test_optimal_is_no_worse(planner: Command) -> None:
    """No method beats the optimal one."""

    def bottleneck(method: str) -> float:
        words = ("--costs", "7,3,9,1,8,2,2,5", "--parts", "3", "--method", method, "--json")
        value: float = planner("partition", *words).json["bottleneck"]
        return value

    assert bottleneck("optimal") <= min(bottleneck("histogram"), bottleneck("block"))


def test_text(planner: Command) -> None:
    """The table shows the parts, and how far the costliest is above the mean."""
    ended = planner("partition", "--costs", COSTS, "--parts", "3", "--method", "histogram")
    assert (ended.code, ended.err) == (0, "")
    assert "2-4" in ended.out
    assert "bottleneck 60 (5.9 % above the mean)" in ended.out


def test_nothing_costs_anything(planner: Command) -> None:
    """Layers without cost are split without a division by zero."""
    assert planner("partition", "--costs", "0,0,0", "--parts", "2").code == 0


def test_more_parts_than_layers(planner: Command) -> None:
    """Both numbers are named, and the mend."""
    ended = planner("partition", "--costs", "1,2", "--parts", "3")
    assert ended.code == 2
    assert "2 layers cannot make 3 parts" in ended.err
