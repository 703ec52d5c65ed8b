"""Context parallelism: what is counted by shapes is what a rank that attends to all others keeps and exchanges."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from planner.errors import DocumentError, UnsupportedError
from planner.profiler.count import count, profile
from planner.profiler.lower_right import use_lower_right
from planner.profiler.models import ModelSource, load_model
from planner.profiler.sequence import KeyValues, Pieces, gather_over
from tests.executor.plans import source_of

B, S, RANKS = 2, 24, 3
KEY_BYTES = 2 * 8 * 4
"""Of one token in one layer: key heads x width x bytes of fp32."""
BLOCK = "LlamaDecoderLayer"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    """Four blocks with fewer key heads than heads."""
    return source_of("llama", tmp_path_factory.mktemp("llama"))


def _block(source: ModelSource, **sizes: Any) -> Any:
    return count(source, **{"micro_batch_size": B, "sequence_length": S, **sizes})[
        BLOCK
    ]


def test_a_rank_works_on_its_piece_and_keeps_all_keys(llama: ModelSource) -> None:
    """All but attention is that of a shorter sequence; attention has its queries and the keys of all ranks, of which a
    causal kernel skips less than half."""
    row, short = (
        _block(llama, context_parallel_degree=RANKS),
        _block(llama, sequence_length=S // RANKS),
    )
    whole = _block(llama)
    attention, of_short, of_whole = (
        next(each.flops for each in one.operations if each.kind == "attention")
        for one in (row, short, whole)
    )
    assert attention == (2 * RANKS - 1) * of_short
    assert of_whole == RANKS**2 * of_short
    others = row.forward_flops - attention
    assert others == short.forward_flops - of_short
    assert others * RANKS == whole.forward_flops - of_whole
    others = B * (S - S // RANKS) * KEY_BYTES * 2
    assert row.activation_bytes - short.activation_bytes == others
    assert row.output_bytes == short.output_bytes
    assert (row.context_parallel_degree, row.sequence_length) == (RANKS, S)


class _Collectives(TorchDispatchMode):
    """Bytes of the full tensors that collectives gather and scatter."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("_c10d_functional::")
        if name == "all_gather_into_tensor":
            self.seen["all_gather", result.nbytes] += 1
        if name == "reduce_scatter_tensor":
            self.seen["reduce_scatter", args[0].nbytes] += 1
        return result


def test_rows_tell_what_a_rank_exchanges(llama: ModelSource) -> None:
    """Against the collectives of a real backward on a group whose other ranks do not exist."""
    dist.init_process_group("fake", rank=RANKS - 1, world_size=RANKS, store=FakeStore())
    try:
        model = llama.build()
        use_lower_right(model)
        pieces = Pieces(S, context_ranks=RANKS, context_rank=RANKS - 1)
        group = dist.distributed_c10d._get_default_group()
        past = KeyValues(pieces, gather_over(group)).past(0)
        with _Collectives() as watch:
            tokens = torch.randint(256, (B, S // RANKS))
            torch.autograd.backward(
                model(tokens, past_key_values=past, use_cache=True).logits.sum()
            )
    finally:
        dist.destroy_process_group()
    blocks = sum(layer.kind == BLOCK for layer in llama.cut().layers)
    row = _block(llama, context_parallel_degree=RANKS)
    assert {each.group for each in row.collectives} == {"context"}
    assert watch.seen == {
        (each.operation, each.bytes): blocks * each.count for each in row.collectives
    }


def test_profiles_hold_all_degrees_that_are_asked_for(llama: ModelSource) -> None:
    """With tensor parallelism too; a tensor-parallel rank gathers its own heads only."""
    found = profile(
        llama,
        sequence_length=S,
        micro_batch_sizes=(1,),
        tensor_parallel_degrees=(1, 2),
        context_parallel_degrees=(1, 2),
    )
    rows = {
        (row.tensor_parallel_degree, row.context_parallel_degree): row
        for row in found.layers[1].measurements
        if row.recompute == "none"
    }
    assert sorted(rows) == [(1, 1), (1, 2), (2, 1), (2, 2)]
    gathered = [
        sum(
            each.bytes * each.count
            for each in rows[tensor, 2].collectives
            if each.group == "context"
        )
        for tensor in (1, 2)
    ]
    assert gathered[0] == 2 * gathered[1]


def test_what_cannot_be_shared_out_is_refused(
    llama: ModelSource, tmp_path: Path
) -> None:
    """A sequence that does not divide, and a model without causal attention."""
    with pytest.raises(DocumentError, match="does not divide over 5 ranks"):
        _block(llama, context_parallel_degree=5)
    with pytest.raises(UnsupportedError, match="no causal language model"):
        count(
            load_model("tests.profiler.graphs:unet"),
            micro_batch_size=1,
            sequence_length=0,
            context_parallel_degree=2,
        )
