"""Plans for DeepSpeed: its configuration, and stages as its pipeline module would build them."""

from __future__ import annotations

import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from planner.errors import UnsupportedError
from planner.export import find
from planner.spec import Plan
from tests.export.plans import LARGE_HOSTS, plan_of, planned


def configuration(plan: Plan) -> dict[str, Any]:
    """DeepSpeed's."""
    found: dict[str, Any] = json.loads(find("deepspeed").write(plan).text)
    return found


def test_four_replicas_under_zero_2() -> None:
    """The whole configuration."""
    assert configuration(plan_of("zero-2")) == {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {}},
        "zero_allow_untested_optimizer": False,
        "zero_optimization": {"stage": 2, "overlap_comm": True},
    }


@pytest.mark.parametrize(
    "name", ["one-device", "full-recompute", "zero-1", "hybrid-shards"]
)
def test_the_batch_adds_up(name: str) -> None:
    """DeepSpeed refuses a configuration where it does not."""
    plan = plan_of(name)
    found = configuration(plan)
    steps = found["gradient_accumulation_steps"] * plan.layout.data_parallel_degree
    assert found["train_batch_size"] == found["train_micro_batch_size_per_gpu"] * steps


def test_groups_that_share_out_states_and_states_on_the_host() -> None:
    """MiCS; offloaded states, which DeepSpeed has with ZeRO only."""
    assert (
        configuration(plan_of("hybrid-shards"))["zero_optimization"]["mics_shard_size"]
        == 2
    )
    layout: dict[str, Any] = {
        "cluster": LARGE_HOSTS,
        "data_parallel_degree": 2,
        "optimizer_offload": True,
    }
    found = configuration(planned(**layout, zero_stage=1))
    assert found["zero_optimization"]["offload_optimizer"] == {
        "device": "cpu",
        "pin_memory": True,
    }
    with pytest.raises(UnsupportedError, match="under ZeRO 1 to 3 only"):
        configuration(planned(**layout))


def test_optimizers() -> None:
    """DeepSpeed's Adam is AdamW unless told; SGD is torch's, untested by DeepSpeed."""
    assert configuration(planned(optimizer="adam"))["optimizer"] == {
        "type": "Adam",
        "params": {"adam_w_mode": False},
    }
    found = configuration(planned(optimizer="momentum"))
    assert found["optimizer"] == {"type": "SGD", "params": {"momentum": 0.9}}
    assert found["zero_allow_untested_optimizer"] is True


def test_recomputation_is_told_to_the_model() -> None:
    """DeepSpeed's configuration has no key for it."""
    (told,) = (
        each
        for each in find("deepspeed").write(plan_of("full-recompute")).warnings
        if "recompute" in each
    )
    assert "of 14 layers 12 in mode full" in told


class PipelineModule:
    """What the exported class overrides of DeepSpeed's `PipelineModule`, and when that calls it; one rank per stage."""

    def __init__(
        self,
        layers: list[Any],
        num_stages: int,
        activation_checkpoint_interval: int,
        **options: Any,
    ) -> None:
        self._layer_specs, self.num_stages, self.options = layers, num_stages, options
        self.interval = activation_checkpoint_interval
        self.global_rank = options["rank"]
        self._topo = SimpleNamespace(get_coord=lambda rank: SimpleNamespace(pipe=rank))
        self._partition_layers(method="parameters")
        self._precompute_checkpointable_values()

    def _set_bounds(self, start: int, stop: int) -> None:
        self.mine = self._layer_specs[start:stop]

    def _partition_layers(self, method: str = "uniform") -> None:
        raise NotImplementedError

    def _precompute_checkpointable_values(self) -> None:
        raise NotImplementedError


@pytest.fixture
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of DeepSpeed's names."""
    package, pipe = ModuleType("deepspeed"), ModuleType("deepspeed.pipe")
    vars(package).update(
        checkpointing=SimpleNamespace(non_reentrant_checkpoint="non-reentrant")
    )
    vars(pipe).update(PipelineModule=PipelineModule)
    monkeypatch.setitem(sys.modules, "deepspeed", package)
    monkeypatch.setitem(sys.modules, "deepspeed.pipe", pipe)


@pytest.mark.parametrize(
    "name",
    ["uneven-stages", "per-layer-recompute", "gpipe", "convolutions", "unlike-halves"],
)
def test_every_rank_builds_the_stage_of_the_plan(name: str, deepspeed: None) -> None:
    """Layers and recomputation of any model, layer by layer."""
    plan, names = plan_of(name), dict[str, Any]()
    exec(find("deepspeed-pipeline").write(plan).text, names)
    layers = [layer.name for stage in plan.stages for layer in stage.layers]
    for stage in plan.stages:
        built = names["PlannedPipeline"](layers, rank=stage.index)
        assert built.num_stages == len(plan.stages)
        assert built.mine == [layer.name for layer in stage.layers]
        again = [layer.recompute != "none" for layer in stage.layers]
        assert built.is_checkpointable_results == again
        assert built.interval == any(
            layer.recompute != "none" for each in plan.stages for layer in each.layers
        )
    assert names["CONFIG"]["gradient_accumulation_steps"] == plan.micro_batches
    with pytest.raises(
        ValueError, match=f"the plan has {len(layers)} layers, got {len(layers) - 1}"
    ):
        names["PlannedPipeline"](layers[1:], rank=0)


def test_what_a_pipeline_does_otherwise_is_told() -> None:
    """Its one schedule, and its one way to recompute."""
    assert any(
        "1f1b instead of gpipe" in each
        for each in find("deepspeed-pipeline").write(plan_of("gpipe")).warnings
    )
    told = find("deepspeed-pipeline").write(plan_of("per-layer-recompute")).warnings
    assert any(
        "recomputes in full 1 layer that the plan recomputes in part" in each
        for each in told
    )


@pytest.mark.parametrize(
    ("target", "name", "field"),
    [
        ("deepspeed", "uneven-stages", "layout.pipeline_parallel_degree"),
        ("deepspeed", "tensor-data-zero-3", "layout.sequence_parallel"),
        ("deepspeed", "context", "layout.context_parallel_degree"),
        ("deepspeed", "fp8", "request.job.precision"),
        ("deepspeed", "adafactor", "request.job.optimizer"),
        ("deepspeed-pipeline", "one-device", "layout.pipeline_parallel_degree"),
        ("deepspeed-pipeline", "virtual-stages", "layout.virtual_stages_per_rank"),
        ("deepspeed-pipeline", "pipelines-side-by-side", "layout.rank_order"),
        ("deepspeed-pipeline", "experts", "layout.expert_parallel_degree"),
    ],
)
def test_what_deepspeed_cannot_do_is_refused(
    target: str, name: str, field: str
) -> None:
    """Without a model made for it."""
    with pytest.raises(UnsupportedError) as raised:
        find(target).write(plan_of(name))
    assert raised.value.problems[0].field == field


def test_a_pipeline_shards_no_gradients() -> None:
    """ZeRO 2 beside stages is refused, as DeepSpeed itself does."""
    plan = planned(pipeline_parallel_degree=2, data_parallel_degree=2, zero_stage=2)
    with pytest.raises(UnsupportedError, match="not compatible with ZeRO 2 and 3"):
        find("deepspeed-pipeline").write(plan)
