"""What training frameworks do differently, as explicit traits: kernels, precision of gradients, overlap.

Two runs of the same layout on the same devices differ by these, not by the layout. A trait is a fact about the
framework's code, stated with its source; what has to be fitted (efficiencies, host time) stands apart, in
`planner.spec.calibration`.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import Literal, get_args

from planner.errors import UnknownNameError
from planner.spec.fp8 import DELAYED, DYNAMIC, SHARDED, Fp8Casts
from planner.spec.profile import RecomputeMode

AttentionKernel = Literal["flash", "flash-1", "flash-3", "fused-softmax", "unfused"]
"""flash: one kernel that keeps no scores (Dao 2023, FlashAttention-2); flash-1, flash-3: its first version (Dao et al.
2022), and the third, for Hopper and later (Shah et al. 2024);
fused-softmax: scores in memory, scale, mask and softmax in one kernel (Megatron-LM); unfused: one kernel each."""

Selective = Literal["attention", "operators", "alternate"]
"""What selective recomputation runs again: attention proper (Korthikanti et al. 2022); every operation but products and
attention (torch's selective activation checkpointing); or these and every second product."""
Dropout = Literal["none", "learned positions", "always"]

FrameworkName = Literal[
    "planner",
    "megatron-lm",
    "vtrain",
    "megatron-core",
    "megatron-deepspeed",
    "megatron-zero-3",
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
    dropout: Dropout = "none"
    """By default: always, never, or in models with learned positions, since those with rotary ones do without."""
    copies_attention: bool = False
    """Fused attention computes sample by sample, its neighbours token by token: its output is copied, and kept twice,
    where the micro-batch has several samples."""
    packs_projections: bool = False
    """Queries and keys are rotated out of one packed tensor, which stays whole since the values are a view of it."""
    keeps_gathered_inputs: bool = False
    """Sequence parallelism: a product keeps its whole gathered input, and does not gather it anew in the backward."""
    hides_regather: bool = False
    """Sequence parallelism: what a product's backward gathers anew travels beside the product that makes its input's
    gradient (Korthikanti et al. 2022, section 4.2.2)."""
    overlaps_tensor_parallel: bool = False
    """Tensor-parallel exchanges run in pieces beside the products that need or make them (TransformerEngine's user
    buffers, Megatron-Core's --tp-comm-overlap)."""
    fp32_gradients: bool = False
    """Gradients of bf16 parameters are accumulated and reduced in fp32 (fp16 ones stay, for their loss is scaled)."""
    selective: Selective = "operators"
    fp32_softmax: bool = True
    """Attention that keeps its scores without a kernel of its own computes their softmax in fp32."""
    logit_bytes: int = 4
    """Per logit, kept for the loss's backward: an fp32 copy; 2: the half-precision logits themselves."""
    loss_bytes: int = 8
    """Per logit, beside what is kept: torch's cross entropy has two more in fp32 at its peak; that of Megatron-LM works
    in place, next to the half-precision logits."""
    gathers_logits: bool = False
    """Every tensor-parallel rank computes the loss over the whole vocabulary."""
    fp32_master: bool = True
    """Mixed precision keeps a master copy; False: the sharded parameters are in fp32 and cast when gathered."""
    workspace_bytes: int = 0
    """What libraries keep for themselves through torch, beside the fitted constant of the same name."""
    is_pure: bool = False
    """bf16 alone, also where a run calls it mixed: parameters, gradients and optimizer states."""
    accumulates_whole: bool = False
    """ZeRO 3 with several micro-batches: every rank adds up whole gradients in fp32, which are scattered once per step
    (FSDP2's set_requires_gradient_sync(False))."""
    scatters_layers: bool = False
    """ZeRO 2 and 3: the backward fills a layer's gradients whole, while those of the layer behind it are scattered;
    what other frameworks keep so is among what is fitted of them."""
    copied_gradient_bytes: int = 0
    """Per parameter, of copies that the reduction makes of gradients in half precision, whole at any ZeRO stage."""
    steps_in_backward: bool = False
    """The optimizer steps as soon as a layer has its gradients, which are freed then."""
    offloads_states: bool = False
    """Optimizer states and master copy lie in the host's memory (ZeRO-Offload, Ren et al. 2021)."""
    offloads_checkpoints: bool = False
    """What full recomputation keeps lies in the host's memory (DeepSpeed's cpu_checkpointing)."""
    recompute: RecomputeMode = "none"
    """When the run does not say."""
    shards_states: bool = False
    """bf16 training shards the optimizer states over the data-parallel ranks, also where ZeRO is off."""
    frees_outputs: bool = False
    """What a stage has sent is freed: its backward needs none of it."""
    balances_head: bool = False
    """Stages are cut by the blocks' FLOPs, the output layer's among them, instead of equal numbers of blocks."""
    deals_layers: bool = False
    """Stages hold equal numbers of layers, the embedding, the last norm and the output layer one each."""
    vocabulary_multiple: int = 128
    """Embeddings are padded to a multiple of this x the tensor-parallel degree; 0: cut to what that degree divides."""
    overlaps_reduction: bool = False
    """The data-parallel reduction runs beside the last micro-batch's backward."""
    staggers_steps: bool = False
    """No stage waits at the step's end for the others, since what the optimizer needs of them is checked afterwards (Qi
    et al. 2024, "Zero Bubble Pipeline Parallelism", section 4): consecutive steps tile like parallelograms."""
    overlaps_gathers: bool = False
    """ZeRO 1 and 2: updated parameters are gathered beside the next forward; ZeRO 2 and 3: what every micro-batch
    scatters and gathers goes beside the compute of another layer (FSDP2's implicit prefetch). `planner.executor`
    does the latter too, but no measured run says yet what that hides."""
    whole_tensors: int = 0
    """ZeRO 1 and 2 share out whole parameters, so many per layer, and each of their owners in turn sends its own to all
    others; 0: parameters are cut into equal shards, which one collective gathers."""
    keeps_gathered: bool = False
    """ZeRO 3: gathered parameters stay until the backward (reshard_after_forward=False)."""
    stops_recompute: bool = False
    """Full recomputation ends before the block's last product, whose output no backward needs (early stop of
    torch.utils.checkpoint without reentrance)."""
    checkpoints_shards: bool = False
    """A recomputed block keeps its input split over the tensor-parallel ranks."""
    fp8: Fp8Casts = DYNAMIC
    """What is cast for products in fp8, where a job asks for them."""


_ALL = (
    Framework(
        "planner",
        "planner.executor: DistributedDataParallel-like buckets after the backward, torch kernels",
        scatters_layers=True,
    ),
    Framework(
        "megatron-lm",
        "NVIDIA/Megatron-LM before Megatron-Core: fused softmax, bias-GELU and bias-dropout-add, local DDP",
        attention="fused-softmax",
        fuses_elementwise=True,
        dropout="learned positions",
        selective="attention",
        hides_regather=True,
        fp32_gradients=True,
        frees_outputs=True,
        loss_bytes=2,
    ),
    Framework(
        "vtrain",
        "VIA-Research/vTrain, src/model/gpt_modeling.py: the layers of Megatron-LM that its simulator traces, with "
        "vocabulary // tensor degree rows",
        attention="fused-softmax",
        fuses_elementwise=True,
        dropout="learned positions",
        selective="attention",
        fp32_gradients=True,
        frees_outputs=True,
        loss_bytes=2,
        vocabulary_multiple=0,
    ),
    Framework(
        "megatron-core",
        "NVIDIA/Megatron-LM with Megatron-Core and TransformerEngine: main_grad in fp32, overlapped; attention in "
        "[samples, tokens] between products in [tokens, samples]; --deallocate-pipeline-outputs",
        fuses_elementwise=True,
        dropout="learned positions",
        selective="attention",
        hides_regather=True,
        loss_bytes=2,
        copies_attention=True,
        frees_outputs=True,
        fp32_gradients=True,
        overlaps_reduction=True,
        overlaps_gathers=True,
        fp8=DELAYED,
    ),
    Framework(
        "megatron-deepspeed",
        "bigscience-workshop/Megatron-DeepSpeed: DeepSpeed's BF16_Optimizer (runtime/bf16_optimizer.py, which splits "
        "fp32 states at any ZeRO stage) or FP16 optimizer, reduction at the end of the step",
        attention="fused-softmax",
        fuses_elementwise=True,
        dropout="learned positions",
        selective="attention",
        fp32_gradients=True,
        loss_bytes=2,
        shards_states=True,
    ),
    Framework(
        "megatron-zero-3",
        "microsoft/DeepSpeedExamples, Megatron-LM-v1.1.5-ZeRO3, and bigscience's scripts after it: Megatron's kernels "
        "under DeepSpeed's ZeRO 3 with overlap_comm; PA=true, PA_CPU=true",
        attention="fused-softmax",
        fuses_elementwise=True,
        dropout="learned positions",
        selective="attention",
        loss_bytes=2,
        overlaps_reduction=True,
        overlaps_gathers=True,
        checkpoints_shards=True,
        offloads_checkpoints=True,
    ),
    Framework(
        "aa-scaling",
        "Hagemann et al. 2023, arXiv 2311.05610: Megatron-style tensor and pipeline parallelism, ZeRO-1; stages by "
        "Aleph-Alpha/scaling's pipe_partition_uniform",
        deals_layers=True,
        gathers_logits=True,
        loss_bytes=14,
        fuses_norm=False,
    ),
    Framework(
        "nanotron",
        "huggingface/nanotron: fp32 accumulation, ZeRO-1; CausalSelfAttention packs its projections; without "
        "tp_recompute_allgather; sharded_cross_entropy; get_block_compute_costs; make_vocab_size_divisible_by 1",
        fp32_gradients=True,
        copies_attention=True,
        packs_projections=True,
        keeps_gathered_inputs=True,
        balances_head=True,
        vocabulary_multiple=1,
        loss_bytes=4,
    ),
    Framework(
        "torchtitan",
        "pytorch/torchtitan: FSDP2 with fp32 shards cast to bf16; blocks compiled where a run says so; "
        "activation_checkpoint.py recomputes every second mm",
        selective="alternate",
        fuses_norm=False,
        keeps_gathered_inputs=True,
        fp32_master=False,
        fp32_gradients=True,
        overlaps_reduction=True,
        overlaps_gathers=True,
        stops_recompute=True,
        fp8=SHARDED,
    ),
    Framework(
        "kempnerforge",
        "KempnerInstitute/KempnerForge: FSDP2 of a model cast to bf16 (model.to(dtype=param_dtype)), reduction in "
        "fp32, maybe_no_sync between micro-batches; DTensor tensor parallelism, logits gathered for the loss; "
        "torch.compile",
        fuses_elementwise=True,
        is_pure=True,
        accumulates_whole=True,
        keeps_gathered_inputs=True,
        gathers_logits=True,
        logit_bytes=4,
        loss_bytes=4,
        overlaps_reduction=True,
        overlaps_gathers=True,
        stops_recompute=True,
    ),
    Framework(
        "llm-foundry",
        "mosaicml/llm-foundry: Composer FSDP, mixed_precision PURE, triton or flash attention; loss_fn "
        "fused_crossentropy (flash_attn), which reads half-precision logits and writes their gradients",
        fp32_master=False,
        logit_bytes=2,
        loss_bytes=2,
        overlaps_reduction=True,
        overlaps_gathers=True,
        stops_recompute=True,
    ),
    Framework(
        "fsdp",
        "torch FSDP FULL_SHARD",
        fp32_master=False,
        overlaps_reduction=True,
        overlaps_gathers=True,
        stops_recompute=True,
    ),
    Framework(
        "deepspeed",
        "microsoft/DeepSpeed ZeRO",
        overlaps_reduction=True,
        overlaps_gathers=True,
    ),
    Framework(
        "litgpt",
        "Lightning-AI/litgpt with Fabric",
        fuses_norm=False,
        overlaps_reduction=True,
    ),
    Framework(
        "torchtune",
        "pytorch/torchtune recipes: dtype: bf16, enable_activation_checkpointing: True, CEWithChunkedOutputLoss: bf16 "
        "logits, of which one chunk of eight is in fp32 at a time",
        is_pure=True,
        logit_bytes=2,
        loss_bytes=3,
        recompute="full",
        overlaps_reduction=True,
    ),
    Framework(
        "libai",
        "Oneflow-Inc/libai: OneFlow's static graph",
        attention="fused-softmax",
        fuses_elementwise=True,
        dropout="learned positions",
        selective="attention",
        overlaps_reduction=True,
    ),
    Framework(
        "internevo",
        "InternLM/InternEvo: internlm/solver/optimizer/hybrid_zero_optim.py, _partition_param_list, broadcast_params; "
        "configs/7B_sft.py: overlap_sync_grad, not overlap_sync_param; a block of internlm/model/modeling_internlm.py "
        "has two projections and their biases, three matrices and two norms",
        overlaps_reduction=True,
        whole_tensors=9,
    ),
    Framework(
        "galvatron",
        "PKU-DAIR/Hetu-Galvatron on Megatron-Core",
        fuses_elementwise=True,
        selective="attention",
        hides_regather=True,
        loss_bytes=2,
    ),
    Framework(
        "paxml",
        "google/paxml: XLA; tasks/lm/params/lm_cloud.py, CHECKPOINT_POLICY = SAVE_NOTHING",
        recompute="full",
        fuses_elementwise=True,
        overlaps_reduction=True,
        overlaps_gathers=True,
        fp8=DELAYED,
    ),
)
FRAMEWORKS: dict[str, Framework] = {framework.name: framework for framework in _ALL}
OURS = "planner"
"""The executor of this package."""
ALIASES = {
    "nemo": "megatron-core",
    "megatron-bridge": "megatron-core",
    "mcore": "megatron-core",
}
"""Frameworks that launch the kernels of another one."""


def check_runtime(name: str) -> str:
    """The name itself.

    Raises:
        ValueError: no runtime has this name.
    """
    known = (*get_args(FrameworkName), *ALIASES)
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"no runtime {name!r}; {hint}known: {', '.join(known)}")
    return name


def find_framework(name: str, *, field: str = "framework") -> Framework:
    """The traits of a framework.

    Raises:
        UnknownNameError: no framework has this name.
    """
    found = FRAMEWORKS.get(ALIASES.get(name, name))
    if found is None:
        known = ", ".join(get_args(FrameworkName))
        raise UnknownNameError(
            f"no framework {name!r}.", field=field, hint=f"use one of {known}."
        )
    return found
