"""One run of a model on meta tensors, written down as steps: calls of modules, and torch functions between them.

torch.fx traces with symbols instead of tensors, so that it stops at the first `if` on a shape, as most transformers
have. torch.export traces to single kernels: modules are gone, and with them what hooks to them (seeds of dropout,
recomputation, DTensor). Here the model's own code runs, on tensors with shapes but no values. Modules that are to stay
whole (`atoms`) become one step each, and are called again as they are; of the code around them, every torch function
becomes a step. A trace holds for the sizes that it was made with, and is made anew for others.

What a module does besides calling modules and torch functions would be done once, here, and never again: count its
calls, draw numbers from Python, hook to a gradient. Such a module is refused (`UntraceableError`), and becomes an atom.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.modules._functions import BackwardHookFunction
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.checkpoint import CheckpointFunction

from planner.profiler.host_random import restore, states

META = torch.device("meta")
RANDOM = frozenset(
    {"bernoulli", "multinomial", "normal", "poisson", "dropout", "uniform_", "normal_"}
)
"""Functions that draw numbers; so do all whose name starts with ``rand``."""


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the run, by number."""

    index: int


@dataclass(frozen=True, slots=True)
class Attribute:
    """A parameter or buffer, by qualified name."""

    name: str


@dataclass(frozen=True, slots=True)
class OwnDevice:
    """Stands where the code named the device that it runs on."""


@dataclass(frozen=True, slots=True)
class Step:
    """One call of a module or of a torch function."""

    target: str | Callable[..., Any]
    """Qualified name of the module, or the function."""
    arguments: tuple[Any, Any]
    """Positional and by keyword, with `Value`, `Attribute` and `OwnDevice` in the places of what they stand for."""
    results: tuple[int | None, ...]
    """Number of the value at every leaf of what the call returns; None for leaves that are no tensor."""
    changes: tuple[tuple[int, int], ...]
    """Tensors that the call changes in place and does not return: number before, number from then on."""
    changed: frozenset[int]
    """Values whose memory the call writes, by their numbers before."""
    scope: str
    """Qualified name of the module whose code made the call."""
    reads: frozenset[int]
    """Values among the arguments."""
    attributes: frozenset[str]
    """Parameters and buffers among the arguments."""
    gradients: bool
    """Gradients are taken through it; not, where it stands under `torch.no_grad`."""
    keeps_state: bool
    """It leaves parameters and buffers as they are."""

    @property
    def module(self) -> str | None:
        """Name of the called module; None for a function."""
        return self.target if isinstance(self.target, str) else None

    @property
    def writes(self) -> tuple[int, ...]:
        """Values that the call makes."""
        return (
            *(index for index in self.results if index is not None),
            *(new for _, new in self.changes),
        )


@dataclass(frozen=True, slots=True)
class Shape:
    """What is known of a value."""

    size: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    storage: int
    """Values with one number share their memory."""
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of a contiguous tensor."""
        elements = 1
        for length in self.size:
            elements *= length
        return elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Trace:
    """All steps of one run."""

    steps: tuple[Step, ...]
    inputs: tuple[int, ...]
    """Values that the model takes."""
    outputs: tuple[int, ...]
    """Values that it returns; of a transformers output, the logits."""
    shapes: Mapping[int, Shape]
    called: frozenset[str]
    """Qualified names of all modules that were called, atoms included."""


class UntraceableError(Exception):
    """The code of a module cannot be written down."""

    def __init__(self, scope: str, reason: str) -> None:
        super().__init__(reason)
        self.scope = scope
        self.reason = reason


def trace(
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    keywords: tuple[str, ...],
    atoms: Mapping[str, nn.Module],
    *,
    settled: bool = False,
) -> Trace:
    """Run the model once.

    Args:
        model: on the meta device.
        inputs: meta tensors that the model takes.
        keywords: their names; empty: by place.
        atoms: modules, by qualified name, whose code is not looked into.
        settled: the model has run at this size before, so that attributes that change now do so at every run.

    Raises:
        UntraceableError: the model does not run on meta tensors, uses a tensor whose origin cannot be seen, or does
            what steps cannot tell.
    """
    before, drawn = _attribute_values(model, atoms), states()
    recorder = _Recorder(model, atoms)
    numbers = tuple(recorder.adopt(tensor) for tensor in inputs)
    with recorder.calls(), META, recorder:
        try:
            output = (
                model(**dict(zip(keywords, inputs, strict=True)))
                if keywords
                else model(*inputs)
            )
        except UntraceableError:
            raise
        except Exception as error:  # any: it is the user's code
            message = str(error).strip() or type(error).__name__
            raise UntraceableError(
                recorder.scope,
                f"does not run on meta tensors: {message.splitlines()[0]}",
            ) from error
        finally:
            restore(drawn)
    if settled:
        _refuse_changes(before, _attribute_values(model, atoms))
    results = tuple(recorder.number(tensor) for tensor in output_tensors(output))
    return Trace(
        tuple(recorder.steps),
        numbers,
        results,
        recorder.shapes,
        frozenset(recorder.called),
    )


def output_tensors(output: Any) -> tuple[Tensor, ...]:
    """The tensors that a model returns: its logits, where it returns a transformers output, else all of them."""
    logits = getattr(output, "logits", None)
    leaves = [logits] if isinstance(logits, Tensor) else tree_flatten(output)[0]
    return tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))


class _Recorder(TorchFunctionMode):
    """Sees every torch function and every call of a module."""

    def __init__(self, model: nn.Module, atoms: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.shapes: dict[int, Shape] = {}
        self._atoms = {id(module): name for name, module in atoms.items()}
        self._names = {
            id(module): name for name, module in reversed(list(model.named_modules()))
        }
        self._attributes = {
            id(each): name for name, each in reversed(list(_attributes(model)))
        }
        # What atoms hold they read by themselves, and parameters stand in every stage that reads them.
        held = (
            *model.parameters(),
            *(each for atom in atoms.values() for each in atom.buffers()),
        )
        self._lasting = {id(each) for each in held}
        self._numbers: dict[int, int] = {}
        self._alive: list[Tensor] = []
        self._storages: dict[int, int] = {}
        self.called: set[str] = set()
        self._scopes = [""]
        self._inside = False
        self._gradients = torch.is_grad_enabled()
        self._autocast = _autocast()
        self._random = states()

    @property
    def scope(self) -> str:
        """The module whose code runs; after an error, the one that it came from."""
        return self._scopes[-1]

    def _enter(self, name: str) -> None:
        self._scopes.append(name)
        self.called.add(name)

    def adopt(self, tensor: Tensor) -> int:
        """A new number for this tensor from now on."""
        index = len(self.shapes)
        self._alive.append(tensor)  # so that no other tensor gets its id
        with torch._C.DisableTorchFunction():
            storage = self._storages.setdefault(
                id(tensor.untyped_storage()), len(self._storages)
            )
            self._alive.append(tensor.untyped_storage())  # type: ignore[arg-type]
            self.shapes[index] = Shape(
                tuple(tensor.shape),
                tensor.dtype,
                tensor.requires_grad,
                storage,
                tensor.stride(),
            )
        self._numbers[id(tensor)] = index
        return index

    def number(self, tensor: Tensor) -> int:
        """The number of a tensor of the run."""
        if id(tensor) not in self._numbers:
            raise UntraceableError(
                self.scope,
                "uses a tensor that no torch function made here (a torch.autograd.Function of its own?)",
            )
        return self._numbers[id(tensor)]

    @contextmanager
    def calls(self) -> Iterator[None]:
        """Within, calls of modules are seen."""
        original = nn.Module.__call__

        def call(module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
            if self._inside:
                return original(module, *arguments, **keywords)
            if id(module) in self._atoms:
                name = self._atoms[id(module)]
                return self._record(
                    name,
                    lambda: original(module, *arguments, **keywords),
                    arguments,
                    keywords,
                )
            self._enter(self._names.get(id(module), self.scope))
            output = original(module, *arguments, **keywords)
            self._refuse_draws()
            self._scopes.pop()
            return output

        with mock.patch.object(nn.Module, "__call__", call), self._own_functions():
            yield

    @contextmanager
    def _own_functions(self) -> Iterator[None]:
        """Within, a `torch.autograd.Function` is one step, for the gradients are not those of what it runs."""
        original = torch.autograd.Function.__dict__["apply"]

        def apply(function: Any, *arguments: Any, **keywords: Any) -> Any:
            own = MethodType(original.__func__, function)
            if self._inside:
                return own(*arguments, **keywords)
            if function is CheckpointFunction:  # the plan tells what recomputes
                run, _, *rest = arguments
                return run(*rest)
            if function is BackwardHookFunction:
                raise UntraceableError(self.scope, "has a hook to its backward")
            return self._record(
                own, lambda: own(*arguments, **keywords), arguments, keywords
            )

        with mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)):
            yield

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Write the function down, unless it stands inside an atom."""
        if self._inside:
            return func(*args, **(kwargs or {}))
        if (reason := _untold(func)) is not None:
            raise UntraceableError(self.scope, reason)
        return self._record(
            func, lambda: func(*args, **(kwargs or {})), args, kwargs or {}
        )

    def _record(
        self,
        target: Any,
        run: Callable[[], Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if _autocast() != self._autocast:
            raise UntraceableError(self.scope, "computes under torch.autocast")
        given = [
            leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)
        ]
        versions = [tensor._version for tensor in given]
        places = {
            id(tensor): self._numbers[id(tensor)]
            for tensor in given
            if id(tensor) in self._numbers
        }
        output = self._run(target, run)
        returned = tree_flatten(output)[0]
        changed = [
            tensor
            for tensor, version in zip(given, versions, strict=True)
            if tensor._version != version
        ]
        if (
            isinstance(target, str)
            or changed
            or any(isinstance(leaf, Tensor) for leaf in returned)
        ):
            self._write(target, (args, kwargs), places, returned, changed)
        return output

    def _run(self, target: Any, run: Callable[[], Any]) -> Any:
        if isinstance(target, str):
            self._refuse_draws()
            self._enter(target)
        self._inside = True
        try:
            output = run()
        finally:
            self._inside = False
        if isinstance(target, str):
            self._scopes.pop()
            self._random = states()  # an atom may draw what it likes
        return output

    def _refuse_draws(self) -> None:
        """Refuse numbers that were drawn since an atom last ran."""
        if states() != self._random:
            raise UntraceableError(
                self.scope, "draws random numbers that are not torch's"
            )

    def _write(
        self,
        target: Any,
        arguments: Any,
        places: dict[int, int],
        returned: list[Any],
        changed: list[Tensor],
    ) -> None:
        reads: set[int] = set()
        attributes: set[str] = set()

        def stand_in(leaf: Any) -> Any:
            if isinstance(leaf, torch.device):
                return OwnDevice() if leaf == META else leaf
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) not in places and id(leaf) in self._attributes:
                attributes.add(self._attributes[id(leaf)])
                return Attribute(self._attributes[id(leaf)])
            index = places[id(leaf)] if id(leaf) in places else self.number(leaf)
            reads.add(index)
            return Value(index)

        stood = tree_map(stand_in, arguments)
        if not isinstance(target, str) and any(
            id(tensor) in self._lasting for tensor in changed
        ):
            raise UntraceableError(
                self.scope,
                "changes a parameter, or a buffer of another module, in place",
            )
        known = {
            id(tensor): places[id(tensor)] for tensor in changed if id(tensor) in places
        }
        results = tuple(
            self.adopt(leaf) if isinstance(leaf, Tensor) else None for leaf in returned
        )
        made = {id(leaf) for leaf in returned if isinstance(leaf, Tensor)}
        changes = tuple(
            (old, self.adopt(tensor))
            for tensor in changed
            if (old := known.get(id(tensor))) is not None and id(tensor) not in made
        )
        written = frozenset(known.values())
        self.steps.append(
            Step(
                target,
                stood,
                results,
                changes,
                written,
                self.scope,
                frozenset(reads),
                frozenset(attributes),
                gradients=torch.is_grad_enabled() or not self._gradients,
                keeps_state=all(id(tensor) in known for tensor in changed),
            )
        )


def _attributes(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _autocast() -> tuple[bool, ...]:
    return tuple(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))


def _untold(function: Any) -> str | None:
    """What a function does besides returning tensors and changing them in place; None: nothing."""
    if function in (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook):
        return "hooks to the gradient of a tensor"
    return (
        "sets an attribute of a tensor"
        if getattr(function, "__name__", "") == "__set__"
        else None
    )


Values = dict[tuple[str, str], Any]
"""Of attributes, by module and name."""


def _attribute_values(model: nn.Module, atoms: Mapping[str, nn.Module]) -> Values:
    """Plain values and tensors that modules hold, but for atoms and what is below them."""
    within = {id(part) for atom in atoms.values() for part in atom.modules()}
    return {
        (name, key): value
        for name, part in model.named_modules()
        if id(part) not in within
        for key, value in (
            *vars(part).items(),
            *part._buffers.items(),
            *part._parameters.items(),
        )
        if isinstance(value, int | float | str | Tensor | None)
    }


def _refuse_changes(before: Values, after: Values) -> None:
    for place, value in after.items():
        old = before.get(place)
        is_same = (
            value is old
            if isinstance(value, Tensor) or isinstance(old, Tensor)
            else value == old
        )
        if not is_same:
            raise UntraceableError(
                place[0], f"changes its attribute {place[1]!r} whenever it runs"
            )


def is_constant(step: Step, constants: set[int], parameters: frozenset[str]) -> bool:
    """Does the step compute from nothing but sizes, buffers and other constants, always the same?"""
    name = getattr(step.target, "__name__", "")
    draws = name in RANDOM or name.startswith("rand")
    is_fixed = (
        step.reads <= constants
        and step.keeps_state
        and not step.attributes & parameters
    )
    return step.module is None and is_fixed and not draws
