"""Sampling on a CPU in C.

`library` compiles `step.c`; `c_passes`, which packs weights for it, and `c_matmul` call it.

A step is hundreds of small operations between products that last microseconds. In Python, with
threads that must be woken for each, they take longer than the products. Without a C compiler,
PyTorch does it all.
"""
