"""How one layer is split over ranks, besides over replicas and pipeline stages. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, order=True)
class Split:
    """The degrees of a profile's row."""

    tensor: int = 1
    sequence: bool = False
    """Activations between the tensor-parallel regions are split along the sequence (Korthikanti et al. 2022)."""
    context: int = 1
    expert: int = 1

    @property
    def sequence_parts(self) -> int:
        """Ranks that a sequence is shared out to between the layers: what it must divide by."""
        return self.context * (self.tensor if self.sequence else 1)

    @property
    def code(self) -> str:
        """Short name, such as ``8s`` for eight sequence-parallel ranks, or ``1e4`` for four expert-parallel ones."""
        context = f"c{self.context}" if self.context > 1 else ""
        expert = f"e{self.expert}" if self.expert > 1 else ""
        return f"{self.tensor}{'s' if self.sequence else ''}{context}{expert}"


WHOLE = Split()


def splits(
    tensor_degrees: Iterable[int],
    *,
    sequence_length: int = 0,
    with_sequence: bool = False,
    expert_degrees: Iterable[int] = (1,),
    context_degrees: Iterable[int] = (1,),
    experts: int = 0,
) -> tuple[Split, ...]:
    """Every mix of these degrees; context parallelism with tensor parallelism only.

    Args:
        sequence_length: tokens per sample; sequence parallelism takes those tensor degrees that divide it, or a
            context-parallel rank's piece of it, which are all for 0.
        with_sequence: each tensor-parallel degree also with sequence parallelism.
        context_degrees: those that divide the sequence are taken.
        experts: of every layer of a mixture, which tensor-parallel ranks share out too: then with sequence parallelism
            only, where tensor times expert degree divides them; 0: none.
    """
    tensor_degrees, expert_degrees = tuple(tensor_degrees), tuple(expert_degrees)
    plain = [
        Split(tensor, expert=expert)
        for expert in expert_degrees
        for tensor in tensor_degrees
    ]
    pieces = [
        context
        for context in context_degrees
        if context > 1 and sequence_length % context == 0
    ]
    plain += [
        Split(tensor, context=context)
        for context in pieces
        for tensor in tensor_degrees
    ]
    shared = (
        [replace(each, sequence=True) for each in plain if each.tensor > 1]
        if with_sequence
        else []
    )
    fitting = [each for each in shared if sequence_length % each.sequence_parts == 0]
    if not experts:
        return (*plain, *fitting)
    whole = (each for each in plain if each.tensor == 1)
    return (
        *whole,
        *(each for each in fitting if experts % (each.tensor * each.expert) == 0),
    )
