"""Count what every layer costs, without a device: on meta tensors, which have shapes but no values.

Layers of one kind are counted once (`planner.profiler.layer_count` says how one is counted), and share their rows.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from planner.errors import DocumentError, UnsupportedError
from planner.profiler.compute_type import building_in, cast, cast_inputs
from planner.profiler.cut import Borders, LayerCut, Size, TensorChain
from planner.profiler.cut_whole import same_numbers
from planner.profiler.decoder_config import transformer_of
from planner.profiler.expert_parallel import common_experts, experts_of
from planner.profiler.layer_count import LayerRun, LayerTrace
from planner.profiler.models import ModelSource
from planner.profiler.parameters import hidden_matrices, shapes_of
from planner.profiler.progress import Progress
from planner.profiler.quantities import LayerCount, Limits, layer_profiles, rows_of
from planner.profiler.sequence_parallel import refusal
from planner.profiler.shard import Exchanges, border_split, shard_layer
from planner.profiler.splits import WHOLE, Split, splits
from planner.profiler.tensor_parallel import refusal as tensor_refusal
from planner.spec.profile import DataType, Measurement, ModelProfile, RecomputeMode
from planner.spec.recompute import SAVED
from planner.spec.transformer import Transformer

TORCH_TYPES: dict[DataType, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


class Counter:
    """Counts the layers of one model in one data type; one stage is built per kind and degree."""

    def __init__(self, source: ModelSource, dtype: DataType) -> None:
        self.source = source
        self.dtype = TORCH_TYPES[dtype]
        self.cut = source.cut()
        self.layers = self.cut.layers
        self._known_borders: dict[Size, Borders] = {}
        self._stages: dict[tuple[int, Split], tuple[nn.Module, Exchanges]] = {}
        self._whole_layers: dict[int, nn.Module] = {}
        self._traces: dict[tuple[str, Size, Split], LayerTrace] = {}

    @cached_property
    def representatives(self) -> dict[str, int]:
        """Index of the first layer of every kind."""
        return self.cut.first_of_kind()

    @cached_property
    def _hidden(self) -> frozenset[str]:
        return hidden_matrices(self.source.blueprint, self.cut)

    @cached_property
    def _has_frozen(self) -> bool:
        """Has the model parameters that are not trained?"""
        return not all(
            parameter.requires_grad for parameter in self.source.blueprint.parameters()
        )

    @cached_property
    def parameters(self) -> dict[str, int]:
        """Elements of a whole layer of every kind."""
        return {
            kind: _elements(self._held(index))
            for kind, index in self.representatives.items()
        }

    @cached_property
    def frozen_parameters(self) -> dict[str, int]:
        """Those of them that are not trained, of the kinds that have any."""
        held = {kind: self._held(index) for kind, index in self.representatives.items()}
        found = {
            kind: _elements(each for each in of_kind if not each.requires_grad)
            for kind, of_kind in held.items()
        }
        return {kind: elements for kind, elements in found.items() if elements}

    def _held(self, index: int) -> list[nn.Parameter]:
        """Parameters of a layer of the blueprint, each once."""
        layer, model = self.layers[index], self.source.blueprint
        own = [model.get_parameter(name) for name in layer.parameters]
        below = (
            each
            for name in layer.modules
            for each in model.get_submodule(name).parameters()
        )
        return list({id(each): each for each in (*own, *below)}.values())

    def count(
        self,
        kind: str,
        micro_batch_size: int,
        sequence_length: int,
        split: Split = WHOLE,
    ) -> LayerCount:
        """Count the layer of this kind on one of the ranks that it is split over."""
        size = (micro_batch_size, sequence_length)
        trace = self._trace(kind, size, split)
        if not isinstance(self.cut.chain, TensorChain):
            for mode in trace.keeps_outputs:
                change = self._unclaimed_bytes(
                    kind, trace, mode, size
                ) - self._bytes_kept_later(kind, trace, mode, size)
                trace = trace.keeping(mode, change)
            return trace.count
        before, after = (
            [self._trace(other, size, split) for other in self._beside(kind, step)]
            for step in (-1, 1)
        )
        if not trace.keeps_inputs[0] and any(
            other.keeps_outputs["none"][0] for other in before
        ):
            # Who keeps its own output (an activation in place) does not count it: the layer that takes it does.
            trace = trace.keeping("none", trace.count.input_bytes)
        if not all(other.keeps_inputs[0] for other in after):
            for mode in SAVED.keys() & trace.keeps_outputs.keys():
                is_kept = trace.keeps_outputs[mode][0]
                trace = trace.keeping(mode, is_kept * trace.count.output_bytes)
        if kind == self.layers[0].kind:
            for mode in trace.count.modes:
                trace = trace.keeping(
                    mode, self._bytes_ahead(size, replace(WHOLE, context=split.context))
                )
        return trace.count

    def _bytes_ahead(self, size: Size, split: Split) -> int:
        """What the model makes ahead of its layers and they keep, such as rotary tables: each once. Every rank of a
        tensor-parallel group has them whole."""
        made: dict[Hashable, int] = {}
        for kind in self.representatives:
            made |= self._trace(kind, size, split).ahead
        return sum(made.values())

    def _beside(self, kind: str, step: int) -> set[str]:
        """Kinds of the layers right before (-1) or after (+1) layers of this kind."""
        places = (
            index + step
            for index, layer in enumerate(self.layers)
            if layer.kind == kind
        )
        return {
            self.layers[place].kind for place in places if 0 <= place < len(self.layers)
        }

    def _unclaimed_bytes(
        self, kind: str, trace: LayerTrace, mode: RecomputeMode, size: Size
    ) -> int:
        """Of outputs that the layer keeps (activations in place), and that no layer that takes them keeps too."""
        index = self.representatives[kind]
        total = 0
        for place, output in enumerate(trace.outputs):
            readers = self.cut.chain.readers(index, place, self.dtype)
            claimed = any(
                self._trace(self.layers[at].kind, size, WHOLE).keeps_inputs[where]
                for at, where in readers
            )
            if trace.keeps_outputs[mode][place] and readers and not claimed:
                total += output.nbytes
        return total

    def _bytes_kept_later(
        self, kind: str, trace: LayerTrace, mode: RecomputeMode, size: Size
    ) -> int:
        """Of what the layer takes and keeps: what a later layer takes and keeps too, and counts. If that one stands in
        a later stage, it is held here as part of what the stage hands on."""
        inputs = self._inputs(self.representatives[kind], size, WHOLE)
        kept = [
            place
            for place in range(len(inputs))
            if mode != "none" or trace.keeps_inputs[place]
        ]
        indices = [
            index for index, layer in enumerate(self.layers) if layer.kind == kind
        ]
        return sum(
            inputs[place].untyped_storage().nbytes()
            for place in kept
            if all(self._is_kept_later(index, place, size) for index in indices)
        )

    def _is_kept_later(self, index: int, place: int, size: Size) -> bool:
        later = self.cut.chain.later_takers(index, place, self.dtype)
        return any(
            self._trace(self.layers[at].kind, size, WHOLE).keeps_inputs[where]
            for at, where in later
        )

    def holds_experts(self, kind: str) -> bool:
        """Do layers of this kind hold experts? All others are the same whatever the expert-parallel degree."""
        modules = (
            self.source.blueprint.get_submodule(name)
            for name in self.layers[self.representatives[kind]].modules
        )
        return any(map(experts_of, modules))

    def _trace(self, kind: str, size: Size, split: Split) -> LayerTrace:
        if split.expert > 1 and not self.holds_experts(kind):
            split = replace(split, expert=1)
        key = (kind, size, split)
        if key not in self._traces:
            index = self.representatives[kind]
            stage, exchanges = self._stage(index, split)
            with_loss = index == len(self.layers) - 1
            run = LayerRun(
                stage,
                self.cut.parts(stage, index).values(),
                exchanges,
                with_loss=with_loss,
                recomputable=self.layers[index].recomputable,
                has_frozen=self._has_frozen,
            )
            is_simple = isinstance(self.cut.chain, TensorChain)
            handed = None if is_simple else self._borders(size).output_bytes[index]
            shapes = shapes_of(stage, self._hidden)
            with self._numbers(), self._naming(index, size):
                inputs = self._inputs(index, size, split)
                trace = run.trace(inputs, shapes, handed_bytes=handed)
            experts = replace(
                trace.count,
                local_expert_parameters=exchanges.local_expert_parameters,
                local_frozen_expert_parameters=exchanges.local_frozen_expert_parameters,
            )
            self._traces[key] = replace(trace, count=experts)
        return self._traces[key]

    @contextmanager
    def _naming(self, index: int, size: Size) -> Iterator[None]:
        """Tell which layer fails at what; it is the user's code."""
        try:
            yield
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise UnsupportedError(
                f"layer {self.layers[index].name!r} of {self.source.name} does not run on {size[0]} samples in "
                f"{str(self.dtype).removeprefix('torch.')}: {next(iter(str(error).strip().splitlines()), '')}",
                field="model",
                hint="let the model take every type and micro-batch size, or ask for others (precision, "
                "micro_batch_sizes).",
            ) from error

    def takes(self, micro_batch_size: int, sequence_length: int) -> bool:
        """Does the model run on so few samples? Batch norm takes no mean of a single one, where nothing but samples
        stands beside its channels."""
        if micro_batch_size > 1 or not any(
            isinstance(each, _BatchNorm) for each in self.source.blueprint.modules()
        ):
            return True
        try:
            for kind in self.representatives:
                self._trace(kind, (micro_batch_size, sequence_length), WHOLE)
        except UnsupportedError as error:
            if "more than 1 value per channel" in str(error):
                return False
            raise
        return True

    def _numbers(self) -> AbstractContextManager[None]:
        """Every count of a model that reads values sees the same."""
        return same_numbers() if self.cut.needs_values else nullcontext()

    def _inputs(self, index: int, size: Size, split: Split) -> tuple[Tensor, ...]:
        """What the layer takes; in a chain the output of the layer before, shaped as that layer's kind gives it, which
        needs no run of the whole model."""
        if self.cut.needs_values:
            return self._examples(*size, "cpu")
        if not isinstance(self.cut.chain, TensorChain):
            return self._borders(size).takes[index]
        if index == 0:
            return self._examples(size[0], size[1] // split.context)[:1]
        (output,) = self._trace(
            self.layers[index - 1].kind, size, border_split(split)
        ).outputs
        return (
            torch.empty(
                output.shape,
                dtype=output.dtype,
                device="meta",
                requires_grad=output.requires_grad,
            ),
        )

    def _examples(
        self, micro_batch_size: int, sequence_length: int, device: str = "meta"
    ) -> tuple[Tensor, ...]:
        return cast_inputs(
            self.source.example_inputs(micro_batch_size, sequence_length, device),
            self.dtype,
        )

    def _borders(self, size: Size) -> Borders:
        if size not in self._known_borders:
            self._known_borders[size] = self.cut.chain.borders(
                self._model(), self._examples, size
            )
        return self._known_borders[size]

    def _layer(self, index: int) -> nn.Module:
        """A stage of this layer alone. Transformers are built once per layer and copied: most of a large model is taken
        away again."""
        if index in self._whole_layers:
            return copy.deepcopy(self._whole_layers[index])
        with self._numbers():
            model = self._model("cpu" if self.cut.needs_values else "meta")
        layer = self.cut.layer(model, index)
        if self.cut.chain.keeps_tree:
            self._whole_layers[index] = copy.deepcopy(layer)
        return layer

    def _model(self, device: str = "meta") -> nn.Module:
        """Transformers take the type that they are built in; other models are cast as the executor casts them."""
        if self.source.config is not None:
            with building_in(self.dtype, device):
                return self.source.build()
        with torch.device(device):
            return cast(self.source.build(), self.dtype)

    def check_runs(self, size: Size) -> None:
        """Refuse what the executor would: a transformers model that does not run when it is cast.

        Raises:
            UnsupportedError: it does not, in this type.
        """
        if self.source.config is not None and self.dtype != torch.float32:
            self.source.borders(*size, self.dtype)

    def _stage(self, index: int, split: Split) -> tuple[nn.Module, Exchanges]:
        if (index, split) not in self._stages:
            stage = self._layer(index)
            exchanges = shard_layer(stage, self.source, index, split)
            for parameter in stage.parameters():
                parameter.grad = (
                    torch.empty_like(parameter) if parameter.requires_grad else None
                )
            self._stages[index, split] = stage, exchanges
        return self._stages[index, split]


def _elements(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def check_request(
    source: ModelSource,
    sequence_length: int,
    micro_batch_sizes: tuple[int, ...],
    degrees: tuple[int, ...],
    experts: tuple[int, ...] = (1,),
) -> None:
    """Refuse sizes that the model does not take.

    Raises:
        DocumentError: names the field, the value and what the model takes.
    """
    takes_tokens = source.input_kind == "tokens"
    tensors = source.tensor_parallel_degrees() if set(degrees) != {1} else (1,)
    known = source.expert_parallel_degrees() if set(experts) != {1} else (1,)
    reason = tensor_refusal(source) if set(degrees) - set(tensors) else ""
    only = source.cut().only_sequence
    limits = Limits(
        source.name, takes_tokens, source.longest_sequence, tensors, known, reason, only
    )
    limits.check(sequence_length, micro_batch_sizes, degrees, experts)


def _check_sequence(source: ModelSource, tokens: int, degree: int) -> None:
    """Refuse sequence parallelism of models, degrees and lengths that it cannot be of.

    Args:
        tokens: of the sequence, or of a context-parallel rank's piece of it.

    Raises:
        UnsupportedError: the model's blocks cannot share out their tokens.
        DocumentError: there is nobody to share with, or the degree does not divide the tokens.
    """
    reason = refusal(source)
    if reason:
        raise UnsupportedError(
            f"{source.name} cannot be sequence-parallel: {reason}.",
            field="sequence_parallel",
            hint="leave it out.",
        )
    if degree == 1 or tokens % degree:
        raise DocumentError(
            f"{degree} tensor-parallel ranks cannot share {tokens} tokens.",
            field="sequence_parallel",
            hint="use a degree above 1 that divides them, or leave it out.",
        )


def check_spread(
    source: ModelSource,
    tensor: int,
    expert: int = 1,
    *,
    sequence_parallel: bool = False,
) -> None:
    """Refuse degrees that a mixture's experts cannot be spread over (`planner.profiler.expert_parallel`).

    Raises:
        UnsupportedError: tensor-parallel ranks that do not share out the tokens.
        DocumentError: the product of the degrees does not divide the experts.
    """
    experts = common_experts(source)
    if tensor == 1 or not experts:
        return
    if not sequence_parallel:
        raise UnsupportedError(
            f"tensor-parallel ranks share out the experts of {source.name}, which takes sequence parallelism.",
            field="tensor_parallel_degrees",
            hint="count it with sequence parallelism (planner profile --device analytic:ID), or use degree 1.",
        )
    if experts % (tensor * expert):
        raise DocumentError(
            f"{tensor} tensor- times {expert} expert-parallel ranks cannot share {experts} experts.",
            field="expert_parallel_degrees",
            hint=f"use degrees whose product divides {experts}.",
        )


def check_context(
    source: ModelSource, sequence_length: int, degrees: tuple[int, ...]
) -> None:
    """Refuse context-parallel degrees that the model or the sequence does not take.

    Raises:
        DocumentError: a degree that does not divide the sequence.
        UnsupportedError: the model mixes its tokens otherwise than by causal attention.
    """
    wrong = [degree for degree in degrees if degree < 1 or sequence_length % degree]
    if wrong or not degrees:
        raise DocumentError(
            f"a sequence of {sequence_length} tokens does not divide over {wrong[0] if wrong else 'no'} ranks.",
            field="context_parallel_degrees",
            hint="give degrees that divide the sequence length.",
        )
    if max(degrees) > 1:
        from planner.profiler.sequence import check_pieces

        check_pieces(source)


def count(
    source: ModelSource,
    *,
    micro_batch_size: int,
    sequence_length: int,
    tensor_parallel_degree: int = 1,
    sequence_parallel: bool = False,
    expert_parallel_degree: int = 1,
    context_parallel_degree: int = 1,
    recompute: RecomputeMode = "none",
    dtype: DataType = "fp32",
) -> dict[str, Measurement]:
    """One row per distinct layer kind; of those that have this recompute mode.

    Raises:
        DocumentError: a size or degree that the model does not take.
        UnsupportedError: the model cannot be split so.
    """
    check_request(
        source,
        sequence_length,
        (micro_batch_size,),
        (tensor_parallel_degree,),
        (expert_parallel_degree,),
    )
    check_context(source, sequence_length, (context_parallel_degree,))
    check_spread(
        source,
        tensor_parallel_degree,
        expert_parallel_degree,
        sequence_parallel=sequence_parallel,
    )
    if sequence_parallel:
        _check_sequence(
            source, sequence_length // context_parallel_degree, tensor_parallel_degree
        )
    counter = Counter(source, dtype)
    split = Split(
        tensor_parallel_degree,
        sequence_parallel,
        context_parallel_degree,
        expert_parallel_degree,
    )
    size = (micro_batch_size, sequence_length, split)
    counts = {kind: counter.count(kind, *size) for kind in counter.representatives}
    return {
        kind: each.measurement(*size, recompute)
        for kind, each in counts.items()
        if recompute in each.modes
    }


def profile(
    source: ModelSource,
    *,
    sequence_length: int,
    micro_batch_sizes: tuple[int, ...],
    tensor_parallel_degrees: tuple[int, ...] = (1,),
    sequence_parallel: bool = False,
    expert_parallel_degrees: tuple[int, ...] = (1,),
    context_parallel_degrees: tuple[int, ...] = (1,),
    dtype: DataType = "fp32",
    progress: Progress | None = None,
) -> ModelProfile:
    """The counted profile of a model: rows for every micro-batch size, degree and recompute mode.

    Args:
        sequence_parallel: also count tensor-parallel degrees with sequence parallelism, where the model can be split so
            and the sequence divides.
        micro_batch_sizes: without 1 where batch norm refuses it, if there are others.
        context_parallel_degrees: also count ranks that share sequences out; rows tell the last rank, whose tokens
            attend to all.

    Raises:
        DocumentError: a size or degree that the model does not take.
        UnsupportedError: the model cannot be cut, or not be counted in shards.
    """
    check_request(
        source,
        sequence_length,
        micro_batch_sizes,
        tensor_parallel_degrees,
        expert_parallel_degrees,
    )
    check_context(source, sequence_length, context_parallel_degrees)
    check_spread(
        source, max(tensor_parallel_degrees), sequence_parallel=sequence_parallel
    )
    counter = Counter(source, dtype)
    found = splits(
        tensor_parallel_degrees,
        sequence_length=sequence_length,
        with_sequence=sequence_parallel and source.can_split_sequences(),
        expert_degrees=expert_parallel_degrees,
        context_degrees=context_parallel_degrees,
        experts=common_experts(source),
    )
    taken = [
        size for size in micro_batch_sizes if counter.takes(size, sequence_length)
    ] or micro_batch_sizes
    counter.check_runs((taken[0], sequence_length))
    sizes = [(size, sequence_length, split) for split in found for size in taken]
    kinds = list(counter.representatives)
    rows: dict[str, tuple[Measurement, ...]] = {}
    for done, kind in enumerate(kinds):
        if progress is not None:
            progress(done, len(kinds), kind)
        counts = [(size, counter.count(kind, *size)) for size in sizes]
        rows[kind] = rows_of(counts)
    if progress is not None:
        progress(len(kinds), len(kinds), "counted")
    return ModelProfile(
        model=source.name,
        device="counted",
        dtype=dtype,
        model_digest=source.digest,
        tokens_per_sample=source.longest_sequence,
        layers=layer_profiles(
            ((layer.name, layer.kind, layer.modules) for layer in counter.layers),
            counter.parameters,
            rows,
            counter.frozen_parameters,
        ),
        edges=source.edges(sequence_length, counter.dtype),
        shared_parameters=counter.cut.shared_parameters,
        cut=source.starts,
        whole_sequences=source.whole_sequences if sequence_length else "",
        transformer=_sizes_of(counter),
        environment={"torch": torch.__version__.partition("+")[0]}
        | _reason(counter.cut),
    )


def _sizes_of(counter: Counter) -> Transformer | None:
    """Return the sizes of a decoder that is trained as its configuration says.

    None: another kind of model, one with frozen parameters, or one that was changed
    after it was built.
    """
    source = counter.source
    if source.config is None or counter.frozen_parameters:
        return None
    model = transformer_of(source.config.to_dict())
    if model is None:
        return None
    is_cut_by_block = len(counter.layers) == model.layers + 2
    elements = _elements(source.blueprint.parameters())
    return model if is_cut_by_block and elements == model.parameters else None


def _reason(cut: LayerCut) -> dict[str, str]:
    """Why the model is a single layer, for people."""
    way = (
        " Counted on one run with random values: others may take another way."
        if cut.needs_values
        else ""
    )
    return {"cut": f"one layer: {cut.reason}{way}"} if cut.reason else {}
