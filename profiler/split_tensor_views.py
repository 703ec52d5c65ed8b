"""What functions that only arrange elements make of tensors that are split over tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from planner.profiler.split_tensor import IndivisibleError, NoRuleError, SplitTensor

Shape = tuple[int, ...]


def _sizes(given: tuple[Any, ...], keyword: Any = None) -> Shape:
    """Of ``view(2, 3)``, ``view((2, 3))`` and ``reshape(shape=(2, 3))``."""
    found = keyword if keyword is not None else given[0] if len(given) == 1 else given
    return tuple(map(int, found)) if isinstance(found, Sequence) else (int(found),)


def split_after_view(
    whole: Shape, dimension: int, sections: int, target: Shape
) -> tuple[int, int]:
    """Dimension and sections on which a tensor is split once it is seen in another shape.

    In the flat order a rank's part is one run of every `outer` equal runs of elements, and stays so. The target's
    dimensions up to the split one must tell the same runs apart: outer = product of those ahead x sections.

    Raises:
        NoRuleError: they do not.
    """
    outer = prod(whole[:dimension]) * sections
    ahead = 1
    for place, length in enumerate(target):
        if outer % ahead:
            break
        found = outer // ahead
        if length % found == 0 and length // found > 1:
            return place, found
        ahead *= length
    raise NoRuleError(
        f"the split dimension is torn apart by a view of {whole} as {target}"
    )


def _reshape(
    func: Any, input: SplitTensor, *given: Any, shape: Any = None, size: Any = None
) -> Any:
    """``view`` and ``reshape``; of a view of another type, none."""
    if given and isinstance(given[0], torch.dtype):
        raise NoRuleError("a view of another type")
    return _seen_as(func, input, _sizes(given, shape if shape is not None else size))


def _seen_as(func: Any, input: SplitTensor, sizes: Shape) -> SplitTensor:
    known = prod(size for size in sizes if size != -1)
    target = tuple(input.numel() // known if size == -1 else size for size in sizes)
    place, sections = split_after_view(
        tuple(input.shape), input.dimension, input.sections, target
    )
    if not input.ranks.divide(target[place] // sections):
        raise IndivisibleError(
            f"{target[place] // sections} are not divided by {input.ranks.ranks}"
        )
    local = [*target]
    local[place] //= input.ranks.ranks
    return input.like(func(input.local, tuple(local)), place, sections)


def _flatten(
    func: Any, input: SplitTensor, start_dim: int = 0, end_dim: int = -1
) -> SplitTensor:
    start, end = start_dim % input.dim(), end_dim % input.dim()
    shape = tuple(input.shape)
    return _seen_as(
        torch.reshape,
        input,
        (*shape[:start], prod(shape[start : end + 1]), *shape[end + 1 :]),
    )


def _unflatten(
    func: Any, input: SplitTensor, dim: int, sizes: Sequence[int]
) -> SplitTensor:
    shape, dim = tuple(input.shape), dim % input.dim()
    known = prod(size for size in sizes if size != -1)
    found = tuple(shape[dim] // known if size == -1 else int(size) for size in sizes)
    return _seen_as(torch.reshape, input, (*shape[:dim], *found, *shape[dim + 1 :]))


def _transpose(func: Any, input: SplitTensor, dim0: int, dim1: int) -> SplitTensor:
    one, two = dim0 % input.dim(), dim1 % input.dim()
    return input.like(
        func(input.local, dim0, dim1),
        {one: two, two: one}.get(input.dimension, input.dimension),
    )


def _matrix_transpose(func: Any, input: SplitTensor) -> SplitTensor:
    return _transpose(torch.transpose, input, -2, -1)


def _permute(
    func: Any, input: SplitTensor, *given: Any, dims: Any = None
) -> SplitTensor:
    order = tuple(each % input.dim() for each in _sizes(given, dims))
    return input.like(func(input.local, order), order.index(input.dimension))


def _unsqueeze(func: Any, input: SplitTensor, dim: int) -> SplitTensor:
    place = dim % (input.dim() + 1)
    return input.like(
        func(input.local, dim), input.dimension + (place <= input.dimension)
    )


def _squeeze(func: Any, input: SplitTensor, dim: int | None = None) -> SplitTensor:
    """Never the split dimension, which is longer than one even where this rank's part is not."""
    if dim is None:
        raise NoRuleError("a squeeze of all dimensions")
    place = dim % input.dim()
    if place == input.dimension or input.shape[place] != 1:
        return input
    return input.like(
        func(input.local, dim), input.dimension - (place < input.dimension)
    )


def _expand(
    func: Any, input: SplitTensor, *given: Any, size: Any = None
) -> SplitTensor:
    sizes = list(_sizes(given, size))
    place = input.dimension + len(sizes) - input.dim()
    if sizes[place] != -1:
        sizes[place] = input.local.shape[input.dimension]
    return input.like(func(input.local, tuple(sizes)), place)


def _repeat(
    func: Any, input: SplitTensor, *given: Any, repeats: Any = None
) -> SplitTensor:
    sizes = _sizes(given, repeats)
    place = input.dimension + len(sizes) - input.dim()
    if sizes[place] != 1:
        raise NoRuleError("a repetition of the dimension that is split")
    return input.like(func(input.local, sizes), place)


def _chunk(
    func: Any, input: SplitTensor, chunks: int, dim: int = 0
) -> tuple[SplitTensor, ...]:
    dim %= input.dim()
    if dim != input.dimension:
        return tuple(input.like(part) for part in func(input.local, chunks, dim))
    length = -(-input.shape[dim] // chunks)
    return _split_lengths(input, [length] * chunks)


def _split(
    func: Any, input: SplitTensor, split_size: Any, dim: int = 0
) -> tuple[SplitTensor, ...]:
    dim %= input.dim()
    if dim != input.dimension:
        return tuple(input.like(part) for part in func(input.local, split_size, dim))
    if isinstance(split_size, int):
        whole, rest = divmod(input.shape[dim], split_size)
        return _split_lengths(input, [split_size] * whole + ([rest] if rest else []))
    return _split_lengths(input, list(split_size))


def _split_lengths(input: SplitTensor, lengths: list[int]) -> tuple[SplitTensor, ...]:
    """Along the split dimension: whole sections each."""
    starts = [sum(lengths[:place]) for place in range(len(lengths))]
    return tuple(
        _run(input, start, start + length)
        for start, length in zip(starts, lengths, strict=True)
    )


def _run(input: SplitTensor, start: int, stop: int) -> SplitTensor:
    """Elements start..stop (exclusive) of the split dimension."""
    whole = input.shape[input.dimension]
    section = whole // input.sections
    if start % section or stop % section or not 0 <= start < stop <= whole:
        raise NoRuleError(f"a slice that is no whole number of sections of {section}")
    ranks = input.ranks.ranks
    local = input.local.narrow(input.dimension, start // ranks, (stop - start) // ranks)
    return input.like(local, sections=(stop - start) // section)


def _unbind(func: Any, input: SplitTensor, dim: int = 0) -> tuple[SplitTensor, ...]:
    dim %= input.dim()
    if dim == input.dimension:
        raise NoRuleError("the split dimension is taken apart")
    return tuple(
        input.like(part, input.dimension - (dim < input.dimension))
        for part in func(input.local, dim)
    )


def _select(func: Any, input: SplitTensor, dim: int, index: int) -> SplitTensor:
    dim %= input.dim()
    if dim == input.dimension:
        raise NoRuleError("one element of the split dimension is taken")
    return input.like(
        func(input.local, dim, index), input.dimension - (dim < input.dimension)
    )


def _narrow(
    func: Any, input: SplitTensor, dim: int, start: int, length: int
) -> SplitTensor:
    dim %= input.dim()
    if dim == input.dimension:
        return _run(input, start, start + length)
    return input.like(func(input.local, dim, start, length))


def _getitem(func: Any, input: SplitTensor, index: Any) -> SplitTensor:
    """By whole numbers, slices, None and an ellipsis; or, in place of the numbers, one list of them."""
    entries = list(index) if isinstance(index, tuple) else [index]
    if any(
        not (each is None or each is Ellipsis or isinstance(each, int | slice | list))
        for each in entries
    ):
        raise NoRuleError("an index that is a tensor")
    lists = sum(isinstance(each, list) for each in entries)
    if lists > 1 or (lists and any(isinstance(each, int) for each in entries)):
        raise NoRuleError("indices that are paired, which moves dimensions")
    given = sum(each is not None and each is not Ellipsis for each in entries)
    if Ellipsis not in entries:
        entries.append(Ellipsis)
    gap = entries.index(Ellipsis)
    entries[gap : gap + 1] = [slice(None)] * (input.dim() - given)
    place, target, chosen = 0, 0, None
    for number, each in enumerate(entries):
        if each is not None and place == input.dimension:
            chosen = number
            break
        place += each is not None
        target += not isinstance(each, int)
    if chosen is None or not isinstance(entries[chosen], slice):
        raise NoRuleError("one element of the split dimension is taken")
    start, stop, step = entries[chosen].indices(input.shape[input.dimension])
    if step != 1:
        raise NoRuleError("a slice with steps of the split dimension")
    part = _run(input, start, stop)
    entries[chosen] = slice(None)
    return part.like(part.local[tuple(entries)], target)


def _cat(
    func: Any, tensors: Sequence[Tensor], dim: int = 0, **kwargs: Any
) -> SplitTensor:
    """Of tensors that are split alike, and whole ones, along another dimension."""
    from planner.profiler.split_tensor_rules import common

    dim = kwargs.get("axis", dim)
    like, _ = common(tensors)
    dim %= like.dim()
    if dim == like.dimension:
        raise NoRuleError("tensors are joined along the split dimension")
    return like.like(func([_aligned(each, like) for each in tensors], dim))


def _stack(func: Any, tensors: Sequence[Tensor], dim: int = 0) -> SplitTensor:
    from planner.profiler.split_tensor_rules import common

    like, _ = common(tensors)
    dim %= like.dim() + 1
    return like.like(
        func([_aligned(each, like) for each in tensors], dim),
        like.dimension + (dim <= like.dimension),
    )


def _aligned(each: Tensor, like: SplitTensor) -> Tensor:
    if isinstance(each, SplitTensor):
        return each.local
    if (
        each.dim() != like.dim()
        or each.shape[like.dimension] != like.shape[like.dimension]
    ):
        raise NoRuleError("a whole tensor is not as long as the one that is split")
    return like.ranks.take(each, like.dimension, like.sections)


def _spatial(func: Any, input: SplitTensor, *args: Any, **kwargs: Any) -> Any:
    """Functions of the last two dimensions: pooling, resizing."""
    if input.dimension >= input.dim() - 2:
        raise NoRuleError("a function over the dimension that is split")
    return input.like(func(input.local, *args, **kwargs))


def _same_layout(func: Any, input: SplitTensor, *args: Any, **kwargs: Any) -> Any:
    return func(input.local, *args, **kwargs)


VIEWS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("view", "reshape"), _reshape),
    "flatten": _flatten,
    "unflatten": _unflatten,
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), _transpose),
    "mT": _matrix_transpose,
    "permute": _permute,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    **dict.fromkeys(("expand", "broadcast_to"), _expand),
    "repeat": _repeat,
    "chunk": _chunk,
    "split": _split,
    "unbind": _unbind,
    "select": _select,
    "narrow": _narrow,
    "__getitem__": _getitem,
    **dict.fromkeys(("cat", "concat", "concatenate"), _cat),
    "stack": _stack,
    **dict.fromkeys(
        ("interpolate", "avg_pool2d", "max_pool2d", "adaptive_avg_pool2d"), _spatial
    ),
    "is_contiguous": _same_layout,
}
"""By the function's name."""
