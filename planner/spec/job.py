"""The job: what is to be trained, and what the user fixes about the layout."""

from __future__ import annotations

from typing import Annotated, Literal, Self, get_args

from pydantic import Field, JsonValue, field_validator, model_validator

from planner.spec.document import Document
from planner.spec.frameworks import OURS, check_runtime

Precision = Literal["fp32", "fp16-mixed", "bf16-mixed", "bf16", "fp8"]
Objective = Literal["step_time", "cost", "devices"]
OptimizerName = Literal[
    "sgd", "momentum", "adam", "adamw", "adafactor", "muon", "adam-8bit"
]

COMPUTE_TYPE: dict[str, str] = {
    "fp32": "fp32",
    "fp16-mixed": "fp16",
    "bf16-mixed": "bf16",
    "bf16": "bf16",
    "fp8": "bf16",
}
"""Data type of activations by precision; that of matrix products too, but for fp8."""
WHOLE_PARAMETERS: frozenset[OptimizerName] = frozenset({"adafactor", "muon"})
"""Optimizers whose update of one element depends on its whole matrix: a rank must hold the parameter unsplit."""

Scalar = bool | int | str

CONSTRAINABLE = (
    "data_parallel_degree",
    "tensor_parallel_degree",
    "pipeline_parallel_degree",
    "context_parallel_degree",
    "expert_parallel_degree",
    "virtual_stages_per_rank",
    "zero_stage",
    "zero_shard_degree",
    "sequence_parallel",
    "micro_batch_size",
    "schedule",
    "sequence_chunks",
    "rank_order",
    "recompute",
    "activation_offload",
    "optimizer_offload",
)
"""Layout fields."""
MOST_SAMPLES = 1 << 53
"""Of a global batch: every reader of JSON tells such numbers apart. What no step can take, the search tells."""
DIVISION = "layers_per_stage"
"""The one constraint on stage maps: how many layers every stage has."""
CONSTRAINTS = (*CONSTRAINABLE, DIVISION)
DivisionWord = Literal["even", "even-layers"]
DIVISION_WORDS: tuple[DivisionWord, ...] = get_args(DivisionWord)
"""Rules for as many stages as a layout has: layers that the model numbers (``model.layers.7``) shared out evenly, or
all layers."""
_DIVISION_SCHEMA: dict[str, JsonValue] = {
    "anyOf": [
        {"enum": list(DIVISION_WORDS)},
        {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 1},
    ]
}


class Range(Document):
    """Bounds of a whole-numbered layout field, both inclusive."""

    min: int | None = None
    max: int | None = None

    @model_validator(mode="after")
    def _is_not_empty(self) -> Self:
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min {self.min} is above max {self.max}")
        return self


Constraint = Scalar | Range | tuple[Scalar, ...]
"""A value (fixed), a range (bounded) or a list (one of); of `DIVISION` a rule, or the layers of every stage."""


class Job(Document):
    """A training step of this size."""

    schema_version: Literal[1] = 1
    global_batch_size: int = Field(ge=1, le=MOST_SAMPLES)
    """Samples per optimizer step, over all devices."""
    sequence_length: int = Field(default=0, ge=0)
    """Tokens per sample; 0 for models without a sequence."""
    precision: Precision = "bf16-mixed"
    optimizer: OptimizerName = "adamw"
    memory_headroom: Annotated[float, Field(ge=0)] = 0.05
    """Left free on every device: a fraction when below 1, bytes otherwise; 1 to 100 is refused, as it is neither."""
    objective: Objective = "step_time"
    """What the plan is best in: the fastest step on all devices, the least price of a token, or the fewest devices that
    meet the deadline. The last two may use a part of the cluster: whole nodes, or some devices of one node."""
    deadline_seconds: float | None = Field(default=None, gt=0)
    """Of one step; for ``devices`` only."""
    runtime: str = OURS
    """Framework that will run the plan (`planner.spec.frameworks`): prices are for its kernels and overlaps."""
    constraints: dict[str, Constraint] = Field(
        default_factory=dict,
        json_schema_extra={"properties": {DIVISION: _DIVISION_SCHEMA}},
    )
    """Any layout field fixed, bounded or listed, and how layers are divided into stages."""

    @field_validator("memory_headroom")
    @classmethod
    def _headroom_is_no_percentage(cls, given: float) -> float:
        if 1 <= given <= 100:
            raise ValueError(
                f"neither a fraction below 1 nor bytes that matter: {given:g} % is {given / 100:g}, "
                f"{given:g} GiB are {int(given * 2**30)}"
            )
        return given

    @field_validator("runtime")
    @classmethod
    def _runtime_is_known(cls, name: str) -> str:
        return check_runtime(name)

    @model_validator(mode="after")
    def _deadline_has_a_use(self) -> Self:
        if self.objective == "devices" and self.deadline_seconds is None:
            raise ValueError(
                "deadline_seconds: the objective devices needs it; give the seconds that a step may take"
            )
        if self.objective != "devices" and self.deadline_seconds is not None:
            raise ValueError(
                f"deadline_seconds: only the objective devices has one, the job's is {self.objective}; "
                "leave it out, or ask for devices"
            )
        return self

    @model_validator(mode="after")
    def _constraints_name_layout_fields(self) -> Self:
        for name, constraint in self.constraints.items():
            if name not in CONSTRAINTS:
                raise ValueError(
                    f"constraints: {name!r} is no layout field; use one of {', '.join(CONSTRAINTS)}"
                )
            if isinstance(constraint, tuple) and not constraint:
                raise ValueError(
                    f"constraints: {name} lists no value; list at least one"
                )
        division = self.constraints.get(DIVISION)
        if division is not None and not _divides(division):
            given = list(division) if isinstance(division, tuple) else division
            raise ValueError(
                f"constraints: {DIVISION} cannot be {given!r}; give {' or '.join(DIVISION_WORDS)}, or a list with the "
                "layers of every stage, each at least 1, such as [20, 20, 21, 21]"
            )
        return self


def _divides(constraint: Constraint) -> bool:
    """Is this a rule, or layers of stages?"""
    if isinstance(constraint, tuple):
        return all(
            isinstance(each, int) and not isinstance(each, bool) and each >= 1
            for each in constraint
        )
    return constraint in DIVISION_WORDS


def allows(constraint: Constraint | None, value: Scalar) -> bool:
    """Does a constraint permit the value of a layout field? None permits all; a range permits no word."""
    if constraint is None:
        return True
    if isinstance(constraint, Range):
        if isinstance(value, str):
            return False
        above = constraint.min is None or int(value) >= constraint.min
        return above and (constraint.max is None or int(value) <= constraint.max)
    if isinstance(constraint, tuple):
        return value in constraint
    return value == constraint
