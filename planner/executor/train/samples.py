"""What one rank reads of a data set: inputs on the rank of the first stage, targets on that of the last."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from planner.errors import PlannerError
from planner.executor.build import RankPart
from planner.executor.parallel.mesh import Mesh
from planner.executor.parallel.same_samples import refuse_unlike
from planner.executor.parallel.shares import share_of
from planner.executor.train.data import (
    Batch,
    Dataset,
    Inputs,
    has_own_targets,
    local_part,
)
from planner.executor.train.optimizer import COMPUTE_DTYPE
from planner.spec.plan import Plan

DATA = "data"
"""The option that errors of data sets name."""


class Samples:
    """Reads this replica's samples of every global batch, in the order of their numbers.

    Args:
        option: that named the data set, for errors.
    """

    def __init__(
        self,
        plan: Plan,
        part: RankPart,
        mesh: Mesh,
        dataset: Dataset,
        device: torch.device,
        *,
        option: str = DATA,
    ) -> None:
        self._option = option
        self._part = part
        self._mesh = mesh
        self._dataset = dataset
        self._device = device
        self._share = share_of(plan, mesh.data)
        self._micro_batch_size = plan.layout.micro_batch_size
        self._dtype = COMPUTE_DTYPE[plan.request.job.precision]
        self.is_unchecked = mesh.grid.size > 1 and has_own_targets(dataset)
        """No batch has shown yet that the user's samples are the same on all ranks that read them."""

    def read(self, number: int) -> Batch | None:
        """This replica's part of a global batch; None on ranks of inner stages, which read nothing."""
        reads = self._part.has_first_stage or self._part.has_last_stage
        with told_as(self._option):
            return self._dataset(*self._numbers(number)) if reads else None

    def check(self, number: int, batch: Batch | None) -> None:
        """Compare what the ranks have read; a collective call of all.

        Raises:
            DocumentError: ranks of one replica got different samples.
        """
        self.is_unchecked = False
        with told_as(self._option):
            refuse_unlike(batch, self._mesh, self._numbers(number))

    def on_device(self, batch: Batch | None) -> tuple[Inputs, torch.Tensor | None]:
        """What the rank's stages take of it."""
        if batch is None:
            return (), None
        inputs, targets = batch
        return (
            tuple(map(self._to_device, inputs)) if self._part.has_first_stage else (),
            targets.to(self._device) if self._part.has_last_stage else None,
        )

    def _numbers(self, number: int) -> tuple[int, int]:
        return local_part(number, self._share, self._micro_batch_size)

    def _to_device(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.to(
            self._device, self._dtype if inputs.is_floating_point() else None
        )


@contextmanager
def told_as(option: str) -> Iterator[None]:
    """Within, errors of a data set name the option that it was given by."""
    try:
        yield
    except PlannerError as error:
        if option == DATA:
            raise
        named = (
            replace(each, field=option + each.field.removeprefix(DATA))
            if each.field.startswith(DATA)
            else each
            for each in error.problems
        )
        raise type(error)("", problems=tuple(named)) from error
