"""Any small model, through the real path: profiled, planned, checked, taken by the executor, and built as predicted."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from planner.check import check
from planner.executor.dry_run import dry_run
from planner.profiler.count import profile
from planner.profiler.models import ModelSource
from planner.search import plan
from planner.spec import Cluster, Job, Plan
from planner.spec.job import COMPUTE_TYPE
from tests.builders import cluster, request

WIDTH = 8
PARTS = {
    "product": lambda: nn.Linear(WIDTH, WIDTH),
    "block": lambda: nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
    ),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "dropout": lambda: nn.Dropout(0.1),
    "activation": nn.ReLU,
}
REPEATED = "the one before"
CONSTRAINTS: dict[str, st.SearchStrategy[Any]] = {
    "schedule": st.sampled_from(["gpipe", "1f1b", "zb-h1", "interleaved-1f1b", "zb-v"]),
    "zero_stage": st.integers(0, 3),
    "recompute": st.sampled_from(["none", "selective", "full", "per-layer"]),
    "pipeline_parallel_degree": st.integers(1, 4),
    "activation_offload": st.booleans(),
    "optimizer_offload": st.booleans(),
    "micro_batch_size": st.sampled_from([1, 2]),
}


class Residual(nn.Module):
    """Parts one after the other; some add what went into the part before them."""

    def __init__(self, parts: list[nn.Module], skips: list[bool]) -> None:
        super().__init__()
        self.parts, self._skips = nn.ModuleList(parts), skips

    def forward(self, inputs: Tensor) -> Tensor:
        """(samples, width) -> the same."""
        before = inputs
        for part, skips in zip(self.parts, self._skips, strict=True):
            given = inputs
            inputs = part(inputs) + before if skips else part(inputs)
            before = given
        return inputs


@st.composite
def sources(draw: st.DrawFn) -> ModelSource:
    """An nn.Sequential, or a module with skips, in which a part may stand again."""
    names = draw(st.lists(st.sampled_from([*PARTS, REPEATED]), min_size=1, max_size=6))
    skips = [
        False,
        *draw(st.lists(st.booleans(), min_size=len(names), max_size=len(names))),
        False,
    ]

    def build() -> nn.Module:
        parts: list[nn.Module] = [nn.Linear(WIDTH, WIDTH)]
        for name in names:
            parts.append(parts[-1] if name == REPEATED else PARTS[name]())
        parts.append(nn.Linear(WIDTH, WIDTH))
        return Residual(parts, skips) if any(skips) else nn.Sequential(*parts)

    return ModelSource("tiny", "features", build, sample_shape=(WIDTH,))


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """With one or two constraints."""
    fields = draw(st.sets(st.sampled_from(sorted(CONSTRAINTS)), max_size=2))
    return Job(
        global_batch_size=draw(st.sampled_from([4, 6, 8])),
        sequence_length=0,
        precision=draw(st.sampled_from(["fp32", "bf16-mixed", "fp16-mixed", "bf16"])),
        optimizer=draw(st.sampled_from(["sgd", "momentum", "adamw", "adafactor"])),
        memory_headroom=0,
        constraints={field: draw(CONSTRAINTS[field]) for field in sorted(fields)},
    )


@settings(max_examples=12)
@given(sources(), jobs(), st.sampled_from([1, 2, 4]))
def test_plans_of_any_small_model_are_built_as_predicted(
    source: ModelSource, job: Job, devices: int
) -> None:
    """The independent check finds nothing, the executor takes the plan, and every rank holds the predicted bytes."""
    if job.optimizer == "adafactor":
        job = job.model_copy(update={"constraints": {}})
    model = profile(
        source,
        sequence_length=0,
        micro_batch_sizes=(1, 2),
        dtype=COMPUTE_TYPE[job.precision],
    )
    peaks = dict.fromkeys(("fp32", "bf16", "fp16"), 1e12)
    (group,) = cluster(
        devices, peak_flops_per_second=peaks, host_bandwidth_bytes_per_second=1e10
    ).node_groups
    machines = Cluster(
        node_groups=(group.model_copy(update={"host_memory_bytes": 10**9}),)
    )
    found = plan(request(model, machines, job, top=0), model)
    if isinstance(found, Plan):
        assert check(found, model).problems == ()
        assert dry_run(found, source).differences == ()
