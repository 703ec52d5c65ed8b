"""One layer as a piece of work: the same forward and backward as in the whole model, and nothing else in memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from planner.errors import UnsupportedError
from planner.profiler.measure_layer import (
    PHASES,
    Bench,
    BuiltLayer,
    LayerWorkload,
    recomputed_backward,
)
from planner.profiler.measure_shard import fake_group, local
from planner.profiler.models import ModelSource, load_model
from planner.spec.profile import RecomputeMode

CPU = torch.device("cpu")


def sequential() -> tuple[nn.Module, torch.Tensor]:
    """Three linear layers, the last one into ten classes."""
    layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 10))
    return layers, torch.ones(1, 8)


@pytest.fixture
def gpt2(tmp_path: Path) -> ModelSource:
    """Two blocks of a GPT-2, with dropout, and tied embeddings."""
    config = {
        "model_type": "gpt2",
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 16,
        "vocab_size": 32,
        "n_positions": 16,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, "architectures": ["GPT2LMHeadModel"]}))
    return load_model(str(path))


@pytest.fixture
def llama(tmp_path: Path) -> ModelSource:
    """One block of a Llama that can be tensor-parallel by two, with rotary tables in a buffer."""
    config = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config |= {
        "hidden_size": 16,
        "intermediate_size": 32,
        "vocab_size": 32,
        "max_position_embeddings": 32,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    return load_model(str(path))


@pytest.fixture
def linear() -> ModelSource:
    return load_model(f"{__name__}:sequential")


def marks_of(workload: LayerWorkload) -> int:
    marks: list[None] = []
    workload.run(lambda: marks.append(None))
    return len(marks)


def gradients(workload: LayerWorkload) -> dict[str, torch.Tensor]:
    parameters = workload.layer.stage.named_parameters()
    return {
        name: each.grad.clone() for name, each in parameters if each.grad is not None
    }


@pytest.mark.parametrize("index", [0, 1, 3])
def test_every_layer_of_a_transformer_runs(gpt2: ModelSource, index: int) -> None:
    """Embedding, block and head run on real tensors, mark every phase, and give every parameter a gradient."""
    bench = Bench(gpt2, CPU, "fp32")
    workload = bench.workload(index, (2, 8), bench.build(index))
    assert marks_of(workload) == len(PHASES) + 1
    parameters = dict(workload.layer.stage.named_parameters())
    assert gradients(workload).keys() == parameters.keys() != set()


def test_gradients_accumulate_once_per_run(linear: ModelSource) -> None:
    """The split backward leaves no gradients behind: two runs add up to twice the gradient of one."""
    bench = Bench(linear, CPU, "fp32")
    workload = bench.workload(2, (4, 0), bench.build(2))
    workload.run(lambda: None)
    once = gradients(workload)
    workload.run(lambda: None)
    for name, gradient in gradients(workload).items():
        torch.testing.assert_close(gradient, 2 * once[name])


def test_recomputation_runs_beside_the_plain_layer(gpt2: ModelSource) -> None:
    """For every recompute mode four more phases follow, and recomputed layers get the gradients of the plain one."""
    bench = Bench(gpt2, CPU, "fp32")
    modes: tuple[RecomputeMode, ...] = ("selective", "full")
    plain, recomputed = (
        bench.build(1),
        {mode: bench.build(1, recompute=mode) for mode in modes},
    )
    plain.stage.eval()  # dropout would differ
    for layer in recomputed.values():
        layer.stage.eval()
        layer.stage.load_state_dict(plain.stage.state_dict())
    workload = bench.workload(1, (2, 8), plain, recomputed)
    assert marks_of(workload) == recomputed_backward(len(modes) - 1) + 2
    for layer in recomputed.values():
        for name, parameter in layer.stage.named_parameters():
            torch.testing.assert_close(parameter.grad, gradients(workload)[name])


def test_only_the_layer_takes_memory(gpt2: ModelSource) -> None:
    """A built block holds its own parameters and no others, and nothing of it is left without storage."""
    stage = Bench(gpt2, CPU, "fp32").build(2).stage
    names = {name for name, _ in stage.named_parameters()}
    assert names
    assert all(name.startswith("transformer.h.1.") for name in names)
    assert not any(tensor.is_meta for tensor in (*stage.parameters(), *stage.buffers()))


def test_buffers_hold_the_models_values(llama: ModelSource) -> None:
    """Rotary frequencies are those of the whole model, not empty memory."""
    whole = {
        name: buffer
        for name, buffer in llama.build().named_buffers()
        if "inv_freq" in name
    }
    built = dict(Bench(llama, CPU, "fp32").build(1).stage.named_buffers())
    assert whole
    for name, buffer in whole.items():
        torch.testing.assert_close(built[name], buffer)


def test_activations_have_the_type_asked_for(gpt2: ModelSource) -> None:
    """In bf16 the layer's inputs and parameters are bf16, token ids stay integers."""
    bench = Bench(gpt2, CPU, "bf16")
    block, embedding = (
        bench.workload(1, (1, 8), bench.build(1)),
        bench.workload(0, (1, 8), bench.build(0)),
    )
    block.run(lambda: None)
    assert block.inputs[0].dtype == torch.bfloat16
    assert {parameter.dtype for parameter in block.layer.stage.parameters()} == {
        torch.bfloat16
    }
    assert embedding.inputs[0].dtype == torch.int64


def test_a_layer_without_parameters_has_only_an_input_gradient(
    linear: ModelSource,
) -> None:
    """An activation layer runs and marks all phases, though no parameter gets a gradient."""
    bench = Bench(linear, CPU, "fp32")
    workload = bench.workload(1, (4, 0), bench.build(1))
    assert marks_of(workload) == len(PHASES) + 1
    assert gradients(workload) == {}


def test_shards_have_local_shapes(llama: ModelSource) -> None:
    """By two, a block's column-wise layers have half their rows, its row-wise ones half their columns; it runs, gets
    gradients of its own shapes, and its optimizer steps on as much."""
    bench = Bench(llama, CPU, "fp32")
    whole = dict(bench.build(1).stage.named_parameters())
    with fake_group(0, 2):
        layer = bench.build(1, 2)
        workload = bench.workload(1, (2, 8), layer)
        assert marks_of(workload) == len(PHASES) + 1
        half = {name: local(each) for name, each in layer.stage.named_parameters()}
        assert {
            name: local(each).shape for name, each in gradients(workload).items()
        } == {name: each.shape for name, each in half.items()}
        assert bench.optimizer(layer).shapes == tuple(
            tuple(each.shape) for each in half.values()
        )
    rows, columns = (
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
    )
    assert half[rows].shape == (whole[rows].shape[0] // 2, whole[rows].shape[1])
    assert half[columns].shape == (
        whole[columns].shape[0],
        whole[columns].shape[1] // 2,
    )
    assert not dist.is_initialized()


def test_shards_need_a_process_of_their_own() -> None:
    """A rank of a process group cannot pretend to be a rank of another one."""
    with (
        fake_group(0, 2),
        pytest.raises(UnsupportedError, match="outside of torchrun"),
        fake_group(0, 4),
    ):
        pass


def test_a_layer_may_take_and_give_several_tensors() -> None:
    """A layer with two inputs, of which one is whole numbers that pass through, runs and trains through the other."""

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(
            self, values: torch.Tensor, ids: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            return self.inner(values) + ids[:, None], ids

    values, ids = torch.randn(2, 4), torch.tensor([1, 2])
    gate = Gate()
    layer = BuiltLayer(gate, [gate.inner])
    workload = LayerWorkload(
        layer,
        (values, ids),
        (torch.ones(2, 4), torch.zeros(2)),
        None,
        trained=(True, False),
    )
    assert marks_of(workload) == len(PHASES) + 1
    torch.testing.assert_close(gradients(workload)["inner.bias"], torch.full((4,), 2.0))


def test_the_cpu_keeps_the_probabilities_of_dropout(gpt2: ModelSource) -> None:
    """Attention with dropout keeps more on a CPU than the fused kernel, and what grows with the sequence squared; of
    that, selective recomputation keeps the scores."""
    extra, cached = {}, {}
    for length in (4, 8, 16):
        bench = Bench(gpt2, CPU, "fp32")
        workload = bench.workload(1, (1, length), bench.build(1))
        extra[length], cached[length] = bench.unfused_bytes(1, 1, (1, length), workload)
    assert 0 < extra[4] < extra[8] < extra[16]
    assert extra[16] - extra[8] > 2 * (extra[8] - extra[4])
    for length, kept in cached.items():
        scores = 2 * length * length * 4  # of two heads
        assert 0 < kept <= min(extra[length], scores)
    assert cached[16] - cached[8] > 2 * (cached[8] - cached[4])


def test_kept_bytes_of_a_linear_layer(linear: ModelSource) -> None:
    """A linear layer keeps its input and nothing else; the count agrees with the device."""
    bench = Bench(linear, CPU, "fp32")
    workload = bench.workload(0, (4, 0), bench.build(0))
    assert workload.kept_bytes() == 4 * 8 * 4
    assert bench.unfused_bytes(0, 1, (4, 0), workload) == (0, 0)


def test_the_optimizer_steps_on_as_many_parameters(gpt2: ModelSource) -> None:
    """The optimizer's work has the layer's shapes, in fp32 whatever the layer's type, and moves every parameter."""
    bench = Bench(gpt2, CPU, "bf16")
    layer = bench.build(1)
    workload = bench.optimizer(layer)
    marks: list[None] = []
    workload.run(lambda: marks.append(None))
    assert workload._optimizer is not None
    (group,) = workload._optimizer.param_groups
    assert [each.shape for each in group["params"]] == [
        each.shape for each in layer.stage.parameters()
    ]
    assert all(
        each.dtype == torch.float32 and not torch.equal(each, torch.ones_like(each))
        for each in group["params"]
    )
    assert len(marks) == 2
