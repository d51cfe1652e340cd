"""Concludes: what holds a run back, what each cure would give, and how far the prediction is from what was measured."""
