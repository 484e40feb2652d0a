"""`mamba-ssm`: the state-space duality scan in Triton, which takes `seq_idx`."""

import torch

from . import importable


def ssd(x, dt, a, b, c, d, *, dt_bias, dt_limit, boundaries):
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    options = {"D": d, "dt_bias": dt_bias, "dt_softplus": True, "dt_limit": dt_limit}
    seq_idx = None if boundaries is None else boundaries.seq_idx
    # Its chunks begin at multiples of their size in the row. A large one serves short documents as well.
    return mamba_chunk_scan_combined(x, dt, a, b, c, chunk_size=256, seq_idx=seq_idx, **options)


def verify_ssd(x, *_, **options):
    if not x.is_cuda:
        return "needs CUDA tensors"
    if x.dtype == torch.float64:
        return "does not support float64"
    return importable("mamba_ssm", "mamba-ssm")
