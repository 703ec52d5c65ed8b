"""Which runs of a model's steps are its layers, found from the module tree and the traced run.

    (L1)  A list of blocks is a ModuleList or Sequential of which two elements at least are of one class and have parts
          of their own, and which runs as a chain: element after element, each on what the one before made, and what
          the first one took is not needed again after the second has started. So branches around a few convolutions
          (residual blocks) and parallel experts are no lists of blocks.
    (L2)  Whatever holds a list of blocks is looked into; its other parts, and the blocks, stay whole.
    (L3)  A model of fewer than `FEWEST_LAYERS` parts with parameters has its Sequentials looked into; a single part is
          looked into whatever it is.
    (L4)  Every block and every part with parts of its own is a layer. Plain modules between them (convolution, norm,
          pooling, embedding) make one layer together; in a model without blocks every matrix starts a layer. What has
          no parameters joins the next layer, at the end the one before.
    (L5)  A boundary lies between the last module of a layer and the first of the next, where the least bytes cross.

Named cuts replace (L1) to (L4): a layer starts where a named module first runs.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import pairwise

from torch import nn

from planner.errors import UnknownNameError
from planner.profiler.cut_prune import has_children
from planner.profiler.cut_trace import Step, Trace, is_constant

FEWEST_LAYERS = 4
CONTAINERS = (nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class Flow:
    """Who makes and who reads the values of a trace."""

    trace: Trace
    parameters: frozenset[str]

    @cached_property
    def constants(self) -> frozenset[int]:
        """Values that every stage can make for itself: they follow from sizes alone."""
        known: set[int] = set()
        for step in self.trace.steps:
            if is_constant(step, known, self.parameters):
                known.update(step.writes)
        return frozenset(known)

    @cached_property
    def producer(self) -> dict[int, int]:
        """Step that makes a value; -1 for the model's inputs."""
        made = dict.fromkeys(self.trace.inputs, -1)
        return made | {
            value: index
            for index, step in enumerate(self.trace.steps)
            for value in step.writes
        }

    @cached_property
    def readers(self) -> dict[int, list[int]]:
        """Steps that read a value, in order; the end of the run reads the outputs."""
        found: dict[int, list[int]] = {}
        for index, step in enumerate(self.trace.steps):
            for value in step.reads:
                found.setdefault(value, []).append(index)
        for value in self.trace.outputs:
            found.setdefault(value, []).append(len(self.trace.steps))
        return found

    def live(self, position: int) -> tuple[int, ...]:
        """Values that cross from the steps before this position to those from it on, in the order of their making."""
        return tuple(
            value
            for value, readers in sorted(self.readers.items())
            if self.producer[value] < position <= readers[-1]
            and value not in self.constants
        )

    @cached_property
    def changed(self) -> dict[int, int]:
        """Last step that changes a storage in place."""
        shapes = self.trace.shapes
        return {
            shapes[old].storage: index
            for index, step in enumerate(self.trace.steps)
            for old in step.changed
        }

    def is_torn(self, position: int) -> bool:
        """Would tensors that share memory cross here apart, one of them to be changed in place?"""
        storages = [self.trace.shapes[value].storage for value in self.live(position)]
        return any(
            self.changed.get(storage, -1) >= position
            for storage in storages
            if storages.count(storage) > 1
        )


def find_atoms(model: nn.Module, fine: Trace) -> dict[str, nn.Module]:
    """Modules that stay whole: rules (L1) to (L3).

    Args:
        fine: traced with every module without parts as an atom.
    """
    tree = _Tree(model, fine)
    opened: set[str] = set()
    while True:
        atoms = tree.atoms(opened)
        weighty = [
            name
            for name, module in atoms.items()
            if next(module.parameters(), None) is not None
        ]
        if len(weighty) >= FEWEST_LAYERS:
            return atoms
        able = [
            name
            for name in weighty
            if has_children(atoms[name])
            and (isinstance(atoms[name], nn.Sequential) or len(weighty) == 1)
        ]
        if not able:
            return atoms
        opened.add(
            max(
                able,
                key=lambda name: sum(each.numel() for each in atoms[name].parameters()),
            )
        )


@dataclass(frozen=True)
class _Tree:
    """The module tree beside the steps that its modules ran."""

    model: nn.Module
    fine: Trace

    def atoms(self, opened: Iterable[str]) -> dict[str, nn.Module]:
        """Called modules without a list of blocks below them, in no module that is one of them."""
        open_names = {name for each in (*self.lists, *opened) for name in lineage(each)}
        found: dict[str, nn.Module] = {}
        self._collect("", self.model, open_names, found)
        return found

    def _collect(
        self,
        name: str,
        module: nn.Module,
        open_names: set[str],
        found: dict[str, nn.Module],
    ) -> None:
        for child_name, child in module.named_children():
            path = f"{name}.{child_name}" if name else child_name
            if path in open_names or path not in self.fine.called:
                self._collect(path, child, open_names, found)
            else:
                found[path] = child

    @cached_property
    def lists(self) -> tuple[str, ...]:
        """Names of all lists of blocks."""
        named = self.model.named_modules()
        return tuple(
            name
            for name, part in named
            if isinstance(part, nn.ModuleList | nn.Sequential) and self._is(name)
        )

    def _is(self, name: str) -> bool:
        """Rule (L1)."""
        module = self.model.get_submodule(name) if name else self.model
        blocks = [part for part in module.children() if has_children(part)]
        classes = [type(part) for part in blocks]
        if all(classes.count(each) < 2 for each in classes):
            return False
        children = [
            f"{name}.{child}" if name else child for child, _ in module.named_children()
        ]
        spans = [span for child in children if (span := self._span(child)) is not None]
        ordered = all(before[1] < after[0] for before, after in pairwise(spans))
        return (
            len(spans) > 1 and ordered and self._is_chain(name, spans[0][0], spans[1])
        )

    def _span(self, name: str) -> tuple[int, int] | None:
        steps = [
            index for index, path in enumerate(self._paths) if is_below(path, name)
        ]
        return (steps[0], steps[-1]) if steps else None

    @cached_property
    def _paths(self) -> list[str]:
        return [step.module or step.scope for step in self.fine.steps]

    def _is_chain(self, name: str, start: int, second: tuple[int, int]) -> bool:
        """Does the second element work on what the first made, and is what the first took not needed any more?"""
        flow = Flow(self.fine, frozenset())
        steps = self.fine.steps
        read_by_first = {
            value for step in steps[start : second[0]] for value in step.reads
        }
        read_by_second = {
            value for step in steps[second[0] : second[1] + 1] for value in step.reads
        }
        if not any(
            start <= flow.producer[value] < second[0] for value in read_by_second
        ):
            return False
        owner = _owner(self.model, name)
        taken = {
            value
            for value in read_by_first - read_by_second - flow.constants
            if flow.producer[value] < start
        }
        later = (
            index
            for value in taken
            for index in flow.readers[value]
            if second[0] <= index < len(steps)
        )
        return not any(is_below(self._paths[index], owner) for index in later)


def is_below(path: str, name: str) -> bool:
    """Is it the module of this name, or a part of it?"""
    return not name or path == name or path.startswith(f"{name}.")


def lineage(name: str) -> Iterator[str]:
    """The name and those of all modules around it."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _owner(model: nn.Module, name: str) -> str:
    """The module whose code runs the list of this name."""
    name = name.rpartition(".")[0]
    while name and isinstance(model.get_submodule(name), CONTAINERS):
        name = name.rpartition(".")[0]
    return name


def named_atoms(
    model: nn.Module, fine: Trace, names: Sequence[str]
) -> dict[str, nn.Module]:
    """Atoms of a cut at named modules: the named ones, and beside their lineage every module as it was called.

    Args:
        names: qualified names, in which ``*`` stands for one component (``encoder.layer.*``).

    Raises:
        UnknownNameError: a name that no called module of the model has.
    """
    starts = matching(names, fine.called)
    opened = {parent for start in starts for parent in list(lineage(start))[1:]}
    tree = _Tree(model, fine)
    found: dict[str, nn.Module] = {}
    tree._collect("", model, opened, found)
    return found


def matching(names: Sequence[str], called: frozenset[str]) -> set[str]:
    """The called modules that names and patterns mean.

    Raises:
        UnknownNameError: a name that none of them has.
    """
    found = {name: _matches(name, called) for name in names}
    for name, matches in found.items():
        if not matches:
            close = difflib.get_close_matches(name, sorted(called), n=3, cutoff=0.3)
            raise UnknownNameError(
                f"no module {name!r} runs in the model.",
                field="cut",
                hint=f"did you mean {', '.join(close)}?"
                if close
                else "give qualified names of modules.",
            )
    return {match for matches in found.values() for match in matches}


def _matches(name: str, called: frozenset[str]) -> list[str]:
    wanted = name.split(".")
    return [
        each
        for each in called
        if len(parts := each.split(".")) == len(wanted)
        and all(map(fnmatchcase, parts, wanted))
    ]


@dataclass(frozen=True, slots=True)
class Run:
    """Steps start..stop (exclusive) of a trace: one layer."""

    name: str
    start: int
    stop: int

    def modules(self, flow: Flow) -> tuple[str, ...]:
        """Names of the modules that it calls."""
        calls = (step.module for step in flow.trace.steps[self.start : self.stop])
        return tuple(dict.fromkeys(name for name in calls if name is not None))

    def steps(self, flow: Flow) -> list[Step]:
        """Its steps, after the constants that they read, in the model's order."""
        steps = flow.trace.steps
        wanted = set(range(self.start, self.stop))
        unseen = [value for index in wanted for value in steps[index].reads]
        while unseen:
            value = unseen.pop()
            index = flow.producer[value]
            if value in flow.constants and index not in wanted:
                wanted.add(index)
                unseen.extend(steps[index].reads)
        return [steps[index] for index in sorted(wanted)]

    def takes(self, flow: Flow) -> tuple[int, ...]:
        """Values of earlier layers, or inputs of the model, that it reads."""
        read = {
            value for step in self.steps(flow) for value in step.reads
        } - flow.constants
        return tuple(
            sorted(value for value in read if flow.producer[value] < self.start)
        )

    def makes(self, flow: Flow) -> tuple[int, ...]:
        """Its values that later layers read, or that the model returns."""
        return tuple(
            value
            for value, readers in sorted(flow.readers.items())
            if self.start <= flow.producer[value] < self.stop <= readers[-1]
            and value not in flow.constants
        )


def find_runs(
    model: nn.Module,
    flow: Flow,
    atoms: Mapping[str, nn.Module],
    starts: Collection[str] = (),
) -> list[Run]:
    """The layers of a trace: rules (L4) and (L5).

    Args:
        flow: of the trace with these atoms.
        starts: modules of the user's named cut; empty: by the rules.
    """
    calls = [
        (index, step.module)
        for index, step in enumerate(flow.trace.steps)
        if step.module is not None
    ]
    groups = list(
        _named_groups(calls, starts)
        if starts
        else _weighty(_groups(model, calls, atoms), atoms)
    )
    if not groups:
        return [Run("model", 0, len(flow.trace.steps))]
    bounds = [0]
    for before, after in pairwise(groups):
        bounds.append(_cheapest(flow, before[-1][0] + 1, after[0][0]))
    bounds.append(len(flow.trace.steps))
    names = _unique(_title(group, atoms) for group in groups)
    runs = [
        Run(name, *span) for name, span in zip(names, pairwise(bounds), strict=True)
    ]
    return _joined(runs, flow)


def _joined(runs: list[Run], flow: Flow) -> list[Run]:
    """Runs without boundaries at which tensors that share memory would be torn apart."""
    kept = runs[:1]
    for run in runs[1:]:
        if flow.is_torn(run.start):
            kept[-1] = Run(kept[-1].name, kept[-1].start, run.stop)
        else:
            kept.append(run)
    return kept


Call = tuple[int, str]
"""Index of the step, name of the module."""


def _weighty(
    groups: Iterable[list[Call]], atoms: Mapping[str, nn.Module]
) -> list[list[Call]]:
    """Groups without parameters join the next one, at the end the one before."""
    result: list[list[Call]] = []
    waiting: list[Call] = []
    for group in groups:
        waiting += group
        if any(next(atoms[name].parameters(), None) is not None for _, name in group):
            result.append(waiting)
            waiting = []
    if waiting and result:
        result[-1] += waiting
    return result or ([waiting] if waiting else [])


def _named_groups(calls: list[Call], starts: Collection[str]) -> Iterator[list[Call]]:
    wanted = set(starts)
    group: list[Call] = []
    for call in calls:
        hits = [name for name in wanted if is_below(call[1], name)]
        if hits and group:
            yield group
            group = []
        wanted.difference_update(hits)
        group.append(call)
    if group:
        yield group


def _groups(
    model: nn.Module, calls: list[Call], atoms: Mapping[str, nn.Module]
) -> Iterator[list[Call]]:
    """Rule (L4)."""
    has_blocks = any(has_children(atoms[name]) for _, name in calls)
    group: list[Call] = []
    key = ""
    for call in calls:
        module = atoms[call[1]]
        element = _element(model, call[1])
        repeated = any(name == call[1] for _, name in group)
        if has_blocks:
            new_key = element or (call[1] if has_children(module) else "")
            starts = new_key != key or (bool(new_key) and repeated)
        else:
            new_key, starts = (
                "",
                _has_matrix(module)
                and any(_has_matrix(atoms[name]) for _, name in group),
            )
        if starts and group:
            yield group
            group = []
        key = new_key
        group.append(call)
    if group:
        yield group


def _element(model: nn.Module, name: str) -> str:
    """The element of a list that holds several modules which are called one by one, such as (attention, feed-forward);
    empty for other modules."""
    found = ""
    for parent in list(lineage(name))[1:]:
        above = parent.rpartition(".")[0]
        if isinstance(model.get_submodule(parent), CONTAINERS) and above:
            found = (
                parent if isinstance(model.get_submodule(above), CONTAINERS) else found
            )
    return found


def _has_matrix(module: nn.Module) -> bool:
    return any(parameter.dim() > 1 for parameter in module.parameters())


def _cheapest(flow: Flow, first: int, last: int) -> int:
    """Rule (L5): the first position of the fewest bytes, if possible where nothing that crosses is changed later."""

    def price(position: int) -> tuple[bool, int, bool, int]:
        shapes = [flow.trace.shapes[value] for value in flow.live(position)]
        is_changed = any(
            flow.changed.get(shape.storage, -1) >= position for shape in shapes
        )
        return (
            flow.is_torn(position),
            sum(shape.nbytes for shape in shapes),
            is_changed,
            position,
        )

    return min(range(first, last + 1), key=price)


def _title(group: list[Call], atoms: Mapping[str, nn.Module]) -> str:
    """The first module with parameters gives a layer its name."""
    named = [
        name for _, name in group if next(atoms[name].parameters(), None) is not None
    ]
    return named[0] if named else group[0][1]


def _unique(names: Iterable[str]) -> list[str]:
    """The names, numbered from the second use on."""
    used: dict[str, int] = {}
    result = []
    for name in names:
        used[name] = used.get(name, 0) + 1
        result.append(name if used[name] == 1 else f"{name}#{used[name]}")
    return result
