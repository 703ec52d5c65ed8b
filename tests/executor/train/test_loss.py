"""Losses against their definitions."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from planner.errors import DocumentError, UnsupportedError
from planner.executor.pipeline.pieces import TokenTargets
from planner.executor.train.loss import (
    CountedTokens,
    classification,
    load_loss,
    loss_of_pieces,
    next_token,
    next_token_of_piece,
)
from planner.profiler.sequence import Pieces
from tests.executor.plans import masked


def test_next_token_is_the_mean_over_all_predicted_tokens() -> None:
    """Shifted targets give what shifted logits give: every token but the first, given those before it."""
    torch.manual_seed(0)
    logits, tokens = torch.randn(3, 5, 7), torch.randint(7, (3, 5))
    terms = [
        functional.cross_entropy(logits[b, i], tokens[b, i + 1])
        for b in range(3)
        for i in range(4)
    ]
    assert torch.allclose(next_token(logits, tokens), torch.stack(terms).mean())


def test_mean_over_equal_micro_batches_is_that_of_the_batch() -> None:
    """What the pipeline relies on when it averages micro-batches."""
    torch.manual_seed(0)
    logits, tokens = torch.randn(6, 5, 7), torch.randint(7, (6, 5))
    parts = [next_token(logits[i : i + 2], tokens[i : i + 2]) for i in (0, 2, 4)]
    assert torch.allclose(next_token(logits, tokens), torch.stack(parts).mean())


def test_half_precision_logits_are_summed_in_fp32() -> None:
    """The loss of bf16 logits is an fp32 number."""
    assert (
        next_token(
            torch.randn(1, 4, 8).bfloat16(), torch.zeros(1, 4, dtype=torch.long)
        ).dtype
        == torch.float32
    )


def test_loss_is_chosen_by_what_the_model_takes() -> None:
    """Tokens are predicted, all else is classified, and the user may name another."""
    assert load_loss(None, "tokens") is next_token
    assert load_loss(None, "images") is classification
    assert load_loss("torch.nn.functional:mse_loss", "tokens") is functional.mse_loss
    with pytest.raises(DocumentError, match="no_such_loss"):
        load_loss("torch.nn.functional:no_such_loss", "tokens")


@pytest.mark.parametrize("pieces", [1, 2, 4])
def test_losses_of_pieces_add_up_to_that_of_the_whole(pieces: int) -> None:
    """The target of a piece's last token is the first one of the next piece."""
    torch.manual_seed(0)
    logits, tokens = torch.randn(3, 8, 11), torch.randint(11, (3, 8))
    length = 8 // pieces
    parts = [
        next_token_of_piece(
            logits[:, start : start + length], TokenTargets(tokens, start)
        )
        for start in range(0, 8, length)
    ]
    assert torch.allclose(sum(parts), next_token(logits, tokens))


def test_losses_of_ones_own_take_whole_sequences() -> None:
    """Nobody told how to cut them."""
    with pytest.raises(UnsupportedError, match="takes whole sequences") as caught:
        loss_of_pieces(classification, Pieces(8, chunks=2))
    assert caught.value.problems[0].field == "loss"
    assert loss_of_pieces(classification, Pieces(8)) is classification
    assert loss_of_pieces(next_token, Pieces(8, context_ranks=2)) is next_token_of_piece


@pytest.mark.parametrize("pieces", [1, 2])
def test_every_target_counts_alike(pieces: int) -> None:
    """Of samples with unequally many targets, the mean of the micro-batches' means is another loss; one whose targets
    are all left out has none."""
    _, targets = masked(0, 6)
    logits = torch.randn(6, 16, 256)
    whole = functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten(), ignore_index=-100
    )
    counted = CountedTokens()
    counted.mean_targets = CountedTokens.targets(targets) / 3
    length = 16 // pieces
    losses = [
        counted(
            logits[first : first + 2, start : start + length],
            targets[first : first + 2]
            if pieces == 1
            else TokenTargets(targets[first : first + 2], start),
        )
        for first in (0, 2, 4)
        for start in range(0, 16, length)
    ]
    torch.testing.assert_close(torch.stack(losses).sum() / 3, whole)
    assert len(set(map(int, (targets != -100).sum(1)))) > 2, "as the case needs it"
