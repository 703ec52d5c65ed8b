"""What transfers cost each schedule, which is what tells apart schedules of equal bubbles."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.schedule import Durations, Simulation, build, simulate


def with_transfers(
    name: str, ranks: int, micro_batches: int, virtual: int | None = None
) -> tuple[Simulation, Simulation]:
    """A schedule with f = i = w = 100 and transfers of 0, and of 1."""
    schedule = build(
        name, ranks=ranks, micro_batches=micro_batches, virtual_stages=virtual
    )

    def lasting(transfer: int) -> Simulation:
        durations = Durations.uniform(
            schedule.stages,
            forward=100,
            backward_input=100,
            backward_weight=100,
            transfer=transfer,
        )
        return simulate(schedule, durations)

    return lasting(0), lasting(1)


@given(st.integers(2, 5), st.integers(1, 8), st.integers(2, 3))
def test_looped_bfs(ranks: int, more: int, virtual: int) -> None:
    """More micro-batches than ranks: only the way down and up, 2 (P - 1) c, for nothing else waits."""
    free, paid = with_transfers("looped-bfs", ranks, ranks + more, virtual)
    assert paid.makespan - free.makespan == 2 * (ranks - 1)


@pytest.mark.parametrize(("micro_batches", "extra"), [(8, 30), (12, 42), (16, 54)])
def test_the_memory_optimised_order_pays_for_every_micro_batch(
    micro_batches: int, extra: int
) -> None:
    """On 4 ranks with 2 stages each its cost grows with M, where interleaved 1F1B always pays 14 c."""
    free, paid = with_transfers("interleaved-memory-optimised", 4, micro_batches, 2)
    assert paid.makespan - free.makespan == extra
    free, paid = with_transfers("interleaved-1f1b", 4, micro_batches, 2)
    assert paid.makespan - free.makespan == 14


@given(st.sampled_from([2, 4, 6]), st.integers(1, 4), st.integers(2, 3))
def test_seqsmartvpp_pays_as_much(ranks: int, rounds: int, virtual: int) -> None:
    """Without chunks it is the memory-optimised order, so its cost grows with M too."""
    numbers = {
        "ranks": ranks,
        "micro_batches": rounds * ranks,
        "virtual_stages": virtual,
    }
    assert (
        build("seqsmartvpp", **numbers).actions
        == build("interleaved-memory-optimised", **numbers).actions
    )


@given(
    st.integers(2, 6),
    st.integers(1, 14),
    st.integers(1, 20),
    st.integers(1, 20),
    st.data(),
)
def test_eager_1f1b(
    ranks: int, micro_batches: int, forward: int, backward: int, data: st.DataObject
) -> None:
    """It pays 2 (P - 1) c as long as a transfer takes no longer than half of a forward and a backward."""
    transfer = data.draw(st.integers(0, (forward + backward) // 2))
    durations = Durations.uniform(
        ranks,
        forward=forward,
        backward_input=backward,
        backward_weight=0,
        transfer=transfer,
    )
    made = simulate(
        build("eager-1f1b", ranks=ranks, micro_batches=micro_batches), durations
    )
    assert (
        made.makespan
        == (micro_batches + ranks - 1) * (forward + backward)
        + 2 * (ranks - 1) * transfer
    )


@given(st.integers(2, 6), st.integers(0, 6))
def test_zero_bubble_spans(ranks: int, more: int) -> None:
    """For M >= 2 P - 1 and f = i = w: 4 (P - 1) c, 2 (P - 1) c and (6 P - 8) c in span, whatever M."""
    for name, extra in (
        ("zb-h1", 4 * (ranks - 1)),
        ("zb-h2", 2 * (ranks - 1)),
        ("zb-v", 6 * ranks - 8),
    ):
        free, paid = with_transfers(name, ranks, 2 * ranks - 1 + more)
        assert paid.span - free.span == extra


@given(st.integers(2, 5), st.integers(0, 4), st.integers(1, 2), st.integers(2, 3))
def test_in_flight_of_uneven_groups(
    ranks: int, rest: int, rounds: int, virtual: int
) -> None:
    """With micro-batches left over, the memory-optimised order holds (V - 1)(P + M % P) + P - r units."""
    micro_batches = rounds * ranks + rest % ranks
    schedule = build(
        "interleaved-memory-optimised",
        ranks=ranks,
        micro_batches=micro_batches,
        virtual_stages=virtual,
    )
    held = simulate(schedule, Durations.uniform(schedule.stages)).peak_in_flight
    ahead = (virtual - 1) * (ranks + micro_batches % ranks)
    assert held == tuple(
        min(micro_batches * virtual, ahead + ranks - rank) for rank in range(ranks)
    )
