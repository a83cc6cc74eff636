"""Triton kernels of a layer's operations, one job a file: the device code, and the function that launches it.

They are for inference on GPUs alone. `looped.model.ops` says when they run and has the same operations in PyTorch.
"""
