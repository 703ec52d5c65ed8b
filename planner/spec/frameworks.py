"""Traits of training frameworks: kernels, precision of gradients, overlap.

Two runs of one layout on the same devices differ by these traits. A trait is a fact
about the framework's code, with its source. Fitted quantities (efficiencies, host time)
are in `planner.spec.calibration`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from planner.errors import UnknownNameError
from planner.spec.fp8 import DELAYED, DYNAMIC, SHARDED, Fp8Casts
from planner.spec.profile import RecomputeMode
from planner.spec.words import suggestion

AttentionKernel = Literal["flash", "flash-1", "flash-3", "fused-softmax", "unfused"]
"""Kernels of attention.

flash: one kernel that saves no scores (Dao 2023, FlashAttention-2); flash-1 and
flash-3: its first version (Dao et al. 2022) and the third, for Hopper and later (Shah
et al. 2024); fused-softmax: scores in memory, with scale, mask and softmax in one
kernel (Megatron-LM); unfused: one kernel for each.
"""

Selective = Literal["attention", "operators", "alternate"]
"""What selective recomputation recomputes.

attention: the core of attention (Korthikanti et al. 2022); operators: everything except
matrix products and attention (torch's selective activation checkpointing); alternate:
these and every second matrix product.
"""
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
    """Traits of one framework; the defaults are those of `planner.executor`."""

    name: FrameworkName
    source: str
    """Where the traits are stated."""
    attention: AttentionKernel = "flash"
    """Kernel that a run uses by default."""
    fuses_elementwise: bool = False
    """Bias, activation, dropout and residual addition are fused, by a compiler or by
    hand."""
    fuses_norm: bool = True
    dropout: Dropout = "none"
    """Default dropout: always, never, or only in models with learned positions, since
    models with rotary positions have none."""
    copies_attention: bool = False
    """Fused attention has the samples first and its neighbours the tokens: with several
    samples per micro-batch its output is copied and saved twice."""
    packs_projections: bool = False
    """Queries, keys and values are views of one packed tensor, which stays allocated
    after queries and keys are rotated."""
    keeps_gathered_inputs: bool = False
    """Sequence parallelism: the gathered input of a product is saved, not gathered
    again in the backward."""
    hides_regather: bool = False
    """Sequence parallelism: the second gather of a product's input overlaps with the
    product for the input's gradient (Korthikanti et al. 2022, section 4.2.2)."""
    overlaps_tensor_parallel: bool = False
    """Tensor-parallel collectives are split and overlap with the products before or
    after them (user buffers of TransformerEngine, Megatron-Core's
    --tp-comm-overlap)."""
    fp32_gradients: bool = False
    """Gradients of bf16 parameters are accumulated and reduced in fp32; those of fp16
    parameters are not, since their loss is scaled."""
    selective: Selective = "operators"
    fp32_softmax: bool = True
    """Unfused attention computes the softmax of its scores in fp32."""
    logit_bytes: int = 4
    """Bytes per logit saved for the backward of the loss. 4: an fp32 copy; 2: the
    logits in half precision."""
    loss_bytes: int = 8
    """Temporary bytes per logit at the peak of the loss. 8: the two fp32 copies of
    torch's cross entropy; 2: Megatron-LM's, which works in place beside half-precision
    logits."""
    gathers_logits: bool = False
    """Every tensor-parallel rank computes the loss over the whole vocabulary."""
    fp32_master: bool = True
    """Mixed precision has a master copy; False: the sharded parameters are in fp32 and
    cast when gathered."""
    workspace_bytes: int = 0
    """Bytes that libraries allocate through torch and keep, in addition to the fitted
    constant of the same name."""
    is_pure: bool = False
    """Parameters, gradients and optimizer states are all in bf16, also in runs that are
    called mixed."""
    accumulates_whole: bool = False
    """ZeRO 3 with several micro-batches: every rank accumulates whole gradients in
    fp32, which are scattered once per step (FSDP2's
    set_requires_gradient_sync(False))."""
    scatters_layers: bool = False
    """ZeRO 2 and 3: the whole gradients of a layer are allocated while those of the
    next layer are scattered; for other frameworks a fitted constant includes this."""
    copied_gradient_bytes: int = 0
    """Bytes per parameter of half-precision copies of gradients for the reduction,
    whole at any ZeRO stage."""
    steps_in_backward: bool = False
    """The optimizer updates a layer as soon as its gradients exist, and frees them."""
    offloads_states: bool = False
    """Optimizer states and master copy are in host memory (ZeRO-Offload, Ren et al.
    2021)."""
    offloads_checkpoints: bool = False
    """Saved inputs of full recomputation are in host memory (DeepSpeed's
    cpu_checkpointing)."""
    recompute: RecomputeMode = "none"
    """Recomputation that a run uses by default."""
    shards_states: bool = False
    """bf16 training shards optimizer states over data-parallel ranks, also without
    ZeRO."""
    frees_outputs: bool = False
    """A stage frees the outputs that it has sent, since its backward does not need
    them."""
    balances_head: bool = False
    """Stages are balanced by FLOPs, including the output layer, not by number of
    blocks."""
    counts_ends: bool = False
    """Stages have equal numbers of blocks, where embedding and output layer count as
    one each; the first stages have one more."""
    deals_layers: bool = False
    """Stages have equal numbers of layers, where the embedding, the last norm and the
    output layer count as one each."""
    vocabulary_multiple: int = 128
    """The vocabulary is padded to a multiple of this x the tensor-parallel degree; 0:
    it is cut to a multiple of that degree."""
    overlaps_reduction: bool = False
    """The data-parallel reduction overlaps with the backward of the last
    micro-batch."""
    staggers_steps: bool = False
    """Stages do not synchronise at the end of a step: the optimizer validates its
    update afterwards (Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section
    4)."""
    overlaps_gathers: bool = False
    """ZeRO 1 and 2: the gather of updated parameters overlaps with the next forward.
    ZeRO 2 and 3: the collectives of every micro-batch overlap with the compute of
    another layer (FSDP2's implicit prefetch). `planner.executor` does the latter as
    well, but no measured run shows yet how much it hides."""
    whole_tensors: int = 0
    """ZeRO 1 and 2: number of whole parameters per layer, which are assigned to ranks;
    each owner in turn broadcasts its own. 0: parameters are split into equal shards,
    which one collective gathers."""
    keeps_gathered: bool = False
    """ZeRO 3: gathered parameters are retained until the backward
    (reshard_after_forward=False)."""
    stops_recompute: bool = False
    """Full recomputation stops before the last product of a block, whose output no
    backward needs (early stop of torch.utils.checkpoint without reentrance)."""
    checkpoints_shards: bool = False
    """The saved input of a recomputed block is sharded over the tensor-parallel
    ranks."""
    fp8: Fp8Casts = DYNAMIC
    """Casts of linear layers in jobs with precision fp8."""


_ALL = (
    Framework(
        "planner",
        "planner.executor: gradient buckets as in DistributedDataParallel, reduced "
        "after the backward; torch kernels",
        scatters_layers=True,
    ),
    Framework(
        "megatron-lm",
        "NVIDIA/Megatron-LM before Megatron-Core: fused softmax, bias-GELU and "
        "bias-dropout-add, local DDP",
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
        "VIA-Research/vTrain, src/model/gpt_modeling.py: the layers of Megatron-LM "
        "that its simulator traces, with vocabulary // tensor degree rows",
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
        "NVIDIA/Megatron-LM with Megatron-Core and TransformerEngine: main_grad in "
        "fp32, overlapped; attention in [samples, tokens] between products in "
        "[tokens, samples]; --deallocate-pipeline-outputs",
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
        "bigscience-workshop/Megatron-DeepSpeed: DeepSpeed's BF16_Optimizer "
        "(runtime/bf16_optimizer.py, which splits fp32 states at any ZeRO stage) or "
        "FP16 optimizer, reduction at the end of the step",
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
        "microsoft/DeepSpeedExamples, Megatron-LM-v1.1.5-ZeRO3, and bigscience's "
        "scripts after it: Megatron's kernels under DeepSpeed's ZeRO 3 with "
        "overlap_comm; PA=true, PA_CPU=true",
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
        "Hagemann et al. 2023, arXiv 2311.05610: Megatron-style tensor and pipeline "
        "parallelism, ZeRO-1; stages by Aleph-Alpha/scaling's pipe_partition_uniform",
        deals_layers=True,
        gathers_logits=True,
        loss_bytes=14,
        fuses_norm=False,
    ),
    Framework(
        "nanotron",
        "huggingface/nanotron: fp32 accumulation, ZeRO-1; CausalSelfAttention packs "
        "its projections; without tp_recompute_allgather; sharded_cross_entropy; "
        "get_block_compute_costs; make_vocab_size_divisible_by 1",
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
        "pytorch/torchtitan: FSDP2 with fp32 shards cast to bf16; blocks compiled if "
        "the run says so; activation_checkpoint.py recomputes every second mm; "
        "stages by generate_llm_fqn_per_model_part",
        counts_ends=True,
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
        "KempnerInstitute/KempnerForge: FSDP2 of a model cast to bf16 "
        "(model.to(dtype=param_dtype)), reduction in fp32, maybe_no_sync between "
        "micro-batches; DTensor tensor parallelism, logits gathered for the loss; "
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
        "mosaicml/llm-foundry: Composer FSDP, mixed_precision PURE, triton or flash "
        "attention; loss_fn fused_crossentropy (flash_attn), which reads "
        "half-precision logits and writes their gradients",
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
        "pytorch/torchtune recipes: dtype: bf16, enable_activation_checkpointing: "
        "True, CEWithChunkedOutputLoss: bf16 logits, of which one chunk of eight is "
        "in fp32 at a time",
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
        "InternLM/InternEvo: internlm/solver/optimizer/hybrid_zero_optim.py, "
        "_partition_param_list, broadcast_params; configs/7B_sft.py: "
        "overlap_sync_grad, not overlap_sync_param; a block of "
        "internlm/model/modeling_internlm.py has two projections and their biases, "
        "three matrices and two norms",
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
        "google/paxml: XLA; tasks/lm/params/lm_cloud.py, CHECKPOINT_POLICY = "
        "SAVE_NOTHING",
        recompute="full",
        fuses_elementwise=True,
        overlaps_reduction=True,
        overlaps_gathers=True,
        fp8=DELAYED,
    ),
)
FRAMEWORKS: dict[str, Framework] = {framework.name: framework for framework in _ALL}
OURS = "planner"
"""Name of this package's executor."""
ALIASES = {
    "nemo": "megatron-core",
    "megatron-bridge": "megatron-core",
    "mcore": "megatron-core",
}
"""Frameworks that use the kernels of another one."""


def check_runtime(name: str) -> str:
    """Return the name of a runtime unchanged.

    Raises:
        ValueError: no runtime has this name.
    """
    known = (*get_args(FrameworkName), *ALIASES)
    if name not in known:
        hint = f"{suggestion(name, known)}known: {', '.join(known)}"
        raise ValueError(f"no runtime {name!r}; {hint}")
    return name


def find_framework(name: str, *, field: str = "framework") -> Framework:
    """Return the traits of a framework.

    Raises:
        UnknownNameError: no framework has this name.
    """
    found = FRAMEWORKS.get(ALIASES.get(name, name))
    if found is None:
        known = (*get_args(FrameworkName), *ALIASES)
        raise UnknownNameError(
            f"unknown runtime {name!r}.",
            field=field,
            hint=f"{suggestion(name, known)}Known: {', '.join(known)}.",
        )
    return found
