"""Actions for torch.distributed.pipelining: its own runtime reads them, and finds a whole step in them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from planner.errors import UnsupportedError
from planner.export import find
from planner.spec import Plan
from tests.export.plans import plan_of, planned

TARGET = find("torch-pipelining")
PIPELINES = (
    "uneven-stages",
    "virtual-stages",
    "zero-bubble",
    "zero-bubble-v",
    "gpipe",
    "mixed-nodes",
    "convolutions",
)


def loaded(plan: Plan, folder: Path) -> Any:
    """torch's runtime, as rank 0 has it, with the actions of the export."""
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    path = folder / TARGET.file_name(plan)
    path.write_text(TARGET.write(plan).text, encoding="utf-8")
    stages = [
        SimpleNamespace(
            num_stages=len(plan.stages),
            group_size=len(plan.actions),
            group_rank=0,
            is_last=False,
            stage_index=index,
        )
        for index in {stage.index for stage in plan.stages if stage.pipeline_rank == 0}
    ]
    runtime: Any = _PipelineScheduleRuntime(stages, n_microbatches=plan.micro_batches)  # type: ignore[arg-type]
    runtime._load_csv(str(path), format="compute_only")
    return runtime


def simulate(runtime: Any) -> None:
    """torch's simulation of the actions and the transfers that it added, which fails where ranks wait for ever.

    It knows nothing of what torch adds for sharded parameters.
    """
    from torch.distributed.pipelining import schedules

    sharding = {schedules.UNSHARD, schedules.RESHARD, schedules.REDUCE_GRAD}
    rows = runtime.pipeline_order_with_comms.items()
    order = {
        rank: [each for each in row if each.computation_type not in sharding]
        for rank, row in rows
    }
    mapping = runtime.stage_index_to_group_rank
    schedules._simulate_comms_compute(order, lambda stage: mapping[stage], len(mapping))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PIPELINES)
def test_torch_reads_a_whole_step(name: str, tmp_path: Path) -> None:
    """Every stage runs forward and backward of every micro-batch, on its rank; torch's own simulation of it ends."""
    plan = plan_of(name)
    runtime = loaded(plan, tmp_path)
    assert runtime.stage_index_to_group_rank == {
        stage.index: stage.pipeline_rank for stage in plan.stages
    }
    simulate(runtime)
    kinds = Counter(
        (action.stage_index, action.computation_type.value)
        for row in runtime.pipeline_order.values()
        for action in row
    )
    for stage in plan.stages:
        done = {kind: kinds[stage.index, kind] for kind in "FBIW"}
        assert done["F"] == plan.micro_batches
        assert done["B"] + done["I"] == done["B"] + done["W"] == plan.micro_batches


@pytest.mark.parametrize("name", ["uneven-stages", "virtual-stages", "zero-bubble-v"])
def test_a_plan_without_actions_has_those_of_its_schedule(name: str) -> None:
    """Plans were once stored without their actions: the schedule's name makes the same ones."""
    plan = plan_of(name)
    assert TARGET.write(plan.model_copy(update={"actions": ()})) == TARGET.write(plan)


def test_an_order_that_was_lost_is_refused() -> None:
    """A synthesized order cannot be made from its name."""
    plan = plan_of("uneven-stages")
    lost = plan.model_copy(
        update={
            "actions": (),
            "layout": plan.layout.model_copy(update={"schedule": "synthesized"}),
        }
    )
    with pytest.raises(UnsupportedError, match="actions"):
        TARGET.write(lost)


def test_stages_on_two_ranks_are_refused() -> None:
    """torch keeps one rank per stage; under chimera every stage has two."""
    plan = planned(pipeline_parallel_degree=2, schedule="chimera")
    with pytest.raises(UnsupportedError, match=r"layout\.schedule"):
        TARGET.write(plan)


def test_what_the_actions_do_not_say_is_said() -> None:
    """The warnings hold the stage map, the precision and every layer that recomputes."""
    plan = plan_of("per-layer-recompute")
    told = " ".join(TARGET.write(plan).warnings)
    assert "11, 3 layers" in told
    assert "precision=bf16-mixed" in told
    modes = {
        layer.name: layer.recompute for stage in plan.stages for layer in stage.layers
    }
    assert [name for name, mode in modes.items() if mode == "selective"] == [
        "transformer.h.4"
    ]
    assert "selective recomputation of transformer.h.4:" in told
    assert [name for name, mode in modes.items() if mode == "full"] == [
        f"transformer.h.{block}" for block in range(4)
    ]
    assert "full recomputation of transformer.h.0 to transformer.h.3:" in told
