"""Locate a leak: find the first module to finish with correct inputs but wrong outputs at a document's tokens.

Inner modules finish before outer ones, so this finds the innermost module. To determine the kind of mixing, the module
runs again separately, with changes to the tokens before the document. A convolution responds only to the last few of
them, a recurrent state to all of them.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_map_only, tree_unflatten

from ..foreign import swapped


# Represents a change that is not finite, such as NaN that spreads from one document to another.
NOT_FINITE = 1e9

Found = tuple[str, str, str]
# Copies all tensors in nested values.
_copied = partial(tree_map_only, torch.Tensor, torch.clone)


def relative_change(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Return the relative change `[T]` of each token of `[T, ...]`, or `NOT_FINITE` where it is undefined."""
    actual, expected = (x.reshape(len(x), -1).float() for x in (actual, expected))
    size = expected.norm(dim=-1)
    # Use at least 5% of the median size, because the rounding of tokens near zero is not relative to their size.
    size = size.clamp_min(0.05 * size.median().item()).clamp_min(torch.finfo(torch.float32).tiny)
    return finite((actual - expected).norm(dim=-1) / size)


def finite(change: torch.Tensor) -> torch.Tensor:
    """Replace values of `change` that are not finite by `NOT_FINITE`."""
    return change.nan_to_num(NOT_FINITE, posinf=NOT_FINITE).clamp_max(NOT_FINITE)


def locate_forward(
    model: torch.nn.Module, run: Callable, changed_ids: torch.Tensor, tokens: slice, width: int, tolerance: float
) -> Found | None:
    """Return name, class and kind of the module that carries the change in `changed_ids` to `tokens`."""
    total = len(changed_ids)
    with torch.no_grad(), eager(model) as plain:
        expected = _records(plain, lambda: run(plain), total, tokens)
        actual = _records(plain, lambda: run(plain, changed_ids), total, tokens)
        key = _first(actual, expected, tolerance)
        if key is None:
            return None
        module = plain.get_submodule(key[0])
        arguments = _arguments(plain, run, key)
        kind = "attention" if _is_attention(module) else "other"
        if kind == "other" and arguments is not None:
            # If the module cannot run separately, its kind remains "other".
            with suppress(Exception):
                args, kwargs = arguments
                kind = _kind_of_mixing(module, args, kwargs, total, tokens, width, tolerance)
    return _named(key[0], module, kind)


def locate_alone(
    model: torch.nn.Module, run: Callable, run_alone: Callable, total: int, tokens: slice, tolerance: float
) -> Found | None:
    """Return the first module that treats the row's `tokens` differently from the same document in a separate row.

    The kind is `"boundary"`, a document cut in the wrong place. The caller changes it to `"positions"` if no document
    changes another one.
    """
    length = tokens.stop - tokens.start
    with torch.no_grad(), eager(model) as plain:
        expected = _records(plain, lambda: run_alone(plain), length, slice(0, length))
        actual = _records(plain, lambda: run(plain), total, tokens)
        key = _first(actual, expected, tolerance)
        return None if key is None else _named(key[0], plain.get_submodule(key[0]), "boundary")


def locate_backward(
    model: torch.nn.Module, run: Callable, total: int, origin: slice, tokens: slice, tolerance: float
) -> Found | None:
    """Return the module that passes gradients from `tokens` of its output to the tokens `origin` of its input."""
    found: list[Found] = []

    def visit(name, module, args, kwargs, output):
        if found:
            return
        gradient = None
        # Some modules cannot run separately or have no gradient.
        with suppress(Exception):
            gradient = _own_gradient(module, args, kwargs, total, tokens)
        if gradient is not None and gradient[origin].max() > tolerance * gradient[tokens].max():
            found.append(_named(name, module, "backward only"))

    with torch.no_grad(), eager(model) as plain:
        with _visits(plain, visit):
            run(plain)
    return found[0] if found else None


@contextmanager
def eager(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Context manager that disables `torch.compile`, because compiled graphs run no hooks."""
    if isinstance(model, torch._dynamo.OptimizedModule):
        model = model._orig_mod
    with swapped(*(vars(x) for x in model.modules() if x._compiled_call_impl), _compiled_call_impl=None):
        yield model


@contextmanager
def _visits(model: torch.nn.Module, visit: Callable) -> Iterator[None]:
    """Call `visit(name, module, args, kwargs, output)` whenever a module finishes, with a copy of its inputs."""
    stack: list[tuple[tuple, dict]] = []
    busy: list[bool] = []

    def before(_module, args, kwargs):
        if not busy:
            # A module may write into its inputs.
            stack.append(_copied((args, kwargs)))

    def after(name):
        def hook(module, _args, _kwargs, output):
            if not busy:
                args, kwargs = stack.pop()
                busy.append(True)
                try:
                    visit(name, module, args, kwargs, output)
                finally:
                    busy.clear()

        return hook

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(after(name), with_kwargs=True))
        yield


def _records(model: torch.nn.Module, run: Callable, total: int, tokens: slice) -> dict[tuple[str, int], tuple]:
    """Record inputs and outputs at `tokens` of every module call, by module name and call number, as they finish."""
    records: dict[tuple[str, int], tuple] = {}
    count: dict[str, int] = {}

    def visit(name, _module, args, kwargs, output):
        count[name] = count.get(name, -1) + 1
        inputs, outputs = (
            {path: x[tokens].clone() for path, x in _by_token(values, total).items()}
            for values in ((args, kwargs), _plain(output))
        )
        records[name, count[name]] = inputs, outputs

    with _visits(model, visit):
        run()
    return records


def _plain(output: Any) -> Any:
    """Convert a model's output object to a tuple, which every version of pytree supports."""
    return output.to_tuple() if hasattr(output, "to_tuple") else output


def by_token(x: Any, total: int) -> torch.Tensor | None:
    """Move the dimension of the row's tokens to the front of `x`. Returns `None` if `x` has no such dimension."""
    if not isinstance(x, torch.Tensor) or not x.ndim or not x.numel():
        return None
    if x.ndim >= 2 and x.shape[1] == total:
        return x.movedim(1, 0)
    for dim, size in enumerate(x.shape):
        if size == total:
            return x.movedim(dim, 0)
    if x.shape[0] % total == 0:
        # One dimension combines tokens with heads or experts.
        return x.unflatten(0, (total, -1))
    if x.ndim == 3 and total < x.shape[-1] < total + 16:
        # Channels first, with the extra outputs of a padded convolution at the end.
        return x[..., :total].movedim(-1, 0)
    return None


def _by_token(values: Any, total: int) -> dict[str, torch.Tensor]:
    """Return the tensors in `values` with a token dimension, moved to the front, by their path in `values`."""
    found = {keystr(path): by_token(leaf, total) for path, leaf in tree_flatten_with_path(values)[0]}
    return {path: x for path, x in found.items() if x is not None}


def _first(actual: dict, expected: dict, tolerance: float) -> tuple[str, int] | None:
    for key, (inputs, outputs) in actual.items():
        if key in expected and inputs:
            wanted_inputs, wanted_outputs = expected[key]
            if not _differ(inputs, wanted_inputs, tolerance) and _differ(outputs, wanted_outputs, tolerance):
                return key
    return None


def _differ(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> bool:
    for path in actual.keys() & expected.keys():
        x, y = actual[path], expected[path]
        if x.numel() != y.numel():
            # The width of masks and similar tensors depends on the row.
            continue
        if not x.is_floating_point():
            if not torch.equal(x, y):
                return True
        elif (relative_change(x, y) > tolerance).any():
            return True
    return False


def _named(name: str, module: torch.nn.Module, kind: str) -> Found:
    return name or "(the model itself)", type(module).__name__, kind


def _is_attention(module: torch.nn.Module) -> bool:
    name = type(module).__name__.lower()
    return bool(re.search("attention|attn", name)) and not re.search("linear|delta|lightning|mamba|recurrent", name)


def _arguments(model: torch.nn.Module, run: Callable, key: tuple[str, int]) -> tuple | None:
    """Return the arguments of one call of a module while `run` runs the model."""
    name, number = key
    calls: list[tuple[tuple, dict] | None] = []

    def hook(_module, args, kwargs):
        calls.append(_copied((args, kwargs)) if len(calls) == number else None)

    with model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True):
        run(model)
    return calls[number] if number < len(calls) else None


def _kind_of_mixing(module, args, kwargs, total: int, tokens: slice, width: int, tolerance: float) -> str:
    """Determine the kind of mixing from the earlier tokens that change a document's output, and the tokens changed."""
    leaves = tree_flatten((args, kwargs))[0]
    # The hidden states are the first floating-point tensor with a token dimension.
    hidden = next((n for n, x in enumerate(leaves) if by_token(x, total) is not None and x.is_floating_point()), None)
    if hidden is None:
        return "other"

    def output(changed: slice) -> torch.Tensor:
        x = leaves[hidden].clone()
        row = by_token(x, total)
        assert row is not None
        row[changed] *= -2.0
        # A module without an output per token raises an `IndexError`.
        return _outputs(module, args, kwargs, total, {hidden: x})[0][tokens]

    start = tokens.start
    expected = output(slice(0, 0))

    def moved(first: int, last: int) -> int:
        """Count the document's tokens that change with the tokens `first` to `last` places before the document."""
        changed = slice(max(start - last, 0), max(start - first + 1, 0))
        if changed.start >= changed.stop:
            return 0
        return int((relative_change(output(changed), expected) > tolerance).sum())

    far, near, last = moved(width, start), moved(2, width - 1), moved(1, 1)
    if far:
        # A boundary that is one token late assigns the document's first token to the previous document.
        return "boundary" if far == 1 and len(expected) > 1 else "state"
    if near:
        return "convolution"
    if last:
        # Only one token crosses: the boundary is one token early, or the convolution has a width of two.
        return "convolution" if width <= 2 else "boundary"
    return "other"


def _outputs(module, args, kwargs, total: int, replaced: dict[int, torch.Tensor]) -> list[torch.Tensor]:
    """Return the module's outputs per token for copies of its arguments, with some leaves replaced."""
    copies, spec = tree_flatten(_copied((args, kwargs)))
    args, kwargs = tree_unflatten([replaced.get(n, leaf) for n, leaf in enumerate(copies)], spec)
    outputs = _by_token(_plain(module(*args, **kwargs)), total)
    return [y for y in outputs.values() if y.is_floating_point()]


def _own_gradient(module, args, kwargs, total: int, tokens: slice) -> torch.Tensor | None:
    """Return the size `[T]` at each token of the gradient of the module's output at `tokens` for its own input."""
    starts = {}
    for n, x in enumerate(tree_flatten((args, kwargs))[0]):
        if by_token(x, total) is not None and x.is_floating_point():
            starts[n] = x.detach().clone().requires_grad_()
    with torch.enable_grad():
        # Some modules write into their inputs, which autograd forbids for leaves.
        outputs = _outputs(module, args, kwargs, total, {n: x * 1 for n, x in starts.items()})
        outputs = [y[tokens].float() for y in outputs if y.requires_grad]
        if not outputs:
            return None
        # Reentrant checkpointing does not support autograd.grad.
        torch.stack([(y * torch.randn_like(y)).sum() for y in outputs]).sum().backward()
    gradient = torch.zeros(total, device=outputs[0].device)
    for x in starts.values():
        per_token = by_token(x.grad, total)
        if per_token is not None:
            gradient += per_token.reshape(total, -1).float().norm(dim=-1).to(gradient.device)
    return gradient
