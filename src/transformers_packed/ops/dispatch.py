"""Selection of the implementation of an op.

Each op has an ordered table of implementations. The verifier of an implementation inspects the call and returns
`(ok, reason)`. `impl="auto"` selects the first implementation that supports the call. A name selects that
implementation, or raises an error with the reason why it does not support the call. Each choice is logged once.
[`implementations_used`] returns all of them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from transformers.utils import logging

from ..errors import input_error
from .autograd import is_transformed


logger = logging.get_logger(__name__)

_used: dict[str, dict[str, None]] = {}
# The ops in `_used` that compute each token independently and need no boundaries.
_of_tokens: set[str] = set()
# The compiler would unroll the chunks of one reference, and keep all logits of the other.
_NOT_TO_COMPILE = ("gated_delta_rule", "linear_cross_entropy")


class Implementation(NamedTuple):
    """`run(*args, **kwargs)` computes the op. `verify(*args, **kwargs)` returns `(ok, reason)` for the same call."""

    run: Callable[..., Any]
    verify: Callable[..., tuple[bool, str]]


def choose(op: str, impl: str, table: dict[str, Implementation], *args, **kwargs) -> Callable[..., Any]:
    """Select the function of `table` that runs this call of `op`.

    Args:
        op (`str`):
            Name of the op, used in messages.
        impl (`str`):
            `"auto"` or a key of `table`.
        table (`dict[str, Implementation]`):
            Implementations in order of preference.
        *args (`Any`):
            Positional arguments of the call.
        **kwargs (`Any`):
            Keyword arguments of the call.

    Raises:
        `ValueError`: `impl` is unknown, or no selected implementation supports the call.
    """
    if impl != "auto" and impl not in table:
        raise input_error(f'impl="auto" or one of {sorted(table)}', f'"{impl}"', 'Use "auto" or a listed name.')
    reasons: list[str] = []
    compiled = impl == "auto" and "reference" in table and op not in _NOT_TO_COMPILE and torch.compiler.is_compiling()
    for name in table if impl == "auto" else (impl,):
        if compiled and name != "reference":
            ok, reason = False, "torch.compile fuses the reference instead"
        else:
            ok, reason = table[name].verify(*args, **kwargs)
        if name != "reference" and "reference" in table and is_transformed():
            ok, reason = False, "does not support torch.func transforms"
        if ok:
            # Warn on a GPU, where the reference is many times slower than any kernel.
            slow = name == "reference" and impl == "auto" and any(getattr(x, "is_cuda", False) for x in args)
            record(op, name, reasons, logger.warning if slow else logger.info)
            return table[name].run
        reasons.append(f"{name}: {reason}")
    fix = 'Use impl="auto"' + (", install the missing package" if impl == "auto" else "") + " or change the input."
    raise input_error(f'an input that impl="{impl}" supports', "; ".join(reasons), fix)


def run(op: str, impl: str, table: dict[str, Implementation], *args, **kwargs) -> Any:
    """Select an implementation with [`choose`] and call it.

    Under `torch.compile`, a call with `boundaries` runs outside of the graph, because kernel arguments depend on the
    document lengths, which differ between rows. Other calls run as their reference, which the compiler fuses,
    except ops whose reference would be slow or need much memory.
    """
    boundaries = kwargs.get("boundaries")
    if boundaries is not None:
        boundaries.check_whole("Take the op from transformers_packed.parallel.ops_for(boundaries).")
    if torch.compiler.is_compiling() and boundaries is not None:
        return outside_of_graphs(_run, op, impl, table, *args, **kwargs)
    return _run(op, impl, table, *args, **kwargs)


def _run(op, impl, table, *args, **kwargs):
    if "boundaries" not in kwargs:
        _of_tokens.add(op)
    return choose(op, impl, table, *args, **kwargs)(*args, **kwargs)


@torch.compiler.disable(reason="packed rows differ in the lengths of their documents")
def outside_of_graphs(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call a function outside of compiled graphs."""
    return function(*args, **kwargs)


def record(op: str, name: str, reasons: list[str], log: Callable[[str], None]) -> None:
    """Record that `name` ran for `op`, and `log` it the first time."""
    if torch.compiler.is_compiling():
        return
    names = _used.setdefault(op, {})
    if name not in names:
        names[name] = None
        log(f"{op}: {name}" + (f" ({'; '.join(reasons)})" if reasons else ""))


def implementations_used(isolating: bool = False) -> dict[str, list[str]]:
    """Return the implementations that ran in this process, `{op: [name, ...]}` in order of first use.

    With `isolating=True`, only ops that isolate documents are included, not ops that compute each token independently.
    """
    return {op: list(names) for op, names in _used.items() if not (isolating and op in _of_tokens)}


def always(*args, **kwargs) -> tuple[bool, str]:
    """Verifier of an implementation that supports every call."""
    return True, ""
