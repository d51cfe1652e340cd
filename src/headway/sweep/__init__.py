"""Many models at once: sweeps over recipe values, learning rates and ensembles."""
