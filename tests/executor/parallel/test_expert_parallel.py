"""Expert parallelism on fake groups and on one rank: what is held, what is refused, and rows that nobody sends."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from planner.errors import LayoutError, UnsupportedError
from planner.executor.checkpoint.materialise import materialise
from planner.executor.dry_run import dry_run
from planner.executor.parallel.expert_parallel import check_experts
from planner.profiler.expert_parallel import Routes, experts_of, local_share, share_out
from tests.executor.plans import make_plan, source_of

EXPERTS = "model.layers.0.mlp.experts"


class OneOfTwo:
    """A group whose other rank sends what it is sent: every expert's rows come twice, or all rows go away."""

    def __init__(self, *, rank: int) -> None:
        self.rank = rank

    def routes(self, experts: torch.Tensor, count: int) -> Routes:
        """Only rows of this rank's experts stay."""
        half = count // 2
        self.mine = (experts // half) == self.rank
        return Routes(None, None, experts[self.mine] - self.rank * half)

    def exchange(
        self, rows: torch.Tensor, sent: list[int] | None, received: list[int] | None
    ) -> torch.Tensor:
        """There, rows of other experts are left out; back, they are zeros."""
        if rows.shape[0] == self.mine.shape[0]:
            return rows[self.mine]
        return rows.new_zeros(self.mine.shape[0], rows.shape[1]).index_put(
            (self.mine.nonzero()[:, 0],), rows
        )


def _experts(folder: Path, rank: int | None) -> torch.nn.Module:
    """The first layer's experts, whole or a share that leaves the rows of others out."""
    whole = materialise(
        source_of("mixtral", folder),
        lambda model: model,
        device=torch.device("cpu"),
        seed=3,
    )
    module = whole.get_submodule(EXPERTS)
    if rank is not None:
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(
                name,
                torch.nn.Parameter(local_share(parameter.detach(), rank, 2).clone()),
            )
        share_out(module, 2, OneOfTwo(rank=rank))
    return module


def test_shares_add_up_to_the_whole(tmp_path: Path) -> None:
    """Outputs of the two ranks' experts sum to those of all, and gradients are the whole's rows."""
    hidden, weights = torch.randn(6, 32), torch.rand(6, 2)
    index = torch.tensor([[0, 1], [2, 0], [3, 1], [1, 2], [0, 3], [2, 3]])
    whole = _experts(tmp_path, None)
    expected = whole(hidden, index, weights)
    expected.square().sum().backward()
    parts = [_experts(tmp_path, rank) for rank in (0, 1)]
    made = sum(part(hidden, index, weights) for part in parts)
    torch.testing.assert_close(made, expected)
    made.square().sum().backward()
    for name, parameter in whole.named_parameters():
        found = torch.cat([part.get_parameter(name).grad for part in parts])
        torch.testing.assert_close(found, parameter.grad)


def test_a_rank_without_rows_has_gradients_of_zero(tmp_path: Path) -> None:
    """Its experts' gradients come nevertheless: those who hold the same experts wait for them."""
    part = _experts(tmp_path, 1)
    part(
        torch.randn(3, 32), torch.tensor([[0, 1], [1, 0], [0, 1]]), torch.rand(3, 2)
    ).sum().backward()
    assert all(
        parameter.grad is not None and not parameter.grad.any()
        for parameter in part.parameters()
    )


def test_every_rank_holds_its_share_alone(tmp_path: Path) -> None:
    """Of two ranks each holds half of the experts' elements, and all of everything else."""
    source = source_of("mixtral", tmp_path)
    names = [layer.name for layer in source.cut().layers]
    held = [
        dry_run(make_plan(names, data=2, expert=degree), source)
        .ranks[0]
        .built.parameters
        for degree in (1, 2)
    ]
    experts = sum(
        each.numel()
        for module in experts_of(source.blueprint).values()
        for each in module.parameters()
    )
    assert held[0] - held[1] == experts // 2


def test_tensor_ranks_hold_whole_experts_of_a_share(tmp_path: Path) -> None:
    """Of two tensor-parallel ranks on each of two expert-parallel ones, each holds a quarter of the experts."""
    source = source_of("mixtral", tmp_path)
    names = [layer.name for layer in source.cut().layers]
    shared = {"tensor": 2, "sequence_parallel": True}
    held = [
        dry_run(make_plan(names, data=2, expert=degree, **shared), source)
        .ranks[0]
        .built.parameters  # type: ignore[arg-type]
        for degree in (1, 2)
    ]
    experts = sum(
        each.numel()
        for module in experts_of(source.blueprint).values()
        for each in module.parameters()
    )
    assert held[0] - held[1] == experts // 2 - experts // 4


def test_whole_experts_stand_one_block_at_a_time(tmp_path: Path) -> None:
    """A block lets go of the other ranks' experts before the next one is allocated."""
    source = source_of("mixtral", tmp_path)
    alive: list[int] = []

    def narrow(name: str, module: torch.nn.Module) -> None:
        if name.rpartition(".")[0] == "model.layers":
            alive.append(
                sum(
                    1
                    for each in experts_of(root[0]).values()
                    if not each.gate_up_proj.is_meta
                )
            )
            for experts in experts_of(module).values():
                experts.gate_up_proj = torch.nn.Parameter(
                    local_share(experts.gate_up_proj.detach(), 0, 2).clone()
                )

    root: list[torch.nn.Module] = []

    def prepare(model: torch.nn.Module) -> torch.nn.Module:
        root.append(model)
        return model

    materialise(source, prepare, device=torch.device("cpu"), seed=3, narrow=narrow)
    assert alive == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("model", "degree", "error"),
    [("llama", 2, UnsupportedError), ("mixtral", 3, LayoutError)],
)
def test_models_that_cannot_share_are_refused(
    model: str, degree: int, error: type[Exception], tmp_path: Path
) -> None:
    """No experts, or a number that the degree does not divide."""
    check = partial(check_experts, source_of(model, tmp_path))
    check(1)
    with pytest.raises(error):
        check(degree)


def test_tensor_ranks_share_out_tokens_beside_experts(tmp_path: Path) -> None:
    """Without sequence parallelism there is nothing to gather; four experts are too few for eight ranks."""
    check = partial(check_experts, source_of("mixtral", tmp_path))
    check(2, 2, sequence_parallel=True)
    with pytest.raises(UnsupportedError, match="tensor-parallel ranks share out"):
        check(1, 2)
    with pytest.raises(
        LayoutError,
        match=r"expert_parallel_degree\(2\) \* tensor_parallel_degree\(4\) = 8 ranks",
    ):
        check(2, 4, sequence_parallel=True)
