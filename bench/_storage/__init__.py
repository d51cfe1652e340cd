"""Parts of `bench.storage`: what the load consists of, and where it goes."""
