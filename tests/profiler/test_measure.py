"""The measured profile: the counted one with seconds in it, each case measured once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from planner.errors import DocumentError, SpecError, UnsupportedError
from planner.profiler import count, measure
from planner.profiler.measure import profile
from planner.profiler.measure_layer import LayerWorkload, OptimizerWorkload
from planner.profiler.measure_timing import Timing
from planner.profiler.models import ModelSource, load_model
from planner.spec import ModelProfile, parse
from tests.profiler.known_device import know_cpu

SIZES = (1, 2)


def narrow() -> tuple[nn.Module, torch.Tensor]:
    """Linear layers of width 16, with activations between them, into ten classes."""
    return _classifier(16)


def wide() -> tuple[nn.Module, torch.Tensor]:
    """The same, twice as wide."""
    return _classifier(32)


def _classifier(width: int) -> tuple[nn.Module, torch.Tensor]:
    layers = [
        nn.Linear(8, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 10),
    ]
    return nn.Sequential(*layers), torch.ones(1, 8)


@pytest.fixture
def gpt2(tmp_path: Path) -> ModelSource:
    config = {
        "model_type": "gpt2",
        "n_layer": 3,
        "n_head": 2,
        "n_embd": 16,
        "vocab_size": 32,
        "n_positions": 16,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**config, "architectures": ["GPT2LMHeadModel"]}))
    return load_model(str(path))


def llama(folder: Path) -> ModelSource:
    """One block that can be tensor-parallel by two."""
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
    path = folder / "config.json"
    path.write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    return load_model(str(path))


@pytest.fixture(autouse=True)
def timed(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> list[LayerWorkload | OptimizerWorkload]:
    """Every workload that was timed: each is run once, and its i-th phase (from 1 on) is said to last i seconds.

    Tests marked as torchrun are timed for real. The device's data sheet has its own tests.
    """
    know_cpu(monkeypatch)
    monkeypatch.setattr(measure, "adam_8bit_seconds", lambda shapes: float(len(shapes)))
    seen: list[LayerWorkload | OptimizerWorkload] = []
    if request.node.get_closest_marker("torchrun") is not None:
        return seen

    def time_phases(run: Any, device: torch.device, *, limit_seconds: float) -> Timing:
        seen.append(run.__self__)
        marks: list[float] = []
        run(lambda: marks.append(float(len(marks))))
        return Timing((tuple(marks[1:]),))

    monkeypatch.setattr(measure, "time_phases", time_phases)
    return seen


def test_every_layer_of_a_sequential_has_rows() -> None:
    """All rows are measured; seconds stand where the layer has work: inputs' gradients but in the first layer, weights'
    and the optimizer's where there are weights, and the loss in the last layer."""
    measured = profile(
        load_model(f"{__name__}:narrow"), sequence_lengths=(0,), micro_batch_sizes=SIZES
    )
    names = (
        "forward_seconds",
        "backward_input_seconds",
        "backward_weight_seconds",
        "optimizer_seconds",
    )
    expected = {
        "0": (2, 0, 5, 1),
        "1": (2, 5, 0, 0),
        "2": (2, 4, 1, 1),
        "3": (2, 5, 0, 0),
        "4": (2 + 3, 4, 1, 1),
    }
    assert [layer.name for layer in measured.layers] == list(expected)
    for layer in measured.layers:
        assert {row.micro_batch_size for row in layer.measurements} == set(SIZES)
        for row in layer.measurements:
            assert row.source == "measured"
            assert tuple(getattr(row, name) for name in names) == pytest.approx(
                expected[layer.name]
            )
            assert row.adam_8bit_seconds == (2 if layer.parameters else None), (
                "a weight and a bias"
            )


def test_recomputation_costs_what_it_adds_to_the_backward(gpt2: ModelSource) -> None:
    """Blocks have rows for all recompute modes, which differ by the longer of two backwards in one run."""
    measured = profile(gpt2, sequence_lengths=(8,), micro_batch_sizes=SIZES)
    rows = {
        (row.micro_batch_size, row.recompute): row
        for row in measured.layers[1].measurements
    }
    modes = list(dict.fromkeys(mode for _, mode in rows))
    assert {"none", "full"} <= set(modes)
    assert rows.keys() == {(size, mode) for size in SIZES for mode in modes}
    for size in SIZES:
        plain = rows[size, "none"]
        for number, mode in enumerate(modes):
            again = rows[size, mode]
            assert (
                again.recompute_seconds == 4 * number
            )  # the fourth phase of each mode is one second longer each
            assert again.forward_seconds == plain.forward_seconds
            assert again.backward_weight_seconds == plain.backward_weight_seconds
    assert measured.layers[1].measurements is measured.layers[3].measurements


def test_several_lengths_are_one_profile(
    gpt2: ModelSource, timed: list[LayerWorkload | OptimizerWorkload], tmp_path: Path
) -> None:
    """Every length has measured rows of every layer; the journal knows them apart, and optimizers have no length."""
    journal = tmp_path / "journal.jsonl"
    first = profile(
        gpt2, sequence_lengths=(8,), micro_batch_sizes=(1,), journal=journal
    )
    timed.clear()
    both = profile(
        gpt2, sequence_lengths=(8, 16), micro_batch_sizes=(1,), journal=journal
    )
    assert len(timed) == 3
    for layer, before in zip(both.layers, first.layers, strict=True):
        rows = layer.measurements
        assert {row.sequence_length for row in rows} == {8, 16}
        assert {row.source for row in rows} == {"measured"}
        assert (
            tuple(row for row in rows if row.sequence_length == 8)
            == before.measurements
        )


def test_the_spread_of_the_samples_is_told(
    gpt2: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of 10, 20 and 30 seconds have an interquartile range of 10: half of their median."""
    samples = tuple(tuple(float(scale) for _ in range(40)) for scale in (1, 2, 3))
    monkeypatch.setattr(
        measure, "time_phases", lambda *arguments, **limits: Timing(samples)
    )
    measured = profile(gpt2, sequence_lengths=(8,), micro_batch_sizes=(1,))
    assert {
        row.relative_spread for layer in measured.layers for row in layer.measurements
    } == {0.5}


def test_noise_never_makes_seconds_negative(
    gpt2: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a part was slower than the whole, the difference is nothing, not less."""
    monkeypatch.setattr(
        measure,
        "time_phases",
        lambda *arguments, **limits: Timing((tuple(map(float, range(40, 0, -1))),)),
    )
    row = (
        profile(gpt2, sequence_lengths=(8,), micro_batch_sizes=(1,))
        .layers[1]
        .measurements[1]
    )
    assert (
        row.backward_input_seconds,
        row.backward_weight_seconds,
        row.recompute_seconds,
    ) == (36, 0, 0)


def test_the_counted_figures_are_kept(gpt2: ModelSource) -> None:
    """FLOPs, sizes and operations are the counted ones; only what the CPU's attention keeps is added."""
    measured = profile(gpt2, sequence_lengths=(8,), micro_batch_sizes=SIZES)
    counted = count.profile(gpt2, sequence_length=8, micro_batch_sizes=SIZES)
    assert measured.model_digest == counted.model_digest
    assert measured.shared_parameters == counted.shared_parameters
    for layer, other in zip(measured.layers, counted.layers, strict=True):
        for row, expected in zip(layer.measurements, other.measurements, strict=True):
            changed = {
                name
                for name in type(row).model_fields
                if getattr(row, name) != getattr(expected, name)
            }
            assert {name for name in changed if not name.endswith("_seconds")} <= {
                "source",
                "relative_spread",
                "activation_bytes",
                "temporary_bytes",
            }
            assert row.activation_bytes >= expected.activation_bytes


def test_twice_the_width_costs_more() -> None:
    """A linear layer twice as wide has four times the FLOPs, in the measured profile too."""
    sources = [load_model(f"{__name__}:{name}") for name in ("narrow", "wide")]
    thin, thick = (
        profile(each, sequence_lengths=(0,), micro_batch_sizes=(4,))
        .layers[2]
        .measurements[0]
        for each in sources
    )
    assert thick.forward_flops == 4 * thin.forward_flops
    assert thick.backward_input_flops == 4 * thin.backward_input_flops


def test_the_profile_is_a_document(gpt2: ModelSource) -> None:
    """It reads back as it was written, and tells the conditions it was measured under."""
    measured = profile(gpt2, sequence_lengths=(8,), micro_batch_sizes=(1,))
    assert (
        parse(ModelProfile, json.loads(measured.model_dump_json(by_alias=True)))
        == measured
    )
    assert measured.device == "cpu"
    assert measured.device_spec is not None
    assert measured.environment["concurrency"] == "1"
    assert measured.environment["torch"] in torch.__version__
    assert int(measured.environment["threads_per_rank"]) == int(
        measured.environment["cores"]
    )


def test_equal_layers_are_measured_once(
    gpt2: ModelSource, timed: list[LayerWorkload | OptimizerWorkload]
) -> None:
    """Three equal blocks, embedding and head are three kinds: each is timed per size, and its optimizer once."""
    profile(gpt2, sequence_lengths=(8,), micro_batch_sizes=SIZES)
    assert len(timed) == 3 * (len(SIZES) + 1)


def test_a_journal_resumes(
    gpt2: ModelSource, timed: list[LayerWorkload | OptimizerWorkload], tmp_path: Path
) -> None:
    """What the journal knows is not measured again, and gives the same seconds; a new size is measured alone."""
    journal = tmp_path / "journal.jsonl"
    first = profile(
        gpt2, sequence_lengths=(8,), micro_batch_sizes=(1,), journal=journal
    )
    assert len(timed) == 6
    timed.clear()
    again = profile(
        gpt2, sequence_lengths=(8,), micro_batch_sizes=(1,), journal=journal
    )
    assert timed == []
    assert again.layers == first.layers
    profile(gpt2, sequence_lengths=(8,), micro_batch_sizes=SIZES, journal=journal)
    assert len(timed) == 3


def test_an_interrupted_measurement_goes_on(
    gpt2: ModelSource,
    timed: list[LayerWorkload | OptimizerWorkload],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stopped in the middle, the second call measures only what the first one did not."""
    journal = tmp_path / "journal.jsonl"

    def interrupt(done: int, total: int, text: str) -> None:
        if done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profile(
            gpt2,
            sequence_lengths=(8,),
            micro_batch_sizes=SIZES,
            journal=journal,
            progress=interrupt,
        )
    assert len(timed) == 4
    profile(gpt2, sequence_lengths=(8,), micro_batch_sizes=SIZES, journal=journal)
    assert len(timed) == 9


def test_progress_counts_to_its_end(gpt2: ModelSource) -> None:
    """Progress starts at none, moves by one, and ends at all."""
    steps: list[tuple[int, int]] = []
    profile(
        gpt2,
        sequence_lengths=(8,),
        micro_batch_sizes=(1,),
        progress=lambda done, total, text: steps.append((done, total)),
    )
    assert steps == [(done, 7) for done in (0, 1, 2, 3, 4, 5, 7)]


def test_shards_are_measured_too(tmp_path: Path) -> None:
    """By two, a Llama's rows of both degrees have seconds; the shard's exchanges stay for the cost model to price."""
    measured = profile(
        llama(tmp_path),
        sequence_lengths=(8,),
        micro_batch_sizes=(1,),
        tensor_parallel_degrees=(1, 2),
    )
    rows = [
        row
        for row in measured.layers[1].measurements
        if row.tensor_parallel_degree == 2
    ]
    assert {row.source for row in rows} == {"measured"}
    assert {row.recompute for row in rows} >= {"none", "full"}
    assert all(row.collectives for row in rows)


@pytest.mark.torchrun
def test_other_ranks_load_the_machine(gpt2: ModelSource) -> None:
    """With two ranks, a helper runs the same layers; every row has real seconds, and the profile tells how."""
    measured = profile(
        gpt2,
        sequence_lengths=(8,),
        micro_batch_sizes=(1,),
        concurrency=2,
        time_budget_seconds=1.0,
    )
    assert measured.environment["concurrency"] == "2"
    rows = [row for layer in measured.layers for row in layer.measurements]
    assert {row.source for row in rows} == {"measured"}
    assert all(row.forward_seconds and row.optimizer_seconds for row in rows)


@pytest.mark.parametrize(
    ("arguments", "kind", "field"),
    [
        ({"sequence_lengths": (8, 17)}, DocumentError, "sequence_length"),
        ({"sequence_lengths": ()}, SpecError, "sequence_lengths"),
        ({"sequence_lengths": (8, 8)}, SpecError, "sequence_lengths"),
        ({"micro_batch_sizes": ()}, DocumentError, "micro_batch_sizes"),
        ({"micro_batch_sizes": (0,)}, DocumentError, "micro_batch_sizes"),
        ({"concurrency": 0}, SpecError, "concurrency"),
        ({"time_budget_seconds": 0.0}, SpecError, "time_budget_seconds"),
        ({"device": "tpu"}, SpecError, "device"),
        ({"tensor_parallel_degrees": (1, 3)}, SpecError, "tensor_parallel_degrees"),
    ],
)
def test_wrong_arguments_are_refused(
    gpt2: ModelSource, arguments: dict[str, object], kind: type[SpecError], field: str
) -> None:
    """What cannot be measured is an error that names the argument, before anything is measured."""
    with pytest.raises(kind) as caught:
        profile(
            gpt2, **{"sequence_lengths": (8,), "micro_batch_sizes": (1,), **arguments}
        )  # type: ignore[arg-type]
    assert caught.value.problems[0].field == field


def test_shards_alone_cannot_be_measured_beside_others(tmp_path: Path) -> None:
    """With a load, a profile of nothing but shards would hold no measured row, so it is refused."""
    source = llama(tmp_path)
    with pytest.raises(UnsupportedError, match="only whole layers"):
        profile(
            source,
            sequence_lengths=(8,),
            micro_batch_sizes=(1,),
            tensor_parallel_degrees=(2,),
            concurrency=2,
        )


def test_the_journal_knows_models_of_equal_shapes_apart(
    gpt2: ModelSource, tmp_path: Path, timed: list[LayerWorkload | OptimizerWorkload]
) -> None:
    """Another number of heads changes no parameter's shape, but the seconds: the journal's are not taken."""
    journal = tmp_path / "journal.jsonl"
    profile(gpt2, sequence_lengths=(8,), micro_batch_sizes=(1,), journal=journal)
    timed.clear()
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"n_head": 2', '"n_head": 4'))
    other = load_model(str(path))
    assert other.digest == gpt2.digest
    profile(other, sequence_lengths=(8,), micro_batch_sizes=(1,), journal=journal)
    assert len(timed) == 6


def test_skip_connections_are_measured() -> None:
    """A U-Net's layers, of which some take two tensors, have measured rows, and its skip edges are kept."""
    measured = profile(
        load_model("benchmarks.profiler:u_net"),
        sequence_lengths=(0,),
        micro_batch_sizes=(1,),
    )
    rows = [row for layer in measured.layers for row in layer.measurements]
    assert {row.source for row in rows} == {"measured"}
    assert len(measured.edges) == 3


def test_a_profile_measured_in_fp8_says_so(
    gpt2: ModelSource, tmp_path: Path, timed: list[LayerWorkload | OptimizerWorkload]
) -> None:
    """Its layers multiply in fp8 and keep what is counted; that this device has no such products is told; and seconds
    in bf16 of the same journal are not taken for its own."""
    sizes: dict[str, Any] = {
        "sequence_lengths": (8,),
        "micro_batch_sizes": (1,),
        "journal": tmp_path / "journal.jsonl",
    }
    plain = profile(gpt2, **sizes, dtype="bf16")
    runs = len(timed)
    found = profile(gpt2, **sizes, dtype="bf16", precision="fp8")
    assert (plain.precision, found.precision) == (None, "fp8")
    assert "multiplies nothing in fp8" in found.environment["fp8"]
    assert "fp8" not in plain.environment
    assert len(timed) == 2 * runs
    block = timed[runs + 2].layer.stage.transformer.h[
        0
    ]  # behind the embedding and its optimizer
    assert all(
        "forward" in vars(each)
        for each in (block.attn.c_attn, block.attn.c_proj, block.mlp.c_fc)
    )
    kept = [
        [row.activation_bytes for each in one.layers for row in each.measurements]
        for one in (plain, found)
    ]
    assert kept[0] == kept[1]
