"""Trained weights out of a run's checkpoints: the executor's own values, as `--weights` and transformers read them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from planner.errors import DocumentError, PlannerError, RunError
from planner.executor import Executor
from planner.executor.checkpoint import trained_weights
from planner.executor.checkpoint.folder import MANIFEST
from planner.executor.checkpoint.trained_weights import INDEX, NAME, write_weights
from planner.executor.checkpoint.weights import Weights
from planner.executor.settings import CheckpointPolicy
from planner.profiler.models import ModelSource
from tests.executor.plans import make_plan, source_of

FILE_BYTES = 20_000
Values = dict[str, torch.Tensor]


def _train(name: str, folder: Path, **options: Any) -> tuple[ModelSource, Values]:
    """The model, trained for two steps with a checkpoint after each, and its values: master copies where it has any."""
    source = source_of(name, folder)
    plan = make_plan(
        [layer.name for layer in source.cut().layers], micro_batches=1, **options
    )
    data = "synthetic" if options.get("sequence_length") == 0 else "stdlib"
    executor = Executor(plan, source, device="cpu", learning_rate=0.01, data=data)
    try:
        executor.train(
            2, checkpoints=CheckpointPolicy(directory=folder / "kept", every=1)
        )
        part = executor.part
        masters = {
            each: states["master"]
            for each, states in part.optimizer.named_states().items()
            if "master" in states
        }
        kept = part.module.state_dict()
        own = [
            each
            for each, _ in (
                *part.module.named_parameters(),
                *part.module.named_buffers(),
            )
            if each in kept
        ]
        return source, {
            each: masters.get(each, kept[each]).detach().clone() for each in own
        }
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a run's checkpoints under `kept`."""
    folder = tmp_path_factory.mktemp("gpt2")
    _train("gpt2", folder)
    return folder


def _in_files(folder: Path) -> Values:
    """All tensors of a folder's files, none twice."""
    files = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    assert len({name for file in files for name in file}) == sum(map(len, files))
    return {name: value for file in files for name, value in file.items()}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gpt2", {}),
        ("gpt2", {"precision": "bf16-mixed"}),
        ("mixtral", {"precision": "bf16"}),
        ("resnet", {"sequence_length": 0}),
    ],
    ids=lambda each: (
        each if isinstance(each, str) else "-".join(map(str, each.values()))
    ),
)
def test_values_are_those_of_the_run(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Bit for bit, tied ones once, buffers too; and `--weights` gives a model of fp32 the same."""
    source, values = _train(name, tmp_path, **options)
    written = write_weights(
        tmp_path / "kept", tmp_path / "w", max_shard_bytes=FILE_BYTES
    )
    assert (written.checkpoint.name, written.manifest.step, written.tensors) == (
        "step-00000002",
        2,
        len(values),
    )
    found = _in_files(tmp_path / "w")
    assert found.keys() == values.keys()
    assert all(
        found[each].dtype == value.dtype and torch.equal(found[each], value)
        for each, value in values.items()
    )
    assert Weights(tmp_path / "w").remark(source.build()) is None
    prepare = partial(source.cut().stage, start=0, stop=len(source.cut().layers))
    again = (
        Weights(tmp_path / "w")
        .materialise(source, prepare, device=torch.device("cpu"), seed=1)
        .state_dict()
    )
    assert all(
        torch.equal(again[each], value.to(again[each].dtype))
        for each, value in values.items()
    )
    if source.config is not None:
        _check_transformers(source.build(), tmp_path / "w", values)


def _check_transformers(model: Any, folder: Path, values: Values) -> None:
    """`from_pretrained` finds every name, and no further ones."""
    model.config.save_pretrained(folder)
    loaded, told = type(model).from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(told.values())
    state = cast("torch.nn.Module", loaded).state_dict()
    assert all(
        torch.equal(state[each], value.float()) for each, value in values.items()
    )


def test_files_are_split_as_transformers_does(gpt2: Path, tmp_path: Path) -> None:
    """None larger than told; an index of all names. The size of one is enough for one file, without an index."""
    split = write_weights(gpt2 / "kept", tmp_path / "split", max_shard_bytes=FILE_BYTES)
    *files, index = split.files
    assert files == [
        f"model-{place:05d}-of-{len(files):05d}.safetensors"
        for place in range(1, len(files) + 1)
    ]
    assert index == INDEX
    assert sorted(path.name for path in (tmp_path / "split").iterdir()) == sorted(
        split.files
    )
    told = json.loads((tmp_path / "split" / INDEX).read_text())
    held = {file: load_file(tmp_path / "split" / file) for file in files}
    assert told["weight_map"] == {
        name: file for file, tensors in held.items() for name in tensors
    }
    sizes = {
        file: [value.nbytes for value in tensors.values()]
        for file, tensors in held.items()
    }
    assert all(sum(each) <= FILE_BYTES or len(each) == 1 for each in sizes.values())
    total = sum(map(sum, sizes.values()))
    assert told["metadata"]["total_size"] == total
    assert list(
        write_weights(gpt2 / "kept", tmp_path / "one", max_shard_bytes=total).files
    ) == [NAME]
    assert (
        len(
            write_weights(
                gpt2 / "kept", tmp_path / "two", max_shard_bytes=total - 1
            ).files
        )
        == 3
    )


def test_older_weights_are_replaced_when_told(gpt2: Path, tmp_path: Path) -> None:
    """Not mixed with the new ones; all else stays. An older checkpoint is taken when it is named."""
    write_weights(gpt2 / "kept", tmp_path, max_shard_bytes=FILE_BYTES)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(DocumentError, match=r"is not empty: it holds config.json"):
        write_weights(gpt2 / "kept", tmp_path, max_shard_bytes=10**9)
    before = _in_files(tmp_path)
    write_weights(
        gpt2 / "kept" / "step-00000001", tmp_path, max_shard_bytes=10**9, overwrite=True
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", NAME]
    after = _in_files(tmp_path)
    assert after.keys() == before.keys()
    assert any(not torch.equal(after[name], value) for name, value in before.items())


def test_a_write_that_fails_leaves_what_there_was(
    gpt2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older weights stay whole, and no draft is left."""

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    write_weights(gpt2 / "kept", tmp_path, max_shard_bytes=10**9)
    monkeypatch.setattr(trained_weights, "save_file", full)
    with pytest.raises(
        RunError, match=r"could not be written: No space left on device"
    ):
        write_weights(
            gpt2 / "kept", tmp_path, max_shard_bytes=FILE_BYTES, overwrite=True
        )
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_what_is_no_checkpoint_is_refused(gpt2: Path, tmp_path: Path) -> None:
    """No folder, an empty one, one that lost its manifest, damaged ones; and a file in the place of the folder."""

    def told(checkpoint: Path, output: str = "w") -> str:
        with pytest.raises(PlannerError) as raised:
            write_weights(checkpoint, tmp_path / output, max_shard_bytes=10**9)
        assert not (tmp_path / "w").exists()
        (problem,) = raised.value.problems
        assert problem.hint
        return f"{problem.field}: {problem.message}"

    kept = tmp_path / "kept"
    shutil.copytree(gpt2 / "kept", kept)
    assert told(tmp_path / "none") == f"{tmp_path / 'none'}: there is no such folder."
    assert told(tmp_path) == f"{tmp_path}: holds neither checkpoints nor a {MANIFEST}."
    assert told(kept, "kept/step-00000001/" + MANIFEST).endswith("is no folder.")
    (data,) = (kept / "step-00000001").glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-1])
    found = told(kept / "step-00000001")
    assert found.startswith(f"{kept / 'step-00000001'}: ")
    assert f"is damaged: {data.name} is not as it was written" in found
    (kept / "step-00000002" / MANIFEST).unlink()
    assert f"holds step-00000002, which has no {MANIFEST} any more" in told(kept)
    assert "holds neither checkpoints" in told(kept / "step-00000002")
