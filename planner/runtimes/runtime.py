"""Traits of a runtime: kernels, saved tensors, precision of gradients, overlap.

Two runs of one layout on the same devices differ by these traits. A trait is a fact
about the runtime's code, with its source in the runtime's data file. Fitted quantities
(efficiencies, host time) are in `planner.spec.calibration`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from planner.runtimes.supports import Supports
from planner.spec.fp8 import DYNAMIC, Fp8Casts
from planner.spec.profile import RecomputeMode
from planner.spec.recompute import MODES

AttentionKernel = Literal["flash", "flash-1", "flash-3", "fused-softmax", "unfused"]
"""Kernels of attention.

flash: one kernel that saves no scores (Dao 2023, FlashAttention-2); flash-1 and
flash-3: its first version (Dao et al. 2022) and the third, for Hopper and later (Shah
et al. 2024); fused-softmax: scores in memory, with scale, mask and softmax in one
kernel (Megatron-LM); unfused: one kernel for each.
"""
FlashKernel = Literal["flash", "flash-1", "flash-3"]
"""Kernels of attention that save no scores."""
Selective = Literal["attention", "operators", "alternate"]
"""What selective recomputation recomputes.

attention: the core of attention (Korthikanti et al. 2022); operators: everything except
matrix products and attention (torch's selective activation checkpointing); alternate:
these and every second matrix product.
"""
Dropout = Literal["none", "learned positions", "always"]
Dispatcher = Literal["alltoall", "allgather", "deepep", "hybridep"]
"""How tokens reach their experts.

alltoall: one all-to-all over the expert-parallel ranks; allgather: every rank gathers
all tokens; deepep and hybridep: kernels that send a token once per node.
"""
Routing = Literal["natural", "forced", "capacity"]
"""Tokens per expert: as the router decides, equal for benchmarks, or cut off."""
Fp8Scaling = Literal["none", "delayed", "current", "rowwise", "blockwise"]
CpuOffload = Literal["none", "optimizer", "activations", "checkpoints"]


@dataclass(frozen=True, slots=True)
class Runtime:
    """Traits of one runtime at one release; defaults are those of `planner.executor`."""

    name: str
    source: str
    """Repository or publication that states the traits."""
    based_on: str = ""
    """Runtime whose kernels this one uses, such as ``megatron-core``."""
    aliases: tuple[str, ...] = ()
    release: str = ""
    """Release that the traits are for; empty: the newest known."""
    supports: Supports = field(default_factory=Supports, repr=False, compare=False)
    """Layouts that the runtime runs."""
    sources: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """Source of each trait that differs from the default."""

    runs_transformers: bool = False
    """Layers are those of Hugging Face transformers, without a compiler: every torch
    operation is a kernel (`planner.cost.eager`)."""
    attention: AttentionKernel = "flash"
    """Kernel that a run uses by default."""
    flash_kernel: FlashKernel = "flash"
    """Kernel of runs with ``attention`` "flash". cuDNN's, TransformerEngine's default on
    Hopper and later, is as fast as "flash-3" there."""
    causal: bool = True
    """Attention does not compute the masked half of causal scores."""
    fuses_elementwise: bool = False
    """Bias, activation, dropout and residual addition are fused, by a compiler or by
    hand."""
    fuses_norm: bool = True
    norms_in_products: bool = False
    """A norm in front of a product is a part of the product's module
    (TransformerEngine's LayerNormLinear), and no module of its own that could run
    again."""
    dropout: Dropout = "none"
    """Default dropout: always, never, or only in models with learned positions, since
    models with rotary positions have none."""
    separate_projections: bool = False
    """Queries, keys and values, and gate and up projection, are products of their
    own."""
    fuses_rotary: bool = False
    """Queries and keys are rotated by one kernel each, also where other elementwise
    operations are not fused."""
    overlaps_context: bool = False
    """Keys and values go round the context-parallel ring beside attention."""
    applies_probabilities_early: bool = False
    """Outputs of experts are weighted in their activation, so that they are not
    saved."""
    copies_attention: bool = False
    """Fused attention has the samples first and its neighbours the tokens: with several
    samples per micro-batch its output is copied and saved twice."""
    expands_keys: bool = False
    """Keys and values are copied for every query head before attention, which saves the
    copies."""
    packs_projections: bool = False
    """Queries, keys and values are views of one packed tensor, which stays allocated
    after queries and keys are rotated."""
    keeps_gathered_inputs: bool = False
    """Sequence parallelism: the gathered input of a product is saved, not gathered
    again in the backward."""
    hides_regather: bool = False
    """Sequence parallelism: the second gather of a product's input overlaps with the
    product for the input's gradient (Korthikanti et al. 2022, section 4.2.2)."""
    overlaps_input_gradient: bool = False
    """Tensor parallelism: the reduction of the input's gradient overlaps with the
    product for the weight's gradient."""
    overlaps_tensor_parallel: bool = False
    """Tensor-parallel collectives are split and overlap with the products before or
    after them (user buffers of TransformerEngine, Megatron-Core's
    --tp-comm-overlap)."""
    overlaps_transfers: bool = False
    """Transfers between pipeline stages overlap with compute; under Megatron-Core only
    with several virtual stages per rank."""
    overlaps_expert_exchange: bool = False
    """The exchange of tokens between experts overlaps with compute of another
    micro-batch."""
    dispatcher: Dispatcher = "alltoall"
    routing: Routing = "natural"
    cuda_graphs: bool = False
    launch_blocking: bool = False
    """Every kernel is waited for (CUDA_LAUNCH_BLOCKING=1): nothing overlaps."""
    fp32_gradients: bool = False
    """Gradients of bf16 parameters are accumulated and reduced in fp32; those of fp16
    parameters are not, since their loss is scaled."""
    caches_weight_gradients: bool = False
    """One unused gradient per distinct weight shape of a block stays allocated
    (TransformerEngine >= 2.3 with fused accumulation)."""
    optimizer_state_bytes: int | None = None
    """Bytes per parameter of Adam's moments together; None: those of the job's
    optimizer."""
    selective: Selective = "operators"
    selective_modules: tuple[str, ...] = ()
    """Modules that selective recomputation recomputes, by Megatron-Core's names."""
    policies: tuple[RecomputeMode, ...] = ()
    """Further recompute modes of a layer, besides none, selective and full."""
    recompute_fraction: float = 1.0
    """Fraction of the layers that recompute in a run with recomputation."""
    fp32_softmax: bool = True
    """Unfused attention computes the softmax of its scores in fp32."""
    fused_loss: bool = False
    """Output layer and loss are computed in chunks, so that logits are never whole."""
    logit_bytes: int = 4
    """Bytes per logit saved for the backward of the loss. 4: an fp32 copy; 2: the
    logits in half precision."""
    loss_bytes: int = 8
    """Temporary bytes per logit at the peak of the loss. 8: the two fp32 copies of
    torch's cross entropy; 2: Megatron-LM's, which works in place beside half-precision
    logits."""
    gathers_logits: bool = False
    """Every tensor-parallel rank computes the loss over the whole vocabulary."""
    vocab_in_pipeline: bool = False
    """Embedding and output layer are split over all pipeline stages."""
    fp32_master: bool = True
    """Mixed precision has a master copy; False: the sharded parameters are in fp32 and
    cast when gathered."""
    workspace_bytes: int = 0
    """Bytes that libraries allocate through torch and retain, in addition to the fitted
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
    next layer are scattered; for other runtimes a fitted constant includes this."""
    copied_gradient_bytes: int = 0
    """Bytes per parameter of half-precision copies of gradients for the reduction,
    whole at any ZeRO stage."""
    frees_gradients: bool = False
    """Gradients are freed after every step, and no buffer holds their memory: with one
    micro-batch per step they and the activations do not peak together. Predictions of
    measured runs only: plans add both."""
    steps_in_backward: bool = False
    """The optimizer updates a layer as soon as its gradients exist, and frees them."""
    cpu_offload: CpuOffload = "none"
    """What a run has in host memory by default."""
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
    ZeRO. Recorded only:
    describe such a run with ZeRO 1."""
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
    gathers_on_one_rail: bool = False
    """ZeRO 2 and 3: parameters are gathered one by one, and a group of ranks drives one
    network adapter of a node at a time."""
    keeps_gathered: bool = False
    """ZeRO 3: gathered parameters are retained until the backward
    (reshard_after_forward=False)."""
    keeps_gathered_in_pipeline: bool = False
    """As `keeps_gathered`, but only in layouts with pipeline stages."""
    stops_recompute: bool = False
    """Full recomputation stops before the last product of a block, whose output no
    backward needs (early stop of torch.utils.checkpoint without reentrance)."""
    checkpoints_shards: bool = False
    """The saved input of a recomputed block is sharded over the tensor-parallel
    ranks."""
    fp8: Fp8Casts = DYNAMIC
    """Casts of linear layers in jobs with precision fp8."""
    fp8_scaling: Fp8Scaling = "current"
    """How scales of fp8 tensors are found in jobs with precision fp8."""
    stores_gates_in_fp8: bool = False
    """Precision fp8: outputs of the first feed-forward product are saved at one byte
    per element."""
    gathers_in_fp8: bool = False
    """Precision fp8: parameters are gathered at one byte each."""

    def retains_gathered(self, pipeline_parallel_degree: int) -> bool:
        """Return whether ZeRO 3 retains gathered parameters until the backward."""
        in_pipeline = self.keeps_gathered_in_pipeline and pipeline_parallel_degree > 1
        return self.keeps_gathered or in_pipeline

    def without_overlap(self) -> Runtime:
        """Return the traits of a run in which every kernel is waited for."""
        return replace(
            self,
            hides_regather=False,
            overlaps_input_gradient=False,
            overlaps_tensor_parallel=False,
            overlaps_transfers=False,
            overlaps_context=False,
            overlaps_expert_exchange=False,
            overlaps_reduction=False,
            overlaps_gathers=False,
        )

    @property
    def modes(self) -> tuple[RecomputeMode, ...]:
        """Return the recompute modes of a layer, from least to most recomputation."""
        has = {"none", "selective", "full", *self.policies}
        return tuple(mode for mode in MODES if mode in has)

    @property
    def calibration_owner(self) -> str:
        """Return the runtime whose fitted constants apply: that of the kernels."""
        return self.based_on or self.name
