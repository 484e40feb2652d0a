"""Which module leaks: the first one to finish whose inputs at a document's tokens are what they should be, and whose
outputs there are not.

Modules inside finish before those around them, so the one found is the innermost. What kind of mixing it is shows when
the module alone runs again on its own input with changes to the tokens before the document: a convolution sees the last
few, a state all of them.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten


# Stands for a change that is not finite: NaN that spreads from one document into another.
NOT_FINITE = 1e9

Found = tuple[str, str, str]


def relative_change(actual: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """`[T]`: how far `[T, ...]` is from what is expected, token by token; `NOT_FINITE` where that has no answer."""
    actual, expected = (x.reshape(len(x), -1).float() for x in (actual, expected))
    size = expected.norm(dim=-1)
    # A token that is nearly zero has no rounding of its own.
    size = size.clamp_min(0.05 * size.median().item()).clamp_min(torch.finfo(torch.float32).tiny)
    return finite((actual - expected).norm(dim=-1) / size)


def finite(change: torch.Tensor) -> torch.Tensor:
    """`change` with `NOT_FINITE` where it is not."""
    return change.nan_to_num(NOT_FINITE, posinf=NOT_FINITE).clamp_max(NOT_FINITE)


def locate_forward(
    model: torch.nn.Module, run: Callable, changed_ids: torch.Tensor, tokens: slice, width: int, tolerance: float
) -> Found | None:
    """Name, class and kind of the module through which the change in `changed_ids` gets to `tokens`."""
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
            # Not every module can run by itself, and then its kind stays open.
            with suppress(Exception):
                kind = _kind_of_mixing(module, *arguments, total, tokens, width, tolerance)
    return _named(key[0], module, kind)


def locate_alone(
    model: torch.nn.Module, run: Callable, run_alone: Callable, total: int, tokens: slice, tolerance: float
) -> Found | None:
    """The module that first treats the row's `tokens` otherwise than the same document by itself.

    The kind is `"boundary"`, a document cut in the wrong place; without any leak between documents it is positions.
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
    """The module whose own gradient gets from `tokens` of its output to the tokens `origin` of its input."""
    found = []

    def visit(name, module, args, kwargs, output):
        if found:
            return
        gradient = None
        # Nor has every module that can run by itself a gradient.
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
    """The model without `torch.compile`, whose graphs run no hooks."""
    if isinstance(model, torch._dynamo.OptimizedModule):
        model = model._orig_mod
    compiled = {module: module._compiled_call_impl for module in model.modules() if module._compiled_call_impl}
    for module in compiled:
        module._compiled_call_impl = None
    try:
        yield model
    finally:
        for module, implementation in compiled.items():
            module._compiled_call_impl = implementation


@contextmanager
def _visits(model: torch.nn.Module, visit: Callable) -> Iterator[None]:
    """Call `visit(name, module, args, kwargs, output)` whenever a module finishes, with the inputs it began with."""
    handles, stack, busy = [], [], []

    def before(_module, args, kwargs):
        if not busy:
            # A module may write into what it was given.
            stack.append(_map(lambda x: x.clone(), (args, kwargs)))

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

    try:
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            handles.append(module.register_forward_hook(after(name), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _map(function: Callable, values: Any) -> Any:
    leaves, spec = tree_flatten(values)
    return tree_unflatten([function(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec)


def _records(model: torch.nn.Module, run: Callable, total: int, tokens: slice) -> dict[tuple[str, int], tuple]:
    """Inputs and outputs of every call of a module at `tokens`, by name and number of the call, as they finish."""
    records, count = {}, {}

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
    """A model's output object as a tuple, which every version of pytree can walk."""
    return output.to_tuple() if hasattr(output, "to_tuple") else output


def by_token(x: Any, total: int) -> torch.Tensor | None:
    """`x` with the row's tokens as the first dimension, or `None` if it has no such dimension."""
    if not isinstance(x, torch.Tensor) or not x.ndim or not x.numel():
        return None
    if x.ndim >= 2 and x.shape[1] == total:
        return x.movedim(1, 0)
    for dim, size in enumerate(x.shape):
        if size == total:
            return x.movedim(dim, 0)
    if x.shape[0] % total == 0:
        # Tokens and heads, or tokens and experts, in one dimension.
        return x.unflatten(0, (total, -1))
    if x.ndim == 3 and total < x.shape[-1] < total + 16:
        # Channels first, with what a padded convolution puts out past the end.
        return x[..., :total].movedim(-1, 0)
    return None


def _by_token(values: Any, total: int) -> dict[str, torch.Tensor]:
    """Every tensor inside `values` that has a dimension for the row's tokens, with it first, by its place there."""
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
            # Masks and the like are as wide as the row.
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
    """What one call of a module is given while `run` runs the model."""
    name, number = key
    calls = []

    def hook(_module, args, kwargs):
        calls.append(_map(lambda x: x.clone(), (args, kwargs)) if len(calls) == number else None)

    handle = model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True)
    try:
        run(model)
    finally:
        handle.remove()
    return calls[number] if number < len(calls) else None


def _kind_of_mixing(module, args, kwargs, total: int, tokens: slice, width: int, tolerance: float) -> str:
    """By which of the tokens before a document move its output, and how many tokens of it move."""
    leaves = tree_flatten((args, kwargs))[0]
    # The hidden states: the first tensor of numbers with a row for each token.
    hidden = next((n for n, x in enumerate(leaves) if by_token(x, total) is not None and x.is_floating_point()), None)
    if hidden is None:
        return "other"

    def output(changed: slice) -> torch.Tensor | None:
        x = leaves[hidden].clone()
        by_token(x, total)[changed] *= -2.0
        outputs = _outputs(module, args, kwargs, total, {hidden: x})
        return outputs[0][tokens] if outputs else None

    start = tokens.start
    expected = output(slice(0, 0))
    if expected is None:
        return "other"

    def moved(first: int, last: int) -> int:
        """How many tokens of the document move with those from `first` to `last` tokens before it."""
        changed = slice(max(start - last, 0), max(start - first + 1, 0))
        if changed.start >= changed.stop:
            return 0
        return int((relative_change(output(changed), expected) > tolerance).sum())

    far, near, last = moved(width, start), moved(2, width - 1), moved(1, 1)
    if far:
        # A boundary one token late leaves the document's first token to the document before it.
        return "boundary" if far == 1 and len(expected) > 1 else "state"
    if near:
        return "convolution"
    if last:
        # All that crosses is one token: a boundary one token early, or a window of two.
        return "convolution" if width <= 2 else "boundary"
    return "other"


def _outputs(module, args, kwargs, total: int, replaced: dict[int, torch.Tensor]) -> list[torch.Tensor]:
    """What the module gives for each token, with copies of its arguments of which some leaves are replaced."""
    leaves, spec = tree_flatten((args, kwargs))
    copies = (leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
    args, kwargs = tree_unflatten([replaced.get(n, leaf) for n, leaf in enumerate(copies)], spec)
    outputs = _by_token(_plain(module(*args, **kwargs)), total)
    return [y for y in outputs.values() if y.is_floating_point()]


def _own_gradient(module, args, kwargs, total: int, tokens: slice) -> torch.Tensor | None:
    """`[T]`: the gradient of the module's output at `tokens` with respect to its own input, by size at each token."""
    starts = {}
    for n, x in enumerate(tree_flatten((args, kwargs))[0]):
        if by_token(x, total) is not None and x.is_floating_point():
            starts[n] = x.detach().clone().requires_grad_()
    with torch.enable_grad():
        # Some modules write into their input, which a leaf does not allow.
        outputs = _outputs(module, args, kwargs, total, {n: x * 1 for n, x in starts.items()})
        outputs = [y[tokens].float() for y in outputs if y.requires_grad]
        if not outputs:
            return None
        # Not autograd.grad, which reentrant checkpointing refuses.
        sum((y * torch.randn_like(y)).sum() for y in outputs).backward()
    gradient = torch.zeros(total, device=outputs[0].device)
    for x in starts.values():
        if x.grad is not None:
            gradient += by_token(x.grad, total).reshape(total, -1).float().norm(dim=-1).to(gradient.device)
    return gradient
