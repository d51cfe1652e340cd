"""A rank that is measured with others, and nothing else: _exchanging_rank.py RECIPE OUT SECONDS. Rank 0 writes OUT."""

from __future__ import annotations

import json
import sys
import tempfile
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from zlib import crc32

from headway.core.run_folder import RunFolder
from headway.doctor.measurement_job import MeasurementJob, list_measured_values, with_values
from headway.doctor.rank_examination import examine_surroundings
from headway.doctor.rank_exchange import measure_exchange, measure_together, try_alternatives
from headway.launch.ranks import Ranks
from headway.setup.build import build_setup
from headway.training.progress import SilentDisplay
from headway.training.runs import load_recipe
from headway.training.trainer import Trainer


def main(recipe: str, out: str, seconds: str) -> None:
    loaded = load_recipe(Path(recipe), ())
    loaded = with_values(loaded, list_measured_values(loaded.recipe), "as it is measured")
    ranks = Ranks.from_environment(loaded.recipe.comm)
    assert ranks is not None
    with ranks, tempfile.TemporaryDirectory() as folder:
        setup = build_setup(loaded, ranks=ranks)
        where = RunFolder(Path(folder) / "run")
        if ranks.is_lead:
            RunFolder.create(where.folder)
        with closing(setup.inputs), closing(Trainer(setup, where, SilentDisplay(), ranks)) as trainer:

            def weights() -> int:
                found = 0
                for value in setup.model.state_dict().values():
                    found = crc32(value.numpy().tobytes(), found)
                return found

            def seen() -> list[str]:
                """Steps, weights, buckets and options of each rank."""
                mine = [trainer.step, weights(), [one.nbytes for one in ranks.reducer.buckets], repr(ranks.options)]
                return [text.decode() for text in ranks.world.control.gather_bytes(json.dumps(mine).encode())]

            came = list[str]()
            meet = trainer.recovery.meet

            def noted() -> None:
                """As it is, and with which options."""
                came.append(f"comm.bucket_mb={ranks.options.bucket_mb} comm.algorithm={ranks.options.algorithm}")
                meet()

            trainer.recovery.meet = noted  # type: ignore[method-assign]
            trainer.recovery.meet()
            now = measure_together(trainer, ranks)
            before = seen()
            alone = measure_exchange(trainer, ranks, limit_s=1.0)
            without = all(value.grad is None for value in setup.model.parameters())
            after = seen()
            others, late = try_alternatives(trainer, ranks, loaded.recipe.comm, now, limit_s=float(seconds))
            last = seen()
            with closing(MeasurementJob.from_recipe(loaded)) as job:
                around = examine_surroundings((), job, ranks.world)
            if ranks.is_lead:
                found = {
                    "steps": now.steps,
                    "before": before,
                    "after": after,
                    "last": last,
                    "without gradients": without,
                    "exchange": asdict(alone),
                    "others": [asdict(one) for one in others],
                    "late": late,
                    "came": came,
                    "around": [one.what for one in around],
                }
                Path(out).write_text(json.dumps(found))
        ranks.is_complete = True


if __name__ == "__main__":
    main(*sys.argv[1:])
