"""flash-linear-attention: gated delta rule and convolution in Triton, which take `cu_seqlens`."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache, wraps
from importlib import import_module
from inspect import signature, unwrap
from threading import RLock
from typing import Any

import torch

from ...boundaries import SequenceBoundaries
from ...foreign import swapped
from ..compilations import tune_first
from . import chunk_indices, importable, verify_convolution


# Most tokens of the row on which variants of kernels are measured. It fills a GPU.
_MEASURED = 4096
# Where the way of CUDA graphs in flash-linear-attention keeps tensors.
_BUFFERS = "_BUFFERS"


def _tuned_first(rule: Callable) -> Callable:
    """Decorate a delta rule, which has many kernels with dozens of variants each, to tune them all in its first call."""

    @wraps(rule)
    def run(*tensors, boundaries, **options):
        # Decoding has another kernel.
        if _is_compiled_for(tensors[0]) and tensors[0].shape[1] > 1:
            _tune(rule, tensors, boundaries, options)
        return rule(*tensors, boundaries=boundaries, **options)

    return run


def _is_compiled_for(x: torch.Tensor) -> bool:
    return x.is_cuda


def _tune(rule: Callable, tensors: tuple, boundaries: SequenceBoundaries | None, options: dict[str, Any]) -> None:
    """Run forward and backward of zeros like these tensors, if this is the first call of its kind."""
    device, length = tensors[0].device, min(tensors[0].shape[1], _MEASURED)
    trains = _needs_backward(*tensors, *(x for x in options.values() if isinstance(x, torch.Tensor)))
    kind = trains, boundaries is None, *map(_selects, tensors), *map(_selects, options.values())

    def zeros(x: Any, *first: int) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        shape = *first, *x.shape[len(first) :]
        return torch.zeros(shape, dtype=x.dtype, device=device, requires_grad=trains and x.requires_grad)

    def forward_and_backward() -> None:
        row = None if boundaries is None else SequenceBoundaries.from_lengths([length], device=device)
        given = {name: zeros(x, *[1] * (name == "initial_state")) for name, x in options.items()}
        found = rule(*(zeros(x, 1, length) for x in tensors), boundaries=row, **given)
        outputs = [x for x in found if x is not None and x.requires_grad]
        if trains:
            torch.autograd.backward(outputs, [torch.zeros_like(x) for x in outputs])

    tune_first(rule.__name__, kind, device, forward_and_backward)


def _selects(x: Any) -> Any:
    """Return what of an argument selects kernels: no length of a row, and no number of documents."""
    return (x.dtype, *x.shape[2:]) if isinstance(x, torch.Tensor) else x


@_tuned_first
def gated_delta_rule(query, key, value, g, beta, *, boundaries, initial_state, **options):
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

    options["initial_state"] = initial_state
    decoding = query.shape[1] == 1 and initial_state is not None
    if decoding and not _needs_backward(query, key, value, g, beta, initial_state):
        return fused_recurrent_gated_delta_rule(query, key, value, g=g, beta=beta, **options)
    # The unwrapped function is the Triton kernel. The wrapper may dispatch to FlashQLA, with an approximation.
    return unwrap(chunk_gated_delta_rule)(query, key, value, g, beta, **options, **_boundaries(boundaries))


def verify_gated_delta_rule(query, key, value, g, beta, *, initial_state=None, **options):
    reason = _problem_of_heads(query, key, value) or importable("fla", "flash-linear-attention")
    trains = _needs_backward(query, key, value, g, beta, initial_state)
    return _backward_problem() if trains and not reason else reason


@_tuned_first
def kimi_delta_rule(query, key, value, g, beta, *, a_log, dt_bias, lower_bound, boundaries, initial_state, **options):
    from fla.ops.kda import chunk_kda, fused_recurrent_kda

    call, state = (query, key, value, g, beta), None if initial_state is None else initial_state.float()
    options["initial_state"] = state
    if a_log is not None:
        options |= {"use_gate_in_kernel": True, "A_log": a_log, "dt_bias": dt_bias, "lower_bound": lower_bound}
    if query.shape[1] == 1 and state is not None and not _needs_backward(*call, a_log, dt_bias, state):
        return fused_recurrent_kda(*call, **options)
    if boundaries is not None:
        # The way of CUDA graphs does not wait for the GPU, needs no lengths on the host, and leaves out TileLang's backward.
        # That one multiplies values of the next document by zero, so NaN there would reach the end of this one.
        options |= {"cu_seqlens": boundaries.cu_seqlens, "use_graph": True}
    with nullcontext() if boundaries is None else _finding_chunks_once(boundaries):
        # The unwrapped function is the Triton kernel. A decay with a bound allows faster products.
        output, state = unwrap(chunk_kda)(*call, safe_gate=lower_bound is not None, **options)
    if boundaries is not None and output.grad_fn is not None:
        # A backward that failed may have left some, whose memory a CUDA graph must not use.
        output.grad_fn.register_prehook(_free_buffers)
        output.grad_fn.register_hook(_free_buffers)
    return output, state


def _free_buffers(*gradients: tuple) -> None:
    """Free the tensors of a backward that the way of CUDA graphs keeps for good, several for each length of a row.

    One of them is the gradient of the values, which the next backward of a row of this length would overwrite.
    """
    getattr(sys.modules.get("fla.ops.utils.graph"), _BUFFERS, {}).clear()


# `chunk_kda` looks its function up in its module, so only one thread at a time may replace the function.
_LOCK = RLock()


@contextmanager
def _finding_chunks_once(row: SequenceBoundaries) -> Iterator[None]:
    """Let all layers share the chunks of a row. The way of CUDA graphs takes 18 kernels to find them in each layer."""
    names = vars(import_module("fla.ops.kda.chunk"))
    with _LOCK:
        find = names.get("prepare_chunk_indices_static")

        def find_once(cu_seqlens, chunk_size, nt_max):
            call = {"cu_seqlens": cu_seqlens, "chunk_size": chunk_size, "nt_max": nt_max}
            if cu_seqlens is not row.cu_seqlens:
                return find(**call)
            return row.derived(f"fla {chunk_size=} {nt_max=}", lambda: find(**call))

        with nullcontext() if find is None else swapped(names, prepare_chunk_indices_static=find_once):
            yield


def verify_kimi_delta_rule(query, key, value, g, beta, *, lower_bound=None, boundaries=None, **options):
    if reason := _problem_of_heads(query, key, value):
        return reason
    if lower_bound is not None and lower_bound < -5:
        return f"supports lower bounds from -5, not {lower_bound}"
    reason = importable("fla", "flash-linear-attention")
    return _row_problem() if boundaries is not None and not reason else reason


def _problem_of_heads(query, key, value) -> str:
    """Return why neither delta rule takes these tensors, or an empty string."""
    if not query.is_cuda:
        return "needs CUDA tensors"
    if query.dtype not in (torch.float16, torch.bfloat16):
        return f"rounds products to ten mantissa bits and needs float16 or bfloat16, not {query.dtype}"
    if max(key.shape[-1], value.shape[-1]) > 256:
        return f"supports head dimensions up to 256, not {key.shape[-1]} and {value.shape[-1]}"
    return ""


@lru_cache
def _row_problem() -> str:
    from fla.ops.kda import chunk_kda

    known = signature(chunk_kda).parameters
    return "" if "use_graph" in known else "needs flash-linear-attention >= 0.6 for packed rows"


def causal_conv1d(hidden_states, weight, bias, activation, *, boundaries):
    try:
        from fla.modules.causal_conv1d.ops import causal_conv1d
    except ImportError:  # before 0.6
        from fla.modules.conv.causal_conv1d import causal_conv1d

    boundaries = _boundaries(boundaries)
    return causal_conv1d(hidden_states, weight, bias, activation=activation, backend="triton", **boundaries)[0]


def verify_causal_conv1d(hidden_states, weight, bias, activation, **options):
    return verify_convolution(hidden_states, activation) or importable("fla", "flash-linear-attention")


def _boundaries(boundaries: SequenceBoundaries | None) -> dict[str, torch.Tensor]:
    if boundaries is None:
        return {}
    indices = boundaries.derived("fla", lambda: chunk_indices(boundaries))
    return {"cu_seqlens": boundaries.cu_seqlens, "chunk_indices": indices}


def _needs_backward(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


@lru_cache
def _backward_problem() -> str:
    """Return why flash-linear-attention cannot run the backward on this machine, or an empty string."""
    try:
        from fla.ops.common.backends.tilelang import CommonTileLangBackend as Backend
    except ImportError:  # before 0.6
        from fla.ops.common.backends.tilelang import TileLangBackend as Backend
    from fla.utils import IS_NVIDIA_HOPPER, TRITON_ABOVE_3_4_0, TRITON_ABOVE_3_7_1

    if not IS_NVIDIA_HOPPER or not TRITON_ABOVE_3_4_0 or TRITON_ABOVE_3_7_1 or Backend.can_use():
        return ""
    reason = "computes a wrong backward on Hopper GPUs with this version of triton"
    return f"{reason}; needs triton >= 3.7.1 or tilelang (pip install tilelang)"
