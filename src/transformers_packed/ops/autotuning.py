"""Autotuned Triton kernels, such as those of flash-linear-attention, whose variants are compiled in threads.

An autotuner compiles each variant of a kernel when it comes to measure it, one after the other. Most of that time is spent
outside of Python's lock. Then it runs each variant for an eighth of a second, which is minutes for hundreds of variants.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from importlib.util import find_spec
from typing import Any

from ..foreign import swapped
from .backends import threads_of_this_process
from .dispatch import logger


# Milliseconds for which a variant runs before it is measured, and while it is.
_MEASURE = {"warmup": 5, "rep": 20}


@contextmanager
def tuned_in_threads() -> Iterator[None]:
    """While the block runs, compile all variants of a kernel together before they are measured, each for a short time."""
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

    with ThreadPoolExecutor(threads_of_this_process()) as pool:

        def compile_all(self: Any, kwargs: dict[str, Any]) -> list[Any]:
            configs = prune(self, kwargs)
            # An error of a variant is raised, or left to the autotuner, when it is measured.
            with suppress(Exception), mode(pool):
                for config in configs if len(configs) > 1 else ():
                    with suppress(Exception):
                        self.fn.run(*self.nargs.values(), **{**kwargs, **config.all_kwargs(), "warmup": True})
            return configs

        methods: dict[str, Any] = {"prune_configs": compile_all}
        found = vars(Autotuner).get("do_bench")
        if isinstance(found, cached_property):

            def measure(self: Any) -> Any:
                function = found.func(self)
                # What the author of a kernel set stays.
                return partial(function, **_MEASURE) if function is testing.do_bench else function

            methods["do_bench"] = property(measure)
        with swapped(Autotuner, **methods):
            yield
