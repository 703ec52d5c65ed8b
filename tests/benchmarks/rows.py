"""Rows of measured runs, with every column that `benchmarks.published_runs` reads."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path

Row = dict[str, str]

SMALL = {
    "source_id": "a",
    "source": "example/runs README.md",
    "gpus_per_node": "8",
    "layers": "2",
    "hidden": "1024",
    "ffn": "2816",
    "heads": "16",
    "kv_heads": "16",
    "head_dim": "64",
    "vocab": "32000",
    "seq_len": "1024",
    "gpus": "8",
    "tp": "1",
    "pp": "1",
    "vp": "1",
    "cp": "1",
    "ep": "1",
    "dp": "8",
    "mbs": "1",
    "gbs": "8",
    "device": "a100-sxm4-80gb",
    "framework": "megatron-core",
    "gated_ffn": "1",
    "attention_kind": "mha",
    "tied_embeddings": "0",
    "positions": "rotary",
    "biases": "0",
    "number_format": "bf16",
    "master_dtype": "fp32",
    "optimizer": "adam",
    "zero_stage": "0",
    "recompute_mode": "none",
    "status_kind": "ok",
    "step_s": "1.0",
    "use_time": "1",
    "use_memory": "0",
    "use_fit": "1",
}
"""A two-layer model on one node."""
BLANK = (
    "etp",
    "experts",
    "topk",
    "sequence_parallel",
    "rank_group",
    "group",
    "recipe",
    "release",
    "moe_ffn",
    "shared_ffn",
    "dense_ffn",
    "first_dense_layers",
    "moe_every",
    "sliding_window",
    "mla_q_rank",
    "mla_kv_rank",
    "mla_nope_dim",
    "mla_rope_dim",
    "mla_v_dim",
    "mtp_layers",
    "gradient_dtype",
    "attention_dropout_or_hidden_dropout",
    "optimizer_state_dtype",
    "cpu_offload",
    "zero_shard_degree",
    "schedule_name",
    "layers_per_stage",
    "vocab_in_pipeline",
    "recompute_modules",
    "attention_kernel",
    "fused_loss",
    "compiled",
    "cuda_graphs",
    "tp_comm_overlap",
    "dp_comm_overlap",
    "ep_comm_overlap",
    "dispatcher",
    "routing",
    "launch_blocking",
    "network_gbytes_per_s_per_gpu",
    "scale_up_gbytes_per_s_per_gpu",
    "time_kind",
    "memory_bytes",
    "memory_kind",
    "memory_rank",
    "why_not",
)
COLUMNS = (*SMALL, *BLANK)

KORTHIKANTI = {
    "source": "Korthikanti et al. 2022 (arXiv 2205.05198) Table 5",
    "layers": "48",
    "hidden": "6144",
    "ffn": "24576",
    "heads": "64",
    "kv_heads": "64",
    "head_dim": "96",
    "vocab": "51200",
    "seq_len": "2048",
    "tp": "8",
    "dp": "1",
    "mbs": "4",
    "gbs": "4",
    "framework": "megatron-lm",
    "gated_ffn": "0",
    "tied_embeddings": "1",
    "positions": "learned",
    "biases": "1",
    "attention_dropout_or_hidden_dropout": "1",
    "number_format": "fp16",
    "gradient_dtype": "fp16",
    "attention_kernel": "fused-softmax",
    "group": "22B",
}
"""The 22B model on one node: 1.42 s with full recomputation, 1.10 s with selective
recomputation and sequence parallelism."""
ZERO_BUBBLE = {
    "source": "Zero Bubble PP (arXiv 2401.10241) Tables 3-5",
    "layers": "22",
    "hidden": "2304",
    "ffn": "9216.0",
    "heads": "24",
    "kv_heads": "24",
    "head_dim": "96",
    "pp": "8",
    "vp": "max (1 layer per chunk)",
    "dp": "1",
    "mbs": "6.0",
    "gbs": "144.0",
    "framework": "megatron-lm",
    "recipe": "zero-bubble",
    "gated_ffn": "0",
    "tied_embeddings": "1",
    "positions": "learned",
    "biases": "1",
    "attention_dropout_or_hidden_dropout": "1",
    "number_format": "fp16",
    "gradient_dtype": "fp16",
    "optimizer_state_dtype": "fp32",
    "schedule_name": "interleaved-1f1b",
    "layers_per_stage": "ends one fewer",
    "attention_kernel": "fused-softmax",
    "step_s": "1.37405",
    "memory_bytes": "40000000000",
    "memory_kind": "allocated",
    "use_memory": "1",
}
"""The 1.5B model on eight GPUs, with one block per chunk (Qi et al. 2024)."""
TORCHTITAN = {
    "source": "pytorch/torchtitan benchmarks/llama3_h100_202412_torchtitan.md Table 1",
    "layers": "32",
    "hidden": "4096",
    "ffn": "14336",
    "heads": "32",
    "kv_heads": "8",
    "head_dim": "128",
    "vocab": "128256",
    "seq_len": "8192",
    "mbs": "2.0",
    "gbs": "16",
    "device": "h100-sxm5-96gb",
    "framework": "torchtitan",
    "attention_kind": "gqa",
    "gradient_dtype": "fp32",
    "optimizer": "adamw",
    "optimizer_state_dtype": "fp32",
    "zero_stage": "3",
    "recompute_mode": "selective",
    "recompute_modules": "op",
    "dp_comm_overlap": "1",
    "network_gbytes_per_s_per_gpu": "50",
    "step_s": "2.84346",
    "memory_bytes": "88476326298",
    "memory_kind": "reserved",
    "memory_rank": "largest",
    "use_memory": "1",
}
"""Llama 3 8B on eight H100 (96 GB)."""
DEEPSEEK = {
    "source": "NVIDIA-NeMo/Megatron-Bridge docs/performance-summary-archive.md",
    "gpus_per_node": "4",
    "layers": "61",
    "hidden": "7168",
    "ffn": "2048",
    "heads": "128",
    "kv_heads": "128",
    "head_dim": "192",
    "vocab": "129280",
    "experts": "256",
    "topk": "8",
    "seq_len": "4096",
    "gpus": "256",
    "pp": "2.0",
    "vp": "8",
    "ep": "32.0",
    "etp": "1",
    "dp": "128.0",
    "mbs": "2",
    "gbs": "4096",
    "device": "gb300-nvl72-279gb",
    "recipe": "megatron-bridge",
    "release": "26.02.01",
    "moe_ffn": "2048",
    "shared_ffn": "2048",
    "dense_ffn": "18432",
    "first_dense_layers": "3",
    "moe_every": "1",
    "attention_kind": "mla",
    "mla_q_rank": "1536",
    "mla_kv_rank": "512",
    "mla_nope_dim": "128",
    "mla_rope_dim": "64",
    "mla_v_dim": "128",
    "mtp_layers": "1",
    "number_format": "fp8-current",
    "zero_stage": "1",
    "schedule_name": "interleaved-1f1b",
    "layers_per_stage": "Et*4|(t*4|)*14tmL",
    "recompute_mode": "selective",
    "recompute_modules": "mla_up_proj",
    "dispatcher": "hybridep",
    "routing": "forced",
    "step_s": "1.0",
    "use_fit": "0",
}
"""DeepSeek V3 on 256 GB300 with the plan of NVIDIA's release notes, which ran in MXFP8;
the number format and the time are placeholders."""


def row(**values: object) -> Row:
    """Return a row of the two-layer model with these columns changed."""
    unknown = set(values) - set(COLUMNS)
    assert not unknown, f"no columns {unknown}"
    changed = {name: str(value) for name, value in values.items()}
    return dict.fromkeys(BLANK, "") | SMALL | changed


def cited(publication: dict[str, str], **values: object) -> Row:
    """Return a row of a publication with these columns changed."""
    return row(**(publication | values))


def write_rows(path: Path, rows: Sequence[Row]) -> Path:
    """Write a CSV file of rows, and return its path."""
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return path
