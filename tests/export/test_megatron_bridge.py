"""Plans as functions that write over a recipe of Megatron-Bridge: run on a configuration that takes any field."""

from __future__ import annotations

import sys
from collections import defaultdict
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from planner.errors import UnsupportedError
from planner.export import find
from planner.spec import Plan
from tests.export.plans import plan_of, planned
from tests.export.test_megatron_lm import arguments
from tests.export.texts import with_job


class Fields(SimpleNamespace):
    """A configuration whose parts are made when first asked for."""

    def __getattr__(self, name: str) -> Fields:
        setattr(self, name, Fields())
        return self.__dict__[name]  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def bridge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of these names, with nothing but what the text imports."""
    modules: dict[str, dict[str, Any]] = defaultdict(dict)
    modules["megatron.bridge.training.config"]["ConfigContainer"] = Fields
    modules["megatron.bridge.training.mixed_precision"].update(
        bf16_mixed=lambda: Fields(bf16=True, grad_reduce_in_fp32=True),
        fp16_mixed=lambda: Fields(fp16=True),
        MixedPrecisionConfig=Fields,
    )
    for name in ("megatron", "megatron.bridge", "megatron.bridge.training", *modules):
        module = ModuleType(name)
        vars(module).update(modules.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)


def applied(plan: Plan, layers: int = 12) -> Fields:
    """A configuration after the exported function."""
    names: dict[str, Any] = {}
    exec(find("megatron-bridge").write(plan).text, names)
    cfg = Fields(
        model=Fields(
            num_layers=layers, recompute_granularity="full", sequence_parallel=True
        )
    )
    result: Fields = names["apply_plan"](cfg)
    return result


def test_an_interleaved_plan() -> None:
    """The plan's choices, and None for what it does not use: the recipe's own are gone."""
    model = applied(plan_of("virtual-stages")).model
    assert vars(model) == {
        "num_layers": 12,
        "tensor_model_parallel_size": 1,
        "sequence_parallel": False,
        "context_parallel_size": 1,
        "cp_comm_type": None,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": None,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "pipeline_model_parallel_layout": "Et*3|t*3|t*3|t*3L",
        "microbatch_group_size_per_vp_stage": 2,
        "num_layers_in_first_pipeline_stage": None,
        "num_layers_in_last_pipeline_stage": None,
        "account_for_embedding_in_pipeline_split": False,
        "account_for_loss_in_pipeline_split": False,
        "seq_length": 256,
        "recompute_granularity": None,
        "recompute_method": None,
        "recompute_num_layers": None,
        "recompute_modules": None,
    }


@pytest.mark.parametrize(
    "name",
    ["one-device", "uneven-stages", "hybrid-shards", "per-layer-recompute", "zero-1"],
)
def test_both_megatrons_are_told_the_same(name: str) -> None:
    """Flags of Megatron-LM are fields of the same configurations."""
    plan = plan_of(name)
    cfg, flags = applied(plan), arguments(plan)
    fields = {
        **vars(cfg.model),
        **vars(cfg.train),
        **vars(cfg.ddp),
        **vars(cfg.dist),
        **vars(cfg.optimizer),
    }
    for flag, value in flags.items():
        field = flag.removeprefix("--").replace("-", "_")
        if field in fields:
            assert str(fields[field]) == (value or "True")
    assert {
        "tensor_model_parallel_size",
        "micro_batch_size",
        "overlap_grad_reduce",
    } <= set(fields)
    assert cfg.mixed_precision.grad_reduce_in_fp32 is False


def test_precisions() -> None:
    """fp8 on top of bf16; fp32 by hand, since Megatron-Bridge has no recipe of it."""
    assert vars(applied(plan_of("fp8"), 16).mixed_precision) == {
        "bf16": True,
        "grad_reduce_in_fp32": False,
        "fp8": "hybrid",
        "fp8_recipe": "tensorwise",
    }
    assert (
        applied(
            with_job(plan_of("one-device"), precision="fp16-mixed")
        ).mixed_precision.fp16
        is True
    )
    assert (
        applied(with_job(plan_of("one-device"), precision="fp32")).mixed_precision.fp32
        is True
    )


def test_states_take_four_bytes_whatever_the_recipe_says() -> None:
    """Those of Kimi K2 and others take two, which OptimizerConfig refuses without its precision-aware optimizer."""
    optimizer = applied(plan_of("zero-1")).optimizer
    assert optimizer.use_precision_aware_optimizer is False
    assert {
        vars(optimizer)[f"{name}_dtype"]
        for name in ("main_params", "main_grads", "exp_avg", "exp_avg_sq")
    } == {torch.float32}


@pytest.mark.parametrize(("optimizer", "decouples"), [("adam", False), ("adamw", True)])
def test_weight_decay_is_the_planned_optimizers(
    optimizer: str, decouples: bool
) -> None:
    """Megatron-LM has no flag for it, and tells so; Megatron-Bridge has the field."""
    plan = with_job(plan_of("one-device"), optimizer=optimizer)
    assert applied(plan).optimizer.decoupled_weight_decay is decouples
    assert not find("megatron-bridge").write(plan).warnings
    assert bool(find("megatron-lm").write(plan).warnings) is not decouples


def test_a_recipe_of_another_model_is_told() -> None:
    """Before anything is written."""
    with pytest.raises(
        ValueError, match="the plan is for 12 layers, the recipe's model has 32"
    ):
        applied(plan_of("one-device"), 32)


def test_muon_is_refused() -> None:
    """Its distributed form is chosen in another way than Megatron-LM's."""
    with pytest.raises(UnsupportedError, match="does not do optimizer muon"):
        find("megatron-bridge").write(planned(optimizer="muon"))
