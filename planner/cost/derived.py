"""Rows of a decoder at any micro-batch size and degree, derived when they are asked for.

The mapping has the interface of rows that a profile lists: iterating gives the sizes
that a search enumerates, and any other size that divides the model can be looked up.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from planner.cost.eager import counts_of, keeps_attention_whole
from planner.cost.fp8 import mark_fp8
from planner.cost.operations import DecoderCounts, Split, layer_kinds
from planner.runtimes import Runtime
from planner.spec.fp8 import Fp8Casts
from planner.spec.profile import DataType, Measurement, RecomputeMode
from planner.spec.transformer import Transformer

Size = tuple[int, int, int, int, bool]
"""Micro-batch size, tensor-, context- and expert-parallel degree, sequence
parallelism."""
Rows = tuple[dict[RecomputeMode, Measurement], ...]
"""Of every layer, by recompute mode; identical layers share one dict."""
_SHAPES = ("local_matrix_elements", "local_muon_flops", "local_factored_elements")


@dataclass
class DerivedRows(Mapping[Size, Rows]):
    """Rows of one decoder for one runtime and sequence length."""

    model: Transformer
    runtime: Runtime
    sequence_length: int
    dtype: DataType
    casts: Fp8Casts | None
    """Of the runtime, for precision fp8; None: the job has another."""
    listed: tuple[Size, ...]
    """Sizes that a search enumerates."""
    whole: tuple[Measurement | None, ...] = ()
    """Row of every layer whose parameters are not split; optimizers that update whole
    matrices need the shapes that it states."""
    profiled: Mapping[Size, Rows] = field(default_factory=dict)
    """Rows that are taken from a profile instead."""
    known: dict[tuple[Size, int | None], Rows] = field(default_factory=dict)
    known_kinds: dict[
        tuple[str, Size, int | None], dict[RecomputeMode, Measurement]
    ] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Size]:
        return iter(self.listed)

    def __len__(self) -> int:
        return len(self.listed)

    def __getitem__(self, size: Size) -> Rows:
        return self.at(size, None)

    def at(self, size: Size, expert_tensor: int | None) -> Rows:
        """Return the rows of a size, with a tensor degree of the experts' own.

        Raises:
            KeyError: the size does not divide the model.
        """
        if expert_tensor is None and size in self.profiled:
            return self.profiled[size]
        key = (size, expert_tensor)
        if key not in self.known:
            if not self.divides(size, expert_tensor):
                raise KeyError(size)
            of_kinds = {
                kind: self._of_kind(kind, size, expert_tensor)
                for kind in dict.fromkeys(self.kinds)
            }
            self.known[key] = tuple(of_kinds[kind] for kind in self.kinds)
        return self.known[key]

    def divides(self, size: Size, expert_tensor: int | None = None) -> bool:
        """Return whether the model can be split so."""
        micro_batch_size, tensor, context, expert, sequence_parallel = size
        model = self.model
        tokens = self.sequence_length
        split = context * (tensor if sequence_parallel else 1)
        if micro_batch_size < 1 or tokens % (2 * context if context > 1 else 1):
            return False
        if tokens * micro_batch_size % split:
            return False
        if not self._divides_heads(tensor):
            return False
        if sequence_parallel and tensor == 1:
            return False
        if model.feed_forward % tensor:
            return False
        if model.experts is None:
            return expert == 1 and expert_tensor is None
        if self.runtime.runs_transformers:
            # Whole experts are spread over tensor- and expert-parallel ranks.
            is_spread = sequence_parallel or tensor == 1
            return is_spread and model.experts.experts % (tensor * expert) == 0
        inside = expert_tensor or tensor
        return (
            model.experts.experts % expert == 0
            and model.experts.feed_forward % inside == 0
        )

    def _divides_heads(self, tensor: int) -> bool:
        if not self.runtime.runs_transformers:
            return self.model.heads % tensor == 0
        is_whole = keeps_attention_whole(self.model)
        return is_whole or self.model.kv_heads % tensor == 0

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Kind of every layer."""
        return layer_kinds(self.model)

    def _of_kind(
        self, kind: str, size: Size, expert_tensor: int | None
    ) -> dict[RecomputeMode, Measurement]:
        """Return the rows of a layer kind.

        Layers without experts have those of expert degree 1, under any degree.
        """
        micro_batch_size, tensor, context, expert, sequence_parallel = size
        if not self._has_experts(kind):
            expert, expert_tensor = 1, None
        size = (micro_batch_size, tensor, context, expert, sequence_parallel)
        key = (kind, size, expert_tensor)
        if key not in self.known_kinds:
            self.known_kinds[key] = self._derive(kind, size, expert_tensor)
        return self.known_kinds[key]

    def _derive(
        self, kind: str, size: Size, expert_tensor: int | None
    ) -> dict[RecomputeMode, Measurement]:
        micro_batch_size, tensor, context, expert, sequence_parallel = size
        split = Split(
            micro_batch_size=micro_batch_size,
            sequence_length=self.sequence_length,
            tensor=tensor,
            context=context,
            expert=expert,
            expert_tensor=expert_tensor,
            sequence_parallel=sequence_parallel,
        )
        is_fp8 = self.casts is not None
        counts = counts_of(self.model, self.runtime, split, self.dtype, is_fp8)
        modes = ("none",) if kind in ("embedding", "head") else counts.modes
        rows = {mode: self._row(counts, kind, mode) for mode in modes}
        shapes = self._shapes(kind) if tensor == expert == 1 else {}
        if not shapes:
            return rows
        return {mode: row.model_copy(update=shapes) for mode, row in rows.items()}

    def _has_experts(self, kind: str) -> bool:
        return self.model.experts is not None and kind.startswith(("moe", "mtp"))

    def _shapes(self, kind: str) -> dict[str, int | None]:
        """Fields about the shapes of parameters, if a row states them."""
        row = self.whole[self.kinds.index(kind)] if self.whole else None
        if row is None:
            return {}
        return {name: getattr(row, name) for name in _SHAPES}

    def _row(
        self, counts: DecoderCounts, kind: str, mode: RecomputeMode
    ) -> Measurement:
        row = counts.row(kind, mode)
        if self.casts is None:
            return row
        return mark_fp8(row, self.dtype, self.casts, is_last=kind == "head")
