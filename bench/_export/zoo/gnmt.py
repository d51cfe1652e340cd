"""GNMT, Google's neural machine translation (Wu et al. 2016, arXiv 1609.08144), with greedy decoding.

Shazeer et al. 2017 (arXiv 1701.06538, table 2) count 278 million parameters. Neither paper prints all sizes: with 1,024
units and 32,000 word pieces, whose embeddings have 1,024 numbers, it has 277 million here.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

UNITS, LAYERS, PIECES = 1024, 8, 32_000
TOKENS = 25
"""Tokens of a sentence and of its translation: about the mean length of WMT's sentences."""


@final
class Gnmt(nn.Module):
    """Translates: token ids [N, 1, tokens, 1] -> scores [N, tokens, pieces] of a greedy translation as long.

    Args:
        pieces: number of word pieces of each language.
        units: of an LSTM, and of an embedding.
        layers: of the encoder, the first of which runs in both directions, and of the decoder.
    """

    def __init__(self, pieces: int, units: int = UNITS, layers: int = LAYERS) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(pieces, units), nn.Embedding(pieces, units)
        inputs = [units, 2 * units, *[units] * (layers - 2)]
        self.encoder = nn.ModuleList(
            nn.LSTM(own, units, batch_first=True, bidirectional=not place) for place, own in enumerate(inputs)
        )
        # All but the first layer of the decoder get the context too.
        self.decoder = nn.ModuleList(
            nn.LSTM(2 * units if place else units, units, batch_first=True) for place in range(layers)
        )
        self.query, self.key = nn.Linear(units, units, bias=False), nn.Linear(units, units, bias=False)
        self.energy = nn.Linear(units, 1, bias=False)
        self.scores = nn.Linear(units, pieces)

    def forward(self, tokens: Tensor) -> Tensor:
        source = tokens.flatten(1).long()
        memory = self.encode(source)
        keys = self.key(memory)
        states: list[tuple[Tensor, Tensor] | None] = [None] * len(self.decoder)
        token, found = source.new_zeros(len(source), 1), list[Tensor]()
        for _ in range(source.shape[1]):
            hidden, states[0] = self.decoder[0](self.target(token), states[0])
            # Additive attention, whose query is the bottom layer's output (equation 4 of the paper).
            weights = self.energy(torch.tanh(self.query(hidden) + keys)).softmax(1)
            context = (weights * memory).sum(1, keepdim=True)
            for place, layer in enumerate(self.decoder[1:], 1):
                output, states[place] = layer(torch.cat([hidden, context], 2), states[place])
                hidden = output + hidden if place > 1 else output
            found.append(self.scores(hidden))
            token = found[-1].argmax(2)
        return torch.cat(found, 1)

    def encode(self, source: Tensor) -> Tensor:
        """Returns the output of the encoder's last layer, [N, tokens, units]."""
        hidden = self.source(source)
        for place, layer in enumerate(self.encoder):
            output, _ = layer(hidden)
            # Residual connections begin at the third layer.
            hidden = output + hidden if place > 1 else output
        return hidden


def gnmt(num_classes: int = PIECES, in_channels: int = 1) -> Gnmt:
    """Builds GNMT with 8 layers in the encoder and in the decoder. Args: num_classes: word pieces of each language."""
    return Gnmt(num_classes)
