"""The optimizers in float64 numpy, one parameter at a time, written from the papers' formulas."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headway.optim.orthogonalise import POLYNOMIALS, UPPER_ENDS

Array = NDArray[np.float64]


class Reference(ABC):
    """One parameter.

    Args:
        o: the options, by the names that headway.optim gives them.
    """

    def __init__(self, w: Array, **o: Any) -> None:
        self.w, self.o, self.t = w.astype(np.float64), o, 0
        self.state: dict[str, Array] = {}

    def step(self, g: Array, lr: float) -> None:
        self.t += 1
        self._step(g.astype(np.float64), lr)

    def held(self, name: str) -> Array:
        return self.state.setdefault(name, np.zeros_like(self.w))

    @abstractmethod
    def _step(self, g: Array, lr: float) -> None: ...


def norm(x: Array) -> float:
    return math.sqrt(float((x * x).sum()))


class LARS(Reference):
    def _step(self, g: Array, lr: float) -> None:
        o, w = self.o, self.w
        trust = 1.0
        if o.get("trust", 0.001) is not None and w.ndim > 1 and norm(w) > 0 and norm(g) > 0:
            trust = o.get("trust", 0.001) * norm(w) / (norm(g) + o["weight_decay"] * norm(w) + o.get("eps", 0.0))
            if o.get("clip"):
                trust = min(trust / lr, 1.0)
        d = trust * (g + o["weight_decay"] * w)
        inside = o.get("lr_in_momentum", True)
        if inside:
            d = lr * d
        m = self.state["momentum_buffer"] = o["momentum"] * self.held("momentum_buffer") + d
        moved = d + o["momentum"] * m if o.get("nesterov") else m
        self.w = w - (moved if inside else lr * moved)


class LAMB(Reference):
    def _step(self, g: Array, lr: float) -> None:
        (b1, b2), w = self.o["betas"], self.w
        m = self.state["exp_avg"] = b1 * self.held("exp_avg") + (1 - b1) * g
        v = self.state["exp_avg_sq"] = b2 * self.held("exp_avg_sq") + (1 - b2) * g**2
        u = (m / (1 - b1**self.t)) / (np.sqrt(v / (1 - b2**self.t)) + self.o["eps"]) + self.o["weight_decay"] * w
        trust = 1.0
        if self.o.get("layerwise", True) and w.ndim > 1 and norm(w) > 0 and norm(u) > 0:
            trust = norm(w) / norm(u)
        self.w = w - lr * trust * u


class NovoGrad(Reference):
    def _step(self, g: Array, lr: float) -> None:
        (b1, b2), o = self.o["betas"], self.o
        square = np.array((g * g).sum())
        v = square if self.t == 1 else b2 * self.state["norm_sq"] + (1 - b2) * square
        self.state["norm_sq"] = v
        d = g / (math.sqrt(v) + o["eps"]) + o["weight_decay"] * self.w
        share = 1 - b1 if o.get("averaging") else 1.0
        m = self.state["exp_avg"] = b1 * self.held("exp_avg") + share * d
        self.w = self.w - lr * m


class Signum(Reference):
    def _step(self, g: Array, lr: float) -> None:
        o, mu = self.o, self.o["momentum"]
        m = mu * self.held("momentum_buffer") + (1 - mu) * (g + o["weight_decay"] * self.w)
        self.state["momentum_buffer"] = m
        self.w = (1 - lr * o["decoupled_decay"]) * self.w - lr * np.sign(m)


class FTML(Reference):
    """Algorithm 1 as the paper has it, with z and d."""

    def _step(self, g: Array, lr: float) -> None:
        (b1, b2), w = self.o["betas"], self.w
        g = g + self.o["weight_decay"] * w
        v = self.state["exp_avg_sq"] = b2 * self.held("exp_avg_sq") + (1 - b2) * g**2
        d = (1 - b1**self.t) / lr * (np.sqrt(v / (1 - b2**self.t)) + self.o["eps"])
        sigma = d - b1 * self.held("d")
        z = b1 * self.held("z") + (1 - b1) * g - sigma * w
        self.state["d"], self.state["z"] = d, z
        self.w = -z / d


class RMSpropSGD(Reference):
    def _step(self, g: Array, lr: float) -> None:
        o = self.o
        epoch = (self.t - 1) / o["steps_per_epoch"]
        center, period = o["center_epochs"], o["period_epochs"]
        if epoch < center:
            a = 0.5 * math.exp(2 * (epoch - center) / period)
        elif epoch < center + 0.5 * period:
            a = 0.5 + (epoch - center) / period
        else:
            a = 1.0
        g = g + o["weight_decay"] * self.w
        v = self.state["square_avg"] = o["smoothing"] * self.held("square_avg") + (1 - o["smoothing"]) * g**2
        delta = -o["momentum"] * self.held("momentum_buffer")
        delta = delta - (a + (1 - a) * o["rmsprop"] / (np.sqrt(v) + o["eps"])) * g
        self.state["momentum_buffer"] = -delta
        self.w = self.w + lr * delta


class LBSGD(Reference):
    def _step(self, g: Array, lr: float) -> None:
        o, scale = self.o, self.o["batch_scale"]
        updates = self.t + round(o["begin_epoch"] * o["steps_per_epoch"])
        total = self.state["grad_sum"] = self.held("grad_sum") + g
        if updates % scale:
            return
        g = total / scale
        self.state["grad_sum"] = np.zeros_like(g)
        rising = o["warmup_epochs"] * o["steps_per_epoch"]
        if o["warmup"] == "lars":
            ratio = math.sqrt(norm(self.w) ** 2 / (norm(g) ** 2 + o["weight_decay"] * norm(self.w) ** 2 + 1e-18))
            factor = min(max(ratio, 0.01), 100.0)
        elif updates >= rising:
            factor = scale
        else:
            factor = 1 + (scale - 1) * (updates / rising) ** {"linear": 1, "power2": 2, "sqrt": 0.5}[o["warmup"]]
        m = o["momentum"] * self.held("momentum_buffer") + lr * factor * (g + o["weight_decay"] * self.w)
        self.state["momentum_buffer"] = m
        self.w = self.w - m


class Muon(Reference):
    """The iteration by singular values: each goes through the polynomials by itself."""

    def _step(self, g: Array, lr: float) -> None:
        o, mu = self.o, self.o["momentum"]
        m = self.state["momentum_buffer"] = mu * self.held("momentum_buffer") + g
        moved = g + mu * m if o["nesterov"] else m
        if self.w.ndim < 3:
            self.w = self.w - lr * (moved + 0)
            return
        w = self.w
        if o["normalise"]:
            w = w * math.sqrt(len(w)) / norm(w)
        flat = moved.reshape(len(moved), -1)
        left, s, right = np.linalg.svd(flat, full_matrices=False)
        s = s / float((s**8).sum() ** 0.125) * UPPER_ENDS[o["ns_steps"] - 1]
        for a, b, c in reversed(POLYNOMIALS[: o["ns_steps"]]):
            s = a * s + b * s**3 + c * s**5
        update = (left * s) @ right * math.sqrt(max(1, flat.shape[0] / flat.shape[1]))
        self.w = (1 - lr * o["weight_decay"]) * w - lr * update.reshape(w.shape)


class SOAP(Reference):
    """Algorithms 3 and 4 of the paper, with identities for the sides without a basis."""

    def _step(self, g: Array, lr: float) -> None:
        (b1, b2), o = self.o["betas"], self.o
        flat = g.reshape(len(g), -1) if g.ndim > 1 else g[:, None]
        rotates = [g.ndim > 1 and 1 < size <= o["max_dim"] for size in flat.shape]
        outer = [flat @ flat.T, flat.T @ flat]
        names = ("row", "column")
        t = self.t - any(rotates)
        if t == 0:
            for name, square, rotated in zip(names, outer, rotates, strict=True):
                if rotated:
                    self.state[f"{name}_covariance"] = (1 - b2) * square
                    self.state[f"{name}_basis"] = np.linalg.eigh(square)[1][:, ::-1]
            return
        bases = [
            self.state.get(f"{name}_basis", np.eye(len(square))) for name, square in zip(names, outer, strict=True)
        ]
        m = self.state["exp_avg"] = b1 * self.held("exp_avg") + (1 - b1) * g
        rotated_gradient = bases[0].T @ flat @ bases[1]
        v = b2 * self.held("exp_avg_sq").reshape(flat.shape) + (1 - b2) * rotated_gradient**2
        n = bases[0].T @ (m.reshape(flat.shape) / (1 - b1**t)) @ bases[1] / (np.sqrt(v / (1 - b2**t)) + o["eps"])
        w = self.w
        if o["normalise"] and w.ndim > 2:
            w = w * math.sqrt(len(w)) / norm(w)
        self.w = (1 - lr * o["weight_decay"]) * w - lr * (bases[0] @ n @ bases[1].T).reshape(w.shape)
        for axis, (name, square, rotated) in enumerate(zip(names, outer, rotates, strict=True)):
            if not rotated:
                continue
            p = self.state[f"{name}_covariance"] = b2 * self.state[f"{name}_covariance"] + (1 - b2) * square
            if t % o["precondition_every"] == 0:
                order = np.argsort(-np.diag(bases[axis].T @ p @ bases[axis]))
                self.state[f"{name}_basis"] = np.linalg.qr(p @ bases[axis][:, order])[0]
                v = v.take(order, axis)
        self.state["exp_avg_sq"] = v.reshape(g.shape)
