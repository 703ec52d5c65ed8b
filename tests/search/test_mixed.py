"""The search over several node groups against brute force: same optimum, proven, and plans that hold and run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner.check import check
from planner.cost import TICK_SECONDS
from planner.errors import DocumentError, UnsupportedError
from planner.executor.support import check_plan
from planner.search import plan, predict
from planner.spec import Cluster, Infeasible, Job, ModelProfile, NodeGroup, Plan
from planner.spec.layout import PredictionLayout
from tests.brute_force_mixed import Priced, price_all
from tests.builders import cluster, job, layer, link, profile, request
from tests.check.mixed import as_counted, group
from tests.strategies import models

_ROOM = 10**9
_SHAPES = ((1, 1), (1, 2), (2, 1), (1, 3))
"""(nodes, devices of each)."""


@dataclass(frozen=True)
class Case:
    """A request over several node groups, and all its stage maps."""

    profile: ModelProfile
    cluster: Cluster
    job: Job
    priced: tuple[Priced, ...]
    memory: dict[int, int]
    """Bytes of a device, by node group: what some stage map needs, or a byte less."""


@st.composite
def node_groups(
    draw: st.DrawFn, *, alike: bool, shapes: Sequence[tuple[int, int]] = _SHAPES
) -> NodeGroup:
    """Up to three devices; prime speeds, so that no rounding stands on its edge."""
    speed = 1.0 if alike else draw(st.sampled_from((1.0, 1.7, 3.1)))
    nodes, devices = draw(st.sampled_from(shapes))
    return group(
        speed,
        nodes=nodes,
        devices=devices,
        intra=link(
            draw(st.sampled_from((1.0e12 + 39, 1.0e8 + 7))),
            draw(st.sampled_from((0.0, 1e-6))),
        ),
        inter=link(
            draw(st.sampled_from((1.0e10 + 19, 1.0e8 + 7, 1.0e7 + 19))),
            draw(st.sampled_from((0.0, 5e-6))),
        ),
        peak_flops_per_second={"bf16": (1.0e8 + 7) / speed},
        memory_bandwidth_bytes_per_second=(1.0e9 + 7) / speed,
        memory_bytes=_ROOM,
        reserved_bytes=draw(st.sampled_from((0, 1000))),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Two or three node groups of one device or of several, and a model that is measured on it, or counted."""
    alike = draw(st.booleans())
    groups = [
        draw(node_groups(alike=alike)) for _ in range(draw(st.sampled_from((2, 2, 3))))
    ]
    model, first = draw(models(most_layers=4)), groups[0].device
    assert not isinstance(first, str)
    told = model.model_copy(update={"device": first.id}) if alike else as_counted(model)
    assume(
        alike
        or any(row.forward_flops for one in model.layers for row in one.measurements)
    )
    step = job(
        draw(st.sampled_from((2, 4, 5, 6, 8))),
        optimizer=draw(st.sampled_from(("sgd", "adam", "adafactor"))),
    )
    priced = tuple(price_all(told, Cluster(node_groups=tuple(groups)), step))
    memory = {place: draw(_sizes(priced, place)) for place in range(len(groups))}
    return Case(
        told,
        Cluster(node_groups=tuple(map(_sized, groups, memory.values()))),
        step,
        priced,
        memory,
    )


def _sizes(priced: tuple[Priced, ...], place: int) -> st.SearchStrategy[int]:
    """Of devices of a node group: just enough for some stage map, a byte less, or enough for all."""
    peaks = sorted({one.peaks[place] for one in priced if place in one.peaks}) or [1000]
    tight = st.builds(
        lambda peak, less: max(1, peak - less),
        st.sampled_from(peaks),
        st.sampled_from((0, 0, 1)),
    )
    return st.one_of(tight, st.just(_ROOM))


def _sized(one: NodeGroup, memory_bytes: int) -> NodeGroup:
    assert not isinstance(one.device, str)
    return one.model_copy(
        update={"device": one.device.model_copy(update={"memory_bytes": memory_bytes})}
    )


def test_a_prime_batch_on_equal_devices() -> None:
    """Seven micro-batches on three equal devices: one replica has three, so the step takes three of them."""
    model = profile(layer(forward=1e-3) * 2)
    found = plan(request(model, cluster(3), job(7), top=0), model)
    assert isinstance(found, Plan)
    assert found.layout.micro_batch_shares == (3, 2, 2)
    assert found.prediction.step_seconds == pytest.approx(3 * 2 * 3e-3)
    assert check(found, model).problems == ()
    check_plan(found)


def test_layers_without_work_are_refused() -> None:
    """A step that takes no time has no optimum: the profile is named."""
    model = profile(layer(forward=0.0) * 2)
    with pytest.raises(DocumentError, match="no layer takes any time"):
        plan(request(model, cluster(2), job(2)), model)


@settings(max_examples=40)
@given(cases())
def test_no_stage_map_on_node_groups_beats_the_plan(case: Case) -> None:
    """The plan is no slower than all that fit on any of the groups, and proven; it is checked, and it runs."""
    fitting = [one.nanoseconds for one in case.priced if one.fits(case.memory)]
    found = plan(request(case.profile, case.cluster, case.job, top=0), case.profile)
    if not fitting:
        assert isinstance(found, Infeasible)
        return
    assert isinstance(found, Plan)
    # The search has more schedules, cuts and recompute modes than the brute force.
    assert found.prediction.step_seconds <= min(fitting) * TICK_SECONDS * (1 + 1e-12)
    assert found.search.optimal
    assert check(found, case.profile).problems == ()
    check_plan(found)


_TWO = Cluster(node_groups=(group(1.0, devices=4), group(1.7, devices=4)))
_COUNTED = as_counted(
    profile(layer(forward=1e-3, flops=10**11, parameters=1000, optimizer=None) * 4)
)


def test_neighbours_share_out_states_within_a_node_group() -> None:
    """A stage on each of two node groups: its four replicas share out states by twos, which is checked, and runs."""
    fixed = {"pipeline_parallel_degree": 2, "zero_stage": 3, "zero_shard_degree": 2}
    found = plan(request(_COUNTED, _TWO, job(8, **fixed), top=0), _COUNTED)
    assert isinstance(found, Plan)
    assert (found.layout.zero_stage, found.layout.zero_shard_degree) == (3, 2)
    assert len({row.node for row in found.placement}) == 2
    assert check(found, _COUNTED).problems == ()
    check_plan(found)


def test_neighbours_in_two_node_groups_share_nothing_out() -> None:
    """Two replicas on one node group, six on another: the first four neighbours stand on both."""
    machines = Cluster(node_groups=(group(1.0, devices=2), group(1.7, devices=6)))
    layout = PredictionLayout(data_parallel_degree=8, zero_stage=1, zero_shard_degree=4)
    with pytest.raises(UnsupportedError, match="two node groups"):
        predict(_COUNTED, machines, job(8), layout)
