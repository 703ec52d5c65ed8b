"""The example documents: what people copy must work."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.spec import Cluster, DeviceSpec, Document, Job, PredictionLayout, read
from planner.spec.devices import find_device, links_of

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
KINDS: dict[str, type[Document]] = {
    "a100x8.yaml": Cluster,
    "cpu-3nodes-2kinds.yaml": Cluster,
    "cpu-3nodes.yaml": Cluster,
    "cpu-4ranks.yaml": Cluster,
    "device.yaml": DeviceSpec,
    "finetune-adapters.yaml": Job,
    "finetune-small.yaml": Job,
    "gh200x8.yaml": Cluster,
    "h100x16-a100x32.yaml": Cluster,
    "h100x16384.yaml": Cluster,
    "h100x64-host.yaml": Cluster,
    "h100x64.yaml": Cluster,
    "layout-tp8-pp4.yaml": PredictionLayout,
    "own-script-nodes.yaml": Job,
    "own-script.yaml": Job,
    "pretrain-4m-tokens-fp8.yaml": Job,
    "pretrain-4m-tokens.yaml": Job,
}


def test_every_example_is_listed() -> None:
    """No example document escapes the tests below."""
    assert sorted(path.name for path in EXAMPLES.glob("*.yaml")) == sorted(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_examples_parse(name: str) -> None:
    """Every example is a valid document of its kind."""
    read(KINDS[name], EXAMPLES / name)


@pytest.mark.parametrize(
    "name", [name for name, kind in KINDS.items() if kind is Cluster]
)
def test_clusters_are_complete(name: str) -> None:
    """Every cluster names known devices and links, and as many devices, in all or by group, as its name says."""
    cluster = read(Cluster, EXAMPLES / name)
    for group in cluster.node_groups:
        assert find_device(group.device).memory_bytes > 0
        intra, inter = links_of(group)
        assert intra.bandwidth_bytes_per_second > 0
        assert group.nodes == 1 or inter is not None
    counts = [group.nodes * group.devices_per_node for group in cluster.node_groups]
    assert str(cluster.devices) in name or all(f"x{count}" in name for count in counts)


def test_pretraining_takes_four_million_tokens() -> None:
    """The job does what its name says."""
    job = read(Job, EXAMPLES / "pretrain-4m-tokens.yaml")
    assert job.global_batch_size * job.sequence_length == 4 * 2**20


def test_layout_is_for_64_devices() -> None:
    """The example layout fits the example cluster of 64 devices."""
    layout = read(PredictionLayout, EXAMPLES / "layout-tp8-pp4.yaml")
    layout.check_devices(read(Cluster, EXAMPLES / "h100x64.yaml").devices)
    assert (layout.tensor_parallel_degree, layout.pipeline_parallel_degree) == (8, 4)
