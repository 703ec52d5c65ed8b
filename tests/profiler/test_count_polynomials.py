"""Polynomials of a counted profile equal fresh counts at sizes that were never counted."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from planner.profiler import count, measure
from planner.profiler.count_polynomials import with_polynomials
from planner.profiler.models import ModelSource, load_model
from planner.profiler.progress import Progress
from planner.spec import ModelProfile
from planner.spec.profile import LayerPolynomials, LayerProfile
from tests.profiler.known_device import know_cpu

CONVOLUTIONS = "tests.profiler.callables:with_example"


class Padded(nn.Module):
    """Pads the samples to a multiple of four, as some kernels pad their input."""

    def forward(self, features: Tensor) -> Tensor:
        """Return the features with rows of zeros."""
        missing = -len(features) % 4
        rows = torch.cat([features, features.new_zeros(missing, features.shape[1])])
        return torch.tanh(rows)


def padded() -> tuple[nn.Module, Tensor]:
    """A layer whose output has no polynomial, between two that have one each."""
    return nn.Sequential(nn.Linear(8, 8), Padded(), nn.Linear(8, 4)), torch.ones(1, 8)


def normalised() -> tuple[nn.Module, Tensor]:
    """Batch normalisation of features refuses a single sample."""
    layers = (nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    return nn.Sequential(*layers), torch.ones(2, 8)


def _count(
    source: ModelSource, sizes: Iterable[int], length: int = 0, tensor: int = 1
) -> ModelProfile:
    return count.profile(
        source,
        sequence_length=length,
        micro_batch_sizes=tuple(sizes),
        tensor_parallel_degrees=(tensor,),
        sequence_parallel=True,
    )


def _differing(found: ModelProfile, fresh: ModelProfile) -> list[str]:
    """Layers whose polynomials differ from the rows of a fresh count, or lack."""
    differing = []
    for layer, counted in zip(found.layers, fresh.layers, strict=True):
        for row in counted.measurements:
            size = (row.micro_batch_size, row.sequence_length)
            known = layer.polynomials_at(*size, row.split)
            if known is None or known.row(*size, row.recompute) != row:
                differing.append(layer.name)
    return differing


@pytest.mark.parametrize("sizes", [(3, 6), (5,), (1, 64)])
def test_convolutions_are_as_counted_anew(sizes: tuple[int, ...]):
    """Counted at 1, 2 and 4 samples, the network has exact counts at any other size."""
    source = load_model(CONVOLUTIONS)
    found = with_polynomials(_count(source, (1, 2, 4)), source)
    assert _differing(found, _count(source, sizes)) == []


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    """A small BERT for up to 128 tokens."""
    config = {
        "model_type": "bert",
        "architectures": ["BertForMaskedLM"],
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "hidden_size": 16,
        "intermediate_size": 32,
        "vocab_size": 40,
        "max_position_embeddings": 128,
    }
    path = tmp_path_factory.mktemp("encoder") / "config.json"
    path.write_text(json.dumps(config))
    return load_model(str(path))


@pytest.mark.parametrize(("tensor", "lengths"), [(1, (7, 30)), (2, (64,))])
def test_shorter_sequences_are_as_counted_anew(
    tensor: int, lengths: tuple[int, ...], encoder: ModelSource
):
    """Encoders have polynomials in samples and tokens, also of sequence-parallel ranks."""
    found = with_polynomials(_count(encoder, (1, 2), 128, tensor), encoder)
    for length in lengths:
        assert _differing(found, _count(encoder, (1, 3), length, tensor)) == []
    assert found.layers[0].polynomials[0].longest_sequence == 128


def test_lengths_of_the_profile_alone(encoder: ModelSource):
    """Without other lengths, polynomials are valid at those of the profile only."""
    counted = _count(encoder, (1, 2), 24)
    found = with_polynomials(counted, encoder, any_length=False)
    assert _differing(found, _count(encoder, (1, 3), 24)) == []
    known = [each for layer in found.layers for each in layer.polynomials]
    assert {each.shortest_sequence for each in known} == {24}
    assert not any(each.takes(1, 16) for each in known)


def test_counts_that_are_no_polynomial_have_none():
    """A layer that pads its samples has no polynomials; layers that do not, keep theirs."""
    source = load_model(f"{__name__}:padded")
    found = with_polynomials(_count(source, (1, 2, 4)), source)
    assert [bool(layer.polynomials) for layer in found.layers] == [True, False, False]


def test_models_that_need_several_samples():
    """One sample is no size of batch normalisation over features."""
    source = load_model(f"{__name__}:normalised")
    found = with_polynomials(_count(source, (1, 2, 4)), source)
    known = [each for layer in found.layers for each in layer.polynomials]
    assert {each.smallest_micro_batch_size for each in known} == {2}
    assert _differing(found, _count(source, (3, 6))) == []


def test_polynomials_that_miss_a_row_are_dropped():
    """Rows of the profile are checked, whatever the fitted sizes say."""
    source = load_model(CONVOLUTIONS)
    counted = _count(source, (1, 2, 4))
    first, *others = counted.layers
    wrong = [
        row.model_copy(update={"forward_flops": row.forward_flops + 1})
        if row.micro_batch_size == 4
        else row
        for row in first.measurements
    ]
    layer = first.model_copy(update={"measurements": tuple(wrong), "kind": first.kind})
    kinds = {each.kind for each in others}
    assert first.kind not in kinds
    changed = counted.model_copy(update={"layers": (layer, *others)})
    found = with_polynomials(changed, source)
    assert [bool(each.polynomials) for each in found.layers] == [False, True, True]


def test_progress_counts_to_its_end():
    """Every kind is announced, and the end."""
    source = load_model(CONVOLUTIONS)
    seen: list[tuple[int, int]] = []

    def note(done: int, total: int, what: str) -> None:
        seen.append((done, total))

    progress: Progress = note
    found = with_polynomials(_count(source, (1, 2)), source, progress=progress)
    kinds = len({layer.kind for layer in found.layers})
    assert seen == [(done, kinds) for done in range(kinds + 1)]


def test_measured_profiles_have_polynomials(monkeypatch: pytest.MonkeyPatch):
    """`planner profile` on the CPU at sizes 1, 2 and 4 gives the counts of 3 and 6."""
    know_cpu(monkeypatch)
    source = load_model(CONVOLUTIONS)
    found = measure.profile(
        source,
        sequence_lengths=(0,),
        micro_batch_sizes=(1, 2, 4),
        time_budget_seconds=0.5,
    )
    assert {row.source for layer in found.layers for row in layer.measurements} == {
        "measured"
    }
    assert _differing(found, _count(source, (3, 6))) == []
    assert LayerProfile.model_validate(found.layers[0].model_dump()) == found.layers[0]
    assert isinstance(found.layers[0].polynomials[0], LayerPolynomials)
