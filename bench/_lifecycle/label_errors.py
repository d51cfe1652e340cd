"""Wrong labels on digits that are found: some labels are changed, and confident learning ranks them.

Probabilities are those of logistic regressions on five folds, each on images that it has not seen; five seeds of noise.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench._common import Claim, table
from headway.lifecycle.mining.folds import divide_folds
from headway.lifecycle.mining.label_errors import find_label_errors

NOISES, CLAIMED, SEEDS, FOLDS = (0.02, 0.05, 0.1, 0.2), 0.05, 5, 5


def measure_label_errors(folder: Path, options: argparse.Namespace) -> list[Claim]:
    """Fits a hundred logistic regressions: under a minute."""
    seeds = range(1 if options.quick else SEEDS)
    rows = [("noise", "suspects wrong (precision)", "wrong ones found (recall)", "first n wrong", "estimated noise")]
    claims = []
    for noise in (CLAIMED,) if options.quick else NOISES:
        found = [measure_one(noise, seed) for seed in seeds]
        precision, recall, first, estimate, true = (statistics.fmean(column) for column in zip(*found, strict=True))
        rows.append((f"{true:.3f}", f"{precision:.3f}", f"{recall:.3f}", f"{first:.3f}", f"{estimate:.3f}"))
        if noise == CLAIMED:
            how = f"digits, {noise:.0%} uniform noise, logistic regression on {FOLDS} folds, mean of {len(seeds)} seeds"
            claims += [
                Claim("label_error_precision", precision, "", how),
                Claim("label_error_recall", recall, "", how),
                Claim("label_noise_error", abs(estimate - true) / true, "", how),
            ]
    table(rows)
    return claims


def measure_one(noise: float, seed: int) -> tuple[float, float, float, float, float]:
    """Returns precision, recall, the share of wrong ones among the first n of the ranking, estimated and true noise."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    truth = digits.target.astype(np.int64)
    generator = np.random.default_rng(seed)
    is_wrong = generator.random(len(truth)) < noise
    # Uniform among the nine other classes.
    labels = np.where(is_wrong, (truth + generator.integers(1, 10, size=len(truth))) % 10, truth)
    errors = find_label_errors(labels, predict(digits.data / 16, labels, seed))
    suspects, count = errors.is_suspect, int(is_wrong.sum())
    precision = float((suspects & is_wrong).sum() / max(suspects.sum(), 1))
    recall = float((suspects & is_wrong).sum() / count)
    by_score = np.argsort(errors.score, kind="stable")[:count]
    return precision, recall, float(is_wrong[by_score].mean()), errors.noise, count / len(truth)


def predict(x: NDArray[np.float64], labels: NDArray[np.int64], seed: int) -> NDArray[np.float32]:
    """Returns the probabilities of each image by the network of the other folds."""
    from sklearn.linear_model import LogisticRegression

    fold_of = divide_folds(labels, FOLDS, seed)
    out = np.zeros((len(labels), 10), np.float32)
    for fold in range(FOLDS):
        held = fold_of == fold
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fitted = LogisticRegression(max_iter=200).fit(x[~held], labels[~held])
        out[held] = fitted.predict_proba(x[held])
    return out
