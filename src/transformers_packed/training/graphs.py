"""Whether packed rows train faster as CUDA graphs, by measuring both."""

import math
import time
from collections.abc import Callable, Sequence

import torch

from ..data.planning.memory import FILLED, gib
from ..errors import described
from ..models.checkpointing import bytes_of_gradients, bytes_of_moments, bytes_on_host
from ..models.cuda_graphs import records_graphs, share_of_attention, text_models_of, try_cuda_graphs
from ..ops.offload import without_outputs


_REPEATS = 5
# A small gain is worth neither the memory of the graphs nor their limits.
_GAIN = 1.1
# The host's time for a step over its shortest time for a row is 1.4 to 1.7 in measured steps. Launches take longer while
# the GPU computes. The rest is clipping, the optimizer and the data.
_LAUNCHES, _REST = 1.25, 0.2
# How many times faster than the GPU the host has to launch layers outside of graphs.
_IN_TIME = 2
# Measured rows have documents of equal length, and real ones have long documents too, which gain outside of graphs.
_NOISE = 1.05


def choose_graphs(
    model: torch.nn.Module,
    max_length: int,
    run: Callable[[], None],
    run_short: Callable[[], None] | None = None,
    run_longest: Callable[[], None] | None = None,
    others: Sequence[Callable[[], None]] = (),
    rows_per_step: int = 1,
    some_without: bool = False,
    waits: bool = False,
) -> tuple[bool, str]:
    """Run the layers of `model` as CUDA graphs if its rows are faster that way and the memory suffices.

    A row whose kernels take longer than the host needs for a step gains nothing from graphs, and none is recorded. On
    long rows, layers of attention stay outside of graphs if the host is fast enough to launch them meanwhile. The memory
    of graphs is what the allocator reserves for them.

    A host that waits in each step is not ahead of the GPU when the next one begins. Clipping, the optimizer and the data
    then take their time beside that of the row, unless graphs leave the host time for them during the backward. That is
    no reason for graphs of checkpointed layers: the memory of a step counts more there, and the gain is smaller.

    Args:
        model (`torch.nn.Module`):
            A model of this package of a family with graphs, on a GPU, without graphs and with compiled kernels.
        max_length (`int`):
            The length in tokens of the longest row with a graph. A multiple of 64.
        run (`Callable`):
            Runs forward and backward of a typical row, and leaves no gradients.
        run_short (`Callable`, *optional*):
            The same for a row with about as many launches that takes the GPU less time than the host. While the GPU is
            behind, CUDA lets the host wait, and a longer row would not tell the host's own time. By default, rows are short.
        run_longest (`Callable`, *optional*):
            The same for the longest row. By default, rows have the same length.
        others (`Sequence[Callable]`, *optional*):
            The same for a row of each further graph. Their memory counts too.
        rows_per_step (`int`, *optional*, defaults to 1):
            The steps of gradient accumulation.
        some_without (`bool`, *optional*, defaults to `False`):
            Whether some rows have no graph, such as the longest one or those of an evaluation. A step of the longest row
            then needs memory beside the graphs.
        waits (`bool`, *optional*, defaults to `False`):
            Whether the host waits for the GPU between forward and backward of each step, to read metrics.

    Returns:
        `tuple[bool, str]`: whether graphs are on, and the reason. After an error they are off.
    """
    on = False
    try:
        short, longest = run_short or run, run_longest or run
        options = others, rows_per_step, some_without, waits
        with without_outputs():
            on, reason = _choose(model, max_length, run, short, longest, *options)
    except Exception as error:
        reason = f"measuring stopped with {described(error)}"
    finally:
        if not on:
            try_cuda_graphs(model, 0)
            # Training cannot use the pool of graphs that were tried.
            torch.cuda.empty_cache()
    return on, reason


def _choose(model, max_length, run, run_short, run_longest, others, rows_per_step, some_without, waits):
    run_short()
    host = _time(run_short)[0]
    run()
    plain = _time(run, 1)[1]
    # One row shows a large difference.
    if 2 * host > plain:
        plain = _time(run)[1]
    # A row that takes longer than its launches tells the time of the GPU.
    known = plain if plain > _GAIN * host else 0.0
    waits = waits and not any(layer.gradient_checkpointing for text in text_models_of(model) for layer in text.layers)
    launches, rest = _LAUNCHES * host, _LAUNCHES * host * _REST / rows_per_step
    host = launches + rest
    without = max(plain, launches) + rest if waits else max(plain, host)
    # With graphs, a step takes hardly less than its kernels.
    if without <= (_GAIN * plain if waits else plain):
        return False, f"a row takes the GPU {plain:.0f} ms and the host about {host:.0f} ms"
    kept, step = _memory(run_longest)
    free, total = torch.cuda.mem_get_info()
    gradients = bytes_of_gradients(model)
    # The row that runs leaves no gradients. Those of earlier rows of a step stay.
    room = min(FILLED * total - kept, free) - bytes_of_moments(model) - (gradients if rows_per_step > 1 else 0)
    # The graphs keep the activations of a step, also the inputs that are in host memory without graphs. The gradients
    # of their layers are copied.
    needed = step + bytes_on_host(model, unasked=False) + (step if some_without else gradients)
    if needed > room:
        return False, f"graphs may need {gib(needed)} GiB, and {gib(max(room, 0))} GiB are free"
    found = _fastest_graphs(model, max_length, run, _IN_TIME * share_of_attention(model) * host, known)
    if found is None:
        return False, "the layers cannot run as graphs"
    graphed, of = found
    alone = f"the GPU takes {plain:.0f} ms and the host about {host:.0f} ms"
    alone += f", {without:.0f} ms in all because the host waits for metrics" if waits else ""
    gain = f"a row takes {graphed:.0f} ms with graphs{of}; without, {alone}"
    if graphed * _GAIN >= without:
        return False, gain
    for record in others:
        record()
    pool, beside = _memory(run if some_without else run_longest)
    pool -= kept
    beside = step if some_without else beside
    if pool + beside > room:
        return (
            False,
            f"graphs keep {gib(pool)} GiB, and a step needs {gib(beside)} more of {gib(room)} GiB that are free",
        )
    return True, f"{gain}; the graphs keep {gib(pool)} GiB"


def _fastest_graphs(model, max_length, run, in_time: float, known: float) -> tuple[float, str] | None:
    """Turn graphs on, and return the time of a row and what the graphs leave out.

    Attention stays outside of graphs of rows that take longer than `in_time`. The host then launches it while the GPU
    computes other layers. `known` is the time of a row if it is known before graphs are recorded.
    """
    times = {}
    for attention in (True, False) if known < in_time else (False,):
        try_cuda_graphs(model, max_length, attention)
        run()
        if not all(records_graphs(text) for text in text_models_of(model)):
            return None
        times[attention] = _time(run)[1]
        if times[attention] < in_time:
            break
    if not attention and times.get(True, math.inf) * _NOISE < times[False]:
        attention = True
        try_cuda_graphs(model, max_length)
        run()
    return times[attention], "" if attention else " of all layers but those of attention"


def _time(run: Callable[[], None], repeats: int = _REPEATS) -> tuple[float, float]:
    """Return the milliseconds until the host has launched a row, and until the GPU has computed it."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        launched = time.perf_counter()
        torch.cuda.synchronize()
        times.append((1e3 * (launched - start), 1e3 * (time.perf_counter() - start)))
    return min(times, key=lambda pair: pair[1])


def _memory(run: Callable[[], None]) -> tuple[int, int]:
    """Return the bytes that are reserved between steps, and what a step adds to them at its peak."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    kept, before = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return kept, torch.cuda.max_memory_allocated() - before
