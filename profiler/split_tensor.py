"""A tensor of which every tensor-parallel rank holds an equal part along one dimension, and works on that part alone.

The model's code sees the whole tensor's shape, so that reshapes by whole numbers of heads or features go on working,
whatever the degree; what is computed is this rank's part. Every torch function has a rule
(`planner.profiler.split_tensor_rules`, `planner.profiler.split_tensor_views`) which says on which dimension its result is split. Rules
never exchange anything in the forward: a function that would need it has none, and is refused. So where a model's code
runs on split tensors, its result is proven right by construction. These are the layouts of Alpa (Zheng et al. 2022,
section 4.1) and of DTensor for one mesh dimension, less those that need an exchange, and with packed products besides.

Where a split tensor meets a whole one, which every rank has, each rank takes its part of it, or all of it where the
whole one has no such dimension. The gradients of what is taken are gathered, those of what each rank has read all of
are partial sums and are added up.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor


class Ranks(Protocol):
    """A tensor-parallel group."""

    @property
    def rank(self) -> int:
        """This one's number."""

    @property
    def ranks(self) -> int:
        """How many they are."""

    def read(self, whole: Tensor) -> Tensor:
        """What column-wise products read: the tensor itself; its gradients, partial sums, are added up over the group
        (Shoeybi et al. 2019's f), or, with sequence parallelism, where the region is entered."""

    def leave(self, partial: Tensor) -> Tensor:
        """What row-wise products give: the sum over the group (their g); with sequence parallelism this rank's tokens
        of it."""

    def add(self, whole: Tensor) -> Tensor:
        """A bias that is added to what `leave` gives."""

    def total(self, partial: Tensor) -> Tensor:
        """The sum over the group, whole on every rank, also with sequence parallelism."""

    def largest(self, values: Tensor) -> Tensor:
        """For each of some numbers the largest one of all ranks; without a gradient."""

    def gather(self, part: Tensor) -> Tensor:
        """(..., features of this rank) -> (..., all features), with which all ranks do the same; of the gradients each
        keeps its part."""

    def enter(self, whole: Tensor) -> Tensor:
        """A whole tensor that meets a split one: itself; its gradients, partial sums, are added up over the group."""

    def take(self, whole: Tensor, dimension: int, sections: int) -> Tensor:
        """This rank's part; its gradients are gathered."""

    def drawing(self, device: torch.device) -> AbstractContextManager[None]:
        """Within, random numbers are this rank's own; behind it they are those of all ranks again."""

    def divide(self, length: int) -> bool:
        """Can so many heads or features be shared out?"""


class NoRuleError(Exception):
    """A function that this rank cannot compute from its part alone."""


class IndivisibleError(NoRuleError):
    """Another number of ranks could."""


class SplitTensor(Tensor):
    """This rank's part of a tensor, under the whole one's shape.

    The dimension consists of equal sections, one behind the other, and each is split by itself: a packed product of
    queries, keys and values has three.
    """

    local: Tensor
    dimension: int
    sections: int
    ranks: Ranks

    @staticmethod
    def __new__(
        cls, local: Tensor, dimension: int, ranks: Ranks, sections: int = 1
    ) -> SplitTensor:
        """A tensor without storage.

        Args:
            local: this rank's part.
            dimension: that is split; negative: from behind.
        """
        dimension %= local.dim()
        shape = list(local.shape)
        shape[dimension] *= ranks.ranks
        made: SplitTensor = Tensor._make_wrapper_subclass(
            cls,
            shape,
            dtype=local.dtype,
            device=local.device,
            requires_grad=local.requires_grad,
        )
        made.local, made.dimension, made.sections, made.ranks = (
            local,
            dimension,
            sections,
            ranks,
        )
        if not ranks.divide(shape[dimension] // sections):
            raise IndivisibleError(
                f"{shape[dimension] // sections} are not divided by {ranks.ranks}"
            )
        return made

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        """All is done by `__new__`."""

    def __repr__(self) -> str:  # type: ignore[override]
        """Such as ``SplitTensor(2, 8, 32; dimension 2 in 3 sections over 2)``."""
        shape = ", ".join(map(str, self.shape))
        return f"SplitTensor({shape}; dimension {self.dimension} in {self.sections} sections over {self.ranks.ranks})"

    def like(
        self, local: Tensor, dimension: int | None = None, sections: int | None = None
    ) -> SplitTensor:
        """Another one over the same ranks; split as this one where nothing else is said."""
        dimension = self.dimension if dimension is None else dimension
        return SplitTensor(
            local,
            dimension,
            self.ranks,
            self.sections if sections is None else sections,
        )

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Compute by the function's rule."""
        from planner.profiler.split_tensor_rules import RULES

        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        rule = RULES.get("mT" if func == Tensor.mT.__get__ else name)  # type: ignore[attr-defined]
        if rule is None:
            raise NoRuleError(f"there is no rule for {name or func}")
        return rule(func, *args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Reached by code that goes around the rules."""
        raise NoRuleError(f"there is no rule for {func}")


METADATA: frozenset[Callable[..., Any]] = frozenset(
    {
        *(
            getattr(Tensor, name).__get__
            for name in (
                "shape",
                "dtype",
                "device",
                "ndim",
                "requires_grad",
                "layout",
                "is_meta",
                "is_cuda",
                "is_cpu",
            )
        ),
        *(
            getattr(Tensor, name)
            for name in (
                "size",
                "dim",
                "numel",
                "nelement",
                "ndimension",
                "__len__",
                "is_floating_point",
                "is_complex",
            )
        ),
        *(
            getattr(Tensor, name)
            for name in ("element_size", "get_device", "__repr__", "__hash__")
        ),
    }
)
"""What the whole tensor's shape and type tell."""


def take_part(
    whole: Tensor, dimension: int, sections: int, rank: int, ranks: int
) -> Tensor:
    """A rank's part of a dimension: of each of its sections, one behind the other; a view where there is one."""
    length = whole.shape[dimension] // (sections * ranks)
    if sections == 1:
        return whole.narrow(dimension, rank * length, length)
    shape = (
        *whole.shape[:dimension],
        sections,
        ranks,
        length,
        *whole.shape[dimension + 1 :],
    )
    return (
        whole.reshape(shape)
        .select(dimension + 1, rank)
        .flatten(dimension, dimension + 1)
    )


def join_parts(parts: list[Tensor], dimension: int, sections: int) -> Tensor:
    """What `take_part` has taken from, of the parts of all ranks in order."""
    shape = parts[0].shape
    split = (
        *shape[:dimension],
        sections,
        shape[dimension] // sections,
        *shape[dimension + 1 :],
    )
    return torch.stack([part.reshape(split) for part in parts], dimension + 1).flatten(
        dimension, dimension + 2
    )
