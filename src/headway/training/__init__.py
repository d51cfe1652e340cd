"""Training: the loop, its evaluation, its logs, and the runs that it makes.

In: a `TrainSetup` (room `setup`) with network, data and optimizer. Out: a run folder with records, checkpoints, best
weights and a summary.

Open `trainer.py` first: `Trainer.run` is the loop. Around it: `actions.py` (what is due between steps), `recovery.py`
(lost ranks), `runs.py` (begin, resume, repeat, evaluate), `metrics.py` (what is counted between records), `dry_run.py`
(the same without training).
"""
