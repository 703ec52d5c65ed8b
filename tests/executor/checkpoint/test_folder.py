"""The folder of checkpoints: complete or ignored, the newest kept, damage found."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.errors import DocumentError, MismatchError, RunError
from planner.executor.checkpoint.folder import (
    MANIFEST,
    Manifest,
    Trained,
    check_policy,
    check_same_training,
    clear_partial,
    complete,
    damaged,
    facts_of,
    final_path,
    layout_digest,
    partial_path,
    publish,
    read_manifest,
    refuse_damaged,
    used_alone,
)
from planner.executor.settings import CheckpointPolicy
from tests.executor.plans import make_plan

LAYERS = ("a", "b")


def _manifest(step: int, folder: Path | None = None) -> Manifest:
    plan = make_plan(LAYERS)
    files = (
        {}
        if folder is None
        else {path.name: facts_of(path) for path in folder.iterdir()}
    )
    trained = Trained.of(plan, "0" * 64, seed=1)
    layout = layout_digest(plan)
    return Manifest(
        step=step,
        samples=4 * step,
        plan_id=plan.id,
        layout=layout,
        model="m",
        trained=trained,
        files=files,
    )


def _save(folder: Path, step: int, *, keep: int = 3) -> Path:
    path = partial_path(folder, step)
    path.mkdir()
    for name in ("x", "y", "z"):
        (path / name).write_text(f"{name}{step}" * 1000)
    publish(folder, step, _manifest(step, path), keep)
    return final_path(folder, step)


def test_the_newest_are_kept(tmp_path: Path) -> None:
    """In order of their steps; what was being written, or has another name, is no checkpoint."""
    assert complete(tmp_path / "missing") == []
    for step in (9, 100, 20):
        _save(tmp_path, step, keep=2)
    partial_path(tmp_path, 300).mkdir()
    (tmp_path / "step-00000400").mkdir()
    (tmp_path / "notes").mkdir()
    assert complete(tmp_path) == [final_path(tmp_path, 20), final_path(tmp_path, 100)]
    clear_partial(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["notes", "step-00000020", "step-00000100", "step-00000400"]


@pytest.mark.parametrize("change", ["flipped", "shorter", "missing"])
def test_damage_is_found(tmp_path: Path, change: str) -> None:
    """A changed, shortened or missing file, by whichever share it falls to."""
    path = _save(tmp_path, 7)
    manifest = read_manifest(path)
    assert damaged(path, manifest) == []
    text = (path / "y").read_text()
    if change == "missing":
        (path / "y").unlink()
    else:
        (path / "y").write_text("Y" + text[1:] if change == "flipped" else text[:-1])
    assert damaged(path, manifest) == ["y"]
    assert [damaged(path, manifest, share=share, shares=3) for share in range(3)] == [
        [],
        ["y"],
        [],
    ]
    with pytest.raises(
        RunError, match=r"(?s)step-00000007 is damaged: y is not.*remove step-00000007"
    ):
        refuse_damaged(path, ["y"])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is damaged: manifest.json: is not valid JSON"),
        ("[]", "is damaged: manifest.json: "),
        ('{"step": 7}', "is damaged: manifest.json: "),
        (
            '{"schema_version": 2, "shape": "new"}',
            "is of form 2, this version reads form 1",
        ),
    ],
)
def test_a_manifest_that_cannot_be_read_is_told(
    tmp_path: Path, text: str, told: str
) -> None:
    """It advised to write JSON, and of a newer one to give 1."""
    path = _save(tmp_path, 7)
    (path / MANIFEST).write_text(text)
    with pytest.raises(
        RunError, match=r"checkpoint_dir: the checkpoint .*step-00000007"
    ) as caught:
        read_manifest(path)
    assert told in str(caught.value)
    assert ("remove step-00000007" in str(caught.value)) == ("damaged" in told)


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    """Unless the run resumes; a new folder is made; a file is no folder."""
    folder = tmp_path / "new" / "checkpoints"
    check_policy(CheckpointPolicy(directory=folder))
    _save(folder, 3)
    check_policy(CheckpointPolicy(directory=folder, resume=True))
    with pytest.raises(DocumentError, match=r"already holds step-00000003.*resume"):
        check_policy(CheckpointPolicy(directory=folder))
    with pytest.raises(DocumentError, match="cannot be made"):
        check_policy(CheckpointPolicy(directory=final_path(folder, 3) / MANIFEST))


def test_another_training_is_refused() -> None:
    """With both values; another layout of the same job is the same training."""
    manifest = _manifest(5)
    check_same_training(
        manifest, Trained.of(make_plan(LAYERS, (1, 1)), "0" * 64, seed=1)
    )
    with pytest.raises(
        MismatchError,
        match="seed: the checkpoint of step 5 was trained with 1, this run has 2",
    ):
        check_same_training(manifest, Trained.of(make_plan(LAYERS), "0" * 64, seed=2))
    with pytest.raises(MismatchError, match="model_digest"):
        check_same_training(manifest, Trained.of(make_plan(LAYERS), "1" * 64, seed=1))


def test_layouts_are_told_apart() -> None:
    """By their stages too, which a plan's id does not tell."""
    assert layout_digest(make_plan(LAYERS, (1, 1))) == layout_digest(
        make_plan(LAYERS, (1, 1))
    )
    assert (
        len(
            {
                layout_digest(make_plan(LAYERS, sizes, data=data))
                for sizes in ((2,), (1, 1))
                for data in (1, 2)
            }
        )
        == 4
    )
    assert layout_digest(make_plan(LAYERS, data=2, shares=(3, 1))) != layout_digest(
        make_plan(LAYERS, data=2)
    )


def test_layouts_of_old_checkpoints_are_known_again() -> None:
    """As written before layouts had an order of ranks, shares, or groups of ZeRO."""
    digest = "a896470b7ab0e265dd2e3b6adfc0d44f9458c9e63ab791b9ac69141561e9413e"
    assert layout_digest(make_plan(LAYERS, (1, 1))) == digest


def test_links_to_checkpoints_are_removed_and_not_what_they_name(
    tmp_path: Path,
) -> None:
    """A run that began from a link to another's checkpoint failed when the link was the oldest."""
    others, folder = tmp_path / "others", tmp_path / "mine"
    others.mkdir()
    folder.mkdir()
    first = _save(others, 1)
    final_path(folder, 1).symlink_to(first)
    partial_path(folder, 7).symlink_to(first)
    clear_partial(folder)
    _save(folder, 2, keep=1)
    assert [path.name for path in folder.iterdir()] == ["step-00000002"]
    assert damaged(first, read_manifest(first)) == []


def test_a_checkpoint_that_lost_its_manifest_is_not_passed_over(tmp_path: Path) -> None:
    """The run went on from an older one, or from the first step, without a word."""
    for step in (1, 2):
        _save(tmp_path, step)
    for resume in (True, False):
        (final_path(tmp_path, 2) / MANIFEST).unlink(missing_ok=True)
        with pytest.raises(DocumentError, match=r"holds step-0000000[12]"):
            check_policy(CheckpointPolicy(directory=tmp_path, resume=resume))
    with pytest.raises(
        DocumentError,
        match=r"no manifest.json any more.*remove it to go on from step-00000001",
    ):
        check_policy(CheckpointPolicy(directory=tmp_path, resume=True))
    (final_path(tmp_path, 1) / MANIFEST).unlink()
    with pytest.raises(DocumentError, match="remove it to begin anew"):
        check_policy(CheckpointPolicy(directory=tmp_path))


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    """Each wrote over the other's files; after the first has ended, the next one may."""
    with (
        used_alone(tmp_path),
        pytest.raises(DocumentError, match="is used by another run"),
        used_alone(tmp_path),
    ):
        pass
    with used_alone(tmp_path):
        assert list(tmp_path.iterdir()) == []
