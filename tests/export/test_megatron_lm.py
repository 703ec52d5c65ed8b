"""Plans as arguments of Megatron-LM: read back by a shell and by a second parser of its layout strings."""

from __future__ import annotations

import re
import subprocess
from itertools import product

import pytest

from planner.errors import UnsupportedError
from planner.export import find
from planner.export.megatron_pipeline import recomputation
from planner.export.transformer import Transformer, TransformerStage
from planner.spec import Plan
from planner.spec.profile import RecomputeMode
from tests.export.plans import plan_of, planned

WRITTEN = (
    "one-device",
    "uneven-stages",
    "per-layer-recompute",
    "full-recompute",
    "selective-recompute",
    "virtual-stages",
    "gpipe",
    "hybrid-shards",
    "experts",
    "pipelines-side-by-side",
)


def arguments(plan: Plan) -> dict[str, str]:
    """Flags and values, as a shell passes them on."""
    text = find("megatron-lm").write(plan).text
    shell = ["bash", "-euc", f'{text}\nprintf "%s\\n" "${{PLAN_ARGS[@]}}"']
    words = subprocess.run(
        shell, capture_output=True, text=True, check=True
    ).stdout.split()
    found: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            flag = word
            found[flag] = []
        else:
            found[flag].append(word)
    return {flag: " ".join(values) for flag, values in found.items()}


def test_an_interleaved_plan_with_uneven_stages() -> None:
    """All flags of a plan, in full."""
    assert find("megatron-lm").write(plan_of("virtual-stages")).text.splitlines()[
        2:
    ] == [
        "# Use: source this file, then torchrun ... pretrain_gpt.py \"${PLAN_ARGS[@]}\" and your model's and data's "
        "arguments.",
        "PLAN_ARGS=(",
        "    --tensor-model-parallel-size 1",
        "    --num-layers 12",
        "    --pipeline-model-parallel-size 2",
        "    --pipeline-model-parallel-layout 'Et*3|t*3|t*3|t*3L'",
        "    --microbatch-group-size-per-virtual-pipeline-stage 2",
        "    --micro-batch-size 1",
        "    --global-batch-size 16",
        "    --seq-length 256",
        "    --optimizer adam",
        "    --bf16",
        "    --grad-reduce-in-bf16",
        ")",
    ]


@pytest.mark.parametrize("name", WRITTEN)
def test_the_layout_string_has_the_layers_of_every_stage(name: str) -> None:
    """Megatron-LM gives string s // ranks, s % ranks to a rank: in the order of the plan's stages."""
    plan = plan_of(name)
    found = arguments(plan)
    text = found.get("--pipeline-model-parallel-layout", f"Et*{found['--num-layers']}L")
    stages = re.sub(r"(.)\*(\d+)", lambda match: match[1] * int(match[2]), text).split(
        "|"
    )
    assert [len(stage) for stage in stages] == [
        len(stage.layers) for stage in plan.stages
    ]
    assert "".join(stages) == f"E{'t' * int(found['--num-layers'])}L"
    assert len(stages) % int(found["--pipeline-model-parallel-size"]) == 0
    assert [stage.pipeline_rank for stage in plan.stages] == [
        index % int(found["--pipeline-model-parallel-size"])
        for index in range(len(stages))
    ]


@pytest.mark.parametrize("name", WRITTEN)
def test_the_global_batch_is_that_of_the_plan(name: str) -> None:
    """Megatron-LM derives the data-parallel degree of devices / (tensor x pipeline x context)."""
    plan, found = plan_of(name), arguments(plan_of(name))
    model_parallel = int(found["--tensor-model-parallel-size"]) * int(
        found["--pipeline-model-parallel-size"]
    )
    data = len(plan.placement) // (
        model_parallel * int(found.get("--context-parallel-size", 1))
    )
    per_round = data * int(found["--micro-batch-size"])
    assert int(found["--global-batch-size"]) == per_round * plan.micro_batches


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        (
            "hybrid-shards",
            {"--num-distributed-optimizer-instances": "2", "--use-megatron-fsdp": ""},
        ),
        ("zero-1", {"--use-distributed-optimizer": "", "--overlap-param-gather": ""}),
        (
            "tensor-data-zero-3",
            {
                "--data-parallel-sharding-strategy": "optim_grads_params",
                "--sequence-parallel": "",
            },
        ),
        (
            "experts",
            {"--expert-model-parallel-size": "4", "--expert-tensor-parallel-size": "1"},
        ),
        ("pipelines-side-by-side", {"--use-tp-pp-dp-mapping": ""}),
        ("fp8", {"--bf16": "", "--fp8-format": "hybrid", "--fp8-recipe": "tensorwise"}),
        ("context", {"--context-parallel-size": "2", "--cp-comm-type": "all_gather"}),
        (
            "states-on-host",
            {"--optimizer-cpu-offload": "", "--use-precision-aware-optimizer": ""},
        ),
        (
            "selective-recompute",
            {
                "--recompute-granularity": "selective",
                "--recompute-modules": "layernorm mlp moe",
            },
        ),
    ],
)
def test_choices_become_flags(name: str, flags: dict[str, str]) -> None:
    """And what is not chosen has none."""
    assert flags.items() <= arguments(plan_of(name)).items()
    assert not set(flags) & {
        flag for flag in arguments(plan_of("one-device")) if flag != "--bf16"
    }


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("tensor-data-zero-3", "unset"),
        ("zero-2", "unset"),
        ("context", "1"),
        ("zero-1", "1"),
    ],
)
def test_connections_are_what_megatron_checks(name: str, found: str) -> None:
    """1 where ranks split layers; under FSDP any but 1, though the shell has it so; else as the shell has it."""
    show = 'echo "${CUDA_DEVICE_MAX_CONNECTIONS-unset}"'
    shell = [
        "bash",
        "-euc",
        f"CUDA_DEVICE_MAX_CONNECTIONS=1\n{find('megatron-lm').write(plan_of(name)).text}\n{show}",
    ]
    assert (
        subprocess.run(shell, capture_output=True, text=True, check=True).stdout.strip()
        == found
    )


def test_sgd_has_no_momentum_unless_planned() -> None:
    """Megatron-LM's own default is 0.9."""
    assert arguments(planned(optimizer="sgd"))["--sgd-momentum"] == "0.0"
    assert arguments(planned(optimizer="momentum"))["--sgd-momentum"] == "0.9"


def test_recomputation_is_the_least_that_holds_the_plans_memory() -> None:
    """Of two stages with three and two blocks, in all modes; a warning tells wherever it is not the plan's."""
    worth: dict[RecomputeMode, float] = {
        "none": 0,
        "selective": 1,
        "attention": 1.5,
        "full": 2,
    }
    for modes in product(worth, repeat=5):
        stages = tuple(
            TransformerStage(True, part, False) for part in (modes[:3], modes[3:])
        )
        chosen = recomputation(Transformer("layers", stages))
        wanted = [
            sorted((worth[mode] for mode in stage.recompute), reverse=True)
            for stage in stages
        ]
        run = [
            _run(chosen.granularity, chosen.method, chosen.blocks, stage.blocks)
            for stage in stages
        ]
        assert _covers(run, wanted)
        assert bool(chosen.warning) == (run != wanted or "selective" in modes)
        assert chosen.granularity == (
            "full"
            if {"attention", "full"} & set(modes)
            else "selective"
            if "selective" in modes
            else None
        )
        fewer = [
            [_run("full", "block", count, stage.blocks) for stage in stages]
            for count in range(4)
        ]
        if chosen.granularity == "full":
            assert sum(map(sum, run)) == min(
                sum(map(sum, each)) for each in fewer if _covers(each, wanted)
            )


@pytest.mark.parametrize(
    ("mode", "modules"),
    [
        ("norms", ("layernorm", "moe_act")),
        ("latent", ("layernorm", "moe_act", "mla_up_proj")),
        ("mlp", ("mlp", "moe")),
    ],
)
def test_modes_of_modules_are_named(
    mode: RecomputeMode, modules: tuple[str, ...]
) -> None:
    """If all blocks have the mode; else whole blocks run again, with a warning."""
    first = TransformerStage(True, (mode, mode), False)
    found = recomputation(Transformer("layers", (first,)))
    assert (found.granularity, found.modules) == ("selective", modules)
    assert not found.warning
    second = TransformerStage(False, (mode, "none"), True)
    found = recomputation(Transformer("layers", (first, second)))
    assert (found.granularity, found.blocks) == ("full", 2)
    assert found.warning.endswith(f"the plan, [2, 1] in mode {mode}.")


def _run(
    granularity: str | None, method: str | None, count: int | None, blocks: int
) -> list[int]:
    """What Megatron-Core recomputes of each block of a stage: `megatron/core/recompute.py`."""
    if granularity is None:
        return [0] * blocks
    if granularity == "selective":
        return [1] * blocks
    return [
        2 if method == "uniform" or number < (count or 0) else 0
        for number in range(blocks)
    ]


def _covers(run: list[list[int]], wanted: list[list[float]]) -> bool:
    return all(
        a >= b
        for one, other in zip(run, wanted, strict=True)
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("name", ["gpipe", "zero-bubble"])
def test_another_order_that_holds_less_is_told(name: str) -> None:
    """1f1b in place of GPipe and of ZB-H1."""
    plan = plan_of(name)
    (warning,) = find("megatron-lm").write(plan).warnings
    assert f"runs the order of 1f1b instead of {plan.layout.schedule}" in warning
    assert find("megatron-lm").write(plan_of("uneven-stages")).warnings == ()


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("zero-bubble-v", "layout.schedule"),
        ("uneven-shares", "layout.micro_batch_shares"),
        ("sequence-chunks", "layout.sequence_chunks"),
        ("activations-on-host", "layout.activation_offload"),
        ("adafactor", "request.job.optimizer"),
        ("convolutions", "stages"),
    ],
)
def test_what_megatron_cannot_do_is_refused(name: str, field: str) -> None:
    """Each names the field of the plan, and what to plan instead."""
    with pytest.raises(UnsupportedError) as raised:
        find("megatron-lm").write(plan_of(name))
    assert raised.value.problems[0].field == field
    assert raised.value.problems[0].hint


@pytest.mark.parametrize(
    ("layout", "field"),
    [
        (
            {
                "schedule": "interleaved-memory-optimised",
                "pipeline_parallel_degree": 2,
                "virtual_stages_per_rank": 2,
            },
            "layout.schedule",
        ),
        (
            {"data_parallel_degree": 2, "zero_stage": 2, "pipeline_parallel_degree": 2},
            "layout.pipeline_parallel_degree",
        ),
        (
            {"data_parallel_degree": 2, "zero_stage": 1, "optimizer": "sgd"},
            "layout.zero_stage",
        ),
        ({"precision": "bf16"}, "request.job.precision"),
        (
            {
                "schedule": "interleaved-1f1b",
                "pipeline_parallel_degree": 4,
                "virtual_stages_per_rank": 2,
                "batch": 2,
            },
            "micro_batches",
        ),
    ],
)
def test_what_would_not_hold_the_memory_or_start_is_refused(
    layout: dict[str, object], field: str
) -> None:
    """A longer warm-up, Megatron-FSDP beside stages, its distributed optimizer without Adam, no master copy."""
    with pytest.raises(UnsupportedError) as raised:
        find("megatron-lm").write(planned(**layout))  # type: ignore[arg-type]
    assert raised.value.problems[0].field == field
