"""What a rank holds of a model with frozen parameters is what the plan says, and nothing waits for gradients of
theirs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from planner.check import check
from planner.errors import MismatchError
from planner.executor import Executor
from planner.executor.dry_run import COMPARED, DryRun, dry_run
from planner.profiler.count import profile
from planner.profiler.models import ModelSource, load_model
from planner.search import make_request, plan_layout
from planner.spec import Cluster, Job, NodeGroup, Plan
from planner.spec.layout import PredictionLayout
from planner.spec.profile import ModelProfile
from tests.executor.plans import make_plan, source_of

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = Cluster(
    node_groups=(NodeGroup(device="a100-sxm4-40gb", nodes=1, devices_per_node=4),)
)


def _planned(found: ModelProfile, **fields: Any) -> Plan:
    """On four devices, in half precision with master copies."""
    length = found.layers[0].measurements[0].sequence_length
    job = Job(
        global_batch_size=8,
        sequence_length=length,
        precision="bf16-mixed",
        optimizer="adamw",
    )
    layout = PredictionLayout(micro_batch_size=1, schedule="1f1b", **fields)
    plan = plan_layout(make_request(found, CLUSTER, job), found, layout)
    assert isinstance(plan, Plan)
    assert check(plan, found).problems == ()
    return plan


def _counted(source: ModelSource, **splits: Any) -> ModelProfile:
    length = 16 if source.input_kind == "tokens" else 0
    return profile(
        source, sequence_length=length, micro_batch_sizes=(1,), dtype="bf16", **splits
    )


def _held(run: DryRun) -> int:
    return sum(getattr(kind.built, name) for kind in run.ranks for name in COMPARED)


@pytest.mark.parametrize(
    ("model", "split"),
    [
        ("adapted_llama", {"data": 2, "pipeline": 2}),
        ("adapted_llama", {"data": 2, "tensor": 2}),
        ("adapted_mixtral", {"data": 4, "expert": 2}),
        ("norms_of_gpt2", {"data": 2, "pipeline": 2}),
        ("top_of_llama", {"data": 2, "pipeline": 2}),
        ("frozen_encoder", {"data": 2, "pipeline": 2}),
    ],
)
def test_a_dry_run_holds_what_the_plan_says(
    model: str, split: dict[str, int], tmp_path: Path
) -> None:
    """Parameters, gradients and states of every rank, in every ZeRO stage, with tied and shared out parameters; and the
    independent check gets the same numbers."""
    source = source_of(model, tmp_path)
    splits = {
        f"{axis}_parallel_degrees": (1, split[axis])
        for axis in ("tensor", "expert")
        if axis in split
    }
    found = _counted(source, **splits)
    for zero_stage in (0, 1, 2, 3):
        degrees = {f"{axis}_parallel_degree": degree for axis, degree in split.items()}
        run = dry_run(_planned(found, zero_stage=zero_stage, **degrees), source)
        assert run.differences == ()


def test_adapters_take_a_part_of_the_memory_of_whole_training(tmp_path: Path) -> None:
    """Two bytes of a frozen parameter instead of sixteen."""
    adapted, whole = (source_of(name, tmp_path) for name in ("adapted_llama", "llama"))
    runs = [
        dry_run(_planned(_counted(source), data_parallel_degree=4), source)
        for source in (adapted, whole)
    ]
    trained = sum(
        each.numel() for each in adapted.blueprint.parameters() if each.requires_grad
    )
    base = sum(each.numel() for each in whole.blueprint.parameters())
    assert [_held(run) - run.ranks[0].tolerance_bytes for run in runs] == pytest.approx(
        [2 * base + 16 * trained, 16 * base], rel=1e-3
    )


def test_a_dry_rank_holds_what_a_real_one_holds(tmp_path: Path) -> None:
    """To the byte, counters of the optimizer included."""
    source = source_of("adapted_llama", tmp_path)
    plan = make_plan(
        [layer.name for layer in source.cut().layers],
        precision="bf16-mixed",
        micro_batches=1,
    )
    (kind,) = dry_run(plan, source).ranks
    executor = Executor(plan, source, device="cpu")
    real = executor.train(1).ranks[0]
    assert all(
        (each.grad is not None) is each.requires_grad
        for each in executor.part.module.parameters()
    )
    executor.close()
    for name in ("parameters", *COMPARED):
        assert getattr(kind.built, name) == getattr(real, name), name


def test_a_stage_lets_go_of_what_needs_no_gradient(tmp_path: Path) -> None:
    """From forward to backward torch would hold the inputs of every micro-batch, which nothing frozen keeps."""
    source = source_of("top_of_llama", tmp_path)
    plan = make_plan([layer.name for layer in source.cut().layers], micro_batches=1)
    executor = Executor(plan, source, device="cpu")
    (stage,) = executor.part.runtime._stages
    executor.train(1)  # which makes the stage ready
    stage.clear_runtime_states()
    stage.forward_one_chunk(0, (torch.zeros(1, 16, dtype=torch.long),))
    _, taken = stage.fwd_cache[0]
    executor.close()
    assert taken == [None]


def test_the_guides_adapters_train(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page's own code, narrower: the first step leaves the first matrices as they are, for the others are zero."""
    page = (ROOT / "docs" / "guides" / "fine-tune.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    narrower = "\n\ndef narrow():\n    return build(width=64, layers=2)\n"
    (tmp_path / "adapted_by_the_guide.py").write_text(code + narrower, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    source = load_model("adapted_by_the_guide:narrow")
    plan = make_plan(
        [layer.name for layer in source.cut().layers], micro_batches=1, optimizer="sgd"
    )
    executor = Executor(plan, source, device="cpu", learning_rate=1.0)
    before = {
        name: each.detach().clone()
        for name, each in executor.part.module.named_parameters()
    }
    executor.train(1)
    after = dict(executor.part.module.named_parameters())
    executor.close()
    moved = {
        name for name, value in before.items() if not torch.equal(value, after[name])
    }
    assert moved == {name for name in before if name.endswith("up.weight")}
    assert all(not before[name].any() for name in moved)


def test_a_plan_of_whole_training_is_refused(tmp_path: Path) -> None:
    """It promises memory and time of gradients that are not there; and the other way round."""
    frozen, whole = (source_of(name, tmp_path) for name in ("top_of_llama", "llama"))
    for planned, given in ((frozen, whole), (whole, frozen)):
        with pytest.raises(MismatchError, match="other ones of which are frozen"):
            dry_run(_planned(_counted(planned), data_parallel_degree=4), given)
