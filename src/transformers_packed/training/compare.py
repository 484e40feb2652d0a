"""Compare a packed row with what it stands for, up to rounding and noise as they are measured.

Both sides are measured by the same step of the user: a loss and its gradient, or log-probabilities. Three differences are
no faults:

* Of the order of sums: the relative difference may be that of `BARS`.
* Of noise, where code draws random numbers: each side runs `RUNS` times. The means of both may differ by the bar and
  `STANDARD_ERRORS` standard errors of their difference, which is a difference of at most 4 standard deviations of a run.
  The runs of one side may spread `SPREAD` times as much as those of the other. Two sides with the same noise fail the
  first test about once in 3,000 times, and the second one about once in 1,700.
* Of rounding, where a model amplifies it: both sides have to be equal in the next precision. In the precision of the
  training, they run `RUNS` times with embeddings that are rounded another way, and what is then allowed for noise of the
  row holds. Where the next precision is not available, the difference remains one, and its error says what is unknown.

A value that is finite on one side alone is a difference, whatever the noise. If a value is finite on neither side,
nothing was compared, and the result says so.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ..audit.isolation import UnseenError
from ..errors import described, input_error, is_out_of_memory
from ..models.float8_marks import has_float8


PADDED = "Use padded batches, or pass verify=False to train anyway."
BATCH = "the padded batch of the same documents"
# Largest relative difference of a loss, and of other values, by the precision of the matrix products. In bfloat16, gradients
# of the row and of the padded batch were 1 to 5 % apart with 4 to 24 layers, and a loss per sample 36 %.
BARS = {"float32": (1e-4, 1e-3), "tf32": (1e-3, 2e-2), "half": (2e-2, 0.15), "float8": (5e-2, 0.5)}
RUNS, STANDARD_ERRORS, SPREAD = 5, 6, 10
# A loss this small is compared as if it were this large.
_LEAST_LOSS = 1e-3
LOSS, GRADIENT = "loss", "gradient"
# What a step showed, by name. What only one side shows, or in another shape, is not compared.
Measured = dict[str, torch.Tensor]
Result = TypeVar("Result")


class DifferenceError(ValueError):
    """Packed training differs from what it stands for."""


# What a check found on another process.
_ELSEWHERE = {
    DifferenceError: "another process found a difference",
    UnseenError: "another process has no row, or no gradients, for it",
}


class Side:
    """The runs of one side of a comparison.

    Args:
        step (`Callable`):
            Runs a step and returns what it showed.
    """

    def __init__(self, step: Callable[[], Measured]):
        start = time.perf_counter()
        self.step, self.runs = step, [step()]
        self.seconds = time.perf_counter() - start

    def repeat(self) -> None:
        """Measure the noise."""
        while len(self.runs) < RUNS:
            self.runs.append(self.step())

    def all(self, name: str) -> torch.Tensor:
        """The values of all runs, in float64."""
        return torch.stack([run[name].double().flatten() for run in self.runs])

    @property
    def loss(self) -> float:
        """The mean loss of all runs."""
        return self.all(LOSS).mean().item()


def together(check: Callable[[], Result], anywhere: Callable[[bool], bool] = bool) -> Result:
    """The result of a check. What it finds on any process, a difference or a reason against the check, is raised on all.

    Trainers exchange tensors in what follows, where a process that is alone would wait for the others.
    """
    error: DifferenceError | UnseenError | None = None
    try:
        found = check()
    except (DifferenceError, UnseenError) as raised:
        error = raised
    for kind, elsewhere in _ELSEWHERE.items():
        if anywhere(isinstance(error, kind)):
            raise error if isinstance(error, kind) else kind(elsewhere)
    return found


class Exact(NamedTuple):
    """How to tell whether a difference is rounding.

    Args:
        name (`str`):
            The next precision.
        use (`Callable`):
            Makes a context in which steps have that precision.
        there (`Callable`):
            Returns the key of `BARS` there, and the precision after it.
        round (`Callable`):
            Makes a context in which each step rounds the embeddings another way.
        refused (`str`, *optional*):
            Why the next precision is not available.
    """

    name: str
    use: Callable[[], AbstractContextManager]
    there: "Callable[[], tuple[str, Exact | None]]"
    round: Callable[[], AbstractContextManager]
    refused: str | None = None


def find_difference(
    row: Side,
    other: Side,
    precision: str,
    exact: Exact | None = None,
    *,
    what: str = BATCH,
    fix: str = PADDED,
    anywhere: Callable[[bool], bool] = bool,
) -> str:
    """Compare a row with what it stands for. Returns why a difference is none, or nothing.

    Args:
        row, other ([`Side`]):
            The row and the other side, with one run each.
        precision (`str`):
            The key of `BARS`.
        exact ([`Exact`], *optional*):
            The next precision.
        what (`str`, *optional*):
            The other side in words.
        fix (`str`, *optional*):
            What to do about a difference.
        anywhere (`Callable`, *optional*):
            Whether a condition holds on any process. All processes then run the same steps.

    Raises:
        [`DifferenceError`]: what differs.
        [`UnseenError`]: why nothing could be compared.
    """
    together(lambda: _check_finite(row.runs[0], other.runs[0], what, fix), anywhere)
    if not anywhere(_difference(row, other, precision, what) is not None):
        return ""
    row.repeat()
    other.repeat()
    different = _difference(row, other, precision, what)
    if not anywhere(different is not None):
        values = [side.all(name) for name, _ in _bars(row, other, precision) for side in (row, other)]
        noise = max(_spread(runs) / _size(runs) for runs in values)
        return f", which differs from run to run by {noise:.1%}"
    why = "" if exact is None else _beyond_rounding(row, other, precision, exact, what, anywhere)
    if exact is not None and not anywhere(different is not None and why is not None):
        return f", which differ by rounding: {exact.name} is equal"
    if different is None or why is None:
        raise DifferenceError(_ELSEWHERE[DifferenceError])
    raise DifferenceError(" ".join(filter(None, (different, why, fix))))


def relative_error(row: Side, other: Side, name: str) -> float:
    """The relative difference of the means of a value."""
    a, b = row.all(name), other.all(name)
    return (a.mean(0) - b.mean(0)).norm().item() / _size(b)


def _check_finite(row: Measured, other: Measured, what: str, fix: str) -> None:
    """Raise the error of what is finite on one side alone, and otherwise of what is finite on neither."""
    neither = []
    for name in row:
        finite = [bool(values[name].isfinite().all()) for values in (row, other) if name in values]
        if len(set(finite)) > 1:
            bad, good = ("the row", what) if finite[1] else (what, "the row")
            raise DifferenceError(str(input_error(f"a finite {name} of {bad}, as of {good}", "NaN or infinity", fix)))
        neither += [] if finite[0] else [name]
    if neither:
        raise UnseenError(f"the row and {what} both have NaN or infinity in their {neither[0]}")


def _difference(row: Side, other: Side, precision: str, what: str, rounded: bool = False) -> str | None:
    """The first value whose means, or whose noise, differ by more than they may.

    Runs that are `rounded` in other ways may change little on one side: a router's choice changes or does not.
    """
    for name, bar in _bars(row, other, precision):
        a, b = row.all(name), other.all(name)
        size = _size(b, _LEAST_LOSS if name == LOSS else 0.0)
        error = (a.mean(0) - b.mean(0)).norm().item()
        spread, expected = _spread(a), _spread(b)
        # Of the standard error of the difference of two means.
        noise = STANDARD_ERRORS * (spread**2 / len(a) + expected**2 / len(b)) ** 0.5
        if not error <= bar * size + noise:
            return _in_words(name, row, other, error / size, (spread + expected) / size, what)
        # Noise that only one side has, such as of rows that are mixed at random, tells them apart too.
        least, most = (expected, spread) if rounded else sorted((spread, expected))
        if not most <= bar * size + SPREAD * least:
            wanted = f"a {name} of the row that varies from run to run like that of {what}, by {expected / size:.1e}"
            return str(input_error(wanted, f"{spread / size:.1e}"))
    return None


def _bars(row: Side, other: Side, precision: str) -> list[tuple[str, float]]:
    """The values to compare, which both sides show in the same shape, with their bars."""
    a, b = row.runs[0], other.runs[0]
    names = [name for name in a if name in b and a[name].shape == b[name].shape]
    return [(name, BARS[precision][name != LOSS]) for name in names]


def _in_words(name: str, row: Side, other: Side, error: float, noise: float, what: str) -> str:
    varies = f", although runs differ by {noise:.1e} at most" if noise else ""
    if name == LOSS:
        got = f"{row.loss:.4f}, which differs by {error:.1e}{varies}"
        return str(input_error(f"the loss {other.loss:.4f} of {what}", got))
    got = f"a relative difference of {error:.1e}{varies}"
    return str(input_error(f"a {name} of the row that equals that of {what}", got))


def _size(runs: torch.Tensor, least: float = 0.0) -> float:
    """The norm of the mean of runs, at least `least` and not 0."""
    return max(runs.mean(0).norm().item(), least, 1e-300)


def _spread(runs: torch.Tensor) -> float:
    """The standard deviation of a run, as a norm over all values."""
    return (runs.var(0).sum().sqrt()).item() if len(runs) > 1 else 0.0


def _beyond_rounding(
    row: Side, other: Side, precision: str, exact: Exact, what: str, anywhere: Callable[[bool], bool]
) -> str | None:
    """Why rounding does not explain a difference, or may not, or `None` if it does.

    Gradients of some models change by half with the order of sums in bfloat16, and those of a router by the expert that it
    chooses, so no bar alone tells.
    """
    differs, unknown = _differs_in(exact, row, other, precision, what, anywhere)
    if differs:
        return f"This is more than rounding: {exact.name} differs too."
    with exact.round():
        rounded = Side(row.step), Side(other.step)
        for side in rounded:
            side.repeat()
    changes_less = _difference(*rounded, precision, what, rounded=True) is not None
    if changes_less:
        shown = "" if unknown else f"{exact.name} shows no difference, and "
        return f"This is more than rounding: {shown}other rounding changes less."
    if unknown:
        return f"Other rounding changes as much. {exact.name} would show whether there is a fault too, but {unknown}."
    return None


def _differs_in(
    exact: Exact, row: Side, other: Side, precision: str, what: str, anywhere: Callable[[bool], bool]
) -> tuple[bool, str]:
    """Whether both sides differ in the next precision, and why this is unknown, if so."""
    with ExitStack() as stack:
        unknown = exact.refused or ""
        if not unknown:
            try:
                # Wider weights may not fit. No process waits for another one here.
                stack.enter_context(exact.use())
            except Exception as error:
                unknown = _stopped(error)
        if anywhere(bool(unknown)):
            return False, unknown or "it stopped on another process"
        try:
            sides = Side(row.step), Side(other.step)
            find_difference(*sides, *exact.there(), what=what, anywhere=anywhere)
            return len(_bars(*sides, precision)) < len(_bars(row, other, precision)), ""
        except (DifferenceError, UnseenError):
            return True, ""
        except Exception as error:
            if dist.is_initialized() and dist.get_world_size() > 1:
                # Other processes wait for the next result of this one.
                raise
            return False, _stopped(error)


def _stopped(error: Exception) -> str:
    return "it does not fit the memory" if is_out_of_memory(error) else f"it stopped: {described(error)}"


def check_leak(leak: float, documents: int) -> None:
    if leak != 0:
        expected = f"no gradient between the {documents} documents of a row"
        raise DifferenceError(str(input_error(expected, f"one of {leak:.1e} of that within them", PADDED)))


def check_bits(difference: float) -> None:
    if difference != 0:
        expected = "the bits of each document alone, for batch_invariant=True"
        fix = "Find the operation with `transformers-packed audit --invariance --batch-invariant`, or remove it."
        raise DifferenceError(str(input_error(expected, f"a difference of {difference:.1e}", fix)))


def precision_of(model: torch.nn.Module, args: Any = None) -> str:
    """The precision of the matrix products, a key of `BARS`. `args` are those of a Trainer, which runs autocast."""
    weight = next(x for x in model.parameters() if x.is_floating_point())
    device = weight.device.type
    if has_float8(model):
        return "float8"
    autocast = torch.is_autocast_enabled(device) if args is None else args.bf16 or args.fp16
    if weight.dtype.itemsize < 4 or autocast:
        return "half"
    return "float32" if device == "cpu" else "tf32"
