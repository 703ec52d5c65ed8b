"""Out of memory: the allocators' errors, what is told, and a real one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from planner.errors import RunError
from planner.executor import Executor
from planner.executor.failures.out_of_memory import asked_bytes, next_that_fits, ran_out
from planner.executor.pipeline import offload
from planner.executor.pipeline.offload import host_like
from planner.executor.train.memory import HostMemoryError, allocator_error
from planner.spec import Layout, Plan
from planner.spec.plan import Alternative, RankMemory
from planner.spec.words import gibibytes
from tests.executor.plans import make_plan, source_of

CUDA = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 79.15 GiB of which 1.00 GiB is free."
)
CPU = RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to "
                   "allocate 4096 bytes. Error code 12 (Cannot allocate memory)")  # fmt: skip
TOO_MUCH_BYTES = 1 << 50
MIB = 1 << 20


def greedy_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Asks the CPU's allocator for more than any machine has."""
    return logits.sum() + torch.empty(TOO_MUCH_BYTES, dtype=torch.uint8).sum()


def with_memory(
    plan: Plan, peak: int, capacity: int, *alternatives: tuple[int, float]
) -> Plan:
    """A plan that predicts this memory, with alternatives of (peak bytes, slowdown)."""
    rows = tuple(
        RankMemory(**dict.fromkeys(RankMemory.model_fields, 0) | {"pipeline_rank": rank, "peak_bytes": peak,
                                                                  "capacity_bytes": capacity})
        for rank in range(plan.layout.pipeline_parallel_degree)
    )  # fmt: skip
    others = tuple(
        Alternative(
            layout=Layout(tensor_parallel_degree=4, recompute="full"),
            micro_batches=1,
            layers_per_stage=(1,),
            step_seconds=1 + slowdown,
            slowdown=slowdown,
            peak_bytes=peak_bytes,
            reason="",
        )
        for peak_bytes, slowdown in alternatives
    )
    prediction = plan.prediction.model_copy(update={"memory": rows})
    return plan.model_copy(update={"prediction": prediction, "alternatives": others})


def test_errors_of_allocators() -> None:
    """CUDA's, the CPU's and Python's own, with the bytes that they tell; nothing else."""
    assert [allocator_error(error) for error in (CUDA, CPU)] == [CUDA, CPU]
    assert isinstance(allocator_error(MemoryError()), MemoryError)
    assert [asked_bytes(error) for error in (CUDA, CPU, MemoryError())] == [
        3 << 29,
        4096,
        None,
    ]
    assert allocator_error(RuntimeError("Timed out")) is None
    assert allocator_error(ValueError("you tried to allocate 1 bytes")) is None
    wrapped = RuntimeError("[Stage 0] failed to run forward")
    wrapped.__cause__ = CUDA
    assert allocator_error(wrapped) is CUDA


def test_all_is_told() -> None:
    """Rank, action, bytes asked and used, the prediction, and the first alternative that fits with the same error."""
    plan = with_memory(
        make_plan(("a", "b"), (1, 1)),
        60 * MIB,
        70 * MIB,
        (65 * MIB, 0.01),
        (40 * MIB, 0.125),
    )
    error = ran_out(
        CPU, plan, rank=3, pipeline=1, where="in step 2, in 1F5", used_bytes=80 * MIB
    )
    assert str(error).startswith(
        "memory: rank 3 ran out of memory in step 2, in 1F5: it asked for 4 KiB more at a peak of 80 MiB; "
        "the plan predicted a peak of 60 MiB of 70 MiB."
    )
    hint = error.problems[0].hint
    assert "next alternative that fits: data 1 x tensor 4 x pipeline 1" in hint
    assert "recompute full, with a predicted peak of 40 MiB, 12.5 % slower" in hint


def test_what_the_prediction_missed_counts_for_alternatives() -> None:
    """A plan that really needs a third more than it predicted: so may they."""
    plan = with_memory(
        make_plan(("a", "b")), 60 * MIB, 70 * MIB, (65 * MIB, 0.01), (50 * MIB, 0.02)
    )
    best = next_that_fits(plan, 60 * MIB, 60 * MIB)
    assert best is not None
    assert best.peak_bytes == 65 * MIB
    worse = next_that_fits(plan, 80 * MIB, 60 * MIB)
    assert worse is not None
    assert worse.peak_bytes == 50 * MIB
    assert next_that_fits(plan, 120 * MIB, 60 * MIB) is None
    told = ran_out(
        MemoryError(), plan, rank=0, pipeline=0, where="there", used_bytes=120 * MIB
    )
    assert (
        f"memory_headroom that is larger by {60 * MIB} bytes" in told.problems[0].hint
    )


def test_a_real_one(tmp_path: Path) -> None:
    """The CPU's allocator refuses in the last stage's forward."""
    source = source_of("mlp", tmp_path)
    plan = make_plan([layer.name for layer in source.cut().layers], sequence_length=0)
    loss = f"{__name__}:greedy_loss"
    executor = Executor(plan, source, data="synthetic", device="cpu", loss=loss)
    try:
        with pytest.raises(
            RunError,
            match=rf"rank 0 ran out of memory in step 0, in 0F0: it asked for {gibibytes(TOO_MUCH_BYTES)}",
        ):
            executor.train(steps=1)
    finally:
        executor.close()


def test_no_room_on_the_host_is_told_as_such() -> None:
    """Bytes asked for and offloaded, against what the plan predicted of the host, and an alternative that needs none
    of it."""
    plan = with_memory(
        make_plan(("a", "b"), optimizer_offload=True),
        60 * MIB,
        70 * MIB,
        (65 * MIB, 0.01),
    )
    rows = tuple(
        row.model_copy(update={"host_bytes": 5000, "host_capacity_bytes": 9000})
        for row in plan.prediction.memory
    )
    plan = plan.model_copy(
        update={"prediction": plan.prediction.model_copy(update={"memory": rows})}
    )
    with pytest.raises(HostMemoryError) as caught:
        host_like(torch.empty(1).expand(TOO_MUCH_BYTES))
    told = ran_out(
        caught.value,
        plan,
        rank=2,
        pipeline=0,
        where="in step 1, in 0F3",
        used_bytes=MIB,
        host_bytes=700,
    )
    assert str(told).startswith(
        "host_memory_bytes: rank 2 ran out of host memory in step 1, in 0F3: it asked for "
        f"{gibibytes(4 * TOO_MUCH_BYTES)} more beside 700 bytes that it has offloaded; the plan predicted "
        "4.89 KiB of this rank there, of 8.79 KiB."
    )
    assert (
        "next alternative that offloads nothing: data 1 x tensor 4"
        in told.problems[0].hint
    )
    pinned = ran_out(
        HostMemoryError(1, is_pinned=True),
        plan,
        rank=0,
        pipeline=0,
        where="there",
        used_bytes=0,
    )
    assert "ran out of pinned host memory there" in str(pinned)


def test_a_host_that_is_full_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the action that offloads."""
    source = source_of("llama", tmp_path)
    plan = make_plan(
        [layer.name for layer in source.cut().layers], activation_offload=True
    )
    executor = Executor(plan, source, device="cpu")
    monkeypatch.setattr(
        offload,
        "host_like",
        lambda tensor: host_like(tensor.new_empty(()).expand(TOO_MUCH_BYTES)),
    )
    try:
        with pytest.raises(
            RunError,
            match="rank 0 ran out of host memory in step 0, in 0F0: it asked for",
        ):
            executor.train(steps=1)
    finally:
        executor.close()
