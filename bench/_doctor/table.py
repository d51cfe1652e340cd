"""Builds the table and the claims from kept records only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, final

import numpy as np

from bench._accuracy.results import made_by
from bench._common import Claim
from bench._doctor.trial import CASE, KNOB, MOVED, moved

SHOWS = 1.1
"""How many times the images/s without its injector, from which on a case has a truth."""
TIE = 1.05
"""Of two injectors whose removal gives about as much, either is right."""


@final
@dataclass(frozen=True)
class Judged:
    """A case, held against what was measured."""

    record: dict[str, Any]

    @property
    def gains(self) -> dict[str, float]:
        """How many times the images/s without each injector."""
        return {
            name.removeprefix("without "): median(rates) / self.measured
            for name, rates in self.record["images_s"].items()
            if name.startswith("without ")
        }

    @property
    def truth(self) -> set[str]:
        """The stages that limit it; empty: no injector shows."""
        truths = {name: set(stages) for name, stages in self.record["truth"].items()}
        gains = self.gains
        if not gains:  # nothing was left out of it
            return set[str]().union(*truths.values())
        most = max(gains.values())
        return set[str]().union(*(truths[name] for name, gain in gains.items() if gain * TIE >= most and gain >= SHOWS))

    @property
    def measured(self) -> float:
        return float(median(self.record["images_s"][CASE]))

    @property
    def said(self) -> dict[str, Any]:
        found: dict[str, Any] = self.record["said"]
        return found

    @property
    def right(self) -> bool:
        return self.said.get("stage") in self.truth

    @property
    def error(self) -> float | None:
        """|predicted - measured| / measured; None: the doctor failed."""
        predicted = self.said.get("predicted")
        return None if predicted is None else abs(predicted / self.measured - 1)

    @property
    def gain(self) -> float | None:
        """Measured with the first knob; None: there is none, or it was refused."""
        rates = self.record["images_s"].get(KNOB)
        return median(rates) / self.measured if rates else None

    @property
    def gain_error(self) -> float | None:
        gain = self.gain
        return None if gain is None else abs(self.said["gain"] / gain - 1)

    def row(self) -> tuple[str, ...]:
        error, gain, peers = self.error, self.gain, self.record.get("peers", {})
        return (
            str(self.record["number"]),
            self.record["case"],
            " or ".join(sorted(self.truth)) or "none shows",
            self.said.get("stage") or "the doctor failed",
            "" if not self.truth else "yes" if self.right else "NO",
            "" if error is None else f"{self.said['predicted']:,.0f}",
            f"{self.measured:,.0f}",
            "" if error is None else f"{error:.1%}",
            self.said.get("override") or "",
            "" if not self.said.get("gain") else f"{self.said['gain']:.2f}",
            next((word for word in ("refused", "untried") if word in self.said), "" if gain is None else f"{gain:.2f}"),
            peers.get("profiler", ""),
            peers.get("traceml", ""),
        )


HEADING = (
    "case",
    "injected",
    "truth",
    "said",
    "right",
    "predicted",
    "measured",
    "error",
    "knob",
    "gain said",
    "gain measured",
    "torch.profiler's largest",
    "TraceML",
)


@final
class Table:
    """Args: records: of different cases."""

    def __init__(self, records: Sequence[dict[str, Any]]) -> None:
        self.all = [Judged(one) for one in sorted(records, key=lambda one: int(one["number"]))]
        self.counted = [one for one in self.all if one.truth]

    def rows(self) -> list[tuple[str, ...]]:
        return [HEADING, *(one.row() for one in self.all)]

    def notes(self) -> list[str]:
        """What a reader should know beside the table, in sentences."""
        void = len(self.all) - len(self.counted)
        again = [one for one in self.all if one.record["attempts"] > 1]
        unsteady = [one for one in self.all if moved(one.record) > MOVED]
        refused = [one for one in self.all if "refused" in one.said]
        return [
            f"{len(self.counted)} of {len(self.all)} cases count; in {void} no injector gives {SHOWS:g} times the "
            "images/s when it is removed.",
            f"{len(again)} were measured again, since a fixed piece of work took another time after them than before; "
            f"in {len(unsteady)} it never stayed within {MOVED:.0%}.",
            *(f"Case {one.record['number']}: its first knob was refused: {one.said['refused']}" for one in refused),
            *(
                f"Case {one.record['number']}: its first knob was not tried: {one.said['untried']}"
                for one in self.all
                if "untried" in one.said
            ),
            *(f"Case {one.record['number']}: {one.said['failed']}" for one in self.all if "failed" in one.said),
            made_by(one.record.get("commit", "") for one in self.all),
        ]

    def claims(self) -> list[Claim]:
        counted = self.counted
        if not counted:
            return []
        alone = sum(len(one.record["injected"]) == 1 for one in counted)
        seeds = ", ".join(sorted({str(one.record["seed"]) for one in counted}))
        how = f"{len(counted)} cases of seed {seeds}: {alone} with one injector, {len(counted) - alone} with two"
        claims = [Claim("stage_named", sum(one.right for one in counted) / len(counted), "", how)]
        errors = [error for one in counted if (error := one.error) is not None]
        if errors:
            how = f"of {len(errors)} cases; |predicted - measured| / measured, images/s of the whole job"
            claims.append(Claim("predict_median_error", median(errors), "", how))
            claims.append(Claim("predict_p90_error", float(np.percentile(errors, 90)), "", how))
        gains = [error for one in counted if (error := one.gain_error) is not None]
        if gains:
            how = f"of {len(gains)} cases whose first knob was tried; of what it gives, times the images/s"
            claims.append(Claim("gain_median_error", median(gains), "", how))
        return claims
