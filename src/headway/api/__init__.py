"""The Python interface: `headway.train`, `headway.resume` and `headway.Run`.

In: a recipe as a file or a mapping, a network and images of the running program. Out: a run folder, and its results as
arrays. `training` begins and continues runs, `run` reads them. The command line and this room call the same functions
of `training.runs`.
"""
