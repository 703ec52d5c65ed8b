"""Which modules tensor parallelism splits, how, and by which degrees.

The plan is transformers' own (`base_model_tp_plan` of the configuration, `_tp_plan` of the model); OPT, for which
transformers has none, gets the same column and row pattern (Shoeybi et al. 2019, "Megatron-LM", section 3). Of a
mixture's experts the ranks hold whole ones, an equal number each (`profiler.expert_parallel`), where transformers' plan
splits every one of them. For all other models the plan is derived from what their layers do (`profiler.derive_split`).
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Any

from torch import nn

from profiler.expert_parallel import common_experts, experts_of

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

    from profiler.models import ModelSource

OPT_BLOCK_PLAN = {
    "self_attn.q_proj": "colwise",
    "self_attn.k_proj": "colwise",
    "self_attn.v_proj": "colwise",
    "self_attn.out_proj": "rowwise",
    "fc1": "colwise",
    "fc2": "rowwise",
}
"""OPT's block: attention and feed-forward, each a column-wise group closed by a row-wise product."""

COLUMN_STYLES = frozenset({"colwise", "colwise_gather_output"})
ROW_STYLES = frozenset({"rowwise"})
REPLICATED_STYLES = frozenset({"replicated_with_grad_allreduce"})
"""Whole on every rank; the gradient, partial, is summed over the group (qwen3's norms of single heads)."""
KNOWN_STYLES = COLUMN_STYLES | ROW_STYLES | REPLICATED_STYLES
"""A plan with any other style is not used: half a plan would be wrong."""
DERIVED_ROWS = "derived_rowwise"
DERIVED_ATTENTION = "derived_attention"
_DERIVED_COLUMNS = "derived_colwise:"
"""Followed by the number of sections, each of which is split by itself."""
LARGEST_DERIVED = 8
"""The largest degree that a derived plan is offered for, as many as the devices of a usual node."""


def is_derived(style: str) -> bool:
    """Does the style stand in a plan that was derived?"""
    return style in (DERIVED_ROWS, DERIVED_ATTENTION) or style.startswith(_DERIVED_COLUMNS)


def sections_of(style: str) -> int:
    """Of a derived column-wise product's output; 0 for other styles."""
    return int(style.removeprefix(_DERIVED_COLUMNS)) if style.startswith(_DERIVED_COLUMNS) else 0


def parallel_styles() -> dict[str, ParallelStyle]:
    """Transformers' names of the split styles in torch's words."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    return {
        "colwise": ColwiseParallel(),
        "rowwise": RowwiseParallel(),
        "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    }


def scattered_rows() -> ParallelStyle:
    """``rowwise`` under sequence parallelism: the sum over the group is scattered along the sequence, the dimension
    before the last."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import RowwiseParallel

    return RowwiseParallel(output_layouts=Shard(-2))


def plan(source: ModelSource) -> dict[str, str]:
    """Style per pattern of qualified module names (``*`` stands for a block's number), or per name where it is derived;
    empty where the model cannot be split.

    Styles: ``colwise`` (weight split along its outputs, output stays split), ``colwise_gather_output`` (the output is
    gathered), ``rowwise`` (weight split along its inputs, output all-reduced), ``replicated_with_grad_allreduce``; and
    those of derived plans (`is_derived`).
    """
    told = plan_of(source.blueprint) if source.config is not None else {}
    if told or experts_of(source.blueprint):
        return told
    derived = source.derived_split
    columns = {name: f"{_DERIVED_COLUMNS}{sections}" for name, sections in derived.columns.items()}
    attentions = dict.fromkeys(derived.attentions, DERIVED_ATTENTION)
    return columns | dict.fromkeys(derived.rows, DERIVED_ROWS) | attentions


def plan_of(model: Any) -> dict[str, str]:
    """`plan` of a built transformers model."""
    base = model.base_model
    prefix = "" if base is model else f"{model.base_model_prefix}."
    if model.config.model_type == "opt":
        return {f"{prefix}decoder.layers.*.{name}": style for name, style in OPT_BLOCK_PLAN.items()}
    told = getattr(model.config, "base_model_tp_plan", None) or {}
    spread = {pattern_of(name) for name in experts_of(model)}
    styles = {f"{prefix}{name}": style for name, style in told.items() if not _is_within(f"{prefix}{name}", spread)}
    if not styles or not set(styles.values()) <= KNOWN_STYLES:
        return {}
    tied = {pattern_of(name) for name in _tied_modules(model)}
    head = {name: style for name, style in (type(model)._tp_plan or {}).items() if style in KNOWN_STYLES}
    # Splitting one of two modules that share a parameter would tear them apart: both stay whole.
    return {name: style for name, style in (styles | head).items() if name not in tied}


def _is_within(name: str, modules: set[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _tied_modules(model: nn.Module) -> set[str]:
    users: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        users.setdefault(id(parameter), []).append(name.rpartition(".")[0])
    return {name for names in users.values() if len(names) > 1 for name in names}


def split_modules(model: nn.Module, styles: dict[str, str]) -> dict[str, str]:
    """Style by qualified module name, of the modules that the model (or a stage of it) really has."""
    owners = (
        name for name, module in model.named_modules() if next(module.parameters(recurse=False), None) is not None
    )
    return {name: styles[key] for name in owners for key in dict.fromkeys((name, pattern_of(name))) if key in styles}


def pattern_of(name: str) -> str:
    """``model.layers.3.mlp`` -> ``model.layers.*.mlp``."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def follow_local_heads(model: nn.Module) -> None:
    """Make attention modules that reshape by a fixed number of heads (OPT) go by the heads that their rank really has.

    Most transformers models leave that number to the local shape; OPT's would silently mix positions and heads.
    """
    for module in model.modules():
        if type(module).__name__ == "OPTAttention":
            module.register_forward_pre_hook(_set_local_heads)


def _set_local_heads(module: Any, arguments: Any) -> None:
    weight = module.q_proj.weight
    local = weight.to_local() if hasattr(weight, "to_local") else weight  # a DTensor's shape is the whole one
    module.num_heads = local.shape[0] // module.head_dim


def degrees(source: ModelSource) -> tuple[int, ...]:
    """Degrees that divide what the plan splits: query heads, key-value heads, every split width, and experts, whose
    model must be one that can be sequence-parallel."""
    styles = plan(source)
    if not styles:
        return (1,)
    if any(map(is_derived, styles.values())):
        return _divisors(source.derived_split.divisor, LARGEST_DERIVED)
    config = source.config.get_text_config()
    heads = config.num_attention_heads
    common = gcd(heads, getattr(config, "num_key_value_heads", None) or heads)
    model = source.blueprint
    for name, style in split_modules(model, styles).items():
        module = model.get_submodule(name)
        if style in COLUMN_STYLES:
            common = gcd(common, module.out_features)  # type: ignore[arg-type]
        elif style in ROW_STYLES:
            common = gcd(common, module.in_features)  # type: ignore[arg-type]
    experts = common_experts(source)
    if experts:
        from profiler.sequence_parallel import refusal

        common = 1 if refusal(source) else gcd(common, experts)
    return _divisors(common, common)


def _divisors(number: int, largest: int) -> tuple[int, ...]:
    return tuple(degree for degree in range(1, min(number, largest) + 1) if number % degree == 0)
