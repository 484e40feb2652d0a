"""Kernels of other packages for packed rows on NVIDIA GPUs: what each of them can serve, and how it is called.

* flash-linear-attention (`fla`): gated delta rule and convolution in Triton, with `cu_seqlens`.
* FlashQLA (`flash_qla`): a faster gated delta rule for Hopper and datacentre Blackwell, with `cu_seqlens`.
* `causal_conv1d`: a compiled convolution, with `seq_idx`.

Each has a verifier that looks at the tensors of the call, so a package that can be imported on a machine without a
GPU is never taken for one that can run. The packages are imported inside the functions that use them. No function here
waits for the GPU: the index tensors that the kernels want are made once per row from the host copy of its boundaries.
"""

import importlib.util
import shutil
from functools import lru_cache
from inspect import unwrap

import torch

from ..boundaries import DeviceBoundaries, SequenceBoundaries


# Tokens per chunk in the kernels of flash-linear-attention and FlashQLA.
_CHUNK = 64


def fla_gated_delta_rule(query, key, value, g, beta, *, boundaries, initial_state, output_final_state, **options):
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

    options |= {"initial_state": initial_state, "output_final_state": output_final_state}
    decoding = query.shape[1] == 1 and initial_state is not None
    if decoding and not _needs_backward(query, key, value, g, beta, initial_state):
        return fused_recurrent_gated_delta_rule(query, key, value, g=g, beta=beta, **options)
    # Unwrapped, it is the Triton kernel; wrapped, it may pass the call on to FlashQLA, with an approximation (see below).
    return unwrap(chunk_gated_delta_rule)(query, key, value, g, beta, **options, **_fla_boundaries(boundaries))


def verify_fla_gated_delta_rule(query, key, value, g, beta, *, initial_state=None, **options):
    if not query.is_cuda:
        return False, "needs CUDA tensors"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return False, f"rounds products to ten bits of mantissa; needs float16 or bfloat16, not {query.dtype}"
    if max(key.shape[-1], value.shape[-1]) > 256:
        return False, f"serves head dimensions up to 256, not {key.shape[-1]} and {value.shape[-1]}"
    ok, reason = _importable("fla", "flash-linear-attention")
    if ok and _needs_backward(query, key, value, g, beta, initial_state):
        reason = _fla_backward_problem()
    return not reason, reason


def flash_qla_gated_delta_rule(query, key, value, g, beta, *, boundaries, use_qk_l2norm_in_kernel, **states):
    from flash_qla import chunk_gated_delta_rule

    cu_seqlens = None
    if boundaries is not None:
        cu_seqlens = boundaries.derived("flash_qla", lambda: _prepared_for_flash_qla(boundaries))
    # auto_cp would split long documents and drop what decays below e^-10 on the way from piece to piece.
    return chunk_gated_delta_rule(
        query,
        key,
        value,
        g,
        beta,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        cu_seqlens=cu_seqlens,
        auto_cp=False,
    )


def verify_flash_qla_gated_delta_rule(
    query, key, value, g, beta, *, initial_state=None, output_final_state=False, **options
):
    if not query.is_cuda:
        return False, "needs CUDA tensors"
    if query.dtype not in (torch.float16, torch.bfloat16) or not query.dtype == key.dtype == value.dtype:
        return False, f"needs query, key and value in float16 or in bfloat16, not {query.dtype}"
    if key.shape[-1] != 128 or value.shape[-1] != 128:
        return False, f"needs head dimensions of 128, not {key.shape[-1]} and {value.shape[-1]}"
    if initial_state is not None or output_final_state:
        return False, "is used without states only"
    if torch.cuda.get_device_capability(query.device) not in ((9, 0), (10, 0), (10, 3)):
        return False, "needs a GPU of compute capability 9.0, 10.0 or 10.3"
    problem = _flash_qla_problem()
    return not problem, problem


def fla_causal_conv1d(hidden_states, weight, bias, activation, *, boundaries):
    from fla.modules.causal_conv1d.ops import causal_conv1d

    boundaries = _fla_boundaries(boundaries)
    return causal_conv1d(hidden_states, weight, bias, activation=activation, backend="triton", **boundaries)[0]


def verify_fla_causal_conv1d(hidden_states, weight, bias, activation, **options):
    if not hidden_states.is_cuda:
        return False, "needs CUDA tensors"
    if hidden_states.dtype == torch.float64:
        return False, "has no float64"
    if activation not in (None, "silu", "swish"):
        return False, f"knows the activations silu and swish, not {activation}"
    return _importable("fla", "flash-linear-attention")


def compiled_causal_conv1d(hidden_states, weight, bias, activation, *, boundaries):
    from causal_conv1d import causal_conv1d_fn

    seq_idx = None if boundaries is None else boundaries.seq_idx
    # Transposed, a token-major row is the channels-last layout that `seq_idx` asks for.
    hidden_states = hidden_states.contiguous().transpose(1, 2)
    return causal_conv1d_fn(hidden_states, weight, bias, seq_idx=seq_idx, activation=activation).transpose(1, 2)


def verify_compiled_causal_conv1d(hidden_states, weight, bias, activation, **options):
    channels, width = weight.shape
    if not hidden_states.is_cuda:
        return False, "needs CUDA tensors"
    if hidden_states.dtype == torch.float64:
        return False, "has no float64"
    if activation not in (None, "silu", "swish"):
        return False, f"knows the activations silu and swish, not {activation}"
    if channels % 8 or not 2 <= width <= 4:
        return False, f"needs a multiple of 8 channels and a width of 2 to 4, not {channels} and {width}"
    return _importable("causal_conv1d", "causal-conv1d")


def _fla_boundaries(boundaries: SequenceBoundaries | None) -> dict[str, torch.Tensor]:
    if boundaries is None:
        return {}
    indices = boundaries.derived("fla", lambda: _chunk_indices(boundaries))
    return {"cu_seqlens": boundaries.cu_seqlens, "chunk_indices": indices}


def _prepared_for_flash_qla(boundaries: SequenceBoundaries) -> torch.Tensor:
    """`cu_seqlens` with what FlashQLA would otherwise wait for the GPU to learn."""
    from flash_qla.utils.index import prepare_varlen_metadata

    cu_seqlens = boundaries.cu_seqlens
    if not isinstance(boundaries, DeviceBoundaries):
        return prepare_varlen_metadata(cu_seqlens, boundaries.cu_seqlens_cpu)
    # Its function reads the host's copy. This is what that of 0.1.3 leaves behind, made by the device; without it FlashQLA
    # would wait for the GPU, which is an error in a graph.
    counts, total = boundaries.chunk_counts(_CHUNK)
    offsets = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    cu_seqlens._flash_qla_prepared_varlen = (_CHUNK, offsets, total, _chunk_indices(boundaries))
    return cu_seqlens


def _chunk_indices(boundaries: SequenceBoundaries) -> torch.Tensor:
    """int32 `[chunks, 2]`: the document of each chunk, and which chunk of the document it is."""
    cu_seqlens = boundaries.cu_seqlens
    counts, total = boundaries.chunk_counts(_CHUNK)
    numbers = torch.arange(boundaries.num_documents, dtype=torch.int32, device=cu_seqlens.device)
    document = numbers.repeat_interleave(counts, output_size=total)
    first = (counts.cumsum(0) - counts)[document.long()]
    chunk = torch.arange(total, device=cu_seqlens.device) - first
    return torch.stack([document, chunk.to(torch.int32)], dim=1)


@lru_cache
def _triton_problem() -> str:
    """Why this package's own Triton kernels cannot run here, or nothing."""
    if importlib.util.find_spec("triton") is None:
        return "needs triton, which is not installed (pip install triton)"
    return "has not been tried on AMD GPUs" if torch.version.hip else ""


def on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda


def verify_triton(tensor: torch.Tensor) -> tuple[bool, str]:
    """Whether this package's own Triton kernels serve a tensor."""
    if not on_gpu(tensor):
        return False, "needs CUDA tensors"
    if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return False, f"serves float32, float16 and bfloat16, not {tensor.dtype}"
    return not _triton_problem(), _triton_problem()


def _needs_backward(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


@lru_cache
def _importable(module: str, package: str) -> tuple[bool, str]:
    found = importlib.util.find_spec(module) is not None
    return found, "" if found else f"is not installed (pip install {package})"


@lru_cache
def _flash_qla_problem() -> str:
    """Why FlashQLA cannot run here, or nothing. It compiles its kernels when they are called first."""
    try:
        import flash_qla  # noqa: F401
    except Exception as error:  # a missing dependency, or what the package thinks of the machine
        return f"cannot be imported: {error} (pip install flash-qla)"
    return "" if shutil.which("nvcc") else "needs nvcc, which is not on the PATH, to compile its kernels"


@lru_cache
def _fla_backward_problem() -> str:
    """Why flash-linear-attention cannot run the backward here, or nothing."""
    from fla.ops.common.backends.tilelang import CommonTileLangBackend
    from fla.utils import IS_NVIDIA_HOPPER, TRITON_ABOVE_3_4_0, TRITON_ABOVE_3_7_1

    if not IS_NVIDIA_HOPPER or not TRITON_ABOVE_3_4_0 or TRITON_ABOVE_3_7_1 or CommonTileLangBackend.can_use():
        return ""
    return "computes a wrong backward on Hopper GPUs with this triton; install triton >= 3.7.1 or tilelang"
