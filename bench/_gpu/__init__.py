"""Parts of bench.gpu: its pieces, their records, and the kit for a machine without a network."""
