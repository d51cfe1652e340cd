"""Augmentations of a batch on its device, each one batched operation with parameters for each sample.

Images are [b, H, W, C] with values of 0 to 255, of bytes or floats. Parameters are numpy arrays on the host, and are
copied without a wait. Nothing in here draws random numbers or waits for the device, and the result of a sample does not
depend on the others. On bytes every operation is exact: a CPU and a GPU give the same.
"""
