"""What training frameworks do differently, as explicit traits: kernels, precision of gradients, overlap.

Two runs of the same layout on the same devices differ by these, not by the layout. A trait is a fact about the
framework's code, stated with its source; what has to be fitted (efficiencies, host time) stands apart, in
`planner.spec.calibration`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from planner.errors import UnknownNameError

AttentionKernel = Literal["flash", "fused-softmax", "unfused"]
"""flash: one kernel that keeps no scores (Dao et al. 2022); fused-softmax: scores in memory, scale, mask and softmax in
one kernel (Megatron-LM); unfused: one kernel each."""

FrameworkName = Literal[
    "planner",
    "megatron-lm",
    "megatron-core",
    "megatron-deepspeed",
    "aa-scaling",
    "nanotron",
    "torchtitan",
    "kempnerforge",
    "llm-foundry",
    "fsdp",
    "deepspeed",
    "litgpt",
    "torchtune",
    "libai",
    "internevo",
    "galvatron",
    "paxml",
]


@dataclass(frozen=True, slots=True)
class Framework:
    """Traits of one framework; defaults are those of our own executor."""

    name: FrameworkName
    source: str
    """Where the traits are read from."""
    attention: AttentionKernel = "flash"
    """When the run does not say."""
    fuses_elementwise: bool = False
    """Bias, activation, dropout and residual addition in one kernel each (compiled or hand-written)."""
    fuses_norm: bool = True
    has_dropout: bool = False
    """By default, in models with learned positions; those with rotary ones are trained without."""
    fp32_gradients: bool = False
    """Gradients of bf16 parameters are accumulated and reduced in fp32 (fp16 ones stay, for their loss is scaled)."""
    selective: Literal["attention", "operators"] = "operators"
    """What selective recomputation runs again: attention proper (Korthikanti et al. 2022), or every operation but
    matrix products and attention (torch's selective activation checkpointing)."""
    loss_bytes: int = 8
    """Per logit, beside the fp32 copy that is kept: torch's cross entropy has two more in fp32 at its peak; that of
    Megatron-LM works in place, next to the half-precision logits."""
    gathers_logits: bool = False
    """Every tensor-parallel rank computes the loss over the whole vocabulary."""
    fp32_master: bool = True
    """Mixed precision keeps a master copy; False: the sharded parameters are in fp32 and cast when gathered."""
    overlaps_reduction: bool = False
    """The data-parallel reduction runs beside the last micro-batch's backward."""
    overlaps_gathers: bool = False
    """ZeRO 1 and 2: updated parameters are gathered beside the next forward."""
    keeps_gathered: bool = False
    """ZeRO 3: gathered parameters stay until the backward (reshard_after_forward=False)."""
    checkpoints_shards: bool = False
    """A recomputed block keeps its input split over the tensor-parallel ranks."""


_ALL = (
    Framework("planner", "planner.executor: DistributedDataParallel-like buckets after the backward, torch kernels"),
    Framework(
        "megatron-lm",
        "NVIDIA/Megatron-LM before Megatron-Core: fused softmax, bias-GELU and bias-dropout-add, local DDP",
        attention="fused-softmax",
        fuses_elementwise=True,
        has_dropout=True,
        selective="attention",
        fp32_gradients=True,
        loss_bytes=2,
    ),
    Framework(
        "megatron-core",
        "NVIDIA/Megatron-LM with Megatron-Core and TransformerEngine: main_grad in fp32, overlapped",
        fuses_elementwise=True,
        has_dropout=True,
        selective="attention",
        loss_bytes=2,
        fp32_gradients=True,
        overlaps_reduction=True,
        overlaps_gathers=True,
    ),
    Framework(
        "megatron-deepspeed",
        "bigscience-workshop/Megatron-DeepSpeed: DeepSpeed's BF16/FP16 optimizer, reduction at the end of the step",
        attention="fused-softmax",
        fuses_elementwise=True,
        has_dropout=True,
        selective="attention",
        fp32_gradients=True,
        loss_bytes=2,
    ),
    Framework(
        "aa-scaling",
        "Hagemann et al. 2023, arXiv 2311.05610: Megatron-style tensor and pipeline parallelism, ZeRO-1",
        gathers_logits=True,
        loss_bytes=14,
        fuses_norm=False,
    ),
    Framework("nanotron", "huggingface/nanotron: fp32 accumulation, ZeRO-1", fuses_norm=True, fp32_gradients=True),
    Framework(
        "torchtitan",
        "pytorch/torchtitan: FSDP2 with fp32 shards cast to bf16; blocks compiled where a run says so",
        fuses_norm=False,
        fp32_master=False,
        fp32_gradients=True,
        overlaps_reduction=True,
        overlaps_gathers=True,
    ),
    Framework(
        "kempnerforge",
        "KempnerInstitute/KempnerForge: FSDP2, DTensor tensor parallelism, torch.compile",
        fuses_elementwise=True,
        fp32_master=False,
        overlaps_reduction=True,
        overlaps_gathers=True,
    ),
    Framework(
        "llm-foundry",
        "mosaicml/llm-foundry: Composer FSDP, mixed_precision PURE, triton or flash attention",
        fp32_master=False,
        overlaps_reduction=True,
        overlaps_gathers=True,
    ),
    Framework("fsdp", "torch FSDP FULL_SHARD", fp32_master=False, overlaps_reduction=True, overlaps_gathers=True),
    Framework("deepspeed", "microsoft/DeepSpeed ZeRO", overlaps_reduction=True, overlaps_gathers=True),
    Framework("litgpt", "Lightning-AI/litgpt with Fabric", fuses_norm=False, overlaps_reduction=True),
    Framework("torchtune", "pytorch/torchtune recipes", overlaps_reduction=True),
    Framework(
        "libai",
        "Oneflow-Inc/libai: OneFlow's static graph",
        attention="fused-softmax",
        fuses_elementwise=True,
        has_dropout=True,
        selective="attention",
        overlaps_reduction=True,
    ),
    Framework(
        "internevo", "InternLM/InternEvo: hybrid ZeRO, overlapped", overlaps_reduction=True, overlaps_gathers=True
    ),
    Framework(
        "galvatron",
        "PKU-DAIR/Hetu-Galvatron on Megatron-Core",
        fuses_elementwise=True,
        selective="attention",
        loss_bytes=2,
    ),
    Framework("paxml", "google/paxml: XLA", fuses_elementwise=True, overlaps_reduction=True, overlaps_gathers=True),
)
FRAMEWORKS: dict[str, Framework] = {framework.name: framework for framework in _ALL}


def find_framework(name: str, *, field: str = "framework") -> Framework:
    """The traits of a framework.

    Raises:
        UnknownNameError: no framework has this name.
    """
    found = FRAMEWORKS.get(name)
    if found is None:
        known = ", ".join(get_args(FrameworkName))
        raise UnknownNameError(f"no framework {name!r}.", field=field, mend=f"use one of {known}.")
    return found
