"""What Triton would compile for the launches of kernels that its interpreter runs on a CPU."""

from collections.abc import Iterator
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
    from triton.runtime.interpreter import InterpretedFunction

    found, run = set(), InterpretedFunction.run

    def record(kernel, *args, grid, warmup, **kwargs):
        unspecialized = tuple(kernel.kwargs.get("do_not_specialize") or ())
        _, specialization, options = _specialize(kernel.fn, unspecialized)(*args, **kwargs)
        found.add((kernel.fn.__name__, str(specialization), str(sorted(options.items()))))
        if compute:
            run(kernel, *args, grid=grid, warmup=warmup, **kwargs)

    with mock.patch.object(InterpretedFunction, "run", record):
        yield found
