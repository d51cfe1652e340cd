"""Trains many runs at once: sweeps over recipes, learning rates, and ensembles."""
