"""The job's optimizer over a rank's parameters, with an fp32 master copy when they are kept in half precision.

Offloaded, states and master copies stay on the host (`pipeline.offload`), and the update goes layer by layer.
Every optimizer here treats each parameter by itself, so that it ends in the same values whatever is updated together.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from planner.errors import UnsupportedError
from planner.executor.parallel.flat import put
from planner.executor.parallel.sharding import local
from planner.executor.parallel.zero import ZeroShards
from planner.executor.pipeline.offload import ParkedStates, host_like, to_host
from planner.executor.train.adam_8bit import SIGNED, Adam8bit
from planner.executor.train.optimizer_options import DEFAULTS, OptimizerOptions

MOMENTUM = 0.9
ADAM = ("weight_decay", "betas", "eps")
"""What torch's Adam takes of the options."""
MASTER = "master"
"""Name of the master copy among a parameter's states."""
COUNTER = "step"
"""Optimizers' name of the only state that is not of the parameter's shape, whatever that shape is; never offloaded."""

COMPUTE_DTYPE: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "fp16-mixed": torch.float16,
    "bf16-mixed": torch.bfloat16,
    "bf16": torch.bfloat16,
    "fp8": torch.bfloat16,
}
"""Type of parameters, activations and gradients by the job's precision; in fp8 the products of linear layers alone cast
them further (`planner.profiler.float8`)."""

MASTER_COPY = ("fp16-mixed", "bf16-mixed", "fp8")
"""Precisions whose optimizer works on an fp32 copy of the parameters."""


class Together(torch.optim.Optimizer):
    """Several optimizers as one, each with its own parameters."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__(
            [group for one in optimizers for group in one.param_groups], {}
        )
        self._optimizers = optimizers
        for one in optimizers:
            one.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of each."""
        for one in self._optimizers:
            one.step(closure)


def make_optimizer(
    name: str,
    parameters: Iterable[torch.Tensor],
    learning_rate: float,
    matrices: Collection[torch.Tensor] = (),
    starts: Sequence[int] = (),
    options: OptimizerOptions = DEFAULTS,
) -> torch.optim.Optimizer:
    """torch's optimizer of this name, with torch's defaults (momentum: 0.9) where no option was chosen.

    Adam runs fused: it reads and writes every state once and holds no temporary copy, where torch's default on CUDA
    makes one of all parameters; Adafactor goes parameter by parameter for the same reason, and so does SGD with weight
    decay. Plain tensors and DTensors of every mesh stand in groups of their own: one call does not take both.

    Muon takes the matrices, AdamW the rest, both with one learning rate: Muon's updates are scaled to the size of
    AdamW's (Liu et al. 2025, "Muon is Scalable for LLM Training", equation (4)).

    Args:
        matrices: those of the parameters that Muon orthogonalises; other optimizers treat them as all others.
        starts: which of its elements each one starts with, where ZeRO leaves a part of it: 8-bit Adam goes by blocks.
        options: those that it has; see `planner.executor.train.optimizer_options`.

    Raises:
        UnsupportedError: no such optimizer.
    """
    parameters = list(parameters)
    if name == "muon":
        chosen = {id(matrix) for matrix in matrices}
        muon = [parameter for parameter in parameters if id(parameter) in chosen]
        rest = [parameter for parameter in parameters if id(parameter) not in chosen]
        made: list[torch.optim.Optimizer] = []
        if muon:
            given = options.keywords("weight_decay", "momentum")
            made.append(
                torch.optim.Muon(
                    muon, lr=learning_rate, adjust_lr_fn="match_rms_adamw", **given
                )
            )
        if rest:
            made.append(make_optimizer("adamw", rest, learning_rate, options=options))
        return Together(made)
    if name == "adam-8bit":
        return Adam8bit(parameters, learning_rate, starts, **options.keywords(*ADAM))
    kinds: dict[DeviceMesh | None, list[torch.Tensor]] = {None: []}
    for each in parameters:
        kinds.setdefault(
            each.device_mesh if isinstance(each, DTensor) else None, []
        ).append(each)
    groups = [{"params": kind} for kind in kinds.values() if kind]
    foreach = False if options.weight_decay else None
    if name == "sgd":
        return torch.optim.SGD(
            groups,
            lr=learning_rate,
            foreach=foreach,
            **options.keywords("weight_decay"),
        )
    if name == "momentum":
        given = {"momentum": MOMENTUM, **options.keywords("weight_decay", "momentum")}
        return torch.optim.SGD(groups, lr=learning_rate, foreach=foreach, **given)
    fused = not any(
        parameter.is_meta for parameter in parameters
    )  # torch fuses only what has storage
    if name == "adam":
        return torch.optim.Adam(
            groups, lr=learning_rate, fused=fused, **options.keywords(*ADAM)
        )
    if name == "adamw":
        return torch.optim.AdamW(
            groups, lr=learning_rate, fused=fused, **options.keywords(*ADAM)
        )
    if name == "adafactor":
        return torch.optim.Adafactor(
            groups, lr=learning_rate, foreach=False, **options.keywords("weight_decay")
        )
    raise UnsupportedError(
        f"no optimizer {name!r}.",
        field="request.job.optimizer",
        hint="use sgd, momentum, adam, adamw, adam-8bit, adafactor or muon.",
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Of the updates to come."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):  # compiled updates read it
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


@dataclass(frozen=True, slots=True)
class Stepped:
    """A parameter that an optimizer steps."""

    name: str
    parameter: torch.Tensor
    """Or what ZeRO leaves this rank of it."""
    master: torch.Tensor | None
    """Its fp32 copy, where there is one."""
    start: int = 0
    """Which of the parameter's elements, one after the other, is its first."""

    @property
    def tensor(self) -> torch.Tensor:
        """What torch's optimizer works on."""
        return self.parameter if self.master is None else self.master


class Part:
    """Parameters that are stepped in one go.

    Args:
        parked: has their master copies, and keeps their states, on the host; None: both stay on the device.
    """

    def __init__(
        self,
        stepped: Sequence[Stepped],
        optimizer: torch.optim.Optimizer,
        parked: ParkedStates | None,
    ) -> None:
        self.stepped = stepped
        self.parked = parked
        self._optimizer = optimizer

    def set_learning_rate(self, rate: float) -> None:
        """Of the updates to come."""
        set_learning_rate(self._optimizer, rate)

    def step(self, factor: float) -> None:
        """Apply the gradients, times a factor."""
        with self._states_at_hand():
            for each in self.stepped:
                if each.master is not None:
                    gradient = each.parameter.grad
                    each.master.grad = (
                        None if gradient is None else gradient.to(each.master.dtype)
                    )
            if factor != 1.0:
                _scale_gradients((each.tensor for each in self.stepped), factor)
            self._optimizer.step()
            with torch.no_grad():
                for each in self.stepped:
                    if each.master is not None:
                        each.parameter.copy_(each.master)
                        each.master.grad = None

    @contextmanager
    def _states_at_hand(self) -> Iterator[None]:
        """Within, states and master copies have their bytes on the device."""
        if self.parked is None:
            yield
            return
        self.parked.fetch()
        yield
        self.parked.park(self._offloaded())

    def _offloaded(self) -> Iterator[torch.Tensor]:
        for each in self.stepped:
            if each.master is not None:
                yield each.master
            yield from (
                value for key, value in self._states(each).items() if key != COUNTER
            )

    def _states(self, one: Stepped) -> dict[str, torch.Tensor]:
        """Tensors that torch's optimizer keeps of a parameter, by its names for them."""
        held = self._optimizer.state.get(one.tensor, {})
        return {
            key: value for key, value in held.items() if isinstance(value, torch.Tensor)
        }

    def named_states(self, one: Stepped) -> dict[str, torch.Tensor]:
        """Likewise with the master copy; what is offloaded as it lies on the host: this rank's values. So are states
        that are kept in 8 bits, as the numbers that they stand for.
        """
        states, parked = self._states(one), self.parked
        if one.master is not None:
            states[MASTER] = one.master.detach() if parked is None else one.master
        if parked is not None:
            states = {
                key: value if key == COUNTER else parked.host(value)
                for key, value in states.items()
            }
        return (
            self._optimizer.dequantized(one.tensor, states)
            if isinstance(self._optimizer, Adam8bit)
            else states
        )

    def names_on_host(self, key: str) -> bool:
        """Does `named_states` give this state as a tensor of the host?"""
        return key != COUNTER and (
            self.parked is not None
            or (isinstance(self._optimizer, Adam8bit) and key in SIGNED)
        )

    def set_states(self, one: Stepped, given: Mapping[str, torch.Tensor]) -> None:
        """Go on with states that `named_states` gave, those of another run too."""
        states, parked = dict(given), self.parked
        master = states.pop(MASTER, None)
        if master is not None and one.master is not None:
            (one.master.detach() if parked is None else parked.host(one.master)).copy_(
                master
            )
        if isinstance(self._optimizer, Adam8bit):
            states = self._optimizer.quantized(one.tensor, states)
            if parked is not None:
                states = {
                    key: value if key == COUNTER else to_host(value)
                    for key, value in states.items()
                }
        if parked is not None:
            states = {
                key: value if key == COUNTER else parked.adopt(one.tensor, value)
                for key, value in states.items()
            }
        if states:
            self._optimizer.state[one.tensor] = states

    @property
    def bytes(self) -> int:
        """On the device, between two steps."""
        states = [state for one in self.stepped for state in self._states(one).items()]
        held = [value for key, value in states if self.parked is None or key == COUNTER]
        masters = [
            one.master
            for one in self.stepped
            if one.master is not None and self.parked is None
        ]
        return sum(local(tensor).nbytes for tensor in (*held, *masters))


class Optimizer:
    """Steps a module's parameters. In a mixed precision they and their gradients are fp16 or bf16; the optimizer works
    on an fp32 master copy, which they are rounded from after every step (Micikevicius et al. 2018, "Mixed Precision
    Training", section 3.1; 2 + 2 + 12 bytes per parameter with Adam, as in Rajbhandari et al. 2020, section 3.1). In
    ``bf16`` there is no such copy, and the states are bf16 too (2 + 2 + 4 bytes with Adam).

    Casts the module's parameters to the precision's compute type, so it must be made before the module is wrapped.

    Args:
        learning_rate: until `set_learning_rate`.
        hidden: names of the parameters that Muon orthogonalises (`planner.profiler.parameters.hidden_matrices`).
        shards: what this rank keeps of the parameters, and steps; None: all of them. Bound here, once cast.
        offloaded: names of the parameters of every layer: their states and master copies stay on the host, and come to
            the device layer by layer; None: all stay on the device.
        options: the run's, of this optimizer.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        name: str,
        precision: str,
        learning_rate: float = 0.0,
        hidden: Collection[str] = (),
        shards: ZeroShards | None = None,
        offloaded: Sequence[Collection[str]] | None = None,
        options: OptimizerOptions = DEFAULTS,
    ) -> None:
        self.shards = shards
        named = self._named(module)
        layers = [list(named)] if offloaded is None else _by_layer(named, offloaded)
        hosts = [None if offloaded is None else ParkedStates() for _ in layers]
        dtype, masters = COMPUTE_DTYPE[precision], dict[str, torch.Tensor]()
        for layer, parked in zip(layers, hosts, strict=True):
            for each in layer if precision in MASTER_COPY else ():
                masters[each] = named[each].detach().clone()
                if parked is not None:
                    parked.add(masters[each])
        for parameter in module.parameters():
            if parameter.is_floating_point() and parameter.dtype != dtype:
                put(parameter, parameter.detach().to(dtype))
        if shards is not None:
            shards.bind()
            named = shards.pieces()
        starts = {} if shards is None else shards.starts()
        self._stepped = {
            each: Stepped(each, tensor, masters.get(each), starts.get(each, 0))
            for each, tensor in named.items()
        }
        matrices = (
            hidden_of(module, list(self.trained.values()), hidden)
            if shards is None
            else ()
        )
        self._parts = []
        for layer, parked in zip(layers, hosts, strict=True):
            mine = [self._stepped[each] for each in layer]
            if mine:
                tensors, firsts = (
                    [one.tensor for one in mine],
                    [one.start for one in mine],
                )
                made = make_optimizer(
                    name, tensors, learning_rate, matrices, firsts, options
                )
                self._parts.append(Part(mine, made, parked))

    def _named(self, module: nn.Module) -> dict[str, torch.Tensor]:
        if self.shards is not None:
            return self.shards.pieces()
        return {
            name: parameter
            for name, parameter in module.named_parameters()
            if parameter.requires_grad
        }

    def step(self, factor: float = 1.0) -> None:
        """Apply the gradients, times a factor: of the loss scale and of clipping. Where there is a master copy the
        product is taken in fp32, where nothing underflows.
        """
        for part in self._parts:
            part.step(factor)
        if self.shards is not None:
            self.shards.publish()

    def set_learning_rate(self, rate: float) -> None:
        """Of the updates to come, for all parameters."""
        for part in self._parts:
            part.set_learning_rate(rate)

    def zero_gradients(self) -> None:
        """Set gradients to zero in place: they are views of buckets, which a new tensor would double."""
        if self.shards is not None:
            self.shards.zero_gradients()
            return
        with torch.no_grad():
            for parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad.zero_()

    @property
    def parameters(self) -> list[torch.Tensor]:
        """What carries this rank's gradients: its trained parameters, or what it keeps of them."""
        return [one.parameter for one in self._stepped.values()]

    @property
    def trained(self) -> dict[str, torch.Tensor]:
        """What the optimizer works on, by the parameter's name: its master copy, or the parameter itself. An offloaded
        master copy has its shape and type, and no values.
        """
        return {name: one.tensor for name, one in self._stepped.items()}

    def named_states(self) -> dict[str, dict[str, torch.Tensor]]:
        """Every state by the parameter's name and its own; a master copy is the state `master`. Of a DTensor that is
        offloaded, this rank's part.
        """
        found = {
            one.name: part.named_states(one)
            for part in self._parts
            for one in part.stepped
        }
        return {name: found[name] for name in self._stepped}

    def set_states(self, states: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Go on with states that `named_states` gave, whatever was before."""
        for part in self._parts:
            for one in part.stepped:
                part.set_states(one, states.get(one.name, {}))

    def room_for_state(
        self, name: str, key: str, dtype: torch.dtype, shape: torch.Size | None
    ) -> torch.Tensor:
        """An empty tensor for a state that `set_states` will take.

        Args:
            shape: None: it is of the parameter's, and spread as that is.
        """
        tensor = self._stepped[name].tensor
        is_on_host = any(part.names_on_host(key) for part in self._parts)
        if shape is not None:
            return torch.empty(
                shape, dtype=dtype, device="cpu" if is_on_host else tensor.device
            )
        return (
            host_like(local(tensor.detach()), dtype)
            if is_on_host
            else torch.empty_like(tensor, dtype=dtype)
        )

    @property
    def bytes(self) -> int:
        """Bytes of this rank's optimizer states and master copies on the device, between two steps."""
        return sum(part.bytes for part in self._parts)

    @property
    def host_bytes(self) -> int:
        """Of those on the host."""
        return sum(
            part.parked.nbytes for part in self._parts if part.parked is not None
        )


def _by_layer(
    names: Iterable[str], layers: Sequence[Collection[str]]
) -> list[list[str]]:
    """Each name in the first layer that has it, those of no layer in a last one."""
    sets = [set(layer) for layer in layers]
    found: list[list[str]] = [[] for _ in range(len(layers) + 1)]
    for name in names:
        found[
            next(
                (index for index, layer in enumerate(sets) if name in layer),
                len(layers),
            )
        ].append(name)
    return found


def hidden_of(
    module: nn.Module, trained: Sequence[torch.Tensor], hidden: Collection[str]
) -> list[torch.Tensor]:
    """Those of the trained tensors that stand for the named parameters; one per parameter that requires gradients."""
    names = [
        name for name, parameter in module.named_parameters() if parameter.requires_grad
    ]
    return [
        tensor for name, tensor in zip(names, trained, strict=True) if name in hidden
    ]


@torch.no_grad()
def _scale_gradients(tensors: Iterable[torch.Tensor], factor: float) -> None:
    for tensor in tensors:
        if tensor.grad is not None:
            local(tensor.grad).mul_(factor)
