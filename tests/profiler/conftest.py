"""Tiny models of every family that the cut must know."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

SMALL = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
LLAMA_LIKE = {
    **SMALL,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
TINY: dict[str, dict[str, Any]] = {
    "gpt2": {
        **SMALL,
        "model_type": "gpt2",
        "n_embd": 32,
        "n_layer": 3,
        "n_head": 4,
        "n_positions": 64,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "resid_pdrop": 0.0,
    },
    "llama": {**LLAMA_LIKE, "model_type": "llama"},
    "qwen3": {**LLAMA_LIKE, "model_type": "qwen3"},
    "mistral": {**LLAMA_LIKE, "model_type": "mistral", "sliding_window": 4},
    "gemma": {**LLAMA_LIKE, "model_type": "gemma"},
    "gemma3": {
        **LLAMA_LIKE,
        "model_type": "gemma3_text",
        "sliding_window": 4,
        "query_pre_attn_scalar": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gpt_neox": {
        **SMALL,
        "model_type": "gpt_neox",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    },
    "opt": {
        **SMALL,
        "model_type": "opt",
        "hidden_size": 32,
        "word_embed_proj_dim": 16,
        "ffn_dim": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "dropout": 0.0,
        "pad_token_id": 1,
    },
    "deepseek_v3": {
        **LLAMA_LIKE,
        "model_type": "deepseek_v3",
        "head_dim": 4,  # of the rotary embedding
        "num_key_value_heads": 4,
        "first_k_dense_replace": 3,
        "n_routed_experts": 4,
        "kv_lora_rank": 12,
        "q_lora_rank": 20,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,
    },
    "gpt_oss": {
        **LLAMA_LIKE,
        "model_type": "gpt_oss",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["full_attention"] * 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "olmoe": {
        **LLAMA_LIKE,
        "model_type": "olmoe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "bert": {
        **SMALL,
        "model_type": "bert",
        "architectures": ["BertForMaskedLM"],
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
}
"""Configurations without dropout, so that two runs agree."""


@pytest.fixture
def write_config(tmp_path: Path):
    """Write a tiny configuration, with changes, to disk; returns its path."""

    def write(family: str, **changes: Any) -> str:
        path = tmp_path / f"{family}.json"
        path.write_text(json.dumps({**TINY[family], **changes}))
        return str(path)

    return write
