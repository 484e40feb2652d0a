"""This package's own Triton kernels. Each module imports triton, so the ops import them when they run them.

No kernel is autotuned: block sizes follow from the widths of a model, never from the number of its tokens, so that no
new row compiles anything. Offsets of rows are 64-bit. Nothing is added up by atomics, so that a run can be repeated bit
for bit.
"""
