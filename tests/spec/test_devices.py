"""The device catalogue: figures that fit together, each with its source; links by domain; nearest names."""

from __future__ import annotations

import csv
import re
from importlib.resources import files
from typing import Any

import pytest

from planner.errors import DocumentError, UnknownNameError
from planner.spec import DeviceSpec, Link, NodeGroup, ScaleUp
from planner.spec.devices import (
    ASSUMED,
    DEFAULT_ACHIEVABLE_FRACTION,
    SOURCES,
    catalogue,
    device_price_per_hour,
    domain_of,
    find_device,
    links_of,
    nearest_devices,
)

DOUBLING = pytest.approx(2, rel=0.03)


def group(
    device: str | DeviceSpec,
    *,
    nodes: int = 1,
    devices_per_node: int = 8,
    **fields: Any,
) -> NodeGroup:
    """A node group of this device."""
    return NodeGroup(
        device=device, nodes=nodes, devices_per_node=devices_per_node, **fields
    )


def bandwidths(wanted: NodeGroup) -> tuple[float, float | None]:
    """Of the links inside and between nodes."""
    intra, inter = links_of(wanted)
    return intra.bandwidth_bytes_per_second, inter and inter.bandwidth_bytes_per_second


@pytest.mark.parametrize("identifier", catalogue())
def test_peaks_are_dense(identifier: str) -> None:
    """Every narrower type doubles the rate, as cores do without sparsity; a sparse figure would stand out."""
    peaks = catalogue()[identifier].spec.peak_flops_per_second
    assert peaks
    if "fp8" in peaks:
        assert peaks["fp8"] / peaks["bf16"] == DOUBLING
    if "bf16" in peaks:
        assert peaks["bf16"] == peaks["fp16"]
    if "tf32" in peaks:
        assert peaks["bf16"] / peaks["tf32"] == DOUBLING
        assert peaks.get("fp32", 0) <= peaks["tf32"]


@pytest.mark.parametrize("identifier", catalogue())
def test_every_figure_has_a_source(identifier: str) -> None:
    """What the data sheet tells is told with where it stands; what is assumed says so."""
    spec = catalogue()[identifier].spec
    told = {field for field in SOURCES if getattr(spec, field) not in (None, {})}
    assert told == set(spec.sources)
    assert all(spec.sources.values())
    assert (spec.sources["achievable_fraction"] == ASSUMED) == (
        spec.achievable_fraction == DEFAULT_ACHIEVABLE_FRACTION
    )


@pytest.mark.parametrize("identifier", catalogue())
def test_memory_has_a_source_of_its_own(identifier: str) -> None:
    """Capacity cites where torch reported it, or says that torch did not; bandwidth cites the data sheet."""
    sources = catalogue()[identifier].spec.sources
    memory = sources["memory_bytes"]
    assert memory != sources["memory_bandwidth_bytes_per_second"]
    assert "torch" in memory


@pytest.mark.parametrize("identifier", catalogue())
def test_memory_is_the_figure_of_its_source(identifier: str) -> None:
    """The first figure of the source, in GiB, MiB or bytes, is the capacity, to the last digit that is printed."""
    spec = catalogue()[identifier].spec
    found = re.search(r"([\d,.]+) (GiB|MiB|bytes)", spec.sources["memory_bytes"])
    assert found is not None
    digits = found[1].replace(",", "")
    unit_bytes = {"GiB": 1 << 30, "MiB": 1 << 20, "bytes": 1}[found[2]]
    decimals = len(digits.partition(".")[2])
    assert spec.memory_bytes / unit_bytes == pytest.approx(
        float(digits), abs=0.51 * 10**-decimals
    )


@pytest.mark.parametrize(
    "identifier",
    [
        identifier
        for identifier, device in catalogue().items()
        if device.vendor == "NVIDIA" and not identifier.startswith("rtx")
    ],
)
def test_memory_is_near_the_nominal_size(identifier: str) -> None:
    """NVIDIA's data-center GPUs report 0.93 to 1.075 of the gigabytes in their name."""
    nominal_bytes = int(identifier.rpartition("-")[2].removesuffix("gb")) * 10**9
    memory_bytes = catalogue()[identifier].spec.memory_bytes
    assert 0.93 < memory_bytes / nominal_bytes < 1.075


def test_an_h100_has_what_torch_reports() -> None:
    """79.1 GiB, not the 80e9 bytes of the data sheet nor the 81,559 MiB of nvidia-smi."""
    assert find_device("h100-sxm5-80gb").memory_bytes == 80_998 << 20


def test_measured_fractions_are_those_of_the_cited_figure() -> None:
    """Best measured product / peak, as rounded in the table; those of the H200 are the H100's. Estimates say so."""
    rows = csv.DictReader(
        files("planner.spec")
        .joinpath("devices.csv")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    for row in rows:
        if row["achievable_source"] and not row["achievable_source"].startswith(
            "estimated: "
        ):
            measured = (
                float(
                    row["achievable_source"].rpartition(":")[2].removesuffix("TFLOPS")
                )
                * 1e12
            )
            assert measured / float(row["bf16_flops_per_second"]) == pytest.approx(
                float(row["achievable_fraction"]), abs=1e-3
            )


ADAPTERS = re.compile(r"(\d+) adapters? of (\d+) Gb/s for (\d+) ")


@pytest.mark.parametrize(
    "identifier",
    [
        identifier
        for identifier, device in catalogue().items()
        if ADAPTERS.search(
            device.spec.sources.get("network_bandwidth_bytes_per_second", "")
        )
    ],
)
def test_the_network_is_one_devices_share_of_its_node(identifier: str) -> None:
    """The network's bandwidth is that of the node's adapters, divided by the devices of the node."""
    spec = catalogue()[identifier].spec
    found = ADAPTERS.search(spec.sources["network_bandwidth_bytes_per_second"])
    assert found is not None
    adapters, gigabits, devices = map(int, found.groups())
    assert spec.network_bandwidth_bytes_per_second == pytest.approx(
        adapters * gigabits * 1e9 / 8 / devices
    )


@pytest.mark.parametrize("identifier", catalogue())
def test_links_fit_together(identifier: str) -> None:
    """One pair gets at most the whole; the node's link is faster than the network; a switch gives a pair all of it."""
    device = catalogue()[identifier]
    scale_up = device.spec.scale_up
    if scale_up is not None:
        pair = scale_up.pair_bandwidth_bytes_per_second or 0
        assert 0 < pair <= scale_up.bandwidth_bytes_per_second
        if scale_up.topology == "switch":
            assert pair == scale_up.bandwidth_bytes_per_second
    if device.inter_node is not None:
        assert (
            device.inter_node.bandwidth_bytes_per_second
            < device.intra_node.bandwidth_bytes_per_second
        )


def test_a_bridge_joins_two_cards() -> None:
    """Two PCIe cards reach each other over their bridge, eight over the host."""
    pair, _ = bandwidths(group("a100-pcie-80gb", devices_per_node=2))
    node, _ = bandwidths(group("a100-pcie-80gb"))
    assert (pair, node) == (300e9, 31e9)


def test_a_scale_up_domain_may_hold_many_nodes() -> None:
    """18 nodes of 4 are one NVL72 rack, linked by NVLink also between nodes; a 19th needs the network."""
    rack, room = (
        group("gb200-nvl72-186gb", nodes=nodes, devices_per_node=4)
        for nodes in (18, 19)
    )
    assert bandwidths(rack) == (900e9, None)
    assert bandwidths(room) == (900e9, 50e9)
    assert domain_of(rack) == domain_of(room) == 72


@pytest.mark.parametrize(
    ("device", "nodes", "devices_per_node", "domain"),
    [
        ("gb200-nvl72-186gb", 36, 2, 36),
        ("gb200-nvl72-186gb", 2, 72, 72),
        ("gb200-nvl72-186gb", 18, 8, 72),
        ("gb200-nvl72-186gb", 16, 4, 72),
        ("gb200-nvl72-186gb", 32, 4, 64),
        ("gb300-nvl72-279gb", 128, 4, 64),
        ("gb200-nvl72-186gb", 20, 4, 72),
        ("gb200-nvl72-186gb", 64, 2, 32),
        ("h100-sxm5-80gb", 2, 8, 8),
        ("h100-sxm5-80gb", 2, 4, 4),
        ("h100-sxm5-80gb", 8, 1, 1),
        ("a100-pcie-80gb", 2, 8, 8),
        ("gh200-96gb", 4, 1, 1),
    ],
)
def test_domains_hold_whole_nodes(
    device: str, nodes: int, devices_per_node: int, domain: int
) -> None:
    """A rack has 18 nodes, however many of their devices are used, and at most 72 devices; a job on several racks that
    can be divided into segments of 16 nodes has one in each. Other devices end at their node."""
    assert (
        domain_of(group(device, nodes=nodes, devices_per_node=devices_per_node))
        == domain
    )


def test_parts_of_nodes_are_joined_by_the_network() -> None:
    """Four devices of an eight-device node do not reach those of another node by the switch inside it."""
    assert bandwidths(group("h100-sxm5-80gb", nodes=2, devices_per_node=4)) == (
        450e9,
        50e9,
    )


def test_a_link_between_nodes_makes_every_node_a_domain() -> None:
    """Who tells how the nodes of one rack reach each other is believed; beyond a rack it is the link between racks."""
    told = Link(latency_seconds=0.0, bandwidth_bytes_per_second=1e9)
    rack, room = (
        group("gb200-nvl72-186gb", nodes=n, devices_per_node=4, inter_node=told)
        for n in (18, 36)
    )
    assert (domain_of(rack), domain_of(room)) == (4, 72)
    assert bandwidths(rack) == bandwidths(room) == (900e9, 1e9)


def test_own_devices_bring_their_links() -> None:
    """An inline device with a data sheet of links needs no further link; without, the missing one is named."""
    ring = ScaleUp(topology="ring", domain_devices=4, bandwidth_bytes_per_second=1e11)
    mine = DeviceSpec(
        id="mine", memory_bytes=1, scale_up=ring, network_bandwidth_bytes_per_second=1e9
    )
    assert bandwidths(group(mine, nodes=2, devices_per_node=4)) == (1e11, 1e9)
    with pytest.raises(DocumentError) as caught:
        links_of(group(mine, devices_per_node=8))
    assert caught.value.problems[0].field == "node_groups[0].intra_node"


def test_a_switch_that_sums_is_a_property_of_its_link() -> None:
    """What a device's scale-up links state about sums in the switch holds inside its nodes, not over the host."""
    switch = ScaleUp(
        topology="switch",
        domain_devices=8,
        bandwidth_bytes_per_second=1e11,
        switch_reduction=0.85,
    )
    mine = DeviceSpec(
        id="mine",
        memory_bytes=1,
        scale_up=switch,
        host_bandwidth_bytes_per_second=1e10,
        network_bandwidth_bytes_per_second=1e9,
    )
    inside, between = links_of(group(mine, nodes=2))
    assert between is not None
    assert (inside.switch_reduction, between.switch_reduction) == (0.85, None)
    over_host, _ = links_of(group(mine, devices_per_node=16))
    assert over_host.switch_reduction is None


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("h100", "h100-sxm5-80gb"),
        ("H100 SXM", "h100-sxm5-80gb"),
        ("a100-sxm-80gb", "a100-sxm4-80gb"),
        ("mi300", "mi300x-192gb"),
        ("4090", "rtx4090-24gb"),
        ("gb200", "gb200-nvl72-186gb"),
        ("b20-sxm-180gb", "b200-sxm-180gb"),
    ],
)
def test_unknown_devices_get_the_nearest(name: str, found: str) -> None:
    """A part of the name or a misspelling leads to the device."""
    assert nearest_devices(name)[0] == found
    with pytest.raises(UnknownNameError) as caught:
        find_device(name, field="--devices")
    [problem] = caught.value.problems
    assert problem.field == "--devices"
    assert repr(name) in problem.message
    assert found in problem.hint


@pytest.mark.parametrize("name", ["", "tpu-v5p", "--"])
def test_devices_far_from_all_get_the_whole_list(name: str) -> None:
    """Nothing is guessed; the hint has all ids and the fields of an inline device."""
    assert nearest_devices(name) == ()
    with pytest.raises(UnknownNameError) as caught:
        find_device(name)
    hint = caught.value.problems[0].hint
    assert [each for each in catalogue() if each not in hint] == []
    assert "memory_bytes" in hint


def test_the_price_of_the_group_comes_first() -> None:
    """A group's price overrides its device's; nobody's price is none, and the catalogue has none."""
    priced = DeviceSpec(id="mine", memory_bytes=1, price_per_hour=2.0)
    assert device_price_per_hour(group(priced)) == 2.0
    assert device_price_per_hour(group(priced, price_per_hour=0.0)) == 0.0
    assert device_price_per_hour(group("h100-sxm5-80gb", price_per_hour=3.0)) == 3.0
    assert [
        each for each in catalogue() if device_price_per_hour(group(each)) is not None
    ] == []
