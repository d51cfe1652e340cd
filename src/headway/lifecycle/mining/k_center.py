"""k-centre: repeatedly takes the image that is farthest from all that is labelled or taken."""

from __future__ import annotations

import math
from typing import final

import numpy as np
from numpy.typing import NDArray

ROWS, BLOCK = 8192, 1024
"""Images, and labelled ones, whose distances are computed at once: 32 MB, however many there are."""


@final
class KCenter:
    """Greedy k-centre over features, by Euclidean distance.

    Its cover radius is at most twice the best possible one.

    Source: Sener and Savarese 2018, arXiv 1708.00489; Gonzalez 1985.

    Args:
        features: float32 [n, d].
        weights: factor on each image's distance, [n].
        labelled: features of images that are labelled already, float32 [m, d].

    Attributes:
        distances: squared distance of each image to the nearest centre, float32 [n]; infinite if there is none.
    """

    def __init__(
        self,
        features: NDArray[np.float32],
        weights: NDArray[np.float32] | None = None,
        labelled: NDArray[np.float32] | None = None,
    ) -> None:
        self._features = features
        self._squares = np.einsum("nd,nd->n", features, features)
        # Distances are squared, and so are the factors on them.
        self._weights = None if weights is None else weights * weights
        self.distances = np.full(len(features), np.inf, np.float32)
        if labelled is not None and len(labelled):
            self._lower(self._squares + _find_nearest(features, labelled))

    def add(self, place: int) -> None:
        """Makes an image a centre."""
        self._lower(self._squares + self._squares[place] - 2 * (self._features @ self._features[place]))

    def _lower(self, distances: NDArray[np.float32]) -> None:
        # Rounding may give a little less than 0.
        np.minimum(self.distances, np.maximum(distances, 0), out=self.distances)

    def take(self, eligible: NDArray[np.bool_], count: int) -> list[tuple[int, float]]:
        """Takes `count` of the eligible images as centres, bool [n]; each is taken once.

        Without any centre, the first is the image nearest to the mean.

        Returns:
            place and distance to the nearest centre before, of each image taken; 0 if there was none.
        """
        eligible, taken = eligible.copy(), list[tuple[int, float]]()
        for _ in range(min(count, int(eligible.sum()))):
            if is_first := bool(np.isinf(self.distances[0])):
                away = self._features - self._features[eligible].mean(axis=0)
                value = -np.einsum("nd,nd->n", away, away)
            else:
                value = self.distances if self._weights is None else self.distances * self._weights
            place = int(np.where(eligible, value, -np.inf).argmax())
            eligible[place] = False
            taken.append((place, 0.0 if is_first else math.sqrt(value[place])))
            self.add(place)
        return taken


def _find_nearest(features: NDArray[np.float32], labelled: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns the least |c|^2 - 2 x c of each image x over all labelled ones c, float32 [n]."""
    # |x - c|^2 = |x|^2 + |c|^2 - 2 x c, of which the product is one matrix multiplication.
    squares = np.einsum("md,md->m", labelled, labelled)
    nearest = np.full(len(features), np.inf, np.float32)
    for top in range(0, len(features), ROWS):
        rows = slice(top, top + ROWS)
        for left in range(0, len(labelled), BLOCK):
            columns = slice(left, left + BLOCK)
            product = features[rows] @ labelled[columns].T
            product *= -2
            product += squares[columns]
            np.minimum(nearest[rows], product.min(axis=1), out=nearest[rows])
    return nearest
