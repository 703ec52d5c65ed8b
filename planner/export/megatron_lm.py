"""Megatron-LM: the plan as arguments of its training scripts, in an array that a shell script reads.

What says which model is trained, on what data, stays with the user. Flags were read in `megatron/training/arguments.py`
and in the configurations of Megatron-Core that it makes flags of.
"""

from __future__ import annotations

import shlex

from planner.export.demands import known
from planner.export.megatron import Setting, settings_of
from planner.export.target import Export, Target, header
from planner.spec import Plan

_NAME = "Megatron-LM"
_VERSION = "0.20.0 dev, commit d98e8a6"

_PRECISIONS = {
    "bf16-mixed": "--bf16 --grad-reduce-in-bf16",
    "fp16-mixed": "--fp16",
    "fp8": "--bf16 --grad-reduce-in-bf16 --fp8-format hybrid --fp8-recipe tensorwise",
    "fp32": "",
}
"""Gradients stay in bf16, two bytes as in the plan: Megatron-LM's own default for bf16 is four."""


def write(plan: Plan) -> Export:
    """The arguments, one on each line."""
    precision = known(plan, _NAME, "precision", _PRECISIONS)
    chosen = settings_of(plan, _NAME)
    lines = [text for setting in chosen.settings if (text := _argument(setting))]
    lines += [part for part in precision.replace(" --", "\n--").splitlines() if part]
    body = "".join(f"    {line}\n" for line in lines)
    text = f"{header(plan, _NAME, _VERSION, chosen.warnings)}{_USE}{_environment(plan)}PLAN_ARGS=(\n{body})\n"
    return Export(text, chosen.warnings)


_USE = """\
# Use: source this file, then torchrun ... pretrain_gpt.py "${PLAN_ARGS[@]}" and your model's and data's arguments.
"""


def _argument(setting: Setting) -> str:
    """``--flag value``, quoted for a shell; empty: no flag."""
    flag, value = setting.flag, setting.value
    if not flag or value is None or value is False or value == setting.default:
        return ""
    values = (
        value if isinstance(value, tuple) else () if value is True else (str(value),)
    )
    return " ".join((flag, *map(shlex.quote, values)))


def _environment(plan: Plan) -> str:
    """What `validate_args` asks for: 1 where ranks split layers, before Blackwell; never 1 under FSDP."""
    layout = plan.layout
    if layout.zero_stage > 1:
        return "unset CUDA_DEVICE_MAX_CONNECTIONS\n"
    is_split = layout.tensor_parallel_degree > 1 or layout.context_parallel_degree > 1
    return "export CUDA_DEVICE_MAX_CONNECTIONS=1\n" if is_split else ""


TARGET = Target(
    name="megatron-lm",
    title="arguments of Megatron-LM's training scripts, as a shell array",
    version=_VERSION,
    suffix=".sh",
    media_type="application/x-sh",
    write=write,
)
