"""Linear layers in fp8: torchao's numbers, as many of them as the profile says, kept as in bf16."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from planner.cost.fp8 import mark_fp8
from planner.errors import SpecError, UnsupportedError
from planner.executor.pipeline.split_backward import backward_input
from planner.profiler import float8_product as float8_product_module
from planner.profiler import low_bit, measure
from planner.profiler.count import Counter
from planner.profiler.count import profile as counted_profile
from planner.profiler.float8 import (
    OF_COLUMNS,
    OF_ROWS,
    OF_TOKENS,
    float8_modules,
    run_in_float8,
)
from planner.profiler.float8_product import PLAIN, Parts, compiled, float8_product
from planner.profiler.low_bit import torchao
from planner.profiler.models import ModelSource, load_model
from planner.profiler.split_tensor import SplitTensor
from planner.spec.fp8 import DYNAMIC, Operand
from tests.executor.plans import CONFIGS, GPT2, LLAMA
from tests.profiler.test_saved import BATCH, RANDOM_STATE_BYTES, TOKENS, kept_bytes_of

CONFIG = {**LLAMA, "num_hidden_layers": 2}
PER_BLOCK = 7
"""Linear layers of Llama's block."""


def _source(config: dict[str, Any], folder: Path) -> ModelSource:
    path = folder / "model.json"
    path.write_text(json.dumps(config))
    return load_model(str(path))


def _random(*shape: int, seed: int = 0) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return made.requires_grad_()


@pytest.mark.parametrize("tokens", [32, 7])
@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_computes_as_torchaos_bit_by_bit(bias: bool, tokens: int):
    """Output and all gradients, for numbers of tokens that 16 divides or does not; its module, parameters and hooks
    stay."""
    torch.manual_seed(0)
    ours = nn.Sequential(
        nn.Linear(32, 48, bias=bias), nn.GELU(), nn.Linear(48, 16, bias=bias)
    ).bfloat16()
    float8 = torchao("float8")
    config = float8.Float8LinearConfig(emulate=True)
    theirs = float8.convert_to_float8_training(copy.deepcopy(ours), config=config)
    seen: list[nn.Module] = []
    ours[0].register_forward_hook(lambda module, given, made: seen.append(module))
    before = list(ours.parameters())
    run_in_float8(ours, ["0", "2"])
    inputs, wanted = _random(2, tokens, 32), _random(2, tokens, 32)
    results = [model(given) for model, given in ((ours, inputs), (theirs, wanted))]
    for each in results:
        each.square().sum().backward()
    assert torch.equal(*results)
    assert torch.equal(inputs.grad, wanted.grad)
    assert all(
        torch.equal(a.grad, b.grad)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)
    )
    assert all(a is b for a, b in zip(ours.parameters(), before, strict=True))
    assert seen == [ours[0]]
    assert type(ours[0]) is nn.Linear


def test_a_conv1d_is_a_linear_layer_whose_weight_stands_the_other_way_round():
    """As `nn.Linear` with the transposed weight."""
    from transformers.pytorch_utils import Conv1D

    conv, linear = Conv1D(48, 32).bfloat16(), nn.Linear(32, 48).bfloat16()
    linear.weight, linear.bias = (
        nn.Parameter(conv.weight.detach().t().contiguous()),
        conv.bias,
    )
    model = nn.ModuleList([conv, linear])
    run_in_float8(model, ["0", "1"])
    given = _random(5, 32)
    assert torch.equal(conv(given), linear(given))
    assert not torch.equal(
        conv(given), nn.functional.linear(given, linear.weight, linear.bias)
    )


class _Products(TorchDispatchMode):
    """Counts products of matrices."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tokens", [16, 7])
def test_torchs_products_in_fp8_give_what_emulation_gives(
    tokens: int, monkeypatch: pytest.MonkeyPatch
):
    """By the kernel that GPUs run, which torch has for CPUs too: operands laid out and padded as it wants them."""
    seen: list[tuple[int, ...]] = []
    scaled = torch._scaled_mm

    def watch(left: Tensor, right: Tensor, **settings: Any) -> Tensor:
        assert left.is_contiguous()
        assert right.t().is_contiguous()
        assert all(size % 16 == 0 for size in (left.shape[1], *right.shape))
        seen.append((left.shape[0], *right.shape))
        return scaled(left, right, **settings)

    def run() -> tuple[Tensor, ...]:
        given, weight = _random(tokens, 32), _random(48, 32, seed=1)
        made = float8_product(given, weight.t())
        return made, *torch.autograd.grad(
            made, (given, weight), _random(tokens, 48, seed=2).detach()
        )

    emulated = run()
    assert not seen
    monkeypatch.setattr(torch, "_scaled_mm", watch)
    monkeypatch.setattr(float8_product_module, "multiplies_float8", lambda device: True)
    monkeypatch.setattr(float8_product_module, "_kernels", lambda device: PLAIN)
    float8_product_module._settings.cache_clear()
    found = run()
    float8_product_module._settings.cache_clear()
    assert seen == [(tokens, 32, 48), (tokens, 48, 32), (48, 16, 32)]
    assert all(
        torch.allclose(a, b, rtol=0.02, atol=0.02)
        for a, b in zip(found, emulated, strict=True)
    )


def test_a_split_backward_runs_each_product_once():
    """I multiplies for the input's gradient alone and W for the weight's; both give what one backward gives."""
    layer = nn.Linear(32, 48).bfloat16()
    run_in_float8(nn.ModuleList([layer]), ["0"])
    given, gradient = _random(16, 32), _random(16, 48, seed=1).detach()
    expected = torch.autograd.grad(
        layer(given), (given, layer.weight, layer.bias), gradient
    )
    output = layer(given)
    with _Products() as of_input:
        (found,), weights = backward_input(
            [output], [gradient], [given], layer.parameters()
        )
    with _Products() as of_weight:
        weights.run()
    assert (of_input.count, of_weight.count) == (1, 1)
    assert all(map(torch.equal, (found, layer.weight.grad, layer.bias.grad), expected))


def _exchange(
    wholes: dict[str, Tensor], operands: frozenset[Operand]
) -> Callable[[Tensor], Tensor]:
    """What ranks that hold parts of these tensors tell each other: once in the forward, once in the backward."""
    passes = (("input", "weight"), ("gradient",))
    named = ([name for name in each if name in operands] for each in passes)
    answers = [
        torch.stack([wholes[name].detach().abs().amax() for name in each])
        for each in named
        if each
    ]

    def largest(values: Tensor) -> Tensor:
        found = answers.pop(0)
        assert (values <= found).all()
        return found

    return largest


@pytest.mark.parametrize(("operands", "dimension"), [(OF_COLUMNS, 1), (OF_ROWS, 0)])
def test_shards_are_cast_as_the_whole_is(operands: frozenset[Operand], dimension: int):
    """Two ranks that know each other's largest values give the bits of one that has all: outputs side by side, or
    gradients; what they add up differs by rounding alone."""
    given, weight, gradient = (
        _random(16, 32),
        _random(32, 64, seed=1),
        _random(16, 64, seed=2).detach(),
    )
    whole = float8_product(given, weight)
    of_given, of_weight = torch.autograd.grad(whole, (given, weight), gradient)
    wholes = {"input": given, "weight": weight, "gradient": gradient}
    shards = []
    for rank in range(2):
        part = weight.chunk(2, dimension)[rank].detach().requires_grad_()
        mine = given if dimension else given.chunk(2, 1)[rank].detach().requires_grad_()
        made = float8_product(mine, part, Parts(operands, _exchange(wholes, operands)))
        incoming = gradient.chunk(2, 1)[rank] if dimension else gradient
        shards.append((made, *torch.autograd.grad(made, (mine, part), incoming)))
    outputs, inputs, weights = zip(*shards, strict=True)
    assert torch.equal(torch.cat(weights, dimension), of_weight)
    together, apart = (outputs, inputs) if dimension else (inputs, outputs)
    assert torch.equal(torch.cat(together, 1), whole if dimension else of_given)
    summed = apart[0].float() + apart[1].float()
    assert torch.allclose(
        summed, (of_given if dimension else whole).float(), rtol=2e-2, atol=2e-1
    )


class _FirstOfTwo:
    """The first of two ranks; whatever it asks of the other, the answer is known."""

    rank, ranks = 0, 2

    def __init__(self, largest: Callable[[Tensor], Tensor]) -> None:
        self.largest = largest

    def enter(self, whole: Tensor) -> Tensor:
        """Whole on every rank."""
        return whole

    def divide(self, length: int) -> bool:
        """Into two."""
        return length % 2 == 0


def test_a_whole_layer_casts_split_heads_as_all_of_them_are_cast():
    """Every rank has the weight, and runs it on heads of its own, all four of which one scale is for."""
    layer = nn.Linear(32, 16).bfloat16()
    run_in_float8(nn.ModuleList([layer]), ["0"])
    heads, gradient = _random(2, 4, 8, 32), _random(2, 4, 8, 16, seed=1).detach()
    whole = layer(heads)
    (wanted,) = torch.autograd.grad(whole, heads, gradient)
    wholes = {"input": heads, "weight": layer.weight, "gradient": gradient}
    mine = heads.detach()[:, :2].requires_grad_()
    ranks: Any = _FirstOfTwo(_exchange(wholes, OF_TOKENS))
    made = layer(SplitTensor(mine, 1, ranks))
    assert torch.equal(made.local, whole[:, :2])
    (found,) = torch.autograd.grad(made.local, mine, gradient[:, :2])
    assert torch.equal(found, wanted[:, :2])


def test_an_expert_without_tokens_gets_no_gradient():
    """And its scale is no error."""
    weight = _random(32, 48)
    float8_product(_random(0, 32), weight).sum().backward()
    assert not weight.grad.any()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_compiled_casts_give_the_same_bits(dtype: torch.dtype):
    """Traced as for a GPU, by what takes no compiler."""
    kernels = compiled("aot_eager")
    for count in (16, 7 * 33):
        numbers = _random(count).detach()
        largest = kernels.largest(numbers)
        assert torch.equal(largest, PLAIN.largest(numbers))
        scale = (torch.finfo(dtype).max / largest.double()).float()
        found = [
            each.cast(numbers, scale, dtype).view(torch.uint8)
            for each in (kernels, PLAIN)
        ]
        assert torch.equal(*found)


@pytest.mark.parametrize(
    ("model", "degree"),
    [
        (CONFIG, 2),
        (GPT2, 2),
        (CONFIGS["bert"], 2),
        (CONFIGS["vit"], 1),
        ("torch_encoder", 1),
    ],
)
def test_as_many_products_run_in_fp8_as_the_profile_prices(
    model: Any, degree: int, tmp_path: Path
):
    """Layer by layer, whole or as a tensor-parallel rank holds it; none in the last one, and none of torch's own
    attention, whose products only look like a linear layer's."""
    own = isinstance(model, str)
    source = (
        load_model(f"tests.profiler.blocks:{model}")
        if own
        else _source(model, tmp_path)
    )
    tokens = 16 if source.input_kind == "tokens" else 0
    found = counted_profile(
        source,
        sequence_length=tokens,
        micro_batch_sizes=(2,),
        tensor_parallel_degrees=(degree,),
        dtype="bf16",
    )
    chosen = float8_modules(source.blueprint, source, degree)
    assert chosen
    for layer, cut in zip(found.layers, source.cut().layers, strict=True):
        row = next(
            row
            for row in layer.measurements
            if row.recompute == "none" and not row.sequence_parallel
        )
        told = mark_fp8(row, "bf16", DYNAMIC, is_last=layer is found.layers[-1])
        priced = sum(one.count for one in told.operations if one.is_linear)
        assert priced == sum(
            any(f"{name}.".startswith(f"{each}.") for each in cut.modules)
            for name in chosen
        )


def test_which_modules_run_in_fp8(tmp_path: Path):
    """All linear layers of Llama's blocks; on two ranks not keys and values, of which each has 8 features."""
    source = _source(CONFIG, tmp_path)
    chosen = float8_modules(source.blueprint, source)
    assert len(chosen) == PER_BLOCK * CONFIG["num_hidden_layers"]
    assert "lm_head" not in chosen
    left = set(chosen) - set(float8_modules(source.blueprint, source, 2))
    assert {name.rpartition(".")[2] for name in left} == {"k_proj", "v_proj"}


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_layers_in_fp8_keep_what_is_counted_in_bf16(mode: Any, tmp_path: Path):
    """And two scales, of four bytes each, per product."""
    source = _source(CONFIG, tmp_path)
    counted = Counter(source, "fp32").count(source.cut().layers[1].kind, BATCH, TOKENS)
    expected = (
        counted.modes[mode].kept_bytes
        - RANDOM_STATE_BYTES * (mode != "full")
        - counted.input_bytes
    )
    found = kept_bytes_of(source, 1, mode, partial(_in_float8, source))
    assert found == expected + 8 * PER_BLOCK


def _in_float8(source: ModelSource, stage: nn.Module) -> None:
    run_in_float8(stage, float8_modules(stage, source))


def test_what_cannot_run_in_fp8_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Another type, a model without a product of that size, and no torchao; each by name and hint."""
    sizes: dict[str, Any] = {
        "sequence_lengths": (16,),
        "micro_batch_sizes": (1,),
        "precision": "fp8",
    }
    with pytest.raises(SpecError, match="fp8 casts what is bf16, not fp32"):
        measure.profile(_source(CONFIG, tmp_path), **sizes)
    odd = _source({**CONFIG, "hidden_size": 24, "intermediate_size": 40}, tmp_path)
    with pytest.raises(
        UnsupportedError, match="has no linear layer, ahead of its last layer"
    ):
        measure.profile(odd, **sizes, dtype="bf16")
    monkeypatch.setattr(low_bit, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"planner\[low-bit\]"):
        measure.profile(_source(CONFIG, tmp_path), **sizes, dtype="bf16")
