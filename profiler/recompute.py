"""Recomputation of a module: keep less from forward to backward, and run some of the forward again before the backward.

    full        keeps only the module's input, runs its whole forward again (Chen et al. 2016, "Training Deep Nets with
                Sublinear Memory Cost"; torch.utils.checkpoint)
    selective   also keeps the outputs of matrix products, attention, convolutions and collectives, and runs the rest
                again: elementwise operations, norms, dropout (Korthikanti et al. 2022, "Reducing Activation
                Recomputation in Large Transformer Models", section 5, by operation as torchtitan does; torch's
                create_selective_checkpoint_contexts)
    attention   as selective, but runs attention again too
    linear      as selective, but runs linear layers and convolutions again too (`planner.spec.recompute`)

What a product makes for a collective alone, partial sums of a row-wise linear layer, is not kept: the collective's own
output is, so nothing else reads them. Else, under sequence parallelism, selective would keep the partial sums of all
tokens, which no backward needs, and more in all than running nothing again (`_Readers`).

What is kept is copied before an operation changes it in place, as an activation after a convolution does: torch would
refuse the backward, or, told to allow it, apply the change twice.

In all of them the recomputation stops once the last tensor that the backward needs is there (torch's early stop): a module
that ends in a matrix product does not run it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _CachingTorchDispatchMode,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from planner.profiler.forward_state import ForwardState
from planner.spec.profile import RecomputeMode
from planner.spec.recompute import SAVED, Origin

Phase = Literal["forward", "again"]
Observer = Callable[[Phase], AbstractContextManager[None]]
"""Gives the context that a wrapped module's forward runs in, for the first time or again."""
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]

SAVED_NAMESPACES = frozenset({"_c10d_functional", "c10d_functional"})
"""Collectives: running one again would make the ranks of a group wait for each other once more."""
SAVED_OPERATIONS: dict[Origin, frozenset[str]] = {
    "linear": frozenset(
        {
            "aten::mm",
            "aten::addmm",
            "aten::_scaled_mm",
            "aten::_grouped_mm",
            "aten::convolution",
            # Its stand-in when counting on meta tensors.
            "planner::grouped_mm",
        }
    ),
    "attention": frozenset(
        {
            "aten::bmm",
            "aten::baddbmm",
            "aten::_scaled_dot_product_flash_attention",
            "aten::_scaled_dot_product_flash_attention_for_cpu",
            "aten::_scaled_dot_product_efficient_attention",
            "aten::_scaled_dot_product_cudnn_attention",
            "aten::_scaled_dot_product_fused_attention_overrideable",
            # Their stand-in when counting on meta tensors.
            "planner::attention",
        }
    ),
}
"""Operations whose outputs a mode may keep; collectives have names of their own."""
_EXCHANGES = frozenset(
    {"planner::all_gather", "planner::reduce_scatter", "planner::all_to_all"}
)
"""Collectives by shapes alone (`planner.profiler.collectives`)."""
_PRODUCTS = frozenset(
    {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm"}
)
"""Their backward reads no output of theirs."""
_COPIES = frozenset({"aten::cat", "aten::clone"})
"""Their backward reads neither input nor output."""


def is_saved(operation: Any, mode: RecomputeMode = "selective") -> bool:
    """Does a mode keep the outputs of this operation (`torch._ops.OpOverload`)?"""
    name: str = operation._schema.name
    origins: frozenset[Origin] = SAVED.get(mode, frozenset())
    if "collective" in origins and is_collective(operation):
        return True
    return any(name in SAVED_OPERATIONS.get(origin, ()) for origin in origins)


def is_collective(operation: Any) -> bool:
    """Does this operation (`torch._ops.OpOverload`) exchange tensors with other ranks?"""
    name: str = operation._schema.name
    return name in _EXCHANGES or name.partition("::")[0] in SAVED_NAMESPACES


def recompute(
    module: nn.Module, mode: RecomputeMode, observer: Observer | None = None
) -> None:
    """Let the module recompute in this mode, in place.

    The module's forward is wrapped and not the module, whose name and parameters must stay.
    """
    if mode == "none":
        return
    contexts = partial(_contexts, mode, observer or _nobody)
    module.forward = partial(_run, module.forward, contexts, ForwardState(module))


@contextmanager
def recomputing(
    parts: Iterable[tuple[nn.Module, Observer]], mode: RecomputeMode
) -> Iterator[None]:
    """Within, the modules recompute in this mode, each watched by its observer."""
    with ExitStack() as stack:
        for module, observer in parts:
            stack.callback(_restore, module, vars(module).get("forward"))
            recompute(module, mode, observer)
        yield


def own_forward(module: nn.Module) -> Any:
    """The forward that was set on this module and not on its class, without the recomputation around it; None: none."""
    forward: Any = vars(module).get("forward")
    inner = forward.args[0] if _recomputes(forward) else forward
    return None if getattr(inner, "__self__", None) is module else inner


def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Give a module another forward, in place; it goes on recomputing as it did."""
    old: Any = vars(module).get("forward")
    module.forward = (
        partial(_run, forward, *old.args[1:]) if _recomputes(old) else forward
    )


def _recomputes(forward: Any) -> bool:
    return isinstance(forward, partial) and forward.func is _run


def _restore(module: nn.Module, forward: Any) -> None:
    """Give a module back the forward that it had of its own, if any."""
    if forward is not None:
        module.forward = forward
    else:
        vars(module).pop("forward", None)


def _run(
    forward: Callable[..., Any],
    contexts: Callable[[Contexts], Contexts],
    state: ForwardState,
    /,
    *arguments: Any,
    **keywords: Any,
) -> Any:
    given = (*arguments, *keywords.values())
    # Meta tensors have no generator whose state could be kept, and nothing random in them.
    on_meta = any(isinstance(value, Tensor) and value.is_meta for value in given)
    one = state.run()
    unchanged = (
        (nullcontext(), nullcontext()) if on_meta else (one.first(), one.again())
    )
    return checkpoint(
        forward,
        *arguments,
        use_reentrant=False,
        preserve_rng_state=not on_meta,
        context_fn=partial(contexts, unchanged),
        **keywords,
    )


def _nobody(phase: Phase) -> AbstractContextManager[None]:
    return nullcontext()


def _contexts(mode: RecomputeMode, observer: Observer, unchanged: Contexts) -> Contexts:
    """For the forward and for its second run.

    Args:
        unchanged: let the second run start from what the forward started from.
    """
    caching, cached = (
        (nullcontext(), nullcontext()) if mode == "full" else _selective(mode)
    )
    return _all(unchanged[0], observer("forward"), caching), _all(
        unchanged[1], observer("again"), cached
    )


def _selective(mode: RecomputeMode) -> Contexts:
    policy = partial(_policy, mode)
    caching, cached = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return _Keeping(caching.policy_fn, caching.storage), cached


def _policy(
    mode: RecomputeMode,
    context: Any,
    operation: Any,
    *arguments: Any,
    **keywords: Any,
) -> CheckpointPolicy:
    return (
        CheckpointPolicy.MUST_SAVE
        if is_saved(operation, mode)
        else CheckpointPolicy.PREFER_RECOMPUTE
    )


@dataclass(eq=False, slots=True)
class _Partial:
    """The output of a product, or a copy of it, and what has become of it."""

    products: tuple[_Partial, ...] = ()
    """That it is a copy of; empty: it is one."""
    is_read: bool = False
    """By something that runs again."""
    is_exchanged: bool = False
    """By a collective whose output is kept."""


class _Readers:
    """Finds out which products' outputs nothing but kept collectives read.

    Views are no readers, and copies are read when something reads the copy. Storages are told apart by their address:
    one that is freed has its address forgotten when another operation makes a tensor there.
    """

    def __init__(self) -> None:
        self._partials: dict[int, _Partial] = {}

    def see(self, operation: Any, given: Any, made: Any) -> None:
        """Take note of an operation that has run.

        Args:
            operation: `torch._ops.OpOverload`.
            given: its arguments.
            made: its outputs.
        """
        sources, outputs = _storages(given), _storages(made)
        read = [self._partials[each] for each in sources if each in self._partials]
        is_mutable = operation._schema.is_mutable
        if outputs and outputs <= sources and not is_mutable:
            return
        name: str = operation._schema.name
        products: tuple[_Partial, ...] = ()
        if is_collective(operation) and not is_mutable:
            for each in read:
                self._mark(each, is_exchange=True)
        elif name in _COPIES:
            products = tuple(
                product for each in read for product in each.products or (each,)
            )
        else:
            for each in read:
                self._mark(each, is_exchange=False)
        for address in outputs - sources:
            self._partials.pop(address, None)
            if products or name in _PRODUCTS:
                self._partials[address] = _Partial(products)

    def only_exchanged(self) -> set[int]:
        """Return the addresses of products' outputs that only kept collectives have read."""
        return {
            address
            for address, one in self._partials.items()
            if not one.products and one.is_exchanged and not one.is_read
        }

    @staticmethod
    def _mark(one: _Partial, *, is_exchange: bool) -> None:
        for product in one.products or (one,):
            if is_exchange:
                product.is_exchanged = True
            else:
                product.is_read = True


class _Unread:
    """In place of a kept output whose values nothing reads: another tensor of its form."""

    def __init__(self, tensor: Tensor) -> None:
        local = _local(tensor)
        self._shape, self._stride = tuple(local.shape), local.stride()
        self._dtype, self._device = local.dtype, local.device
        self._spec = tensor._spec if isinstance(tensor, DTensor) else None

    def get_val(self, allow_cache_entry_mutation: bool) -> Tensor:
        """Return a tensor with any values, as torch's own entries return theirs."""
        empty = torch.empty_strided(
            self._shape, self._stride, dtype=self._dtype, device=self._device
        )
        if self._spec is None:
            return empty
        return DTensor(empty, self._spec, requires_grad=False)  # type: ignore[no-untyped-call]


def _local(tensor: Tensor) -> Tensor:
    """The tensor that has the memory: of a DTensor this rank's part, of one that a collective fills the buffer."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    return tensor.elem if isinstance(tensor, AsyncCollectiveTensor) else tensor


def _storages(values: Any) -> set[int]:
    """Addresses of the storages of all tensors among some values."""
    return {
        _local(each).untyped_storage()._cdata
        for each in tree_leaves(values)
        if isinstance(each, Tensor)
    }


class _Keeping(_CachingTorchDispatchMode):
    """Keeps outputs as torch's own does, but not those that only kept collectives read; and copies those that an
    operation is about to change in place."""

    def __init__(self, policy: Any, storage: Any) -> None:
        super().__init__(policy, storage)  # type: ignore[no-untyped-call]
        self._readers = _Readers()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        unread = self._readers.only_exchanged()
        for entries in self.storage.values():
            for index, entry in entries.items():
                value = getattr(entry, "val", None)
                if isinstance(value, Tensor) and _storages(value) & unread:
                    entries[index] = _Unread(value)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for place in _changed(func):
            # Meta tensors have no values to lose, and counts are of the layer's own operations.
            if (
                place < len(args)
                and isinstance(args[place], Tensor)
                and not args[place].is_meta
            ):
                self._copy(args[place])
        made = super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        self._readers.see(func, (args, kwargs), made)
        return made

    def _copy(self, changed: Tensor) -> None:
        """Give kept tensors that share memory with this one memory of their own."""
        memory = changed.untyped_storage()._cdata
        for kept in tree_leaves(
            [list(entries.values()) for entries in self.storage.values()]
        ):
            value = getattr(kept, "val", None)
            if isinstance(value, Tensor) and value.untyped_storage()._cdata == memory:
                kept.val = value.clone()
                kept.version = kept.val._version


@cache
def _changed(operation: Any) -> tuple[int, ...]:
    """Places of the arguments that an operation (`torch._ops.OpOverload`) changes in place."""
    arguments = operation._schema.arguments if operation._schema.is_mutable else ()
    return tuple(
        place
        for place, one in enumerate(arguments)
        if one.alias_info and one.alias_info.is_write
    )


@contextmanager
def _all(*contexts: AbstractContextManager[Any]) -> Iterator[None]:
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
