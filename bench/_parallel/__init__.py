"""Parts of `bench.parallel`."""
