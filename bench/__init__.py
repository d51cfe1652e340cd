"""Benches: one script per claim. `python -m bench.NAME [--quick] [--json FILE]`."""
