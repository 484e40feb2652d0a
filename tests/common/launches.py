"""The launches of kernels that Triton's interpreter runs on a CPU, and what Triton would compile for them."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from unittest import mock


@cache
def _specialize(function, unspecialized: tuple[str, ...]):
    """Triton's own function from the arguments of a launch to what it compiles for an H100."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    kernel = JITFunction(function, do_not_specialize=unspecialized)
    return create_function_from_signature(kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32)))


@contextmanager
def specializations(compute: bool = False) -> Iterator[set[tuple[str, str, str]]]:
    """Collect the name of each kernel, and the types, values and options that Triton would compile it for.

    Kernels run only if `compute`.
    """
    found = set()

    def record(run, kernel, *args, grid, warmup, **kwargs):
        unspecialized = tuple(kernel.kwargs.get("do_not_specialize") or ())
        _, specialization, options = _specialize(kernel.fn, unspecialized)(*args, **kwargs)
        found.add((kernel.fn.__name__, str(specialization), str(sorted(options.items()))))
        if compute:
            run(kernel, *args, grid=grid, warmup=warmup, **kwargs)

    with _launched_by(record):
        yield found


@contextmanager
def launches() -> Iterator[Counter[str]]:
    """Count the launches of each kernel by its name."""
    found = Counter()

    def record(run, kernel, *args, **kwargs):
        found[kernel.fn.__name__] += 1
        run(kernel, *args, **kwargs)

    with _launched_by(record):
        yield found


def _launched_by(record: Callable):
    """Let `record` launch kernels, which gets the interpreter's own function first."""
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run
    return mock.patch.object(InterpretedFunction, "run", lambda *args, **kwargs: record(run, *args, **kwargs))
