"""Arguments of Megatron-LM in a row's notes, and what they say about its run.

Megatron-LM's functional tests state every argument that is not Megatron-LM's default; `name=value` in the notes is one
of them. So what they do not state is known, too:

    position-embedding-type             rope; else learned positions. Dropout of 0.1 in either case
    disable-bias-linear                 no biases; else biases, also of gated networks
    untie-embeddings-and-output-weights two embeddings; else one
    transformer-impl                    local: attention with scores in memory, its softmax one kernel
    cross-entropy-loss-fusion           exponentials beside the fp32 logits, instead of in their place
    decoder-first-pipeline-num-layers   blocks of the first stage; `-last-`: of the last one
    deterministic-mode                  CUBLAS_WORKSPACE_CONFIG=:4096:8, 32 MiB for each of the two threads that call
                                        cuBLAS; else torch asks for 8.125 MiB, from Hopper on for 32 MiB, too
    num-distributed-optimizer-instances groups of data-parallel ranks, each of which shares out the whole optimizer

Source: megatron/training/arguments.py, core/fusions/fused_cross_entropy.py; torch's ATen/cuda/CublasHandlePool.
"""

from __future__ import annotations

import re
from dataclasses import replace

from planner.profiler.transformer import TransformerShape
from planner.runtimes import AttentionKernel
from planner.runtimes import Runtime as Framework

Arguments = dict[str, str]
EXPONENTIAL_BYTES = 4
"""Per logit, of what a fused loss does not compute in place."""
LARGE_WORKSPACE_BYTES = 2 * (32 * 1024 - 8320) * 1024
"""Of cuBLAS's workspaces for forward and backward, beyond torch's own choice before Hopper."""
SMALL_WORKSPACES = ("Volta", "Turing", "Ampere", "Ada")
"""Architectures before Hopper."""
_LISTS_ALL = re.compile(r"functional test", re.IGNORECASE)
_ARGUMENT = re.compile(r"([a-z][a-z0-9-]+)=([^;]+)")


def arguments_of(system: str, notes: str) -> Arguments | None:
    """Arguments by name; None: the row does not list them."""
    if not _LISTS_ALL.search(system):
        return None
    return {name: value.strip() for name, value in _ARGUMENT.findall(notes)}


def shape_with(
    shape: TransformerShape, given: Arguments, length: int
) -> TransformerShape:
    """The shape that these arguments build, for sequences of `length` tokens."""
    return replace(
        shape,
        positions=0 if given.get("position-embedding-type") == "rope" else length,
        has_biases="disable-bias-linear" not in given,
        is_tied="untie-embeddings-and-output-weights" not in given,
    )


def framework_with(
    framework: Framework, given: Arguments, architecture: str
) -> Framework:
    """The framework as these arguments set it up on a device of this architecture."""
    is_large = "deterministic-mode" in given or architecture not in SMALL_WORKSPACES
    extra = EXPONENTIAL_BYTES if "cross-entropy-loss-fusion" in given else 0
    return replace(
        framework,
        dropout="always",
        loss_bytes=framework.loss_bytes + extra,
        workspace_bytes=LARGE_WORKSPACE_BYTES if is_large else 0,
    )


def attention_with(attention: AttentionKernel, given: Arguments) -> AttentionKernel:
    """The kernel of runs that name none."""
    return "fused-softmax" if given.get("transformer-impl") == "local" else attention


def shard_degree_with(replicas: int, given: Arguments) -> int | None:
    """Ranks that share out the optimizer; None: all `replicas`."""
    groups = int(given.get("num-distributed-optimizer-instances", "1"))
    return (
        replicas // groups if 1 < groups < replicas and replicas % groups == 0 else None
    )


def ends_with(given: Arguments) -> tuple[int | None, int | None]:
    """Blocks of the first and of the last stage, where they are told."""
    first, last = (
        given.get(f"decoder-{end}-pipeline-num-layers") for end in ("first", "last")
    )
    return (int(first) if first else None), (int(last) if last else None)
