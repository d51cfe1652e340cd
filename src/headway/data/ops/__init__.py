"""Augmentations of a batch on its device: one batched operation each, with parameters for each sample.

In: images [b, H, W, C], bytes or floats of 0 to 255, and parameters as numpy arrays on the host, which are copied
without a wait. Out: a new tensor. Nothing here draws random numbers or waits for the device, and no sample's result
depends on another sample, except in mixing. On bytes every operation is exact: a CPU and a GPU give the same result.
`augment` in the folder above calls them in order; `move` and `colour` are good files to open first.
"""
