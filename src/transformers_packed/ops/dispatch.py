"""Selection of the implementation of an op.

Each op has an ordered table of implementations. The verifier of an implementation inspects the call and returns why it
does not support that, or an empty string. `impl="auto"` selects the first implementation that supports the call. A name
selects that implementation, or raises an error with the reason why it does not support the call. Each choice is logged
once. [`implementations_used`] returns all of them.

Verifiers run in each call. A cached choice would need the devices, dtypes and sizes of all tensors as its key, and
reading these takes longer than the verifiers do (2 to 3 microseconds against 1 to 3), which read only what they need.
So no choice can be stale, whatever changes between two calls.

Whoever must ask before a call which implementation would run takes representative ones. Each op has a function
`example(setting)` in its file, which returns the calls of a layer of a model by the name of the op.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, NamedTuple, TypeVar

import torch
from transformers.utils import logging

from ..boundaries import WHOLE, SequenceBoundaries
from ..errors import input_error, unsupported
from ..foreign import swapped
from .autograd import is_transformed
from .invariance import is_batch_invariant


logger = logging.get_logger(__name__)

Op = TypeVar("Op", bound=Callable[..., Any])

_used: dict[str, dict[str, None]] = {}
# The ops in `_used` that compute each token independently and need no boundaries.
_of_tokens: set[str] = set()
# The compiler would unroll the chunks of one reference, and keep all logits of the other.
_NOT_TO_COMPILE = ("gated_delta_rule", "linear_cross_entropy")


Observer = Callable[[str, str, Callable[..., Any]], Callable[..., Any]]
_observer: Observer | None = None


class Implementation(NamedTuple):
    """`run(*args, **kwargs)` computes the op. `verify(*args, **kwargs)` returns why it cannot, or an empty string.

    Without a verifier, it supports every call. `varies` says why the bits of a document depend on the rest of its row, if
    they do.
    """

    run: Callable[..., Any]
    verify: Callable[..., str] = lambda *_, **__: ""
    varies: str = ""


def with_triton(run: Callable, verify: Callable[..., str], reference: Callable) -> dict[str, Implementation]:
    """Return the table of an op with a kernel of this package and a reference in PyTorch."""
    return {"triton": Implementation(run, verify), "reference": Implementation(reference)}


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
    reference_only = _why_reference_only(op, impl) if "reference" in table else ""
    refused: list[str] = []
    for name in table if impl == "auto" else (impl,):
        reason = "" if name == "reference" else reference_only
        reason = reason or table[name].verify(*args, **kwargs)
        if table[name].varies and is_batch_invariant():
            reason = f"is not batch invariant: {table[name].varies}"
        if not reason:
            # Warn on a GPU, where the reference is many times slower than any kernel.
            may_warn = name == "reference" and impl == "auto"
            ran(op, name, refused, args if may_warn else ())
            return observable(op, name, table[name].run)
        refused.append(f"{name}: {reason}")
    fix = 'Use impl="auto"' + (", install the missing package" if impl == "auto" else "") + " or change the input."
    raise input_error(f'an input that impl="{impl}" supports', "; ".join(refused), fix)


def observed(observer: Observer) -> AbstractContextManager[None]:
    """Context manager in which each call of an op runs `observer(op, name, function)`, given what was chosen for it."""
    return swapped(globals(), _observer=observer)


def observable(op: str, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return what to call instead of `function`, so that observers see it. Ops and mixers that choose one call this."""
    return function if _observer is None else _observer(op, name, function)


def _why_reference_only(op: str, impl: str) -> str:
    """Return why no kernel may run an op with a reference at the moment, or an empty string."""
    if is_transformed():
        return "does not support torch.func transforms"
    if impl == "auto" and torch.compiler.is_compiling() and op not in _NOT_TO_COMPILE:
        return "torch.compile fuses the reference instead"
    return ""


def for_rows(kind: type[SequenceBoundaries]) -> Callable[[Op], Op]:
    """Decorate the form of an op, under the same name, for rows with boundaries of this class.

    The form takes the arguments that the op passes to [`run`], and `impl`.
    """

    def register(form: Op) -> Op:
        kind.forms[form.__name__] = form
        return form

    return register


def form_of(op: str, boundaries: SequenceBoundaries) -> Callable[..., Any] | None:
    """Return the form of an op for such a row, or `None` if the implementations of the op compute it.

    Raises:
        `ValueError`: the op has no form for rows of this class.
    """
    if boundaries.kind == WHOLE:
        return None
    if op not in boundaries.forms:
        raise unsupported(f"the op {op}", boundaries.kind, boundaries.instead)
    return boundaries.forms[op]


def run(op: str, impl: str, table: dict[str, Implementation], *args, **kwargs) -> Any:
    """Select an implementation with [`choose`] and call it, or the form of the op for a row that is not whole.

    Under `torch.compile`, a call with `boundaries` runs outside of the graph, because kernel arguments depend on the
    document lengths, which differ between rows. Other calls run as their reference, which the compiler fuses,
    except ops whose reference would be slow or need much memory.
    """
    if "boundaries" not in kwargs:
        _of_tokens.add(op)
    elif kwargs["boundaries"] is not None and torch.compiler.is_compiling():
        return outside_of_graphs(_run, op, impl, table, *args, **kwargs)
    return _run(op, impl, table, *args, **kwargs)


def _run(op, impl, table, *args, **kwargs):
    boundaries = kwargs.get("boundaries")
    form = None if boundaries is None else form_of(op, boundaries)
    if form is not None:
        return form(*args, impl=impl, **kwargs)
    return choose(op, impl, table, *args, **kwargs)(*args, **kwargs)


@torch.compiler.disable(reason="packed rows differ in the lengths of their documents")
def outside_of_graphs(function: Callable, *args: Any, **kwargs: Any) -> Any:
    """Call a function outside of compiled graphs, and say once that it needs no compiler."""
    logger.warning_once(
        "torch.compile is not needed: training and packed rows run outside of its graphs, in kernels of this package."
    )
    return function(*args, **kwargs)


def ran(op: str, name: str, refused: Sequence[str] = (), may_be_slow: Sequence[Any] = ()) -> None:
    """Record that `name` runs `op`, and log it the first time. All ops and models that choose a function call this.

    Args:
        op (`str`):
            Name of the op.
        name (`str`):
            Name of the function.
        refused (`Sequence[str]`, *optional*):
            Why others do not run.
        may_be_slow (`Sequence[Any]`, *optional*):
            Arguments of a call that is slow on a GPU, and then logged as a warning.
    """
    names = _used.get(op)
    if (names is not None and name in names) or torch.compiler.is_compiling():
        return
    _used.setdefault(op, {})[name] = None
    log = logger.warning if any(getattr(x, "is_cuda", False) for x in may_be_slow) else logger.info
    log(f"{op}: {name}" + (f" ({'; '.join(refused)})" if refused else ""))


def implementations_used(isolating: bool = False) -> dict[str, list[str]]:
    """Return the implementations that ran in this process, `{op: [name, ...]}` in order of first use.

    With `isolating=True`, only ops that isolate documents are included, not ops that compute each token independently.
    """
    return {op: list(names) for op, names in _used.items() if not (isolating and op in _of_tokens)}


class Call(NamedTuple):
    """A call of an op: its table of implementations, and the arguments of their verifiers."""

    table: dict[str, Implementation]
    args: tuple
    options: dict[str, Any] = {}


class Setting(NamedTuple):
    """The model whose training step makes the calls: its device and dtype, and the sizes that verifiers look at."""

    device: torch.device | str
    dtype: torch.dtype
    key_dim: int = 128
    value_dim: int = 128
    head_dim: int = 256
    hidden_size: int = 2048
    expert_width: int = 512

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return an input or a weight that is trained."""
        return torch.zeros(shape, dtype=dtype or self.dtype, device=self.device, requires_grad=True)

    def row(self) -> dict[str, Any]:
        """Return the options of an op that mixes tokens, for a packed row `[1, 3, ...]` of two documents."""
        return {"boundaries": SequenceBoundaries.from_lengths([1, 2], device=self.device)}


# The modules of ops with an `example`.
_OPS = (
    "gated_delta_rule kimi_delta_rule convolution attention norm linear rotary glu moe ssd selective_scan cross_entropy"
).split()


def availability(setting: Setting) -> dict[str, tuple[str | None, list[tuple[str, str]]]]:
    """Return the implementations that would train a packed row of a model.

    Returns:
        `dict`: maps the name of each op, as in [`implementations_used`], to a tuple. The tuple holds the
            implementation that would run, or `None`, and a list of the preferred implementations that would not run,
            each with the reason. Attention has one entry for each implementation of Transformers, for example
            `"attention sdpa"`.
    """
    found = {}
    for module in _OPS:
        example = import_module(f"{__package__}.{module}").example
        for op, (table, args, options) in example(setting).items():
            runs, refused = None, []
            for name, implementation in table.items():
                reason = implementation.verify(*args, **options)
                if not reason:
                    runs = name
                    break
                refused.append((name, reason))
            found[op] = runs, refused
    return found


def is_kernel(name: str | None) -> bool:
    """Whether an implementation from [`availability`] is more than PyTorch code that any device can run."""
    return name not in (None, "reference", "torch") and not name.startswith("per_document")
