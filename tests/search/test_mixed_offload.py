"""Offloading under given layouts over several node groups, against brute force by the validator's equations."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner.check import check
from planner.cost import TICK_SECONDS
from planner.executor.support import check_plan
from planner.search import plan_layout, predict
from planner.spec import Cluster, Plan
from planner.spec.layout import Layout, PredictionLayout
from tests.brute_force import PARTITIONED, may_offload
from tests.brute_force_mixed import layouts, price_layout
from tests.builders import request
from tests.search.test_mixed import Case, cases

_BANDWIDTHS = (499979687.0, 4999999937.0, 99999999977.0)
_PLENTY = 10**9
_WISHES = (
    {"activation_offload": True},
    {"optimizer_offload": True},
    {"activation_offload": True, "optimizer_offload": True},
)


def with_hosts(
    machines: Cluster, bandwidths: list[float], host_bytes: list[int]
) -> Cluster:
    """Every device with a link to its host of its own, and so much of its memory."""
    groups = []
    for one, bandwidth, size in zip(
        machines.node_groups, bandwidths, host_bytes, strict=True
    ):
        assert not isinstance(one.device, str)
        device = one.device.model_copy(
            update={"host_bandwidth_bytes_per_second": bandwidth}
        )
        known = {"device": device, "host_memory_bytes": size * one.devices_per_node}
        groups.append(one.model_copy(update=known))
    return Cluster(node_groups=tuple(groups))


def offloading(case: Case, machines: Cluster) -> list[Layout]:
    """Every layout that offloads something, on all the node groups."""
    plain = all(
        any(row.recompute == "none" for row in one.measurements)
        for one in case.profile.layers
    )
    return [
        Layout.model_validate(layout.model_dump() | wish)
        for layout, _ in layouts(case.profile, machines, case.job)
        for wish in _WISHES
        if not layout.has_uneven_shares
        and may_offload(
            wish,
            layout.zero_stage,
            {"schedule": layout.schedule, "recompute": layout.recompute},
        )
        and (plain or "activation_offload" not in wish)
    ]


@settings(max_examples=20)
@given(cases(), st.data())
def test_given_layouts_that_offload_are_priced_as_the_validator_does(
    case: Case, data: st.DataObject
) -> None:
    """The fastest stage map that fits every device and host of every group, else the fastest; and the plan holds."""
    count = len(case.cluster.node_groups)
    bandwidths = [data.draw(st.sampled_from(_BANDWIDTHS)) for _ in range(count)]
    roomy = with_hosts(case.cluster, bandwidths, [_PLENTY] * count)
    possible = offloading(case, roomy)
    assume(possible)
    layout = data.draw(st.sampled_from(possible))
    priced = list(price_layout(case.profile, roomy, case.job, layout))
    assume(priced)
    keeps = data.draw(st.sampled_from(priced)).hosts
    less = data.draw(st.sampled_from((0, 0, 1)))
    hosts = {place: max(1, keeps.get(place, 1) - less) for place in range(count)}
    machines = with_hosts(case.cluster, bandwidths, list(hosts.values()))
    fitting = [one.nanoseconds for one in priced if one.fits(case.memory, hosts)]
    least = min(fitting or [one.nanoseconds for one in priced])

    is_searched = (
        layout.schedule in PARTITIONED
        and not layout.activation_offload
        and layout.micro_batch_shares is None
    )
    asked = PredictionLayout.model_validate(
        layout.model_dump() | ({"recompute": "per-layer"} if is_searched else {})
    )
    forecast = predict(case.profile, machines, case.job, asked)
    assert forecast.prediction.step_seconds == pytest.approx(
        least * TICK_SECONDS, rel=1e-12
    )
    assert forecast.fits == bool(fitting)
    found = plan_layout(
        request(case.profile, machines, case.job, top=0), case.profile, asked
    )
    assert isinstance(found, Plan) == bool(fitting)
    if isinstance(found, Plan):
        assert check(found, case.profile).problems == ()
        check_plan(found)
