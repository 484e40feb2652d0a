"""FlashQLA: a faster gated delta rule for Hopper and datacenter Blackwell GPUs, which takes `cu_seqlens`."""

import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import lru_cache

import torch

from ...boundaries import CHUNK_SIZE, SequenceBoundaries
from ..dispatch import logger
from . import chunk_indices


# More than the multiprocessors of a GPU.
_MOST_BLOCKS = 256
# The attribute of `cu_seqlens` in which FlashQLA looks for prepared index tensors.
_METADATA = "_flash_qla_prepared_varlen"
# What selects the kernels of the calls whose kernels were compiled together.
_COMPILED: set[tuple] = set()


def gated_delta_rule(query, key, value, g, beta, *, boundaries, use_qk_l2norm_in_kernel, **states):
    from flash_qla import chunk_gated_delta_rule

    options = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "cu_seqlens": None}
    if boundaries is not None:
        options["cu_seqlens"] = boundaries.derived("flash_qla", lambda: _prepared(boundaries))
    if states.get("initial_state") is None and not states.get("output_final_state"):
        _compile_together(query, key, value, g, beta, options["cu_seqlens"])
    # auto_cp would split long documents and drop state that decays below e^-10 between the pieces.
    return chunk_gated_delta_rule(query, key, value, g, beta, auto_cp=False, **options, **states)


def _compile_together(query, key, value, g, beta, cu_seqlens) -> None:
    """Compile the kernels of forward and backward in threads, before the first call that needs them.

    FlashQLA compiles each of its kernels when it comes to it, one after the other. TileLang compiles outside of
    Python's lock, so all of them together take as long as the slowest one.
    """
    training = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value, g, beta))
    documents = len(key) if cu_seqlens is None else len(cu_seqlens) - 1
    heads = key.shape[2], value.shape[2]
    call = key.device, key.dtype, g.dtype, beta.dtype, *heads, cu_seqlens is None, training
    if call in _COMPILED or (key.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    _COMPILED.add(call)

    def compile_one(kernel: Callable[[], None]) -> None:
        # A thread has a device and a stream of its own.
        with torch.cuda.device(key.device) if key.is_cuda else nullcontext():
            kernel()

    try:
        # More documents select no other kernel: blocks of all heads fill the GPU.
        documents = min(documents, -(-_MOST_BLOCKS // heads[1]))
        calls = _calls(key, value, g, beta, documents, cu_seqlens is not None, training)
        _wait(key)
        # Each process of a machine compiles, on its share of the cores.
        share = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        with ThreadPoolExecutor(min(max(share, 1), len(calls))) as pool:
            list(pool.map(compile_one, calls))
    except Exception as error:
        # Not the functions of version 0.1.3. The call itself compiles what it needs.
        logger.info(f"FlashQLA's kernels are compiled one after the other: {error}")
    finally:
        # The kernels ran on other streams than that of their tensors, which are freed next.
        _wait(key)


def _wait(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize(tensor.device)


def _calls(key, value, g, beta, documents: int, packed: bool, training: bool) -> list[Callable[[], None]]:
    """Calls of FlashQLA's kernels on zeros, each with what selects the kernel in [`gated_delta_rule`]."""
    from flash_qla.ops.gated_delta_rule import chunk
    from flash_qla.utils.index import prepare_varlen_metadata

    rows, tokens, cu_seqlens = documents, CHUNK_SIZE, None
    if packed:
        # Documents of one token.
        rows, tokens, host = 1, documents, torch.arange(documents + 1, dtype=torch.int32)
        cu_seqlens = prepare_varlen_metadata(host.to(key.device), host)
    zeros = lambda like, *shape: torch.zeros(rows, tokens, *shape, dtype=like.dtype, device=key.device)  # noqa: E731
    heads, size = value.shape[2], key.shape[3]
    k, v, a = zeros(key, *key.shape[2:]), zeros(value, *value.shape[2:]), zeros(key, heads, CHUNK_SIZE)
    row = {"k": k, "v": v, "a": a, "g": zeros(g, heads), "b": zeros(beta, heads), "cu_seqlens": cu_seqlens}
    sums = {"g": row["g"], "chunk_size": CHUNK_SIZE, "cu_seqlens": cu_seqlens}

    def sum_up():
        chunk.chunk_local_cumsum(**sums)
        if training:
            chunk.chunk_local_cumsum(**sums, reverse=True, zero_last_chunk=True)

    calls = [
        sum_up,
        lambda: chunk.kkt_solve(k=k, b=row["b"], chunk_size=CHUNK_SIZE, cu_seqlens=cu_seqlens),
        lambda: chunk.fused_gdr_fwd(q=k, output_final_state=False, **row),
    ]
    if training:
        state = k.new_zeros(rows, tokens if packed else 1, heads, size, value.shape[3])
        calls.append(lambda: chunk.fused_gdr_h(output_final_state=False, **row))
        calls.append(lambda: chunk.fused_gdr_bwd(q=k, do=v, dht=None, h=state, **row))
        if key.shape[2] < heads:
            calls.append(lambda: chunk.group_reduce_vector(v, key.shape[2]))
    return calls


def verify_gated_delta_rule(
    query, key, value, g, beta, *, boundaries=None, initial_state=None, output_final_state=False, **options
):
    if not query.is_cuda:
        return False, "needs CUDA tensors"
    if query.dtype not in (torch.float16, torch.bfloat16) or not query.dtype == key.dtype == value.dtype:
        return False, f"needs query, key and value in float16 or in bfloat16, not {query.dtype}"
    if key.shape[-1] != 128 or value.shape[-1] != 128:
        return False, f"needs head dimensions of 128, not {key.shape[-1]} and {value.shape[-1]}"
    if boundaries is None and (initial_state is not None or output_final_state):
        return False, "is used only for packed rows if there are states"
    if torch.cuda.get_device_capability(query.device) not in ((9, 0), (10, 0), (10, 3)):
        return False, "needs a GPU of compute capability 9.0, 10.0 or 10.3"
    if not _problem() and boundaries is not None and boundaries.device_only and not _knows_metadata():
        return False, "prepares rows in another way than version 0.1.3, which CUDA graphs need"
    return not _problem(), _problem()


def is_usable() -> bool:
    """Whether FlashQLA can run on this machine, on a GPU that it supports."""
    return not _problem()


def _prepared(boundaries: SequenceBoundaries) -> torch.Tensor:
    """Attach to `cu_seqlens` the metadata that FlashQLA would otherwise compute with a host sync."""
    from flash_qla.utils.index import prepare_varlen_metadata

    cu_seqlens = boundaries.cu_seqlens
    if not boundaries.device_only:
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
