"""The job's optimizer over a rank's parameters, with an fp32 master copy when they are kept in half precision."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from planner.errors import UnsupportedError
from planner.executor.sharding import local
from planner.executor.zero import ZeroShards

MOMENTUM = 0.9
MASTER = "master"
"""Name of the master copy among a parameter's states."""

COMPUTE_DTYPE: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "fp16-mixed": torch.float16,
    "bf16-mixed": torch.bfloat16,
    "bf16": torch.bfloat16,
}
"""Type of parameters, activations and gradients by the job's precision."""

MASTER_COPY = ("fp16-mixed", "bf16-mixed")
"""Precisions whose optimizer works on an fp32 copy of the parameters."""


class Together(torch.optim.Optimizer):
    """Several optimizers as one, each with its own parameters."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([group for one in optimizers for group in one.param_groups], {})
        self._optimizers = optimizers
        for one in optimizers:
            one.state = self.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of each."""
        for one in self._optimizers:
            one.step(closure)


def make_optimizer(
    name: str, parameters: Iterable[torch.Tensor], learning_rate: float, matrices: Collection[torch.Tensor] = ()
) -> torch.optim.Optimizer:
    """torch's optimizer of this name, with torch's defaults (momentum: 0.9).

    Adam runs fused: it reads and writes every state once and holds no temporary copy, where torch's default on CUDA
    makes one of all parameters; Adafactor goes parameter by parameter for the same reason. Plain tensors and DTensors
    of every mesh stand in groups of their own: one call does not take both.

    Muon takes the matrices, AdamW the rest, both with one learning rate: Muon's updates are scaled to the size of
    AdamW's (Liu et al. 2025, "Muon is Scalable for LLM Training", equation (4)).

    Args:
        matrices: those of the parameters that Muon orthogonalises; other optimizers treat them as all others.

    Raises:
        UnsupportedError: no such optimizer.
    """
    parameters = list(parameters)
    if name == "muon":
        chosen = {id(matrix) for matrix in matrices}
        muon = [parameter for parameter in parameters if id(parameter) in chosen]
        rest = [parameter for parameter in parameters if id(parameter) not in chosen]
        made = [torch.optim.Muon(muon, lr=learning_rate, adjust_lr_fn="match_rms_adamw")] if muon else []
        return Together([*made, *([make_optimizer("adamw", rest, learning_rate)] if rest else [])])
    kinds: dict[DeviceMesh | None, list[torch.Tensor]] = {None: []}
    for each in parameters:
        kinds.setdefault(each.device_mesh if isinstance(each, DTensor) else None, []).append(each)
    groups = [{"params": kind} for kind in kinds.values() if kind]
    if name in ("sgd", "momentum"):
        return torch.optim.SGD(groups, lr=learning_rate, momentum=MOMENTUM if name == "momentum" else 0.0)
    fused = not any(parameter.is_meta for parameter in parameters)  # torch fuses only what has storage
    if name == "adam":
        return torch.optim.Adam(groups, lr=learning_rate, fused=fused)
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=learning_rate, fused=fused)
    if name == "adafactor":
        return torch.optim.Adafactor(groups, lr=learning_rate, foreach=False)
    raise UnsupportedError(
        f"no optimizer {name!r}.",
        field="request.job.optimizer",
        mend="use sgd, momentum, adam, adamw, adafactor or muon.",
    )


class Optimizer:
    """Steps a module's parameters. In a mixed precision they and their gradients are fp16 or bf16; the optimizer works
    on an fp32 master copy, which they are rounded from after every step (Micikevicius et al. 2018, "Mixed Precision
    Training", section 3.1; 2 + 2 + 12 bytes per parameter with Adam, as in Rajbhandari et al. 2020, section 3.1). In
    ``bf16`` there is no such copy, and the states are bf16 too (2 + 2 + 4 bytes with Adam).

    Casts the module's parameters to the precision's compute type, so it must be made before the module is wrapped.

    Args:
        hidden: names of the parameters that Muon orthogonalises (`profiler.parameters.hidden_matrices`).
        shards: what this rank keeps of the parameters, and steps; None: all of them. Bound here, once cast.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        name: str,
        precision: str,
        learning_rate: float,
        hidden: Collection[str] = (),
        shards: ZeroShards | None = None,
    ) -> None:
        self.shards = shards
        named = self._named(module)
        dtype = COMPUTE_DTYPE[precision]
        self._masters = [p.detach().clone() for p in named.values()] if precision in MASTER_COPY else []
        for parameter in module.parameters():
            if parameter.is_floating_point() and parameter.dtype != dtype:
                # Assigning to .data would leave a DTensor's own record of its type behind.
                cast = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
                torch.utils.swap_tensors(parameter, cast)  # type: ignore[no-untyped-call]
        if shards is not None:
            shards.bind()
            named = shards.pieces()
        self._names, self._parameters = list(named), list(named.values())
        trained = self._masters or self._parameters
        matrices = hidden_of(module, trained, hidden) if shards is None else ()
        self._optimizer = make_optimizer(name, trained, learning_rate, matrices) if trained else None

    def _named(self, module: nn.Module) -> dict[str, torch.Tensor]:
        if self.shards is not None:
            return self.shards.pieces()
        return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}

    def step(self, factor: float = 1.0) -> None:
        """Apply the gradients, times a factor: of the loss scale and of clipping. Where there is a master copy the
        product is taken in fp32, where nothing underflows.
        """
        if self._optimizer is not None:
            self._step(self._optimizer, factor)
        if self.shards is not None:
            self.shards.publish()

    def _step(self, optimizer: torch.optim.Optimizer, factor: float) -> None:
        for master, parameter in zip(self._masters, self._parameters, strict=False):
            master.grad = None if parameter.grad is None else parameter.grad.to(master.dtype)
        if factor != 1.0:
            _scale_gradients(self._masters or self._parameters, factor)
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(self._masters, self._parameters, strict=False):
                parameter.copy_(master)
                master.grad = None

    def zero_gradients(self) -> None:
        """Set gradients to zero in place: they are views of buckets, which a new tensor would double."""
        if self.shards is not None:
            self.shards.zero_gradients()
            return
        with torch.no_grad():
            for parameter in self._parameters:
                if parameter.grad is not None:
                    parameter.grad.zero_()

    @property
    def parameters(self) -> list[torch.Tensor]:
        """What carries this rank's gradients: its trained parameters, or what it keeps of them."""
        return self._parameters

    @property
    def trained(self) -> dict[str, torch.Tensor]:
        """What the optimizer works on, by the parameter's name: its master copy, or the parameter itself."""
        return dict(zip(self._names, self._masters or self._parameters, strict=True))

    def named_states(self) -> dict[str, dict[str, torch.Tensor]]:
        """Every state by the parameter's name and its own; a master copy is the state `master`."""
        held = self._optimizer.state if self._optimizer is not None else {}
        return {
            name: {
                **{key: value for key, value in held.get(tensor, {}).items() if isinstance(value, torch.Tensor)},
                **({MASTER: tensor.detach()} if self._masters else {}),
            }
            for name, tensor in self.trained.items()
        }

    def set_states(self, states: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Go on with states that `named_states` gave, whatever was before."""
        if self._optimizer is None:
            return
        for name, tensor in self.trained.items():
            given = dict(states.get(name, {}))
            master = given.pop(MASTER, None)
            if master is not None:
                tensor.detach().copy_(master)
            if given:
                self._optimizer.state[tensor] = given

    @property
    def bytes(self) -> int:
        """Bytes of this rank's optimizer states and master copies."""
        states = self._optimizer.state.values() if self._optimizer is not None else ()
        held = [value for state in states for value in state.values() if isinstance(value, torch.Tensor)]
        return sum(_local_bytes(tensor) for tensor in (*held, *self._masters))


def hidden_of(module: nn.Module, trained: Sequence[torch.Tensor], hidden: Collection[str]) -> list[torch.Tensor]:
    """Those of the trained tensors that stand for the named parameters; one per parameter that requires gradients."""
    names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
    return [tensor for name, tensor in zip(names, trained, strict=True) if name in hidden]


@torch.no_grad()
def _scale_gradients(tensors: Iterable[torch.Tensor], factor: float) -> None:
    for tensor in tensors:
        if tensor.grad is not None:
            local(tensor.grad).mul_(factor)


def _local_bytes(tensor: torch.Tensor) -> int:
    return local(tensor).nbytes
