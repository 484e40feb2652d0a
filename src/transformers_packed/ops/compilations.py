"""Kernels that are compiled while a block of code runs: a record of them, and threads for the variants of autotuned ones.

A kernel is compiled for each combination of the constants that select its code. Its package keeps it in the process,
and most packages also on disk, from where another process loads it in milliseconds.

An autotuner, such as that of the kernels of flash-linear-attention, compiles each variant of a kernel when it comes to
measure it, one after the other. Most of that time is spent outside of Python's lock. Then it runs each variant for an
eighth of a second, which is minutes for hundreds of variants.
"""

import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from typing import Any

import torch

from ..foreign import swapped
from .backends import flash_qla, name_of, on_device, threads_of_this_process
from .backends.caches import Turn
from .dispatch import logger


@dataclass(frozen=True)
class Compilation:
    """A kernel that was not in the memory of the process.

    Args:
        package (`str`):
            `"tilelang"`, `"triton"`, `"autotune"` (Triton's measurements of several configurations), or `"inductor"`
            (`torch.compile`).
        kernel (`str`):
            Name of the kernel.
        key (`str`):
            What selects this variant of the kernel.
        seconds (`float`):
            Time that the caller waited.
        from_disk (`bool`):
            Whether it was loaded from the disk cache of its package.
    """

    package: str
    kernel: str
    key: str
    seconds: float
    from_disk: bool


@contextmanager
def compilations(tell: Callable[[Compilation], Any]) -> Iterator[None]:
    """Call `tell` with each [`Compilation`] while the block runs, in any thread of this process."""
    with ExitStack() as stack:
        if find_spec("triton") is not None:
            stack.enter_context(_triton(tell))
        if flash_qla.is_usable():
            stack.enter_context(_tilelang(tell))
        stack.enter_context(_inductor(tell))
        yield


@contextmanager
def _triton(tell) -> Iterator[None]:
    from triton import knobs
    from triton.runtime.autotuner import Autotuner

    if not hasattr(Autotuner, "_bench"):
        logger.info("Kernels of this release of triton are not recorded: its Autotuner has no _bench.")
        yield
        return
    before, run, bench = knobs.compilation.listener, Autotuner.run, Autotuner._bench
    measured: list[Autotuner] = []

    def listen(**event):
        if before is not None:
            before(**event)
        source = event["src"]
        tell(Compilation("triton", source.name, _triton_key(source), event["times"].total / 1e6, event["cache_hit"]))

    def tuned(self, *args, **kwargs):
        count, known, start = len(measured), len(self.cache), time.perf_counter()
        result = run(self, *args, **kwargs)
        if len(self.cache) > known:
            name = getattr(self.base_fn, "__name__", "kernel")
            keys = ", ".join(map(str, next(reversed(self.cache))))
            tell(Compilation("autotune", name, keys, time.perf_counter() - start, len(measured) == count))
        return result

    def counted(self, *args, **kwargs):
        measured.append(self)
        return bench(self, *args, **kwargs)

    with swapped(Autotuner, run=tuned, _bench=counted), swapped(vars(knobs.compilation), listener=listen):
        yield


def _triton_key(source) -> str:
    """Return the types of a kernel's arguments, its constants, and the arguments that are multiples of 16 (`:16`)."""
    function, parts = getattr(source, "fn", None), []
    if function is None:
        return ""
    names = function.arg_names
    constants = {names[path[0]]: value for path, value in source.constants.items() if len(path) == 1}
    multiples = {names[path[0]] for path in source.attrs if len(path) == 1}
    for name, kind in source.signature.items():
        parts.append(
            f"{name}={constants[name]}" if name in constants else f"{name}:{kind}{':16' * (name in multiples)}"
        )
    return ", ".join(parts)


@contextmanager
def _tilelang(tell) -> Iterator[None]:
    try:
        from tilelang.jit import JITImpl
        from tilelang.jit.kernel import JITKernel
    except ImportError as error:
        logger.info(f"Kernels of this release of tilelang are not recorded: {error}.")
        yield
        return

    compile, init = JITImpl.compile, JITKernel.__init__
    built: list[JITKernel] = []

    def compiled(self, *args, **kwargs):
        count, start = len(built), time.perf_counter()
        kernel = compile(self, *args, **kwargs)
        name = getattr(self.func, "__name__", None) or getattr(
            getattr(self.func, "orig_func", None), "__name__", "kernel"
        )
        key = ", ".join([*map(str, args), *(f"{name}={value}" for name, value in kwargs.items())])
        tell(Compilation("tilelang", name, key, time.perf_counter() - start, len(built) == count))
        return kernel

    def counted(self, *args, from_database=False, **kwargs):
        if not from_database:
            built.append(self)
        return init(self, *args, from_database=from_database, **kwargs)

    with swapped(JITImpl, compile=compiled), swapped(JITKernel, __init__=counted):
        yield


@contextmanager
def _inductor(tell) -> Iterator[None]:
    # Torch imports it with the first function that is compiled, or excluded from compilation.
    if "torch._dynamo" not in sys.modules:
        yield
        return
    from torch._dynamo.callback import callback_handler

    starts = []

    def started(event):
        starts.append(time.perf_counter())

    def ended(event):
        if starts:
            tell(Compilation("inductor", f"graph {event.compile_id}", "", time.perf_counter() - starts.pop(), False))

    callback_handler.register_start_callback(started)
    callback_handler.register_end_callback(ended)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(started)
        callback_handler.remove_end_callback(ended)


# The kinds of calls whose kernels are tuned.
_TUNED: set[tuple] = set()


def tune_first(op: str, kind: tuple, device: torch.device, run: Callable[[], Any]) -> None:
    """Compile and tune what the first call of an op of this kind needs, by `run`, which runs its forward and backward.

    All variants of a kernel are compiled together, and nothing is left to compile in the backward. `run` has a thread of its
    own, where hooks on saved tensors, modes and autocast of the call are off.
    """
    if (op, device, *kind) in _TUNED or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return
    _TUNED.add((op, device, *kind))
    found: list[Compilation] = []
    turn = Turn("triton", "flash-linear-attention", name_of(device), op, *map(str, kind))

    def tune() -> None:
        is_done = False
        try:
            with on_device(device), tuned_in_threads(turn.threads), compilations(found.append):
                run()
            is_done = True
        finally:
            turn.end(is_done)

    start, thread = time.perf_counter(), ThreadPoolExecutor(1)
    logger.info(f"{op}: its kernels are compiled and tuned before the first call.")
    try:
        # In this thread, because Python would wait for the other one at its end.
        turn.wait()
        thread.submit(tune).result()
    except Exception as error:
        # The call itself compiles what it needs.
        logger.info(f"{op}: kernels are compiled one after the other: {error}")
    finally:
        # Ctrl-C does not wait for it.
        thread.shutdown(wait=False)
    built = sum(not one.from_disk for one in found)
    seconds = time.perf_counter() - start
    logger.info(f"{op}: {built} kernels compiled and {len(found) - built} loaded in {seconds:.1f} s.")


# Milliseconds for which a variant runs before it is measured, and while it is.
_MEASURE = {"warmup": 5, "rep": 20}


@contextmanager
def tuned_in_threads(threads: int | None = None) -> Iterator[None]:
    """While the block runs, compile all variants of a kernel together before they are measured, each for a short time.

    `threads` is their number, by default one for each core of this process's share.
    """
    if find_spec("triton") is None:
        yield
        return
    import triton
    from triton import testing
    from triton.runtime.autotuner import Autotuner

    mode, prune = getattr(triton, "AsyncCompileMode", None), getattr(Autotuner, "prune_configs", None)
    if mode is None or prune is None:
        logger.info("Variants of autotuned kernels are compiled one after the other: triton has no AsyncCompileMode.")
        yield
        return

    look_up: Any = getattr(Autotuner, "check_disk_cache", None)
    given: dict[Any, dict[str, Any]] = {}

    with ThreadPoolExecutor(threads or threads_of_this_process()) as pool:

        def compile_all(self: Any, configs: list[Any], kwargs: dict[str, Any]) -> None:
            # An error of a variant is raised, or left to the autotuner, when it is measured.
            with suppress(Exception), mode(pool):
                for config in configs if len(configs) > 1 else ():
                    with suppress(Exception):
                        self.fn.run(*self.nargs.values(), **{**kwargs, **config.all_kwargs(), "warmup": True})

        def pruned(self: Any, kwargs: dict[str, Any]) -> list[Any]:
            configs = prune(self, kwargs)
            if look_up is not None and self.cache_results:
                given[self] = kwargs
            else:
                compile_all(self, configs, kwargs)
            return configs

        def looked_up(self: Any, key: Any, configs: list[Any], measure_all: Callable[[], None]) -> bool:
            """Compile only if an earlier process has left no measurements on disk."""
            kwargs = given.pop(self)

            def compile_and_measure() -> None:
                compile_all(self, configs, kwargs)
                measure_all()

            return look_up(self, key, configs, compile_and_measure)

        methods: dict[str, Any] = {"prune_configs": pruned}
        if look_up is not None:
            methods["check_disk_cache"] = looked_up
        found = vars(Autotuner).get("do_bench")
        if isinstance(found, cached_property):

            def measure(self: Any) -> Any:
                function = found.func(self)
                # What the author of a kernel set stays.
                return partial(function, **_MEASURE) if function is testing.do_bench else function

            methods["do_bench"] = property(measure)
        with swapped(Autotuner, **methods):
            yield
