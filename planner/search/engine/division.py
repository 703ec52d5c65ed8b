"""Divisions that the job fixes: how many layers every stage has, whatever the search would choose.

With the job's constraint `layers_per_stage`, and S stages in the order of the model, P ranks x V virtual stages:

    (N1) a list: stage s has as many layers as it says, and S is its length
    (N2) ``even``: of n numbered layers (elements of the model's lists, as ``model.layers.7`` is) stage s has n // S,
         and one more if s < n mod S; every other layer goes with the numbered one before it, and those before the first
         one with that. n >= S
    (N3) ``even-layers``: the same with all layers counted; so is ``even`` of a model without lists  -> given_sizes()

(N2) is how runtimes divide blocks that have no other word for it, with the embedding on the first stage and the head on
the last: picotron's distribute_layers, Megatron-LM's --num-layers and PaddleNLP's SegmentLayers where S divides n. (N3)
counts embedding and head as a block each: DeepSpeed's "uniform", torchtitan's own cut (with one block less in
the first and in the last stage, its default), Megatron-LM's --account-for-embedding-in-pipeline-split and -loss-.

Other runtimes than our own divide by a fixed rule where neither the job nor the layout says otherwise. `predict` takes
it for theirs:

    (N4) (N2) where S divides n, which Megatron-LM requires; torchtitan: (N3). nanotron: a stage is full once the
         parameters up to its last numbered layer reach its share of the whole, the layers behind them included.
         Aleph Alpha: n + 3 layers in equal numbers, embedding, last norm and head one each       -> runtime_sizes()

Stage maps are only taken away, so whatever bounds all of them holds for the one that is left.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from planner.cost import Workload
from planner.errors import LayoutError
from planner.runtimes import Runtime
from planner.search.queries.phrases import constraint_text
from planner.spec.job import DIVISION, OURS, Constraint, allows
from planner.spec.profile import ModelProfile
from planner.spec.words import counted

Sizes = tuple[int, ...]
"""Layers of every stage."""
_NUMBERED = re.compile(r"(?P<list>.+)\.(?P<number>\d+)")


def given_sizes(work: Workload, stages: int) -> Sizes | None:
    """Layers of every stage as the job fixes them: equations (N1) to (N3); None: it leaves them to the search.

    Raises:
        LayoutError: it divides the layers, and not into so many stages.
    """
    wish = work.job.constraints.get(DIVISION)
    if wish is None:
        if work.framework.supports.uneven_stages:
            return None
        return runtime_sizes(work.profile, work.framework, stages)
    names = _names(work.profile)
    sizes = _sizes(wish, names, stages)
    if sizes is None:
        makes = f"makes at most {counted(len(_counted(wish, names)), 'stage')} of this model"
        if isinstance(wish, tuple):
            makes = (
                f"has {counted(len(wish), 'stage')} with {sum(map(int, wish))} layers"
            )
        raise LayoutError(
            f"{DIVISION} = {constraint_text(wish, DIVISION)} {makes}; the layout has {stages} stages and the model "
            f"{len(names)} layers.",
            field=f"job.constraints.{DIVISION}",
            hint="give a division into as many stages, or remove the constraint.",
        )
    return sizes


def runtime_sizes(
    profile: ModelProfile, framework: Runtime, stages: int
) -> Sizes | None:
    """Return the layers of every stage as a runtime cuts them by default: equation (N4).

    None: one stage, more stages than layers, or our own executor, which runs any cut.

    Raises:
        LayoutError: the runtime's rule makes no such number of stages of this model.
    """
    names = _names(profile)
    if framework.name == OURS or not 1 < stages <= len(names):
        return None
    places = _counted("even", names)
    sizes: Sizes | None = None
    if framework.counts_ends:
        sizes = _sizes("even-layers", names, stages)
    elif framework.balances_head:
        blocks = _balanced_blocks(profile, places, stages)
        if min(blocks) > 0:
            sizes = _around(places, blocks, len(names))
    elif framework.deals_layers:
        sizes = _around(places, _blocks_among_layers(len(places), stages), len(names))
    elif len(places) % stages == 0:
        sizes = _sizes("even", names, stages)
    if sizes is None or min(sizes) < 1:
        raise LayoutError(
            f"{framework.name} does not cut {counted(len(places), 'block')} into {stages} stages by its own rule.",
            field="layout.pipeline_parallel_degree",
            hint=f"choose a number of stages that divides {len(places)}, or give layers_per_stage.",
        )
    return sizes


def own_sizes(profile: ModelProfile, framework: Runtime, stages: int) -> Sizes | None:
    """Return `runtime_sizes`; None too where the rule makes no such stages and the runtime takes any others.

    Raises:
        LayoutError: the runtime takes only stages of its rule, and it makes no such number of them.
    """
    try:
        return runtime_sizes(profile, framework, stages)
    except LayoutError:
        if framework.supports.uneven_stages:
            return None
        raise


def _around(places: Sizes, blocks: Sequence[int], layers: int) -> Sizes:
    """Return stages of so many numbered layers, with the others before and behind them."""
    sizes = list(blocks)
    sizes[0] += places[0]
    sizes[-1] += layers - places[0] - len(places)
    return tuple(sizes)


def _balanced_blocks(profile: ModelProfile, places: Sizes, stages: int) -> list[int]:
    """Return the numbered layers of every stage, each full once it reaches its share of the parameters."""
    parameters = [layer.parameters for layer in profile.layers]
    whole = sum(parameters[places[0] :])
    blocks, stage = [0] * stages, 0
    for done in accumulate(parameters[place] for place in places):
        blocks[stage] += 1
        if done * stages >= whole * (stage + 1) and stage < stages - 1:
            stage += 1
    return blocks


def _blocks_among_layers(blocks: int, stages: int) -> list[int]:
    """Return the blocks of every stage among equal numbers of layers, of which the first and the last two are none."""
    each, more = divmod(blocks + 3, stages)
    stops = accumulate(each + (stage < more) for stage in range(stages))
    ends = [min(max(stop - 1, 0), blocks) for stop in (0, *stops)]
    return [stop - start for start, stop in pairwise(ends)]


def divides(
    profile: ModelProfile,
    constraints: Mapping[str, Constraint],
    framework: Runtime,
    stages: int,
) -> bool:
    """Is there a division of the layers into so many stages that the constraints and the runtime permit?"""
    wish = constraints.get(DIVISION)
    if wish is not None:
        return _sizes(wish, _names(profile), stages) is not None
    if framework.supports.uneven_stages:
        return True
    try:
        runtime_sizes(profile, framework, stages)
    except LayoutError:
        return False
    return True


def check_division(work: Workload, most_virtual_stages: int) -> None:
    """Refuse a list that is no division of the model's layers, or whose stages no permitted degrees can make.

    Args:
        work: of the whole cluster.
        most_virtual_stages: that the search puts on a rank.

    Raises:
        LayoutError: names the list and what it should add up to, or which degrees are in the way.
    """
    constraints, layers = work.job.constraints, len(work.profile.layers)
    wish = constraints.get(DIVISION)
    if not isinstance(wish, tuple):
        return
    text, where = constraint_text(wish, DIVISION), f"job.constraints.{DIVISION}"
    if sum(map(int, wish)) != layers:
        raise LayoutError(
            f"{DIVISION} = {text} adds up to {sum(map(int, wish))} layers, the model has {layers}.",
            field=where,
            hint=f"give one number per stage that add up to {layers}: embedding and head are layers, too.",
        )
    degrees = "pipeline_parallel_degree", "virtual_stages_per_rank"
    pairs = (
        (len(wish) // each, each)
        for each in range(1, most_virtual_stages + 1)
        if len(wish) % each == 0
    )
    if any(all(map(allows, map(constraints.get, degrees), pair)) for pair in pairs):
        return
    asked = [
        f"{field} = {constraint_text(constraints[field])}"
        for field in degrees
        if field in constraints
    ]
    raise LayoutError(
        f"{DIVISION} = {text} lists {counted(len(wish), 'stage')}, which is no pipeline_parallel_degree x "
        f"virtual_stages_per_rank with {' and '.join(asked)}, and at most {most_virtual_stages} stages on a rank.",
        field=where,
        hint="give as many numbers as there are stages, or leave the degrees to the search.",
    )


def _names(profile: ModelProfile) -> tuple[str, ...]:
    return tuple(layer.name for layer in profile.layers)


@lru_cache(maxsize=1024)
def _sizes(wish: Constraint, names: tuple[str, ...], stages: int) -> Sizes | None:
    """None: there is no such division into so many stages."""
    if isinstance(wish, tuple):
        return (
            tuple(map(int, wish))
            if len(wish) == stages and sum(map(int, wish)) == len(names)
            else None
        )
    places = _counted(wish, names)
    if len(places) < stages:
        return None
    each, more = divmod(len(places), stages)
    firsts = [places[stage * each + min(stage, more)] for stage in range(1, stages)]
    return tuple(stop - start for start, stop in pairwise((0, *firsts, len(names))))


@lru_cache(maxsize=64)
def _counted(wish: Constraint, names: tuple[str, ...]) -> tuple[int, ...]:
    """Places of the layers that a rule shares out; a list is numbered from 0 and has two elements at least."""
    found = [_NUMBERED.fullmatch(name) for name in names]
    numbers: dict[str, set[int]] = {}
    for each in found:
        if each:
            numbers.setdefault(each["list"], set()).add(int(each["number"]))
    lists = (
        {name for name, has in numbers.items() if 0 in has and len(has) > 1}
        if wish == "even"
        else set[str]()
    )
    places = tuple(
        place for place, each in enumerate(found) if each and each["list"] in lists
    )
    return places or tuple(range(len(names)))
