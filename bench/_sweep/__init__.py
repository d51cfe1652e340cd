"""Sweeps: the arms of bench.sweep."""
