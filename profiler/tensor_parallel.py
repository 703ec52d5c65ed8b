"""Which modules tensor parallelism splits, how, and by which degrees.

The plan is transformers' own (`base_model_tp_plan` of the configuration, `_tp_plan` of the model), with the same column
and row pattern (Shoeybi et al. 2019, "Megatron-LM", section 3) where it has none (`OPT_BLOCK_PLAN`), none of attention,
or one that keeps attention whole (`ATTENTION_PLANS`). Of a mixture's experts the ranks hold whole ones, an equal number
each (`planner.profiler.expert_parallel`), where transformers' plan splits every one of them. For all other models the plan is
derived from what their layers do (`planner.profiler.derive_split`).
"""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Any

from torch import nn

from planner.profiler.expert_parallel import common_experts, experts_of

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

    from planner.profiler.models import ModelSource

OPT_BLOCK_PLAN = {
    "self_attn.q_proj": "colwise",
    "self_attn.k_proj": "colwise",
    "self_attn.v_proj": "colwise",
    "self_attn.out_proj": "rowwise",
    "fc1": "colwise",
    "fc2": "rowwise",
}
"""OPT's block: attention and feed-forward, each a column-wise group closed by a row-wise product."""

SPLIT_NORM = "split_norm"
"""A norm over all features of a column-wise product: each rank has its part of the weight, and of the squares, whose
means are summed over the group. transformers gathers the features instead, and every rank attends with all heads."""
PER_HEAD = "per_head"
"""A module whose own parameters have one row per head, of which each rank has those of its heads."""
REPLICATED = "replicate"
"""Whole on every rank, which runs it on the same; its gradients are whole, too."""
_SHARED_KEY = "mla_kv_a_proj"
"""Of what this product gives, the last features, a key that all heads share, go straight to every rank's heads: their
gradients are summed over the group. Followed in a plan by a colon and their number."""

_COLUMNS_AND_ROWS = {
    "q_proj": "colwise",
    "k_proj": "colwise",
    "v_proj": "colwise",
    "o_proj": "rowwise",
}
ATTENTION_PLANS: dict[str, dict[str, str]] = {
    "deepseek_v3": {  # as transformers has it for DeepSeek-V2
        "q_proj": "colwise",
        "q_b_proj": "colwise",
        "kv_a_proj_with_mqa": _SHARED_KEY,
        "kv_b_proj": "colwise",
        "o_proj": "rowwise",
    },
    "gpt_oss": {"": PER_HEAD, **_COLUMNS_AND_ROWS},  # attention sinks
    "olmoe": {**_COLUMNS_AND_ROWS, "q_norm": SPLIT_NORM, "k_norm": SPLIT_NORM},
}
"""By model type, of the modules of a block's attention; the attention itself has no name."""

COLUMN_STYLES = frozenset({"colwise", "colwise_gather_output"})
ROW_STYLES = frozenset({"rowwise"})
REPLICATED_STYLES = frozenset({"replicated_with_grad_allreduce"})
"""Whole on every rank; the gradient, partial, is summed over the group (qwen3's norms of single heads)."""
KNOWN_STYLES = (
    COLUMN_STYLES
    | ROW_STYLES
    | REPLICATED_STYLES
    | {SPLIT_NORM, PER_HEAD, REPLICATED, _SHARED_KEY}
)
"""A plan with any other style is not used: half a plan would be wrong."""
DERIVED_ROWS = "derived_rowwise"
DERIVED_ATTENTION = "derived_attention"
DERIVED_VOCABULARY = "derived_vocabulary"
_DERIVED_COLUMNS = "derived_colwise:"
"""Followed by the number of sections, each of which is split by itself."""
LARGEST_DERIVED = 8
"""The largest degree that a derived plan is offered for, as many as the devices of a usual node."""


def is_derived(style: str) -> bool:
    """Does the style stand in a plan that was derived?"""
    return style in (
        DERIVED_ROWS,
        DERIVED_ATTENTION,
        DERIVED_VOCABULARY,
    ) or style.startswith(_DERIVED_COLUMNS)


def is_ours(style: str) -> bool:
    """Is the style carried out by `planner.profiler.split_modules`, and not by torch's `parallelize_module`?"""
    return (
        is_derived(style) or style in (SPLIT_NORM, PER_HEAD) or shared_key_of(style) > 0
    )


def shared_key_of(style: str) -> int:
    """Last features of a product's output that go to the heads of every rank; 0 for other styles."""
    name, _, number = style.partition(":")
    return int(number) if name == _SHARED_KEY and number else 0


def sections_of(style: str) -> int:
    """Of a derived column-wise product's output; 0 for other styles."""
    return (
        int(style.removeprefix(_DERIVED_COLUMNS))
        if style.startswith(_DERIVED_COLUMNS)
        else 0
    )


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
    gathered), ``rowwise`` (weight split along its inputs, output all-reduced), ``replicated_with_grad_allreduce``,
    `REPLICATED`, and those that are carried out here (`is_ours`).
    """
    told = plan_of(source.blueprint) if source.config is not None else {}
    if told or experts_of(source.blueprint):
        return told
    derived = source.derived_split
    columns = {
        name: f"{_DERIVED_COLUMNS}{sections}"
        for name, sections in derived.columns.items()
    }
    attentions = dict.fromkeys(derived.attentions, DERIVED_ATTENTION)
    vocabulary = dict.fromkeys(derived.vocabulary, DERIVED_VOCABULARY)
    return columns | dict.fromkeys(derived.rows, DERIVED_ROWS) | attentions | vocabulary


def plan_of(model: Any) -> dict[str, str]:
    """`plan` of a built transformers model."""
    base = model.base_model
    prefix = "" if base is model else f"{model.base_model_prefix}."
    if model.config.model_type == "opt":
        return {
            f"{prefix}decoder.layers.*.{name}": style
            for name, style in OPT_BLOCK_PLAN.items()
        }
    styles = {f"{prefix}{name}": style for name, style in _told(model).items()}
    if (
        not styles
        or not set(styles.values()) <= KNOWN_STYLES
        or _is_changed(model, styles)
    ):
        return {}
    styles = _with_shared_keys(model, styles)
    tied = {pattern_of(name) for name in _tied_modules(model)}
    head = {
        name: style
        for name, style in (type(model)._tp_plan or {}).items()
        if style in KNOWN_STYLES
    }
    # Splitting one of two modules that share a parameter would tear them apart: both stay whole.
    return {name: style for name, style in (styles | head).items() if name not in tied}


def _told(model: Any) -> dict[str, str]:
    """Styles of what the base model has, but of experts, known here or not."""
    own = (
        {}
        if _clips_in_place(model.config)
        else ATTENTION_PLANS.get(model.config.model_type, {})
    )
    attention = {
        f"layers.*.self_attn.{name}".removesuffix("."): style
        for name, style in own.items()
    }
    told = {**(getattr(model.config, "base_model_tp_plan", None) or {}), **attention}
    base = model.base_model
    spread = {pattern_of(name) for name in experts_of(base)}
    names = {
        pattern_of(name)
        for named in (base.named_modules(), base.named_parameters())
        for name, _ in named
    }
    return {
        name: style
        for name, style in told.items()
        if name in names and not _is_within(name, spread)
    }


def _is_changed(model: nn.Module, styles: dict[str, str]) -> bool:
    """Is a product that the plan splits no plain one any more, as with adapters beside it? What it holds besides its
    weight the plan knows nothing of."""
    split = COLUMN_STYLES | ROW_STYLES
    modules = (
        each
        for name, each in model.named_modules()
        if styles.get(pattern_of(name)) in split
    )
    return not all(map(_is_plain, modules))


def _is_plain(module: nn.Module) -> bool:
    own = {name for name, _ in module.named_parameters()}
    return "weight" in own and own <= {"weight", "bias"}


def _clips_in_place(config: Any) -> bool:
    """OLMoE's attention may write into what the products give, which a DTensor's local part forbids."""
    return getattr(config, "clip_qkv", None) is not None


def refusal(source: ModelSource) -> str:
    """Why the model cannot be tensor-parallel by any degree; empty where it can."""
    if len(degrees(source)) > 1:
        return ""
    if plan(source):
        reason = source.sequence_refusal if experts_of(source.blueprint) else ""
        return (
            reason
            or "no degree divides its heads and all the widths that would be split"
        )
    if not experts_of(source.blueprint):
        return "none of its products is followed by another that could read its output split"
    if _clips_in_place(source.config):
        return "its attention clips queries, keys and values in place (clip_qkv)"
    unknown = sorted(set(_told(source.blueprint).values()) - KNOWN_STYLES)
    return (
        f"its own plan has the style {unknown[0]!r}, unknown here"
        if unknown
        else "nobody told how to split it"
    )


def _with_shared_keys(model: Any, styles: dict[str, str]) -> dict[str, str]:
    """Latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1): all ranks have the products that give the latents,
    and the norms of these, whole."""
    parents = {
        name.rpartition(".")[0]
        for name, style in styles.items()
        if style == _SHARED_KEY
    }
    if not parents:
        return styles
    shared = f"{_SHARED_KEY}:{model.config.get_text_config().qk_rope_head_dim}"
    found = {
        name: shared if style == _SHARED_KEY else style
        for name, style in styles.items()
    }
    owners = (
        pattern_of(name)
        for name, each in model.named_modules()
        if next(each.parameters(recurse=False), None) is not None
    )
    return (
        dict.fromkeys(
            (name for name in owners if _is_within(name, parents)), REPLICATED
        )
        | found
    )


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
        name
        for name, module in model.named_modules()
        if next(module.parameters(recurse=False), None) is not None
    )
    return {
        name: styles[key]
        for name in owners
        for key in dict.fromkeys((name, pattern_of(name)))
        if key in styles
    }


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
    local = (
        weight.to_local() if hasattr(weight, "to_local") else weight
    )  # a DTensor's shape is the whole one
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
    model = source.blueprint
    widths = (
        _width(model.get_submodule(name), style)
        for name, style in split_modules(model, styles).items()
    )
    common = gcd(heads, getattr(config, "num_key_value_heads", None) or heads, *widths)
    experts = common_experts(source)
    if experts:
        from planner.profiler.sequence_parallel import refusal

        common = 1 if refusal(source) else gcd(common, experts)
    return _divisors(common, common)


def _width(module: nn.Module, style: str) -> int:
    """What a degree must divide; 0: nothing."""
    if style in (SPLIT_NORM, PER_HEAD):
        return gcd(
            *(parameter.shape[0] for parameter in module.parameters(recurse=False))
        )
    width = (
        module.out_features
        if style in COLUMN_STYLES
        else module.in_features
        if style in ROW_STYLES
        else 0
    )
    return int(width)  # type: ignore[arg-type]


def _divisors(number: int, largest: int) -> tuple[int, ...]:
    return tuple(
        degree for degree in range(1, min(number, largest) + 1) if number % degree == 0
    )
