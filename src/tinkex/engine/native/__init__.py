"""Sampling on a CPU in C.

`library` compiles `step.c`, `weights` packs weights for it, `c_passes` and `c_matmul` call it.

A step is hundreds of small operations between products that last microseconds. In Python, with
threads that must be woken for each, they take longer than the products. Without a C compiler,
PyTorch does it all.
"""
