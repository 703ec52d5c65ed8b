"""Offloading moves bytes, and nothing else: what is trained is the same to the last bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from planner.errors import LayoutError, UnsupportedError
from planner.executor import Executor
from planner.executor.dry_run import DryRank, dry_run
from planner.executor.pipeline.offload import SMALLEST_BYTES, ActivationOffload
from planner.executor.settings import CheckpointPolicy
from planner.executor.support import check_plan
from planner.executor.train.optimizer import MASTER, Optimizer
from planner.profiler import count
from planner.profiler.models import ModelSource, load_model
from planner.search import make_request, plan_layout
from planner.spec import Cluster, Job, MeasuredRun, NodeGroup, Plan
from planner.spec.cluster import DeviceSpec
from planner.spec.layout import PredictionLayout
from tests.executor.plans import CONFIGS, make_plan, source_of

pytestmark = pytest.mark.usefixtures("no_group_left")

ACTIVATIONS: dict[str, Any] = {"activation_offload": True}
STATES: dict[str, Any] = {"optimizer_offload": True}
BOTH: dict[str, Any] = {**ACTIVATIONS, **STATES}
IMAGES: dict[str, Any] = {"sequence_length": 0, "micro_batch_size": 4}
CPU = torch.device("cpu")
Trained = tuple[MeasuredRun, dict[str, torch.Tensor]]
"""What happened, and the parameters at the end."""


def plan_of(source: ModelSource, *sizes: int, **options: Any) -> Plan:
    """A plan of this model."""
    return make_plan(
        [layer.name for layer in source.cut().layers], sizes or None, **options
    )


def trained(
    source: ModelSource,
    steps: int,
    policy: CheckpointPolicy | None = None,
    **options: Any,
) -> Trained:
    """A run in one process, and the parameters at its end."""
    data = "stdlib" if source.input_kind == "tokens" else "synthetic"
    executor = Executor(
        plan_of(source, **options), source, data=data, device="cpu", learning_rate=1e-2
    )
    measured = executor.train(steps, checkpoints=policy)
    parameters = {
        name: value.detach().clone()
        for name, value in executor.part.module.named_parameters()
    }
    executor.close()
    return measured, parameters


def equal(one: Trained, other: Trained) -> bool:
    """To the last bit."""
    return all(torch.equal(value, other[1][name]) for name, value in one[1].items())


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tied, dropout, adamw": ("gpt2", {"precision": "bf16-mixed", "schedule": "gpipe"}),
    "batch norm, momentum": ("resnet", {**IMAGES, "optimizer": "momentum"}),
    "skips, sgd": ("unet", {**IMAGES, "optimizer": "sgd"}),
    "experts, adafactor": ("mixtral", {"optimizer": "adafactor", "micro_batches": 2}),
    "shared bias, adam": (
        "t5",
        {"optimizer": "adam", "precision": "bf16", "micro_batches": 2},
    ),
    "ties, adam-8bit": (
        "tied-llama",
        {"optimizer": "adam-8bit", "precision": "bf16-mixed", "micro_batches": 2},
    ),
    "overflow, muon": (
        "llama",
        {"optimizer": "muon", "precision": "fp16-mixed", "micro_batches": 2},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_the_same_bit_for_bit(case: str, tmp_path: Path) -> None:
    """Losses and parameters, for every optimizer and precision; the host has what the device has not."""
    model, options = CASES[case]
    source = source_of(model, tmp_path)
    plain, offloaded = (trained(source, 2, **options, **flags) for flags in ({}, BOTH))
    assert plain[0].losses == offloaded[0].losses
    assert equal(plain, offloaded)
    (kept,), (gone,) = plain[0].ranks, offloaded[0].ranks
    counters = 4 * len(plain[1])
    assert kept.host_bytes == 0
    assert gone.optimizer_bytes <= counters
    assert gone.host_bytes > max(0, kept.optimizer_bytes - counters)


@pytest.mark.parametrize("optimizer", ["adamw", "adam-8bit"])
def test_a_checkpoint_moves_on_to_the_host_and_back(
    optimizer: str, tmp_path: Path
) -> None:
    """A step offloaded, one without, one offloaded again, are three of either, bit for bit."""
    source = source_of("gpt2", tmp_path)
    options = {"optimizer": optimizer, "precision": "bf16-mixed"}
    straight = trained(source, 3, **options)
    policy = CheckpointPolicy(directory=tmp_path / "kept")
    losses: list[float] = []
    for steps, flags in ((1, BOTH), (2, {}), (3, BOTH)):
        resumed = CheckpointPolicy(directory=policy.directory, resume=bool(losses))
        measured, parameters = trained(source, steps, resumed, **options, **flags)
        losses += measured.losses
    assert tuple(losses) == straight[0].losses
    assert equal(straight, (measured, parameters))


class Watched:
    """A module under offloading, and which storages its forward has saved."""

    def __init__(self, module: nn.Module, *arguments: torch.Tensor) -> None:
        self.offload = ActivationOffload(module, CPU)
        self.offload.attach(module)
        self.saved: list[tuple[StorageWeakRef, int]] = []
        with (
            mock.patch.object(self.offload, "_pack", self._pack),
            self.offload.saving("unit"),
        ):
            self.output = module(*arguments)

    def _pack(self, tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        self.saved.append((StorageWeakRef(storage), storage.nbytes()))  # type: ignore[no-untyped-call]
        return ActivationOffload._pack(self.offload, tensor)

    def alive_bytes(self) -> int:
        """Of what was saved, on the device still."""
        return sum(size for ref, size in dict(self.saved).items() if not ref.expired())


def test_what_a_forward_saves_leaves_the_device() -> None:
    """Of all that its layers save nothing is left but the parameters, the input and the output, until the backward."""
    torch.manual_seed(0)
    block = [nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64)]
    module, inputs = (
        nn.Sequential(*block, *block),
        torch.randn(32, 64, requires_grad=True),
    )
    expected = torch.autograd.grad(
        module(inputs).square().sum(), [inputs, *module.parameters()]
    )
    watched = Watched(module, inputs)
    on_device = sum(
        each.nbytes for each in (inputs, watched.output, *module.parameters())
    )
    assert watched.alive_bytes() <= on_device
    # Input and output of both GELU, inputs of both norms, and that of the second block's first product.
    assert watched.offload.peak_bytes == (4 * 32 * 256 + 3 * 32 * 64) * 4
    found = torch.autograd.grad(
        watched.output.square().sum(), [inputs, *module.parameters()]
    )
    assert all(map(torch.equal, found, expected))


class Sharing(nn.Module):
    """One tensor that three operations save, two of them views of it."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """(n, 2 m) -> (n, m)"""
        made = values * 3
        left, right = made.chunk(2, dim=1)
        return left * right + left.sin() + made.exp().chunk(2, dim=1)[0]


def test_what_several_operations_save_is_copied_once() -> None:
    """Views of one storage go together, and come back together."""
    module, values = Sharing(), torch.randn(64, 64, requires_grad=True)
    expected = torch.autograd.grad(module(values).sum(), values)
    watched = Watched(module, values)
    # What is made of the input, and its exponential, which its own backward needs.
    assert watched.offload.peak_bytes == 2 * 64 * 64 * 4
    assert torch.equal(
        torch.autograd.grad(watched.output.sum(), values)[0], expected[0]
    )
    watched.offload.release("unit")


class Overwriting(nn.Module):
    """Saves a tensor, writes into it, and saves it again."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """(n, m) -> (n, m)"""
        made = values + 1
        first = made.detach() * values
        made.detach().mul_(2)
        return first + made.detach() * values


def test_both_values_of_a_tensor_that_is_written_to_are_kept() -> None:
    """A copy is what the tensor was when it was saved: d/dx of (x + 1) x + 2 (x + 1) x, the factors fixed."""
    values = torch.randn(32, 32, requires_grad=True)
    watched = Watched(Overwriting(), values)
    (gradient,) = torch.autograd.grad(watched.output.sum(), values)
    assert torch.allclose(gradient, 3 * (values + 1))


def test_a_parameter_that_is_written_to_is_noticed() -> None:
    """What stays on the device is not copied, so that its backward would take the wrong values."""
    module = nn.Linear(64, 64)
    watched = Watched(module, torch.randn(8, 64, requires_grad=True))
    with torch.no_grad():
        module.weight.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place after it was saved"):
        watched.output.sum().backward()


def test_small_tensors_stay() -> None:
    """A copy of a few bytes takes longer than it is worth."""
    size = SMALLEST_BYTES // 4 - 1
    watched = Watched(Sharing(), torch.randn(1, size - size % 2, requires_grad=True))
    assert watched.offload.peak_bytes == 0
    assert watched.saved


def test_units_in_flight_share_the_host(tmp_path: Path) -> None:
    """Under GPipe all four micro-batches of a step, under 1F1B on one rank one of them."""
    source = source_of("llama", tmp_path)
    together, alone = (
        trained(source, 1, schedule=name, **ACTIVATIONS)[0].ranks[0].host_bytes
        for name in ("gpipe", "1f1b")
    )
    assert together == 4 * alone > 0


WIDER: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "max_position_embeddings": 64,
    },
    "gpt2": {"n_embd": 128, "n_positions": 64, "attn_pdrop": 0.0},
}
"""With tensors that are worth their copies, and attention that a CPU has a fused kernel for."""


@pytest.mark.parametrize("model", WIDER)
def test_the_host_holds_what_was_predicted(model: str, tmp_path: Path) -> None:
    """Activations and states, counted on meta tensors before the run: to 1 %, and never more."""
    path = tmp_path / "wider.json"
    path.write_text(json.dumps({**CONFIGS[model], **WIDER[model]}))
    source = load_model(str(path))
    profile = count.profile(
        source, sequence_length=64, micro_batch_sizes=(2,), dtype="fp32"
    )
    job = Job(
        global_batch_size=8, sequence_length=64, precision="fp32", optimizer="adamw"
    )
    known = {
        "peak_flops_per_second": {"fp32": 1e11},
        "memory_bandwidth_bytes_per_second": 1e10,
    }
    device = DeviceSpec(
        id="cpu", memory_bytes=10**10, host_bandwidth_bytes_per_second=1e9, **known
    )
    machines = Cluster(
        node_groups=(
            NodeGroup(
                device=device, nodes=1, devices_per_node=1, host_memory_bytes=10**10
            ),
        )
    )
    layout = PredictionLayout(micro_batch_size=2, schedule="gpipe", **BOTH)
    plan = plan_layout(make_request(profile, machines, job), profile, layout)
    assert isinstance(plan, Plan)
    executor = Executor(plan, source, device="cpu")
    measured = executor.train(1).ranks[0].host_bytes
    executor.close()
    predicted = plan.prediction.memory[0].host_bytes
    assert 0.99 * predicted < measured <= predicted


@contextmanager
def watching(optimizer: Optimizer, seen: list[int]) -> Iterator[None]:
    """Within, every update of torch's AdamW notes the bytes of states and master copies on the device."""
    step: Callable[..., Any] = torch.optim.AdamW.step

    def watched(self: torch.optim.Optimizer, *arguments: Any) -> Any:
        result = step(self, *arguments)
        parked = [
            tensor
            for part in optimizer._parts
            if part.parked
            for tensor, _ in part.parked._hosts.values()
        ]
        new = [
            value
            for state in self.state.values()
            for key, value in state.items()
            if key != "step"
        ]
        every = {
            id(tensor): tensor.untyped_storage().nbytes() for tensor in (*parked, *new)
        }
        seen.append(sum(every.values()))
        return result

    with mock.patch.object(torch.optim.AdamW, "step", watched):
        yield


def test_states_of_one_layer_are_on_the_device() -> None:
    """While it is updated; between the steps those of none."""
    module = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    layers = [[f"{index}.weight", f"{index}.bias"] for index in range(3)]
    optimizer = Optimizer(
        module,
        name="adamw",
        precision="bf16-mixed",
        learning_rate=0.1,
        offloaded=layers,
    )
    seen: list[int] = []
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    with watching(optimizer, seen):
        optimizer.step()
        optimizer.step()
    of_layer = (16 * 16 + 16) * 12
    assert seen == [of_layer] * 6
    assert optimizer.host_bytes == 3 * of_layer
    assert all(
        tensor.untyped_storage().nbytes() == 0 for tensor in optimizer.trained.values()
    )
    assert all(MASTER in states for states in optimizer.named_states().values())


def test_parameters_of_no_layer_are_updated_too() -> None:
    """Whatever a caller forgets."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = Optimizer(
        module,
        name="sgd",
        precision="fp32",
        learning_rate=1.0,
        offloaded=[["0.weight"]],
    )
    before = [parameter.detach().clone() for parameter in module.parameters()]
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert all(
        torch.equal(new, old - 1)
        for new, old in zip(module.parameters(), before, strict=True)
    )


@pytest.mark.parametrize(
    ("options", "field", "error"),
    [
        (
            {"schedule": "zb-h1", "sizes": (3, 3)},
            "layout.activation_offload",
            UnsupportedError,
        ),
        ({"zero": 3, "data": 2}, "layout.zero_stage", LayoutError),
        ({"recompute": {1: "full"}}, "recompute", UnsupportedError),
        (
            {"schedule": "seqpipe", "chunks": 2, "sizes": (3, 3)},
            "layout.sequence_chunks",
            LayoutError,
        ),
        ({"data": 2, "shares": (1, 3)}, "layout.micro_batch_shares", LayoutError),
    ],
)
def test_what_cannot_be_offloaded_is_refused(
    options: dict[str, Any], field: str, error: type[Exception], tmp_path: Path
) -> None:
    """Before any process starts."""
    names = [layer.name for layer in source_of("llama", tmp_path).cut().layers]
    check_plan(make_plan(names, **options))
    with pytest.raises(error, match=field):
        check_plan(make_plan(names, **options, **ACTIVATIONS))


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_a_dry_rank_has_the_predicted_bytes_on_its_host(
    zero_stage: int, tmp_path: Path
) -> None:
    """States to the byte, shared out or whole; with activations, which no dry run makes, no more than predicted."""
    source = source_of("gpt2", tmp_path)
    profile = count.profile(
        source, sequence_length=16, micro_batch_sizes=(1,), dtype="bf16"
    )
    job = Job(
        global_batch_size=8,
        sequence_length=16,
        precision="bf16-mixed",
        optimizer="adamw",
    )
    group = NodeGroup(
        device="a100-sxm4-40gb", nodes=1, devices_per_node=4, host_memory_bytes=10**9
    )
    machines = Cluster(node_groups=(group,))
    degrees = {
        "data_parallel_degree": 2,
        "pipeline_parallel_degree": 2,
        "zero_stage": zero_stage,
    }
    built: dict[bool, tuple[DryRank, ...]] = {}
    for activations in (False, True):
        wishes = {"optimizer_offload": True, "activation_offload": activations}
        plan = plan_layout(
            make_request(profile, machines, job),
            profile,
            PredictionLayout(**degrees, **wishes),
        )
        assert isinstance(plan, Plan)
        found = dry_run(plan, source)
        assert found.differences == ()
        built[activations] = found.ranks
    for kind, busy in zip(built[False], built[True], strict=True):
        assert kind.predicted is not None
        assert busy.predicted is not None
        assert 0 < kind.built.host_bytes == busy.built.host_bytes
        assert kind.built.host_bytes == pytest.approx(
            kind.predicted.host_bytes, abs=kind.padding_bytes
        )
        assert busy.predicted.host_bytes > kind.predicted.host_bytes
        assert kind.built.optimizer_bytes <= kind.tolerance_bytes
