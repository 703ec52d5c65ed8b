"""Transformers counted from their sizes: published parameter counts, Korthikanti's activation memory, by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.profiler.transformer import Shard, TransformerCounter, TransformerShape
from planner.runtimes import AttentionKernel, get
from planner.spec.profile import ModelProfile, RecomputeMode

GPT3 = TransformerShape(
    layers=96,
    hidden=12288,
    feed_forward=49152,
    heads=96,
    kv_heads=96,
    vocabulary=50257,
    is_gated=False,
    is_tied=True,
    positions=2048,
    has_biases=True,
)
LLAMA = TransformerShape(
    layers=32,
    hidden=4096,
    feed_forward=11008,
    heads=32,
    kv_heads=32,
    vocabulary=32000,
    is_gated=True,
    is_tied=False,
)
MIXTRAL = TransformerShape(
    layers=32,
    hidden=4096,
    feed_forward=14336,
    heads=32,
    kv_heads=8,
    vocabulary=32000,
    is_gated=True,
    is_tied=False,
    experts=8,
    experts_per_token=2,
)
MODES: tuple[RecomputeMode, ...] = ("none", "selective", "full")


def counted(
    shape: TransformerShape,
    shard: Shard,
    attention: AttentionKernel = "fused-softmax",
    framework: str = "megatron-lm",
) -> ModelProfile:
    """The profile under Megatron-LM's traits: fused kernels, dropout, half precision."""
    return TransformerCounter(shape, get(framework), shard, attention, "fp16").profile(
        "model", MODES
    )


def kept(profile: ModelProfile) -> list[int]:
    """Activation bytes of a block by recompute mode."""
    return [row.activation_bytes for row in profile.layers[1].measurements]


def gpt(hidden: int, heads: int, sequence: int, layers: int = 1) -> TransformerShape:
    """A GPT of this width."""
    return TransformerShape(
        layers=layers,
        hidden=hidden,
        feed_forward=4 * hidden,
        heads=heads,
        kv_heads=heads,
        vocabulary=51200,
        is_gated=False,
        is_tied=True,
        positions=sequence,
        has_biases=True,
    )


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        (
            LLAMA,
            6_738_415_616,
        ),  # Touvron et al. 2023, Llama 2 7B, as its checkpoint counts
        (
            MIXTRAL,
            46_702_792_704,
        ),  # Jiang et al. 2024, Mixtral 8x7B, as its checkpoint counts
    ],
)
def test_published_parameters(shape: TransformerShape, parameters: int) -> None:
    """Sizes alone give the published count, to the last parameter."""
    assert shape.parameters == parameters


def test_parameters_of_gpt3() -> None:
    """Brown et al. 2020 say 175 billion; Narayanan et al. 2021, equation 2: 12 l h^2 + 13 l h + (V + s) h."""
    h, layers = GPT3.hidden, GPT3.layers
    by_equation = (
        12 * layers * h * h + 13 * layers * h + (GPT3.vocabulary + GPT3.positions) * h
    )
    assert GPT3.parameters == pytest.approx(by_equation, rel=1e-6)
    assert GPT3.parameters == pytest.approx(175e9, rel=3e-3)


@given(
    batch=st.integers(1, 4),
    sequence=st.sampled_from([512, 1024, 2048]),
    width=st.sampled_from([(1024, 16), (2048, 16), (6144, 64)]),
)
def test_activations_by_korthikanti(
    batch: int, sequence: int, width: tuple[int, int]
) -> None:
    """Korthikanti et al. 2022, equation 1: s b h (34 + 5 a s / h); selective keeps 34 s b h, full 2 s b h."""
    hidden, heads = width
    sbh = sequence * batch * hidden
    found = kept(counted(gpt(hidden, heads, sequence), Shard(batch, sequence)))
    assert found == [
        34 * sbh + 5 * heads * sequence * sequence * batch,
        34 * sbh,
        2 * sbh,
    ]


@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_activations_under_tensor_parallelism(tensor: int) -> None:
    """Equation 2: s b h (10 + 24 / t + 5 a s / h t); with sequence parallelism, equation 4: equation 1 over t."""
    batch, sequence, hidden, heads = 4, 2048, 6144, 64
    sbh, scores = sequence * batch * hidden, 5 * heads * sequence * sequence * batch
    shape = gpt(hidden, heads, sequence)
    split = kept(counted(shape, Shard(batch, sequence, tensor=tensor)))
    both = kept(
        counted(shape, Shard(batch, sequence, tensor=tensor, sequence_parallel=True))
    )
    assert split == [
        10 * sbh + (24 * sbh + scores) // tensor,
        10 * sbh + 24 * sbh // tensor,
        2 * sbh,
    ]
    assert both == [
        (34 * sbh + scores) // tensor,
        34 * sbh // tensor,
        2 * sbh // tensor,
    ]


def test_flash_attention_keeps_no_scores() -> None:
    """Its activations grow with the sequence, those of unfused attention with its square."""
    short, long = (
        [
            kept(counted(gpt(1024, 16, length), Shard(1, length), kernel))[0]
            for kernel in ("flash", "fused-softmax")
        ]
        for length in (1024, 4096)
    )
    assert long[0] == 4 * short[0]
    assert long[1] > 8 * short[1]


@pytest.mark.parametrize(
    "shape", [LLAMA, MIXTRAL, GPT3], ids=["llama", "mixtral", "gpt3"]
)
def test_shards_hold_all_parameters(shape: TransformerShape) -> None:
    """Eight tensor-parallel ranks hold every matrix once; norms, router and positions are on each."""
    whole, part = (
        counted(shape, Shard(1, 1024, tensor=tensor))
        .layers[1]
        .measurements[0]
        .local_parameters
        for tensor in (1, 8)
    )
    assert whole is not None
    assert part is not None
    assert whole == shape.block_parameters
    small = shape.hidden * (4 + shape.experts) + 3 * shape.hidden + shape.feed_forward
    assert whole <= 8 * part <= whole + 8 * small


def test_forward_flops() -> None:
    """Two FLOPs per matrix parameter and token, and 4 b s^2 h for attention, 24 b s h^2 + 4 b s^2 h a block
    (Narayanan et al. 2021, appendix)."""
    batch, sequence, hidden = 2, 2048, 2048
    row = (
        counted(gpt(hidden, 16, sequence), Shard(batch, sequence))
        .layers[1]
        .measurements[0]
    )
    assert (
        row.forward_flops
        == 24 * batch * sequence * hidden**2 + 4 * batch * sequence**2 * hidden
    )


@pytest.mark.parametrize(
    ("framework", "tensor", "columns"),
    [
        ("megatron-lm", 1, 50_304),
        ("megatron-lm", 4, 12_672),
        ("nanotron", 4, 12_565),
        ("vtrain", 4, 12_564),
    ],
)
def test_vocabularies_are_padded_as_by_their_framework(
    framework: str, tensor: int, columns: int
) -> None:
    """Megatron-LM pads GPT-2's 50,257 tokens to a multiple of 128 a rank, nanotron to whole ranks, vTrain cuts."""
    head = (
        counted(GPT3, Shard(1, 1024, tensor=tensor), framework=framework)
        .layers[-1]
        .measurements[0]
    )
    assert [one.n for one in head.operations if one.kind == "matmul"] == [columns]


def test_every_second_product_runs_again() -> None:
    """torchtitan's selective policy recomputes keys, the projection and the ungated half, and so keeps less."""
    shard, tokens = Shard(1, 4096), 4096
    plain, second = (
        counted(LLAMA, shard, "flash", framework).layers[1].measurements
        for framework in ("fsdp", "torchtitan")
    )
    products = [
        one.n * one.k for one in second[1].recompute_operations if one.kind == "matmul"
    ]
    assert products == [4096 * 4096, 4096 * 4096, 4096 * 11008]
    assert not any(one.kind == "matmul" for one in plain[1].recompute_operations)
    dropped = [
        each[0].activation_bytes - each[1].activation_bytes for each in (plain, second)
    ]
    norms = dropped[1] - dropped[0] - 2 * tokens * (4096 + 11008)
    assert (
        norms == 2 * 4 * tokens * 4096
    )  # torchtitan's norms keep an fp32 copy, which goes, too


def test_recomputation_stops_early() -> None:
    """Without reentrance the block's last product does not run again: no backward needs what it makes."""
    whole, early = (
        counted(LLAMA, Shard(1, 4096), "flash", framework).layers[1].measurements[2]
        for framework in ("megatron-core", "kempnerforge")
    )
    assert whole.recompute_flops - early.recompute_flops == 2 * 4096 * 4096 * 11008


def test_experts_work_on_the_tokens_they_get() -> None:
    """Two experts per token do twice the work of a dense network of their size, however many ranks share them."""
    dense = TransformerShape(1, 4096, 14336, 32, 8, 32000, is_gated=True, is_tied=False)
    plain = counted(dense, Shard(1, 4096)).layers[1].measurements[0].forward_flops
    one, four = (
        counted(MIXTRAL, Shard(1, 4096, expert=expert))
        .layers[1]
        .measurements[0]
        .forward_flops
        for expert in (1, 4)
    )
    network, router = 2 * 4096 * 3 * 4096 * 14336, 2 * 4096 * 4096 * 8
    assert one == four == plain + network + router


def test_sequence_parallelism_exchanges_as_much() -> None:
    """A reduce-scatter and an all-gather move what an all-reduce does: two all-reduces forward, or two of each."""
    shape = gpt(1024, 16, 1024)
    names = [
        sorted(
            one.operation
            for one in row.collectives
            if one.phase == "forward"
            for _ in range(one.count)
        )
        for row in (
            counted(shape, Shard(1, 1024, tensor=2, sequence_parallel=flag))
            .layers[1]
            .measurements[0]
            for flag in (False, True)
        )
    ]
    assert names == [["all_reduce"] * 2, ["all_gather"] * 2 + ["reduce_scatter"] * 2]


def test_tied_embeddings_are_shared() -> None:
    """Input and output embedding of a tied model are one parameter of two layers; others share nothing."""
    (shared,) = counted(gpt(1024, 16, 512), Shard(1, 512)).shared_parameters
    assert shared.layers == ("embedding", "head")
    assert shared.parameters == 51200 * 1024
    assert counted(LLAMA, Shard(1, 512)).shared_parameters == ()
