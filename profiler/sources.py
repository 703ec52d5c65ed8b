"""Where models come from: one maker of a `ModelSource` per form of reference."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from planner.errors import DocumentError, UnknownNameError, UnsupportedError
from planner.profiler.callables import first_line, load_callable
from planner.profiler.catalogue import CatalogueEntry
from planner.profiler.models import ModelInput, ModelSource
from planner.profiler.samples import check_samples_first
from planner.profiler.split_elementwise import take_split_tensors
from planner.profiler.tensor_parallel import follow_local_heads
from planner.spec.document import read_data

DEFAULT_IMAGE_SIZE = 224
"""Pixels; of models whose configuration states none (ImageNet's usual crop)."""
_TOKENS = 16
"""Of a short sequence, for models that state no length."""
Example = Tensor | tuple[Tensor, ...] | dict[str, Tensor] | None
"""Inputs that a user's callable returns beside its module."""


def from_catalogue(entry: CatalogueEntry) -> ModelSource:
    """The model of a catalogue entry."""
    if entry.network is not None:
        from planner.profiler.networks import build_network

        first, *further = (
            ModelInput(each.kind, each.sample_shape, each.limit)
            for each in entry.network.inputs
        )
        return ModelSource(
            entry.name,
            first.kind,
            partial(build_network, entry.network),
            sample_shape=first.sample_shape,
            vocabulary_size=first.limit,
            longest_sequence=entry.longest_sequence,
            further_inputs=tuple(further),
        )
    return from_config(entry.name, dict(entry.config or {}), where=entry.name)


def from_config_file(path: Path) -> ModelSource:
    """The model that a Hugging Face config.json describes.

    Raises:
        DocumentError: missing, no JSON, or no configuration that transformers accepts.
    """
    data = read_data(path)
    if not isinstance(data, dict):
        raise DocumentError(
            "is no JSON object.",
            field=str(path),
            hint="give a Hugging Face config.json.",
        )
    name = path.resolve().parent.name if path.stem == "config" else path.stem
    return from_config(name, data, where=str(path))


def from_config(name: str, data: dict[str, Any], *, where: str) -> ModelSource:
    """The model of a transformers configuration: attention through torch's fused kernels, no key-value cache.

    Raises:
        DocumentError, UnknownNameError, UnsupportedError: see `load_model`.
    """
    config = _read_config(data, where)
    task = _task(config, where)
    builder = partial(_build_transformer, task.auto_class, config)
    _try_building(builder, where)
    return task.describe(name, config, builder)


def _transformers() -> Any:
    os.environ.setdefault(
        "HF_HUB_OFFLINE", "1"
    )  # read at import: nothing is ever fetched
    import transformers

    return transformers


def _read_config(data: dict[str, Any], where: str) -> Any:
    transformers = _transformers()
    known = list(transformers.CONFIG_MAPPING.keys())
    settings = dict(data)
    model_type = settings.pop("model_type", None)
    if not isinstance(model_type, str):
        raise DocumentError(
            "the field model_type is missing.",
            field=f"{where}: model_type",
            hint="give a Hugging Face config.json.",
        )
    if model_type not in known:
        raise UnknownNameError(
            f"transformers knows no model_type {model_type!r}.",
            field=f"{where}: model_type",
            hint=_close(model_type, known),
        )
    try:
        config = transformers.AutoConfig.for_model(model_type, **settings)
    except (
        Exception
    ) as error:  # configurations validate themselves with many kinds of errors
        raise DocumentError(
            f"is no valid {model_type} configuration: {first_line(error)}",
            field=where,
            hint="correct this field.",
        ) from error
    config.use_cache = False
    return config


def _close(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=5, cutoff=0.5)
    return f"did you mean {', '.join(close)}?" if close else "check the name."


@dataclass(frozen=True, slots=True)
class _Task:
    """What a transformers model is trained for: the auto class that builds it, and what it takes."""

    title: str
    auto_class: Any
    class_names: Any
    """Class of the task's models by model type."""
    describe: Callable[[str, Any, Callable[[], nn.Module]], ModelSource]


def _tasks() -> tuple[_Task, ...]:
    """In the order in which they are preferred where the configuration does not tell."""
    transformers = _transformers()
    from transformers.models.auto import modeling_auto as auto

    return (
        _Task(
            "encoder-decoder",
            transformers.AutoModelForSeq2SeqLM,
            auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
            _encoder_decoder,
        ),
        _Task(
            "masked language",
            transformers.AutoModelForMaskedLM,
            auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
            _language_model,
        ),
        _Task(
            "causal language",
            transformers.AutoModelForCausalLM,
            auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
            _language_model,
        ),
        _Task(
            "image classification",
            transformers.AutoModelForImageClassification,
            auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
            _image_classifier,
        ),
    )


def _task(config: Any, where: str) -> _Task:
    """The task of the configuration: of its `architectures`, else the first that its type can do.

    Raises:
        UnsupportedError: none of the tasks that are known here.
    """
    able = [task for task in _tasks() if config.model_type in task.class_names]
    asked = (getattr(config, "architectures", None) or [None])[0]
    if asked is not None:
        found = [task for task in able if asked in _class_names(task, config)]
    elif getattr(config, "is_encoder_decoder", False) or getattr(
        config, "is_decoder", False
    ):
        found = [task for task in able if task.title != "masked language"]
    else:
        found = [task for task in able if task.title != "encoder-decoder"]
    if found:
        return found[0]
    known = [name for task in able for name in _class_names(task, config)]
    raise UnsupportedError(
        f"{asked or config.model_type} is trained for none of the tasks that are known here "
        f"({', '.join(task.title for task in _tasks())}).",
        field=f"{where}: architectures",
        hint=f"use {' or '.join(known) or 'another model'}.",
    )


def _class_names(task: _Task, config: Any) -> tuple[str, ...]:
    names = task.class_names[config.model_type]
    return (names,) if isinstance(names, str) else tuple(names)


def _language_model(
    name: str, config: Any, builder: Callable[[], nn.Module]
) -> ModelSource:
    text = config.get_text_config()
    longest = max(
        getattr(text, "max_position_embeddings", None) or 0, 0
    )  # XLNet says -1 for any number
    return ModelSource(
        name,
        "tokens",
        builder,
        vocabulary_size=text.vocab_size,
        longest_sequence=longest,
        config=config,
    )


def _encoder_decoder(
    name: str, config: Any, builder: Callable[[], nn.Module]
) -> ModelSource:
    """Takes the ids of the encoder and those of the decoder, sequences of one length."""
    source = _language_model(name, config, builder)
    return replace(
        source,
        further_inputs=(ModelInput("tokens", limit=source.vocabulary_size),),
        keywords=("input_ids", "decoder_input_ids"),
    )


def _image_classifier(
    name: str, config: Any, builder: Callable[[], nn.Module]
) -> ModelSource:
    size = getattr(config, "image_size", None) or DEFAULT_IMAGE_SIZE
    height, width = size if isinstance(size, list | tuple) else (size, size)
    shape = (getattr(config, "num_channels", 3), height, width)
    return ModelSource(name, "images", builder, sample_shape=shape, config=config)


def _build_transformer(auto_class: Any, config: Any) -> nn.Module:
    model_class = _model_class(auto_class, config)
    config.architectures = [
        model_class.__name__
    ]  # transformers looks here where a type has several classes
    model: nn.Module = auto_class.from_config(
        config,
        attn_implementation=_attention(model_class),
        dtype=torch.get_default_dtype(),
    ).train()
    follow_local_heads(model)
    take_split_tensors(model)
    return model


def _model_class(auto_class: Any, config: Any) -> Any:
    """The class that is built: of several, the one that the configuration asks for, else the first."""
    found = auto_class._model_mapping[type(config)]
    if not isinstance(found, tuple):
        return found
    asked = config.architectures or ()
    return next((each for each in found if each.__name__ in asked), found[0])


def _attention(model_class: Any) -> str:
    """torch's fused kernels, or matrix products for models whose attention those lack (soft caps, sinks)."""
    return "sdpa" if model_class._supports_sdpa else "eager"


def _try_building(builder: Any, where: str) -> None:
    try:
        with torch.device("meta"):
            builder()
    except (
        Exception
    ) as error:  # any: the settings are the user's, the code is transformers'
        raise DocumentError(
            f"transformers cannot build the model: {first_line(error)}",
            field=where,
            hint="correct the configuration.",
        ) from error


def from_callable(reference: str) -> ModelSource:
    """The model that ``package.module:callable`` returns.

    Raises:
        DocumentError: the module cannot be imported, has no such callable, or the callable fails or returns neither a
            module nor (module, example inputs).
        UnsupportedError: the inputs cannot be told from the module, or have their samples in another dimension than 0.
    """
    function = load_callable(reference, field=reference)
    with torch.device("meta"):
        module, example = _call(function, reference)
        again, _ = _call(function, reference)
    if again is module:
        raise DocumentError(
            "returns the same module at every call.",
            field=reference,
            hint="build a new module in the callable.",
        )
    if any(not parameter.is_meta for parameter in module.parameters()):
        raise DocumentError(
            "puts parameters on a device of its own choice.",
            field=reference,
            hint="build on torch's default device: pass no device= and do not call .to() or .cuda().",
        )
    source = _describe(
        reference, module, example, partial(_build_from, function, reference)
    )
    if source.config is None:
        tokens = source.longest_sequence or _TOKENS
        inputs = partial(source.example_inputs, sequence_length=tokens, device="meta")
        check_samples_first(reference, again.train(), inputs, source.keywords)
    return source


def _call(function: Any, reference: str) -> tuple[nn.Module, Example]:
    try:
        result = function()
    except (Exception, SystemExit) as error:  # any: it is the user's code
        raise DocumentError(
            f"the callable failed: {first_line(error)}",
            field=reference,
            hint="make it run without arguments.",
        ) from error
    module, example = (
        result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    )
    example = tuple(example) if isinstance(example, list) else example
    if not isinstance(module, nn.Module) or not _is_example(example):
        raise DocumentError(
            f"the callable returned {type(result).__name__}.",
            field=reference,
            hint="return an nn.Module, or (nn.Module, example inputs: a tensor, or a tuple or dict of tensors).",
        )
    for part in (
        module.modules()
    ):  # an encoder-decoder's halves have configurations of their own
        config = getattr(part, "config", None)
        if getattr(config, "use_cache", False) is True:
            config.use_cache = False  # type: ignore[union-attr] # training reads none, and recomputation fills it twice
    return module, example


def _is_example(value: Any) -> TypeGuard[Example]:
    parts = (
        value.values()
        if isinstance(value, dict)
        else value
        if isinstance(value, tuple)
        else [value]
    )
    return value is None or (
        len(parts) > 0
        and all(isinstance(part, Tensor) and part.dim() > 0 for part in parts)
    )


def _build_from(function: Any, reference: str) -> nn.Module:
    model = _call(function, reference)[0].train()
    follow_local_heads(model)
    take_split_tensors(model)
    return model


def _describe(
    name: str, module: nn.Module, example: Example, builder: Any
) -> ModelSource:
    config = getattr(module, "config", None)
    if example is None and hasattr(module, "base_model") and config is not None:
        known = [task for task in _tasks() if config.model_type in task.class_names]
        able = [
            task
            for task in known
            if type(module).__name__ in _class_names(task, config)
        ]
        return (
            able[0].describe(name, config, builder)
            if able
            else _language_model(name, config, builder)
        )
    first = _first_parametric(module)
    if example is not None:
        return _describe_example(name, module, example, builder)
    if isinstance(first, nn.Embedding):
        return ModelSource(
            name, "tokens", builder, vocabulary_size=first.num_embeddings
        )
    if isinstance(first, nn.Linear):
        return ModelSource(name, "features", builder, sample_shape=(first.in_features,))
    raise UnsupportedError(
        "what the model takes cannot be told from its first layer.",
        field=name,
        hint="return (nn.Module, example inputs): a tensor, or a tuple or dict of tensors.",
    )


def _describe_example(
    name: str, module: nn.Module, example: Example, builder: Any
) -> ModelSource:
    keywords = tuple(example) if isinstance(example, dict) else ()
    values = tuple(example.values()) if isinstance(example, dict) else example
    tensors = values if isinstance(values, tuple) else (values,)
    given = [tensor for tensor in tensors if tensor is not None]
    first, *further = [_describe_tensor(module, tensor) for tensor in given]
    longest = given[0].shape[1] if given and first.kind == "tokens" else 0
    # An encoder-decoder's target may have a length of its own, whatever the source's is.
    further = [
        replace(each, sample_shape=tuple(tensor.shape[1:]))
        if each.kind == "tokens" and tensor.shape[1] != longest
        else each
        for each, tensor in zip(further, given[1:], strict=True)
    ]
    return ModelSource(
        name,
        first.kind,
        builder,
        sample_shape=first.sample_shape,
        vocabulary_size=first.limit,
        longest_sequence=longest,
        further_inputs=tuple(further),
        keywords=keywords,
    )


def _describe_tensor(module: nn.Module, tensor: Tensor) -> ModelInput:
    """What an example says: (micro-batch, sequence) whole numbers are token ids, others indices.

    An example on meta has no values, so whole numbers stay below the size of the module's smallest table, which every
    one of its tables holds; zero where it has none.
    """
    shape = tuple(tensor.shape[1:])
    if tensor.is_floating_point():
        return ModelInput("images" if len(shape) == 3 else "features", shape)
    tables = [
        part.num_embeddings
        for part in module.modules()
        if isinstance(part, nn.Embedding)
    ]
    if len(shape) == 1 and tables:
        return ModelInput("tokens", limit=_vocabulary(module, min(tables)))
    return ModelInput("indices", shape, min(tables, default=1))


def _vocabulary(module: nn.Module, smallest: int) -> int:
    """Ids go to the first table; where there are others (positions), the first still is the one of the ids."""
    first = _first_parametric(module)
    return first.num_embeddings if isinstance(first, nn.Embedding) else smallest


def _first_parametric(module: nn.Module) -> nn.Module | None:
    """The first module with parameters of its own, in the order of registration."""
    owners = (
        part
        for part in module.modules()
        if next(part.parameters(recurse=False), None) is not None
    )
    return next(owners, None)
