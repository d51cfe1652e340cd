"""Saves, restores and checks checkpoints, on a disk or at a remote address.

In: tensors and scalars of a training state, from one rank or many. Out: folders `step-NNNNNNNN` with safetensors
files and a manifest, and the same state again. Read `checkpoints.py` first; `save.py` has the protocol between
ranks, and `background_saver.py` writes beside the training.
"""
