"""Plans written by hand, with predictions nobody looks at, and the tiny models that they split."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from types import MappingProxyType

import torch
from torch import nn

from planner.executor.train.loss import next_token
from planner.profiler.models import ModelSource, load_model
from planner.schedule import Schedule, build
from planner.spec import Cluster, Job, Layout, NodeGroup, Plan, PlanRequest, Prediction
from planner.spec.cluster import DeviceSpec
from planner.spec.layout import RankOrder
from planner.spec.plan import (
    Breakdown,
    PlannedLayer,
    RankPlacement,
    SearchReport,
    Stage,
)
from planner.spec.profile import RecomputeMode
from planner.version import __version__

GPT2 = {
    "model_type": "gpt2",
    "n_layer": 4,
    "n_embd": 32,
    "n_head": 4,
    "vocab_size": 256,
    "n_positions": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 32,
}
QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 8}
OPT = {
    "model_type": "opt",
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "word_embed_proj_dim": 32,
    "ffn_dim": 64,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 32,
    "dropout": 0.0,
}
MIXTRAL = {
    **LLAMA,
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
QWEN3_MOE = {
    **QWEN3,
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "mlp_only_layers": [1],
}
DEEPSEEK_V3 = {
    **LLAMA,
    "model_type": "deepseek_v3",
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
GPT_OSS = {
    **LLAMA,
    "model_type": "gpt_oss",
    "num_hidden_layers": 2,
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
OLMOE = {
    **LLAMA,
    "model_type": "olmoe",
    "num_hidden_layers": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "eos_token_id": 0,
}
STEEPNESS = 8.0
T5 = {
    "model_type": "t5",
    "vocab_size": 256,
    "d_model": 16,
    "d_kv": 4,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.1,
}
# Split as derived; attention, which every rank would drop by random numbers of its own, drops nothing here.
GPT2_SPLIT = {**GPT2, "attn_pdrop": 0.0}
GPT2_STILL = {**GPT2_SPLIT, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
T5_SPLIT = {**T5, "d_ff": 32, "dropout_rate": 0.0, "feed_forward_proj": "gated-gelu"}
BERT = {
    "model_type": "bert",
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 32,
    "attention_probs_dropout_prob": 0.0,
}
BERT_STILL = {**BERT, "hidden_dropout_prob": 0.0}
VIT = {
    "model_type": "vit",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
    "architectures": ["ViTForImageClassification"],
}
BLOOM = {
    "model_type": "bloom",
    "n_layer": 2,
    "hidden_size": 32,
    "n_head": 4,
    "vocab_size": 256,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
FALCON = {
    "model_type": "falcon",
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_kv_heads": 2,
    "new_decoder_architecture": True,
    "vocab_size": 256,
}
FALCON_ALIBI = {
    **FALCON,
    "num_kv_heads": 4,
    "new_decoder_architecture": False,
    "multi_query": False,
    "alibi": True,
}
PHI3 = {
    **LLAMA,
    "model_type": "phi3",
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
GRAPHS = ("unet", "resnet", "diffusion", "wide", "halting", "forking")
"""Callables of `tests.profiler.graphs`."""
FROZEN = (
    "adapted_llama",
    "adapted_tied_llama",
    "adapted_mixtral",
    "top_of_llama",
    "norms_of_gpt2",
    "frozen_mlp",
    "frozen_encoder",
)
"""Callables of `tests.executor.frozen`."""
OWN = ("own_transformer", "own_network", "torch_encoder")
"""Callables of `tests.profiler.blocks`."""
CONFIGS = {
    "opt": OPT,
    "mixtral": MIXTRAL,
    "deepseek-v3": DEEPSEEK_V3,
    "gpt-oss": GPT_OSS,
    "olmoe": OLMOE,
    "qwen3-moe": QWEN3_MOE,
    "t5": T5,
    "gpt2": GPT2,
    "gpt2-split": GPT2_SPLIT,
    "gpt2-still": GPT2_STILL,
    "t5-split": T5_SPLIT,
    "bert": BERT,
    "bert-still": BERT_STILL,
    "vit": VIT,
    "bloom": BLOOM,
    "falcon": FALCON,
    "falcon-alibi": FALCON_ALIBI,
    "phi3": PHI3,
    "llama": LLAMA,
    "qwen3": QWEN3,
    "tied-llama": {**LLAMA, "tie_word_embeddings": True},
}


def mlp() -> tuple[nn.Module, torch.Tensor]:
    """An `nn.Sequential` whose first layer has no parameters."""
    layers = (
        nn.Flatten(),
        nn.Linear(12, 16),
        nn.ReLU(),
        nn.Linear(16, 16),
        nn.Tanh(),
        nn.Linear(16, 5),
    )
    return nn.Sequential(*layers), torch.randn(2, 3, 4)


def steep_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Next-token prediction whose gradients overflow fp16 at the first loss scales, and stop doing so."""
    return STEEPNESS * next_token(logits, tokens)


def source_of(name: str, folder: Path) -> ModelSource:
    """A tiny model: of `CONFIGS`, `GRAPHS` or `FROZEN`, or `mlp`."""
    if name in GRAPHS:
        return load_model(f"tests.profiler.graphs:{name}")
    if name in FROZEN:
        return load_model(f"tests.executor.frozen:{name}")
    if name == "mlp":
        return load_model(f"{__name__}:mlp")
    if name in OWN:
        return load_model(f"tests.profiler.blocks:{name}")
    path = folder / f"{name}.json"
    path.write_text(json.dumps(CONFIGS[name]))
    return load_model(str(path))


def make_plan(
    layers: Sequence[str],
    sizes: Sequence[int] | None = None,
    *,
    data: int = 1,
    tensor: int = 1,
    micro_batch_size: int = 1,
    micro_batches: int = 4,
    sequence_length: int = 16,
    schedule: str = "1f1b",
    zero: int = 0,
    shards: int | None = None,
    recompute: Mapping[int, RecomputeMode] = MappingProxyType({}),
    optimizer: str = "adamw",
    precision: str = "fp32",
    pipeline: int | None = None,
    actions: Sequence[Sequence[str]] = (),
    sequence_parallel: bool = False,
    expert: int = 1,
    context: int = 1,
    chunks: int = 1,
    rank_order: RankOrder = "tp-cp-dp-pp",
    shares: Sequence[int] | None = None,
    **further: bool,
) -> Plan:
    """A plan with stages of these sizes on so many pipeline ranks (None: one each).

    Args:
        actions: of a schedule that has no name.
        shares: micro-batches of every data-parallel rank, instead of `micro_batches`.
        further: fields of the layout.
    """
    micro_batches = micro_batches if shares is None else max(shares)
    sizes = sizes or (len(layers),)
    pipeline = pipeline or len(sizes)
    virtual = len(sizes) // pipeline
    numbers = {
        "micro_batches": micro_batches,
        "virtual_stages": virtual,
        "sequence_chunks": chunks,
    }
    ordered = (
        Schedule.from_text(actions)
        if actions
        else build(schedule, ranks=pipeline, **numbers)
    )
    layout = Layout(
        data_parallel_degree=data,
        tensor_parallel_degree=tensor,
        pipeline_parallel_degree=pipeline,
        context_parallel_degree=context,
        sequence_chunks=chunks,
        virtual_stages_per_rank=virtual,
        micro_batch_size=micro_batch_size,
        schedule=schedule,
        zero_stage=zero,
        zero_shard_degree=shards,
        recompute="per-layer" if recompute else "none",
        sequence_parallel=sequence_parallel,
        expert_parallel_degree=expert,
        rank_order=rank_order,
        micro_batch_shares=shares,
        **further,
    )
    placement = _placement(pipeline, data, context, tensor, expert, rank_order)
    job = Job(
        global_batch_size=micro_batch_size * sum(shares or (micro_batches,) * data),
        sequence_length=sequence_length,
        precision=precision,
        optimizer=optimizer,
    )
    request = PlanRequest(
        profile_id="0" * 64,
        cluster=_cluster(len(placement)),
        job=job,
        planner_version=__version__,
    )
    return Plan(
        id=request.id,
        layout=layout,
        micro_batches=micro_batches,
        stages=_stages(layers, sizes, recompute, placement, ordered.stage_ranks),
        placement=placement,
        prediction=_prediction(),
        search=_PROVEN,
        actions=ordered.to_text(),
        request=request,
    )


_PROVEN = SearchReport(
    layouts_considered=1,
    layouts_pruned=0,
    layouts_solved=1,
    seconds=0.0,
    lower_bound_seconds=1.0,
    gap=0.0,
    optimal=True,
)


def _placement(
    pipeline: int,
    data: int,
    context: int,
    tensor: int,
    expert: int,
    rank_order: RankOrder,
) -> tuple[RankPlacement, ...]:
    grid = product(range(pipeline), range(data), range(context), range(tensor))
    if rank_order == "tp-cp-pp-dp":
        grid = iter(sorted(grid, key=lambda place: (place[1], place[0], *place[2:])))
    return tuple(
        RankPlacement(
            rank=rank,
            node=0,
            device=rank,
            pipeline=row,
            data=replica,
            context=piece,
            tensor=shard,
            expert=(replica * context + piece) % expert,
        )
        for rank, (row, replica, piece, shard) in enumerate(grid)
    )


def _stages(
    layers: Sequence[str],
    sizes: Sequence[int],
    recompute: Mapping[int, RecomputeMode],
    placement: Sequence[RankPlacement],
    stage_ranks: Sequence[int],
) -> tuple[Stage, ...]:
    stages, start = [], 0
    for index, size in enumerate(sizes):
        rows = tuple(
            PlannedLayer(name=layers[i], recompute=recompute.get(i, "none"))
            for i in range(start, start + size)
        )
        ranks = tuple(
            row.rank for row in placement if row.pipeline == stage_ranks[index]
        )
        stages.append(
            Stage(
                index=index, pipeline_rank=stage_ranks[index], layers=rows, ranks=ranks
            )
        )
        start += size
    return tuple(stages)


def _cluster(devices: int) -> Cluster:
    device = DeviceSpec(id="cpu", memory_bytes=1 << 30)
    return Cluster(
        node_groups=(NodeGroup(device=device, nodes=1, devices_per_node=devices),)
    )


def _prediction() -> Prediction:
    parts = dict.fromkeys(Breakdown.model_fields, 0.0)
    breakdown = Breakdown(**{**parts, "compute_seconds": 1.0})
    return Prediction(
        step_seconds=1.0,
        tokens_per_second=1.0,
        mfu=None,
        bubble_fraction=0.0,
        breakdown=breakdown,
        memory=(),
    )


SIGNS = "+---+++++++-----"
"""Of the features of every four samples, as `signed` gives them: of micro-batches of four steps."""


def signed(start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features that are all positive or all negative, and classes."""
    generators = [torch.Generator().manual_seed(index) for index in range(start, stop)]
    features = torch.stack([torch.rand(8, generator=each) for each in generators])
    signs = [
        1.0 if SIGNS[index // 4 % len(SIGNS)] == "+" else -1.0
        for index in range(start, stop)
    ]
    classes = torch.stack([torch.randint(4, (), generator=each) for each in generators])
    return features * torch.tensor(signs)[:, None], classes


def masked(start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, of which the first ones of every sample are no targets: of every third sample all."""
    generators = (torch.Generator().manual_seed(index) for index in range(start, stop))
    tokens = torch.stack(
        [torch.randint(256, (16,), generator=each) for each in generators]
    )
    targets = tokens.clone()
    for row, index in enumerate(range(start, stop)):
        targets[row, : 16 if index % 3 == 0 else index % 16] = -100
    return tokens, targets
