"""Which implementation of an op runs, and why the others do not.

Each op offers an ordered table of implementations, each with a verifier that looks at the call and answers
`(ok, reason)`. `impl="auto"` takes the first one that can serve; a name asks for that one and is an error with the
reason when it cannot. What `auto` chose is logged once, and [`implementations_used`] tells it afterwards.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers.utils import logging

from ..errors import input_error
from .autograd import is_transformed


logger = logging.get_logger(__name__)

_used: dict[str, dict[str, None]] = {}
# Those of these ops that look at each token by itself, and so need no boundaries.
_of_tokens: set[str] = set()


class Implementation(NamedTuple):
    """`run(*args, **kwargs)` does the work; `verify(*args, **kwargs)` says whether it can, and if not, why."""

    run: Callable[..., Any]
    verify: Callable[..., tuple[bool, str]]


def choose(op: str, impl: str, table: dict[str, Implementation], *args, **kwargs) -> Callable[..., Any]:
    """The function of `table` that serves this call of `op`.

    Args:
        op (`str`):
            The op's name, for messages.
        impl (`str`):
            `"auto"`, or a key of `table`.
        table (`dict[str, Implementation]`):
            The implementations in order of preference.
        args, kwargs:
            The call, as the verifiers see it.

    Raises:
        `ValueError`: `impl` is unknown or cannot serve the call, or nothing can.
    """
    if impl != "auto" and impl not in table:
        raise input_error(f'impl="auto" or one of {sorted(table)}', f'"{impl}"', 'Use "auto" or a listed name.')
    reasons = []
    for name in table if impl == "auto" else (impl,):
        ok, reason = table[name].verify(*args, **kwargs)
        if name != "reference" and "reference" in table and is_transformed():
            ok, reason = False, "has no rule for the transforms of torch.func"
        if ok:
            # On a GPU the reference is many times slower than any kernel, which a user should hear of.
            slow = name == "reference" and impl == "auto" and any(getattr(x, "is_cuda", False) for x in args)
            record(op, name, reasons, logger.warning if slow else logger.info)
            return table[name].run
        reasons.append(f"{name}: {reason}")
    fix = 'Use impl="auto"' + (", install what is missing," if impl == "auto" else "") + " or another input."
    raise input_error(f'an input that impl="{impl}" can serve', "; ".join(reasons), fix)


def run(op: str, impl: str, table: dict[str, Implementation], *args, **kwargs) -> Any:
    """[`choose`] and call.

    With `boundaries` among the arguments that happens outside of a graph that is being compiled: what a kernel is given
    depends on the lengths of the documents, which are different in each row.
    """
    boundaries = kwargs.get("boundaries")
    if boundaries is not None:
        boundaries.check_whole("Take the op from transformers_packed.parallel.ops_for(boundaries).")
    outside = torch.compiler.is_compiling() and boundaries is not None
    return (_run_outside_of_graphs if outside else _run)(op, impl, table, *args, **kwargs)


def _run(op, impl, table, *args, **kwargs):
    if "boundaries" not in kwargs:
        _of_tokens.add(op)
    return choose(op, impl, table, *args, **kwargs)(*args, **kwargs)


_run_outside_of_graphs = torch.compiler.disable(_run, reason="packed rows differ in the lengths of their documents")


def record(op: str, name: str, reasons: list[str], log: Callable[[str], None]) -> None:
    """Remember that `name` ran for `op`, and `log` it the first time."""
    if torch.compiler.is_compiling():
        return
    names = _used.setdefault(op, {})
    if name not in names:
        names[name] = None
        log(f"{op}: {name}" + (f" ({'; '.join(reasons)})" if reasons else ""))


def implementations_used(isolating: bool = False) -> dict[str, list[str]]:
    """The implementations that ran in this process, `{op: [name, ...]}` in the order of their first use.

    With `isolating` only those of ops that keep documents apart, not those that look at each token by itself.
    """
    return {op: list(names) for op, names in _used.items() if not (isolating and op in _of_tokens)}


def always(*args, **kwargs) -> tuple[bool, str]:
    """The verifier of an implementation that serves every call."""
    return True, ""
