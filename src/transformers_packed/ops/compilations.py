"""Records of kernels that are compiled while a block of code runs.

A kernel is compiled for each combination of the constants that select its code. Its package keeps it in the process,
and most packages also on disk, from where another process loads it in milliseconds.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from .backends import flash_qla
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
            Time that the caller waited. Of `"autotune"`, the time of the measurements.
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


def caches() -> dict[str, tuple[str, str]]:
    """Return the directory of each disk cache of compiled kernels, and the environment variable that moves it."""
    found = {}
    if find_spec("triton") is not None:
        from triton import knobs

        found["triton"] = knobs.cache.dir, "TRITON_CACHE_DIR"
    if flash_qla.is_usable():
        from tilelang import env

        found["tilelang"] = env.TILELANG_CACHE_DIR, "TILELANG_CACHE_DIR"
    return found


@contextmanager
def _triton(tell) -> Iterator[None]:
    from triton import knobs

    def compiled(*, src, times, cache_hit, **_):
        tell(Compilation("triton", src.name, _triton_key(src), times.total / 1e6, cache_hit))

    def tuned(*, fn, key, duration, cache_hit, **_):
        tell(Compilation("autotune", fn.__name__, ", ".join(map(str, key)), duration or 0.0, cache_hit))

    with ExitStack() as stack:
        stack.enter_context(_listening(knobs.compilation, compiled))
        # In triton since 3.8.
        if hasattr(knobs.autotuning, "listener"):
            stack.enter_context(_listening(knobs.autotuning, tuned))
        else:
            logger.info("Measurements of autotuned kernels are not recorded: this release of triton has no listener.")
        yield


@contextmanager
def _listening(part: Any, hear: Callable[..., None]) -> Iterator[None]:
    """Call `hear` with the events of a part of Triton's knobs, beside whoever listens already."""
    before = part.listener

    def listen(**event):
        if before is not None:
            before(**event)
        hear(**event)

    part.listener = listen
    try:
        yield
    finally:
        part.listener = before


@contextmanager
def replaced(cls: type, **methods: Any) -> Iterator[None]:
    """Replace methods or properties of a class while the block runs."""
    before = {name: getattr(cls, name) for name in methods}
    try:
        for name, method in methods.items():
            setattr(cls, name, method)
        yield
    finally:
        for name, method in before.items():
            setattr(cls, name, method)


def _triton_key(source) -> str:
    """Return the types of a kernel's arguments, its constants, and the arguments that are multiples of 16 (`:16`)."""
    function, parts = getattr(source, "fn", None), []
    if function is None:
        return ""
    names = function.arg_names
    constants = {names[path[0]]: value for path, value in source.constants.items() if len(path) == 1}
    multiples = {names[path[0]] for path in source.attrs if len(path) == 1}
    for name, kind in source.signature.items():
        if name in constants:
            parts.append(f"{name}={constants[name]}")
        else:
            parts.append(f"{name}:{kind}:16" if name in multiples else f"{name}:{kind}")
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

    with replaced(JITImpl, compile=compiled), replaced(JITKernel, __init__=counted):
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
