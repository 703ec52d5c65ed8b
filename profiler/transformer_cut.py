"""Cut a Hugging Face transformer, found from its module tree and one run on meta tensors: no list per model.

The one `ModuleList` of repeated blocks gives the block layers; what runs before the first block is the layer
``embedding``, what runs after the last is the layer ``head``:

    input ids -> [embedding] -> hidden -> [block 0] -> hidden -> ... -> [block n-1] -> hidden -> [head] -> logits

A stage is the model itself. Blocks of other stages are replaced by `AbsentBlock`, other modules by `Absent`, so that
the model's own code still prepares what all blocks share (masks, rotary embeddings). The hidden tensor enters and
leaves at the block boundary [1], past whatever the model's code did to `inputs_embeds` before (scaling, dropout).
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard
from unittest import mock

import torch
from torch import Tensor, nn

from planner.errors import UnsupportedError
from planner.profiler.cut import (
    CutLayer,
    LayerCut,
    TensorChain,
    detachable,
    find_shared_parameters,
)
from planner.profiler.kinds import name_kinds, signature


def cut_transformer(model: Any, inputs: Tensor) -> LayerCut:
    """The layers of a transformers model for language modelling.

    Args:
        model: a `PreTrainedModel` on the meta device.
        inputs: meta token ids of shape (batch, sequence).

    Raises:
        UnsupportedError: the model is no chain of blocks that hand on one hidden tensor.
    """
    blocks_name = find_blocks(model)
    blocks = list(model.get_submodule(blocks_name).children())
    before, after, seen = _trace(model, blocks_name, inputs)
    chain = TransformerChain(blocks_name, len(blocks), before, after, seen.places)
    assert seen.hidden is not None
    _check_stages(model, chain, seen.hidden)
    marks = zip(map(signature, blocks), seen.carry_gradients, strict=True)
    kinds = name_kinds(marks, (type(block).__name__ for block in blocks))
    made = (
        *seen.carry_gradients[1:],
        seen.hidden is not None and seen.hidden.requires_grad,
    )
    layers = (
        CutLayer("embedding", "embedding", before, recomputable=False),
        *(
            CutLayer(
                f"{blocks_name}.{index}",
                kind,
                (f"{blocks_name}.{index}",),
                recomputable=made[index],
            )
            for index, kind in enumerate(kinds)
        ),
        CutLayer("head", "head", after, recomputable=False),
    )
    return LayerCut(layers, find_shared_parameters(model, layers), chain)


def find_blocks(model: Any) -> str:
    """Qualified name of the list of repeated blocks."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise _refusal(
            model, "has an encoder and a decoder, so its layers are no single chain"
        )
    lists = [
        name for name, part in model.named_modules() if isinstance(part, nn.ModuleList)
    ]
    outermost = [
        name
        for name in lists
        if not any(name.startswith(f"{other}.") for other in lists)
    ]
    layers = getattr(model.config, "num_hidden_layers", None)
    found = [name for name in outermost if len(model.get_submodule(name)) == layers]
    if len(found) != 1:
        raise _refusal(
            model,
            f"has {len(found)} lists of num_hidden_layers({layers}) blocks instead of one",
        )
    return str(found[0])


def _refusal(model: nn.Module, reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"{type(model).__name__} {reason}.",
        field="model",
        hint="use a causal or masked language model built from one list of blocks, or write it as nn.Sequential.",
    )


@contextmanager
def meta_friendly() -> Iterator[None]:
    """Within, transformers models run on meta tensors: the two places that read values of the ids are answered, and
    experts multiply and LSTM layers run by shapes alone (`planner.profiler.experts`, `planner.profiler.recurrent`).

    Ids that are neither packed nor padded are what training on full sequences gives. Where nobody has imported
    transformers the model is not of it, and nothing is: that takes two seconds, on every rank.
    """
    from planner.profiler.recurrent import fused_lstm

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch._VF, "lstm", fused_lstm))
        for owner, name, answer in (
            _answers() if "transformers.modeling_utils" in sys.modules else ()
        ):
            stack.enter_context(mock.patch.object(owner, name, answer))
        stack.enter_context(causal_as_told())
        yield


def _answers() -> tuple[tuple[Any, str, Any], ...]:
    """What stands in for what, within transformers."""
    from transformers import PreTrainedModel, masking_utils
    from transformers.integrations import moe

    from planner.profiler.experts import grouped_product

    return (
        (masking_utils, "find_packed_sequence_indices", _nothing),
        (PreTrainedModel, "warn_if_padding_and_no_attention_mask", _nothing),
        (moe, "_grouped_mm", grouped_product),
    )


def friendly_to(module: nn.Module) -> AbstractContextManager[Any]:
    """`meta_friendly` for a layer of a transformers model; other layers do not need transformers."""
    return meta_friendly() if hasattr(module, "config") else causal_as_told()


def causal_as_told() -> AbstractContextManager[Any]:
    """Within, torch's own encoders and decoders do not look whether their mask is the causal one, which would only
    choose another kernel for the same numbers."""
    return mock.patch.object(
        torch.nn.modules.transformer, "_detect_is_causal_mask", _is_told
    )


def _is_told(
    mask: Tensor | None, is_causal: bool | None = None, size: int | None = None
) -> bool:
    return is_causal is True


def _nothing(*arguments: Any) -> None:
    """The answer to whether ids are packed or padded."""


@contextmanager
def _hooks() -> Iterator[list[Any]]:
    """Hooks appended to the list are removed at the end."""
    handles: list[Any] = []
    try:
        yield handles
    finally:
        for handle in handles:
            handle.remove()


def _trace(
    model: nn.Module, blocks_name: str, inputs: Tensor
) -> tuple[tuple[str, ...], tuple[str, ...], _Record]:
    """Names of the modules that run before the first block, and after the last; and what else the run showed."""
    blocks = list(model.get_submodule(blocks_name).children())
    outside = {
        name: part
        for name, part in model.named_modules()
        if not f"{name}.".startswith(f"{blocks_name}.")
    }
    record = _Record()
    with _hooks() as handles, meta_friendly():
        for name, part in outside.items():
            if _owns_parameters(part) or not list(part.children()):
                handles.append(
                    part.register_forward_hook(partial(record.module_ran, name))
                )
        for block in blocks:
            handles.append(
                block.register_forward_pre_hook(record.block_starts, with_kwargs=True)
            )
            handles.append(block.register_forward_hook(record.block_ends))
        drawn = torch.get_rng_state()
        try:
            model(inputs)
        except Exception as error:  # any: it is the model's code
            raise _refusal(
                model, f"does not run on meta tensors: {_first_line(error)}"
            ) from error
    if not torch.equal(drawn, torch.get_rng_state()):  # on meta nothing else draws
        record.broken = (
            "lets random numbers tell what it runs, as those that leave out blocks do"
        )
    if record.broken:
        raise _refusal(model, record.broken)
    if len(record.blocks) != len(blocks):
        raise _refusal(model, f"runs {len(record.blocks)} of its {len(blocks)} blocks")
    idle = [
        name
        for name, part in outside.items()
        if _owns_parameters(part) and name not in record.ran
    ]
    if idle:
        raise _refusal(
            model, f"never runs its module {idle[0]!r}, so no stage would train it"
        )
    before, after = (
        _collapse(names, outside, blocks_name)
        for names in (record.before, record.after)
    )
    return before, after, record


def _check_stages(model: Any, chain: TransformerChain, hidden: Tensor) -> None:
    """The first block alone and the head alone run, leave what they receive as it is, and can be initialised.

    Raises:
        UnsupportedError: the code around the blocks asks for more than it finds in a stage.
    """
    for start in (1, chain.blocks + 1):
        received = torch.empty_like(hidden)
        try:
            stage: Any = chain.stage(copy.deepcopy(model), start, start + 1)
            with meta_friendly(), torch.no_grad():
                stage(received)
                for part in stage.modules():
                    stage._init_weights(part)
        except Exception as error:  # any: it is the model's code
            raise _refusal(
                model, f"does not run in stages: {_first_line(error)}"
            ) from error
        if received._version > 0:
            raise _refusal(model, "changes in place what it takes for embeddings")


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _owns_parameters(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


class _Record:
    """What one run of the model showed."""

    def __init__(self) -> None:
        self.before: list[str] = []
        self.after: list[str] = []
        self.blocks: list[nn.Module] = []
        self.carry_gradients: list[bool] = []
        """Of the hidden tensor before every block: not where all that made it is frozen."""
        self.ran: set[str] = set()
        self.hidden: Tensor | None = None
        self.places: int | None = None
        """Of the tuples that blocks return, the hidden tensor first; None: they return that alone."""
        self.broken = ""

    def module_ran(
        self, name: str, module: nn.Module, arguments: tuple[Any, ...], output: Any
    ) -> None:
        first_run = name not in self.ran
        self.ran.add(name)
        # Modules without parameters are shared by all stages (rotary embeddings), unless they work on the hidden
        # tensor itself (dropout).
        if first_run and (_owns_parameters(module) or _keeps_shape(arguments, output)):
            (self.after if self.blocks else self.before).append(name)

    def block_starts(
        self, module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> None:
        hidden = hidden_argument(arguments, keywords)
        others = [
            value for value in _tensors((arguments, keywords)) if value is not hidden
        ]
        if any(value.requires_grad for value in others):
            self.broken = "hands its blocks more than one trained tensor"
        if self.blocks and hidden is not self.hidden:
            self.broken = "changes the hidden tensor between its blocks"
        self.blocks.append(module)
        self.carry_gradients.append(hidden.requires_grad)

    def block_ends(
        self, module: nn.Module, arguments: tuple[Any, ...], output: Any
    ) -> None:
        self.hidden = hidden_output(output)
        self.places = len(output) if isinstance(output, tuple) else None


def _keeps_shape(arguments: tuple[Any, ...], output: Any) -> bool:
    first = arguments[0] if arguments else None
    return (
        _is_hidden(first) and _is_hidden(output) and bool(first.shape == output.shape)
    )


def _is_hidden(value: Any) -> TypeGuard[Tensor]:
    """A floating-point tensor of shape (batch, sequence, hidden)."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() == 3


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def hidden_argument(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Tensor:
    """The hidden tensor among the arguments of a block: the first, by the convention of transformers."""
    hidden: Tensor = arguments[0] if arguments else keywords["hidden_states"]
    return hidden


def hidden_output(output: Any) -> Tensor:
    """The hidden tensor that a block returns, alone or as the first of a tuple."""
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


def _collapse(
    names: list[str], outside: dict[str, nn.Module], blocks_name: str
) -> tuple[str, ...]:
    """The same modules by as few names as possible: a parent stands for its children when all of them belong."""
    foreign = {name for name, part in outside.items() if _owns_parameters(part)} - set(
        names
    ) | {blocks_name}
    tops = []
    for name in names:
        parent = name.rpartition(".")[0]
        while parent and not any(
            f"{other}.".startswith(f"{parent}.") for other in foreign
        ):
            name, parent = parent, parent.rpartition(".")[0]
        tops.append(name)
    return tuple(dict.fromkeys(tops))


class Absent(nn.Module):
    """Stands for a module of another stage: hands on the hidden tensor, or nothing that would change it."""

    def forward(self, *arguments: Any, **keywords: Any) -> Tensor:
        """The hidden tensor among the arguments; else (a position embedding given indices) a zero that broadcasts."""
        tensors = list(_tensors((arguments, keywords)))
        for value in tensors:
            if _is_hidden(value):
                return value
        return torch.zeros((), device=tensors[0].device)


class AbsentBlock(nn.Module):
    """Stands for a block of another stage: hands on the hidden tensor, in the form in which blocks do.

    Args:
        places: of the tuples that they return; None: they return the tensor alone.
    """

    def __init__(self, block: nn.Module, places: int | None) -> None:
        super().__init__()
        # The model's loop over its blocks may read settings such as `attention_type`.
        settings = {
            key: value
            for key, value in vars(block).items()
            if isinstance(value, bool | int | float | str)
        }
        self.__dict__.update(
            {key: value for key, value in settings.items() if key not in vars(self)}
        )
        self._places = places

    def forward(
        self, *arguments: Any, **keywords: Any
    ) -> Tensor | tuple[Tensor | None, ...]:
        """The hidden tensor itself."""
        return self.given(hidden_argument(arguments, keywords))

    def given(self, hidden: Tensor) -> Tensor | tuple[Tensor | None, ...]:
        """What a block would return with this hidden tensor."""
        return (
            hidden if self._places is None else (hidden, *[None] * (self._places - 1))
        )


class _Boundary:
    """Where the hidden tensor enters and leaves a stage while its forward runs."""

    def __init__(self) -> None:
        self.received: Tensor | None = None
        self.sent: Tensor | None = None

    def enter_before(
        self, module: nn.Module, arguments: Any, keywords: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Pre-hook: the block works on the received tensor."""
        if arguments:
            return (self.received, *arguments[1:]), keywords
        return arguments, {**keywords, "hidden_states": self.received}

    def enter_after(self, module: AbsentBlock, arguments: Any, output: Any) -> Any:
        """Hook of the absent block before: it returns the received tensor."""
        return None if self.received is None else module.given(self.received)

    def leave_before(self, module: nn.Module, arguments: Any, keywords: Any) -> None:
        """Pre-hook of the block after: what it gets is sent."""
        self.sent = hidden_argument(arguments, keywords)

    def leave_after(self, module: nn.Module, arguments: Any, output: Any) -> None:
        """Hook of the last block: what it returns is sent."""
        self.sent = hidden_output(output)


@dataclass(frozen=True, slots=True)
class TransformerChain(TensorChain):
    """Layer 0 is the embedding, layers 1..blocks are the blocks, layer blocks+1 is the head."""

    blocks_name: str
    blocks: int
    before: tuple[str, ...]
    after: tuple[str, ...]
    places: int | None = None
    """Of the tuples that blocks return; None: they return the hidden tensor alone."""
    keeps_tree = True

    def stage(self, model: nn.Module, start: int, stop: int) -> nn.Module:
        """The model itself, other stages' modules replaced and its forward taking and giving one tensor."""
        first, last = start == 0, stop == self.blocks + 2
        self._take_away(model, start, stop)
        boundary = _Boundary()
        blocks = list(model.get_submodule(self.blocks_name).children())
        if not first:
            self._enter(blocks, start - 1, boundary)
        if not last:
            self._leave(blocks, stop - 1, boundary)
        run = model.forward if last else model.base_model.forward  # type: ignore[union-attr]
        model.forward = partial(_forward, run, boundary, first, last)
        return model

    def _take_away(self, model: nn.Module, start: int, stop: int) -> None:
        for name in (self.before if start > 0 else ()) + (
            self.after if stop < self.blocks + 2 else ()
        ):
            _replace(model, name, Absent())
        self.keep_blocks(
            model, [index for index in range(self.blocks) if start <= index + 1 < stop]
        )

    def keep_blocks(self, model: nn.Module, kept: Collection[int]) -> None:
        """Take all other blocks out of a whole model, in place."""
        for index in set(range(self.blocks)) - set(kept):
            name = f"{self.blocks_name}.{index}"
            _replace(model, name, AbsentBlock(model.get_submodule(name), self.places))

    @staticmethod
    def _enter(blocks: list[nn.Module], index: int, boundary: _Boundary) -> None:
        """[1] Before block `index`."""
        if index == 0:
            blocks[0].register_forward_pre_hook(boundary.enter_before, with_kwargs=True)
        else:
            blocks[index - 1].register_forward_hook(boundary.enter_after)

    @staticmethod
    def _leave(blocks: list[nn.Module], index: int, boundary: _Boundary) -> None:
        """[1] Before block `index`."""
        if index == 0:
            blocks[0].register_forward_pre_hook(boundary.leave_before, with_kwargs=True)
        else:
            blocks[index - 1].register_forward_hook(boundary.leave_after)

    def outputs(self, model: nn.Module, inputs: Tensor) -> tuple[Tensor, ...]:
        """One run of the whole model, watching its block boundaries."""
        blocks = list(model.get_submodule(self.blocks_name).children())
        hidden: list[Tensor] = []
        with _hooks() as handles, meta_friendly() if inputs.is_meta else _hooks():
            for block in blocks:
                handles.append(
                    block.register_forward_pre_hook(
                        lambda module, arguments, keywords: hidden.append(
                            hidden_argument(arguments, keywords)
                        ),
                        with_kwargs=True,
                    )
                )
            handles.append(
                blocks[-1].register_forward_hook(
                    lambda module, _, output: hidden.append(hidden_output(output))
                )
            )
            logits = model(inputs).logits
        return (*hidden, logits)


def _forward(
    run: Any,
    boundary: _Boundary,
    first: bool,
    last: bool,
    inputs: Tensor,
    past: Any = None,
) -> Tensor:
    """The stage's forward. `inputs`: ids (batch, sequence) or hidden (batch, sequence, hidden); `past`: keys and values
    of tokens before them (`planner.profiler.sequence.PastKeys`)."""
    boundary.received = None if first else inputs
    # The model's code ahead of the blocks sees the hidden tensor only to learn its shape, type and device.
    arguments = {"input_ids": inputs} if first else {"inputs_embeds": inputs.detach()}
    output = run(
        **arguments,
        **({} if past is None else {"past_key_values": past, "use_cache": True}),
    )
    result: Any = output.logits if last else boundary.sent
    boundary.received = boundary.sent = None
    return detachable(result)


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    model.get_submodule(parent)._modules[child] = module
