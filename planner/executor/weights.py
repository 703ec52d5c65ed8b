"""Initial values from safetensors files: every rank reads the parameters of its own stages only, one at a time.

Files hold tensors under the names of the model's parameters, as `save_pretrained` and `safetensors.torch.save_model`
write them. Of a Hugging Face model the names may lack the prefix of its base model, and a mixture's experts may stand
one by one (`planner.executor.stored_names`); of a shared parameter any of its names will do.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from planner.errors import DocumentError, MismatchError
from planner.executor.materialise import Narrow, Prepare, keep_all, materialise
from planner.executor.stored_names import StoredNames
from profiler.models import ModelSource

SUFFIX = ".safetensors"


class Weights:
    """The tensors of a file, or of all files of a folder.

    Raises:
        DocumentError: there are none, or one cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._files = sorted(self._path.glob(f"*{SUFFIX}")) if self._path.is_dir() else [self._path]
        if not self._files:
            raise DocumentError(
                f"{path} holds no {SUFFIX} file.", field="weights", mend="save the model there with save_pretrained."
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
                f"{path} cannot be read: {error}.", field="weights", mend=f"give a {SUFFIX} file, or a folder of them."
            ) from None

    def find(self, names: tuple[str, ...], prefix: str) -> str | None:
        """The first of a parameter's names that a file has, with or without the prefix of the base model."""
        shorter = tuple(name.removeprefix(prefix) for name in names) if prefix else ()
        return next((name for name in (*names, *shorter) if name in self._file_of), None)

    def under_other_names(self, model: nn.Module) -> StoredNames | None:
        """What the files hold by transformers' rules for this model; None: it is not one of theirs."""
        return StoredNames(model, self._file_of) if hasattr(model, "base_model_prefix") else None

    def read(self, name: str) -> torch.Tensor:
        """One tensor."""
        with self._open(self._file_of[name]) as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor

    def materialise(
        self, source: ModelSource, prepare: Prepare, *, device: torch.device, seed: int, narrow: Narrow = keep_all
    ) -> nn.Module:
        """As `planner.executor.materialise.materialise`, with these values instead of those of the seed.

        Raises:
            MismatchError: a parameter is missing, or has another shape.
        """
        loading = _Loading(self, source)

        def load_and_narrow(name: str, module: nn.Module) -> None:
            """A module that is about to lose a part of its parameters gets its values first."""
            loading.load(name, module)
            narrow(name, module)

        part = materialise(
            source, prepare, device=device, seed=seed, narrow=keep_all if narrow is keep_all else load_and_narrow
        )
        loading.load("", part, recurse=True)
        return part


class _Loading:
    """Fills the parameters of one stage, each once."""

    def __init__(self, weights: Weights, source: ModelSource) -> None:
        self._weights = weights
        base = getattr(source.blueprint, "base_model_prefix", "")
        self._prefix = f"{base}." if base else ""
        self._blueprint = source.blueprint
        self._shared = {name: shared.names for shared in source.cut().shared_parameters for name in shared.names}
        self._done: set[str] = set()

    @cached_property
    def _others(self) -> StoredNames | None:
        return self._weights.under_other_names(self._blueprint)

    def load(self, name: str, module: nn.Module, *, recurse: bool = False) -> None:
        """Values for the parameters of a module, under its qualified name."""
        for each, parameter in module.named_parameters(name, recurse=recurse):
            if each not in self._done:
                self._done.add(each)
                self._fill(each, parameter)

    def _fill(self, name: str, parameter: nn.Parameter) -> None:
        found, value = self._read((name, *self._shared.get(name, ())))
        if value.shape != parameter.shape:
            raise MismatchError(
                f"{found!r} is of shape {tuple(value.shape)} in the files and {tuple(parameter.shape)} in the model.",
                field="weights",
                mend="give the weights of this model.",
            )
        with torch.no_grad():
            parameter.copy_(value)

    def _read(self, names: tuple[str, ...]) -> tuple[str, torch.Tensor]:
        """A parameter by any of its names, and the one that it was found by."""
        found = self._weights.find(names, self._prefix)
        if found is not None:
            return found, self._weights.read(found)
        others = self._others
        if others is not None:
            for name in names:
                if name in others:
                    return name, others.read(name, self._weights.read)
        raise MismatchError(
            f"the files hold no {names[0]!r}.",
            field="weights",
            mend="give the weights of this model, under the names of its parameters.",
        )
