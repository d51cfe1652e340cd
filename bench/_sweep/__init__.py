"""Parts of `bench.sweep`."""
