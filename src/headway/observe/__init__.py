"""Measures a run while it trains: utilisation of device and host, stage times, layers, divergence, sharpness.

In: readings of a device, tensors of a network, stage times. Out: numbers for metrics, panels and the doctor.
Open `load_sampler.py` first; `sinks.py` sends metrics to other services.
"""
