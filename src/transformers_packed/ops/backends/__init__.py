"""Kernels: those of other packages, and this package's own in Triton (`triton`)."""
