"""What hypothesis draws: schedules of the catalogue, random valid ones, and durations; and a slow oracle."""

from __future__ import annotations

from hypothesis import strategies as st

from planner.errors import LayoutError
from planner.schedule import Action, ActionKind, Durations, Schedule, build, find, names

F, B, I, W = ActionKind  # noqa: E741


@st.composite
def named_schedules(draw: st.DrawFn) -> Schedule:
    """A small schedule of the catalogue."""
    entry = find(draw(st.sampled_from(names())))
    most = entry.most_virtual_stages or 3
    ranks, virtual = draw(st.integers(1, 5)), draw(st.integers(entry.least_virtual_stages, most))
    for micro_batches in range(draw(st.integers(1, 10)), 20):
        try:
            return build(entry.name, ranks=ranks, micro_batches=micro_batches, virtual_stages=virtual)
        except LayoutError:
            continue
    raise AssertionError(f"{entry.name} takes no micro-batches on {ranks} ranks")


@st.composite
def random_schedules(draw: st.DrawFn) -> Schedule:
    """A valid schedule in no order that anybody would choose: any placement, full and split backwards mixed."""
    ranks, micro_batches = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    extra = draw(st.lists(st.integers(0, ranks - 1), max_size=3))
    stage_ranks = tuple(draw(st.permutations([*range(ranks), *extra])))
    split = draw(st.sets(st.tuples(st.integers(0, len(stage_ranks) - 1), st.integers(0, micro_batches - 1))))
    left = {
        Action(stage, kind, micro_batch)
        for stage in range(len(stage_ranks))
        for micro_batch in range(micro_batches)
        for kind in ((F, I, W) if (stage, micro_batch) in split else (F, B))
    }
    whole, done = frozenset(left), set()
    lists: list[list[Action]] = [[] for _ in range(ranks)]
    while left:
        ready = sorted(action for action in left if set(waits_for(action, whole, len(stage_ranks))) <= done)
        action = draw(st.sampled_from(ready))
        lists[stage_ranks[action.stage]].append(action)
        left.remove(action)
        done.add(action)
    return Schedule("random", ranks, micro_batches, 1, 1, stage_ranks, tuple(map(tuple, lists)))


schedules = st.one_of(named_schedules(), random_schedules())


def waits_for(action: Action, all_actions: frozenset[Action], stages: int) -> list[Action]:
    """The actions whose result this one uses, by the definition of the kinds."""
    stage, micro_batch = action.stage, action.micro_batch
    if action.kind is F:
        return [Action(stage - 1, F, micro_batch)] if stage else []
    if action.kind is W:
        return [Action(stage, I, micro_batch)]
    own = Action(stage, F, micro_batch)
    following = [Action(stage + 1, kind, micro_batch) for kind in (B, I)] if stage + 1 < stages else []
    return [own, *(each for each in following if each in all_actions)]


def durations_of(stages: int) -> st.SearchStrategy[Durations]:
    """Whole-numbered times, so that every comparison is exact."""

    def times(length: int) -> st.SearchStrategy[tuple[int, ...]]:
        return st.tuples(*[st.integers(0, 9)] * length)

    return st.builds(
        Durations,
        forward=times(stages),
        backward_input=times(stages),
        backward_weight=times(stages),
        recompute=times(stages),
        transfer_forward=times(stages - 1),
        transfer_backward=times(stages - 1),
    )


def seconds_of(action: Action, durations: Durations) -> float:
    """How long an action lasts, by the definition of the kinds."""
    stage = action.stage
    backward_input = durations.recompute[stage] + durations.backward_input[stage]
    return {
        F: durations.forward[stage],
        I: backward_input,
        W: durations.backward_weight[stage],
        B: backward_input + durations.backward_weight[stage],
    }[action.kind]


def slow_ends(schedule: Schedule, durations: Durations) -> dict[Action, float]:
    """End of every action by the rules alone: move starts later until no rule is broken any more."""
    everything = frozenset(action for actions in schedule.actions for action in actions)
    ends = dict.fromkeys(everything, 0.0)
    changed = True
    while changed:
        changed = False
        for actions in schedule.actions:
            free = 0.0
            for action in actions:
                arrivals = [
                    ends[each] + _transfer(schedule, durations, each, action)
                    for each in waits_for(action, everything, schedule.stages)
                ]
                free = max([free, *arrivals]) + seconds_of(action, durations)
                changed |= ends[action] != free
                ends[action] = free
    return ends


def _transfer(schedule: Schedule, durations: Durations, sender: Action, receiver: Action) -> float:
    if schedule.stage_ranks[sender.stage] == schedule.stage_ranks[receiver.stage]:
        return 0
    if sender.stage < receiver.stage:
        return durations.transfer_forward[sender.stage]
    return durations.transfer_backward[receiver.stage]
