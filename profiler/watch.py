"""Watch one layer run on meta tensors: which kernels, how many FLOPs, and which storages live when.

Every operation that torch dispatches passes through `Watcher`. Sizes are those of storages, each counted once however
many views it has, and gone when the last reference is (the way of torch.distributed._tools.mem_tracker). FLOPs come
from torch.utils.flop_counter's formulas. Nothing is computed: meta tensors have shapes, but no values.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from planner.profiler.attention import causal_flops, efficient_attention
from planner.profiler.collectives import COLLECTIVES
from planner.profiler.experts import GROUPED_PRODUCT
from planner.profiler.quantities import GradientName, Kernel
from planner.profiler.recurrent import fused_lstm
from planner.profiler.split_tensor import SplitTensor
from planner.profiler.split_tensor_rules import RULES

aten = torch.ops.aten

MATMULS = frozenset({aten.mm, aten.addmm, aten.bmm, aten.baddbmm})
PRODUCTS = MATMULS | {aten.convolution}
NORMS = frozenset({aten.native_layer_norm, aten.native_group_norm})
ATTENTIONS = frozenset(
    {aten._scaled_dot_product_flash_attention, torch.ops.planner.attention}
)
CAUSAL = {
    aten._scaled_dot_product_flash_attention: (0, 4),
    aten._scaled_dot_product_flash_attention_backward: (1, 11),
}
"""Attention whose FLOPs torch counts, all scores among them, by the places of its query, before its key, and of
``is_causal``."""
GATHERS = frozenset(
    {aten.embedding, aten.gather, aten.index_select, aten.index, aten.nll_loss_forward}
)
"""Read only the rows that the indices name, not the whole table."""
BOOKKEEPING = COLLECTIVES | {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
}
"""Allocate without moving bytes of this device: collectives are priced by the links."""


class FusedAttention(TorchFunctionMode):
    """Within, scaled_dot_product_attention runs the fused kernel of a CUDA device, also on meta tensors.

    torch decomposes it to matrix products and a softmax on meta, which no accelerator would run: the fused kernel keeps
    query, key, value, output and one number per row (Dao et al. 2022, "FlashAttention", section 3.1). With a mask, or
    values narrower than queries (DeepSeek-AI 2024, DeepSeek-V2, section 2.1), it is the memory-efficient kernel (Rabe
    and Staats 2021), as torch's own choice on CUDA.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Replace attention, and LSTM layers (`planner.profiler.recurrent`)."""
        if func is torch.nn.functional.scaled_dot_product_attention:
            if SplitTensor in types:
                return RULES[func.__name__](_fused_attention, *args, **(kwargs or {}))
            return _fused_attention(*args, **(kwargs or {}))
        if func is torch.lstm:
            return fused_lstm(*args)
        return func(*args, **(kwargs or {}))


def _fused_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if isinstance(attn_mask, CausalBias):
        attn_mask, is_causal = None, True
    if attn_mask is not None or query.shape[-1] != value.shape[-1]:
        groups = query.shape[1] // key.shape[1] if enable_gqa else 1
        key, value = (
            each.repeat_interleave(groups, 1) if groups > 1 else each
            for each in (key, value)
        )
        return efficient_attention(query, key, value, attn_mask, is_causal=is_causal)
    outputs = aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, scale=scale
    )
    output: Tensor = outputs[0]
    return output


@dataclass(frozen=True, slots=True)
class Earlier:
    """A storage that what runs ahead of a layer made."""

    name: Hashable
    """The operation, the tensor that it made, and which of such it was: the same in every stage that runs the same code
    ahead of its layers."""
    storage: weakref.ref[UntypedStorage]


class Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts while `recording`; everything that exists when recording starts belongs to others.

    Args:
        tells_gradients: of every kernel, which gradients its backward computes.
    """

    def __init__(self, *, tells_gradients: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tells_gradients = tells_gradients
        self.recording = False
        self.flops = 0
        self.kernels: list[Kernel] = []
        self.functions: list[Any] = []
        """The operation behind every kernel."""
        self.live_bytes = 0
        self.timeline: list[int] = []
        """Live bytes after every operation."""
        self._live: dict[int, weakref.ref[UntypedStorage]] = {}
        self._owned: dict[int, UntypedStorage] = {}
        self._others: set[int] = set()
        self._earlier: dict[int, Earlier] = {}
        self._made_earlier: Counter[Hashable] = Counter()

    def own(self, tensors: Iterable[Tensor | None]) -> None:
        """Parameters, gradients and buffers: somebody else counts them."""
        for tensor in tensors:
            if tensor is not None:
                storage = tensor.untyped_storage()
                self._owned[id(storage)] = storage

    def tell_apart(self, weights: Iterable[Tensor]) -> None:
        """Weights that are no linear layer's, though products with them may look like one's; owned already."""
        self._others.update(id(weight.untyped_storage()) for weight in weights)

    def start(self, held: Iterable[Tensor]) -> None:
        """Record from now on; `held`, made before, counts as live."""
        self.recording = True
        for tensor in held:
            self._earlier.pop(id(tensor.untyped_storage()), None)
            self._see(tensor.untyped_storage())
        self.start_phase()

    def live_bytes_of(self, tensors: Iterable[Tensor]) -> int:
        """Bytes that these tensors have a part in `live_bytes`."""
        storages = {
            id(tensor.untyped_storage()): tensor.untyped_storage() for tensor in tensors
        }
        return sum(
            storage.nbytes() for key, storage in storages.items() if key in self._live
        )

    def earlier(self, storage: UntypedStorage) -> Earlier | None:
        """The storage, if it was made before recording, by what runs ahead of the layer."""
        return self._earlier.get(id(storage))

    def is_owned(self, storage: UntypedStorage) -> bool:
        """Was it given to `own`?"""
        return id(storage) in self._owned

    def start_phase(self) -> None:
        """Forget FLOPs, kernels and timeline; what lives goes on living."""
        self.flops = 0
        self.kernels = []
        self.functions = []
        self.timeline = [self.live_bytes]

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operation, and write down what it did."""
        _check_types(func.overloadpacket, args)
        output = func(*args, **(kwargs or {}))
        if self.recording:
            self._record(func, args, kwargs or {}, output)
        else:
            for tensor in _tensors(output):
                self._see_earlier(func, tensor)
        return output

    def _see_earlier(self, func: Any, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key not in self._earlier and key not in self._owned:
            like = (func, tuple(tensor.shape), tensor.dtype)
            self._made_earlier[like] += 1
            reference = weakref.ref(storage, partial(_forget, self._earlier, key))
            self._earlier[key] = Earlier((*like, self._made_earlier[like]), reference)

    def _record(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        given, made = _tensors((args, kwargs)), _tensors(output)
        packet = func.overloadpacket
        flops = (
            int(flop_registry[packet](*args, **kwargs, out_val=output))
            if packet in flop_registry
            else 0
        )
        flops = _less_skipped(packet, args, flops)
        self.flops += flops
        for tensor in made:
            self._see(tensor.untyped_storage())
        self.timeline.append(self.live_bytes)
        if not _only_views(func, given, made) and packet not in BOOKKEEPING:
            kernel = _kernel(packet, given, made, flops)
            is_other = packet in MATMULS and any(
                id(each.untyped_storage()) in self._others for each in given
            )
            kernel = replace(kernel, is_linear=False) if is_other else kernel
            gradients = (
                self._gradients(packet, given) if self._tells_gradients else None
            )
            self.kernels.append(replace(kernel, gradients=gradients))
            self.functions.append(func)

    def _gradients(self, packet: Any, given: list[Tensor]) -> GradientName | None:
        """Of a product, the gradient of its weight alone where nothing but that is trained, and of its input alone
        where only that leads to trained parameters; of two activations either counts as an input."""
        operands = _operands(packet, given)
        wanted = [tensor for tensor in operands or given if tensor.requires_grad]
        if not wanted:
            return "none"
        if not operands or len(wanted) == len(operands):
            return None
        return "weight" if self.is_owned(wanted[0].untyped_storage()) else "input"

    def _see(self, storage: UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()
        if key in self._live or key in self._owned or key in self._earlier:
            return

        def gone(_: Any) -> None:
            self.live_bytes -= size
            self._live.pop(key, None)

        self._live[key] = weakref.ref(storage, gone)
        self.live_bytes += size


def _check_types(packet: Any, args: tuple[Any, ...]) -> None:
    """Devices refuse products of two types, and norms whose weights are narrower than what they norm; meta tensors do
    not."""
    if packet not in PRODUCTS and packet not in NORMS:
        return
    kinds = [each.dtype for each in _tensors(args) if each.is_floating_point()]
    others = [kind for kind in kinds if kind != kinds[0]]
    if others and (packet in PRODUCTS or kinds[0].itemsize > others[0].itemsize):
        raise TypeError(
            f"{packet} takes tensors of one type, got {kinds[0]} and {others[0]}."
        )


def _operands(packet: Any, given: list[Tensor]) -> list[Tensor]:
    """What a product multiplies; nothing of other kernels."""
    if packet in MATMULS:
        return given[-2:]
    return given[:2] if packet in (GROUPED_PRODUCT, aten.convolution) else []


def _forget(storages: dict[int, Any], key: int, _: Any) -> None:
    storages.pop(key, None)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _only_views(func: Any, given: list[Tensor], made: list[Tensor]) -> bool:
    if func._schema.is_mutable:
        return False
    known = {tensor.untyped_storage()._cdata for tensor in given}
    return all(tensor.untyped_storage()._cdata in known for tensor in made)


def _less_skipped(packet: Any, args: tuple[Any, ...], flops: int) -> int:
    """Return the FLOPs without those of the scores that causal attention skips."""
    places = CAUSAL.get(packet)
    if places is None:
        return flops
    query, is_causal = places
    if args[is_causal : is_causal + 1] != (True,):
        return flops
    queries, keys = args[query].shape[2], args[query + 1].shape[2]
    return causal_flops(flops, queries=queries, keys=keys)


def _kernel(packet: Any, given: list[Tensor], made: list[Tensor], flops: int) -> Kernel:
    if packet in GATHERS:
        indices = sum(
            tensor_bytes(tensor) for tensor in given if not tensor.is_floating_point()
        )
        return Kernel("memory", 0, indices + 2 * sum(map(tensor_bytes, made)))
    moved = sum(map(tensor_bytes, (*given, *made)))
    if packet in MATMULS:
        left, right = given[-2:]
        batch = left.shape[0] if left.dim() == 3 else 1
        return Kernel(
            "matmul",
            flops,
            moved,
            m=left.shape[-2],
            n=right.shape[-1],
            k=left.shape[-1],
            batch=batch,
        )
    if packet is GROUPED_PRODUCT:
        rows, weights = given[
            :2
        ]  # shared out over the experts by values: one product of all rows
        return Kernel(
            "matmul",
            flops,
            moved,
            m=rows.shape[0],
            n=weights.shape[2],
            k=weights.shape[1],
        )
    if packet in ATTENTIONS:
        return Kernel("attention", flops, moved)
    if packet is aten.convolution:
        return Kernel("convolution", flops, moved)
    return Kernel("memory", 0, moved)


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes of the distinct elements: an expanded dimension is read from the same place."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride else 1
    return int(elements * tensor.element_size())


@contextmanager
def saved_tensors(seen: Callable[[Tensor], None]) -> Iterator[None]:
    """Within, `seen` is told every tensor that autograd saves for the backward."""

    def pack(tensor: Tensor) -> Tensor:
        seen(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield
