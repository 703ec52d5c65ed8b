"""Samples: deterministic, in order, and the same whoever reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import DocumentError, UnsupportedError
from planner.executor.parallel.shares import Share
from planner.executor.train.data import DataSpec, load_dataset, local_part
from planner.executor.train.loss import next_token
from planner.profiler.callables import load_callable

TOKENS = DataSpec(
    input_kind="tokens",
    sequence_length=8,
    vocabulary_size=256,
    sample_shape=(),
    classes=256,
)
IMAGES = DataSpec(
    input_kind="images",
    sequence_length=0,
    vocabulary_size=0,
    sample_shape=(3, 4, 4),
    classes=10,
)


def user_data(start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample i is the number i."""
    numbers = torch.arange(start, stop)
    return numbers.float()[:, None, None, None].expand(-1, 3, 4, 4), numbers


def long_samples(start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Longer than the job says."""
    tokens = torch.zeros(stop - start, 9, dtype=torch.long)
    return tokens, tokens


def real_tokens(start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers where ids are wanted."""
    tokens = torch.zeros(stop - start, 8)
    return tokens, tokens


def broken_data(start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Fails."""
    raise KeyError("no such shard")


def short_data(start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One sample too few."""
    return user_data(start, stop - 1)


@given(
    step=st.integers(0, 1000),
    counts=st.lists(st.integers(1, 16), min_size=1, max_size=8),
    size=st.integers(1, 4),
)
def test_parts_make_the_batch(step: int, counts: list[int], size: int) -> None:
    """The ranks' parts, equal or not, one after the other, are the samples of the global batch."""
    total = sum(counts)
    shares = [
        Share(first=sum(counts[:rank]), count=count, total=total)
        for rank, count in enumerate(counts)
    ]
    numbers = [
        number for share in shares for number in range(*local_part(step, share, size))
    ]
    assert numbers == list(range(step * total * size, (step + 1) * total * size))


@pytest.mark.parametrize(
    ("name", "spec"), [("stdlib", TOKENS), ("synthetic", TOKENS), ("synthetic", IMAGES)]
)
def test_a_sample_depends_on_its_number_and_the_seed(name: str, spec: DataSpec) -> None:
    """Reading two samples at once or one by one gives the same; another seed gives others."""
    dataset = load_dataset(name, spec, seed=1)
    (both,) = dataset(4, 6)[0]
    assert torch.equal(both, torch.cat([dataset(4, 5)[0][0], dataset(5, 6)[0][0]]))
    assert not torch.equal(both, load_dataset(name, spec, seed=2)(4, 6)[0][0])


def test_file_is_read_as_bytes(tmp_path: Path) -> None:
    """Two windows of eight bytes, both read before any comes again."""
    path = tmp_path / "text.txt"
    path.write_bytes(b"abcdefghABCDEFGHrest")
    (inputs,), targets = load_dataset(str(path), TOKENS, seed=0)(0, 3)
    assert {bytes(row) for row in inputs[:2].to(torch.uint8).numpy()} == {
        b"abcdefgh",
        b"ABCDEFGH",
    }
    assert torch.equal(inputs[0], inputs[2])
    assert targets is inputs
    assert inputs.dtype == torch.int64


def test_standard_library_is_real_text() -> None:
    """The embedded data are Python sources."""
    (inputs,), _ = load_dataset("stdlib", TOKENS, seed=0)(0, 400)
    assert b"import" in bytes(inputs.flatten().to(torch.uint8).numpy())


def test_synthetic_images_have_classes() -> None:
    """Inputs of the sample's shape, targets among the model's outputs."""
    (inputs,), classes = load_dataset("synthetic", IMAGES, seed=0)(0, 64)
    assert inputs.shape == (64, 3, 4, 4)
    assert 0 <= int(classes.min()) <= int(classes.max()) < 10
    assert len(classes.unique()) > 1


def test_users_callable_is_called_with_the_range() -> None:
    """package.module:callable serves the samples that are asked for."""
    (inputs,), targets = load_dataset(f"{__name__}:user_data", IMAGES, seed=0)(3, 5)
    assert inputs[:, 0, 0, 0].tolist() == [3.0, 4.0]
    assert targets.tolist() == [3, 4]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken_data", "KeyError: 'no such shard'"),
        ("short_data", "not a tensor of 2 samples"),
    ],
)
def test_users_mistakes_are_named(name: str, message: str) -> None:
    """A failing or short answer is an error that names the callable."""
    dataset = load_dataset(f"{__name__}:{name}", IMAGES, seed=0)
    with pytest.raises(DocumentError, match=f"{name}.*{message}"):
        dataset(0, 2)


@pytest.mark.parametrize("name", ["long_samples", "real_tokens"])
def test_samples_that_were_not_planned_for_are_refused(name: str) -> None:
    """They failed in a stage, without a word about the data."""
    read = load_dataset(f"{__name__}:{name}", TOKENS, seed=0)
    with pytest.raises(
        DocumentError,
        match=r"data: .*not whole numbers of shape \(8,\)\. Hint: pad or cut",
    ):
        read(0, 2)


def test_unfit_data_is_refused(tmp_path: Path) -> None:
    """Text for images, bytes for a tiny vocabulary, an empty or a missing file."""
    with pytest.raises(UnsupportedError, match="is text, but the model takes images"):
        load_dataset("stdlib", IMAGES, seed=0)
    small = DataSpec(
        "tokens", sequence_length=8, vocabulary_size=100, sample_shape=(), classes=100
    )
    with pytest.raises(UnsupportedError, match="vocabulary of 256, the model has 100"):
        load_dataset("stdlib", small, seed=0)
    short = tmp_path / "short.txt"
    short.write_text("abc")
    with pytest.raises(DocumentError, match="3 bytes, less than one sample of 8"):
        load_dataset(str(short), TOKENS, seed=0)
    with pytest.raises(DocumentError, match="cannot be read"):
        load_dataset(str(tmp_path / "missing.txt"), TOKENS, seed=0)


@pytest.mark.parametrize(
    "reference", ["no.such.module:f", f"{__name__}:nothing", f"{__name__}:TOKENS", ":f"]
)
def test_callable_that_is_none_is_refused(reference: str) -> None:
    """A wrong module, a wrong name and a thing that cannot be called."""
    with pytest.raises(DocumentError):
        load_callable(reference, field="loss")


NO_SAMPLES: dict[str, Any] = {
    "a dictionary": {"inputs": torch.zeros(2, 8), "targets": torch.zeros(2)},
    "nothing": None,
    "inputs alone": torch.zeros(2, 8),
    "arrays": (torch.zeros(2, 8).numpy(), torch.zeros(2)),
    "one number": (torch.zeros(2, 8, dtype=torch.long), torch.tensor(0)),
    "sparse": (torch.zeros(2, 8, dtype=torch.long).to_sparse(), torch.zeros(2)),
}


@pytest.mark.parametrize("what", NO_SAMPLES)
def test_answers_that_are_no_samples_are_named(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They ended in tracebacks, or in errors about a wrong number of inputs."""
    monkeypatch.setitem(globals(), "user_data", lambda start, stop: NO_SAMPLES[what])
    read = load_dataset(f"{__name__}:user_data", TOKENS, seed=0)
    with pytest.raises(
        DocumentError,
        match=r"data: .*user_data\(0, 2\) returned .*Hint: return \(inputs, targets\)",
    ):
        read(0, 2)


def test_tokens_may_be_small_whole_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes, as files hold them; embeddings do not take them."""
    tokens = torch.arange(16, dtype=torch.uint8).view(2, 8)
    monkeypatch.setitem(globals(), "user_data", lambda start, stop: (tokens, tokens))
    (inputs,), targets = load_dataset(f"{__name__}:user_data", TOKENS, seed=0)(0, 2)
    assert inputs.dtype == torch.int64
    assert torch.equal(inputs, tokens)
    logits = torch.randn(2, 8, 16)
    assert torch.equal(next_token(logits, targets), next_token(logits, inputs))
