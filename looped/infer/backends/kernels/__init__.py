"""Triton kernels over the paged K/V pool, one job a file: the device code, and the function that launches it."""
