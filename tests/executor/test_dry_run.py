"""A dry run builds what a real run holds, for ranks and devices that do not exist."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import planner.executor.dry_run as module
from planner.errors import MismatchError, UnsupportedError
from planner.executor import Executor
from planner.executor.dry_run import COMPARED, DryRank, dry_run
from planner.executor.support import Grid
from planner.profiler import count
from planner.profiler.models import ModelSource
from planner.search import make_request, plan_layout
from planner.spec import Cluster, Job, NodeGroup, Plan
from planner.spec.layout import PredictionLayout
from planner.spec.plan import RankMemory
from tests.executor.plans import make_plan, source_of


def _plan(source: ModelSource, *sizes: int, **options: Any) -> Plan:
    return make_plan(
        [layer.name for layer in source.cut().layers], sizes or None, **options
    )


@pytest.mark.parametrize(
    "optimizer", ["momentum", "adam", "adafactor", "muon", "adam-8bit"]
)
@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed", "fp8"])
def test_a_dry_rank_holds_what_a_real_one_holds(
    optimizer: str, precision: str, tmp_path: Path
) -> None:
    """Parameters, gradients and optimizer states of one rank, to the byte, counters included."""
    source = source_of("gpt2", tmp_path)
    plan = _plan(source, optimizer=optimizer, precision=precision, micro_batches=1)
    (kind,) = dry_run(plan, source).ranks
    executor = Executor(plan, source, device="cpu")
    real = executor.train(1).ranks[0]
    executor.close()
    for name in ("parameters", *COMPARED):
        assert getattr(kind.built, name) == getattr(real, name), name


def test_ranks_add_up_to_the_model(tmp_path: Path) -> None:
    """Stages hold every parameter once, tied ones once per stage; shards of a stage hold its split part."""
    source = source_of("llama", tmp_path)
    whole = sum(parameter.numel() for parameter in source.blueprint.parameters())
    staged = dry_run(_plan(source, 2, 3, 1), source).ranks
    assert sum(kind.built.parameters for kind in staged) == whole
    split = dry_run(_plan(source, 3, 3, data=3, tensor=2), source).ranks
    assert [kind.ranks for kind in split] == [tuple(range(6)), tuple(range(6, 12))]
    assert whole / 2 < sum(kind.built.parameters for kind in split) < whole
    tied = source_of("gpt2", tmp_path)
    blueprint = tied.blueprint
    embedding = 256 * 32
    held = sum(kind.built.parameters for kind in dry_run(_plan(tied, 3, 3), tied).ranks)
    assert (
        held
        == sum(parameter.numel() for parameter in blueprint.parameters()) + embedding
    )


def test_a_derived_shard_holds_what_the_profile_counts(tmp_path: Path) -> None:
    """Of a model that nobody has told how to split."""
    source = source_of("gpt2", tmp_path)
    rows = count.count(
        source, micro_batch_size=1, sequence_length=8, tensor_parallel_degree=2
    )
    counted = sum(
        rows[layer.kind].local_parameters or 0 for layer in source.cut().layers
    )
    tied = 256 * 32 // 2
    (kind,) = dry_run(_plan(source, 6, tensor=2), source).ranks
    assert kind.built.parameters == counted - tied


def test_one_of_every_share_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas with fewer micro-batches run by other schedules; what they hold is the same."""
    source, built = source_of("llama", tmp_path), []

    def build(plan: Plan, source: ModelSource, grid: Grid, rank: int) -> Any:
        built.append(rank)
        return real(plan, source, grid, rank)

    real = module._build
    monkeypatch.setattr(module, "_build", build)
    kinds = dry_run(
        _plan(source, 3, 3, data=3, shares=(3, 3, 1), rank_order="tp-cp-pp-dp"), source
    ).ranks
    assert [kind.ranks for kind in kinds] == [(0, 2, 4), (1, 3, 5)]
    assert built == [0, 4, 1, 5]


def _predicting(plan: Plan, rows: list[dict[str, int]]) -> Plan:
    others = (
        "activations_bytes",
        "temporary_bytes",
        "reserved_bytes",
        "peak_bytes",
        "capacity_bytes",
    )
    memory = tuple(
        RankMemory(pipeline_rank=rank, **row, **dict.fromkeys(others, 0))
        for rank, row in enumerate(rows)
    )
    return plan.model_copy(
        update={"prediction": plan.prediction.model_copy(update={"memory": memory})}
    )


def test_what_is_not_as_predicted_is_named(tmp_path: Path) -> None:
    """Rank and both figures; counters of an optimizer are no difference; a missing prediction is one."""
    source = source_of("gpt2", tmp_path)
    plan = _plan(source, 2, 4)
    kinds = dry_run(plan, source).ranks
    assert dry_run(plan, source).differences == tuple(
        f"rank {rank}: the plan predicts no memory of pipeline rank {rank}"
        for rank in range(2)
    )
    bytes_of = [
        {"parameters_bytes": 4 * n, "gradients_bytes": 4 * n, "optimizer_bytes": 8 * n}
        for n in (kind.built.parameters for kind in kinds)
    ]
    assert kinds[0].built.optimizer_bytes > bytes_of[0]["optimizer_bytes"]
    assert dry_run(_predicting(plan, bytes_of), source).differences == ()
    bytes_of[1]["gradients_bytes"] -= 4
    right = bytes_of[1]["parameters_bytes"]
    (difference,) = dry_run(_predicting(plan, bytes_of), source).differences
    assert (
        difference == f"rank 1: gradients_bytes is {right}, predicted {right - 4} (+4)"
    )


def test_refusals(tmp_path: Path) -> None:
    """Another model, a plan that cannot be run, and a process that is a rank already."""
    source = source_of("gpt2", tmp_path)
    plan = _plan(source)
    with pytest.raises(
        MismatchError, match=r"position 1 the plan has transformer\.h\.0"
    ):
        dry_run(plan, source_of("llama", tmp_path))
    with pytest.raises(UnsupportedError, match="zero_stage"):
        dry_run(_plan(source, data=2, optimizer="adafactor", zero=1), source)
    executor = Executor(plan, source, device="cpu")
    with pytest.raises(UnsupportedError, match="is a rank of a process group"):
        dry_run(plan, source)
    executor.close()
    dry_run(plan, source)
    assert not dist.is_initialized()


def test_states_in_8_bits_are_as_promised(tmp_path: Path) -> None:
    """Of tensor-parallel parts, in two stages, shared out or not: two bytes per parameter, scales and counters."""
    source = source_of("llama", tmp_path)
    profile = count.profile(
        source,
        sequence_length=16,
        micro_batch_sizes=(1,),
        tensor_parallel_degrees=(1, 2),
    )
    cluster = Cluster(
        node_groups=(NodeGroup(device="a100-sxm4-40gb", nodes=1, devices_per_node=8),)
    )
    degrees = {f"{axis}_parallel_degree": 2 for axis in ("data", "tensor", "pipeline")}
    for zero_stage, divided in {0: 1, 3: 2}.items():
        layout = PredictionLayout(
            zero_stage=zero_stage, micro_batch_size=1, schedule="1f1b", **degrees
        )
        job = Job(
            global_batch_size=8,
            sequence_length=16,
            precision="fp32",
            optimizer="adam-8bit",
        )
        plan = plan_layout(make_request(profile, cluster, job), profile, layout)
        assert isinstance(plan, Plan)
        found = dry_run(plan, source)
        assert found.differences == ()
        for kind in found.ranks:
            assert (
                2.0 < divided * kind.built.optimizer_bytes / kind.built.parameters < 2.3
            )


@pytest.mark.parametrize(
    "split",
    [
        {"pipeline_parallel_degree": 2},
        {"expert_parallel_degree": 2},
        {"zero_shard_degree": 2},
    ],
)
def test_zero_leaves_what_the_cost_model_promises(
    split: dict[str, int], tmp_path: Path
) -> None:
    """Two replicas of two stages, and four replicas that share out experts, or share states out by twos: parts of all
    that each rank would hold.
    """
    model = "mixtral" if "expert_parallel_degree" in split else "gpt2"
    source = source_of(model, tmp_path)
    degrees = (1, 2) if model == "mixtral" else (1,)
    profile = count.profile(
        source,
        sequence_length=16,
        micro_batch_sizes=(1,),
        expert_parallel_degrees=degrees,
        dtype="bf16",
    )
    job = Job(
        global_batch_size=8,
        sequence_length=16,
        precision="bf16-mixed",
        optimizer="adamw",
    )
    cluster = Cluster(
        node_groups=(NodeGroup(device="a100-sxm4-40gb", nodes=1, devices_per_node=4),)
    )
    whole: tuple[DryRank, ...] = ()
    for zero_stage in (0, 1, 2, 3):
        layout = PredictionLayout(
            data_parallel_degree=4 // split.get("pipeline_parallel_degree", 1),
            zero_stage=zero_stage,
            micro_batch_size=1,
            schedule="1f1b",
            **{
                field: value
                for field, value in split.items()
                if zero_stage or field != "zero_shard_degree"
            },
        )
        plan = plan_layout(make_request(profile, cluster, job), profile, layout)
        assert isinstance(plan, Plan)
        found = dry_run(plan, source)
        assert found.differences == ()
        whole = whole or found.ranks
        for kind, unsharded in zip(found.ranks, whole, strict=True):
            for least, name in enumerate(
                ("optimizer_bytes", "gradients_bytes", "parameters_bytes"), start=1
            ):
                part = getattr(kind.built, name) / getattr(unsharded.built, name)
                assert (
                    part < 0.6
                    if zero_stage >= least
                    else part == pytest.approx(1, abs=0.01)
                ), name
