"""Where models come from: one maker of a `ModelSource` per form of reference."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from planner.errors import DocumentError, UnknownNameError, UnsupportedError
from planner.spec.document import read_data
from profiler.catalogue import CatalogueEntry
from profiler.models import InputKind, ModelSource
from profiler.tensor_parallel import follow_local_heads


def from_catalogue(entry: CatalogueEntry) -> ModelSource:
    """The model of a catalogue entry."""
    if entry.vision is not None:
        from profiler.vision import build_vision_model

        shape = tuple(entry.vision["sample_shape"])
        return ModelSource(entry.name, "images", partial(build_vision_model, entry.vision), sample_shape=shape)
    return from_config(entry.name, dict(entry.config or {}), where=entry.name)


def from_config_file(path: Path) -> ModelSource:
    """The model that a Hugging Face config.json describes.

    Raises:
        DocumentError: missing, no JSON, or no configuration that transformers accepts.
    """
    data = read_data(path)
    if not isinstance(data, dict):
        raise DocumentError("is no JSON object.", field=str(path), mend="give a Hugging Face config.json.")
    name = path.resolve().parent.name if path.stem == "config" else path.stem
    return from_config(name, data, where=str(path))


def from_config(name: str, data: dict[str, Any], *, where: str) -> ModelSource:
    """The model of a transformers configuration: attention through torch's fused kernels, no key-value cache.

    Raises:
        DocumentError, UnknownNameError, UnsupportedError: see `load_model`.
    """
    config = _read_config(data, where)
    auto_class = _auto_class(config, where)
    builder = partial(_build_transformer, auto_class, config)
    _try_building(builder, where)
    text = config.get_text_config()
    return ModelSource(
        name,
        "tokens",
        builder,
        vocabulary_size=text.vocab_size,
        longest_sequence=getattr(text, "max_position_embeddings", None) or 0,
        config=config,
    )


def _transformers() -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read at import: nothing is ever fetched
    import transformers

    return transformers


def _read_config(data: dict[str, Any], where: str) -> Any:
    transformers = _transformers()
    known = list(transformers.CONFIG_MAPPING.keys())
    settings = dict(data)
    model_type = settings.pop("model_type", None)
    if not isinstance(model_type, str):
        raise DocumentError(
            "the field model_type is missing.", field=f"{where}: model_type", mend="give a Hugging Face config.json."
        )
    if model_type not in known:
        raise UnknownNameError(
            f"transformers knows no model_type {model_type!r}.",
            field=f"{where}: model_type",
            mend=_close(model_type, known),
        )
    try:
        config = transformers.AutoConfig.for_model(model_type, **settings)
    except Exception as error:  # configurations validate themselves with many kinds of errors
        raise DocumentError(
            f"is no valid {model_type} configuration: {_first_line(error)}", field=where, mend="correct this field."
        ) from error
    config.use_cache = False
    return config


def _close(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=5, cutoff=0.5)
    return f"did you mean {', '.join(close)}?" if close else "check the name."


def _auto_class(config: Any, where: str) -> Any:
    """The transformers auto class of the configuration's task: its `architectures`, else what its type can do."""
    transformers = _transformers()
    from transformers.models.auto import modeling_auto

    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    masked = modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.get(config.model_type)
    asked = (getattr(config, "architectures", None) or [None])[0]
    if asked is None:
        asked = masked if masked and not getattr(config, "is_decoder", False) else causal
    if asked is not None and asked == causal:
        return transformers.AutoModelForCausalLM
    if asked is not None and asked == masked:
        return transformers.AutoModelForMaskedLM
    raise UnsupportedError(
        f"{asked or config.model_type} is no causal or masked language model.",
        field=f"{where}: architectures",
        mend=f"use {' or '.join(name for name in (causal, masked) if name) or 'another model'}.",
    )


def _build_transformer(auto_class: Any, config: Any) -> nn.Module:
    model: nn.Module = auto_class.from_config(
        config, attn_implementation=_attention(auto_class, config), dtype=torch.get_default_dtype()
    ).train()
    follow_local_heads(model)
    return model


def _attention(auto_class: Any, config: Any) -> str:
    """torch's fused kernels, or matrix products for models whose attention those lack (soft caps, sinks)."""
    return "sdpa" if auto_class._model_mapping[type(config)]._supports_sdpa else "eager"


def _try_building(builder: Any, where: str) -> None:
    try:
        with torch.device("meta"):
            builder()
    except Exception as error:  # any: the settings are the user's, the code is transformers'
        raise DocumentError(
            f"transformers cannot build the model: {_first_line(error)}", field=where, mend="correct the configuration."
        ) from error


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return f"{type(error).__name__}: {text.splitlines()[0]}"


def from_callable(reference: str) -> ModelSource:
    """The model that ``package.module:callable`` returns.

    Raises:
        DocumentError: the module cannot be imported, has no such callable, or the callable fails or returns neither a
            module nor (module, example inputs).
        UnsupportedError: the inputs cannot be told from the module.
    """
    function = _find_callable(reference)
    with torch.device("meta"):
        module, example = _call(function, reference)
        again, _ = _call(function, reference)
    if again is module:
        raise DocumentError(
            "returns the same module at every call.", field=reference, mend="build a new module in the callable."
        )
    if any(not parameter.is_meta for parameter in module.parameters()):
        raise DocumentError(
            "puts parameters on a device of its own choice.",
            field=reference,
            mend="build on torch's default device: pass no device= and do not call .to() or .cuda().",
        )
    return _describe(reference, module, example, partial(_build_from, function, reference))


def _find_callable(reference: str) -> Any:
    module_name, _, attribute = reference.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # a module beside the user's working directory, as `python -m` would find it
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as error:  # any: importing runs the user's code
        raise DocumentError(
            f"cannot import {module_name!r}: {_first_line(error)}",
            field=reference,
            mend="give package.module:callable as Python would import it here.",
        ) from error
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise DocumentError(
            f"{module_name} has no callable {attribute!r}.", field=reference, mend="name a function of the module."
        )
    return found


def _call(function: Any, reference: str) -> tuple[nn.Module, Tensor | None]:
    try:
        result = function()
    except Exception as error:  # any: it is the user's code
        raise DocumentError(
            f"the callable failed: {_first_line(error)}", field=reference, mend="make it run without arguments."
        ) from error
    module, example = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if isinstance(example, tuple | list) and len(example) == 1:
        example = example[0]
    if not isinstance(module, nn.Module) or not (example is None or isinstance(example, Tensor)):
        raise DocumentError(
            f"the callable returned {type(result).__name__}.",
            field=reference,
            mend="return an nn.Module, or (nn.Module, one example input tensor).",
        )
    return module, example


def _build_from(function: Any, reference: str) -> nn.Module:
    model = _call(function, reference)[0].train()
    follow_local_heads(model)
    return model


def _describe(name: str, module: nn.Module, example: Tensor | None, builder: Any) -> ModelSource:
    config = getattr(module, "config", None)
    if hasattr(module, "base_model") and config is not None:
        longest = getattr(config, "max_position_embeddings", None) or 0
        return ModelSource(
            name, "tokens", builder, vocabulary_size=config.vocab_size, longest_sequence=longest, config=config
        )
    first = _first_parametric(module)
    if example is not None:
        return _describe_example(name, first, example, builder)
    if isinstance(first, nn.Embedding):
        return ModelSource(name, "tokens", builder, vocabulary_size=first.num_embeddings)
    if isinstance(first, nn.Linear):
        return ModelSource(name, "features", builder, sample_shape=(first.in_features,))
    raise UnsupportedError(
        "what the model takes cannot be told from its first layer.",
        field=name,
        mend="return (nn.Module, one example input tensor).",
    )


def _describe_example(name: str, first: nn.Module | None, example: Tensor, builder: Any) -> ModelSource:
    shape = tuple(example.shape[1:])
    if example.is_floating_point():
        kind: InputKind = "images" if len(shape) == 3 else "features"
        return ModelSource(name, kind, builder, sample_shape=shape)
    if isinstance(first, nn.Embedding) and len(shape) == 1:
        return ModelSource(name, "tokens", builder, vocabulary_size=first.num_embeddings, longest_sequence=shape[0])
    raise UnsupportedError(
        f"integer inputs of shape {tuple(example.shape)} are no token ids for an embedding.",
        field=name,
        mend="give ids of shape (micro_batch, sequence) to a model that starts with nn.Embedding, or a float tensor.",
    )


def _first_parametric(module: nn.Module) -> nn.Module | None:
    """The first module with parameters of its own, in the order of registration."""
    owners = (part for part in module.modules() if next(part.parameters(recurse=False), None) is not None)
    return next(owners, None)
