"""Sizes of a decoder from its Hugging Face configuration, without torch.

Every architecture has one function, because the meaning of a missing field is a matter
of the architecture's configuration class in transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from planner.spec.transformer import Activation, Experts, LatentAttention, Transformer

Config = Mapping[str, Any]
Fields = dict[str, Any]

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


def transformer_of(config: Mapping[str, Any]) -> Transformer | None:
    """Return the sizes of a decoder; None: another kind of model, or unknown settings.

    Args:
        config: a Hugging Face ``config.json``.
    """
    architecture = config.get("model_type")
    fields_of = _ARCHITECTURES.get(str(architecture))
    if fields_of is None:
        return None
    try:
        fields = fields_of(config)
    except KeyError:
        return None
    if fields is None:
        return None
    known = {name: value for name, value in fields.items() if value is not None}
    return Transformer(architecture=architecture, **known)


def _llama(config: Config) -> Fields | None:
    """Fields of Llama, whose names most architectures share."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if config.get("attention_bias") or config.get("mlp_bias"):
        return None
    window = _window(config)
    return {
        "layers": config["num_hidden_layers"],
        "hidden": hidden,
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or hidden // heads,
        "feed_forward": config["intermediate_size"],
        "vocabulary": config["vocab_size"],
        "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
        "activation": _activation(config.get("hidden_act", "silu")),
        "dropout": bool(config.get("attention_dropout")),
        "sliding_window": window,
        "sliding_every": 1 if window else None,
    }


def _window(config: Config) -> int:
    """Tokens of a window shorter than the longest sequence; 0: none."""
    window = config.get("sliding_window") or 0
    longest = config.get("max_position_embeddings")
    return 0 if longest and window >= longest else window


def _activation(name: str) -> Activation:
    """Raises KeyError for an activation that the cost model does not know."""
    return _ACTIVATIONS[name]


def _mistral(config: Config) -> Fields | None:
    return _llama({"num_key_value_heads": 8, "sliding_window": 4096, **config})


def _mixtral(config: Config) -> Fields | None:
    fields = _llama({"num_key_value_heads": 8, **config})
    if fields is None:
        return None
    experts = Experts(
        experts=config.get("num_local_experts", 8),
        experts_per_token=config.get("num_experts_per_tok", 2),
        feed_forward=config["intermediate_size"],
    )
    return fields | {"experts": experts}


def _qwen(config: Config) -> Fields | None:
    """Fields that Qwen2 and Qwen3 share; a window needs ``use_sliding_window``."""
    if config.get("use_sliding_window"):
        return None
    return _llama({**config, "sliding_window": None})


def _qwen2(config: Config) -> Fields | None:
    fields = _qwen(config)
    return None if fields is None else fields | {"biases": "attention"}


def _qwen3(config: Config) -> Fields | None:
    fields = _qwen({"head_dim": 128, **config})
    return None if fields is None else fields | {"query_key_norm": True}


def _qwen3_moe(config: Config) -> Fields | None:
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    fields = _qwen3({"head_dim": head_dim, **config})
    if fields is None or config.get("mlp_only_layers"):
        return None
    experts = Experts(
        experts=config.get("num_experts") or config["num_local_experts"],
        experts_per_token=config.get("num_experts_per_tok", 8),
        feed_forward=config["moe_intermediate_size"],
        every=config.get("decoder_sparse_step", 1),
    )
    return fields | {"experts": experts}


def _gemma(config: Config) -> Fields | None:
    """Fields that all Gemmas share."""
    name = config.get("hidden_activation") or "gelu_pytorch_tanh"
    given = {"tie_word_embeddings": True, "head_dim": 256, **config}
    fields = _llama({**given, "hidden_act": name, "sliding_window": None})
    return None if fields is None else fields | {"scaled_embedding": True}


def _gemma2(config: Config) -> Fields | None:
    fields = _gemma(config)
    if fields is None:
        return None
    return fields | {
        "post_norms": True,
        "capped_scores": bool(config.get("attn_logit_softcapping", 50.0)),
        "capped_logits": bool(config.get("final_logit_softcapping", 30.0)),
        **_windowed(config, default_every=2),
    }


def _gemma3(config: Config) -> Fields | None:
    text = config.get("text_config") or config
    fields = _gemma(text)
    if fields is None:
        return None
    return fields | {
        "post_norms": True,
        "query_key_norm": True,
        "capped_scores": bool(text.get("attn_logit_softcapping")),
        "capped_logits": bool(text.get("final_logit_softcapping")),
        **_windowed(text, default_every=6),
    }


def _windowed(config: Config, default_every: int) -> Fields:
    """Return window and period of layers of two kinds.

    Raises:
        KeyError: the kinds of the layers have no period.
    """
    window = config["sliding_window"]
    if not window:
        return {}
    types = list(config.get("layer_types") or ())
    if not types:
        every = config.get("sliding_window_pattern") or default_every
        return {"sliding_window": window, "sliding_every": every}
    if "full_attention" not in types:
        return {"sliding_window": window, "sliding_every": 1}
    every = types.index("full_attention") + 1
    for layer, kind in enumerate(types):
        is_windowed = (layer + 1) % every != 0
        if is_windowed != (kind == "sliding_attention"):
            raise KeyError("layer_types")
    return {"sliding_window": window, "sliding_every": every}


def _gpt2(config: Config) -> Fields | None:
    hidden, heads = config["n_embd"], config["n_head"]
    probabilities = [config.get(f"{part}_pdrop", 0.1) for part in _DROPPED]
    return {
        "layers": config["n_layer"],
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": hidden // heads,
        "feed_forward": config.get("n_inner") or 4 * hidden,
        "vocabulary": config["vocab_size"],
        "gated": False,
        "tied_embeddings": bool(config.get("tie_word_embeddings", True)),
        "biases": "all",
        "positions": "learned",
        "learned_positions": config["n_positions"],
        "dropout": any(probabilities),
        "activation": _activation(config.get("activation_function", "gelu_new")),
    }


_DROPPED = ("attn", "embd", "resid")
"""Parts of GPT-2 with a probability of dropout."""
_OPT_OFFSET = 2
"""Rows of OPT's table of positions before the first position."""


def _opt(config: Config) -> Fields | None:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    is_projected = config.get("word_embed_proj_dim", hidden) != hidden
    if is_projected or not config.get("do_layer_norm_before", True):
        return None
    return {
        "layers": config["num_hidden_layers"],
        "hidden": hidden,
        "heads": heads,
        "kv_heads": heads,
        "head_dim": hidden // heads,
        "feed_forward": config["ffn_dim"],
        "vocabulary": config["vocab_size"],
        "gated": False,
        "tied_embeddings": bool(config.get("tie_word_embeddings", True)),
        "biases": "all",
        "positions": "learned",
        "learned_positions": config["max_position_embeddings"] + _OPT_OFFSET,
        "dropout": bool(config.get("dropout", 0.1)),
        "activation": _activation(config.get("activation_function", "relu")),
    }


def _gpt_oss(config: Config) -> Fields | None:
    fields = _llama({**config, "attention_bias": False, "sliding_window": None})
    if fields is None or not config.get("attention_bias", True):
        return None
    experts = Experts(
        experts=config["num_local_experts"],
        experts_per_token=config["num_experts_per_tok"],
        feed_forward=config["intermediate_size"],
    )
    return fields | {
        "biases": "all",
        "norm": "rms",
        "attention_sinks": True,
        "experts": experts,
        **_windowed(config, default_every=2),
    }


def _deepseek(config: Config) -> Fields | None:
    """DeepSeek-V2 and DeepSeek-V3."""
    nope, rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    fields = _llama({**config, "head_dim": nope + rope})
    if fields is None:
        return None
    latent = LatentAttention(
        query_rank=config.get("q_lora_rank", 1536) or 0,
        key_value_rank=config["kv_lora_rank"],
        nope_dim=nope,
        rope_dim=rope,
        value_dim=config["v_head_dim"],
    )
    one = config["moe_intermediate_size"]
    experts = Experts(
        experts=config["n_routed_experts"],
        experts_per_token=config["num_experts_per_tok"],
        feed_forward=one,
        shared_feed_forward=one * (config.get("n_shared_experts") or 0),
        first_dense_layers=config.get("first_k_dense_replace", 0),
        every=config.get("moe_layer_freq", 1),
    )
    return fields | {
        "kv_heads": config["num_attention_heads"],
        "latent_attention": latent,
        "experts": experts,
    }


def _phi3(config: Config) -> Fields | None:
    fields = _llama(config)
    if fields is None:
        return None
    dropped = config.get("resid_pdrop") or config.get("attention_dropout")
    return fields | {"dropout": bool(dropped)}


def _olmo(config: Config) -> Fields | None:
    if config.get("clip_qkv"):
        return None
    fields = _llama(config)
    return None if fields is None else fields | {"norm": "plain"}


_ARCHITECTURES: dict[str, Callable[[Config], Fields | None]] = {
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3,
    "gpt2": _gpt2,
    "gpt_oss": _gpt_oss,
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "olmo": _olmo,
    "opt": _opt,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
}
