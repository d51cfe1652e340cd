"""Parts of bench.everyday: what users do every day."""
