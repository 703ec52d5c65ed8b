"""Counted activation bytes against what autograd really keeps on the CPU, to the byte, in every recompute mode."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planner.profiler import attention
from planner.profiler.count import Counter
from planner.profiler.cut import Recompute
from planner.profiler.models import ModelSource, load_model
from planner.profiler.watch import FusedAttention
from planner.spec.profile import RecomputeMode
from planner.spec.recompute import EXECUTED, SAVED
from tests.profiler.conftest import TINY

BATCH, TOKENS = 3, 20
RANDOM_STATE_BYTES = 24
"""Seed and offset that the CUDA attention kernel keeps; the CPU kernel has none."""
MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}
T5 = {
    "model_type": "t5",
    "architectures": ["T5ForConditionalGeneration"],
    "vocab_size": 96,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
RESNET50 = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [16, 32, 48, 64],
    "depths": [3, 4, 6, 3],
    "layer_type": "bottleneck",
    "image_size": 32,
}


class _Live(TorchDispatchMode):
    """Storages that operations make, for as long as anything holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, weakref.ref] = {}
        self.earlier: list[Any] = []

    def forget(self) -> None:
        """What was made until now belongs to others."""
        self.earlier += [
            storage for each in self.made.values() if (storage := each()) is not None
        ]
        self.made.clear()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor):
                self.made[id(leaf.untyped_storage())] = weakref.ref(
                    leaf.untyped_storage()
                )
        return output

    def bytes_without(self, known: set[int]) -> int:
        """Of all storages that live, but for these."""
        gc.collect()
        live = {
            id(storage): storage
            for each in self.made.values()
            if (storage := each()) is not None
        }
        return sum(
            storage.nbytes()
            for key, storage in live.items()
            if key not in known | set(map(id, self.earlier))
        )


def _real_inputs(source: ModelSource, index: int) -> tuple[Tensor, ...]:
    """Real tensors of the shapes that a layer takes."""
    takes = source.borders(BATCH, TOKENS if source.input_kind == "tokens" else 0).takes[
        index
    ]
    return tuple(
        torch.randn(each.shape, requires_grad=each.requires_grad)
        if each.is_floating_point()
        else torch.zeros(each.shape, dtype=each.dtype)
        for each in takes
    )


def kept_bytes_of(
    source: ModelSource,
    index: int,
    mode: RecomputeMode,
    change: Callable[[nn.Module], None] = lambda stage: None,
) -> int:
    """What lives between forward and backward of one real layer: all storages but parameters, buffers and output.

    Args:
        change: of the layer, before it runs.
    """
    torch.manual_seed(0)
    stage = source.cut().layer(source.build(), index, recompute=mode)
    change(stage)
    inputs = _real_inputs(source, index)
    if hasattr(stage.__dict__.get("forward"), "prepare"):
        stage.__dict__["forward"].prepare(*inputs)
    live = _Live()
    parts = list(source.cut().parts(stage, index).values())
    parts[0].register_forward_pre_hook(
        lambda *_: live.forget()
    )  # what runs ahead is shared by the layers of a stage
    with live:
        output = stage(*inputs)
    outputs = output if isinstance(output, tuple) else (output,)
    assert any(each.requires_grad for each in outputs), (
        "nothing would be kept for a backward"
    )
    owned = (*stage.parameters(), *stage.buffers(), *outputs, *inputs)
    return live.bytes_without({id(each.untyped_storage()) for each in owned})


def _load(name: str, folder: Path) -> ModelSource:
    configs = {
        **{family: {"model_type": family, **config} for family, config in TINY.items()}
    }
    configs |= {"mixtral": MIXTRAL, "t5": T5, "resnet-50": RESNET50}
    if name == "unet":
        return load_model("tests.profiler.graphs:unet")
    path = folder / f"{name}.json"
    path.write_text(json.dumps(configs[name]))
    return load_model(str(path))


@pytest.mark.parametrize("mode", EXECUTED[1:])
@pytest.mark.parametrize(
    "name", ["gpt2", "llama", "bert", "resnet-50", "unet", "mixtral"]
)
def test_recomputed_layers_keep_what_is_counted(
    name: str, mode: RecomputeMode, tmp_path: Path
):
    """Every kind of layer that recomputes keeps, besides its input, the counted bytes on a real run."""
    source = _load(name, tmp_path)
    counter = Counter(source, "fp32")
    size = (BATCH, TOKENS if source.input_kind == "tokens" else 0)
    checked = 0
    for kind, index in counter.representatives.items():
        counted = counter.count(kind, *size)
        if mode not in counted.modes:
            continue
        attentions = (
            sum(kernel.kind == "attention" for kernel in counted.kernels)
            if _saves_attention(mode)
            else 0
        )
        kept = (
            counted.modes[mode].kept_bytes
            - counted.input_bytes
            - RANDOM_STATE_BYTES * attentions
        )
        assert kept == kept_bytes_of(source, index, mode), (kind, mode)
        checked += 1
    # Without attention, a mode about it is the same as another.
    is_about_attention = mode in SAVED and mode != "selective"
    has_attention = name not in ("resnet-50", "unet")
    assert bool(checked) == (has_attention or not is_about_attention)


def saved_by_model(
    source: ModelSource, inputs: tuple[Tensor, ...] | dict[str, Tensor]
) -> int:
    """What autograd keeps after one forward of the whole model and its loss: every storage once, parameters apart."""
    model = source.build()
    saved: list[weakref.ref] = []
    owned = {
        id(value.untyped_storage()) for value in (*model.parameters(), *model.buffers())
    }

    def pack(tensor: Tensor) -> Tensor:
        saved.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
        logits = getattr(output, "logits", output)
        targets = torch.zeros(logits.shape[:-1], dtype=torch.long)
        loss = cross_entropy(logits.flatten(0, -2).float(), targets.flatten())
    owned.add(id(targets.untyped_storage()))
    storages = {
        id(storage): storage for each in saved if (storage := each()) is not None
    }
    assert loss.requires_grad
    return sum(
        storage.nbytes() for key, storage in storages.items() if key not in owned
    )


def _saves_attention(mode: RecomputeMode) -> bool:
    """Return whether the results of attention are saved."""
    return mode == "none" or "attention" in SAVED.get(mode, ())


def _counted_whole(
    counter: Counter, mode: RecomputeMode, size: tuple[int, int]
) -> tuple[int, Recompute]:
    """Counted bytes of all layers, each in the mode if it has it, and the modes; without what only CUDA keeps."""
    total, modes = 0, {}
    for index, layer in enumerate(counter.layers):
        count = counter.count(layer.kind, *size)
        modes[index] = mode if mode in count.modes else "none"
        attentions = (
            sum(kernel.kind == "attention" for kernel in count.kernels)
            if _saves_attention(modes[index])
            else 0
        )
        total += count.modes[modes[index]].kept_bytes - RANDOM_STATE_BYTES * attentions
    return total, modes


@pytest.mark.parametrize(
    "name", ["gpt2", "llama", "bert", "catalogue", "unet", "mixtral"]
)
def test_layers_add_up_to_what_the_whole_model_keeps(name: str, tmp_path: Path):
    """ResNet-50 as it is, long skips, rotary tables and experts: the sum over the layers is what one real forward
    keeps."""
    source = load_model("resnet-50") if name == "catalogue" else _load(name, tmp_path)
    size = (BATCH, TOKENS if source.input_kind == "tokens" else 0)
    counted, _ = _counted_whole(Counter(source, "fp32"), "none", size)
    assert counted == saved_by_model(source, source.example_inputs(*size))


@pytest.mark.parametrize(("name", "windowed"), [("gemma3", 2), ("mistral", 3)])
def test_windowed_layers_keep_their_mask(name: str, windowed: int, tmp_path: Path):
    """A sliding window reaches attention as a mask: each such layer keeps it as a bias of its own, one number per pair
    of tokens, as a real forward does; below the window's length nothing is kept, and nothing but the causal flag is
    handed on. With a mask the kernel is given all pairs, so its FLOPs are those of full attention; causal ones half."""
    source = _load(name, tmp_path)
    counter = Counter(source, "fp32")
    size = (BATCH, TOKENS)
    kept = sum(
        counter.count(each.kind, *size).modes["none"].kept_bytes
        for each in counter.layers
    )
    flash = len(counter.layers) - 2 - windowed
    assert kept - RANDOM_STATE_BYTES * flash == saved_by_model(
        source, source.example_inputs(*size)
    )
    for tokens in (3, TOKENS):  # shorter than the window, and longer
        blocks = [
            counter.count(each.kind, BATCH, tokens) for each in counter.layers[1:-1]
        ]
        attentions = [
            kernel.flops
            for block in blocks
            for kernel in block.kernels
            if kernel.kind == "attention"
        ]
        whole = 4 * BATCH * 4 * tokens * tokens * 8
        masked = windowed if tokens == TOKENS else 0
        expected = [whole] * masked + [whole // 2] * (3 - masked)
        assert sorted(attentions, reverse=True) == expected


def test_a_window_costs_the_bytes_of_its_mask(tmp_path: Path):
    """A windowed layer keeps, besides what its full twin does, a bias of 4 bytes per pair of tokens and sample, and
    keys and values of all heads, as attention with a mask takes no grouped ones; it lacks flash's random state."""
    counter = Counter(_load("gemma3", tmp_path), "fp32")
    windowed, full = (
        counter.count(counter.layers[at].kind, BATCH, TOKENS).modes["none"].kept_bytes
        for at in (1, 2)
    )
    bias, repeated = 4 * BATCH * TOKENS * TOKENS, 2 * BATCH * TOKENS * (4 - 2) * 8 * 4
    assert windowed - full == bias + repeated - RANDOM_STATE_BYTES


@pytest.mark.parametrize("mode", EXECUTED[1:])
@pytest.mark.parametrize(
    "name", ["gpt2", "llama", "bert", "resnet-50", "unet", "mixtral"]
)
def test_recomputed_layers_add_up_to_what_the_whole_model_keeps(
    name: str, mode: RecomputeMode, tmp_path: Path
):
    """With recomputation, too: nothing else lives between forward and backward, but inputs and outputs of the model,
    and the position ids (8 bytes per token) that torch's checkpoint holds for the blocks of a model with rotary
    tables. A skip that two recomputing layers take counts in both, since either may stand in a stage of its own or not
    recompute."""
    source = _load(name, tmp_path)
    size = (BATCH, TOKENS if source.input_kind == "tokens" else 0)
    counted, modes = _counted_whole(Counter(source, "fp32"), mode, size)
    if mode not in modes.values():
        pytest.skip("no layer has attention, so that the mode is another one's")
    if name == "unet":  # the only one of them with skips
        counted -= (
            sum(edge.bytes for edge in source.edges(size[1], torch.float32)) * BATCH
        )
    model = source.cut().stage(source.build(), 0, len(modes), recompute=modes)
    inputs = source.example_inputs(*size)
    if hasattr(model.__dict__.get("forward"), "prepare"):
        model.__dict__["forward"].prepare(*inputs)
    live = _Live()
    with live:
        logits = model(*inputs)
        targets = torch.zeros(logits.shape[:-1], dtype=torch.long)
        loss = cross_entropy(logits.flatten(0, -2), targets.flatten())
    owned = (*model.parameters(), *model.buffers(), *inputs, logits, targets, loss)
    kept = live.bytes_without({id(each.untyped_storage()) for each in owned})
    positions = 8 * TOKENS if name in ("llama", "mixtral") else 0
    assert counted + positions == kept + sum(each.nbytes for each in inputs)


def test_an_encoders_output_and_bias_count_once(tmp_path: Path):
    """T5 with the attention kernel of an accelerator: the encoder's output, which all blocks of the decoder keep, and
    the position bias that blocks hand on count once. The kernel is given by shapes: what autograd keeps is the same."""
    source = _load("t5", tmp_path)
    size = (BATCH, TOKENS)
    counter = Counter(source, "fp32")
    counted = sum(
        counter.count(each.kind, *size).modes["none"].kept_bytes
        for each in counter.layers
    )
    inputs = dict(zip(source.keywords, source.example_inputs(*size), strict=True))
    with torch.library._scoped_library("planner", "FRAGMENT") as library:
        library.impl("attention", attention._attention, "CPU")
        with FusedAttention():
            assert counted == saved_by_model(source, inputs)


class _Megatron(nn.Module):
    """The transformer layer of Korthikanti et al. 2022, figure 2: attention written out, dropout in three places."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """(batch, sequence, width) -> the same."""
        batch, length, width = hidden.shape
        projected = self.qkv(self.norm1(hidden)).view(batch, length, self.heads, -1)
        query, key, value = projected.transpose(1, 2).chunk(3, -1)
        scores = torch.softmax(query @ key.transpose(2, 3), dim=-1)
        attention = _dropout(scores) @ value
        hidden = hidden + _dropout(
            self.projection(attention.transpose(1, 2).reshape(batch, length, width))
        )
        return hidden + _dropout(
            self.down(nn.functional.gelu(self.up(self.norm2(hidden))))
        )


def _dropout(values: Tensor) -> Tensor:
    """The kernel of an accelerator, which keeps a mask of one byte per element."""
    dropped: Tensor = torch.native_dropout(values, 0.1, True)[0]
    return dropped


def korthikanti() -> nn.Sequential:
    """A layer between two others, so that its input is kept and its output handed on."""
    width, heads = 128, 4
    return nn.Sequential(
        nn.Embedding(32, width),
        *(_Megatron(width, heads) for _ in range(2)),
        nn.Linear(width, 32),
    )


@pytest.mark.parametrize("tokens", [32, 128])
def test_a_transformer_layer_keeps_what_korthikanti_derived(tokens: int):
    """s b h (34 + 5 a s / h) bytes in 16 bits, their equation (1), within 2 %."""
    source = load_model("tests.profiler.test_saved:korthikanti")
    count = Counter(source, "bf16").count("_Megatron", 2, tokens)
    formula = tokens * 2 * 128 * (34 + 5 * 4 * tokens / 128)
    assert count.modes["none"].kept_bytes == pytest.approx(formula, rel=0.02)
