"""Closed-form operations of decoders: our runtime against torch, Megatron against the literature."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pytest

from planner.cost.derived import DerivedRows
from planner.cost.eager import EagerCounts, counts_of
from planner.cost.operations import DecoderCounts, Split, decoder_profile, layer_kinds
from planner.profiler import catalogue
from planner.profiler.counted import counted_profile
from planner.profiler.decoder_config import transformer_of
from planner.runtimes import get
from planner.spec.profile import (
    Collective,
    Measurement,
    ModelProfile,
    Operation,
    RecomputeMode,
)
from planner.spec.transformer import Transformer

DECODERS = [
    name
    for name in catalogue.names()
    if transformer_of(catalogue.entry(name).config or {}) is not None
]
WINDOWED = [name for name in DECODERS if name.startswith("gemma-3")]
LENGTH = 1536
"""Tokens: more than the window of gpt-oss and some Gemmas, divisible by 96 ranks."""
SMALL_LENGTH = 96
FIGURES = (
    "activation_bytes",
    "output_bytes",
    "forward_bytes",
    "forward_flops",
    "backward_input_flops",
    "backward_weight_flops",
    "recompute_flops",
    "local_parameters",
    "local_expert_parameters",
)
PLANNER = get("planner")
GPT3 = Transformer(
    layers=96,
    hidden=12288,
    heads=96,
    kv_heads=96,
    head_dim=128,
    feed_forward=49152,
    vocabulary=51200,
    gated=False,
    biases="all",
    positions="learned",
    learned_positions=2048,
    dropout=True,
)


@dataclass(frozen=True)
class Pair:
    """A row that torch counted, and the same in closed form."""

    kind: str
    counted: Measurement
    derived: Measurement

    @property
    def name(self) -> str:
        """Return what a failure reports."""
        row = self.counted
        degrees = (
            row.tensor_parallel_degree,
            row.expert_parallel_degree,
            row.sequence_parallel,
        )
        return f"{self.kind}, {row.micro_batch_size}, {degrees}, {row.recompute}"


def sizes_of(name: str) -> Transformer:
    """Return the sizes of a catalogue decoder."""
    model = transformer_of(catalogue.entry(name).config or {})
    assert model is not None
    return model


def counted(name: str, length: int, samples: tuple[int, ...]) -> ModelProfile:
    """Return the rows that torch counted, of all degrees."""
    return counted_profile(name, sequence_length=length, micro_batch_sizes=samples)


def pairs(name: str, length: int, samples: tuple[int, ...] = (1, 2)) -> Iterator[Pair]:
    """Yield every row of every kind of layer."""
    profile = counted(name, length, samples)
    model = sizes_of(name)
    kinds = layer_kinds(model)
    rows_of = {
        kind: layer.measurements
        for kind, layer in zip(kinds, profile.layers, strict=True)
    }
    known: dict[Split, DecoderCounts] = {}
    for kind, rows in rows_of.items():
        for row in rows:
            split = Split(
                row.micro_batch_size,
                length,
                tensor=row.tensor_parallel_degree,
                expert=row.expert_parallel_degree,
                sequence_parallel=row.sequence_parallel,
            )
            known.setdefault(split, counts_of(model, PLANNER, split))
            yield Pair(kind, row, known[split].row(kind, row.recompute))


def operations(ones: Iterable[Operation]) -> Counter[tuple[object, ...]]:
    """Return the number of operations of every shape."""
    found: Counter[tuple[object, ...]] = Counter()
    for one in ones:
        shape = (one.kind, one.flops, one.bytes, one.m, one.n, one.k, one.batch)
        found[shape] += one.count
    return found


def collectives(ones: Iterable[Collective]) -> Counter[tuple[object, ...]]:
    """Return the number of collectives of every size."""
    found: Counter[tuple[object, ...]] = Counter()
    for one in ones:
        found[one.group, one.phase, one.operation, one.bytes] += one.count
    return found


@pytest.mark.parametrize("name", DECODERS)
def test_our_runtime_launches_what_torch_counts(name: str) -> None:
    """Kernels, their bytes and FLOPs, and collectives equal torch's, one by one."""
    checked = 0
    for pair in pairs(name, SMALL_LENGTH):
        of_torch, of_formula = pair.counted, pair.derived
        assert operations(of_formula.operations) == operations(of_torch.operations), (
            pair.name
        )
        again = operations(of_formula.recompute_operations)
        assert again == operations(of_torch.recompute_operations), pair.name
        exchanged = collectives(of_formula.collectives)
        assert exchanged == collectives(of_torch.collectives), pair.name
        checked += 1
    assert checked >= 14


@pytest.mark.parametrize("name", DECODERS)
def test_our_runtime_saves_what_torch_saves(name: str) -> None:
    """Saved and moved bytes, FLOPs and parameters equal torch's in every mode."""
    for pair in pairs(name, SMALL_LENGTH):
        of_torch = {name: getattr(pair.counted, name) for name in FIGURES}
        of_formula = {name: getattr(pair.derived, name) for name in FIGURES}
        assert of_formula == of_torch, pair.name


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt2-medium", *WINDOWED])
def test_long_sequences_equal_torch(name: str) -> None:
    """Beyond a window, windowed layers attend through a mask, as torch runs them."""
    length = min(LENGTH, catalogue.entry(name).longest_sequence)
    for pair in pairs(name, length):
        of_torch, of_formula = pair.counted, pair.derived
        assert of_formula.activation_bytes == of_torch.activation_bytes, pair.name
        assert operations(of_formula.operations) == operations(of_torch.operations), (
            pair.name
        )


DENSE = [name for name in DECODERS if sizes_of(name).experts is None]


@pytest.mark.parametrize("name", DENSE)
def test_allocated_bytes_are_near_torch(name: str) -> None:
    """Saved and temporary bytes of dense blocks and heads differ by at most 10 %.

    Of mixtures the counter keeps gradients of a first backward alive.
    """
    length = min(1024, catalogue.entry(name).longest_sequence)
    for pair in pairs(name, length):
        of_torch, of_formula = pair.counted, pair.derived
        if pair.kind == "embedding" or of_torch.tensor_parallel_degree > 8:
            continue
        whole = of_torch.activation_bytes + of_torch.temporary_bytes
        derived = of_formula.activation_bytes + of_formula.temporary_bytes
        assert derived == pytest.approx(whole, rel=0.1), pair.name


def test_causal_attention_counts_half_of_the_scores() -> None:
    """The usual formula of model FLOPs: 2 b s^2 heads x head_dim of a block's forward."""
    model = sizes_of("llama-3.1-8b")
    row = counts_of(model, PLANNER, Split(2, 4096)).row("dense", "none")
    scores = 2 * 4096**2 * model.heads
    (attention,) = [one for one in row.operations if one.kind == "attention"]
    assert attention.flops == 2 * scores * model.head_dim
    weights = model.block_parameters("dense") - model.norm_parameters
    assert row.forward_flops == 2 * 2 * 4096 * weights + attention.flops


def test_models_that_write_into_saved_outputs_have_no_selective_mode() -> None:
    """gpt-oss adds biases in place, which torch's selective checkpoint refuses."""
    counts = counts_of(sizes_of("gpt-oss-20b"), PLANNER, Split(1, 256))
    profile = decoder_profile(counts, "gpt-oss-20b")
    block = profile.layers[1]
    assert [row.recompute for row in block.measurements] == ["none", "full"]


def test_other_runtimes_count_fused_kernels() -> None:
    """Megatron-Core launches fewer kernels for the same products."""
    model, split = sizes_of("llama-3.1-8b"), Split(1, 4096)
    ours = counts_of(model, PLANNER, split)
    other = counts_of(model, get("megatron-core"), split)
    assert isinstance(ours, EagerCounts)
    assert not isinstance(other, EagerCounts)
    kernels = [
        sum(one.count for one in counts.row("dense", "none").operations)
        for counts in (other, ours)
    ]
    assert kernels[0] < kernels[1]
    flops = {counts.row("dense", "none").forward_flops for counts in (other, ours)}
    assert len(flops) == 1


def test_parameters_of_all_layers_add_up_to_the_model() -> None:
    """Layer profiles state every parameter, tied ones once."""
    for name in ("llama-3.1-8b", "gpt2", "gemma-2-9b", "gpt-oss-20b", "deepseek-v3"):
        model = sizes_of(name)
        profile = decoder_profile(counts_of(model, PLANNER, Split(1, 64)), name)
        total = sum(layer.parameters for layer in profile.layers)
        tied = sum(shared.parameters for shared in profile.shared_parameters)
        padding = profile.shared_parameters and tied - model.vocabulary * model.hidden
        copies = 2 if profile.shared_parameters else 0
        assert total - tied - (copies - 1) * (padding or 0) == model.parameters


MEGATRON = get("megatron-lm")
SAVED = [
    (Split(4, 2048), "none", 114.0),
    (Split(4, 2048, tensor=8), "none", 23.0),
    (Split(4, 2048, tensor=8, sequence_parallel=True), "none", 14.25),
    (Split(4, 2048), "selective", 34.0),
    (Split(4, 2048, tensor=8), "selective", 13.0),
    (Split(4, 2048, tensor=8, sequence_parallel=True), "selective", 4.25),
    (Split(4, 2048), "full", 2.0),
]
"""Split, mode, and bytes per token and hidden unit of GPT-3: 34 + 5 a s / h,
10 + 24 / t + 5 a s / (h t) and 34 / t + 5 a s / (h t)."""


@pytest.mark.parametrize(
    ("split", "fewer"),
    [
        (Split(4, 2048), 18.0),
        (Split(4, 2048, tensor=8), 4.0),
        (Split(4, 2048, tensor=8, sequence_parallel=True), 2.25),
    ],
)
def test_mode_mlp_drops_and_repeats_the_feed_forward_network(
    split: Split, fewer: float
) -> None:
    """Without fc1's input (2 bytes), and its output and that of GELU (8 + 8) / t."""
    counts = DecoderCounts(GPT3, get("megatron-core"), split)
    none, mlp = (counts.row("dense", mode) for mode in ("none", "mlp"))
    units = split.micro_batch_size * split.sequence_length * GPT3.hidden
    assert (none.activation_bytes - mlp.activation_bytes) / units == fewer
    assert mlp.recompute_flops == 16 * units * GPT3.hidden // split.tensor
    again = collectives(mlp.collectives) - collectives(none.collectives)
    forward = {key for key in collectives(none.collectives) if key[1] == "forward"}
    repeated = {(group, "backward", *rest) for group, _, *rest in forward}
    assert set(again) == repeated
    assert sum(again.values()) == (0 if split.tensor == 1 else len(repeated))


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("llama-3.1-8b", ("mlp",)),
        ("mixtral-8x7b", ("norms", "mlp")),
        ("deepseek-v3", ("norms", "latent", "mlp")),
    ],
)
def test_modes_of_modules_are_those_that_the_model_has(
    name: str, modules: tuple[str, ...]
) -> None:
    """Megatron-Core refuses moe_act without experts, mla_up_proj without latents."""
    counts = DecoderCounts(sizes_of(name), get("megatron-core"), Split(1, 64))
    assert {*counts.modes} - {"none", "selective", "full"} == {*modules}
    delayed = DecoderCounts(
        sizes_of(name), get("megatron-core"), Split(1, 64), is_fp8=True
    )
    assert delayed.runtime.fp8_scaling == "delayed"
    assert {*delayed.modes} - {"none", "selective", "full"} == {"mlp"}


EXPERT_SPLITS = [
    Split(2, 4096),
    Split(2, 4096, expert=8, expert_tensor=1),
    Split(2, 4096, tensor=2, expert=4, expert_tensor=1, sequence_parallel=True),
]


@pytest.mark.parametrize("split", EXPERT_SPLITS)
def test_mode_norms_drops_outputs_of_norms_and_activations(split: Split) -> None:
    """Of Mixtral: the input of router and experts, and that of the second product.

    The norm before attention is a part of the product for queries, keys and values.
    """
    counts = DecoderCounts(sizes_of("mixtral-8x7b"), get("megatron-core"), split)
    none, norms = (counts.row("moe", mode) for mode in ("none", "norms"))
    tokens = split.micro_batch_size * split.sequence_length // split.tensor
    normed, activated = 2 * tokens * 4096, 2 * 2 * tokens * 14336
    assert none.activation_bytes - norms.activation_bytes == normed + activated
    assert norms.temporary_bytes - none.temporary_bytes == normed + activated
    assert [one.bytes for one in norms.recompute_operations] == [
        2 * normed,
        3 * activated,
    ]
    assert norms.recompute_flops == 0
    assert norms.collectives == none.collectives


LATENT_SPLITS = [
    Split(1, 4096, expert=64, expert_tensor=1),
    Split(1, 4096, tensor=4, expert=32, expert_tensor=1, sequence_parallel=True),
]


@pytest.mark.parametrize("kind", ["dense", "moe", "mtp"])
@pytest.mark.parametrize("split", LATENT_SPLITS)
def test_mode_latent_expands_queries_keys_and_values_again(
    split: Split, kind: str
) -> None:
    """Of DeepSeek-V3: latents of 1536 and 512, 128 heads of 192, 192 and 128."""
    counts = DecoderCounts(sizes_of("deepseek-v3"), get("megatron-core"), split)
    none, latent = (counts.row(kind, mode) for mode in ("none", "latent"))
    tokens, heads = 4096, 128 // split.tensor
    own = tokens // split.tensor
    fewer = 2 * own * 7168 + 2 * own * (1536 + 512)
    fewer += 2 * tokens * heads * (192 + 192 + 128)
    if kind != "dense":
        fewer += 2 * own * 7168 + 2 * 8 * own * 2048
    assert none.activation_bytes - latent.activation_bytes == fewer
    weights = 1536 * heads * 192 + 512 * heads * (128 + 128)
    assert latent.recompute_flops == 2 * tokens * weights
    again = collectives(latent.collectives) - collectives(none.collectives)
    gather = ("tensor", "backward", "all_gather", 2 * tokens * (1536 + 512))
    assert again == (Counter({gather: 1}) if split.tensor > 1 else Counter())


@pytest.mark.parametrize("kind", ["moe", "mtp"])
@pytest.mark.parametrize("split", LATENT_SPLITS)
def test_mode_mlp_sends_tokens_to_their_experts_again(split: Split, kind: str) -> None:
    """Of DeepSeek-V3: router, 8 of 256 experts and a shared one, but no norm."""
    counts = DecoderCounts(sizes_of("deepseek-v3"), get("megatron-core"), split)
    none, mlp = (counts.row(kind, mode) for mode in ("none", "mlp"))
    own, tokens = 4096 // split.tensor, 4096
    inner = 2048 // split.tensor
    routed = 7168 + 2 * 2048 + 2048
    shared = 2 * inner + inner
    fewer = 2 * 8 * own * routed + 2 * tokens * shared
    assert none.activation_bytes - mlp.activation_bytes == fewer
    router = 2 * own * 7168 * 256
    expert = 2 * 3 * 7168 * 2048
    assert mlp.recompute_flops == router + 8 * own * expert + own * expert
    again = collectives(mlp.collectives) - collectives(none.collectives)
    expected = Counter(
        {("expert", "backward", "all_to_all", 2 * 8 * own * 7168): 2},
    )
    if split.tensor > 1:
        whole = 2 * tokens * 7168
        expected["tensor", "backward", "all_gather", whole] = 1
        expected["tensor", "backward", "reduce_scatter", whole] = 1
    assert again == expected


@pytest.mark.parametrize(("split", "mode", "expected"), SAVED)
def test_saved_bytes_equal_the_literature(
    split: Split, mode: RecomputeMode, expected: float
) -> None:
    """Korthikanti et al. 2022, equations 1, 2 and 4, and table 2."""
    row = DecoderCounts(GPT3, MEGATRON, split).row("dense", mode)
    units = split.micro_batch_size * split.sequence_length * GPT3.hidden
    assert row.activation_bytes / units == expected


def test_flops_of_a_gpt_block_equal_the_literature() -> None:
    """Narayanan et al. 2021, equation 2: 24 B s h^2 + 4 B s^2 h of a block's forward."""
    split = Split(2, 2048)
    row = DecoderCounts(GPT3, MEGATRON, split).row("dense", "none")
    tokens = split.tokens
    products = 24 * tokens * GPT3.hidden**2
    scores = 4 * tokens * split.sequence_length * GPT3.hidden
    assert row.forward_flops == products + scores


def test_catalogue_profiles_state_the_sizes() -> None:
    """Profiles of decoders carry their sizes, those of other models do not."""
    assert counted("gpt2", 64, (1,)).transformer == sizes_of("gpt2")
    assert counted("t5-small", 64, (1,)).transformer is None
    sizes = counted("gpt2", 64, (1,)).canonical_json()
    assert re.search('"architecture":"gpt2"', sizes)


@pytest.mark.parametrize("runtime", ["planner", "megatron-core"])
@pytest.mark.parametrize("tensor", [1, 2])
def test_expert_degrees_change_no_layer_without_experts(
    runtime: str, tensor: int
) -> None:
    """`planner.cost.derived` takes those layers' rows from expert degree 1."""
    model = sizes_of("deepseek-v3")
    plain = {"tensor": tensor, "sequence_parallel": tensor > 1}
    alone = counts_of(model, get(runtime), Split(2, 512, **plain))
    spread = counts_of(model, get(runtime), Split(2, 512, expert=8, **plain))
    for kind in ("embedding", "dense", "head"):
        modes = ("none",) if kind != "dense" else alone.modes
        for mode in modes:
            row = spread.row(kind, mode)
            label = {"expert_parallel_degree": 1}
            assert row.model_copy(update=label) == alone.row(kind, mode)
    derived = DerivedRows(model, get(runtime), 512, "bf16", None, ())
    size = (2, tensor, 1, 8, tensor > 1)
    for kind, rows in zip(derived.kinds, derived[size], strict=True):
        row = rows["none"].model_copy(update={"expert_parallel_degree": 8})
        assert row == spread.row(kind, "none"), kind
