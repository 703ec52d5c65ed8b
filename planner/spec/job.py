"""The job document: what is trained, and constraints on the layout."""

from __future__ import annotations

from typing import Annotated, Literal, Self, get_args

from pydantic import Field, JsonValue, field_validator, model_validator

from planner.spec.document import Document
from planner.spec.words import suggestion

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
"""Data type of activations by precision; also of matrix products, except for fp8."""
OURS = "planner"
"""Name of this package's executor, the default runtime."""
RUNTIMES = (
    OURS,
    "megatron-core",
    "nemo",
    "megatron-bridge",
    "torchtitan",
    "deepspeed",
    "nanotron",
    "megatron-lm",
    "megatron-deepspeed",
    "megatron-zero-3",
    "fsdp",
    "llm-foundry",
    "kempnerforge",
    "torchtune",
    "litgpt",
    "galvatron",
    "internevo",
    "aa-scaling",
    "libai",
    "paxml",
    "vtrain",
    "hai-llm",
    "megascale",
    "meta-in-house",
    "fast-llm",
    "colossalai",
    "bmtrain",
    "paddle",
    "maxtext",
    "nemo-automodel",
    "xtuner",
    "ms-swift",
    "picotron",
    "mcore",
)
"""Names and aliases of the runtimes in `planner.runtimes`."""
WHOLE_PARAMETERS: frozenset[OptimizerName] = frozenset({"adafactor", "muon"})
"""Optimizers whose update of an element depends on its whole matrix, so that a rank
needs the whole parameter."""

Scalar = bool | int | str

CONSTRAINABLE = (
    "data_parallel_degree",
    "tensor_parallel_degree",
    "pipeline_parallel_degree",
    "context_parallel_degree",
    "expert_parallel_degree",
    "expert_tensor_parallel_degree",
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
"""Layout fields that a job can constrain."""
MOST_SAMPLES = 1 << 53
"""Largest global batch: larger integers are not exact in every JSON reader."""
MOST_VALUES = 100_000
"""Longest list of a constraint."""
DIVISION = "layers_per_stage"
"""The constraint on stage maps: how many layers every stage has."""
CONSTRAINTS = (*CONSTRAINABLE, DIVISION)
DivisionWord = Literal["even", "even-layers"]
DIVISION_WORDS: tuple[DivisionWord, ...] = get_args(DivisionWord)
"""Rules for any number of stages: ``even`` divides the numbered layers of the model
(``model.layers.7``) evenly, ``even-layers`` divides all layers evenly."""
_DIVISION_SCHEMA: dict[str, JsonValue] = {
    "anyOf": [
        {"enum": list(DIVISION_WORDS)},
        {
            "type": "array",
            "items": {"type": "integer", "minimum": 1},
            "minItems": 1,
            "maxItems": MOST_VALUES,
        },
    ]
}


class Range(Document):
    """Bounds of an integer layout field, both inclusive."""

    min: int | None = None
    """Least value; None: no bound."""
    max: int | None = None
    """Largest value; None: no bound."""

    @model_validator(mode="after")
    def _is_not_empty(self) -> Self:
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(
                f"min {self.min} is above max {self.max}; swap them or leave one out"
            )
        return self


Constraint = (
    Scalar | Range | Annotated[tuple[Scalar, ...], Field(max_length=MOST_VALUES)]
)
"""A value (fixed), a range (bounded) or a list (one of). For `DIVISION`: a rule, or the
layers of every stage."""


class Job(Document):
    """What is trained: batch, sequence, precision, optimizer and constraints."""

    schema_version: Literal[1] = 1
    """Version of this document."""
    global_batch_size: int = Field(ge=1, le=MOST_SAMPLES)
    """Samples per optimizer step, over all devices."""
    sequence_length: int = Field(default=0, ge=0)
    """Tokens per sample; 0 for models without a sequence."""
    precision: Precision = "bf16-mixed"
    """Number formats of parameters, gradients and optimizer states."""
    optimizer: OptimizerName = "adamw"
    """Optimizer, which decides the bytes per parameter."""
    memory_headroom: Annotated[float, Field(ge=0)] | None = None
    """Memory left free on every device: a fraction if below 1, otherwise bytes. Values
    from 1 to 100 are ambiguous and rejected. None: the margin that keeps the
    probability of running out of memory at 20 %; `request.job` of a plan has it."""
    objective: Objective = "step_time"
    """What to minimise: the step time on all devices, the price of a token, or the
    number of devices that meet the deadline. The last two may use a part of the
    cluster: whole nodes, or some devices of one node."""
    deadline_seconds: float | None = Field(default=None, gt=0)
    """Longest step time; only for the objective ``devices``."""
    runtime: str = OURS
    """Framework that runs the plan, whose kernels and overlaps the prediction assumes;
    a name in `planner.runtimes`."""
    constraints: dict[str, Constraint] = Field(
        default_factory=dict,
        max_length=64,
        json_schema_extra={"properties": {DIVISION: _DIVISION_SCHEMA}},
    )
    """Layout fields that are fixed, bounded or listed, and how layers form stages."""

    @field_validator("memory_headroom")
    @classmethod
    def _headroom_is_no_percentage(cls, given: float | None) -> float | None:
        if given is not None and 1 <= given <= 100:
            raise ValueError(
                f"ambiguous, got {given:g}; "
                f"write {given / 100:g} for {given:g} %, "
                f"or {int(given * 2**30)} bytes for {given:g} GiB"
            )
        return given

    @field_validator("runtime")
    @classmethod
    def _runtime_is_known(cls, name: str) -> str:
        if name not in RUNTIMES:
            hint = f"{suggestion(name, RUNTIMES)}known: {', '.join(RUNTIMES)}"
            raise ValueError(f"no runtime {name!r}; {hint}")
        return name

    @model_validator(mode="after")
    def _deadline_has_a_use(self) -> Self:
        if self.objective == "devices" and self.deadline_seconds is None:
            raise ValueError(
                "deadline_seconds: the objective devices needs it; "
                "give the longest step time, in seconds"
            )
        if self.objective != "devices" and self.deadline_seconds is not None:
            raise ValueError(
                f"deadline_seconds: the objective {self.objective} has none; "
                "remove it, or set objective to devices"
            )
        return self

    @model_validator(mode="after")
    def _constraints_name_layout_fields(self) -> Self:
        for name, constraint in self.constraints.items():
            if name not in CONSTRAINTS:
                raise ValueError(
                    f"constraints: no layout field {name!r}; "
                    f"use one of {', '.join(CONSTRAINTS)}"
                )
            if isinstance(constraint, tuple) and not constraint:
                raise ValueError(
                    f"constraints: {name} lists no value; list at least one"
                )
        division = self.constraints.get(DIVISION)
        if division is not None and not _divides(division):
            given = list(division) if isinstance(division, tuple) else division
            raise ValueError(
                f"constraints: {DIVISION} cannot be {given!r}; "
                f"give {' or '.join(DIVISION_WORDS)}, or a list with the number of "
                "layers of every stage, such as [20, 20, 21, 21]"
            )
        return self


def _divides(constraint: Constraint) -> bool:
    """Return whether this is a rule, or a list of layers per stage."""
    if isinstance(constraint, tuple):
        return all(
            isinstance(each, int) and not isinstance(each, bool) and each >= 1
            for each in constraint
        )
    return constraint in DIVISION_WORDS


def allows(constraint: Constraint | None, value: Scalar) -> bool:
    """Return whether a constraint permits a value of a layout field.

    None permits every value; a range permits no string.
    """
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
