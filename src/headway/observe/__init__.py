"""Measures of a run while it trains: utilisation of device and host, spans, layers, divergence, sharpness.

In: readings of a device, tensors of a network, times of stages. Out: numbers, for metrics, panels and the doctor.
Read `sampling.py` first; `sinks.py` says to which services metrics go.
"""
