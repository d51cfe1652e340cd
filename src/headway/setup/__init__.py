"""Setup: from a recipe to the objects of a run.

In: a training recipe. Out: a `TrainSetup` with everything opened, built and checked, and every `auto` resolved.

Open `build.py` first: `_SetupBuilder.build` lists the steps. `recipe.py` has the tree of recipe keys, `inputs.py` the
data, `precision.py` and `trial.py` the choice of a precision, `checks.py` the refusals.
"""
