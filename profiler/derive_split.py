"""How to split a model over tensor-parallel ranks that nobody has told: derived from what its layers do.

A product can be split column-wise when all that becomes of its output, up to row-wise products, is computed by every
rank from its part alone: elementwise, or head by head. One layer of every kind is run on meta tensors with one more
product split column-wise at a time, in the order in which they run; the products which then read split features are
made row-wise. The layer's own code runs on `SplitTensor`, which has no rule for what a rank cannot compute alone: where
the layer hands on whole tensors, the split is proven; where it stumbles over a function without a rule, the product
stays whole. So it does where a parameter is shared with another module. These are the tensor-parallel regions of
Shoeybi et al. 2019 ("Megatron-LM", section 3), found in the graph as by Zheng et al. 2022 ("Alpa", section 4) rather
than by name.

A packed product (queries, keys and values of one matrix) consists of sections, each split by itself; how many, is tried
too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from math import gcd
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from planner.profiler.cut import CutLayer, tied_modules
from planner.profiler.derive_vocabulary import vocabulary_of
from planner.profiler.split_attention import can_split, split_attention
from planner.profiler.split_products import (
    Product,
    product_of,
    reads_split_features,
    split_columns,
    split_rows,
)
from planner.profiler.split_tensor import (
    IndivisibleError,
    NoRuleError,
    SplitTensor,
    take_part,
)
from planner.profiler.transformer_cut import friendly_to

if TYPE_CHECKING:
    from planner.profiler.models import ModelSource

SECTIONS = (1, 3, 2)
"""Numbers of sections that are tried: plain; queries, keys and values; keys and values, or gate and value."""
RANKS = (2, 3, 5)
"""Numbers of ranks that are tried, until something can be split by one."""
SIZE = (2, 6)
"""Samples and tokens of the runs: what can be split depends on neither."""


@dataclass(frozen=True, slots=True)
class DerivedSplit:
    """Modules of a model, by qualified name."""

    columns: dict[str, int]
    """Column-wise products, with the number of their sections."""
    rows: tuple[str, ...]
    attentions: tuple[str, ...]
    """torch's own attention modules, split by heads (`planner.profiler.split_attention`)."""
    divisor: int
    """Degrees that divide it can be split by."""
    vocabulary: tuple[str, ...] = ()
    """Embeddings and output layers, split by rows where a degree divides the vocabulary."""

    @property
    def is_empty(self) -> bool:
        """Is nothing split?"""
        return not self.columns and not self.attentions


NOTHING = DerivedSplit({}, (), (), 1)


def derive(source: ModelSource) -> DerivedSplit:
    """The split of a model; of nothing, where no product of it can be split."""
    if source.cut().needs_values:
        return NOTHING
    for ranks in RANKS:
        found, was_indivisible = _derive(source, ranks)
        if not found.is_empty:
            return replace(
                found,
                vocabulary=vocabulary_of(
                    source, _Shapes(1), {*found.columns, *found.rows}
                ),
            )
        if not was_indivisible:
            return found
    return NOTHING


def _derive(source: ModelSource, ranks: int) -> tuple[DerivedSplit, bool]:
    """And whether something was not split only because so many ranks do not divide it."""
    cut, tied = source.cut(), tied_modules([source.blueprint])
    columns: dict[str, int] = {}
    rows: list[str] = []
    attentions: list[str] = []
    divisor, was_indivisible = 0, False
    for kind, index in cut.first_of_kind().items():
        if _products(source.blueprint, cut.layers[index]) < 2:
            continue  # a column-wise product takes a row-wise one
        run = _Layer(source, index, ranks)
        found = run.split(tied)
        was_indivisible |= run.was_indivisible
        divisor = divisor if found.is_empty else gcd(divisor, found.divisor)
        for other in (layer for layer in cut.layers if layer.kind == kind):
            names = partial(_renamed, cut.layers[index], other)
            columns |= {
                names(name): sections for name, sections in found.columns.items()
            }
            rows += map(names, found.rows)
            attentions += map(names, found.attentions)
    return DerivedSplit(
        columns, tuple(rows), tuple(attentions), divisor or 1
    ), was_indivisible


def _products(model: nn.Module, layer: CutLayer) -> int:
    """Products in a layer; attention has two."""
    modules = [
        each for name in layer.modules for each in model.get_submodule(name).modules()
    ]
    return sum((product_of(each) is not None) + 2 * can_split(each) for each in modules)


def _renamed(layer: CutLayer, other: CutLayer, name: str) -> str:
    """The module of another layer of the same kind that stands where this one stands in its layer."""
    for mine, theirs in zip(layer.modules, other.modules, strict=True):
        if name == mine or name.startswith(f"{mine}."):
            return theirs + name.removeprefix(mine)
    return name


@dataclass(slots=True)
class _Shapes:
    """A tensor-parallel group by shapes alone; see `planner.profiler.split_tensor.Ranks`."""

    ranks: int
    rank: int = 0
    common: int = 0
    """The greatest number that divides all that is shared out."""

    def enter(self, whole: Tensor) -> Tensor:
        """See `planner.profiler.split_tensor.Ranks`."""
        return whole

    read = leave = add = largest = enter

    def total(self, partial: Tensor) -> Tensor:
        """See `planner.profiler.split_tensor.Ranks`. An exchange in the midst of a region is not chosen unasked."""
        raise NoRuleError("a sum over the dimension that is split")

    def gather(self, part: Tensor) -> Tensor:
        """See `planner.profiler.split_tensor.Ranks`; likewise."""
        raise NoRuleError("a split tensor is gathered")

    def take(self, whole: Tensor, dimension: int, sections: int) -> Tensor:
        """See `planner.profiler.split_tensor.Ranks`."""
        return take_part(whole, dimension, sections, self.rank, self.ranks)

    def drawing(self, device: torch.device) -> AbstractContextManager[None]:
        """See `planner.profiler.split_tensor.Ranks`."""
        return nullcontext()

    def divide(self, length: int) -> bool:
        """See `planner.profiler.split_tensor.Ranks`."""
        self.common = gcd(self.common, length)
        return length % self.ranks == 0


def hold_on_meta(
    ranks: int, parameter: nn.Parameter, dimension: int, sections: int
) -> nn.Parameter:
    """What one of so many ranks holds of a parameter (`planner.profiler.split_products.Hold`), without values."""
    shape = list(parameter.shape)
    if shape[dimension] % sections:
        raise NoRuleError(f"{shape[dimension]} are not {sections} sections")
    if shape[dimension] % (ranks * sections):
        raise IndivisibleError(
            f"{shape[dimension]} are not divided by {ranks * sections}"
        )
    shape[dimension] //= ranks
    return nn.Parameter(
        torch.empty(shape, dtype=parameter.dtype, device=parameter.device),
        parameter.requires_grad,
    )


@contextmanager
def _functions_refused() -> Iterator[None]:
    """Within, no `torch.autograd.Function` takes a split tensor: nobody knows whether its backward may."""
    run: Any = torch.autograd.Function.apply

    def apply(
        function: type[torch.autograd.Function], *arguments: Any, **keywords: Any
    ) -> Any:
        if any(
            isinstance(each, SplitTensor) for each in tree_leaves((arguments, keywords))
        ):
            raise NoRuleError(f"{function.__name__}, a torch.autograd.Function")
        return run.__func__(function, *arguments, **keywords)

    with mock.patch.object(torch.autograd.Function, "apply", classmethod(apply)):
        yield


@dataclass(slots=True)
class _Layer:
    """One layer, run again and again with other products split."""

    source: ModelSource
    index: int
    ranks: int
    module: nn.Module = field(init=False)
    inputs: tuple[Any, ...] = field(init=False)
    products: dict[str, nn.Module] = field(init=False)
    attentions: dict[str, Any] = field(init=False)
    was_indivisible: bool = False
    """Has something not been split only because so many ranks do not divide it?"""

    def __post_init__(self) -> None:
        samples, tokens = SIZE
        tokens = self.source.tokens_of_probe(tokens)
        self.inputs = self.source.borders(samples, tokens).takes[self.index]
        self.module = self.source.cut().layer(
            copy.deepcopy(self.source.blueprint), self.index
        )
        named = dict(self.module.named_modules())
        self.products = {
            name: each for name, each in named.items() if product_of(each) is not None
        }
        self.attentions = {
            name: each for name, each in named.items() if can_split(each)
        }

    def split(self, tied: set[str]) -> DerivedSplit:
        """Greedily, product by product in the order in which they run."""
        found = NOTHING
        for name in self._in_order():
            if name in tied or f"{name}.out_proj" in tied or name in found.rows:
                continue
            if name in self.attentions:
                found = (
                    self._try(found.columns, tied, (*found.attentions, name)) or found
                )
                continue
            product = product_of(self.products[name])
            assert product is not None
            for sections in SECTIONS if product.features == -1 else SECTIONS[:1]:
                more = self._try(
                    found.columns | {name: sections}, tied, found.attentions
                )
                if more is not None:
                    found = more
                    break
        return found

    def _in_order(self) -> list[str]:
        """The products that run once."""
        calls: list[str] = []
        handles = [
            module.register_forward_pre_hook(lambda *_, name=name: calls.append(name))
            for name, module in (self.products | self.attentions).items()
        ]
        try:
            with self._running():
                self.module(*self.inputs)
        except Exception:  # any: it is the user's code, which may not take this size
            return []
        finally:
            for handle in handles:
                handle.remove()
        return [name for name in dict.fromkeys(calls) if calls.count(name) == 1]

    def _running(self) -> AbstractContextManager[Any]:
        return friendly_to(self.module)

    def _try(
        self, columns: dict[str, int], tied: set[str], attentions: tuple[str, ...]
    ) -> DerivedSplit | None:
        """None: some rank could not go on alone, or the layer would hand on a part."""
        ranks, rows = _Shapes(self.ranks), list[str]()
        touched = [
            *self.products.values(),
            *self.attentions.values(),
            *(a.out_proj for a in self.attentions.values()),
        ]
        kept = [
            (module, dict(module._parameters), vars(module).get("forward"))
            for module in touched
        ]
        try:
            for name in attentions:
                split_attention(
                    self.attentions[name], ranks, partial(hold_on_meta, self.ranks)
                )
            for name, module in self.products.items():
                if name in columns:
                    split_columns(
                        module, columns[name], ranks, partial(hold_on_meta, self.ranks)
                    )
                else:
                    hold = None if name in tied else partial(hold_on_meta, self.ranks)
                    module.forward = partial(
                        _whole_or_rows, module, module.forward, ranks, hold, rows, name
                    )
            with self._running(), _functions_refused():
                made = self.module(*self.inputs)
        except IndivisibleError:
            self.was_indivisible = True
            return None
        except (
            Exception
        ):  # any: with other shapes inside, the user's code may stumble anywhere
            return None
        finally:
            for module, parameters, forward in kept:
                module._parameters.update(parameters)
                vars(module).pop("forward", None)
                if forward is not None:
                    module.forward = forward
        if any(isinstance(each, SplitTensor) for each in tree_leaves(made)):
            return None
        return DerivedSplit(columns, tuple(rows), attentions, ranks.common)


def _whole_or_rows(
    module: nn.Module,
    whole: Any,
    ranks: _Shapes,
    hold: Any,
    rows: list[str],
    name: str,
    input: Tensor,
) -> Tensor:
    """A product that is whole unless it reads split features."""
    product = product_of(module)
    assert isinstance(product, Product)
    if not isinstance(input, SplitTensor) or not reads_split_features(product, input):
        made: Tensor = whole(input)
        return made
    if hold is None:
        raise NoRuleError("a shared parameter would be split")
    split_rows(module, ranks, hold)
    rows.append(name)
    return module.forward(input)  # type: ignore[no-any-return]
