"""Plans for torchtitan, in both of its dialects: TOML read back, and the Python run on a plain configuration."""

from __future__ import annotations

import sys
import tomllib
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    get_schedule_class,
)

from planner.errors import UnsupportedError
from planner.export import find
from planner.export.torchtitan_choices import SCHEDULES
from planner.spec import Plan
from tests.export.plans import plan_of, planned

EXPERTS = "experts"


def toml(plan: Plan) -> dict[str, Any]:
    """The release's sections."""
    return tomllib.loads(find("torchtitan").write(plan).text)


@pytest.fixture
def main(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a plan makes of a configuration of the main branch, whose modules are stood in for."""

    def applied(plan: Plan) -> SimpleNamespace:
        names: dict[str, Any] = {}
        exec(find("torchtitan-main").write(plan).text, names)
        groups = [
            SimpleNamespace(optimizer_name="DistMuon"),
            SimpleNamespace(optimizer_name="AdamW"),
        ]
        sections = {name: SimpleNamespace() for name in ("training", "parallelism")}
        config = SimpleNamespace(
            **sections, optimizer=SimpleNamespace(param_groups=groups)
        )
        result: SimpleNamespace = names["apply_plan"](config)
        return result

    policies = {
        name: SimpleNamespace(Config=lambda name=name: name)
        for name in ("FullAC", "SelectiveAC")
    }
    modules: dict[str, dict[str, Any]] = {
        "torchtitan": {},
        "torchtitan.trainer": {"Trainer": SimpleNamespace(Config=object)},
        "torchtitan.distributed": {},
        "torchtitan.distributed.activation_checkpoint": policies,
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    return applied


def test_an_uneven_plan_on_the_main_branch(main: Any) -> None:
    """Two replicas of two stages with four and eight blocks."""
    config = main(plan_of("uneven-stages"))
    assert vars(config.parallelism) == {
        "data_parallel_replicate_degree": 2,
        "data_parallel_shard_degree": 1,
        "fsdp_reshard_after_forward": "never",
        "tensor_parallel_degree": 1,
        "enable_sequence_parallel": False,
        "context_parallel_degree": 1,
        "expert_parallel_degree": 1,
        "pipeline_parallel_degree": 2,
        "num_pp_microbatches": 8,
        "pipeline_parallel_schedule": "1F1B",
        "pipeline_parallel_schedule_csv": "",
        "module_fqns_per_model_part": [
            ["tok_embeddings", *(f"layers.{number}" for number in range(4))],
            [*(f"layers.{number}" for number in range(4, 12)), "norm", "lm_head"],
        ],
    }
    assert config.training.num_tokens_per_train_step == 16 * 256
    assert config.training.num_tokens_per_microbatch_per_dp_rank == 256
    assert config.activation_checkpoint is None
    assert [group.optimizer_name for group in config.optimizer.param_groups] == [
        "AdamW",
        "AdamW",
    ]


@pytest.mark.parametrize(
    ("name", "are_off"), [("uneven-stages", True), ("zero-1", False)]
)
def test_no_cuda_graphs_of_pipelines(main: Any, name: str, are_off: bool) -> None:
    """Trainer.Config has them on by default, and raises beside pipeline stages."""
    assert hasattr(main(plan_of(name)).training, "disable_cuda_graphs") is are_off


def test_a_plan_for_the_release() -> None:
    """Mixtral on 16 devices: two stages, eight shards, experts over four of them."""
    found = toml(plan_of(EXPERTS))
    parts = found["parallelism"].pop("module_fqns_per_model_part")
    assert [len(part) for part in parts] == [16, 19]
    assert parts[0][:2] == ["tok_embeddings", "layers.0"]
    assert parts[1][-3:] == ["layers.31", "norm", "output"]
    assert found == {
        "training": {
            "local_batch_size": 2,
            "global_batch_size": 16,
            "seq_len": 256,
            "dtype": "float32",
            "mixed_precision_param": "bfloat16",
        },
        "parallelism": {
            "data_parallel_replicate_degree": 1,
            "data_parallel_shard_degree": 8,
            "fsdp_reshard_after_forward": "never",
            "tensor_parallel_degree": 1,
            "context_parallel_degree": 1,
            "expert_parallel_degree": 4,
            "expert_tensor_parallel_degree": 1,
            "pipeline_parallel_degree": 2,
            "pipeline_parallel_microbatch_size": 1,
            "pipeline_parallel_schedule": "1F1B",
            "pipeline_parallel_schedule_csv": "",
        },
        "activation_checkpoint": {"mode": "none", "selective_ac_option": "op"},
        "optimizer": {"name": "AdamW"},
    }


@pytest.mark.parametrize(
    "name",
    ["one-device", "zero-1", "tensor-data-zero-3", "hybrid-shards", "context", EXPERTS],
)
def test_degrees_multiply_to_the_devices(name: str, main: Any) -> None:
    """In both dialects, and so do the samples of a step."""
    plan = plan_of(name)
    found, config = toml(plan), main(plan)
    for degrees in (found["parallelism"], vars(config.parallelism)):
        product = 1
        for axis in (
            "data_parallel_replicate",
            "data_parallel_shard",
            "tensor_parallel",
            "pipeline_parallel",
        ):
            product *= degrees[f"{axis}_degree"]
        assert product * degrees["context_parallel_degree"] == len(plan.placement)
    data = plan.layout.data_parallel_degree
    accumulated = plan.micro_batches if plan.layout.pipeline_parallel_degree == 1 else 1
    assert (
        found["training"]["local_batch_size"] * data * accumulated
        == found["training"]["global_batch_size"]
    )


@pytest.mark.parametrize(
    ("name", "replicate", "shard", "reshard"),
    [
        ("full-recompute", 2, 1, "never"),
        ("zero-2", 1, 4, "never"),
        ("hybrid-shards", 2, 2, "always"),
    ],
)
def test_zero_stages(name: str, replicate: int, shard: int, reshard: str) -> None:
    """No sharding; parameters gathered once; for every pass."""
    found = toml(plan_of(name))["parallelism"]
    keys = (
        "data_parallel_replicate_degree",
        "data_parallel_shard_degree",
        "fsdp_reshard_after_forward",
    )
    assert tuple(found[key] for key in keys) == (replicate, shard, reshard)


def test_schedules_without_a_name_are_read_from_a_file(main: Any) -> None:
    """The one that the target torch-pipelining writes; a warning says so."""
    plan = plan_of("zero-bubble")
    found = main(plan).parallelism
    assert found.pipeline_parallel_schedule == "PipelineScheduleMulti"
    assert found.pipeline_parallel_schedule_csv == find("torch-pipelining").file_name(
        plan
    )
    assert any(
        found.pipeline_parallel_schedule_csv in told
        for told in find("torchtitan-main").write(plan).warnings
    )


def test_the_v_of_a_zero_bubble_has_a_name(main: Any) -> None:
    """torchtitan places its stages by that name."""
    found = main(plan_of("zero-bubble-v")).parallelism
    assert (found.pipeline_parallel_schedule, found.pipeline_parallel_schedule_csv) == (
        "ZBVZeroBubble",
        "",
    )


def test_torch_knows_all_names() -> None:
    """Those of several stages per rank take several."""
    several = {
        name
        for name, theirs in SCHEDULES.items()
        if issubclass(get_schedule_class(theirs), PipelineScheduleMulti)
    }
    assert several == set(SCHEDULES) - {"gpipe", "1f1b"}


@pytest.mark.parametrize(
    ("name", "policy", "warns"),
    [
        ("full-recompute", "FullAC", False),
        ("selective-recompute", "SelectiveAC", True),
        ("per-layer-recompute", "FullAC", True),
    ],
)
def test_recomputation_is_never_less(
    name: str, policy: str, warns: bool, main: Any
) -> None:
    """One policy for all blocks, with a warning where that is more than planned."""
    plan = plan_of(name)
    assert main(plan).activation_checkpoint == policy
    assert (
        any(
            "recomputes" in warning
            for warning in find("torchtitan-main").write(plan).warnings
        )
        == warns
    )


@pytest.mark.parametrize(
    ("target", "layout", "field"),
    [
        ("torchtitan", {"pipeline_parallel_degree": 2}, "request.job.precision"),
        (
            "torchtitan",
            {"pipeline_parallel_degree": 2, "data_parallel_degree": 2},
            "layout.zero_stage",
        ),
        (
            "torchtitan-main",
            {"pipeline_parallel_degree": 2, "data_parallel_degree": 2, "zero_stage": 3},
            "layout.zero_stage",
        ),
        (
            "torchtitan-main",
            {
                "pipeline_parallel_degree": 2,
                "virtual_stages_per_rank": 4,
                "schedule": "hanayo",
            },
            "layout.schedule",
        ),
        ("torchtitan-main", {"optimizer": "sgd"}, "request.job.optimizer"),
    ],
)
def test_what_torchtitan_cannot_do_is_refused(
    target: str, layout: dict[str, Any], field: str
) -> None:
    """bf16 or plain replicas beside stages in the release; sharded parameters beside stages; waves; SGD."""
    with pytest.raises(UnsupportedError) as raised:
        find(target).write(planned(**layout))
    assert raised.value.problems[0].field == field
