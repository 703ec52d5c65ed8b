"""`planner profile`: counted for a catalogue device, and measured here."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.cli.profile_text import noise_warning, profile_text
from planner.errors import SpecError
from planner.profiling import LONGEST_DEFAULT, sequence_lengths
from planner.spec import LayerProfile, Measurement, ModelProfile, parse, read
from tests.cli.support import Command

ANALYTIC = ("--device", "analytic:a100-sxm4-80gb")
SEQUENTIAL = "tests.cli.tiny_models:sequential"


def test_analytic_catalogue_profile(planner: Command, tmp_path: Path) -> None:
    """A catalogue model is priced for a catalogue device: seconds in every row, the source still `counted`."""
    path = tmp_path / "profile.json"
    words = (
        "--sequence-length",
        "128",
        "--micro-batch-sizes",
        "1,2",
        "--tensor-parallel",
        "1",
        "--dtype",
        "bf16",
    )
    ended = planner("profile", "gpt2", *ANALYTIC, *words, "-o", path)
    profile = read(ModelProfile, path)
    rows = [row for layer in profile.layers for row in layer.measurements]
    assert (ended.code, ended.err) == (0, f"wrote {path}\n")
    assert "14 layers" in ended.out
    assert "counted for a100-sxm4-80gb" in ended.out
    assert "124 M parameters" in ended.out
    assert (profile.model, profile.device, profile.dtype) == (
        "gpt2",
        "a100-sxm4-80gb",
        "bf16",
    )
    assert {row.micro_batch_size for row in rows} == {1, 2}
    assert {
        (row.sequence_length, row.tensor_parallel_degree, row.source) for row in rows
    } == {(128, 1, "counted")}
    assert all(
        row.forward_seconds is not None and row.forward_seconds > 0 for row in rows
    )


def test_stdout_is_the_document(planner: Command) -> None:
    """Without -o, and with `-o -`, stdout has the profile alone; the table is on stderr."""
    words = (
        "profile",
        "gpt2",
        *ANALYTIC,
        "--sequence-length",
        "64",
        "--micro-batch-sizes",
        "1",
    )
    ended = planner(*words)
    assert (
        ended.json == planner(*words, "-o", "-").json == planner(*words, "--json").json
    )
    assert parse(ModelProfile, ended.json).model == "gpt2"
    assert "GPT2Block" in ended.err


def test_analytic_profile_of_a_callable(planner: Command) -> None:
    """The user's own model is counted on meta tensors."""
    profile = parse(
        ModelProfile, planner("profile", SEQUENTIAL, *ANALYTIC, "--json").json
    )
    assert sum(layer.parameters for layer in profile.layers) == 4 * (16 * 16 + 16)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("gpt3", *ANALYTIC), "gpt3-"),
        (("gpt2-mediun", *ANALYTIC), "gpt2-medium"),
        (("gpt2", "--device", "analytic:h1000"), "h1000"),
        (("gpt2", "--device", "tpu"), "tpu"),
        (("gpt2", "--device", "cdua"), "did you mean 'cuda'"),
        (("gpt2", "--device", "l4-24gb"), "analytic:l4-24gb"),
        (("gpt2", *ANALYTIC, "--dtype", "bf61"), "did you mean 'bf16'"),
        (("gpt2", *ANALYTIC, "--precision", "fp8", "--dtype", "fp16"), "--dtype"),
        (("gpt2", *ANALYTIC, "--sequence-length", "4096"), "1024"),
        (("gpt2", *ANALYTIC, "--tensor-parallel", "5"), "tensor"),
        (("gpt2", "--device", "analytic:v100-sxm2-32gb", "--dtype", "bf16"), "bf16"),
        (("gpt2", *ANALYTIC, "--concurrency", "4"), "--concurrency"),
        (
            ("gpt2", *ANALYTIC, "--micro-batch-sizes", "0,1"),
            "--micro-batch-sizes: '0' is not at least 1",
        ),
        (("resnet-50", *ANALYTIC, "--sequence-length", "8"), "--sequence-length"),
        (("absent/config.json", *ANALYTIC), "absent/config.json"),
        (("tests.cli.tiny_models:absent", *ANALYTIC), "absent"),
        (("tests.cli.tiny_models:not_a_model", *ANALYTIC), "not_a_model"),
    ],
)
def test_wrong_input(planner: Command, words: tuple[str, ...], named: str) -> None:
    """The error names what cannot be profiled, or what is near."""
    ended = planner("profile", *words)
    assert (ended.code, ended.out) == (2, "")
    assert named in ended.err
    assert "unexpected" not in ended.err


def test_default_sequence_length() -> None:
    """The model's longest, at most 4096; nothing for a model without a sequence."""
    assert sequence_lengths(None, 1024) == (1024,)
    assert sequence_lengths(None, 131072) == (LONGEST_DEFAULT,)
    assert sequence_lengths((128, 8192), 131072) == (128, 8192)
    assert sequence_lengths(None, 0) == (0,)
    with pytest.raises(SpecError):
        sequence_lengths((8,), 0)


@pytest.mark.parametrize("model", ["gpt2", "tests.cli.tiny_models:tokens"])
def test_several_lengths(planner: Command, model: str) -> None:
    """One profile holds the rows of all lengths, whether counted before or now."""
    words = ("--sequence-length", "64,32", "--micro-batch-sizes", "1,2")
    profile = parse(
        ModelProfile, planner("profile", model, *ANALYTIC, *words, "--json").json
    )
    for layer in profile.layers:
        sizes = {
            (row.micro_batch_size, row.sequence_length) for row in layer.measurements
        }
        assert sizes == {(1, 32), (2, 32), (1, 64), (2, 64)}


def test_the_user_names_the_cut(planner: Command) -> None:
    """Layers start at the named modules, which the profile records for the executor."""
    words = (
        "profile",
        "tests.profiler.graphs:resnet",
        *ANALYTIC,
        "--micro-batch-sizes",
        "1",
        "--json",
    )
    named = parse(ModelProfile, planner(*words, "--cut", "layer2.*,fc").json)
    assert [layer.name for layer in named.layers] == [
        "conv1",
        "layer2.0",
        "layer2.1",
        "layer2.2",
        "fc",
    ]
    assert named.cut == ("layer2.*", "fc")
    found = parse(ModelProfile, planner(*words).json)
    assert (len(found.layers), found.cut) == (7, ())


@pytest.mark.parametrize(
    ("cut", "named"), [("layer3", "did you mean"), ("layer1,,fc", "empty name")]
)
def test_wrong_cut(planner: Command, cut: str, named: str) -> None:
    """A name that no module has is refused with near ones."""
    ended = planner("profile", "tests.profiler.graphs:resnet", *ANALYTIC, "--cut", cut)
    assert (ended.code, ended.out) == (2, "")
    assert named in ended.err


def test_warning_about_a_model_of_one_layer(planner: Command, tmp_path: Path) -> None:
    """What cannot be cut becomes one layer, with the reason in the profile and on stderr."""
    words = (
        "--micro-batch-sizes",
        "1",
        "--dtype",
        "fp32",
        "-o",
        tmp_path / "profile.json",
    )
    ended = planner("profile", "tests.profiler.graphs:untraceable", *ANALYTIC, *words)
    profile = read(ModelProfile, tmp_path / "profile.json")
    assert [layer.name for layer in profile.layers] == ["model"]
    assert "Untraceable uses a tensor" in profile.environment["cut"]
    assert "one layer: Untraceable uses a tensor" in ended.err
    assert "data and tensor parallelism only" in ended.err


def test_counts_at_other_sizes(planner: Command) -> None:
    """Profiles have polynomials of their layers, unless a decoder's counts follow from its sizes."""
    words = (*ANALYTIC, "--micro-batch-sizes", "1,2", "--json")
    for model in (SEQUENTIAL, "vgg16"):
        ended = planner("profile", model, *words)
        profile = parse(ModelProfile, ended.json)
        assert all(layer.polynomials for layer in profile.layers)
        assert "no polynomials" not in ended.err
    ended = planner("profile", "gpt2", *words, "--sequence-length", "64")
    decoder = parse(ModelProfile, ended.json)
    assert decoder.transformer is not None
    assert not any(layer.polynomials for layer in decoder.layers)
    assert "no polynomials" not in ended.err


def test_warning_about_counts_that_are_no_polynomials(planner: Command) -> None:
    """One line names the kinds of layers, and what it means for plans."""
    padded = "tests.profiler.test_count_polynomials:padded"
    ended = planner("profile", padded, *ANALYTIC, "--micro-batch-sizes", "1,2")
    (line,) = [each for each in ended.err.splitlines() if "no polynomials" in each]
    profile = ended.json
    without = [each["kind"] for each in profile["layers"] if "polynomials" not in each]
    assert len(without) == 2
    assert f"counts of {', '.join(without)} are no polynomials of the size" in line
    assert "micro-batch sizes of this profile only" in line


def test_warning_about_noise() -> None:
    """Samples that spread by more than a tenth give a warning with the machine's conditions; others do not."""
    row = Measurement(
        micro_batch_size=1,
        sequence_length=0,
        forward_flops=1,
        backward_input_flops=1,
        backward_weight_flops=1,
        forward_seconds=1.0,
        backward_input_seconds=1.0,
        backward_weight_seconds=1.0,
        activation_bytes=1,
        output_bytes=1,
        temporary_bytes=1,
        relative_spread=0.25,
        source="measured",
    )

    def profile(spread: float | None) -> ModelProfile:
        rows = (row.model_copy(update={"relative_spread": spread}),)
        layers = (LayerProfile(name="0", kind="a", parameters=1, measurements=rows),)
        return ModelProfile(
            model="m",
            device="cpu",
            layers=layers,
            environment={"load_average": "3 before, 5 after"},
        )

    warning = noise_warning(profile(0.25))
    assert warning is not None
    assert "25.0 %" in warning
    assert "load_average 3 before, 5 after" in warning
    assert noise_warning(profile(0.05)) is None
    assert noise_warning(profile(None)) is None
    assert "25.0 %" in profile_text(profile(0.25))


def test_context_parallel_ranks_are_counted_not_measured(planner: Command) -> None:
    """One process has no part of a sequence whose other parts are on other ranks."""
    ended = planner("profile", "gpt2", "--device", "cpu", "--context-parallel", "1,2")
    assert ended.code == 2
    assert "--context-parallel: cannot be measured" in ended.err


def test_context_parallel_rows_of_a_catalogue_model(planner: Command) -> None:
    """The profile has rows of every context-parallel degree."""
    words = (
        "--sequence-length",
        "64",
        "--micro-batch-sizes",
        "1",
        "--context-parallel",
        "1,2",
        "--json",
    )
    profile = parse(ModelProfile, planner("profile", "gpt2", *ANALYTIC, *words).json)
    assert {
        row.context_parallel_degree
        for layer in profile.layers
        for row in layer.measurements
    } == {1, 2}
