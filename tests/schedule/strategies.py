"""What hypothesis draws: schedules of the catalogue, random valid ones, and durations; and a slow oracle."""

from __future__ import annotations

from itertools import product

from hypothesis import strategies as st

from planner.errors import LayoutError
from planner.schedule import Action, ActionKind, Durations, Schedule, build, find, names

F, B, I, W = ActionKind  # noqa: E741


@st.composite
def named_schedules(draw: st.DrawFn) -> Schedule:
    """A small schedule of the catalogue."""
    entry = find(draw(st.sampled_from(names(fixed_only=True))))
    most = entry.most_virtual_stages or 4
    ranks, virtual = (
        draw(st.integers(1, 5)),
        draw(st.integers(entry.least_virtual_stages, most)),
    )
    chunks = draw(st.integers(1, 3)) if entry.takes_sequence_chunks else 1
    recompute = draw(st.sampled_from(entry.recompute_modes or ("",)))
    least = draw(st.integers(1, 10))
    for micro_batches, more_ranks, more_stages in product(
        range(least, 20), (0, 1), (0, 1)
    ):
        try:
            return build(
                entry.name,
                ranks=ranks + more_ranks,
                micro_batches=micro_batches,
                virtual_stages=virtual + (more_stages if most > virtual else 0),
                sequence_chunks=min(chunks, ranks),
                recompute=recompute,
            )
        except LayoutError:
            continue
    raise AssertionError(f"{entry.name} takes no micro-batches on {ranks} ranks")


@st.composite
def random_schedules(draw: st.DrawFn) -> Schedule:
    """A valid schedule in no order that anybody would choose: any placement, full and split backwards mixed."""
    ranks, micro_batches = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    extra = draw(st.lists(st.integers(0, ranks - 1), max_size=3))
    stage_ranks = tuple(draw(st.permutations([*range(ranks), *extra])))
    split = draw(
        st.sets(
            st.tuples(
                st.integers(0, len(stage_ranks) - 1), st.integers(0, micro_batches - 1)
            )
        )
    )
    left = {
        Action(stage, kind, micro_batch)
        for stage in range(len(stage_ranks))
        for micro_batch in range(micro_batches)
        for kind in ((F, I, W) if (stage, micro_batch) in split else (F, B))
    }
    whole, done = frozenset(left), set()
    lists: list[list[Action]] = [[] for _ in range(ranks)]
    while left:
        ready = sorted(
            action
            for action in left
            if set(waits_for(action, whole, len(stage_ranks))) <= done
        )
        action = draw(st.sampled_from(ready))
        lists[stage_ranks[action.stage]].append(action)
        left.remove(action)
        done.add(action)
    return Schedule(
        "random", ranks, micro_batches, 1, 1, stage_ranks, tuple(map(tuple, lists))
    )


schedules = st.one_of(named_schedules(), random_schedules())


def waits_for(
    action: Action, all_actions: frozenset[Action], stages: int
) -> list[Action]:
    """The actions whose result this one uses, by the definition of the kinds."""
    stage, micro_batch = action.stage, action.micro_batch
    if action.kind is F:
        return [Action(stage - 1, F, micro_batch)] if stage else []
    if action.kind is W:
        return [Action(stage, I, micro_batch)]
    own = Action(stage, F, micro_batch)
    following = (
        [Action(stage + 1, kind, micro_batch) for kind in (B, I)]
        if stage + 1 < stages
        else []
    )
    return [own, *(each for each in following if each in all_actions)]


@st.composite
def durations_of(draw: st.DrawFn, stages: int, chunks: int = 1) -> Durations:
    """Whole-numbered times, so that every comparison is exact."""

    def times(length: int, most: int = 9) -> tuple[int, ...]:
        return tuple(
            draw(st.lists(st.integers(0, most), min_size=length, max_size=length))
        )

    size = stages * chunks
    forward, backward_input, backward_weight, saved = (
        times(size),
        times(size),
        times(size),
        times(size),
    )
    backward = map(sum, zip(backward_input, backward_weight, strict=True))
    return Durations(
        forward=forward,
        backward_input=backward_input,
        backward_weight=backward_weight,
        recompute=times(size),
        transfer_forward=times(stages - 1),
        transfer_backward=times(stages - 1),
        overlap=tuple(map(min, saved, forward, backward)),
        sequence_chunks=chunks,
    )


def seconds_of(schedule: Schedule, action: Action, durations: Durations) -> float:
    """How long an action lasts, by the definition of the kinds."""
    at = action.stage
    if durations.sequence_chunks > 1:
        at = (
            action.stage * durations.sequence_chunks
            + action.micro_batch % durations.sequence_chunks
        )
    recompute = durations.recompute[at] if schedule.recompute_stop is None else 0
    backward_input = recompute + durations.backward_input[at]
    whole = {
        F: durations.forward[at],
        I: backward_input,
        W: durations.backward_weight[at],
        B: backward_input + durations.backward_weight[at],
    }[action.kind]
    return whole - (durations.overlap[at] if action in schedule.paired else 0)


def recomputing(schedule: Schedule, action: Action, durations: Durations) -> float:
    """Recomputation that runs ahead of an action."""
    stop = schedule.recompute_stop
    if stop is None or action.kind is not B or action.micro_batch >= stop:
        return 0
    return durations.recompute[action.stage]


def slow_ends(schedule: Schedule, durations: Durations) -> dict[Action, float]:
    """End of every action by the rules alone: move starts later until no rule is broken any more."""
    everything = frozenset(action for actions in schedule.actions for action in actions)
    ends, sent = dict.fromkeys(everything, 0.0), dict.fromkeys(everything, 0.0)

    def arrival(action: Action) -> float:
        return max(
            (
                sent[each] + transfer_of(schedule, durations, each, action)
                for each in waits_for(action, everything, schedule.stages)
            ),
            default=0.0,
        )

    before = None
    while before != (ends, sent):
        before = dict(ends), dict(sent)
        for actions in schedule.actions:
            free = 0.0
            for group in groups_of(schedule, actions):
                free = max(
                    free + recomputing(schedule, group[0], durations),
                    *map(arrival, group),
                )
                for action in group:
                    free += seconds_of(schedule, action, durations)
                    ends[action] = free
                sent.update(dict.fromkeys(group, free))
    return ends


def groups_of(schedule: Schedule, actions: tuple[Action, ...]) -> list[list[Action]]:
    """A rank's actions, those of joint pairs together."""
    groups: list[list[Action]] = []
    for action in actions:
        if schedule.joint_pairs and action in schedule.paired:
            groups[-1].append(action)
        else:
            groups.append([action])
    return groups


def transfer_of(
    schedule: Schedule, durations: Durations, sender: Action, receiver: Action
) -> float:
    """Seconds from one action's end to the other's input."""
    if schedule.stage_ranks[sender.stage] == schedule.stage_ranks[receiver.stage]:
        return 0
    if sender.stage < receiver.stage:
        return durations.transfer_forward[sender.stage]
    return durations.transfer_backward[receiver.stage]
