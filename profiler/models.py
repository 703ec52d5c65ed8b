"""Load a model: from the catalogue, from a Hugging Face config.json on disk, or from the user's own callable.

Nothing is ever fetched: models are built from their configuration with fresh weights, on whatever device the caller
makes the default (``with torch.device("meta")`` costs no memory).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from planner.errors import MismatchError, UnsupportedError
from planner.profiler.compute_type import cast
from planner.profiler.cut import Borders, LayerCut, RealModel, cut_model
from planner.spec.profile import SkipEdge

if TYPE_CHECKING:
    from planner.profiler.derive_split import DerivedSplit

InputKind = Literal["tokens", "images", "features", "indices"]
"""Token ids, images, other numbers, or whole numbers other than token ids (classes, time steps)."""


@dataclass(frozen=True, slots=True)
class ModelInput:
    """One tensor that a model takes."""

    kind: InputKind
    sample_shape: tuple[int, ...] = ()
    """Shape of one sample; of tokens empty, where there are as many as the sequence has, else (their own number,)."""
    limit: int = 0
    """Whole numbers stand in [0, limit)."""

    def example(
        self, micro_batch_size: int, sequence_length: int, device: torch.device | str
    ) -> Tensor:
        """A random micro-batch: (micro_batch_size, *`size_at`) whole or normal numbers."""
        shape = (micro_batch_size, *self.size_at(sequence_length))
        if self.kind in ("tokens", "indices"):
            return torch.randint(max(self.limit, 1), shape, device=device)
        return torch.randn(shape, device=device)

    def size_at(self, sequence_length: int) -> tuple[int, ...]:
        """Shape of one sample at this number of tokens."""
        return sample_size(self.kind, self.sample_shape, sequence_length)


def sample_size(
    kind: str, sample_shape: tuple[int, ...], sequence_length: int
) -> tuple[int, ...]:
    """See `ModelInput.size_at`."""
    return (sequence_length,) if kind == "tokens" and not sample_shape else sample_shape


@dataclass(frozen=True)
class ModelSource:
    """A recipe that builds the model as often as wanted, always the same architecture, with fresh weights."""

    name: str
    input_kind: InputKind
    builder: Callable[[], nn.Module] = field(repr=False)
    sample_shape: tuple[int, ...] = ()
    """Shape of one sample of images or features; empty for tokens."""
    vocabulary_size: int = 0
    """Token ids stand in [0, vocabulary_size); 0 when the model takes no tokens."""
    longest_sequence: int = 0
    """Most tokens per sample; 0 when the model states no limit, or takes no tokens."""
    config: Any = field(default=None, repr=False)
    """The transformers configuration, when there is one."""
    further_inputs: tuple[ModelInput, ...] = ()
    """What the model takes besides its first input."""
    starts: tuple[str, ...] = ()
    """Modules before which the user wants a layer to start; empty: where the rules find layers."""
    keywords: tuple[str, ...] = ()
    """Names that the model's forward gives its inputs; empty: they are told by their places."""

    def build(self) -> nn.Module:
        """A new model in training mode, in fp32, under the caller's default device."""
        return self.builder()

    def build_on_meta(self) -> nn.Module:
        """A new model whose parameters have shapes but no storage."""
        with torch.device("meta"):
            return self.build()

    @cached_property
    def blueprint(self) -> nn.Module:
        """One model on meta to read names and shapes from; not to be changed."""
        return self.build_on_meta()

    @property
    def inputs(self) -> tuple[ModelInput, ...]:
        """All that the model takes."""
        return ModelInput(
            self.input_kind, self.sample_shape, self.vocabulary_size
        ), *self.further_inputs

    def example_inputs(
        self,
        micro_batch_size: int,
        sequence_length: int,
        device: torch.device | str = "cpu",
    ) -> tuple[Tensor, ...]:
        """Random inputs of one micro-batch, one tensor per input of the model (`ModelInput.example`)."""
        return tuple(
            each.example(micro_batch_size, sequence_length, device)
            for each in self.inputs
        )

    def cut(self, module: nn.Module | None = None) -> LayerCut:
        """The layers of this model, found once on meta tensors; they hold for every module that `build` returns.

        Args:
            module: when given, checked to be such a module.

        Raises:
            UnsupportedError: the model does not run on meta tensors; names the module. Or all its parameters are
                frozen.
            UnknownNameError: a module of the user's cut that the model does not have.
            MismatchError: the module is another model.
        """
        if module is not None:
            names = {name for name, _ in module.named_modules()}
            missing = [
                name
                for layer in self._cut.layers
                for name in layer.modules
                if name not in names
            ]
            if missing:
                raise MismatchError(
                    f"a {type(module).__name__} without {missing[0]!r} is not the model {self.name!r}.",
                    field="model",
                    hint="give a module that this source built.",
                )
        return self._cut

    @cached_property
    def _cut(self) -> LayerCut:
        parameters = list(self.blueprint.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            raise UnsupportedError(
                f"all {len(parameters)} parameters of {self.name} are frozen, so there is nothing to train.",
                field="model",
                hint="let those that are to be trained require gradients: requires_grad_(True).",
            )
        return cut_model(
            self.build_on_meta(),
            partial(self.example_inputs, device="meta"),
            keywords=self.keywords,
            starts=self.starts,
            longest_sequence=self.longest_sequence,
            real=RealModel(self.build, self.example_inputs),
        )

    def cut_at(self, starts: tuple[str, ...]) -> ModelSource:
        """The same model, its layers starting before these modules (`planner.profiler.cut.cut_model`); empty: where the rules
        find layers."""
        return self if starts == self.starts else replace(self, starts=starts)

    def borders(
        self,
        micro_batch_size: int,
        sequence_length: int,
        dtype: torch.dtype = torch.float32,
    ) -> Borders:
        """What one micro-batch carries across the borders of the layers, as meta tensors; found once per size and type.

        Args:
            dtype: that the model computes in; some hand on tensors of another one.

        Raises:
            UnsupportedError: the model does not run at this size or in this type.
        """
        size = (micro_batch_size, sequence_length)
        if (size, dtype) not in self._borders:
            model = (
                self.build_on_meta()
                if dtype == torch.float32
                else cast(self.build_on_meta(), dtype)
            )
            inputs = partial(self._examples_in, dtype)
            try:
                self._borders[size, dtype] = self.cut().chain.borders(
                    model, inputs, size
                )
            except (
                RuntimeError,
                ValueError,
                TypeError,
                IndexError,
            ) as error:  # from the user's code
                raise UnsupportedError(
                    f"{self.name} does not run on {micro_batch_size} samples of {sequence_length} tokens in "
                    f"{str(dtype).removeprefix('torch.')}: {next(iter(str(error).strip().splitlines()), '')}",
                    field="model",
                    hint="let the model take every type and size, or plan for another precision.",
                ) from error
        return self._borders[size, dtype]

    @cached_property
    def _borders(self) -> dict[tuple[tuple[int, int], torch.dtype], Borders]:
        return {}

    def _examples_in(
        self, dtype: torch.dtype, micro_batch_size: int, sequence_length: int
    ) -> tuple[Tensor, ...]:
        inputs = self.example_inputs(micro_batch_size, sequence_length, "meta")
        return tuple(
            each.to(dtype) if each.is_floating_point() else each for each in inputs
        )

    def edges(
        self, sequence_length: int, dtype: torch.dtype = torch.float32
    ) -> tuple[SkipEdge, ...]:
        """Tensors that layers take besides what the layer before made, with the bytes of one sample."""
        return self.cut().chain.edges(sequence_length, dtype)

    def tokens_of_probe(self, wish: int) -> int:
        """Tokens per sample of a small run: as many as wished, where the model takes them."""
        return self.cut().only_sequence or min(wish, self.longest_sequence or wish)

    def tensor_parallel_degrees(self) -> tuple[int, ...]:
        """Degrees that the model can be tensor-parallel by; (1,) when nobody told how to split it, or into what."""
        from planner.profiler.tensor_parallel import degrees

        return degrees(self)

    @cached_property
    def derived_split(self) -> DerivedSplit:
        """How to split the model over tensor-parallel ranks, where nobody has told (`planner.profiler.derive_split`)."""
        from planner.profiler.derive_split import derive

        return derive(self)

    @cached_property
    def sequence_refusal(self) -> str:
        """Why tensor-parallel ranks cannot share out the tokens between their regions; empty where they can."""
        from planner.profiler.sequence_parallel import find_refusal

        return find_refusal(self)

    @cached_property
    def whole_sequences(self) -> str:
        """Why sequences cannot be cut into chunks or over context-parallel ranks; empty where they can."""
        from planner.profiler.sequence import find_refusal

        return find_refusal(self)

    def expert_parallel_degrees(self) -> tuple[int, ...]:
        """Degrees that the model's experts can be shared out by; (1,) where it has none."""
        from planner.profiler.expert_parallel import degrees

        return degrees(self)

    def can_split_sequences(self) -> bool:
        """Can tensor-parallel ranks share out the tokens between their regions? (`planner.profiler.sequence_parallel`)"""
        return not self.sequence_refusal

    @cached_property
    def digest(self) -> str:
        """sha256 over the sorted (name, shape) of all parameters, those that are frozen marked, as lower-case hex."""
        rows = sorted(
            (name, tuple(value.shape), *(() if value.requires_grad else ("frozen",)))
            for name, value in self.blueprint.named_parameters()
        )
        return hashlib.sha256(repr(rows).encode()).hexdigest()


def load_model(reference: str) -> ModelSource:
    """The model that a reference names.

    Args:
        reference: a catalogue name (`planner.profiler.catalogue.names`), the path of a Hugging Face config.json or of the
            directory that holds it, or ``package.module:callable``. The callable takes no arguments and returns a new
            `nn.Module`, or (`nn.Module`, example inputs): one tensor, or a tuple or dict of tensors, all with the
            micro-batch as their first dimension.

    Raises:
        UnknownNameError: neither a file nor a catalogue name; lists close matches.
        DocumentError: the file cannot be read or describes no model, or the callable fails.
        UnsupportedError: a model whose inputs or task are not known here.
    """
    from pathlib import Path

    from planner.profiler import catalogue
    from planner.profiler.sources import from_callable, from_catalogue, from_config_file

    path = Path(reference)
    if reference not in catalogue.names() and (path.suffix == ".json" or path.exists()):
        return from_config_file(path / "config.json" if path.is_dir() else path)
    if ":" in reference:
        return from_callable(reference)
    return from_catalogue(catalogue.entry(reference))
