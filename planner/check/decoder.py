"""Model FLOPs of a decoder from its sizes alone, whatever runtime trains it.

(N1)  products of a token = 2 x parameters of attention projections, feed-forward
      networks that the token passes, routers and output layer
(N2)  attention of a token = 2 x heads x (query + value size) x tokens that it sees:
      half of its sequence on average if only the causal half is computed
(N3)  the backward is once or twice the forward for attention, twice for products
(N4)  recomputation of a token in a block = 2 x parameters that its mode runs again: of
      all but the last product in mode full, of networks and router in mode mlp, of the
      expansion of latents in mode latent; other modes may run no product again
"""

from __future__ import annotations

from planner.spec.profile import RecomputeMode
from planner.spec.transformer import Transformer

MARGIN = 0.1
"""Fraction by which small kernels and unequal shards may change the FLOPs."""


def flops_per_token(model: Transformer, sequence_length: int) -> tuple[float, float]:
    """Return the least and the most FLOPs of training on one token.

    Args:
        model: sizes of the decoder.
        sequence_length: tokens of a sample.
    """
    blocks = model.layers + model.multi_token_layers
    weights = (1 + model.multi_token_layers) * model.hidden * model.vocabulary
    weights += blocks * model.attention_parameters
    seen = 0
    for block in range(blocks):
        window = model.sliding_window if model.is_windowed(block) else sequence_length
        seen += min(window, sequence_length)
        weights += _network_weights(model, block)
    sizes = model.heads * (model.head_dim + model.value_dim)
    attention = 2 * sizes * seen
    products = 3 * 2 * weights
    least = products + 2 * attention / 2
    most = products + 3 * attention
    return (1 - MARGIN) * least, (1 + MARGIN) * most


def recomputed_flops_per_token(
    model: Transformer, block: int, mode: RecomputeMode
) -> float:
    """Return the least FLOPs that a mode runs again for one token: equation (N4).

    Args:
        model: sizes of the decoder.
        block: its index, multi-token blocks after the others.
        mode: of the block.
    """
    if mode == "mlp":
        return 2.0 * _network_weights(model, block)
    if mode == "full":
        products = 2 if model.gated else 1
        share = products / (products + 1)
        return 2 * (model.attention_parameters + share * _network_weights(model, block))
    if mode == "latent" and model.latent_attention is not None:
        latent = model.latent_attention
        source = latent.query_rank or model.hidden
        query = source * (latent.nope_dim + latent.rope_dim)
        keys = latent.key_value_rank * (latent.nope_dim + latent.value_dim)
        return 2.0 * model.heads * (query + keys)
    return 0.0


def _network_weights(model: Transformer, block: int) -> int:
    """Return the parameters of a block's networks that one token passes."""
    experts = model.experts
    if experts is None or model.block_kind(block) == "dense":
        return model.network_parameters(model.feed_forward)
    weights = model.router_parameters
    weights += experts.experts_per_token * model.network_parameters(
        experts.feed_forward
    )
    if experts.shared_feed_forward:
        weights += model.network_parameters(experts.shared_feed_forward)
    return weights
