"""Equation (T8): frozen parameters are kept and gathered, never summed, updated or given states."""

from __future__ import annotations

from typing import Any

import pytest

from planner.cost import layout_costs, workload
from planner.cost.compute import computation
from planner.cost.layers import LayoutCosts
from planner.cost.pricing import LayerCost
from planner.partition.profile_costs import layer_costs
from planner.spec.devices import find_device
from planner.spec.layout import Layout
from planner.spec.profile import Measurement, ModelProfile, Operation
from tests.builders import cluster, device, job, layer, profile

WHOLE, FROZEN = 1_000_000, 900_000
TRAINED = WHOLE - FROZEN


def _costs(model: ModelProfile, optimizer: str = "adam", **fields: Any) -> LayoutCosts:
    layout = Layout(micro_batch_size=1, schedule="1f1b", **fields)
    machines = cluster(layout.devices)
    return layout_costs(
        workload(model, machines, job(4 * layout.devices, optimizer=optimizer)), layout
    )


def _one(frozen: int, parameters: int = WHOLE, **fields: Any) -> LayerCost:
    """A layer whose optimizer is priced by the bytes that it moves."""
    shapes = {
        "matrices": (parameters - frozen) // 2,
        "factored": (parameters - frozen) // 10,
    }
    model = profile(
        layer(parameters=parameters, frozen=frozen, optimizer=None, **shapes)
    )
    return _costs(model, **fields).layers[0]["none"]


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "adafactor", "muon", "adam-8bit"])
def test_states_are_those_of_what_is_trained(optimizer: str) -> None:
    """Gradients, states, master copy and the update's time are a layer's without the frozen parameters; two bytes of
    each of these are kept."""
    mixed, trained = (
        _one(FROZEN, optimizer=optimizer),
        _one(0, TRAINED, optimizer=optimizer),
    )
    for name in ("gradients_bytes", "optimizer_bytes", "optimizer_ticks", "trained"):
        assert getattr(mixed, name) == getattr(trained, name), name
    assert mixed.parameters_bytes == 2 * WHOLE == trained.parameters_bytes + 2 * FROZEN
    assert mixed.parameters == WHOLE


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_only_trained_parameters_are_summed(zero: int) -> None:
    """Over two replicas: gradients and, with ZeRO, what is updated. ZeRO 3 shares frozen parameters out too, and
    gathers them with the others, forward and backward; no gradient of theirs stands whole."""
    split: dict[str, Any] = {"data_parallel_degree": 2, "zero_stage": zero}
    mixed, trained, whole = (
        _one(FROZEN, **split),
        _one(0, TRAINED, **split),
        _one(0, **split),
    )
    for name in (
        "reduction_ticks",
        "update_ticks",
        "gradients_bytes",
        "optimizer_bytes",
    ):
        assert getattr(mixed, name) == getattr(trained, name), name
    assert mixed.parameters_bytes == whole.parameters_bytes
    assert mixed.gathered_bytes == whole.gathered_bytes - (
        2 * FROZEN if zero >= 2 else 0
    )  # bf16 gradients
    scattered = 10_000 * TRAINED // WHOLE if zero >= 2 else 0  # 10 us of 10^6 elements
    gathered = 2 * 10_000 if zero == 3 else 0
    assert mixed.gather_ticks == scattered + gathered


def test_frozen_experts_are_not_summed() -> None:
    """Ranks that share experts out hold frozen ones and sum nothing for them."""
    (one,) = profile(layer(parameters=WHOLE, frozen=WHOLE // 2, optimizer=None)).layers
    (row,) = one.measurements
    told = {
        "expert_parallel_degree": 2,
        "local_parameters": WHOLE * 3 // 4,
        "local_expert_parameters": WHOLE // 4,
        "local_frozen_parameters": WHOLE // 4,
        "local_frozen_expert_parameters": WHOLE // 4,
    }
    spread = one.model_copy(update={"measurements": (row.model_copy(update=told),)})
    model = profile(layer()).model_copy(update={"layers": (spread,)})
    split: dict[str, Any] = {"data_parallel_degree": 2, "expert_parallel_degree": 2}
    cost = _costs(model, **split).layers[0]["none"]
    assert (
        cost.reduction_ticks
        == _one(0, WHOLE // 2, data_parallel_degree=2).reduction_ticks
    )
    assert (cost.gradients_bytes, cost.parameters_bytes) == (
        2 * WHOLE // 2,
        2 * WHOLE * 3 // 4,
    )


@pytest.mark.parametrize("frozen", [False, True])
def test_a_frozen_parameter_that_stages_share_is_not_exchanged(frozen: bool) -> None:
    """Each stage stores a copy; gradients go over the link where there are any."""
    model = profile(
        layer(parameters=1000, frozen=1000 * frozen) * 2,
        shared=[((0, 1), 1000)],
        shares_frozen=frozen,
    )
    (shared,) = _costs(model, pipeline_parallel_degree=2).shared
    assert shared.parameters_bytes == 2000
    told = (shared.gradients_bytes, shared.optimizer_bytes, shared.exchange_ticks)
    assert (told == (0, 0, 0)) is frozen


def _row(*gradients: Any) -> Measurement:
    each = {"count": 1, "flops": 10**9, "bytes": 10**6}
    kinds = ("matmul", "attention", "memory")
    operations = tuple(
        Operation.model_validate({"kind": kind, "gradients": one, **each})
        for kind, one in zip(kinds, gradients, strict=True)
    )
    plain = profile(layer()).layers[0].measurements[0]
    unmeasured = dict.fromkeys(
        ("forward_seconds", "backward_input_seconds", "backward_weight_seconds")
    )
    return plain.model_copy(
        update={**unmeasured, "operations": operations, "source": "counted"}
    )


def test_kernels_without_a_backward_take_no_time() -> None:
    """(C3): of a product with a frozen weight the input's gradient is left, of the first trained one the weight's."""
    chip = find_device(device())
    whole, of_input, of_weight, nothing = (
        computation(_row(*each), chip, "bf16")
        for each in (
            (None,) * 3,
            ("input", None, None),
            ("weight", "none", "none"),
            ("none",) * 3,
        )
    )
    assert (
        len({each.forward_seconds for each in (whole, of_input, of_weight, nothing)})
        == 1
    )
    assert (of_input.backward_input_seconds, of_input.backward_weight_seconds) == (
        whole.backward_input_seconds,
        0,
    )
    assert (of_weight.backward_input_seconds, of_weight.backward_weight_seconds) == (
        0,
        whole.backward_weight_seconds,
    )
    assert (nothing.backward_input_seconds, nothing.backward_weight_seconds) == (0, 0)


def test_what_has_no_backward_is_gathered_once() -> None:
    """ZeRO 3: frozen layers ahead of all trained ones are gathered for their forward alone."""
    ticks = []
    for gradients in ((None,) * 3, ("none",) * 3):
        (one,) = profile(layer(parameters=WHOLE, frozen=WHOLE)).layers
        told = one.model_copy(update={"measurements": (_row(*gradients),)})
        model = profile(layer(), device="counted").model_copy(
            update={"layers": (told,)}
        )
        ticks.append(
            _costs(model, data_parallel_degree=2, zero_stage=3)
            .layers[0]["none"]
            .gather_ticks
        )
    assert ticks == [2 * 10_000, 10_000]


def test_parts_are_balanced_by_what_is_kept() -> None:
    """`planner partition --by memory`: frozen parameters weigh two bytes, trained ones sixteen."""
    model = profile(layer(parameters=1000, frozen=1000), layer(parameters=1000))
    assert layer_costs(model, "memory") == (2000, 16000)
