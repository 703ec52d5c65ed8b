"""Give a stage its initial values: the same for every parameter and buffer, whatever the layout.

Transformers of Hugging Face are built without storage for parameters, so that a rank never holds the parameters of
another stage. Buffers are real from the start: most are computed by constructors (rotary frequencies, position ids,
masks), stand in no checkpoint, and `to_empty` would leave garbage in them. Each module is then initialised by the
model's own `_init_weights`, from a random stream that is seeded by the module's qualified name. The stream does not
depend on which other modules the rank holds, and neither do the values.

Other models state their rules only in their constructors, or their stages have lost modules that the rules need. They
are built whole on the host from a stream seeded once, which gives the same values everywhere, and what the stage does
not own is dropped.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from planner.errors import UnsupportedError
from planner.profiler import host_random
from planner.profiler.models import ModelSource
from planner.profiler.parameters import parameters_on_meta
from planner.spec.profile import SharedParameters

Prepare = Callable[[nn.Module], nn.Module]
"""Takes a whole model whose parameters may have no storage, returns the part of it that a rank holds."""
Narrow = Callable[[str, nn.Module], None]
"""Takes a module, by its qualified name, as soon as all that is in it has its values, and may let go of some."""


class Materialise(Protocol):
    """Builds what `prepare` leaves of a model."""

    def __call__(
        self,
        source: ModelSource,
        prepare: Prepare,
        *,
        device: torch.device,
        seed: int,
        narrow: Narrow,
    ) -> nn.Module:
        """The part of the model on the device."""


def keep_all(name: str, module: nn.Module) -> None:
    """A `Narrow` that lets go of nothing."""


def without_values(
    source: ModelSource,
    prepare: Prepare,
    *,
    device: torch.device,
    seed: int,
    narrow: Narrow = keep_all,
) -> nn.Module:
    """What `prepare` leaves of the model, with shapes but without storage: for dry runs, on the device ``meta``."""
    part = prepare(source.build_on_meta()).to(device)
    for name, module in list(part.named_modules()):
        narrow(name, module)
    return part


def materialise(
    source: ModelSource,
    prepare: Prepare,
    *,
    device: torch.device,
    seed: int,
    narrow: Narrow = keep_all,
) -> nn.Module:
    """Build what `prepare` leaves of the model on the device, with the initial values of this seed.

    Args:
        narrow: so that no more than one module stands whole at a time; only where the tree is transformers' own.

    Raises:
        UnsupportedError: a parameter is left without a value by the model's own rules.
    """
    if source.config is None or not source.cut().chain.keeps_tree:
        with _stream(seed, "", torch.device("cpu")):
            model = source.build()
        return prepare(model).to(device)
    with parameters_on_meta():
        model = source.build()
    owners = _owners(model, source.cut().shared_parameters)
    part = prepare(model)
    _initialise(
        part, device, seed, before=partial(_allocate_own, {}, device), after=narrow
    )
    for owner in owners:
        _settle_shared(part, owner, part, device, seed)
    _refuse_missing_values(part)
    return part


def _as_parameter(parameter: nn.Parameter, data: torch.Tensor) -> nn.Parameter:
    return (
        parameter
        if parameter.is_meta and data.is_meta
        else nn.Parameter(data, parameter.requires_grad)
    )


def _allocate_own(
    made: dict[nn.Parameter, nn.Parameter], device: torch.device, module: nn.Module
) -> None:
    """Storage for every parameter of the module itself, filled with NaN so that a forgotten one is noticed.

    Args:
        made: parameters with storage by those without, so that ties are kept.
    """
    for name, parameter in module._parameters.items():
        if parameter is None:
            continue
        if parameter not in made:
            empty = torch.full(
                parameter.shape, torch.nan, dtype=parameter.dtype, device=device
            )
            made[parameter] = _as_parameter(parameter, empty)
        module._parameters[name] = made[parameter]
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = buffer.to(device)


def _as_it_is(module: nn.Module) -> None:
    """Nothing is done before a module is initialised."""


def _initialise(
    module: nn.Module,
    device: torch.device,
    seed: int,
    *,
    name: str = "",
    rules: Any = None,
    before: Callable[[nn.Module], None] = _as_it_is,
    after: Narrow = keep_all,
) -> None:
    """Children first, as transformers does: a block may re-scale what its children drew.

    Args:
        rules: the nearest enclosing `PreTrainedModel`, whose `_init_weights` holds for everything below it.
        before, after: called with every module.
    """
    rules = module if hasattr(module, "_init_weights") else rules
    for child_name, child in module.named_children():
        below = f"{name}.{child_name}" if name else child_name
        _initialise(
            child, device, seed, name=below, rules=rules, before=before, after=after
        )
    before(module)
    with _stream(seed, name, device), torch.no_grad():
        rules._init_weights(module)
    after(name, module)


@contextmanager
def _stream(seed: int, name: str, device: torch.device) -> Iterator[None]:
    """Within, random numbers come from the stream of this name; the caller's stream goes on undisturbed afterwards."""
    number = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8])
    devices = [device] if device.type == "cuda" else []
    drawn = host_random.states()
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(
            number
        )  # torch.manual_seed formats the stack for every absent accelerator
        if devices:
            torch.cuda.manual_seed_all(number)
        host_random.seed(
            number
        )  # constructors may draw from Python and NumPy, on every rank the same
        try:
            yield
        finally:
            host_random.restore(drawn)


@dataclass(frozen=True, slots=True)
class _Owner:
    """The module whose parameter others share, before the stage was cut out of the model."""

    module_name: str
    attribute: str
    module: nn.Module
    copies: tuple[str, ...]
    """Further qualified names of the parameter."""


def _owners(model: nn.Module, shared: tuple[SharedParameters, ...]) -> list[_Owner]:
    owners = []
    for group in shared:
        module_name, _, attribute = group.names[0].rpartition(".")
        owners.append(
            _Owner(
                module_name,
                attribute,
                model.get_submodule(module_name),
                group.names[1:],
            )
        )
    return owners


def _settle_shared(
    part: nn.Module, owner: _Owner, rules: Any, device: torch.device, seed: int
) -> None:
    """All copies of a shared parameter start with the value that the owner's module draws.

    Where the owner and a copy are one parameter, the copy's module has drawn over it; where the owner stands in another
    stage, it is built here for a moment.
    """
    parameters = dict(part.named_parameters(remove_duplicate=False))
    if f"{owner.module_name}.{owner.attribute}" in parameters:
        _initialise(
            part.get_submodule(owner.module_name),
            device,
            seed,
            name=owner.module_name,
            rules=rules,
        )
        return
    held = [parameters[name] for name in owner.copies if name in parameters]
    if not held:
        return
    module = copy.deepcopy(owner.module)
    allocate = partial(_allocate_own, {}, device)
    _initialise(
        module, device, seed, name=owner.module_name, rules=rules, before=allocate
    )
    with torch.no_grad():
        for parameter in held:
            parameter.copy_(module.get_parameter(owner.attribute))


def _refuse_missing_values(part: nn.Module) -> None:
    for name, parameter in part.named_parameters():
        if parameter.is_floating_point() and bool(torch.isnan(parameter).any()):
            raise UnsupportedError(
                f"the model's own _init_weights gives the parameter {name!r} no value.",
                field="model",
                hint="initialise it in _init_weights of the model's class.",
            )
