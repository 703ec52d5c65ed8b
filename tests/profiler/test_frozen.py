"""Frozen parameters are counted as autograd treats them: no gradients of theirs, and nothing kept where none passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from planner.errors import DocumentError, UnsupportedError
from planner.profiler.count import Counter, profile
from planner.profiler.float8_product import float8_product
from planner.profiler.low_bit import torchao
from planner.profiler.measure_layer import Bench
from planner.profiler.models import ModelSource, load_model
from planner.profiler.parameters import hidden_matrices
from planner.profiler.splits import Split
from planner.profiler.tensor_parallel import is_derived, plan
from planner.spec.document import parse
from planner.spec.profile import LayerProfile, Measurement, ModelProfile
from tests.executor.frozen import RANK
from tests.executor.plans import source_of
from tests.profiler.test_saved import RANDOM_STATE_BYTES, saved_by_model

WIDTH = 32
BLOCK = 9280
"""Parameters of a block of the tiny Llama, without adapters."""
SAMPLES, TOKENS = 3, 12


def _size(source: ModelSource) -> tuple[int, int]:
    return SAMPLES, TOKENS if source.input_kind == "tokens" else 0


def _elements(model: nn.Module, *, trained: bool) -> int:
    return sum(
        each.numel() for each in model.parameters() if each.requires_grad is trained
    )


@pytest.mark.parametrize(
    "name",
    [
        "adapted_llama",
        "adapted_mixtral",
        "norms_of_gpt2",
        "frozen_mlp",
        "frozen_encoder",
    ],
)
def test_layers_tell_what_is_frozen(name: str, tmp_path: Path) -> None:
    """Frozen and trained elements of all layers are the model's, whether it is a transformer, a chain or traced."""
    source = source_of(name, tmp_path)
    found = profile(source, sequence_length=_size(source)[1], micro_batch_sizes=(1,))
    shared = sum(each.parameters for each in found.shared_parameters)
    assert all(each.frozen for each in found.shared_parameters)
    frozen = sum(layer.frozen_parameters for layer in found.layers)
    assert frozen - shared == _elements(source.blueprint, trained=False) > 0
    assert sum(layer.parameters for layer in found.layers) - frozen == _elements(
        source.blueprint, trained=True
    )
    for layer in found.layers:
        for row in layer.measurements:
            assert (row.local_parameters, row.local_frozen_parameters or 0) == (
                layer.parameters,
                layer.frozen_parameters,
            )
    assert (
        ModelProfile.model_validate_json(found.model_dump_json(by_alias=True)) == found
    )


def test_ranks_tell_what_is_frozen_of_their_share(tmp_path: Path) -> None:
    """Tensor ranks hold half of all but the norms, expert ranks their part of the frozen experts."""
    source = source_of("adapted_llama", tmp_path)
    whole, half = (
        Counter(source, "fp32").count("LlamaDecoderLayer", 1, 8, Split(degree))
        for degree in (1, 2)
    )
    norms, adapters = 2 * WIDTH, (3 * WIDTH + WIDTH // 2) * RANK
    assert (whole.local_parameters, whole.local_frozen_parameters) == (
        BLOCK + adapters,
        BLOCK,
    )
    assert half.local_frozen_parameters == (BLOCK - norms) // 2 + norms
    assert half.local_parameters == half.local_frozen_parameters + adapters // 2
    mixture = source_of("adapted_mixtral", tmp_path)
    shared = Counter(mixture, "fp32").count(
        "MixtralDecoderLayer", 1, 8, Split(1, expert=2)
    )
    assert shared.local_frozen_expert_parameters == shared.local_expert_parameters > 0


@pytest.mark.parametrize(
    "name",
    ["adapted_llama", "top_of_llama", "norms_of_gpt2", "frozen_mlp", "frozen_encoder"],
)
def test_layers_add_up_to_what_the_whole_model_keeps(name: str, tmp_path: Path) -> None:
    """The sum over the layers is what one real forward of the frozen model keeps for its backward, to the byte."""
    source, total = source_of(name, tmp_path), 0
    counter = Counter(source, "fp32")
    for layer in counter.layers:
        counted = counter.count(layer.kind, *_size(source))
        saving = [
            each
            for each in counted.kernels
            if each.kind == "attention" and each.gradients != "none"
        ]
        total += counted.modes["none"].kept_bytes - RANDOM_STATE_BYTES * len(saving)
    assert total == saved_by_model(source, source.example_inputs(*_size(source)))


@pytest.mark.parametrize(
    "name", ["adapted_llama", "norms_of_gpt2", "frozen_mlp", "frozen_encoder"]
)
def test_layers_add_up_to_the_flops_of_the_whole_model(
    name: str, tmp_path: Path
) -> None:
    """Those of one real forward and backward, products that autograd leaves out not among them."""
    source = source_of(name, tmp_path)
    counter = Counter(source, "fp32")
    counts = [counter.count(layer.kind, *_size(source)) for layer in counter.layers]
    forward = sum(each.forward_flops for each in counts)
    model = source.build()
    with FlopCounterMode(display=False) as flops:
        output: Any = model(*source.example_inputs(*_size(source)))
        assert flops.get_total_flops() == forward
        getattr(output, "logits", output).sum().backward()
    backward = sum(
        each.backward_input_flops + each.backward_weight_flops for each in counts
    )
    assert flops.get_total_flops() == forward + backward < 3 * forward


def test_kernels_tell_which_gradients_they_have(tmp_path: Path) -> None:
    """In the first block nothing leads to the frozen embedding: products of its frozen weights have no backward, those
    of the adapters' first matrix that of the weight alone. In the others frozen products have that of the input."""
    counter = Counter(source_of("adapted_llama", tmp_path), "fp32")
    first, other = (
        counter.count(kind, 1, 8)
        for kind in ("LlamaDecoderLayer", "LlamaDecoderLayer-2")
    )
    found = [
        [each.gradients for each in block.kernels if each.kind == "matmul"]
        for block in (first, other)
    ]
    # Queries: the frozen product, the adapter's two; keys; values likewise; output; gate, up and down.
    assert found[0] == [
        "none",
        "weight",
        None,
        "none",
        "none",
        "weight",
        None,
        *["input"] * 4,
    ]
    assert found[1] == [
        "input",
        None,
        None,
        "input",
        "input",
        None,
        None,
        *["input"] * 4,
    ]
    assert first.backward_input_flops == 0


def test_frozen_layers_before_all_trained_ones_do_nothing_backward(
    tmp_path: Path,
) -> None:
    """No FLOPs, no bytes kept, no recomputation to choose; the first trained one has no gradient of its input."""
    source = source_of("top_of_llama", tmp_path)
    found = profile(source, sequence_length=8, micro_batch_sizes=(1,))
    for layer in found.layers[1:3]:
        (row,) = layer.measurements
        assert row.recompute == "none"
        assert (
            row.backward_input_flops,
            row.backward_weight_flops,
            row.activation_bytes,
        ) == (0, 0, 0)
        assert {each.gradients for each in row.operations} == {"none"}
    assert found.layers[3].measurements[0].backward_input_flops == 0
    assert found.layers[4].measurements[0].backward_input_flops > 0
    crossing = source.borders(1, 8).crossing
    assert [each.requires_grad for (each,) in crossing] == [False] * 4 + [True] * 3


def test_muon_takes_trained_matrices_alone(tmp_path: Path) -> None:
    """Those of the adapters; the frozen ones beside them have no gradients to orthogonalise."""
    source = source_of("adapted_llama", tmp_path)
    hidden = hidden_matrices(source.blueprint, source.cut())
    assert hidden
    assert all(name.rpartition(".")[0].endswith((".down", ".up")) for name in hidden)


def test_frozen_layers_are_measured_without_gradients(tmp_path: Path) -> None:
    """Neither is the backward run, nor does the optimizer step on them."""
    bench = Bench(source_of("top_of_llama", tmp_path), torch.device("cpu"), "fp32")
    frozen, trained = bench.build(1), bench.build(3)
    for place, layer in ((1, frozen), (3, trained)):
        bench.workload(place, (1, 8), layer).run(lambda: None)
    assert all(each.grad is None for each in frozen.stage.parameters())
    assert all(each.grad is not None for each in trained.stage.parameters())
    assert bench.optimizer(frozen).shapes == ()
    assert len(bench.optimizer(trained).shapes) == len(list(trained.stage.parameters()))


def test_a_plan_of_plain_products_is_not_used_for_adapted_ones(tmp_path: Path) -> None:
    """transformers' plan knows nothing of what stands beside its products: the split is derived from what they do, and
    adapters are split with their layers."""
    adapted, plain = (
        plan(source_of(name, tmp_path)) for name in ("adapted_llama", "llama")
    )
    assert not any(map(is_derived, plain.values()))
    assert all(map(is_derived, adapted.values()))
    assert {
        f"model.layers.1.self_attn.q_proj.{part}" for part in ("base", "down", "up")
    } <= adapted.keys()
    assert source_of("adapted_mixtral", tmp_path).tensor_parallel_degrees() == (1,)


def test_what_is_frozen_tells_models_apart(tmp_path: Path) -> None:
    """A plan of one is not run with the other; whole training has the digest that it always had."""
    frozen, whole = source_of("top_of_llama", tmp_path), source_of("llama", tmp_path)
    assert frozen.digest != whole.digest
    named = {
        name: tuple(each.shape) for name, each in frozen.blueprint.named_parameters()
    }
    assert named == {
        name: tuple(each.shape) for name, each in whole.blueprint.named_parameters()
    }


def test_a_model_with_nothing_to_train_is_refused() -> None:
    """Before anything is counted."""
    with pytest.raises(
        UnsupportedError,
        match=r"all 8 parameters .* are frozen, so there is nothing to train",
    ):
        load_model("tests.executor.frozen:all_frozen").cut()


def test_documents_hold_no_more_frozen_parameters_than_there_are() -> None:
    """Neither of a layer nor of a rank's share, or its experts; without any, no field tells of them."""
    row: dict[str, Any] = {
        **dict.fromkeys(
            ("forward_flops", "backward_input_flops", "backward_weight_flops"), 0
        ),
        **dict.fromkeys(
            ("activation_bytes", "output_bytes", "temporary_bytes", "sequence_length"),
            0,
        ),
        "micro_batch_size": 1,
        "source": "counted",
    }
    layer: dict[str, Any] = {
        "name": "a",
        "kind": "a",
        "parameters": 3,
        "measurements": [row],
    }
    assert "frozen" not in parse(LayerProfile, layer).canonical_json()
    with pytest.raises(
        DocumentError, match=r"frozen_parameters\(4\) is more than parameters\(3\)"
    ):
        parse(LayerProfile, {**layer, "frozen_parameters": 4})
    with pytest.raises(
        DocumentError,
        match=r"local_frozen_parameters\(4\) is more than local_parameters\(3\)",
    ):
        parse(Measurement, {**row, "local_parameters": 3, "local_frozen_parameters": 4})
    with pytest.raises(DocumentError, match="local_frozen_expert_parameters"):
        parse(Measurement, {**row, "local_frozen_expert_parameters": 1})


@pytest.mark.parametrize(
    ("of_input", "of_weight"), [(True, False), (False, True), (True, True)]
)
def test_products_in_fp8_keep_what_their_gradients_take(
    of_input: bool, of_weight: bool
) -> None:
    """A frozen weight has no gradient that its input would be kept for."""
    torchao("float8")
    given, weight = (
        torch.randn(32, 16, dtype=torch.bfloat16),
        torch.randn(16, 48, dtype=torch.bfloat16),
    )
    given.requires_grad_(of_input)
    weight.requires_grad_(of_weight)
    saved: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda each: saved.append(tuple(each.shape)) or each, lambda x: x
    ):
        made = float8_product(given, weight)
    assert saved == [tuple(given.shape)] * of_weight + [tuple(weight.shape)] * of_input
    made.float().square().sum().backward()
    assert (given.grad is not None, weight.grad is not None) == (of_input, of_weight)
