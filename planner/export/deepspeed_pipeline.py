"""DeepSpeed's pipeline engine: the plan as a Python file with its configuration and a `PipelineModule`.

`PipelineModule` has no argument for stages of given sizes, and recomputes every so many layers; the file overrides the
methods that do both (`_partition_layers`, `_precompute_checkpointable_values` of `deepspeed/runtime/pipe/module.py`).
"""

from __future__ import annotations

import json

from planner.export.deepspeed import VERSION, configuration, told
from planner.export.demands import demand
from planner.export.order import follow
from planner.export.target import Export, Target, header, refuse
from planner.spec import Plan
from planner.spec.recompute import is_partial
from planner.spec.words import counted

_NAME = "DeepSpeed's pipeline engine"


def write(plan: Plan) -> Export:
    """A Python file with ``CONFIG``, ``STAGES`` and the class ``PlannedPipeline``."""
    layout = plan.layout
    if layout.pipeline_parallel_degree == 1:
        why = "is for plans with pipeline stages, this plan has one"
        refuse(
            _NAME,
            why,
            field="layout.pipeline_parallel_degree",
            hint="export with --to deepspeed",
        )
    demand(plan, _NAME, virtual_stages_per_rank=1)
    if layout.data_parallel_degree > 1:
        demand(plan, _NAME, rank_order="tp-cp-dp-pp")
    if layout.zero_stage > 1:
        why = f"is not compatible with ZeRO 2 and 3, the plan has ZeRO {layout.zero_stage}"
        refuse(
            _NAME, why, field="layout.zero_stage", hint="plan with --fix zero_stage=1"
        )
    config = configuration(plan, _NAME)
    warnings = (
        *told(plan, _NAME),
        *follow(plan, _NAME, "1f1b"),
        *_told_recompute(plan),
    )
    return Export(
        header(plan, _NAME, VERSION, warnings) + _body(plan, config), warnings
    )


def _body(plan: Plan, config: dict[str, object]) -> str:
    stages = (
        ", ".join(json.dumps(layer.name) for layer in stage.layers)
        for stage in plan.stages
    )
    again = [
        layer.name
        for stage in plan.stages
        for layer in stage.layers
        if layer.recompute != "none"
    ]
    return _FILE.format(
        config=_python(config),
        stages="".join(f"    [{stage}],\n" for stage in stages),
        again="".join(f"    {json.dumps(name)},\n" for name in again),
        interval=1 if again else 0,
    )


def _python(config: dict[str, object]) -> str:
    """A dictionary, laid out as JSON."""
    return (
        json.dumps(config, indent=4)
        .replace(": true", ": True")
        .replace(": false", ": False")
    )


_FILE = '''\
# Use: deepspeed.initialize(model=PlannedPipeline(layers, loss_fn=...), config=CONFIG, model_parameters=...)

from itertools import accumulate
from typing import Any

import deepspeed
from deepspeed.pipe import PipelineModule

CONFIG = {config}

STAGES = [
{stages}]
"""Layers of every stage. A pipeline is made of one module or LayerSpec for each, in this order."""

RECOMPUTED = [
{again}]
"""Layers that run their forward again in the backward."""

LAYERS = [name for stage in STAGES for name in stage]
BOUNDS = [0, *accumulate(map(len, STAGES))]


class PlannedPipeline(PipelineModule):
    """Layers on the stages of the plan."""

    def __init__(self, layers: list[Any], **options: Any) -> None:
        if len(layers) != len(LAYERS):
            raise ValueError(f"the plan has {{len(LAYERS)}} layers, got {{len(layers)}}")
        super().__init__(
            layers,
            num_stages=len(STAGES),
            activation_checkpoint_interval={interval},
            activation_checkpoint_func=deepspeed.checkpointing.non_reentrant_checkpoint,
            **options,
        )

    def _partition_layers(self, method: str = "") -> None:
        self.parts = BOUNDS
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=BOUNDS[stage], stop=BOUNDS[stage + 1])

    def _precompute_checkpointable_values(self) -> None:
        stage = self._topo.get_coord(self.global_rank).pipe
        self.is_checkpointable_results = [name in RECOMPUTED for name in STAGES[stage]]
'''


def _told_recompute(plan: Plan) -> tuple[str, ...]:
    partly = sum(
        is_partial(layer.recompute) for stage in plan.stages for layer in stage.layers
    )
    told = f"{_NAME} recomputes in full {counted(partly, 'layer')} that the plan recomputes in part."
    return (told,) if partly else ()


TARGET = Target(
    name="deepspeed-pipeline",
    title="a Python file with DeepSpeed's configuration and a PipelineModule of the plan's stages",
    version=VERSION,
    suffix=".py",
    media_type="text/x-python",
    write=write,
)
