"""What the words of published runs mean: hardware, framework, attention, ZeRO, schedule, interconnect."""

from __future__ import annotations

import re
from typing import Any, Literal

from planner.runtimes import AttentionKernel, get
from planner.runtimes import Runtime as Framework
from planner.spec.cluster import Link
from planner.spec.devices import INTER_NODE_LATENCY_SECONDS, find_entry

UNSTATED = "a100-sxm4-80gb"
"""For devices whose type is not told: bytes do not depend on it, and what does is not judged (`remarks`)."""
_DEVICES = (
    (r"gh200", "gh200-96gb"),
    (r"gb200", "gb200-nvl72-186gb"),
    (r"gb300", "gb300-nvl72-279gb"),
    (r"b300", "b300-sxm-288gb"),
    (r"b200", "b200-sxm-180gb"),
    (r"h200", "h200-sxm-141gb"),
    (r"h100.*96", "h100-sxm5-96gb"),
    (r"h100.*pcie", "h100-pcie-80gb"),
    (r"h800", "h800-sxm5-80gb"),
    (r"h100", "h100-sxm5-80gb"),
    (r"a800", "a800-sxm4-80gb"),
    (r"a100.*40.*pcie|a100.*pcie.*40", "a100-pcie-40gb"),
    (r"a100.*pcie", "a100-pcie-80gb"),
    (r"a100.*40\s*gb", "a100-sxm4-40gb"),
    (r"a100", "a100-sxm4-80gb"),
    (r"v100.*16", "v100-sxm2-16gb"),
    (r"v100", "v100-sxm2-32gb"),
    (r"l40s", "l40s-48gb"),
    (r"\bl4\b", "l4-24gb"),
    (r"rtx\s*4090", "rtx4090-24gb"),
    (r"a10g", "a10g-24gb"),
    (r"gpu \(type not stated", UNSTATED),
    (r"mi250", "mi250x-gcd-64gb"),
    (r"mi300", "mi300x-192gb"),
    (r"mi325", "mi325x-256gb"),
    (r"mi355", "mi355x-288gb"),
)

_FRAMEWORKS = (
    (r"golden|megatron-core|nemo|primus|vocabulary parallelism", "megatron-core"),
    (r"megatron\+deepspeed zero-3", "megatron-zero-3"),
    (r"deepspeed zero-3|zero-3|^deepspeed", "deepspeed"),
    (
        r"megatron-deepspeed|deepspeed 3d|megatron\+deepspeed|sailor",
        "megatron-deepspeed",
    ),
    (r"aa-scaling|aleph", "aa-scaling"),
    (r"vtrain", "vtrain"),
    (r"nanotron", "nanotron"),
    (r"torchtitan", "torchtitan"),
    (r"kempner", "kempnerforge"),
    (r"llm-foundry|composer", "llm-foundry"),
    (r"libai|oneflow", "libai"),
    (r"internevo", "internevo"),
    (r"galvatron", "galvatron"),
    (r"paxml|jax", "paxml"),
    (r"litgpt", "litgpt"),
    (r"torchtune", "torchtune"),
    (r"fsdp", "fsdp"),
    (r"megatron", "megatron-lm"),
)

_AS_RUN: dict[str, Any] = {
    "megatron-core": {
        "settings": {"overlaps_reduction": True, "overlaps_gathers": True}
    },
    "nanotron": {"release": "2024-07-06"},
    "torchtitan": {"release": "2025-06-13"},
}
"""Releases and settings of the published runs."""

_SCHEDULES = (
    (r"zb-?2p|zb-?h2", "zb-h2"),
    (r"zb-?1p|zb-?h1", "zb-h1"),
    (r"zbv|zb-v", "zb-v"),
    (r"gpipe|afab|all forward", "gpipe"),
)


def device_of(hardware: str, precision: str = "") -> str | None:
    """Catalogue id of the hardware that a row names; None when the catalogue lacks it."""
    from planner.spec.devices import catalogue

    found = hardware if hardware in catalogue() else _first(_DEVICES, hardware)
    return found if found in catalogue() else None


def is_simulated(source: str) -> bool:
    """Was the step computed, though its file calls it measured? vTrain's single-node steps are sums, to the nanosecond,
    of traced layers and of the table of all-reduce times that its simulator reads (trace/a100, src/predictor.py)."""
    return "ground_truth_single" in source


def is_nemo(system: str) -> bool:
    """NVIDIA's own runs of Megatron-Core by NeMo's recipes, such as NeMo-Framework-Launcher's
    conf/training/gpt3/175b_fp8_performance.yaml: sequence_parallel, ub_tp_comm_overlap, grad_sync_dtype: bf16."""
    return system.startswith("NeMo (Megatron-Core)")


def framework_of(system: str, source: str = "") -> Framework:
    """The framework that a row names; plain torch when none is known. vTrain stands for the steps that it simulated;
    those on many nodes are runs of Megatron-LM itself."""
    named = _first(_FRAMEWORKS, system) or "planner"
    if named == "vtrain" and "ground_truth_multi" in source:
        named = "megatron-lm"
    return get(named, **_AS_RUN.get(named, {}))


def attention_of(text: str, framework: Framework, device: str) -> AttentionKernel:
    """The attention kernel that a row names, else its framework's, as far as the device can run it.

    FlashAttention needs Turing or later (its README); a V100 keeps the scores.
    """
    lowered = text.lower()
    if re.search(r"flash\D*1\.\d", lowered):
        return "flash-1"
    if re.search(r"fa[34]|flash\D*3", lowered):
        return "flash-3"
    if re.search(r"flash|sdpa|fa[234]", lowered):
        return "flash"
    if lowered == "torch":
        return "unfused"
    # Megatron-LM calls its attention with scores in memory unfused or local; their softmax is one kernel all the same.
    if re.search(r"fused|local", lowered):
        return "fused-softmax"
    keeps_scores = (
        framework.attention == "flash" and find_entry(device).architecture == "Volta"
    )
    return "unfused" if keeps_scores else framework.attention


def zero_stage_of(text: str) -> Literal[0, 1, 2, 3]:
    """ZeRO stage by the words of a row."""
    lowered = text.lower()
    if re.search(r"zero-?3|fsdp|hsdp|full.?shard|grads_params", lowered):
        return 3
    if re.search(r"zero-?2", lowered):
        return 2
    return 1 if re.search(r"zero-?1|distributed optimizer", lowered) else 0


def shard_degree_of(text: str) -> int | None:
    """Ranks that share out ZeRO's states, as in ``zero1 within 8 GPUs`` or ``fsdp 4``; None: unstated."""
    found = re.search(r"(?:within|fsdp) (\d+)", text.lower())
    return int(found[1]) if found else None


def schedule_of(text: str, virtual_stages: int) -> str:
    """Canonical name of the schedule; 1F1B when none is stated, interleaved with virtual stages."""
    named = _first(_SCHEDULES, text)
    if named:
        return named
    return "interleaved-1f1b" if virtual_stages > 1 else "1f1b"


def inter_node_of(text: str, devices_per_node: int) -> Link | None:
    """Link between nodes per device, from words such as ``8x200Gb/s HDR IB``; None: unstated."""
    many = re.search(r"(\d+)\s*x\s*(\d+)\s*(G[bB])\s*/\s*s", text) or re.search(
        r"(\d+)\s*x\s*(\d+)\s*(Gb)\b", text
    )
    one = re.search(r"(\d+)\s*(G[bB])/?s", text)
    if many:
        bytes_per_second = (
            float(many.group(1))
            * _bytes(many.group(2), many.group(3))
            / devices_per_node
        )
    elif one:
        shared = 1 if "per GPU" in text else devices_per_node
        bytes_per_second = _bytes(one.group(1), one.group(2)) / shared
    else:
        return None
    return Link(
        latency_seconds=INTER_NODE_LATENCY_SECONDS,
        bandwidth_bytes_per_second=bytes_per_second,
    )


def _bytes(amount: str, unit: str) -> float:
    return float(amount) * (1e9 if unit == "GB" else 1e9 / 8)


def _first(table: tuple[tuple[str, str], ...], text: str) -> str | None:
    lowered = text.lower()
    return next((name for pattern, name in table if re.search(pattern, lowered)), None)
