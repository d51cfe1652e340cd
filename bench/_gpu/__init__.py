"""What bench.gpu runs, how it is recorded, and what travels to a machine without a network."""
