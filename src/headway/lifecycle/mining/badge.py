"""BADGE: a diverse set of images with large gradients of the last layer, without computing the gradients."""

from __future__ import annotations

import math
from typing import final

import numpy as np
from numpy.typing import NDArray

from headway.core.random_keys import draw_uniform, make_keys


@final
class Badge:
    """Seeding of k-means++ on the gradients of the loss in the last layer's weights, for the predicted label.

    The gradient of an image is the outer product of a = p - onehot(argmax p) and the last layer's input h, and

        |g_i - g_j|^2 = |a_i|^2 |h_i|^2 + |a_j|^2 |h_j|^2 - 2 (a_i . a_j) (h_i . h_j),

    so that neither time nor memory grows with classes x features. The next image is drawn with a probability
    proportional to the squared distance to the nearest one taken.

    Source: Ash et al. 2020, arXiv 1906.03671.

    Args:
        probabilities: float32 [n, classes].
        features: input of the last layer, float32 [n, d].
        weights: factor on each image's distance, [n].
        seed: seed of the draws.

    Attributes:
        distances: squared distance of each gradient to the nearest one taken, float32 [n]; infinite if there is none.
    """

    def __init__(
        self,
        probabilities: NDArray[np.float32],
        features: NDArray[np.float32],
        weights: NDArray[np.float32] | None = None,
        seed: int = 0,
    ) -> None:
        self._a = probabilities.copy()
        self._a[np.arange(len(self._a)), probabilities.argmax(axis=1)] -= 1
        self._h = features
        self.squares = np.einsum("nk,nk->n", self._a, self._a) * np.einsum("nd,nd->n", features, features)
        self._weights = None if weights is None else weights * weights
        self._seed, self._draws = seed, 0
        self.distances = np.full(len(features), np.inf, np.float32)

    def add(self, place: int) -> None:
        """Adds an image to those taken."""
        distances = self.squares + self.squares[place]
        distances -= 2 * (self._a @ self._a[place]) * (self._h @ self._h[place])
        # Rounding leaves a little of what is 0, which must not be drawn again and again.
        distances[distances < 1e-6 * (self.squares + self.squares[place])] = 0
        np.minimum(self.distances, distances, out=self.distances)

    def take(self, eligible: NDArray[np.bool_], count: int) -> list[tuple[int, float]]:
        """Takes `count` of the eligible images, bool [n]; each is taken once.

        Without one taken before, the first is that with the largest gradient.

        Returns:
            place and distance to the nearest gradient before, of each image taken; to 0 if there was none.
        """
        eligible, taken = eligible.copy(), list[tuple[int, float]]()
        for _ in range(min(count, int(eligible.sum()))):
            is_first = bool(np.isinf(self.distances[0]))
            value = self.squares if is_first else self.distances
            value = np.where(eligible, value if self._weights is None else value * self._weights, 0)
            place = int(value.argmax()) if is_first else self._draw(value.astype(np.float64), eligible)
            eligible[place] = False
            taken.append((place, math.sqrt(value[place])))
            self.add(place)
        return taken

    def _draw(self, value: NDArray[np.float64], eligible: NDArray[np.bool_]) -> int:
        """Draws a place with a probability proportional to `value`; uniformly among `eligible` if all are 0."""
        sums = np.cumsum(value if value.any() else eligible, dtype=np.float64)
        # Each draw has a key of its own, so the choice is the same on every machine.
        key = make_keys(self._seed, 0, self._draws)
        self._draws += 1
        place = int(np.searchsorted(sums, float(draw_uniform(key, 0)[0]) * sums[-1], side="right"))
        # The product may round up to the whole sum, behind the last place.
        return min(place, int(np.searchsorted(sums, sums[-1])))
