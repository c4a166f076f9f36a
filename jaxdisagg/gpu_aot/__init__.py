"""Compiling kernels and step programs for GPUs that are not there, and reading what came out.

The CUDA plugin of jax compiles for a described chip without a driver or a device. `make gpu-aot`
runs it in an environment of its own (scripts/gpu_aot.py). Nothing here runs on a GPU.
"""
