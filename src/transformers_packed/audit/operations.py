"""Find the operations that give a document other bits in another place.

Operators of PyTorch are seen as a `TorchDispatchMode` sees them, and the ops of this package where an implementation has
been chosen. There are no hooks, with which modules would take other paths. Two calls of an operation belong together if
their inputs have equal bits at the document's tokens. If their results differ there, the operation brings a difference. It
then continues with the results of the document alone. So the inputs of later layers are equal too, and of operations inside
one another only the innermost is found.

What moves tokens to other places, such as the sorting of tokens by experts, hides the operations behind it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .locate import by_token, finite
from .report import Operation


@dataclass(frozen=True)
class Place:
    """The arguments of a forward, and where the document is: its tokens (int64 `[n]`) in a row of the batch."""

    inputs: dict[str, Any]
    row: int
    tokens: torch.Tensor
    around: Callable[[], AbstractContextManager] = torch.no_grad


def difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest absolute difference."""
    # `equal` first: infinity minus itself is no number.
    if not actual.numel() or torch.equal(actual, expected):
        return 0.0
    return finite((actual.double() - expected.double()).abs()).max().item()


# A call of an operation: its name, the fingerprints of its inputs, and its results at the document's tokens.
_Call = tuple[str, frozenset, list[torch.Tensor | None]]


class Watch(TorchDispatchMode):
    """Keep the calls of the document alone, or compare calls in a place with these, `expected`.

    Calls are kept by the kind of operation and the first floating-point input. Their results are kept on the host.
    """

    def __init__(self, model: torch.nn.Module, place: Place, expected: dict[tuple, list[_Call]] | None = None):
        super().__init__()
        self.place, self.expected = place, expected
        self.calls: dict[tuple, list[_Call]] = {}
        self.found: dict[str, Operation] = {}
        self.ops: list[str] = []
        self.busy = False
        weights = (*model.parameters(), *model.buffers())
        self.weights = {x.untyped_storage().data_ptr() for x in weights if _is_plain(x)}
        rows, self.width = place.inputs["input_ids"].shape
        self.rows, self.start, self.length = rows, int(place.tokens[0]), len(place.tokens)
        # Layers see the batch with flattened rows, or without padding.
        before = place.row * self.width + self.start
        self.flat = [(rows * self.width, before)]
        mask = place.inputs.get("attention_mask")
        if mask is not None:
            self.flat.append((int(mask.sum()), int(mask.flatten()[:before].sum())))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.busy:
            return func(*args, **(kwargs or {}))
        name = func._schema.name
        return self.call(f"{name} in {self.ops[-1]}" if self.ops else name, _kind(name), func, args, kwargs or {})

    def op(self, op: str, name: str, function: Callable) -> Callable:
        """Observe an op of this package."""

        def call(*args, **kwargs):
            self.ops.append(f"{op} ({name})")
            try:
                return self.call(self.ops[-1], op, function, args, kwargs)
            finally:
                self.ops.pop()

        return call

    def call(self, name: str, kind: str, function: Callable, args: tuple, kwargs: dict) -> Any:
        # Before the call, which may write into its inputs.
        first, inputs = self.of_inputs((args, kwargs))
        output = function(*args, **kwargs)
        # What is not initialized has random bits, and views have those of their inputs.
        if first is not None and "empty" not in kind and not getattr(function, "is_view", False):
            self.see(name, (kind, first), inputs, output)
        return output

    @torch.no_grad()
    def see(self, name: str, key: tuple, inputs: frozenset, output: Any) -> None:
        self.busy = True
        try:
            # Kernels of attention differ in what they return beside it.
            results = [self.part(x) for x in tree_leaves(output)][: 1 if key[0] == "attention" else None]
            results = [x if x is not None and x.is_floating_point() else None for x in results]
            if self.expected is None:
                kept = [None if x is None else x.to("cpu", copy=True) for x in results]
                self.calls.setdefault(key, []).append((name, inputs, kept))
                return
            candidates = self.expected.get(key, [])
            # A mask may be missing on one side, and attention with a mask may have more heads of keys.
            loose = key[0] == "attention"
            matches = (n for n, x in enumerate(candidates) if loose or inputs <= x[1] or inputs >= x[1])
            first = next(matches, None)
            if first is not None:
                self.compare(name, candidates.pop(first), results)
        finally:
            self.busy = False

    def compare(self, name: str, match: _Call, results: list[torch.Tensor | None]) -> None:
        """Count a call with other results, and replace these."""
        largest = 0.0
        for actual, expected in zip(results, match[2], strict=False):
            if actual is not None and expected is not None and actual.numel() == expected.numel():
                wanted = expected.reshape(actual.shape).to(actual)
                size = difference(actual, wanted)
                if size:
                    actual.copy_(wanted)
                largest = max(largest, size)
        if largest:
            name = name if name == match[0] else f"{name} (alone: {match[0]})"
            operation = self.found.setdefault(name, Operation(name))
            operation.calls, operation.size = operation.calls + 1, max(operation.size, largest)

    @torch.no_grad()
    def of_inputs(self, values: Any) -> tuple[int | None, frozenset]:
        """Return the fingerprint of the first floating-point input, and those of all inputs and weights."""
        self.busy = True
        try:
            first, found = None, set[Any]()
            for x in tree_leaves(values):
                if self.is_weight(x):
                    found.add(("weight", x.data_ptr()))
                elif (part := self.part(x)) is not None:
                    copy = part.clone(memory_format=torch.contiguous_format).flatten()
                    fingerprint = hash(copy.view(torch.uint8).cpu().numpy().tobytes())
                    found.add(fingerprint)
                    if first is None and part.is_floating_point():
                        first = fingerprint
            return first, frozenset(found)
        finally:
            self.busy = False

    def is_weight(self, x: Any) -> bool:
        return _is_plain(x) and x.untyped_storage().data_ptr() in self.weights

    def part(self, x: Any) -> torch.Tensor | None:
        """Return the document's tokens of a tensor as a view `[n, ...]`, or `None` if it has no tokens."""
        if type(x) is not torch.Tensor or not x.ndim or self.is_weight(x):
            return None
        layouts, x = self.flat, x.detach()
        if self.rows > 1 and x.shape[0] % self.rows == 0 and self.width in x.shape[1:]:
            # The first dimension may combine rows with heads.
            x = x.unflatten(0, (self.rows, -1))[self.place.row]
            layouts = [(self.width, self.start)]
        for total, start in layouts:
            tokens = by_token(x, total)
            if tokens is not None:
                tokens = tokens.narrow(0, start, self.length)
                for dim in range(1, tokens.ndim):
                    # Masks and scores have two such dimensions.
                    if tokens.shape[dim] == total:
                        tokens = tokens.narrow(dim, start, self.length)
                return tokens
        return None


def _is_plain(x: Any) -> bool:
    return type(x) in (torch.Tensor, torch.nn.Parameter)


def _kind(name: str) -> str:
    """Return what an operator computes, if the sizes of tensors choose among several."""
    if "attention" in name:
        return "attention"
    return "product" if name.endswith("mm") else name
