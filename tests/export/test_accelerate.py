"""Plans for accelerate: the exported function, run with stand-ins that keep their arguments."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from planner.errors import UnsupportedError
from planner.export import find
from planner.spec import Plan
from tests.export.plans import plan_of, planned


@pytest.fixture(autouse=True)
def accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every class gives back what it was called with."""
    package, utils = ModuleType("accelerate"), ModuleType("accelerate.utils")
    vars(package).update(
        Accelerator=dict, ParallelismConfig=dict, FullyShardedDataParallelPlugin=dict
    )
    vars(utils).update(GradientAccumulationPlugin=dict)
    monkeypatch.setitem(sys.modules, "accelerate", package)
    monkeypatch.setitem(sys.modules, "accelerate.utils", utils)


def run(plan: Plan) -> dict[str, Any]:
    """The names of the exported file."""
    names: dict[str, Any] = {}
    exec(find("accelerate").write(plan).text, names)
    return names


def test_hybrid_shards() -> None:
    """Two groups of two ranks under ZeRO 3."""
    names = run(plan_of("hybrid-shards"))
    assert names["make_accelerator"]() == {
        "mixed_precision": "bf16",
        "gradient_accumulation_plugin": {"num_steps": 4, "sync_each_batch": True},
        "parallelism_config": {
            "dp_replicate_size": 2,
            "dp_shard_size": 2,
            "cp_size": 1,
            "tp_size": 1,
        },
        "fsdp_plugin": {
            "fsdp_version": 2,
            "reshard_after_forward": True,
            "auto_wrap_policy": "transformer_based_wrap",
            "activation_checkpointing": False,
        },
    }
    assert (names["MICRO_BATCH_SIZE"], names["SEQUENCE_LENGTH"]) == (1, 256)
    assert names["OPTIMIZER"] is torch.optim.AdamW


@pytest.mark.parametrize(
    ("stage", "reshards", "syncs"),
    [(1, False, False), (2, False, True), (3, True, True)],
)
def test_zero_stages(stage: int, reshards: bool, syncs: bool) -> None:
    """Gradients are whole between micro-batches under ZeRO 1 only; parameters between passes under ZeRO 1 and 2."""
    made = run(planned(data_parallel_degree=2, zero_stage=stage))["make_accelerator"]()
    assert made["fsdp_plugin"]["reshard_after_forward"] is reshards
    assert made["gradient_accumulation_plugin"]["sync_each_batch"] is syncs


def test_plain_replicas_and_recomputation() -> None:
    """Replicas are the default, and recomputation is then the model's own affair, which a warning tells."""
    plan = plan_of("full-recompute")
    assert set(run(plan)["make_accelerator"]()) == {
        "mixed_precision",
        "gradient_accumulation_plugin",
    }
    assert any(
        "leaves recomputation to the model" in warning
        for warning in find("accelerate").write(plan).warnings
    )
    sharded = planned(data_parallel_degree=2, zero_stage=3, recompute="full")
    assert (
        run(sharded)["make_accelerator"]()["fsdp_plugin"]["activation_checkpointing"]
        is True
    )


def test_momentum() -> None:
    """torch's SGD has none by default."""
    made = run(planned(optimizer="momentum"))["OPTIMIZER"](
        [torch.nn.Parameter(torch.ones(1))], lr=0.1
    )
    assert made.defaults["momentum"] == 0.9


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("uneven-stages", "layout.pipeline_parallel_degree"),
        ("context", "layout.zero_stage"),
        ("tensor-data-zero-3", "layout.sequence_parallel"),
        ("states-on-host", "layout.optimizer_offload"),
        ("uneven-shares", "layout.micro_batch_shares"),
        ("fp8", "request.job.precision"),
    ],
)
def test_what_accelerate_cannot_do_is_refused(name: str, field: str) -> None:
    """Each names the field of the plan."""
    with pytest.raises(UnsupportedError) as raised:
        find("accelerate").write(plan_of(name))
    assert raised.value.problems[0].field == field
