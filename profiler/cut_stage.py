"""Runs the steps of a stage: the forward of a model that `planner.profiler.cut_graph` has cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from planner.errors import UnsupportedError
from planner.profiler.cut import detachable
from planner.profiler.cut_layers import Flow, Run
from planner.profiler.cut_trace import Attribute, OwnDevice, Step, Value

if TYPE_CHECKING:
    from planner.profiler.cut_graph import GraphChain, Select

Tensors = dict[int, Tensor]
"""By number of the value."""


@dataclass(frozen=True, slots=True)
class Call:
    """A step made ready to run."""

    step: Step
    leaves: tuple[Any, ...]
    spec: TreeSpec

    @classmethod
    def of(cls, step: Step) -> Call:
        """Take the arguments apart once."""
        leaves, spec = tree_flatten(step.arguments)
        return cls(step, tuple(leaves), spec)

    def run(self, model: nn.Module, tensors: Tensors, device: torch.device) -> None:
        """Call, and add what it makes."""

        def fill(leaf: Any) -> Any:
            if isinstance(leaf, Value):
                return tensors[leaf.index]
            if isinstance(leaf, Attribute):
                owner, _, name = leaf.name.rpartition(".")
                return getattr(model.get_submodule(owner), name)
            return device if isinstance(leaf, OwnDevice) else leaf

        step = self.step
        arguments, keywords = tree_unflatten(map(fill, self.leaves), self.spec)
        target: Any = (
            step.target if step.module is None else model.get_submodule(step.module)
        )
        with nullcontext() if step.gradients else torch.no_grad():
            returned = tree_flatten(target(*arguments, **keywords))[0]
        for index, leaf in zip(step.results, returned, strict=True):
            if index is not None:
                tensors[index] = leaf
        for old, new in step.changes:
            tensors[new] = tensors[old]


@dataclass(frozen=True, slots=True)
class Program:
    """The steps of one layer at one size."""

    calls: tuple[Call, ...]
    takes: tuple[int, ...]
    makes: tuple[int, ...]

    @classmethod
    def of(cls, flow: Flow, run: Run) -> Program:
        """The program of a layer."""
        return cls(
            tuple(map(Call.of, run.steps(flow))), run.takes(flow), run.makes(flow)
        )


class GraphLayer(nn.Module):
    """One layer of a stage. It stands beside the model's tree, not in it, so that names stay the user's; hooks and
    recomputation take hold of it as of any module."""

    def __init__(
        self, model: nn.Module, names: tuple[str, ...], attributes: Iterable[str]
    ) -> None:
        super().__init__()
        self._model = [model]  # in a list, so that it is no submodule
        self._part_names = names
        self._owners = sorted({name.rpartition(".")[0] for name in attributes})

    def modules(self, remove_duplicate: bool = True) -> Iterator[nn.Module]:
        """The user's modules that belong to the layer, and those whose parameters and buffers its steps read."""
        for name in self._part_names:
            yield from self._model[0].get_submodule(name).modules()
        yield from map(self._model[0].get_submodule, self._owners)

    def forward(self, program: Program, *received: Tensor) -> tuple[Tensor, ...]:
        """Run the layer on the tensors that it takes; returns those that it makes for others."""
        tensors = dict(zip(program.takes, received, strict=True))
        device = _device(self._model[0], received)
        for call in program.calls:
            call.run(self._model[0], tensors, device)
        return tuple(tensors[index] for index in program.makes)


def _layer(model: nn.Module, chain: GraphChain, run: Run) -> GraphLayer:
    attributes = (
        name for step in run.steps(chain.reference) for name in step.attributes
    )
    return GraphLayer(model, run.modules(chain.reference), attributes)


def _device(model: nn.Module, received: tuple[Tensor, ...]) -> torch.device:
    found = (
        *received[:1],
        *(
            parameter
            for _, parameter in zip(range(1), model.parameters(), strict=False)
        ),
    )
    return found[0].device if found else torch.device("cpu")


class GraphStage:
    """The forward of a stage: takes and returns what is live at its borders, a tuple, or a tensor where it is one."""

    def __init__(
        self,
        chain: GraphChain,
        model: nn.Module,
        indices: range,
        takes: Select,
        gives: Select,
    ) -> None:
        self._chain = chain
        self._model = model
        self._takes, self._gives = takes, gives
        self._programs: dict[Any, _StageProgram] = {}
        self.layers = {
            index: _layer(model, chain, chain.runs[index]) for index in indices
        }
        """By index in the model, in order."""

    def __call__(
        self, *received: Tensor, **named: Tensor
    ) -> Tensor | tuple[Tensor, ...]:
        """Run all layers."""
        given = (
            *received,
            *(named[name] for name in self._chain.tracer.keywords if name in named),
        )
        stage = self._program(given)
        tensors: Tensors = {
            index: tensor.clone() if index in stage.changed else tensor
            for index, tensor in zip(stage.takes, given, strict=True)
        }
        for layer, program in zip(self.layers.values(), stage.programs, strict=True):
            made = layer(program, *(tensors[index] for index in program.takes))
            tensors |= dict(zip(program.makes, made, strict=True))
        sent = tuple(detachable(tensors[index]) for index in stage.gives)
        return sent[0] if len(sent) == 1 else sent

    def prepare(self, *received: Tensor) -> None:
        """Trace the model at the size of these tensors, as the first run at a size would."""
        self._program(received)

    def _program(self, given: tuple[Tensor, ...]) -> _StageProgram:
        dtype = self._dtype(given)
        evaluates = self._chain.tracer.model.training and not self._model.training
        key = (tuple(tuple(tensor.shape) for tensor in given), dtype, evaluates)
        if key not in self._programs:
            size = self._chain.size_of(self._takes, key[0], dtype)
            flow = self._chain.tracer.flow(size, dtype, evaluates=evaluates)
            if evaluates:
                self._check_borders(flow, self._chain.tracer.flow(size, dtype))
            runs = [self._chain.runs[index] for index in self.layers]
            self._programs[key] = _StageProgram.of(
                flow, runs, self._takes(flow), self._gives(flow)
            )
        return self._programs[key]

    def _check_borders(self, evaluated: Flow, trained: Flow) -> None:
        """Neighbours' buffers are for what the stage takes and gives in training."""
        for values in (self._takes, self._gives):
            if len(values(evaluated)) != len(values(trained)):
                raise UnsupportedError(
                    f"{type(self._model).__name__} hands {len(values(evaluated))} tensors from one stage to the next "
                    f"in evaluation, and {len(values(trained))} in training.",
                    field="model",
                    hint="validate its checkpoints apart from the run, or plan with pipeline_parallel_degree 1.",
                )

    def _dtype(self, given: tuple[Tensor, ...]) -> torch.dtype:
        for tensor in (*self._model.parameters(), *given):
            if tensor.is_floating_point():
                return tensor.dtype
        return self._chain.tracer.dtype


@dataclass(frozen=True, slots=True)
class _StageProgram:
    """What a stage takes, runs and gives at one size."""

    takes: tuple[int, ...]
    programs: tuple[Program, ...]
    gives: tuple[int, ...]
    changed: frozenset[int]
    """Taken values whose memory the stage writes: autograd refuses that for the leaves that schedules hand in."""

    @classmethod
    def of(
        cls,
        flow: Flow,
        runs: Sequence[Run],
        takes: tuple[int, ...],
        gives: tuple[int, ...],
    ) -> _StageProgram:
        """The program of these layers."""
        storages = {
            storage
            for storage, index in flow.changed.items()
            if runs[0].start <= index < runs[-1].stop
        }
        changed = frozenset(
            value for value in takes if flow.trace.shapes[value].storage in storages
        )
        return cls(takes, tuple(Program.of(flow, run) for run in runs), gives, changed)
