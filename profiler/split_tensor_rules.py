"""What torch functions make of tensors that are split over tensor-parallel ranks: elementwise ones, products, norms.

A rule is called with the function and its arguments, some of them `SplitTensor`, and calls the function with this
rank's parts. `planner.profiler.split_tensor_views` has the rules of functions that only arrange elements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor
from torch.nn.attention.bias import CausalBias
from torch.utils._pytree import tree_flatten, tree_unflatten

from planner.profiler.split_tensor import IndivisibleError, NoRuleError, SplitTensor
from planner.profiler.split_tensor_views import VIEWS

Rule = Callable[..., Any]


def common(values: Iterable[Any]) -> tuple[SplitTensor, int]:
    """The first split tensor, and from behind the dimension on which all of them are split alike."""
    found = [value for value in values if isinstance(value, SplitTensor)]
    places = {
        (each.dimension - each.dim(), each.sections, each.shape[each.dimension])
        for each in found
    }
    if len(places) > 1:
        raise NoRuleError("the tensors are split in different ways")
    return found[0], found[0].dimension - found[0].dim()


def local_part(value: Any, like: SplitTensor, dimension: int) -> Any:
    """What this rank reads of an operand that broadcasts; other values as they are.

    Args:
        dimension: on which operands are split, from behind.
    """
    if isinstance(value, SplitTensor):
        return value.local
    if not isinstance(value, Tensor):
        return value
    if value.dim() < -dimension or value.shape[dimension] == 1:
        return like.ranks.enter(value)
    if value.shape[dimension] != like.shape[like.dimension]:
        raise NoRuleError("a whole tensor is not as long as the one that is split")
    return like.ranks.take(value, dimension % value.dim(), like.sections)


def _elementwise(func: Any, *args: Any, **kwargs: Any) -> SplitTensor:
    """Operands broadcast."""
    leaves, structure = tree_flatten((args, kwargs))
    like, dimension = common(leaves)
    local_args, local_kwargs = tree_unflatten(
        [local_part(leaf, like, dimension) for leaf in leaves], structure
    )
    return like.like(func(*local_args, **local_kwargs), dimension)


def _dropout(
    func: Any,
    input: SplitTensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> SplitTensor:
    """By random numbers of the rank's own."""
    with (
        input.ranks.drawing(input.local.device)
        if training and p > 0.0
        else nullcontext()
    ):
        return input.like(func(input.local, p, training, inplace))


def _in_place(func: Any, target: Any, *args: Any, **kwargs: Any) -> SplitTensor:
    """Of a split tensor; a whole one would be another on every rank."""
    if not isinstance(target, SplitTensor):
        raise NoRuleError("a whole tensor would be changed by parts")
    target.local = _elementwise(func, target, *args, **kwargs).local
    return target


def _as_type(func: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    """``to`` and ``type_as``, to the type of another tensor too, whatever its shape."""
    leaves, structure = tree_flatten((args, kwargs))
    plain = [leaf.local if isinstance(leaf, SplitTensor) else leaf for leaf in leaves]
    local_args, local_kwargs = tree_unflatten(plain, structure)
    made = func(
        target.local if isinstance(target, SplitTensor) else target,
        *local_args,
        **local_kwargs,
    )
    return target.like(made) if isinstance(target, SplitTensor) else made


def _matmul(func: Any, left: Tensor, right: Tensor) -> SplitTensor:
    """(..., n, k) x (..., k, m): split among the dimensions ahead, or one factor along n or m."""
    if left.dim() < 2 or right.dim() < 2:
        raise NoRuleError("a product of vectors")
    dims = max(left.dim(), right.dim())
    for factor, free in ((left, -2), (right, -1)):
        if isinstance(factor, SplitTensor) and factor.dimension - factor.dim() == free:
            other = right if factor is left else left
            if isinstance(other, SplitTensor):
                raise NoRuleError(
                    "a product of two tensors that are split in different ways"
                )
            whole = factor.ranks.enter(other)
            made = (
                func(factor.local, whole)
                if factor is left
                else func(whole, factor.local)
            )
            return factor.like(made, dims + free)
    like, dimension = common((left, right))
    if dimension >= -2:
        raise NoRuleError("a product over the dimension that is split")
    made = func(local_part(left, like, dimension), local_part(right, like, dimension))
    return like.like(made, dimension)


def _added_product(
    func: Any,
    input: Tensor,
    batch1: Tensor,
    batch2: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
) -> SplitTensor:
    """(n, r, k) x (n, k, m), and to it an operand that broadcasts: split among the n."""
    like, dimension = common((batch1, batch2))
    if dimension != -3:
        raise NoRuleError("a product over, or along, the dimension that is split")
    added, *factors = (
        local_part(each, like, dimension) for each in (input, batch1, batch2)
    )
    return like.like(func(added, *factors, beta=beta, alpha=alpha))


def _einsum(func: Any, equation: str, *operands: Any) -> SplitTensor:
    """Split along a letter that every split operand and the result have."""
    tensors: Sequence[Any] = (
        operands[0]
        if len(operands) == 1 and isinstance(operands[0], list | tuple)
        else operands
    )
    given, arrow, result = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    if not arrow or "." in equation:
        raise NoRuleError("an einsum that does not name all dimensions")
    named = [
        (term, each)
        for term, each in zip(terms, tensors, strict=True)
        if isinstance(each, SplitTensor)
    ]
    letters = {(term[each.dimension], each.sections) for term, each in named}
    if len(letters) > 1 or next(iter(letters))[0] not in result:
        raise NoRuleError("an einsum over the dimension that is split")
    ((letter, sections),) = letters
    like = named[0][1]

    def part(term: str, each: Tensor) -> Tensor:
        if isinstance(each, SplitTensor):
            return each.local
        return (
            like.ranks.take(each, term.index(letter), sections)
            if letter in term
            else like.ranks.enter(each)
        )

    made = func(
        equation, *(part(term, each) for term, each in zip(terms, tensors, strict=True))
    )
    return like.like(made, result.index(letter), sections)


def _linear(
    func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> SplitTensor:
    """By a whole weight, along the last dimension: of split tokens or heads."""
    if (
        not isinstance(input, SplitTensor)
        or isinstance(weight, SplitTensor)
        or isinstance(bias, SplitTensor)
    ):
        raise NoRuleError("a product by a split weight")
    if input.dimension == input.dim() - 1:
        raise NoRuleError("a product over the dimension that is split")
    enter = input.ranks.enter
    return input.like(
        func(input.local, enter(weight), None if bias is None else enter(bias))
    )


def _attention(
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> SplitTensor:
    """(..., heads, tokens, features), split among the dimensions ahead of the tokens; fewer heads of keys and values
    than of queries (grouped-query attention) are split by as many."""
    found = [each for each in (query, key, value) if isinstance(each, SplitTensor)]
    places = {(each.dimension - each.dim(), each.sections) for each in found}
    if (
        len(places) != 1
        or isinstance(attn_mask, SplitTensor)
        or found[0].dimension - found[0].dim() >= -2
    ):
        raise NoRuleError("attention over the dimension that is split")
    like, dimension = found[0], found[0].dimension - found[0].dim()
    enable_gqa = bool(kwargs.get("enable_gqa", False))

    def part(each: Tensor) -> Tensor:
        if isinstance(each, SplitTensor) or not enable_gqa:
            return local_part(each, like, dimension)  # type: ignore[no-any-return]
        if not like.ranks.divide(each.shape[dimension] // like.sections):
            raise IndivisibleError("heads of keys and values that cannot be shared out")
        return like.ranks.take(each, dimension % each.dim(), like.sections)

    if isinstance(attn_mask, CausalBias):  # by numbers of tokens alone
        mask: Any = attn_mask
    else:
        mask = local_part(
            attn_mask, like if not enable_gqa else _of_query(query), dimension
        )
    drops = (args[0] if args else kwargs.get("dropout_p", 0.0)) > 0.0
    with like.ranks.drawing(like.local.device) if drops else nullcontext():
        made = func(part(query), part(key), part(value), mask, *args, **kwargs)
    return like.like(made, dimension)


def _of_query(query: Tensor) -> SplitTensor:
    if not isinstance(query, SplitTensor):
        raise NoRuleError("queries that are whole where keys are split")
    return query


def _along(
    func: Any, input: SplitTensor, dim: Any = None, *args: Any, **kwargs: Any
) -> SplitTensor:
    """Over one other dimension, which stays: softmax, cumulative sums."""
    dim = kwargs.pop("dim", dim)
    if (
        not isinstance(dim, int)
        or not isinstance(input, SplitTensor)
        or dim % input.dim() == input.dimension
    ):
        raise NoRuleError("a function over the dimension that is split")
    return input.like(func(input.local, dim, *args, **kwargs))


def _reduction(
    func: Any,
    input: SplitTensor,
    dim: Any = None,
    keepdim: bool = False,
    *args: Any,
    **kwargs: Any,
) -> SplitTensor:
    """Over other dimensions, which go unless they are kept."""
    dims = [dim] if isinstance(dim, int) else list(dim or range(input.dim()))
    gone = {each % input.dim() for each in dims}
    if input.dimension in gone:
        raise NoRuleError("a sum over the dimension that is split")
    ahead = 0 if keepdim else sum(each < input.dimension for each in gone)
    made = func(input.local, dim, keepdim, *args, **kwargs)
    return input.like(made, input.dimension - ahead)


def _mean(
    func: Any,
    input: SplitTensor,
    dim: Any = None,
    keepdim: bool = False,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Over the last dimension, where that is the split one, the mean of the ranks' means."""
    if dim in (-1, [-1], (-1,)) and input.dimension == input.dim() - 1:
        return input.ranks.total(
            func(input.local, dim, keepdim, *args, **kwargs) / input.ranks.ranks
        )
    return _reduction(func, input, dim, keepdim, *args, **kwargs)


def _extreme(
    func: Any, input: SplitTensor, dim: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """``max`` and ``min``: of two tensors, or values and places over another dimension."""
    if not isinstance(dim, int):
        if dim is None or args or kwargs:
            raise NoRuleError("the extreme of all elements")
        return _elementwise(func, input, dim)
    keepdim = bool(args[0] if args else kwargs.get("keepdim", False))
    if dim % input.dim() == input.dimension:
        raise NoRuleError("an extreme over the dimension that is split")
    place = input.dimension - (0 if keepdim else dim % input.dim() < input.dimension)
    made = func(input.local, dim, keepdim)
    return type(made)(tuple(input.like(each, place) for each in made))


def _last_norm(
    func: Any,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Any = None,
    *args: Any,
    **kwargs: Any,
) -> SplitTensor:
    """Layer norm and RMS norm (whose fourth argument is no bias) over dimensions behind the one that is split."""
    if not isinstance(input, SplitTensor) or input.dimension >= input.dim() - len(
        normalized_shape
    ):
        raise NoRuleError("a norm over the dimension that is split")
    enter = input.ranks.enter
    factors = (
        enter(each) if isinstance(each, Tensor) else each for each in (weight, bias)
    )
    return input.like(func(input.local, normalized_shape, *factors, *args, **kwargs))


def _group_norm(
    func: Any,
    input: SplitTensor,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    *args: Any,
    **kwargs: Any,
) -> SplitTensor:
    """(samples, channels, ...), whole groups of channels on every rank."""
    if input.dimension != 1 or input.sections != 1:
        raise NoRuleError("groups that are not of channels")
    if not input.ranks.divide(num_groups):
        raise IndivisibleError("groups of channels that cannot be shared out")
    take = input.ranks.take
    factors = (
        take(each, 0, 1) if isinstance(each, Tensor) else each
        for each in (weight, bias)
    )
    return input.like(
        func(input.local, num_groups // input.ranks.ranks, *factors, *args, **kwargs)
    )


def _gated(func: Any, input: SplitTensor, dim: int = -1) -> SplitTensor:
    """``glu``: halves the dimension; where that is the split one, whole sections of it."""
    if dim % input.dim() != input.dimension:
        return input.like(func(input.local, dim))
    if input.sections != 2:
        raise NoRuleError("gate and value do not stand in sections of their own")
    return input.like(func(input.local, dim), sections=1)


def _explicit_norm(
    func: Any,
    input: SplitTensor,
    p: Any = 2,
    dim: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """``functional.normalize``: over one other dimension."""
    dim = 1 if dim is None else dim
    if not isinstance(dim, int) or dim % input.dim() == input.dimension:
        raise NoRuleError("a norm over the dimension that is split")
    return input.like(func(input.local, p, dim, *args, **kwargs))


_BINARY = "add sub mul div true_divide floordiv pow mod eq ne lt le gt ge and or"
_UNARY = (
    "abs neg exp log log1p expm1 sqrt rsqrt square sin cos tanh sigmoid erf relu relu6 gelu silu mish elu selu celu "
    "leaky_relu hardtanh hardswish hardsigmoid softplus softsign logsigmoid logical_not bitwise_not isnan isinf clamp "
    "clamp_min clamp_max clip reciprocal float half bfloat16 double bool clone contiguous detach zeros_like ones_like "
    "__neg__ __invert__ __abs__ nan_to_num threshold"
)
_MORE = "where masked_fill maximum minimum fmax fmin lerp addcmul addcdiv rsub subtract multiply divide logical_and"

RULES: dict[str, Rule] = {
    **VIEWS,
    **dict.fromkeys((*_BINARY.split(), *_UNARY.split(), *_MORE.split()), _elementwise),
    **{
        f"__{prefix}{name}__": _elementwise
        for name in (*_BINARY.split(), "truediv")
        for prefix in ("", "r")
    },
    **dict.fromkeys(("dropout", "alpha_dropout"), _dropout),
    **{
        f"{name}_": _in_place
        for name in (*_BINARY.split(), "relu", "silu", "masked_fill", "clamp", "tanh")
    },
    **{f"__i{name}__": _in_place for name in ("add", "sub", "mul", "truediv")},
    **dict.fromkeys(("to", "type", "type_as"), _as_type),
    **dict.fromkeys(("matmul", "bmm", "__matmul__"), _matmul),
    "baddbmm": _added_product,
    "einsum": _einsum,
    "linear": _linear,
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(("softmax", "log_softmax", "cumsum"), _along),
    "mean": _mean,
    **dict.fromkeys(("sum", "amax", "amin"), _reduction),
    **dict.fromkeys(("max", "min"), _extreme),
    **dict.fromkeys(("layer_norm", "rms_norm"), _last_norm),
    "group_norm": _group_norm,
    "normalize": _explicit_norm,
    "glu": _gated,
}
"""By the function's name."""
