"""Initial values from safetensors files: every rank reads the parameters of its own stages only, one at a time.

Files hold tensors under the names of the model's parameters, as `save_pretrained` and `safetensors.torch.save_model`
write them. Of a Hugging Face model the names may lack the prefix of its base model, and a mixture's experts may stand
one by one (`planner.executor.checkpoint.stored_names`); of a shared parameter any of its names will do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from planner.errors import DocumentError, MismatchError
from planner.executor.checkpoint.materialise import (
    Narrow,
    Prepare,
    keep_all,
    materialise,
)
from planner.executor.checkpoint.stored_names import StoredNames
from planner.profiler.models import ModelSource

SUFFIX = ".safetensors"


class Weights:
    """The tensors of a file, or of all files of a folder.

    Raises:
        DocumentError: there are none, or one cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._files = (
            sorted(self._path.glob(f"*{SUFFIX}"))
            if self._path.is_dir()
            else [self._path]
        )
        if not self._files:
            raise DocumentError(
                f"{path} holds no {SUFFIX} file.",
                field="weights",
                hint="save the model there with save_pretrained.",
            )

    @cached_property
    def _file_of(self) -> Mapping[str, Path]:
        """Where every tensor stands; only the files' headers are read."""
        found: dict[str, Path] = {}
        for path in self._files:
            with self._open(path) as file:
                found |= dict.fromkeys(file.keys(), path)
        return found

    def _open(self, path: Path) -> Any:
        try:
            return safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise DocumentError(
                f"{path} cannot be read: {error}.",
                field="weights",
                hint=f"give a {SUFFIX} file, or a folder of them.",
            ) from None

    def find(self, names: tuple[str, ...], prefix: str) -> str | None:
        """The first of a parameter's names that a file has, with or without the prefix of the base model."""
        shorter = tuple(name.removeprefix(prefix) for name in names) if prefix else ()
        return next(
            (name for name in (*names, *shorter) if name in self._file_of), None
        )

    def under_other_names(self, model: nn.Module) -> StoredNames | None:
        """What the files hold by transformers' rules for this model; None: it is not one of theirs."""
        return (
            StoredNames(model, self._file_of)
            if hasattr(model, "base_model_prefix")
            else None
        )

    def unused(self, model: nn.Module) -> tuple[str, ...]:
        """What the files hold and the model does not have, by name: more layers, another head.

        Args:
            model: whole; its parameters may have no storage.
        """
        prefix = _prefix_of(model)
        both = (
            model.named_parameters(remove_duplicate=False),
            model.named_buffers(remove_duplicate=False),
        )
        held = {name for named in both for name, _ in named}
        known = held | {name.removeprefix(prefix) for name in held}
        left = [name for name in self._file_of if name not in known]
        others = self.under_other_names(model) if left else None
        if others is not None:
            ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
            parts = others.parts_of(held)
            left = [
                name
                for name in left
                if name not in parts
                and not any(re.search(each, name) for each in ignored)
            ]
        return tuple(left)

    def remark(self, model: nn.Module) -> str | None:
        """A warning of what is unused, in words; None: all is used."""
        names = self.unused(model)
        if not names:
            return None
        tensors = f"{len(names)} tensors" if len(names) > 1 else "a tensor"
        return f"{self._path} holds {tensors} that the model does not have, such as {names[0]}: left out"

    def read(self, name: str) -> torch.Tensor:
        """One tensor."""
        with self._open(self._file_of[name]) as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor

    def materialise(
        self,
        source: ModelSource,
        prepare: Prepare,
        *,
        device: torch.device,
        seed: int,
        narrow: Narrow = keep_all,
    ) -> nn.Module:
        """As `planner.executor.checkpoint.materialise.materialise`, with these values instead of those of the seed.

        Raises:
            MismatchError: a parameter is missing, or has another shape, or is quantized.
        """
        loading = _Loading(self, source)

        def load_and_narrow(name: str, module: nn.Module) -> None:
            """A module that is about to lose a part of its parameters gets its values first."""
            loading.load(name, module)
            narrow(name, module)

        part = materialise(
            source,
            prepare,
            device=device,
            seed=seed,
            narrow=keep_all if narrow is keep_all else load_and_narrow,
        )
        loading.load("", part, recurse=True)
        return part


class _Loading:
    """Fills the parameters and buffers of one stage, each once."""

    def __init__(self, weights: Weights, source: ModelSource) -> None:
        self._weights = weights
        self._prefix = _prefix_of(source.blueprint)
        self._blueprint = source.blueprint
        self._shared = {
            name: shared.names
            for shared in source.cut().shared_parameters
            for name in shared.names
        }
        self._done: set[str] = set()

    @cached_property
    def _others(self) -> StoredNames | None:
        return self._weights.under_other_names(self._blueprint)

    def load(self, name: str, module: nn.Module, *, recurse: bool = False) -> None:
        """Values for the parameters and persistent buffers of a module, under its qualified name.

        Files may lack buffers, which then stay as the model's constructor made them.
        """
        for each, parameter in module.named_parameters(name, recurse=recurse):
            if self._is_new(each):
                found, value = self._read((each, *self._shared.get(each, ())))
                _fill(parameter, value, found)
        for each, buffer in _persistent_buffers(name, module, recurse=recurse):
            held = self._find((each,)) if self._is_new(each) else None
            if held is not None:
                _fill(buffer, held[1], held[0])

    def _is_new(self, name: str) -> bool:
        is_new = name not in self._done
        self._done.add(name)
        return is_new

    def _read(self, names: tuple[str, ...]) -> tuple[str, torch.Tensor]:
        held = self._find(names)
        if held is not None:
            return held
        raise MismatchError(
            f"the files hold no {names[0]!r}.",
            field="weights",
            hint="give the weights of this model, under the names of its parameters.",
        )

    def _find(self, names: tuple[str, ...]) -> tuple[str, torch.Tensor] | None:
        """A tensor by any of its names, and the one that it was found by; None: the files do not hold it."""
        found = self._weights.find(names, self._prefix)
        if found is not None:
            return found, self._weights.read(found)
        others = self._others
        name = (
            None
            if others is None
            else next((name for name in names if name in others), None)
        )
        return (
            None
            if others is None or name is None
            else (name, others.read(name, self._weights.read))
        )


def _prefix_of(model: nn.Module) -> str:
    """Before the names of a transformers model's base."""
    base = getattr(model, "base_model_prefix", "")
    return f"{base}." if base else ""


def _persistent_buffers(
    name: str, module: nn.Module, *, recurse: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Those that checkpoints hold: a router's correction, running statistics."""
    for place, each in (
        module.named_modules(prefix=name) if recurse else ((name, module),)
    ):
        for key, buffer in each.named_buffers(place, recurse=False):
            if key.rpartition(".")[2] not in each._non_persistent_buffers_set:
                yield key, buffer


def _fill(tensor: torch.Tensor, value: torch.Tensor, found: str) -> None:
    """Give a parameter or buffer the value that files hold under this name."""
    if value.shape != tensor.shape:
        raise MismatchError(
            f"{found!r} is of shape {tuple(value.shape)} in the files and {tuple(tensor.shape)} in the model.",
            field="weights",
            hint="give the weights of this model.",
        )
    is_float = value.is_floating_point()
    if is_float != tensor.is_floating_point() or (is_float and value.itemsize < 2):
        # Quantized: the numbers are to be multiplied with scales that stand elsewhere.
        raise MismatchError(
            f"{found!r} is of type {value.dtype} in the files and {tensor.dtype} in the model.",
            field="weights",
            hint="give weights that are not quantized, in fp32, fp16 or bf16.",
        )
    with torch.no_grad():
        tensor.copy_(value)
