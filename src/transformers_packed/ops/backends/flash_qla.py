"""FlashQLA: a faster gated delta rule for Hopper and datacenter Blackwell GPUs, which takes `cu_seqlens`."""

import shutil
from collections.abc import Collection
from functools import lru_cache

import torch

from ...boundaries import CHUNK_SIZE, SequenceBoundaries
from ...device_boundaries import DeviceBoundaries
from . import chunk_indices
from .flash_qla_kernels import WHOLE, Kernels, compile_together, start_threads


# The attribute of `cu_seqlens` in which FlashQLA looks for prepared index tensors.
_METADATA = "_flash_qla_prepared_varlen"


def gated_delta_rule(query, key, value, g, beta, *, boundaries, use_qk_l2norm_in_kernel, **states):
    from flash_qla import chunk_gated_delta_rule

    options = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "cu_seqlens": None}
    if boundaries is not None:
        options["cu_seqlens"] = boundaries.derived("flash_qla", lambda: _prepared(boundaries))
    kind = states.get("initial_state") is not None, bool(states.get("output_final_state"))
    started = compile_together(query, key, value, g, beta, options["cu_seqlens"], kind)
    # auto_cp would split long documents and drop state that decays below e^-10 between the pieces.
    result = chunk_gated_delta_rule(query, key, value, g, beta, auto_cp=False, **options, **states)
    if result[0].grad_fn is not None:
        for kernels in started:
            result[0].grad_fn.register_prehook(kernels.wait)
    return result


def verify_gated_delta_rule(
    query, key, value, g, beta, *, boundaries=None, initial_state=None, output_final_state=False, **options
):
    if not query.is_cuda:
        return "needs CUDA tensors"
    if query.dtype not in (torch.float16, torch.bfloat16) or not query.dtype == key.dtype == value.dtype:
        return f"needs query, key and value in float16 or in bfloat16, not {query.dtype}"
    if not takes_heads(key.shape[-1], value.shape[-1]):
        return f"needs head dimensions of 128, not {key.shape[-1]} and {value.shape[-1]}"
    if boundaries is None and (initial_state is not None or output_final_state):
        return "is used only for packed rows if there are states"
    if torch.cuda.get_device_capability(query.device) not in ((9, 0), (10, 0), (10, 3)):
        return "needs a GPU of compute capability 9.0, 10.0 or 10.3"
    if not _problem() and isinstance(boundaries, DeviceBoundaries) and not _knows_metadata():
        return "prepares rows in another way than version 0.1.3, which CUDA graphs need"
    return _problem()


def takes_heads(key_dim: int, value_dim: int) -> bool:
    """Whether FlashQLA has kernels for heads of these sizes."""
    return key_dim == value_dim == 128


def start_compiling(
    device: torch.device,
    dtype: torch.dtype,
    heads: tuple[int, int],
    dims: tuple[int, int],
    calls: Collection = WHOLE,
    trains: bool = True,
) -> list[Kernels]:
    """Start to compile the kernels of packed rows, before there is one. Returns what a backward waits for.

    `heads` and `dims` are those of keys and of values, `calls` is what [`start_threads`] takes, and `trains` whether rows
    have gradients. Nothing starts if other kernels will run.
    """
    key, value = (torch.zeros(1, 1, *shape, dtype=dtype, device=device) for shape in zip(heads, dims, strict=True))
    value.requires_grad_(trains)
    # As the gates of a layer.
    beta = torch.zeros(1, 1, heads[1], dtype=dtype, device=device)
    row = key, key, value, beta.float(), beta
    if verify_gated_delta_rule(*row):
        return []
    with torch.enable_grad():
        return start_threads(*row, torch.arange(2, dtype=torch.int32, device=device), calls)


def is_usable() -> bool:
    """Whether FlashQLA can run on this machine, on a GPU that it supports."""
    return not _problem()


def _prepared(boundaries: SequenceBoundaries) -> torch.Tensor:
    """Attach to `cu_seqlens` the metadata that FlashQLA would otherwise compute with a host sync."""
    from flash_qla.utils.index import prepare_varlen_metadata

    cu_seqlens = boundaries.cu_seqlens
    if not isinstance(boundaries, DeviceBoundaries):
        return prepare_varlen_metadata(cu_seqlens, boundaries.cu_seqlens_cpu)
    # `prepare_varlen_metadata` reads the host copy, which a CUDA graph has not. The verifier has compared the layout.
    setattr(cu_seqlens, _METADATA, _metadata(boundaries))
    return cu_seqlens


def _metadata(boundaries: SequenceBoundaries) -> tuple[int, torch.Tensor, int, torch.Tensor]:
    """Compute without a host copy what version 0.1.3 of FlashQLA attaches to `cu_seqlens`."""
    counts, total = boundaries.chunk_counts(CHUNK_SIZE)
    offsets = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    return CHUNK_SIZE, offsets, total, chunk_indices(boundaries)


@lru_cache
def _knows_metadata() -> bool:
    """Whether the installed FlashQLA attaches what [`_metadata`] computes. It would read anything else as that."""
    try:
        from flash_qla.utils.index import prepare_varlen_metadata
    except ImportError:
        return False
    row = SequenceBoundaries.from_lengths([CHUNK_SIZE + 1, 5])
    theirs = vars(prepare_varlen_metadata(row.cu_seqlens.clone(), row.cu_seqlens_cpu)).get(_METADATA, ())
    values = [[x.tolist() if isinstance(x, torch.Tensor) else x for x in found] for found in (theirs, _metadata(row))]
    return values[0] == values[1]


@lru_cache
def _problem() -> str:
    """Return why FlashQLA cannot run on this machine, or an empty string. Kernels are compiled on first use."""
    try:
        import flash_qla  # noqa: F401
    except Exception as error:  # a missing dependency, or a check of the machine by the package
        return f"cannot be imported: {error} (pip install flash-qla)"
    return "" if shutil.which("nvcc") else "needs nvcc, which is not on the PATH, to compile its kernels"
