"""Layouts of the former search, for clusters of one node group, are layouts of the new one."""

from __future__ import annotations

import random
from collections import Counter

from planner.cost import Workload, workload
from planner.profiler.counted import counted_profile
from planner.search.engine.options import Options, Row
from planner.search.engine.space import whole_space
from planner.search.engine.table import enumerate_table
from planner.search.layouts.space import layouts
from planner.spec import Cluster, Job, NodeGroup
from planner.spec.layout import Layout
from tests.search.engine.test_table import key_of

MODELS = {
    "llama-3.2-1b": 4096,
    "mixtral-8x7b": 4096,
    "gpt2": 1024,
    "resnet-50": 0,
}
RUNTIMES = ("planner", "planner", "megatron-core", "torchtitan", "nanotron")
CONSTRAINTS: tuple[tuple[str, object], ...] = (
    ("tensor_parallel_degree", (1, 2)),
    ("pipeline_parallel_degree", (2, 4)),
    ("data_parallel_degree", 3),
    ("context_parallel_degree", 1),
    ("expert_parallel_degree", (2, 4)),
    ("micro_batch_size", (1, 2)),
    ("sequence_parallel", True),
    ("virtual_stages_per_rank", (1, 2)),
    ("zero_stage", (1, 3)),
    ("zero_shard_degree", (1, 2)),
    ("rank_order", "tp-cp-pp-dp"),
    ("recompute", "none"),
    ("recompute", "full"),
    ("schedule", ("1f1b", "zb-h1")),
    ("sequence_chunks", (1, 2)),
    ("activation_offload", True),
    ("optimizer_offload", False),
    ("layers_per_stage", "even"),
)


def request(seed: int) -> Workload:
    """A random request: model, devices, batch, runtime, host and up to two constraints."""
    chooser = random.Random(seed)
    model = chooser.choice(list(MODELS))
    length = MODELS[model]
    devices, per_node = chooser.choice(((4, 4), (6, 6), (8, 8), (12, 6), (16, 8)))
    host = chooser.choice((None, 10**12))
    group = NodeGroup(
        device="h100-sxm5-80gb",
        nodes=devices // per_node,
        devices_per_node=per_node,
        host_memory_bytes=host,
    )
    asked = chooser.sample(CONSTRAINTS, chooser.choice((0, 0, 1, 2)))
    runtime = chooser.choice(RUNTIMES)
    optimizers = ("adamw", "sgd", "muon") if runtime == "planner" else ("adamw",)
    optimizer = chooser.choice(optimizers)
    if optimizer == "muon":
        asked = []
    step = Job(
        global_batch_size=chooser.choice((6, 8, 10, 12, 16)),
        sequence_length=length,
        precision="bf16-mixed",
        optimizer=optimizer,
        runtime=runtime,
        constraints=dict(asked),
    )
    profile = counted_profile(model, sequence_length=length)
    return workload(profile, Cluster(node_groups=(group,)), step)


def missing_layouts(work: Workload, found: Counter[str]) -> list[Layout]:
    """Return the former layouts that the new space lacks, and count what layouts have."""
    space = whole_space(work, least_tokens=1)
    options = Options(work, space)
    table = enumerate_table(work, space)
    keys = set()
    for index in range(len(table)):
        row = Row.of(table, index)
        keys |= {key_of(options.layout(row, option)) for option in options.of(row)}
    missing = []
    for layout in layouts(work):
        found["layouts"] += 1
        found["unequal shares"] += layout.has_uneven_shares
        found["activations on the host"] += layout.activation_offload
        found["optimizer on the host"] += layout.optimizer_offload
        found["experts"] += layout.expert_parallel_degree > 1
        found[work.job.runtime] += 1
        found[work.profile.model] += 1
        if key_of(layout) not in keys:
            missing.append(layout)
    return missing


def test_layouts_of_the_former_search_are_a_subset() -> None:
    """The new space has every layout of the former one, whatever the request."""
    found: Counter[str] = Counter()
    for seed in range(24):
        assert not missing_layouts(request(seed), found), seed
    covered = {"unequal shares", "activations on the host", "optimizer on the host"}
    covered |= {"experts", *MODELS, *RUNTIMES}
    assert min(found[each] for each in covered) > 0, found
