"""Layouts that measured runs support, and the fastest one that they do not."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from planner.check import check
from planner.cost import Workload, workload
from planner.profiler.counted import counted_profile
from planner.profiler.resolve import profile_behind
from planner.search import make_request, plan
from planner.search.engine.engine import plan_space
from planner.search.engine.space import Pieces, Space, whole_space
from planner.search.support import (
    LEAST_TOKENS,
    gain_text,
    is_supported,
    price_ratios,
    supported_choices,
    supported_space,
    unsupported_alternative,
    unsupported_space,
    unsupported_text,
    wins,
)
from planner.spec import Cluster, Job, Layout, NodeGroup, Plan
from planner.spec.calibration import SupportedChoices, shipped
from planner.spec.job import Constraint
from planner.spec.search_words import UNSUPPORTED

Choice = tuple[tuple[object, ...], int]


def decoder(
    devices: int,
    batch: int,
    length: int,
    runtime: str = "planner",
    constraints: dict[str, Constraint] | None = None,
) -> Workload:
    """Return the smallest Llama on one H100 node."""
    group = NodeGroup(device="h100-sxm5-80gb", nodes=1, devices_per_node=devices)
    job = Job(
        global_batch_size=batch,
        sequence_length=length,
        runtime=runtime,
        constraints=constraints or {},
    )
    profile = counted_profile("llama-3.2-1b", sequence_length=length)
    return workload(profile, Cluster(node_groups=(group,)), job)


def choices_of(space: Space) -> list[Choice]:
    """Return every split with every number of chunks."""
    return [
        (tuple(split), count)
        for split, counts in zip(space.splits, space.chunks, strict=True)
        for count in counts
    ]


def contexts(space: Space) -> set[int]:
    """Return the context degrees of a space."""
    return {split.context for split in space.splits}


def counts(space: Space) -> set[int]:
    """Return the chunk counts of a space."""
    return {count for each in space.chunks for count in each}


def test_supported_pieces_have_as_many_tokens_as_measured_ones() -> None:
    """Context degrees leave 2,048 tokens per rank, and chunks 8,192."""
    space = supported_space(decoder(8, 8, 16384))
    assert contexts(space) == {1, 2, 4, 8}
    assert counts(space) == {1, 2}
    assert contexts(supported_space(decoder(8, 8, 8192))) == {1, 2, 4}


@pytest.mark.parametrize("length", [512, 4096, 8192, 32768])
def test_both_spaces_are_the_whole_one(length: int) -> None:
    """Supported and unsupported choices are disjoint, and together all with 512 tokens."""
    work = decoder(8, 8, length)
    supported = choices_of(supported_space(work))
    unsupported = unsupported_space(work)
    others = choices_of(unsupported) if unsupported else []
    least = Pieces(LEAST_TOKENS, LEAST_TOKENS)
    assert not set(supported) & set(others)
    whole = choices_of(whole_space(work, pieces=least))
    assert sorted([*supported, *others]) == sorted(whole)


def test_what_the_job_asks_for_is_supported() -> None:
    """Constraints on chunks, on context or on a chunked schedule extend the space."""
    asked: dict[str, Constraint] = {"sequence_chunks": (1, 3, 16)}
    chunked = supported_space(decoder(8, 8, 12288, constraints=asked))
    assert counts(chunked) == {1, 3, 16}
    seqpipe = supported_space(decoder(8, 8, 8192, constraints={"schedule": "seqpipe"}))
    assert counts(seqpipe) >= {2, 4, 8, 16}
    work = decoder(8, 8, 8192, constraints={"context_parallel_degree": 8})
    assert contexts(supported_space(work)) == {8}
    assert is_supported(work, Layout(context_parallel_degree=8))


def test_runtimes_without_chunks_never_have_them() -> None:
    """Megatron-Core has no schedule of chunks: neither space has any."""
    work = decoder(8, 8, 32768, runtime="megatron-core")
    unsupported = unsupported_space(work)
    assert counts(supported_space(work)) == {1}
    assert unsupported is None or counts(unsupported) == {1}


def test_calibration_decides() -> None:
    """A calibration with shorter measured chunks supports more of them."""
    work = decoder(8, 8, 8192)
    own = shipped().model_copy(
        update={"supported": SupportedChoices(chunk_tokens=2048, context_tokens=4096)}
    )
    other = replace(work, calibration=own)
    assert supported_choices(work) == SupportedChoices()
    assert counts(supported_space(work)) == {1}
    assert counts(supported_space(other)) == {1, 2, 4}
    assert contexts(supported_space(other)) == {1, 2}


def test_ratios_of_context_and_chunks_multiply() -> None:
    """A supported layout has ratios of 1; each unsupported choice adds its own."""
    work = decoder(8, 8, 8192)
    chunked = price_ratios(work, Layout(sequence_chunks=4, schedule="seqpipe"))
    short = price_ratios(work, Layout(context_parallel_degree=8))
    both = Layout(context_parallel_degree=8, sequence_chunks=2, schedule="seqpipe")
    product = [a * b for a, b in zip(chunked, short, strict=True)]
    assert price_ratios(work, Layout(context_parallel_degree=4)) == (1, 1)
    assert chunked == SupportedChoices().chunk_price_ratios
    assert short.least < 1 < short.most
    assert price_ratios(work, both) == pytest.approx(product)


def test_an_unsupported_layout_wins_only_above_its_error() -> None:
    """Chunks that are 1.4 % faster are an alternative; those that are 33 % faster win."""
    pipeline: dict[str, Constraint] = {"pipeline_parallel_degree": 8}
    for batch, expected in ((8, False), (4, True)):
        work = decoder(8, batch, 8192, constraints=pipeline)
        best = plan_space(work, supported_space(work)).best
        found = plan_space(work, unsupported_space(work)).best
        assert best is not None
        assert found is not None
        assert found.total < best.total
        assert is_supported(work, best.layout)
        assert not is_supported(work, found.layout)
        assert wins(work, best, found) == expected
        assert wins(work, None, found)
        alternative = unsupported_alternative(work, best.total, found)
        assert alternative.slowdown < 0
        assert not alternative.supported
        assert UNSUPPORTED in alternative.reason
        assert unsupported_text(work, best.layout) == ""


def test_a_plan_states_its_space() -> None:
    """An unsupported layout is the plan where nothing else comes near, within its space."""
    for batch, is_plan in ((8, False), (4, True)):
        found = planned(batch)
        chunks = next(
            each for each in found.search.space if each.field == "sequence_chunks"
        )
        others = [each for each in found.alternatives if not each.supported]
        count = found.layout.sequence_chunks
        assert str(count) in chunks.searched
        assert (count > 1) == is_plan
        assert bool(found.unsupported) == is_plan
        assert len(others) == (not is_plan)
        assert check(found, profile_behind(found, None)).ok


def planned(batch: int) -> Plan:
    """Return the plan of the smallest Llama on a pipeline of 8 ranks."""
    constraints: dict[str, Constraint] = {"pipeline_parallel_degree": 8}
    work = decoder(8, batch, 8192, constraints=constraints)
    request = make_request(work.profile, work.cluster, work.job, model="llama-3.2-1b")
    found = plan(request, work.profile)
    assert isinstance(found, Plan)
    return found


def test_gain_text_orders_its_figures() -> None:
    """The interval runs from the least to the largest speed-up around the predicted one."""
    work = decoder(8, 8, 8192)
    text = gain_text(work, Layout(sequence_chunks=4, schedule="seqpipe"), 1.1)
    expected = ("4 sequence chunks", "9.1 % faster", "11.8 % slower", "23.6 % faster")
    places = [text.index(each) for each in expected]
    assert all(before < after for before, after in pairwise(places))
