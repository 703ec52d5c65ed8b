"""Megatron-Bridge: the plan as a Python function that any of its recipes' configurations goes through.

A recipe keeps what it says about model, data and learning rate; what the plan decides is written over it, also where
the plan decides that something is not used. Fields were read in `megatron.bridge.training.config`, in the precision
recipes of `megatron.bridge.training.mixed_precision`, and in the configurations of Megatron-Core below them.
"""

from __future__ import annotations

from planner.export.demands import known
from planner.export.megatron import Setting, settings_of
from planner.export.target import Export, Target, header
from planner.export.transformer import Transformer
from planner.spec import Plan

_NAME = "Megatron-Bridge"
_VERSION = "commit 067f987"

_BF16 = (
    "cfg.mixed_precision = bf16_mixed()",
    "cfg.mixed_precision.grad_reduce_in_fp32 = False",
)
_PRECISIONS = {
    "bf16-mixed": _BF16,
    "fp16-mixed": ("cfg.mixed_precision = fp16_mixed()",),
    "fp8": (
        *_BF16,
        'cfg.mixed_precision.fp8 = "hybrid"',
        'cfg.mixed_precision.fp8_recipe = "tensorwise"',
    ),
    "fp32": (
        "cfg.mixed_precision = MixedPrecisionConfig(",
        "    fp32=True, params_dtype=torch.float32, pipeline_dtype=torch.float32",
        ")",
    ),
}
"""Gradients stay in bf16, two bytes as in the plan: the default of `bf16_mixed` is four."""
_STATES = tuple(
    f"cfg.optimizer.{name}_dtype = torch.float32"
    for name in ("main_params", "main_grads", "exp_avg", "exp_avg_sq")
)
"""Four bytes each, as in the plan: recipes of large models choose two, and `OptimizerConfig` takes those only from its
precision-aware optimizer."""
_OPTIMIZERS = {"adamw": "adam", "adam": "adam", "sgd": "sgd", "momentum": "sgd"}


def write(plan: Plan) -> Export:
    """A Python file with the function ``apply_plan``."""
    precision = _PRECISIONS[
        known(plan, _NAME, "precision", {name: name for name in _PRECISIONS})
    ]
    known(plan, _NAME, "optimizer", _OPTIMIZERS)
    chosen = settings_of(plan, _NAME, couples_decay=True)
    blocks = Transformer.of(plan, _NAME).blocks
    settings = map(
        _assignment, (setting for setting in chosen.settings if setting.field)
    )
    lines = [*precision, *settings, *_STATES]
    body = "".join(f"    {line}\n" for line in lines)
    top = header(plan, _NAME, _VERSION, chosen.warnings)
    return Export(
        f"{top}{_imports(precision)}{_FUNCTION.format(blocks=blocks)}{body}    return cfg\n",
        chosen.warnings,
    )


def _imports(precision: tuple[str, ...]) -> str:
    """What the function's lines use."""
    made = precision[0].removeprefix("cfg.mixed_precision = ").partition("(")[0]
    return (
        "import torch\n\n"
        "from megatron.bridge.training.config import ConfigContainer\n"
        f"from megatron.bridge.training.mixed_precision import {made}\n\n\n"
    )


_FUNCTION = '''\
def apply_plan(cfg: ConfigContainer) -> ConfigContainer:
    """Write the plan over a recipe's configuration: apply_plan(RECIPE()), then pretrain with it."""
    if cfg.model.num_layers != {blocks}:
        raise ValueError(f"the plan is for {blocks} layers, the recipe's model has {{cfg.model.num_layers}}")
'''


def _assignment(setting: Setting) -> str:
    value = list(setting.value) if isinstance(setting.value, tuple) else setting.value
    written = repr(value).replace("'", '"')
    return f"cfg.{setting.field} = {written}"


TARGET = Target(
    name="megatron-bridge",
    title="a Python function that writes the plan over a Megatron-Bridge recipe",
    version=_VERSION,
    suffix=".py",
    media_type="text/x-python",
    write=write,
)
