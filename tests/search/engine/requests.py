"""Random requests for plans on one node group: models, runtimes, hosts and constraints."""

from __future__ import annotations

import random

from planner.cost import Workload, workload
from planner.profiler.counted import counted_profile
from planner.spec import Cluster, Job, NodeGroup

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
