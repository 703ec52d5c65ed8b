"""GNMT: Wu et al. 2016, "Google's Neural Machine Translation System", section 3, as it is trained on GPUs (MLPerf's
reference of the translation benchmark, and PipeDream): the first decoder layer asks the encoder once for all positions,
and every further layer takes the answer beside its input. Encoder and decoder share the embedding.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

DROPOUT = 0.2
FIRST_RESIDUAL = 2
"""Layers from the third on add their input to their output (section 3.1)."""


def gnmt(layers: int, width: int, vocabulary: int) -> nn.Module:
    """GNMT of `layers` LSTM layers in the encoder, the first in both directions, and as many in the decoder. Takes ids
    of the source (batch, source) and of the target (batch, target)."""
    return GNMT(layers, width, vocabulary)


class GNMT(nn.Module):
    """Encoder and decoder of LSTM layers, joined by additive attention."""

    def __init__(self, layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.encoder = nn.ModuleList(
            Recurrence(
                2 * width if index == 1 else width,
                width,
                residual=index >= FIRST_RESIDUAL,
                both_ways=index == 0,
            )
            for index in range(layers)
        )
        self.decoder = nn.ModuleList(
            Recurrence(
                2 * width if index else width, width, residual=index >= FIRST_RESIDUAL
            )
            for index in range(layers)
        )
        self.attention = AdditiveAttention(width)
        self.classifier = nn.Linear(width, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Ids of the source and of the target so far -> scores (batch, target, vocabulary) of the next ids."""
        encoded = self.embedding(source)
        for layer in self.encoder:
            encoded = layer(encoded)
        hidden = self.decoder[0](self.embedding(target))
        context = self.attention(hidden, encoded)
        for layer in self.decoder[1:]:
            hidden = layer(hidden, context)
        scores: Tensor = self.classifier(hidden)
        return scores


class Recurrence(nn.Module):
    """One LSTM layer behind dropout; the context, if there is one, is joined to its input."""

    def __init__(
        self, inputs: int, width: int, *, residual: bool, both_ways: bool = False
    ) -> None:
        super().__init__()
        self.residual = residual
        self.dropout = nn.Dropout(DROPOUT)
        self.lstm = nn.LSTM(inputs, width, batch_first=True, bidirectional=both_ways)

    def forward(self, hidden: Tensor, context: Tensor | None = None) -> Tensor:
        """(batch, sequence, inputs) -> (batch, sequence, width), or twice the width from both directions."""
        inputs = self.dropout(
            hidden if context is None else torch.cat((hidden, context), dim=2)
        )
        output: Tensor = self.lstm(inputs)[0]
        return output + hidden if self.residual else output


class AdditiveAttention(nn.Module):
    """Equation 4: scores from one hidden layer over query and key (Bahdanau et al. 2015, section 3.1)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.bias = nn.Parameter(torch.zeros(width))
        self.score = nn.Linear(width, 1, bias=False)

    def forward(self, queries: Tensor, memory: Tensor) -> Tensor:
        """(batch, target, width) and (batch, source, width) -> (batch, target, width)."""
        together = (
            self.query(queries).unsqueeze(2) + self.key(memory).unsqueeze(1) + self.bias
        )
        weights: Tensor = self.score(together.tanh()).squeeze(3).softmax(dim=2)
        return weights @ memory
