"""Reading questions: constraints and layouts of the command line, and profiles that belong to plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cli.inputs import read_fix, read_layout
from planner.errors import DocumentError, SpecError, UnknownNameError
from planner.profiler.resolve import Request, job_of_request
from planner.spec import DeviceSpec, Job, Link, PredictionLayout, parse
from planner.spec.cluster_file import read_cluster
from planner.spec.job import Range, allows
from tests.cli.support import tiny_job


def fix(job: Job, texts: list[str]) -> Job:
    """The job with the constraints of ``--fix``."""
    fixed = dict(read_fix(text) for text in texts)
    return job_of_request(Request(model="tiny", job=job, fix=fixed))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tensor_parallel_degree=8", ("tensor_parallel_degree", 8)),
        ("tensor_parallel_degree=4,8", ("tensor_parallel_degree", [4, 8])),
        (
            "pipeline_parallel_degree=2..8",
            ("pipeline_parallel_degree", {"min": 2, "max": 8}),
        ),
        ("pipeline_parallel_degree=2..", ("pipeline_parallel_degree", {"min": 2})),
        ("micro_batch_size=..4", ("micro_batch_size", {"max": 4})),
        ("schedule=1f1b", ("schedule", "1f1b")),
        ("schedule=afab,1F1B", ("schedule", ["gpipe", "1f1b"])),
        ('recompute="full"', ("recompute", "full")),
        ("recompute=none,full", ("recompute", ["none", "full"])),
        ("sequence_parallel=true", ("sequence_parallel", True)),
        (" zero_stage = 1 ", ("zero_stage", 1)),
    ],
)
def test_constraints(text: str, expected: tuple[str, Any]) -> None:
    """Values, lists and ranges are read in the type and spelling of the layout's field."""
    assert read_fix(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "tensor_parallel=8",
        "tensor_parallel_degree",
        "tensor_parallel_degree=",
        "tensor_parallel_degree=0",
        "tensor_parallel_degree=-2",
        "tensor_parallel_degree=two",
        "tensor_parallel_degree=1.5",
        "tensor_parallel_degree=2,,4",
        "tensor_parallel_degree=..",
        "tensor_parallel_degree=a..4",
        "schedule=1f1b..gpipe",
        "schedule=2f2b",
        "recompute=some",
        "zero_stage=4",
        "sequence_parallel=2..3",
    ],
)
def test_wrong_constraints_are_refused(text: str) -> None:
    """An unknown field, a missing value and a value that does not fit the field are all named."""
    with pytest.raises(SpecError) as caught:
        read_fix(text)
    assert all(problem.field for problem in caught.value.problems)


@pytest.mark.parametrize(
    ("text", "division"),
    [
        ("even", "even"),
        ("even-layers", "even-layers"),
        ("4,5,5,4", (4, 5, 5, 4)),
        ("[4, 5]", (4, 5)),
        ("18", (18,)),
    ],
)
def test_divisions_are_rules_or_lists(text: str, division: object) -> None:
    """A list of one stage is a list, too; a job's document says the same."""
    job = fix(tiny_job(), [f"layers_per_stage={text}"])
    assert job.constraints == {"layers_per_stage": division}
    assert parse(Job, job.model_dump(mode="json")) == job


@pytest.mark.parametrize(
    "text", ["uneven", "2..4", "4,0", "4,-5", "true", "null", "3,even"]
)
def test_other_divisions_are_refused(text: str) -> None:
    """With the field and what it can be."""
    with pytest.raises(SpecError) as caught:
        fix(tiny_job(), [f"layers_per_stage={text}"])
    assert "layers_per_stage" in str(caught.value)


def test_close_names_are_offered() -> None:
    """A misspelt field is answered with the right one."""
    with pytest.raises(UnknownNameError, match="did you mean 'tensor_parallel_degree'"):
        read_fix("tensor_paralel_degree=8")


def test_an_empty_range_is_refused() -> None:
    """A range whose ends are the wrong way round names both."""
    with pytest.raises(DocumentError, match="min 8 is above max 2"):
        fix(tiny_job(), ["micro_batch_size=8..2"])


@given(st.integers(1, 64), st.integers(0, 64), st.integers(1, 200))
def test_ranges_allow_what_they_say(low: int, more: int, value: int) -> None:
    """MIN..MAX allows exactly the numbers from MIN to MAX."""
    job = fix(tiny_job(), [f"micro_batch_size={low}..{low + more}"])
    assert allows(job.constraints["micro_batch_size"], value) is (
        low <= value <= low + more
    )


def test_fix_adds_to_the_jobs_own_constraints() -> None:
    """Constraints of the job stay; one of the command line wins over the same field."""
    job = fix(tiny_job(), ["micro_batch_size=1..2", "schedule=gpipe"])
    job = fix(job, ["micro_batch_size=4"])
    assert job.constraints == {"micro_batch_size": 4, "schedule": "gpipe"}
    assert isinstance(
        fix(job, ["tensor_parallel_degree=..2"]).constraints["tensor_parallel_degree"],
        Range,
    )


def test_layouts_inline_and_in_a_file(tmp_path: Path) -> None:
    """The same layout is read from a document, from words, and from one word with commas."""
    path = tmp_path / "layout.yaml"
    path.write_text(
        "{pipeline_parallel_degree: 2, schedule: gpipe, layers_per_stage: [3, 1]}"
    )
    expected = PredictionLayout(
        pipeline_parallel_degree=2, schedule="gpipe", layers_per_stage=(3, 1)
    )
    fields = ["pipeline_parallel_degree=2", "schedule=gpipe", "layers_per_stage=3,1"]
    assert (
        read_layout([str(path)])
        == read_layout(fields)
        == read_layout([",".join(fields)])
        == expected
    )


@pytest.mark.parametrize(
    "words",
    [
        ["absent.yaml"],
        ["pipeline=2"],
        ["micro_batch_size=0"],
        ["micro_batch_size=1", "micro_batch_size=2"],
        ["layers_per_stage=1,x"],
    ],
    ids=" ".join,
)
def test_wrong_layouts_are_refused(words: list[str]) -> None:
    """A missing file, an unknown field, a wrong value and a field given twice are all named."""
    with pytest.raises(SpecError) as caught:
        read_layout(words)
    assert all(problem.field for problem in caught.value.problems)


OWN_DEVICE = "{id: mine, memory_bytes: 1000, host_bandwidth_bytes_per_second: 1.0e9}"


def test_a_cluster_may_name_a_file_for_its_device(tmp_path: Path) -> None:
    """The path is seen from the cluster's folder; what is read stands inline, so that plans carry it."""
    (tmp_path / "devices").mkdir()
    (tmp_path / "devices" / "mine.yaml").write_text(OWN_DEVICE, encoding="utf-8")
    cluster = tmp_path / "cluster.yaml"
    groups = "{device: devices/mine.yaml, nodes: 1, devices_per_node: 2}, {device: l4-24gb, nodes: 1, devices_per_node: 8}"
    cluster.write_text(f"node_groups: [{groups}]", encoding="utf-8")
    own, listed = read_cluster(cluster).node_groups
    assert own.device == DeviceSpec(
        id="mine", memory_bytes=1000, host_bandwidth_bytes_per_second=1e9
    )
    assert listed.device == "l4-24gb"


@pytest.mark.parametrize(
    ("device", "told"),
    [
        ("absent.yaml", "absent.yaml: there is no such file"),
        ("wrong.yaml", "wrong.yaml: memory: unknown field"),
    ],
)
def test_a_wrong_device_file_is_named(tmp_path: Path, device: str, told: str) -> None:
    """The mistake is told with the device's file, not the cluster's."""
    (tmp_path / "wrong.yaml").write_text(
        "{id: mine, memory_bytes: 1000, memory: 1}", encoding="utf-8"
    )
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(
        f"node_groups: [{{device: {device}, nodes: 1, devices_per_node: 2}}]",
        encoding="utf-8",
    )
    with pytest.raises(DocumentError, match=told):
        read_cluster(cluster)


@pytest.mark.parametrize(
    "text", ["[]", "node_groups: 3", "node_groups: [4]", "node_groups: [{device: 5}]"]
)
def test_broken_clusters_are_refused(tmp_path: Path, text: str) -> None:
    """What is no cluster at all is told as such, whatever stands where devices should."""
    path = tmp_path / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DocumentError):
        read_cluster(path)


def test_links_are_named_by_a_file(tmp_path: Path) -> None:
    """A node group's links come from what `planner links` wrote: on one node a link, on several nodes both."""
    inside = {"latency_seconds": 1e-5, "bandwidth_bytes_per_second": 1e9}
    between = {"latency_seconds": 1e-4, "bandwidth_bytes_per_second": 1e8}
    (tmp_path / "one.json").write_text(json.dumps(inside))
    (tmp_path / "two.json").write_text(
        json.dumps({"intra_node": inside, "inter_node": between})
    )
    group = {"device": "a100-sxm4-40gb", "nodes": 2, "devices_per_node": 4}
    groups = [
        group | {"name": "both", "intra_node": "two.json", "inter_node": "two.json"},
        group | {"name": "one", "intra_node": "one.json"},
    ]
    cluster = tmp_path / "cluster.json"
    cluster.write_text(json.dumps({"node_groups": groups}))
    both, one = read_cluster(cluster).node_groups
    assert both.intra_node == one.intra_node == Link.model_validate(inside)
    assert both.inter_node == Link.model_validate(between)
    assert one.inter_node is None


def test_a_file_without_the_named_link_is_told(tmp_path: Path) -> None:
    """A file of both links that was measured on one node only cannot stand for the link between nodes."""
    inside = {"latency_seconds": 1e-5, "bandwidth_bytes_per_second": 1e9}
    (tmp_path / "links.json").write_text(
        json.dumps({"intra_node": inside, "inter_node": None})
    )
    group = {
        "device": "a100-sxm4-40gb",
        "nodes": 2,
        "devices_per_node": 4,
        "inter_node": "links.json",
    }
    cluster = tmp_path / "cluster.json"
    cluster.write_text(json.dumps({"node_groups": [group]}))
    with pytest.raises(DocumentError, match="has no such link"):
        read_cluster(cluster)
