"""Cut any module that runs on meta tensors: layers are runs of its steps, found by `planner.profiler.cut_layers`.

    inputs -> [layer 0] -> live tensors -> [layer 1] -> live tensors -> ... -> outputs

A stage takes the tensors that are live where it starts and returns those that are live where it ends, in the order in
which the model makes them. What a stage does not use passes through it. Tensors that follow from sizes alone (masks,
position ids) are made anew by every stage that reads them.

The stage is the user's model without the modules of other stages, its forward replaced by the stage's steps. Modules
keep their names, parameters, hooks and code; only the code around them is replayed as it was traced. It is traced anew
for every micro-batch size, sequence length and type that the stage meets.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from planner.errors import LayoutError, UnsupportedError
from planner.profiler.compute_type import cast, cast_inputs, dtype_of
from planner.profiler.cut import (
    Borders,
    CutLayer,
    InputMaker,
    LayerCut,
    Size,
    Tensors,
    shared_parameters,
)
from planner.profiler.cut_layers import (
    Flow,
    Run,
    find_atoms,
    find_runs,
    lineage,
    matching,
    named_atoms,
)
from planner.profiler.cut_prune import aliases, has_children, prune
from planner.profiler.cut_stage import GraphStage
from planner.profiler.cut_trace import (
    Attribute,
    Shape,
    Step,
    Trace,
    UntraceableError,
    Value,
    trace,
)
from planner.profiler.evaluating import evaluating
from planner.profiler.kinds import has_backward, name_kinds, signature
from planner.profiler.transformer_cut import meta_friendly
from planner.spec.profile import SharedParameters, SkipEdge

Select = Callable[[Flow], tuple[int, ...]]
"""Some values of a run."""
Probes = tuple[Size, Size, Size]
"""A size, one with more samples, and one with longer sequences: they tell which dimension of a tensor is which."""


def probes(longest_sequence: int) -> Probes:
    """Small sizes that models take."""
    longer = min(longest_sequence, 12) or 12
    length = max(1, longer - 4)
    return (2, length), (3, length), (2, longer)


def at_one_length(sequence_length: int) -> Probes:
    """Sizes of a model that takes this length only."""
    return (2, sequence_length), (3, sequence_length), (2, sequence_length)


def cut_graph(
    model: nn.Module,
    inputs: InputMaker,
    *,
    keywords: tuple[str, ...] = (),
    starts: tuple[str, ...] = (),
    longest_sequence: int = 0,
) -> LayerCut:
    """The layers of a model, by its traced run.

    Args:
        model: on the meta device; kept, to be traced at other sizes.
        inputs: makes what the model takes.
        keywords: names of the inputs; empty: by place.
        starts: modules before which a layer starts (`*` for one component); empty: found by the rules of
            `planner.profiler.cut_layers`.

    Raises:
        UnsupportedError: the model cannot be written down; names the module and the reason.
        UnknownNameError: a start that no module of the model has.
    """
    tracer = _tracer(model, inputs, keywords, starts, longest_sequence)
    flow = tracer.flow(tracer.probes[0])
    runs = tuple(
        find_runs(model, flow, tracer.whole, matching(starts, flow.trace.called))
    )
    chain = GraphChain(tracer, runs)
    layers = tuple(_layers(model, chain, flow))
    only = (
        tracer.probes[0][1] if tracer.probes == at_one_length(longest_sequence) else 0
    )
    return LayerCut(
        layers, _shared_parameters(model, chain, flow), chain, only_sequence=only
    )


def _tracer(
    model: nn.Module,
    inputs: InputMaker,
    keywords: tuple[str, ...],
    starts: tuple[str, ...],
    longest_sequence: int,
) -> Tracer:
    """Of short sequences, or of the longest ones: a model with an embedding for every place takes those alone."""
    refusals = []
    for sizes in (
        probes(longest_sequence),
        *([at_one_length(longest_sequence)] if longest_sequence else []),
    ):
        tracer = Tracer(model, inputs, keywords, sizes)
        try:
            tracer.choose_atoms(starts)
            return tracer
        except UnsupportedError as error:
            refusals.append(error)
    raise refusals[0]


@dataclass
class Tracer:
    """Traces one model at any size, as often as sizes differ."""

    model: nn.Module
    inputs: InputMaker
    keywords: tuple[str, ...]
    probes: Probes
    atoms: dict[str, nn.Module] = field(default_factory=dict)
    _flows: dict[tuple[Size, torch.dtype, bool], Flow] = field(default_factory=dict)
    _opaque: set[str] = field(default_factory=set)
    _models: dict[torch.dtype, nn.Module] = field(default_factory=dict)

    def choose_atoms(self, starts: tuple[str, ...]) -> None:
        """Find the modules that stay whole."""
        plain = {
            name: part
            for name, part in self.model.named_modules()
            if name and not has_children(part)
        }
        fine = self._trace(self.probes[0], self.dtype, plain)
        self.atoms = (
            named_atoms(self.model, fine, starts)
            if starts
            else find_atoms(self.model, fine)
        )

    @property
    def whole(self) -> dict[str, nn.Module]:
        """All modules that stay whole: those that were chosen, and those whose code cannot be written down."""
        return {
            name: self.model.get_submodule(name)
            for name in _outermost((*self.atoms, *self._opaque))
        }

    @property
    def dtype(self) -> torch.dtype:
        """Type of the model as it was given."""
        return dtype_of(self.model)

    def flow(
        self, size: Size, dtype: torch.dtype | None = None, *, evaluates: bool = False
    ) -> Flow:
        """The traced run at this size and type.

        Args:
            evaluates: run it in evaluation mode (`nn.Module.eval`): what code between modules asks of `training`, as
                functional dropout does, stands in the steps.

        Raises:
            UnsupportedError: the model runs other steps at other sizes, or in evaluation.
        """
        key = (size, dtype or self.dtype, evaluates)
        if key not in self._flows:
            settled = not self._flows  # by the run that the atoms were found in
            with evaluating([self._in(key[1])]) if evaluates else nullcontext():
                run = self._trace(*key[:2], self.atoms, settled=settled)
            found = Flow(run, frozenset(_parameters(self.model)))
            first = next(iter(self._flows.values()), found)
            if [_title(step) for step in found.trace.steps] != [
                _title(step) for step in first.trace.steps
            ]:
                where = (
                    "in evaluation"
                    if evaluates
                    else f"at micro-batch and sequence {size}"
                )
                raise _refusal(self.model, "", f"runs other operations {where}")
            self._flows[key] = found
        return self._flows[key]

    def _trace(
        self,
        size: Size,
        dtype: torch.dtype,
        atoms: Mapping[str, nn.Module],
        *,
        settled: bool = False,
    ) -> Trace:
        """Modules whose code cannot be written down become atoms."""
        model = self._in(dtype)
        while True:
            parts = {
                name: model.get_submodule(name)
                for name in _outermost((*atoms, *self._opaque))
            }
            try:
                with (
                    meta_friendly(),
                    torch.enable_grad(),
                ):  # shapes tell what carries gradients, whoever asks
                    return trace(
                        model,
                        cast_inputs(self.inputs(*size), dtype),
                        self.keywords,
                        parts,
                        settled=settled,
                    )
            except UntraceableError as error:
                if not error.scope or error.scope in parts:
                    raise _refusal(self.model, error.scope, error.reason) from error
                self._opaque.add(error.scope)

    def _in(self, dtype: torch.dtype) -> nn.Module:
        if dtype == self.dtype:
            return self.model
        if dtype not in self._models:
            self._models[dtype] = cast(copy.deepcopy(self.model), dtype)
        return self._models[dtype]


def _outermost(names: Iterable[str]) -> list[str]:
    """The modules that stand below no other one of them."""
    known = set(names)
    return [
        name
        for name in dict.fromkeys(names)
        if known.isdisjoint(list(lineage(name))[1:])
    ]


def _parameters(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters(remove_duplicate=False)]


def _title(step: Step) -> tuple[Any, str]:
    return step.target, step.scope


def _refusal(model: nn.Module, scope: str, reason: str) -> UnsupportedError:
    name = (
        f"module {scope!r} of {type(model).__name__}" if scope else type(model).__name__
    )
    return UnsupportedError(
        f"{name} {reason}.",
        field="model",
        hint="give example inputs that the model takes, and avoid operations that read values of tensors.",
    )


@dataclass(frozen=True)
class GraphChain:
    """Layers as runs of steps; the same numbers of steps at every size."""

    tracer: Tracer = field(repr=False, compare=False)
    runs: tuple[Run, ...]
    keeps_tree = False

    def values(self, flow: Flow, boundary: int) -> tuple[int, ...]:
        """What crosses before layer `boundary`: all inputs before the first, the outputs after the last."""
        if boundary == 0:
            return flow.trace.inputs
        if boundary == len(self.runs):
            return flow.trace.outputs
        return flow.live(self.runs[boundary].start)

    @cached_property
    def reference(self) -> Flow:
        """The run that the layers were found in."""
        return self.tracer.flow(self.tracer.probes[0])

    def size_of(
        self, values: Select, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype
    ) -> Size:
        """Micro-batch size and sequence length at which these values have these shapes in a model of this type.

        Raises:
            LayoutError: at none.
        """
        # Sizes are the same in every type, and known of the first; but what is cast to it crosses in others only.
        for traced in dict.fromkeys((self.tracer.dtype, dtype)):
            size = self._solved(values, shapes, traced)
            if size is not None and _shapes(
                self.tracer.flow(size, dtype), values
            ) == tuple(map(tuple, shapes)):
                return size
        raise LayoutError(
            f"the stage does not take tensors of shapes {list(map(tuple, shapes))}.",
            field="stages",
            hint="give it what the stage before returns.",
        )

    def _solved(
        self, values: Select, shapes: Sequence[tuple[int, ...]], dtype: torch.dtype
    ) -> Size | None:
        """By the runs of this type; None: other values cross in it, or no such size is whole."""
        probes = [
            _shapes(self.tracer.flow(size, dtype), values)
            for size in self.tracer.probes
        ]
        if len(probes[0]) != len(shapes):
            return None
        rows = [
            row
            for row in zip(shapes, *probes, strict=True)
            if len({len(size) for size in row}) == 1
        ]
        dimensions = [dimension for row in rows for dimension in zip(*row, strict=True)]
        (samples, tokens), (more, _), (_, longer) = self.tracer.probes
        batch, length = samples, tokens
        for now, at, wider, deeper in reversed(dimensions):
            if at != wider and at == deeper:
                batch = _solve(samples, more - samples, now, at, wider)
            if at == wider and at != deeper:
                length = _solve(tokens, longer - tokens, now, at, deeper)
        return (batch, length) if batch > 0 and length > 0 else None

    def stage(self, model: nn.Module, start: int, stop: int) -> nn.Module:
        """The model itself, other stages' modules taken out, its forward running the steps of layers start..stop."""
        return self._reduce(
            model,
            start,
            stop,
            partial(self.values, boundary=start),
            partial(self.values, boundary=stop),
        )

    def layer(self, model: nn.Module, index: int) -> nn.Module:
        """A stage of one layer that takes only what the layer reads, and returns only what it makes."""
        return self._reduce(
            model, index, index + 1, self.runs[index].takes, self.runs[index].makes
        )

    def _reduce(
        self, model: nn.Module, start: int, stop: int, takes: Select, gives: Select
    ) -> nn.Module:
        steps = [
            step for run in self.runs[start:stop] for step in run.steps(self.reference)
        ]
        keep = {step.module for step in steps if step.module is not None}
        prune(
            model,
            keep | aliases(model, keep),
            {name for step in steps for name in step.attributes},
        )
        model.forward = GraphStage(self, model, range(start, stop), takes, gives)
        model._forward_pre_hooks.clear()  # what they do stands among the steps
        model._forward_hooks.clear()
        return model

    def parts(
        self, stage: nn.Module, index: int, layer: CutLayer
    ) -> dict[str, nn.Module]:
        """The module that runs the layer."""
        return {layer.name: stage.__dict__["forward"].layers[index]}

    def borders(self, model: nn.Module, inputs: InputMaker, size: Size) -> Borders:
        """By the traced run at this size, in the type of the given model."""
        flow = self.tracer.flow(size, dtype_of(model))
        count = len(self.runs)

        def on_meta(values: Iterable[int], make: Callable[[Shape], Tensor]) -> Tensors:
            return tuple(make(flow.trace.shapes[value]) for value in values)

        return Borders(
            crossing=tuple(
                on_meta(self.values(flow, boundary), _sent)
                for boundary in range(count + 1)
            ),
            takes=tuple(on_meta(run.takes(flow), _within) for run in self.runs),
            makes=tuple(on_meta(run.makes(flow), _sent) for run in self.runs),
            output_bytes=tuple(
                _nbytes(flow, self.handed_on(index, flow)) for index in range(count)
            ),
        )

    def handed_on(self, index: int, flow: Flow) -> tuple[int, ...]:
        """Values that layer `index` makes for the next one; the last layer, what the model returns."""
        stop = (
            self.runs[index + 1].stop
            if index + 1 < len(self.runs)
            else len(flow.trace.steps) + 1
        )
        made = self.runs[index].makes(flow)
        return tuple(
            value
            for value in made
            if any(self.runs[index].stop <= at < stop for at in flow.readers[value])
        )

    def readers(
        self, index: int, place: int, dtype: torch.dtype
    ) -> list[tuple[int, int]]:
        """(layer, place among what it takes) of all layers that read this tensor of what layer `index` makes."""
        flow = self._in(dtype)
        return self._takers(flow, self.runs[index].makes(flow)[place], 0)

    def later_takers(
        self, index: int, place: int, dtype: torch.dtype
    ) -> list[tuple[int, int]]:
        """(layer, place among what it takes) of all layers behind `index` that take this tensor of what it takes."""
        flow = self._in(dtype)
        return self._takers(flow, self.runs[index].takes(flow)[place], index + 1)

    def _in(self, dtype: torch.dtype) -> Flow:
        """A run of this type: a cast that changes nothing in another type makes a tensor of its own here, or none."""
        return self.tracer.flow(self.tracer.probes[0], dtype)

    def _takers(self, flow: Flow, value: int, first: int) -> list[tuple[int, int]]:
        taken = [(at, self.runs[at].takes(flow)) for at in range(first, len(self.runs))]
        return [(at, values.index(value)) for at, values in taken if value in values]

    def edges(self, sequence_length: int, dtype: torch.dtype) -> tuple[SkipEdge, ...]:
        """See `skip_edges`."""
        return skip_edges(self, sequence_length, dtype)


def _solve(probe: int, more: int, now: int, at: int, at_more: int) -> int:
    """The size at which a dimension is `now`, given that it is `at` at the probe and `at_more` at probe + more."""
    slope = (at_more - at) / more
    return round(probe + (now - at) / slope)


def _shapes(flow: Flow, values: Select) -> tuple[tuple[int, ...], ...]:
    return tuple(flow.trace.shapes[value].size for value in values(flow))


def _nbytes(flow: Flow, values: Iterable[int]) -> int:
    return sum(flow.trace.shapes[value].nbytes for value in values)


def _sent(shape: Shape) -> Tensor:
    """As it crosses a border between stages."""
    return torch.empty(
        shape.size, dtype=shape.dtype, device="meta", requires_grad=shape.requires_grad
    )


def _within(shape: Shape) -> Tensor:
    """As a layer finds it behind another one of its stage: where it is not contiguous, kernels may copy it."""
    tensor = torch.empty_strided(
        shape.size, shape.stride, dtype=shape.dtype, device="meta"
    )
    return tensor.requires_grad_(shape.requires_grad)


def _layers(model: nn.Module, chain: GraphChain, flow: Flow) -> list[CutLayer]:
    runs = chain.runs
    marks = [
        (_mark(model, chain, flow, index), index == 0, index == len(runs) - 1)
        for index in range(len(runs))
    ]
    kinds = name_kinds(marks, [_stem(model, flow, run) for run in runs])
    return [
        CutLayer(
            run.name,
            kind,
            modules=run.modules(flow),
            # The loss keeps the last layer's output; a tensor that is changed in place could not be run on again.
            recomputable=index < len(runs) - 1
            and bool(run.modules(flow))
            and not _changes_received(flow, run)
            and _has_backward(model, flow, run),
            parameters=tuple(_attributes_of(model, flow, run)),
        )
        for index, (run, kind) in enumerate(zip(runs, kinds, strict=True))
    ]


def _attributes_of(model: nn.Module, flow: Flow, run: Run) -> list[str]:
    """Parameters that the code between the modules reads, by name."""
    known = set(_parameters(model))
    return sorted(
        {
            name
            for step in flow.trace.steps[run.start : run.stop]
            for name in step.attributes & known
        }
    )


def _has_backward(model: nn.Module, flow: Flow, run: Run) -> bool:
    held = [model.get_parameter(name) for name in _attributes_of(model, flow, run)]
    held += [
        each
        for name in run.modules(flow)
        for each in model.get_submodule(name).parameters()
    ]
    return has_backward(
        held, *(_sent(flow.trace.shapes[value]) for value in run.makes(flow))
    )


def _stem(model: nn.Module, flow: Flow, run: Run) -> str:
    """What a kind is called after: the class of a single module, else the name of the layer."""
    modules = run.modules(flow)
    if len(modules) == 1 and run.name == modules[0]:
        return type(model.get_submodule(modules[0])).__name__
    return run.name


def _changes_received(flow: Flow, run: Run) -> bool:
    """Does the layer change a tensor in place that another one made?"""
    shapes = flow.trace.shapes
    received = {shapes[value].storage for value in flow.live(run.start)} | {
        shapes[value].storage for value in flow.trace.inputs if run.start == 0
    }
    return any(
        run.start <= index < run.stop
        for storage, index in flow.changed.items()
        if storage in received
    )


def _mark(
    model: nn.Module, chain: GraphChain, flow: Flow, index: int
) -> tuple[Any, ...]:
    """All that decides what a layer costs: its steps with their settings, the shapes of what it reads, and which of its
    tensors leave it, to the next layer or beyond."""
    run = chain.runs[index]
    local: dict[int, int] = {}
    rows: list[Any] = []
    for step in run.steps(flow):
        read = (
            leaf.index
            for leaf in tree_flatten(step.arguments)[0]
            if isinstance(leaf, Value)
        )
        for value in (value for value in dict.fromkeys(read) if value not in local):
            shape = flow.trace.shapes[value]
            rows.append(("takes", shape.size, shape.dtype, shape.requires_grad))
            local[value] = len(local)
        rows.append(_describe(model, step, local))
        for value in step.writes:
            local[value] = len(local)
    handed_on = chain.handed_on(index, flow)
    rows += [("makes", local[value], value in handed_on) for value in run.makes(flow)]
    return tuple(rows)


def _describe(
    model: nn.Module, step: Step, local: Mapping[int, int]
) -> tuple[Any, ...]:
    if step.module is not None:
        target: Any = signature(model.get_submodule(step.module))
    else:
        target = getattr(step.target, "__qualname__", repr(step.target))
    attributes = dict(
        (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        )
    )

    def stand_in(leaf: Any) -> str:
        if isinstance(leaf, Value):
            return f"v{local[leaf.index]}"
        if isinstance(leaf, Attribute):
            each = attributes[leaf.name]
            return f"a{tuple(each.shape)}{each.requires_grad}"
        return repr(leaf)

    leaves, spec = tree_flatten(step.arguments)
    return target, str(spec), tuple(map(stand_in, leaves)), step.gradients


def _shared_parameters(
    model: nn.Module, chain: GraphChain, flow: Flow
) -> tuple[SharedParameters, ...]:
    """Parameters that several layers use, such as tied embeddings (Press and Wolf 2017)."""
    users: dict[int, list[str]] = {}
    for run in chain.runs:
        owned = {
            id(each)
            for name in run.modules(flow)
            for each in model.get_submodule(name).parameters()
        }
        owned |= {
            id(model.get_parameter(name)) for name in _attributes_of(model, flow, run)
        }
        for key in owned:
            users.setdefault(key, []).append(run.name)
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return tuple(
        shared_parameters(known, users[key], model.get_parameter(known[0]))
        for key, known in names.items()
        if len(users.get(key, ())) > 1
    )


def skip_edges(
    chain: GraphChain, sequence_length: int, dtype: torch.dtype | None = None
) -> tuple[SkipEdge, ...]:
    """Tensors that layers take besides what the layer before made, with the bytes of one sample.

    A tensor that several layers take travels from one to the next: each edge starts at the last layer that had it, so
    that every boundary is crossed by every tensor once, and its bytes are the next layer's input and all edges over it.
    Tensors without a micro-batch dimension (relative positions) count in full for every sample.
    """
    length = sequence_length or chain.tracer.probes[0][1]
    flow, nbytes = _of_one_sample(chain, length, dtype)
    layer_of = {
        step: index
        for index, run in enumerate(chain.runs)
        for step in range(run.start, run.stop)
    }
    layer_of |= {-1: 0, len(flow.trace.steps): len(chain.runs) - 1}
    sizes: dict[tuple[int, int], int] = {}
    for value, readers in flow.readers.items():
        if value in flow.constants:
            continue
        maker = layer_of[flow.producer[value]]
        stops = sorted({maker, *(layer_of[reader] for reader in readers)})
        for before, after in pairwise(stops):
            if not (
                before == maker and after == maker + 1 and flow.producer[value] >= 0
            ):
                sizes[before, after] = sizes.get((before, after), 0) + nbytes(value)
    names = [run.name for run in chain.runs]
    return tuple(
        SkipEdge.model_validate(
            {
                "from": names[start],
                "to": names[stop],
                "bytes": size,
                "sequence_length": sequence_length,
            }
        )
        for (start, stop), size in sorted(sizes.items())
    )


def _of_one_sample(
    chain: GraphChain, length: int, dtype: torch.dtype | None
) -> tuple[Flow, Callable[[int], int]]:
    """A run, and the bytes of its values in one of a single sample; of such, batch norm may have nothing to take the
    mean of."""
    try:
        flow = chain.tracer.flow((1, length), dtype)
        return flow, lambda value: flow.trace.shapes[value].nbytes
    except UnsupportedError:
        two, three = (chain.tracer.flow((samples, length), dtype) for samples in (2, 3))
        return (
            two,
            lambda value: (
                2 * two.trace.shapes[value].nbytes - three.trace.shapes[value].nbytes
            ),
        )
