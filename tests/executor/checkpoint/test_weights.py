"""Initial values from safetensors: read by name, for this rank's stages, by whoever holds a share."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file, save_model

from planner.errors import DocumentError, MismatchError
from planner.executor import Executor
from planner.executor.checkpoint.weights import Weights
from planner.executor.parallel.expert_parallel import keep_share
from planner.executor.reference import train_reference
from planner.profiler.models import ModelSource
from tests.executor.plans import make_plan, source_of

CPU = torch.device("cpu")


def trained(source: ModelSource) -> torch.nn.Module:
    """A model with values of its own."""
    torch.manual_seed(7)
    model = source.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("name", ["gpt2", "tied-llama", "mlp", "unet"])
def test_every_parameter_gets_its_value(name: str, tmp_path: Path) -> None:
    """Of a stage, tied ones too, which a file holds once."""
    source = source_of(name, tmp_path)
    model = trained(source)
    save_model(model, str(tmp_path / "model.safetensors"))
    cut = source.cut()
    middle = len(cut.layers) // 2
    expected = dict(model.named_parameters(remove_duplicate=False))
    for start, stop in ((0, middle), (middle, len(cut.layers))):
        prepare = partial(cut.stage, start=start, stop=stop)
        stage = Weights(tmp_path / "model.safetensors").materialise(
            source, prepare, device=CPU, seed=0
        )
        held = dict(stage.named_parameters(remove_duplicate=False))
        assert held
        assert all(torch.equal(value, expected[each]) for each, value in held.items())


def test_what_save_pretrained_writes(tmp_path: Path) -> None:
    """In several files, and without the prefix of the base model, as older ones are."""
    source = source_of("gpt2", tmp_path)
    model = trained(source)
    cast("Any", model).save_pretrained(tmp_path / "whole", max_shard_size="20KB")
    assert len(list((tmp_path / "whole").glob("*.safetensors"))) > 1
    base = model.get_submodule("transformer")
    state = {name: value.contiguous() for name, value in base.state_dict().items()}
    save_file(state, tmp_path / "base.safetensors")
    cut = source.cut()
    for path in (tmp_path / "whole", tmp_path / "base.safetensors"):
        found = (
            Weights(path)
            .materialise(
                source,
                lambda whole: cut.stage(whole, 0, len(cut.layers)),
                device=CPU,
                seed=0,
            )
            .state_dict()
        )
        assert all(
            torch.equal(found[name], value)
            for name, value in model.state_dict().items()
        )


@pytest.mark.parametrize("name", ["deepseek-v3", "resnet"])
def test_buffers_that_files_hold_are_read_too(name: str, tmp_path: Path) -> None:
    """A router's correction and running statistics were left as the constructor made them, without a word."""
    source = source_of(name, tmp_path)
    model = trained(source)
    for buffer in model.buffers():
        buffer.add_(3)
    state = {each: value.clone() for each, value in model.state_dict().items()}
    held = [each for each, _ in model.named_buffers() if each in state]
    assert held
    lacking = {each: value for each, value in state.items() if each != held[0]}
    cut = source.cut()
    for stored in (state, lacking):
        save_file(stored, tmp_path / "w.safetensors")
        prepare = partial(cut.stage, start=0, stop=len(cut.layers))
        found = (
            Weights(tmp_path / "w.safetensors")
            .materialise(source, prepare, device=CPU, seed=0)
            .state_dict()
        )
        assert [
            each for each in held if not torch.equal(found[each], state[each])
        ] == held[: len(state) - len(stored)]


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe"])
def test_experts_that_stand_one_by_one(name: str, tmp_path: Path) -> None:
    """As `save_pretrained` writes them: every rank of an expert-parallel group gets its own, in one tensor."""
    source = source_of(name, tmp_path)
    model = trained(source)
    cast("Any", model).save_pretrained(tmp_path / "w")
    expected = dict(model.named_parameters())
    cut = source.cut()
    experts = [each for each in expected if ".experts." in each]
    for rank in range(2):
        group = cast(
            "Any",
            SimpleNamespace(get_local_rank=lambda mine=rank: mine, size=lambda: 2),
        )
        stage = Weights(tmp_path / "w").materialise(
            source,
            lambda whole: cut.stage(whole, 0, len(cut.layers)),
            device=CPU,
            seed=0,
            narrow=partial(keep_share, source, group),
        )
        held = dict(stage.named_parameters())
        assert held.keys() == expected.keys()
        assert len(experts) >= 4
        for each, value in held.items():
            share = expected[each].chunk(2)[rank] if each in experts else expected[each]
            assert torch.equal(value, share), each


def test_a_run_starts_from_them(tmp_path: Path) -> None:
    """The first loss is that of a single process from the same file, and not that of the seed."""
    source = source_of("mlp", tmp_path)
    save_file(
        {**trained(source).state_dict(), "further": torch.zeros(1)},
        tmp_path / "w.safetensors",
    )
    plan = make_plan([layer.name for layer in source.cut().layers], sequence_length=0)
    losses = {}
    for weights in (None, tmp_path / "w.safetensors"):
        executor = Executor(
            plan,
            source,
            data="synthetic",
            device="cpu",
            weights=weights,
            deterministic=True,
        )
        measured = executor.train(steps=2)
        losses[weights] = measured.losses
        told = f"{weights} holds a tensor that the model does not have, such as further: left out"
        assert measured.warnings == (() if weights is None else (told,))
        assert torch.are_deterministic_algorithms_enabled()
        executor.close()
        torch.use_deterministic_algorithms(False)
        expected = train_reference(
            plan, source, steps=2, data="synthetic", weights=weights
        ).losses
        assert losses[weights] == pytest.approx(expected, abs=1e-6)
    assert abs(losses[None][0] - losses[tmp_path / "w.safetensors"][0]) > 0.01


@pytest.mark.parametrize(
    "name", ["gpt2", "tied-llama", "mixtral", "deepseek-v3", "resnet"]
)
def test_what_the_model_does_not_have_is_told(name: str, tmp_path: Path) -> None:
    """The first layers of a deeper model were taken for this one's, without a word; all of its own is used."""
    source = source_of(name, tmp_path)
    model = trained(source)
    whole, deeper = tmp_path / "whole", tmp_path / "deeper.safetensors"
    if hasattr(model, "save_pretrained"):
        cast("Any", model).save_pretrained(whole)
    else:
        whole.mkdir()
        save_model(model, str(whole / "model.safetensors"))
    assert Weights(whole).unused(source.blueprint) == ()
    assert Weights(whole).remark(source.blueprint) is None
    state = {each: value.clone() for each, value in model.state_dict().items()}
    save_file(state | {"model.layers.9.norm.weight": torch.zeros(3)}, deeper)
    assert Weights(deeper).unused(source.blueprint) == ("model.layers.9.norm.weight",)
    told = Weights(deeper).remark(source.blueprint)
    assert (
        told
        == f"{deeper} holds a tensor that the model does not have, such as model.layers.9.norm.weight: left out"
    )


def test_other_weights_are_refused(tmp_path: Path) -> None:
    """Missing names, other shapes, no file, no safetensors."""
    source = source_of("mlp", tmp_path)
    state = trained(source).state_dict()
    name = next(iter(state))
    cut = source.cut()

    def load(path: Path) -> None:
        Weights(path).materialise(
            source,
            lambda whole: cut.stage(whole, 0, len(cut.layers)),
            device=CPU,
            seed=0,
        )

    path = tmp_path / "w.safetensors"
    save_file({each: value for each, value in state.items() if each != name}, path)
    with pytest.raises(MismatchError, match=f"hold no '{name}'"):
        load(path)
    save_file(state | {name: torch.zeros(3)}, path)
    with pytest.raises(MismatchError, match=r"of shape \(3,\) in the files"):
        load(path)
    for quantized in (torch.float8_e4m3fn, torch.int8):
        save_file(state | {name: state[name].to(quantized)}, path)
        with pytest.raises(
            MismatchError, match="not quantized"
        ):  # its scales stand elsewhere, and were left out
            load(path)
    path.write_text("no tensors")
    for wrong in (path, tmp_path / "nothing.safetensors"):
        with pytest.raises(DocumentError, match="cannot be read"):
            load(wrong)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DocumentError, match=r"holds no \.safetensors file"):
        load(tmp_path / "empty")
