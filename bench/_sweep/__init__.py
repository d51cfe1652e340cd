"""The parts of `bench.sweep`: sweeps that share their input, ensembles, recurrent networks."""
