"""C++ kernels for CPUs: their sources, the library built of them, and its typed faces.

Knows tensors and nothing of models, schedulers or blocks.
"""
