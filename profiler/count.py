"""Count what every layer costs, without a device: on meta tensors, which have shapes but no values.

Layers of one kind are counted once (`profiler.layer_count` says how one is counted), and share their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor, nn

from planner.errors import DocumentError, LayoutError
from planner.spec.profile import DataType, LayerProfile, Measurement, ModelProfile, RecomputeMode
from profiler import tensor_parallel
from profiler.cut import CutLayer
from profiler.layer_count import LayerCount, LayerRun
from profiler.models import ModelSource
from profiler.shard import Exchanges, shard

Progress = Callable[[int, int, str], None]
"""Called with (steps done, steps in all, what is being done)."""

TORCH_TYPES: dict[DataType, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@contextmanager
def _building(dtype: torch.dtype) -> Iterator[None]:
    """Within, models are built in this type, without storage."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(before)


class Counter:
    """Counts the layers of one model in one data type; one stage is built per kind and degree."""

    def __init__(self, source: ModelSource, dtype: DataType) -> None:
        self.source = source
        self.dtype = TORCH_TYPES[dtype]
        self.layers = source.cut().layers
        self._stages: dict[tuple[int, int], tuple[nn.Module, Exchanges]] = {}
        self._outputs: dict[tuple[int, int], tuple[Tensor, ...]] = {}

    @cached_property
    def representatives(self) -> dict[str, int]:
        """Index of the first layer of every kind."""
        first: dict[str, int] = {}
        for index, layer in enumerate(self.layers):
            first.setdefault(layer.kind, index)
        return first

    def modes(self, kind: str) -> tuple[RecomputeMode, ...]:
        """Recompute modes that layers of this kind have."""
        return ("none", "full") if self.layers[self.representatives[kind]].recomputable else ("none",)

    @cached_property
    def parameters(self) -> dict[str, int]:
        """Elements of a whole layer of every kind."""
        model = self.source.build_on_meta()
        return {kind: _elements(model, self.layers[index]) for kind, index in self.representatives.items()}

    def count(self, kind: str, micro_batch_size: int, sequence_length: int, degree: int = 1) -> LayerCount:
        """Count the layer of this kind on one rank of a tensor-parallel group of this degree."""
        index = self.representatives[kind]
        count = self._count_layer(index, micro_batch_size, sequence_length, degree)
        if not count.keeps_input and self._input_is_kept_before(kind, micro_batch_size, sequence_length, degree):
            # Who keeps its own output (an activation in place) does not count it: the layer that takes it does.
            return replace(count, kept_bytes=count.kept_bytes + count.input_bytes, keeps_input=True)
        return count

    def _input_is_kept_before(self, kind: str, micro_batch_size: int, sequence_length: int, degree: int) -> bool:
        before = {
            self.layers[index - 1].kind for index, layer in enumerate(self.layers) if layer.kind == kind and index
        }
        return any(
            self._count_layer(self.representatives[other], micro_batch_size, sequence_length, degree).keeps_output
            for other in before
        )

    def _count_layer(self, index: int, micro_batch_size: int, sequence_length: int, degree: int) -> LayerCount:
        stage, exchanges = self._stage(index, degree)
        inputs = self._inputs(index, micro_batch_size, sequence_length)
        with_loss = index == len(self.layers) - 1
        run = LayerRun(stage, self.layers[index].modules, exchanges, with_loss=with_loss)
        return run.count(inputs, is_first=index == 0)

    def _stage(self, index: int, degree: int) -> tuple[nn.Module, Exchanges]:
        if (index, degree) not in self._stages:
            with _building(self.dtype):
                model = self.source.build()
            styles = tensor_parallel.plan(self.source) if degree > 1 else {}
            stage = self.source.cut().stage(model, index, index + 1)
            exchanges = shard(stage, tensor_parallel.split_modules(stage, styles), degree)
            for parameter in stage.parameters():
                parameter.grad = torch.empty_like(parameter)
            self._stages[index, degree] = stage, exchanges
        return self._stages[index, degree]

    def _inputs(self, index: int, micro_batch_size: int, sequence_length: int) -> Tensor:
        if index == 0:
            inputs = self.source.example_inputs(micro_batch_size, sequence_length, "meta")[0]
        else:
            key = (micro_batch_size, sequence_length)
            if key not in self._outputs:
                self._outputs[key] = self.source.layer_outputs(*key)
            inputs = self._outputs[key][index - 1]
        dtype = self.dtype if inputs.is_floating_point() else inputs.dtype
        return torch.empty(inputs.shape, dtype=dtype, device="meta")


def _elements(model: nn.Module, layer: CutLayer) -> int:
    parameters = {id(each): each for name in layer.modules for each in model.get_submodule(name).parameters()}
    return sum(parameter.numel() for parameter in parameters.values())


def count(
    source: ModelSource,
    *,
    micro_batch_size: int,
    sequence_length: int,
    tensor_parallel_degree: int = 1,
    recompute: RecomputeMode = "none",
    dtype: DataType = "fp32",
) -> dict[str, Measurement]:
    """One row per distinct layer kind; with ``full`` recompute only of the kinds that can be recomputed.

    Raises:
        DocumentError, LayoutError: see `check_request`.
    """
    check_request(source, sequence_length, (micro_batch_size,), (tensor_parallel_degree,))
    counter = Counter(source, dtype)
    size = (micro_batch_size, sequence_length, tensor_parallel_degree)
    return {
        kind: counter.count(kind, *size).measurement(*size, recompute)
        for kind in counter.representatives
        if recompute in counter.modes(kind)
    }


def profile(
    source: ModelSource,
    *,
    sequence_length: int,
    micro_batch_sizes: tuple[int, ...],
    tensor_parallel_degrees: tuple[int, ...] = (1,),
    dtype: DataType = "fp32",
    progress: Progress | None = None,
) -> ModelProfile:
    """The counted profile of a model: rows for every micro-batch size, degree and recompute mode.

    Raises:
        DocumentError, LayoutError: see `check_request`.
        UnsupportedError: the model cannot be cut, or not be counted in shards.
    """
    check_request(source, sequence_length, micro_batch_sizes, tensor_parallel_degrees)
    counter = Counter(source, dtype)
    sizes = [(size, sequence_length, degree) for degree in tensor_parallel_degrees for size in micro_batch_sizes]
    kinds = list(counter.representatives)
    rows: dict[str, tuple[Measurement, ...]] = {}
    for done, kind in enumerate(kinds):
        if progress is not None:
            progress(done, len(kinds), kind)
        counts = [(size, counter.count(kind, *size)) for size in sizes]
        rows[kind] = tuple(each.measurement(*size, mode) for mode in counter.modes(kind) for size, each in counts)
    if progress is not None:
        progress(len(kinds), len(kinds), "counted")
    return ModelProfile(
        model=source.name,
        device="counted",
        dtype=dtype,
        model_digest=source.digest,
        tokens_per_sample=source.longest_sequence,
        layers=tuple(
            LayerProfile(
                name=layer.name,
                kind=layer.kind,
                modules=layer.modules,
                parameters=counter.parameters[layer.kind],
                measurements=rows[layer.kind],
            )
            for layer in counter.layers
        ),
        shared_parameters=source.cut().shared_parameters,
        environment={"torch": torch.__version__},
    )


def check_request(
    source: ModelSource, sequence_length: int, micro_batch_sizes: tuple[int, ...], degrees: tuple[int, ...]
) -> None:
    """Refuse sizes that the model does not take.

    Raises:
        DocumentError: a sequence length or micro-batch size that is no such size, or too long for the model.
        LayoutError: a tensor-parallel degree that does not divide the model.
    """
    if source.input_kind == "tokens" and sequence_length < 1:
        raise DocumentError("0 tokens are no sequence.", field="sequence_length", mend="give at least 1 token.")
    if source.input_kind != "tokens" and sequence_length != 0:
        raise DocumentError(
            f"{source.name} takes no sequence, got {sequence_length}.", field="sequence_length", mend="give 0."
        )
    if source.longest_sequence and sequence_length > source.longest_sequence:
        raise DocumentError(
            f"{source.name} takes at most {source.longest_sequence} tokens, got {sequence_length}.",
            field="sequence_length",
            mend=f"give at most {source.longest_sequence}.",
        )
    if not micro_batch_sizes or min(micro_batch_sizes) < 1:
        raise DocumentError(
            f"{list(micro_batch_sizes)} holds no micro-batch size, or one below 1.",
            field="micro_batch_sizes",
            mend="give whole numbers of samples from 1 on.",
        )
    allowed = source.tensor_parallel_degrees()
    for degree in degrees:
        if degree not in allowed:
            raise LayoutError(
                f"{source.name} cannot be tensor-parallel by {degree}.",
                field="tensor_parallel_degrees",
                mend=f"use {', '.join(map(str, allowed))}.",
            )
