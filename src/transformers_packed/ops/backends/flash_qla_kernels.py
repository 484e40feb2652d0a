"""Threads that compile FlashQLA's kernels, as many at a time as there are cores.

FlashQLA compiles each kernel when it comes to it, one after the other. TileLang compiles outside of Python's lock, so all
of them together take as long as the slowest one, that of the backward. The heads and dtypes of a model select the kernels,
so they can be started before there is a row. A forward waits for its own kernels only: what else the step needs is
compiled in the meantime.

States at the ends of documents select other kernels. A training has calls of whole documents ([`WHOLE`]), also of
documents that are cut by segments or between processes ([`CUT`]), or also of trees and shared prompts ([`TREES`]). A call
starts all kernels of the smallest of them that has such calls, and waits for those that begin and end as it does.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from ...boundaries import CHUNK_SIZE
from ..dispatch import logger
from . import name_of, on_device, tilelang_output
from .caches import Turn
from .tilelang_output import quiet


# More than the multiprocessors of a GPU.
_MOST_BLOCKS = 256
# Another kernel computes the forward from documents times heads of these shares of the multiprocessors on.
_SHARES = 0.35, 0.7
_GROUPS: dict[tuple, "Kernels"] = {}
# Kinds of kernels: of calls by whether they begin with states and end with them, and of backwards with states.
_PLAIN, _BACKWARD = (False, False), "backward"
# The calls of trainings: of whole documents, of cut ones, which begin and end with states, and of trees.
WHOLE = frozenset({_PLAIN})
CUT = WHOLE | {(True, True)}
TREES = CUT | {(False, True), (True, False)}


def compile_together(query, key, value, g, beta, cu_seqlens, states: tuple[bool, bool] = _PLAIN) -> "list[Kernels]":
    """Compile the kernels of forward and backward in threads, and wait for those of this forward.

    `states` says whether the call begins with states, and ends with them. Returns what its backward has to wait for.
    """
    own_kinds, calls = _kinds_of({_PLAIN, states}), next(calls for calls in (WHOLE, CUT, TREES) if states in calls)
    found = _start((query, key, value, g, beta, cu_seqlens), [*own_kinds, *_kinds_of(calls)])
    own = [kernels for kind, kernels in found.items() if kind in own_kinds]
    for kernels in own:
        kernels.wait_for_forward()
    return [kernels for kernels in own if not kernels.are_ready]


def start_threads(query, key, value, g, beta, cu_seqlens, calls: Collection = WHOLE) -> "list[Kernels]":
    """Return what a training with such calls and their backwards waits for. Threads compile it from the first call on.

    `calls` is one of [`WHOLE`], [`CUT`] and [`TREES`].
    """
    return list(_start((query, key, value, g, beta, cu_seqlens), _kinds_of(calls)).values())


def _kinds_of(calls: Collection) -> list:
    """Return the kinds of kernels of these calls. Those of a backward with states come first, because they take longest."""
    with_states = sorted({*calls} - WHOLE)
    return [*([_BACKWARD] if with_states else []), *with_states, _PLAIN]


def _start(call: tuple, kinds: list) -> "dict[Any, Kernels]":
    """Return the kernels of these kinds that are not ready, and start those that nobody has started."""
    before = _PROGRESS.number
    found = {kind: _group(call, kind) for kind in dict.fromkeys(kinds)}
    if (new := _PROGRESS.number - before) > 0:
        logger.info(f"FlashQLA: threads compile {new} kernels, or load them.")
    return {kind: kernels for kind, kernels in found.items() if kernels is not None and not kernels.are_ready}


def _group(call: tuple, kind: Any) -> "Kernels | None":
    """Return the kernels of a kind, and start them if there are none yet. A CUDA graph starts none."""
    query, key, value, g, beta, cu_seqlens = call
    training = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value, g, beta))
    heads = key.shape[2], value.shape[2]
    chosen_by = key.device, key.dtype, g.dtype, beta.dtype, *heads, cu_seqlens is None, kind
    # Training has all kernels of a forward without gradients.
    kernels = _GROUPS.get((*chosen_by, True)) or _GROUPS.get((*chosen_by, training))
    if kernels is None:
        if key.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        documents = len(key) if cu_seqlens is None else len(cu_seqlens) - 1
        leave_ctrl_c_to_python()
        first: list[Callable[[], None]] = []
        others: list[Callable[[], None]] = []
        row = key, value, g, beta, documents
        try:
            if kind == _PLAIN:
                first, others = _calls(*row, cu_seqlens, training)
            elif kind == _BACKWARD:
                others = _backward_with_states(*row) if training else []
            else:
                first = _forwards_with_states(*row, training, *kind)
        except Exception as error:
            _tell(error)
        if key.is_cuda:
            # The threads read tensors that this stream fills.
            torch.cuda.synchronize(key.device)
        turn = Turn("tilelang", "flash-qla", name_of(key.device), *map(str, chosen_by[1:]), training)
        kernels = _GROUPS[*chosen_by, training] = Kernels(key.device, first, others, turn)
    return kernels


class Kernels:
    """Kernels that threads compile by running them: `first` for a forward, `others` for its backward."""

    def __init__(
        self,
        device: torch.device,
        first: list[Callable[[], None]],
        others: list[Callable[[], None]],
        turn: Turn | None = None,
    ):
        self.turn, self.has_failed, self.are_ready = turn or Turn("", ""), False, False
        # The threads that have not ended.
        self.left, self.lock = len(first) + len(others), threading.Lock()
        self.first: list[Future] = []
        self.others: list[Future] = []
        _PROGRESS.add(self.left)
        # At its end, Python waits for the threads of a pool, but not for this one.
        self.starter = threading.Thread(target=self._start, args=(device, first, others), daemon=True)
        self.starter.start()

    def _start(self, device: torch.device, first: list[Callable[[], None]], others: list[Callable[[], None]]) -> None:
        """Start the threads when no other process compiles the kernels."""
        if not self.left:
            return
        try:
            self.turn.wait()
            pool = ThreadPoolExecutor(min(self.turn.threads, self.left))

            def start(calls: list[Callable[[], None]]) -> list[Future]:
                return [pool.submit(self._run, call, device) for call in calls]

            # The first of the others takes longest.
            longest = start(others[:1])
            self.first = start(first)
            self.others = longest + start(others[1:])
            pool.shutdown(wait=False)
        except Exception as error:
            _tell(error)
            self.turn.end(False)

    def _run(self, call: Callable[[], None], device: torch.device) -> None:
        """Compile a kernel. The first error of a thread is told, and the last thread ends the turn of this process."""
        error: BaseException | None = None
        try:
            # The tensors of the call are freed after it.
            with quiet(), on_device(device):
                call()
        except BaseException as found:
            error = found
        with self.lock:
            self.left -= 1
            is_last, is_told = not self.left, self.has_failed
            self.has_failed = is_told or error is not None
        if error is not None and not is_told:
            _tell(error)
        _PROGRESS.one_more()
        if is_last:
            self.turn.end(not self.has_failed)

    def wait_for_forward(self) -> None:
        """Wait for the kernels of a forward."""
        self.starter.join()
        wait(self.first)
        self.are_ready = self.are_ready or not self.others

    def wait(self, *gradients: torch.Tensor) -> None:
        """Wait for all kernels. Before the backward, autograd calls it with the gradients of the output."""
        self.starter.join()
        wait([*self.first, *self.others])
        self.are_ready = True


class _Progress:
    """Tells how many of the compilations of this process have ended, and the seconds since it last waited for none."""

    def __init__(self):
        self.lock, self.number, self.done, self.start = threading.Lock(), 0, 0, 0.0

    def add(self, number: int) -> None:
        with self.lock:
            if self.done == self.number:
                self.start = time.perf_counter()
            self.number += number

    def one_more(self) -> None:
        with self.lock:
            self.done += 1
            seconds = time.perf_counter() - self.start
            logger.info(f"FlashQLA: {self.done} of {self.number} compilations have ended after {seconds:.1f} s.")


_PROGRESS = _Progress()


def end_at_once(status: int) -> None:
    """End the process if threads compile. Python would wait for them, and a compiler cannot be stopped."""
    if any(kernels.left for kernels in _GROUPS.values()):
        sys.stdout.flush()
        tilelang_output.flush()
        os._exit(status)


def leave_ctrl_c_to_python() -> None:
    """Tell Z3, TileLang's prover, not to take Ctrl-C. Threads that take it in turns would never give it back."""
    with suppress(ImportError):
        import z3

        z3.set_param("ctrl_c", False)


def _tell(error: BaseException) -> None:
    # Such as other functions than those of version 0.1.3. The call itself compiles what it needs.
    logger.info(f"FlashQLA's kernels are compiled one after the other: {error}")


def _forwards_with_states(
    key, value, g, beta, documents: int, training: bool, begins: bool, ends: bool
) -> list[Callable[[], None]]:
    """As [`_calls`], what forwards need that begin with states, end with them, or both, beside those without."""
    from flash_qla.ops.gated_delta_rule import chunk

    def run(row: dict) -> None:
        initial_state = _state(row) if begins else None
        chunk.fused_gdr_fwd(q=row["k"], initial_state=initial_state, output_final_state=ends, **row)

    return [partial(run, row) for row in _rows(key, value, g, beta, documents, True, training)]


def _backward_with_states(key, value, g, beta, documents: int) -> list[Callable[[], None]]:
    from flash_qla.ops.gated_delta_rule import chunk

    row = _rows(key, value, g, beta, documents, True, True)[0]
    state = _state(row)
    of_tokens = state.to(key.dtype)[None]
    return [
        lambda: chunk.fused_gdr_bwd(q=row["k"], do=row["v"], dht=state, h=of_tokens, **row),
        lambda: chunk.fused_gdr_h(initial_state=state, output_final_state=False, **row),
    ]


def _state(row: dict) -> torch.Tensor:
    """Zeros for the states `[N, HV, K, V]` of the documents of [`_row`], which have one token each."""
    keys, values = row["k"], row["v"]
    shape = keys.shape[1], values.shape[2], keys.shape[3], values.shape[3]
    return values.new_zeros(shape, dtype=torch.float32)


def _calls(key, value, g, beta, documents: int, cu_seqlens, training: bool) -> tuple[list, list]:
    """Calls of FlashQLA's kernels on zeros, each with what selects the kernel: those of forwards, and those of a backward."""
    from flash_qla.ops.gated_delta_rule import chunk

    heads, packed = value.shape[2], cu_seqlens is not None
    rows = _rows(key, value, g, beta, documents, packed, training)
    row = rows[0]
    k, v, a, cu_seqlens = (row[name] for name in ("k", "v", "a", "cu_seqlens"))
    sums = {"g": row["g"], "chunk_size": CHUNK_SIZE, "cu_seqlens": cu_seqlens}
    first = [
        *(lambda row=row: chunk.fused_gdr_fwd(q=row["k"], output_final_state=False, **row) for row in rows),
        lambda: chunk.kkt_solve(k=k, b=row["b"], chunk_size=CHUNK_SIZE, cu_seqlens=cu_seqlens),
        lambda: chunk.chunk_local_cumsum(**sums),
    ]
    if not training:
        return first, []
    state = k.new_zeros(*k.shape[:1], k.shape[1] if packed else 1, heads, k.shape[3], v.shape[3])
    others = [
        lambda: chunk.fused_gdr_bwd(q=k, do=v, dht=None, h=state, **row),
        lambda: chunk.fused_gdr_h(output_final_state=False, **row),
        lambda: chunk.chunk_local_cumsum(**sums, reverse=True, zero_last_chunk=True),
    ]
    if key.shape[2] < heads:
        others.append(lambda: chunk.group_reduce_vector(v, key.shape[2]))
    return first, others


def _numbers_of_documents(device: torch.device, heads: int, documents: int) -> list[int]:
    """Return `documents`, and numbers that select the other kernels of the forward."""
    blocks = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    limits = [int(share * blocks) for share in _SHARES]
    # More documents select no other kernel: blocks of all heads fill the GPU.
    most = -(-_MOST_BLOCKS // heads)
    numbers: dict[int, int] = {}
    for number in (min(documents, most), 1, max(1, (limits[1] - 1) // heads), most):
        numbers.setdefault(sum(number * heads >= limit for limit in limits), number)
    return list(numbers.values())


def _rows(key, value, g, beta, documents: int, packed: bool, training: bool) -> list[dict]:
    """Return [`_row`] for each number of documents that selects a kernel. Training has rows of all of them."""
    numbers = _numbers_of_documents(key.device, value.shape[2], documents)
    return [_row(key, value, g, beta, number, packed) for number in (numbers if training else numbers[:1])]


def _row(key, value, g, beta, documents: int, packed: bool) -> dict:
    """Zeros as arguments of FlashQLA's kernels: a packed row of documents of one token, or a batch of `documents` rows."""
    from flash_qla.utils.index import prepare_varlen_metadata

    rows, tokens, cu_seqlens = documents, CHUNK_SIZE, None
    if packed:
        rows, tokens, host = 1, documents, torch.arange(documents + 1, dtype=torch.int32)
        cu_seqlens = prepare_varlen_metadata(host.to(key.device), host)
    heads = value.shape[2]
    zeros = lambda like, *shape: torch.zeros(rows, tokens, *shape, dtype=like.dtype, device=key.device)  # noqa: E731
    k, v, a = zeros(key, *key.shape[2:]), zeros(value, *value.shape[2:]), zeros(key, heads, CHUNK_SIZE)
    return {"k": k, "v": v, "a": a, "g": zeros(g, heads), "b": zeros(beta, heads), "cu_seqlens": cu_seqlens}
