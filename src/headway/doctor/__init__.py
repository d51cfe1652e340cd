"""Measures a recipe or a script, and names its limit.

In: a recipe (`headway doctor`, `headway tune`), or the marks of `headway.watch`. Out: a `Profile` (stages, verdict,
knobs), a tuned recipe, or a `LoopObservation`. Open `examination.py` first: it measures one stage after the other;
`throughput_model.py` predicts the whole job from them, and `verdict.py` names the limit.
"""
