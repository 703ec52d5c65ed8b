"""The model catalogue: one JSON file per model, with its configuration, published figures and their citations.

Reading it needs no torch, so `planner models` and planning for a catalogue model start at once.
"""

from __future__ import annotations

import difflib
import json
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from pydantic import Field

from planner.errors import UnknownNameError
from planner.spec.document import Document, parse

__all__ = [
    "CatalogueEntry",
    "Network",
    "NetworkInput",
    "entry",
    "find_family",
    "names",
]


class NetworkInput(Document):
    """One tensor that a network takes."""

    kind: Literal["tokens", "images", "indices"]
    sample_shape: tuple[int, ...] = ()
    """Shape of one sample; empty for tokens and for one number."""
    limit: int = Field(default=0, ge=0)
    """Whole numbers stand in [0, limit)."""


class Network(Document):
    """A model that transformers does not have."""

    architecture: str
    """Name of a builder of `planner.profiler.networks`."""
    arguments: dict[str, Any]
    inputs: tuple[NetworkInput, ...] = Field(min_length=1)


class CatalogueEntry(Document):
    """A published model."""

    name: str
    family: str
    parameters: int = Field(gt=0)
    """Trained parameters (elements) of the architecture, tied ones once."""
    published_parameters: int | None = Field(default=None, gt=0)
    """The same as its authors state it, usually rounded; None: they state none."""
    active_parameters: int | None = Field(default=None, gt=0)
    """Those that one token meets, as the authors of a mixture of experts state it; None: all."""
    layers: int = Field(gt=0)
    """Repeated blocks of a transformer, or of a network; weighted layers where the name counts them (ResNet, VGG)."""
    longest_sequence: int = Field(default=0, ge=0)
    """Tokens; 0 for models without a sequence."""
    citation: str
    """Where the figures stand."""
    repository: str = ""
    """Hugging Face repository whose config.json has these widths; empty when a paper gives them all."""
    config: dict[str, Any] | None = None
    """Hugging Face configuration; None for models that transformers does not have."""
    network: Network | None = None
    """What `planner.profiler.networks` builds; None for a model of transformers."""

    @property
    def takes_tokens(self) -> bool:
        """Has the model a sequence length?"""
        if self.network is not None:
            return self.network.inputs[0].kind == "tokens"
        return "image_size" not in (self.config or {})


@cache
def names() -> tuple[str, ...]:
    """Names of all catalogue models, smallest first."""
    stems = [
        path.name.removesuffix(".json")
        for path in files(__name__).iterdir()
        if path.name.endswith(".json")
    ]
    return tuple(sorted(stems, key=lambda name: (_read(name).parameters, name)))


def entry(name: str) -> CatalogueEntry:
    """The catalogue entry of this name.

    Raises:
        UnknownNameError: there is none; lists close matches.
    """
    if name not in names():
        close = difflib.get_close_matches(name, names(), n=5, cutoff=0.4)
        raise UnknownNameError(
            f"no model {name!r} in the catalogue, and no such file.",
            field="model",
            hint=f"did you mean {', '.join(close)}?"
            if close
            else f"use one of {', '.join(names())}.",
        )
    return _read(name)


def find_family(text: str, *, field: str = "family") -> tuple[str, ...]:
    """Return the families whose name contains the text; case does not matter.

    Args:
        text: part of a name.
        field: name of the argument in error messages.

    Raises:
        UnknownNameError: none does; lists all.
    """
    families = dict.fromkeys(_read(name).family for name in names())
    found = tuple(family for family in families if text.lower() in family.lower())
    if not found:
        names_by_lower = {family.lower(): family for family in families}
        close = difflib.get_close_matches(text.lower(), names_by_lower, n=1)
        suggestion = f"did you mean {names_by_lower[close[0]]!r}? " if close else ""
        raise UnknownNameError(
            f"no family {text!r} in the catalogue.",
            field=field,
            hint=f"{suggestion}Known: {', '.join(families)}.",
        )
    return found


@cache
def _read(name: str) -> CatalogueEntry:
    text = files(__name__).joinpath(f"{name}.json").read_text(encoding="utf-8")
    return parse(CatalogueEntry, json.loads(text), where=name)
