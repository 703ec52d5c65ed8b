"""Counted figures against closed forms, and against what torch really does on the CPU."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from planner.errors import DocumentError
from planner.profiler.count import Counter, count, profile
from planner.profiler.models import load_model
from planner.profiler.splits import WHOLE

CALLABLES = "tests.profiler.callables"
BATCH, TOKENS = 3, 20
RANDOM_STATE_BYTES = 24
"""Seed and offset that the CUDA attention kernel keeps; the CPU kernel has none."""


def _saved_bytes(model: nn.Module, inputs: torch.Tensor, *, with_loss: bool) -> int:
    """What autograd really keeps after one forward on the CPU: every storage once, without the model's own."""
    saved: list[weakref.ref] = []
    owned = {
        id(value.untyped_storage()) for value in (*model.parameters(), *model.buffers())
    }

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(weakref.ref(tensor.untyped_storage()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(inputs)
        logits = getattr(output, "logits", output)
        if with_loss:
            targets = torch.zeros(logits.shape[:-1], dtype=torch.long)
            owned.add(id(targets.untyped_storage()))
            loss = cross_entropy(logits.flatten(0, -2).float(), targets.flatten())
            assert loss.requires_grad
        storages = {
            id(storage): storage
            for reference in saved
            if (storage := reference()) is not None
        }
        return sum(
            storage.nbytes() for key, storage in storages.items() if key not in owned
        )


@pytest.mark.parametrize(
    "family", ["gpt2", "llama", "qwen3", "gpt_neox", "opt", "bert"]
)
def test_layers_add_up_to_what_the_whole_model_keeps(family: str, write_config):
    """The sum over the layers is what one real forward of the whole model keeps, to the byte."""
    source = load_model(write_config(family))
    rows = count(source, micro_batch_size=BATCH, sequence_length=TOKENS)
    counted = sum(
        rows[layer.kind].activation_bytes - RANDOM_STATE_BYTES
        for layer in source.cut().layers
    )
    counted += 2 * RANDOM_STATE_BYTES  # embedding and head have no attention
    inputs = source.example_inputs(BATCH, TOKENS)[0]
    assert counted == _saved_bytes(source.build(), inputs, with_loss=True)


@pytest.mark.parametrize("function", ["mlp", "with_example"])
def test_sequential_layers_add_up_too(function: str):
    """In-place activations keep the layer's output: it is counted once, by the layer that takes it."""
    source = load_model(f"{CALLABLES}:{function}")
    rows = count(source, micro_batch_size=BATCH, sequence_length=0)
    inputs = source.example_inputs(BATCH, 0)[0]
    counted = sum(rows[layer.kind].activation_bytes for layer in source.cut().layers)
    assert counted == _saved_bytes(source.build(), inputs, with_loss=True)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_recomputed_layer_keeps_its_input(family: str, write_config):
    """The full row is the hidden tensor, as torch's checkpoint keeps it; all but the last matrix product runs again."""
    source = load_model(write_config(family))
    rows = count(
        source, micro_batch_size=BATCH, sequence_length=TOKENS, recompute="full"
    )
    (row,) = rows.values()
    stage = source.cut().stage(source.build(), 1, 2, recompute={1: "full"})
    hidden = torch.randn(BATCH, TOKENS, 32, requires_grad=True)
    assert (
        row.activation_bytes
        == _saved_bytes(stage, hidden, with_loss=False)
        == hidden.nbytes
    )
    width, feed = (32, 4 * 32) if family == "gpt2" else (32, 48)
    assert row.recompute_flops == row.forward_flops - 2 * BATCH * TOKENS * feed * width
    assert (
        sum(each.count * each.flops for each in row.recompute_operations)
        == row.recompute_flops
    )


def test_flops_are_those_of_torch_on_a_real_run():
    """Forward and backward FLOPs of a chain of matrix products and convolutions agree with FlopCounterMode."""
    for function in ("mlp", "with_example"):
        source = load_model(f"{CALLABLES}:{function}")
        model, inputs = source.build(), source.example_inputs(BATCH, 0)[0]
        with FlopCounterMode(display=False) as forward:
            output = model(inputs)
        with FlopCounterMode(display=False) as backward:
            output.sum().backward()
        rows = count(source, micro_batch_size=BATCH, sequence_length=0)
        layers = [rows[layer.kind] for layer in source.cut().layers]
        assert sum(row.forward_flops for row in layers) == forward.get_total_flops()
        both = sum(
            row.backward_input_flops + row.backward_weight_flops for row in layers
        )
        assert both == backward.get_total_flops()


def test_llama_block_has_the_flops_of_its_formula(write_config):
    """Matrix products cost 2 m n k, split evenly by the backward; causal attention 2 b h s^2 d, and 2.5 times that
    back."""
    row = count(
        load_model(write_config("llama")),
        micro_batch_size=BATCH,
        sequence_length=TOKENS,
    )["LlamaDecoderLayer"]
    width, feed, heads, key_value, head = 32, 48, 4, 2, 8
    weights = 2 * width * heads * head + 2 * width * key_value * head + 3 * width * feed
    products = 2 * BATCH * TOKENS * weights
    attention = 2 * BATCH * heads * TOKENS**2 * head
    assert row.forward_flops == products + attention
    assert row.backward_weight_flops == products
    assert row.backward_input_flops == products + attention * 5 // 2


def strided_convolution() -> tuple[nn.Sequential, torch.Tensor]:
    """A convolution between two layers."""
    layers = (
        nn.Conv2d(3, 4, 1),
        nn.Conv2d(4, 6, 5, stride=2, padding=2),
        nn.Flatten(),
        nn.Linear(384, 2),
    )
    return nn.Sequential(*layers), torch.empty(1, 3, 16, 16)


def test_convolution_has_the_flops_of_its_formula():
    """2 k k c o H W per sample forward, with the sizes of the output; as much for each of the two gradients."""
    source = load_model("tests.profiler.test_count:strided_convolution")
    counted = Counter(source, "fp32").count("Conv2d-2", BATCH, 0)
    flops = BATCH * 2 * 5 * 5 * 4 * 6 * 8 * 8
    assert (
        counted.forward_flops
        == counted.backward_input_flops
        == counted.backward_weight_flops
        == flops
    )
    values = BATCH * (4 * 16 * 16 + 6 * 8 * 8)
    assert sum(kernel.bytes for kernel in counted.kernels) == 4 * (
        values + 5 * 5 * 4 * 6 + 6
    )


def test_backward_bytes_of_a_linear_layer():
    """Two products and a sum, each reading its operands and writing its result, and the gradients' accumulation."""
    source = load_model(f"{CALLABLES}:mlp")
    kind = source.cut().layers[2].kind
    values, weight, bias = BATCH * 16, 16 * 16, 16
    products = 2 * (2 * values + weight)
    accumulated = 3 * (weight + bias)
    assert Counter(source, "fp32").count(kind, BATCH, 0).backward_bytes == 4 * (
        products + values + bias + accumulated
    )


def test_embedding_has_no_input_gradient(write_config):
    """Token ids have no gradient: all of the embedding's backward is for its weights."""
    rows = count(
        load_model(write_config("gpt2")), micro_batch_size=BATCH, sequence_length=TOKENS
    )
    assert rows["embedding"].backward_input_flops == 0
    head = 2 * BATCH * TOKENS * 32 * 96
    assert (rows["head"].backward_input_flops, rows["head"].backward_weight_flops) == (
        head,
        head,
    )


def test_temporary_bytes_of_a_linear_layer():
    """Above the kept input there live, at the peak, both gradients of the activations and the new one of the weight."""
    source = load_model(f"{CALLABLES}:mlp")
    counter = Counter(source, "fp32")
    kinds = [layer.kind for layer in source.cut().layers]
    row = counter.count(kinds[2], BATCH, 0).measurement(BATCH, 0, WHOLE, "none")
    activation, weight, bias = BATCH * 16 * 4, 16 * 16 * 4, 16 * 4
    assert row.activation_bytes == activation
    assert row.temporary_bytes == 2 * activation + weight + bias
    again = counter.count(kinds[2], BATCH, 0).measurement(BATCH, 0, WHOLE, "full")
    assert again.activation_bytes == activation
    assert again.temporary_bytes == row.temporary_bytes


def test_recompute_brings_the_kept_tensors_back_for_one_layer(write_config):
    """A recomputed block's temporary bytes grow by what it no longer keeps."""
    source = load_model(write_config("llama"))
    size = {"micro_batch_size": BATCH, "sequence_length": TOKENS}
    kept = count(source, **size)["LlamaDecoderLayer"]
    again = count(source, **size, recompute="full")["LlamaDecoderLayer"]
    freed = kept.activation_bytes - again.activation_bytes
    assert again.temporary_bytes == kept.temporary_bytes + freed


def test_head_counts_the_loss_in_fp32(write_config):
    """In bf16 the head keeps its input, the norm's own tensors and fp32 log-probabilities of every token."""
    source = load_model(write_config("gpt2"))
    half = count(source, micro_batch_size=BATCH, sequence_length=TOKENS, dtype="bf16")[
        "head"
    ]
    hidden, logits = BATCH * TOKENS * 32, BATCH * TOKENS * 96
    statistics = 2 * BATCH * TOKENS * 4
    weight_sum = 4
    # The final norm's input and output, its mean and deviation, the loss's log-probabilities and its weight.
    assert (
        half.activation_bytes == 2 * 2 * hidden + statistics + 4 * logits + weight_sum
    )
    assert half.output_bytes == 2 * logits
    assert (
        half.temporary_bytes >= 2 * logits + 4 * logits
    )  # the logits themselves, and the fp32 gradient


def test_operations_tell_shapes_and_bytes(write_config):
    """The forward's kernels: matrix products by shape, one fused attention, the rest by bytes moved."""
    row = count(
        load_model(write_config("llama")),
        micro_batch_size=BATCH,
        sequence_length=TOKENS,
    )["LlamaDecoderLayer"]
    products = {
        (each.m, each.n, each.k): each.count
        for each in row.operations
        if each.kind == "matmul"
    }
    rows = BATCH * TOKENS
    assert products == {
        (rows, 32, 32): 2,
        (rows, 16, 32): 2,
        (rows, 48, 32): 2,
        (rows, 32, 48): 1,
    }
    (attention,) = [each for each in row.operations if each.kind == "attention"]
    assert attention.count == 1
    assert sum(each.count * each.flops for each in row.operations) == row.forward_flops
    assert sum(each.count * each.bytes for each in row.operations) == row.forward_bytes
    square = next(
        each for each in row.operations if (each.m, each.n, each.k) == (rows, 32, 32)
    )
    assert square.bytes == 4 * (2 * rows * 32 + 32 * 32)


def test_masked_attention_is_the_memory_efficient_kernel(write_config):
    """A sliding window needs a mask, so its block runs another fused kernel, never a softmax over all scores."""
    rows = count(
        load_model(write_config("mistral")), micro_batch_size=2, sequence_length=TOKENS
    )
    operations = rows["MistralDecoderLayer"].operations
    assert sum(each.count for each in operations if each.kind == "attention") == 1
    assert sum(each.count for each in operations if each.kind == "matmul") == 7


def test_profile_counts_each_kind_once_and_is_a_valid_document(write_config):
    """Rows for every size, degree and mode; layers of one kind share them; the document survives JSON."""
    source = load_model(write_config("llama"))
    seen = []
    found = profile(
        source,
        sequence_length=TOKENS,
        micro_batch_sizes=(1, 2),
        tensor_parallel_degrees=(1, 2),
        dtype="bf16",
        progress=lambda done, total, text: seen.append((done, total, text)),
    )
    assert [len(layer.measurements) for layer in found.layers] == [4, 20, 20, 20, 4]
    assert found.layers[1].measurements is found.layers[3].measurements
    assert (found.device, found.dtype, found.model_digest) == (
        "counted",
        "bf16",
        source.digest,
    )
    assert (
        type(found).model_validate_json(found.model_dump_json(by_alias=True)) == found
    )
    assert sum(layer.parameters for layer in found.layers) == sum(
        each.numel() for each in source.blueprint.parameters()
    )
    assert seen[0] == (0, 3, "embedding")
    assert seen[-1][:2] == (3, 3)


@pytest.mark.parametrize(
    ("sizes", "field"),
    [
        ({"sequence_length": 0}, "sequence_length"),
        ({"sequence_length": 1}, "sequence_length"),
        ({"sequence_length": 65}, "sequence_length"),
        ({"micro_batch_sizes": ()}, "micro_batch_sizes"),
        ({"micro_batch_sizes": (1, 0)}, "micro_batch_sizes"),
        ({"tensor_parallel_degrees": (3,)}, "tensor_parallel_degrees"),
        ({"tensor_parallel_degrees": ()}, "tensor_parallel_degrees"),
    ],
)
def test_sizes_that_the_model_does_not_take_are_refused(
    sizes: dict, field: str, write_config
):
    """Nothing is counted that could not be trained; the message names the field and what is possible."""
    source = load_model(write_config("llama"))
    with pytest.raises(DocumentError) as caught:
        profile(
            source,
            **{
                "sequence_length": 8,
                "micro_batch_sizes": (1,),
                "tensor_parallel_degrees": (1,),
                **sizes,
            },
        )
    assert caught.value.problems[0].field == field
    assert caught.value.problems[0].hint


def test_images_take_no_sequence():
    """A sequence length for a model without one is a mistake, not an ignored option."""
    with pytest.raises(DocumentError, match="takes no tokens"):
        count(
            load_model(f"{CALLABLES}:with_example"),
            micro_batch_size=1,
            sequence_length=8,
        )
