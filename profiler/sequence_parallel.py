"""Where sequence parallelism takes hold of a tensor-parallel transformer (Korthikanti et al. 2022, section 4.2.2).

Between the tensor-parallel regions every rank of the group works on its part of the sequence: norms, residuals, and
what is sent from stage to stage. Derived from the tensor-parallel plan, whatever the model:

    split    before the first block the hidden tensor, whole on every rank, is cut along the sequence
    enter    the parts are gathered where column-wise products read them; on the way back their gradients, partial sums,
             are summed and scattered. Once per module that holds a whole region (attention, feed-forward): its code
             takes positions and shapes from its input. Column-wise products that stand beside norms (as in OPT's
             feed-forward) are entered by themselves; they work token by token.
             Where a region begins with products that all ranks run whole (latent attention), its gradients are whole
             already: column-wise products within sum those of the latents, which are smaller, and every rank keeps its
             part
    leave    the outputs of row-wise products, partial sums, are summed and scattered
    gather   behind the last block the parts are gathered for the final norm and head, which every rank runs whole

A hidden tensor is (batch, sequence, features), or (tokens, features) where a model has flattened it: it is always the
dimension before the last that is split. Parameters outside of the regions see this rank's tokens only: their gradients
are partial sums over the group. They must be vectors (norms), or stand beside a mixture's experts (routers), which send
every token where it belongs by itself: who mixes tokens there would be wrong without a word. Experts gather the tokens
and scatter their outputs themselves (`planner.profiler.expert_parallel`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from planner.profiler import tensor_parallel
from planner.profiler.expert_parallel import experts_of
from planner.profiler.tensor_parallel import (
    COLUMN_STYLES,
    DERIVED_ROWS,
    REPLICATED,
    ROW_STYLES,
    is_derived,
    sections_of,
)
from planner.profiler.transformer_cut import (
    TransformerChain,
    hidden_argument,
    hidden_output,
)

if TYPE_CHECKING:
    from planner.profiler.models import ModelSource

DIMENSION = -2
"""Of the sequence in a hidden tensor."""
Change = Callable[[Tensor], Any]


@dataclass(frozen=True, slots=True)
class SequencePlan:
    """Modules of a stage, by qualified name."""

    entered: tuple[str, ...]
    """Their hidden input is gathered."""
    left: tuple[str, ...]
    """Row-wise products, whose output is summed and scattered."""
    partial: tuple[str, ...]
    """Whole on every rank, and see this rank's tokens only."""
    entered_whole: tuple[str, ...] = ()
    """Likewise, but what reads it is whole on every rank, or sums its own gradients: of the whole gradient every rank
    keeps its part."""
    apart: tuple[str, ...] = ()
    """Column-wise products within these, which sum the gradients of what they read over the group."""
    is_derived: bool = False
    """Row-wise products scatter their output themselves, and what is entered is a plain tensor."""

    @property
    def left_by_hooks(self) -> tuple[str, ...]:
        """Those of `left` whose output is still to be scattered."""
        return () if self.is_derived else self.left

    @classmethod
    def of(
        cls, stage: nn.Module, blocks_name: str, styles: Mapping[str, str]
    ) -> SequencePlan:
        """The plan of what a stage holds of the blocks.

        Args:
            styles: by qualified name (`planner.profiler.tensor_parallel.split_modules`).
        """
        inside = {
            name: style
            for name, style in styles.items()
            if name.startswith(f"{blocks_name}.")
        }
        owners = {
            name for name in _owners(stage) if name.startswith(f"{blocks_name}.")
        } - set(experts_of(stage))
        rows = tuple(
            name
            for name, style in inside.items()
            if style in ROW_STYLES or style == DERIVED_ROWS
        )
        columns = tuple(
            name
            for name, style in inside.items()
            if style in COLUMN_STYLES or sections_of(style)
        )
        parents = dict.fromkeys(name.rpartition(".")[0] for name in columns)
        closed = [
            parent
            for parent in parents
            if all(name in inside for name in _below(parent, owners))
        ]
        regions = tuple(
            parent
            for parent in closed
            if not any(_is_below(parent, other) for other in closed)
        )
        loose = tuple(
            name
            for name in columns
            if not any(_is_below(name, region) for region in regions)
        )
        replicated = [name for name, style in inside.items() if style == REPLICATED]
        whole = tuple(
            region
            for region in regions
            if any(_is_below(name, region) for name in replicated)
        )
        apart = tuple(
            name for name in columns if any(_is_below(name, region) for region in whole)
        )
        entered = tuple(region for region in regions if region not in whole) + loose
        derived = any(map(is_derived, inside.values()))
        return cls(
            entered, rows, tuple(sorted(owners - set(inside))), whole, apart, derived
        )


def _owners(stage: nn.Module) -> Iterator[str]:
    for name, module in stage.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            yield name


def _below(parent: str, names: set[str]) -> Iterator[str]:
    return (name for name in names if name == parent or _is_below(name, parent))


def _is_below(name: str, parent: str) -> bool:
    return name.startswith(f"{parent}.")


def refusal(source: ModelSource) -> str:
    """Why the model cannot be sequence-parallel; empty where it can."""
    return source.sequence_refusal


def find_refusal(source: ModelSource) -> str:
    """As `refusal`, which remembers what is found."""
    styles = tensor_parallel.plan(source)
    if not styles:
        return "nobody told how to split it over tensor-parallel ranks"
    chain = source.cut().chain
    if not isinstance(chain, TransformerChain):
        return "it is no chain of blocks that hand on one hidden tensor"
    blueprint = source.blueprint
    plan = SequencePlan.of(
        blueprint, chain.blocks_name, tensor_parallel.split_modules(blueprint, styles)
    )
    if plan.is_derived:
        alone = sorted(set(plan.entered) & set(styles))
        if alone:
            return f"its module {alone[0]!r} reads the hidden tensor beside others that are whole"
    mixtures = {name.rpartition(".")[0] for name in experts_of(blueprint)}
    beside = {name for name in mixtures if name.rpartition(".")[0] != chain.blocks_name}
    for name in plan.partial:
        if any(_is_below(name, mixture) for mixture in beside):
            continue
        if any(
            each.dim() > 1
            for each in blueprint.get_submodule(name).parameters(recurse=False)
        ):
            return f"its module {name!r} stands whole between the tensor-parallel regions and is no norm"
    return _stumbling(source) if plan.is_derived else ""


def _stumbling(source: ModelSource) -> str:
    """What hinders the code behind the products of regions that were derived from working on a part of the tokens."""
    from planner.profiler.count import Counter
    from planner.profiler.splits import Split

    ranks, counter = source.tensor_parallel_degrees()[1], Counter(source, "fp32")
    try:
        for kind in counter.representatives:
            counter.count(kind, 2, 2 * ranks, Split(ranks, sequence=True))
    except Exception as error:  # any: it is the model's code
        return f"its blocks do not run on a part of their tokens: {(str(error) or type(error).__name__).splitlines()[0]}"
    return ""


@dataclass(slots=True)
class _Received:
    """The part of the hidden tensor that a stage was handed, while its forward runs."""

    part: Tensor | None = field(default=None)

    def before(
        self, module: nn.Module, arguments: Any, keywords: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Pre-hook of the first block: it works on the part."""
        return _with_hidden(arguments, keywords, self.part)

    def after(self, module: nn.Module, arguments: Any, output: Any) -> Tensor | None:
        """Hook of the absent block before: it hands on the part."""
        return self.part


def split_borders(
    stage: nn.Module,
    chain: TransformerChain,
    layers: range,
    *,
    parts: int,
    split: Change,
    gather: Change,
) -> None:
    """Let a stage of these layers take, hand on and give parts of the sequence, in place.

    Args:
        parts: of a sequence.
        split: whole hidden tensor to this rank's part.
        gather: the part to the whole tensor, with which every rank goes on alike.
    """
    blocks = list(stage.get_submodule(chain.blocks_name).children())
    if layers.start == 0:
        # Before the hook that hands a stage's last tensor on.
        blocks[0].register_forward_pre_hook(
            partial(_changed, split), prepend=True, with_kwargs=True
        )
    else:
        received = _Received()
        stage.forward = partial(_forward, stage.forward, received, parts)
        if layers.start == 1:
            blocks[0].register_forward_pre_hook(received.before, with_kwargs=True)
        else:
            blocks[layers.start - 2].register_forward_hook(received.after)
    if layers.stop == chain.blocks + 2:
        first = stage.get_submodule(chain.after[0])
        # Not a hook: hooks that are added later must see the module start before.
        first.forward = partial(_run_changed, first.forward, gather)
    else:
        blocks[-1].register_forward_hook(partial(_widened, parts))


def _widened(parts: int, module: nn.Module, arguments: Any, output: Any) -> Any:
    """The model's code behind the blocks, whose result goes nowhere, finds a tensor of the whole sequence's length."""
    part = hidden_output(output).detach()
    batch, length, features = part.shape
    whole = part[:, :1].expand(batch, length * parts, features)
    return (whole, *output[1:]) if isinstance(output, tuple) else whole


def enter_regions(stage: nn.Module, names: tuple[str, ...], enter: Change) -> None:
    """Let modules read what `enter` makes of their hidden input, in place."""
    for name in names:
        # Before the hook of a product of DTensors, which would take the part for the whole.
        stage.get_submodule(name).register_forward_pre_hook(
            partial(_changed, enter), prepend=True, with_kwargs=True
        )


def _forward(
    run: Any, received: _Received, parts: int, part: Tensor, **keywords: Any
) -> Any:
    """The model's code ahead of the blocks learns the length of the whole sequence from a tensor without values."""
    received.part = part
    batch, length, features = part.shape
    try:
        return run(
            part.detach().new_zeros(()).expand(batch, length * parts, features),
            **keywords,
        )
    finally:
        received.part = None


def _changed(
    change: Change, module: nn.Module, arguments: Any, keywords: Any
) -> tuple[Any, dict[str, Any]]:
    return _with_hidden(
        arguments, keywords, change(hidden_argument(arguments, keywords))
    )


def _run_changed(
    run: Any, change: Change, hidden: Tensor, *arguments: Any, **keywords: Any
) -> Any:
    return run(change(hidden), *arguments, **keywords)


def _with_hidden(
    arguments: Any, keywords: dict[str, Any], hidden: Any
) -> tuple[Any, dict[str, Any]]:
    if arguments:
        return (hidden, *arguments[1:]), keywords
    return arguments, {**keywords, "hidden_states": hidden}
