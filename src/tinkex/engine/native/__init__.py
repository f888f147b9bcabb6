"""Sampling on a CPU in C: `library` compiles `step.c`, `weights` lays weights out for it,
`decoding` calls it.

A step is hundreds of small operations between products that last microseconds: in Python and with
threads that have to be woken for each, they take longer than the products. Where there is no C
compiler, PyTorch does it all.
"""
