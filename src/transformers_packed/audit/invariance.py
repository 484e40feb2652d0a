"""Measure whether a document has the same bits wherever it stands, and find the operations that change them.

Libraries choose kernels, and the order of their sums, by the sizes of tensors. So the last bits of a document's results may
depend on the length of its row and on the number of its neighbours, although no document changes another one. Each place is
compared with the document alone in a row: hidden states, and log-probabilities in float32.

The place with the largest difference runs once more, and so does the document alone, to find the operations that bring it
(`operations.py`).

Lengths that are multiples of 16 hide one such operation: on a CPU, elementwise functions round the last elements of a
tensor, which fill no vector, in another way. The lengths of rows and batches here add a multiple of 16 to the document's.

The cost for a document is two forwards for each of 19 places and alone, and two to search.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ..boundaries import SequenceBoundaries
from ..foreign import swapped
from ..models.cuda_graphs import find_text_models, graph_length, records_graphs, use_cuda_graphs
from ..models.families import families_of
from ..models.family import Own
from ..models.packed_model import PackedModelMixin
from ..models.releases import CHECKPOINTS
from ..ops.dispatch import observed
from .locate import eager
from .operations import Place, Watch, difference
from .probe import Probe, Refused, message
from .report import Invariance, Placement


# The documents before and after, in tokens. On a GPU they are longer by an odd factor, so that offsets stay odd.
_ROWS: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((), (16,)),
    ((), (61, 35, 144)),
    ((48,), ()),
    ((3, 130, 107), ()),
    ((1,), (15,)),
    ((37,), (11,)),
    ((9, 20, 1), (50,)),
    ((100, 3), (1, 8)),
)
# The padding of the document in a batch, and the other documents of a batch after the longest one, in tokens.
_PADDING, _OTHERS = 32, (5, 11, 27, 5, 13, 3)
_LONGER_ON_GPU = 31


def default_lengths(model: torch.nn.Module) -> list[int]:
    """Return the lengths of the documents to measure, which are longer on a GPU."""
    return [37, 300, 1500] if next(model.parameters()).is_cuda else [37, 112]


class _Measurement:
    """The results of one document in all places. The first one is the document alone."""

    def __init__(self, probe: Probe, ids: torch.Tensor):
        self.probe, self.ids, self.inner = probe, ids, probe.inner
        self.factor = _LONGER_ON_GPU if ids.is_cuda else 1
        self.alone = self.place(ids[None])
        self.results: list[torch.Tensor] = []

    def place(self, ids: torch.Tensor, row: int = 0, start: int = 0, around=torch.no_grad, **inputs: Any) -> Place:
        tokens = torch.arange(start, start + len(self.ids))
        return Place({"input_ids": ids, **inputs}, row, tokens, around)

    def places(self, source: str) -> Iterator[tuple[str, Callable[[], Place]]]:
        """Yield the name of each place, and a function that makes it."""
        yield "alone again", lambda: self.alone
        for row in _ROWS:
            before, after = ([n * self.factor for n in lengths] for lengths in row)
            yield f"row, {sum(before)} before, {sum(after)} after", partial(self.packed, source, before, after)
        for side in ("right", "left"):
            for size in (1, 4, 8):
                yield f"batch of {size}, padded {side}", partial(self.padded, size, side)
        if self.probe.gradients:
            yield "gradient checkpointing", lambda: self.place(self.ids[None], around=self.checkpointing)
            yield "CUDA graph", lambda: self.packed(source, [], [], around=self.in_graphs)

    def with_other_sums(self) -> Iterator[tuple[str, Callable[[], Place]]]:
        """Yield the places in which a document is cut, so that sums over it have another order."""
        yield "shared prompt", self.shared
        yield "leaf of a tree", self.leaf

    def packed(self, source: str, before: Sequence[int], after: Sequence[int], around=torch.no_grad) -> Place:
        lengths = [*before, len(self.ids), *after]
        ids = torch.cat([self.probe.random_ids(sum(before)), self.ids, self.probe.random_ids(sum(after))])
        return self.place(ids[None], 0, sum(before), around, **self.probe.packed(source, lengths))

    def padded(self, size: int, side: str) -> Place:
        n, row = len(self.ids), size // 2
        width = n + _PADDING * self.factor
        documents = [self.probe.random_ids(length) for length in (width, *(x * self.factor for x in _OTHERS))]
        documents = [*documents[:row], self.ids, *documents[row : size - 1]]
        ids = self.ids.new_full((size, width), getattr(self.inner.config, "pad_token_id", None) or 0)
        mask = torch.zeros_like(ids)
        for own, real, document in zip(ids, mask, documents, strict=True):
            part = slice(len(document)) if side == "right" else slice(width - len(document), width)
            own[part], real[part] = document, 1
        inputs: dict[str, Any] = {"attention_mask": mask}
        if side == "left" and "position_ids" in inspect.signature(self.inner.forward).parameters:
            inputs["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)
        return self.place(ids, row, 0 if side == "right" else width - n, **inputs)

    @contextmanager
    def checkpointing(self) -> Iterator[None]:
        if not any(parameter.requires_grad for parameter in self.inner.parameters()):
            raise Refused("the model has no trained parameters")
        modules = [module for module in self.inner.modules() if hasattr(module, "gradient_checkpointing")]
        if not modules:
            raise Refused("the model has no gradient checkpointing")
        options: dict[str, Any] = {"gradient_checkpointing": True}
        options[CHECKPOINTS[0]] = partial(checkpoint, use_reentrant=False)
        with swapped(*map(vars, modules), **options), torch.enable_grad():
            yield

    @contextmanager
    def in_graphs(self) -> Iterator[None]:
        if not self.ids.is_cuda:
            raise Refused("needs a model on a CUDA device")
        texts = find_text_models(self.inner)
        with swapped(*map(vars, texts), layer_graphs=None), torch.enable_grad():
            use_cuda_graphs(self.inner, graph_length(len(self.ids)))
            yield
            if not any(map(records_graphs, texts)):
                raise Refused("the row ran without a graph, for a reason in the log")

    def shared(self) -> Place:
        self.check_shared(2)
        prompt = self.ids[: len(self.ids) // 2]
        # So many that the prompt is worth to be shared.
        ends = [self.probe.random_ids(len(self.ids) - len(prompt)) for _ in range(1 + 128 // len(prompt))]
        ids = torch.stack([self.ids, *(torch.cat([prompt, end]) for end in ends)])
        return self.place(ids, around=self.sharing, attention_mask=torch.ones_like(ids))

    @contextmanager
    def sharing(self) -> Iterator[None]:
        before = self.inner.share_prompts
        self.inner.share_prompts = True
        try:
            with torch.no_grad():
                yield
        finally:
            self.inner.share_prompts = before

    def leaf(self) -> Place:
        self.check_shared(3)
        prompt, turn, end = self.ids.tensor_split(3)
        parts = [prompt, turn, self.probe.random_ids(5), end, self.probe.random_ids(7)]
        lengths, ids = [len(part) for part in parts], torch.cat(parts)
        tokens = torch.arange(len(ids)).split(lengths)
        cu_seqlens = SequenceBoundaries.from_lengths(lengths, device=ids.device).cu_seqlens
        inputs = {"input_ids": ids[None], "cu_seqlens": cu_seqlens, "parent_of": torch.tensor([-1, 0, 0, 1, 1])}
        return Place(inputs, 0, torch.cat([tokens[0], tokens[1], tokens[3]]))

    def check_shared(self, fewest: int) -> None:
        if not isinstance(self.inner, PackedModelMixin) or not families_of(self.inner, Own):
            raise Refused("the model takes no shared prompts")
        if len(self.ids) < fewest:
            raise Refused(f"needs a document of at least {fewest} tokens")

    def differences(self, place: Place) -> list[float]:
        """Return the largest difference in a place for each of [`run`]'s results."""
        if not self.results:
            results = self.run(self.alone)
            if not all(x.isfinite().all() for x in results):
                raise Refused("the results of the document alone are not finite")
            self.results = results
        return [difference(x, y) for x, y in zip(self.run(place), self.results, strict=True)]

    def run(self, place: Place) -> list[torch.Tensor]:
        """Return the document's last hidden states `[n, hidden]` and, if the model has logits, log-probabilities `[n-1]`."""
        try:
            with place.around():
                hidden = self.of_document(self.inner.base_model, "last_hidden_state", place)
                logits = self.of_document(self.probe.model, "logits", place)
        except Refused:
            raise
        except Exception as error:
            raise Refused(message(error)) from error
        if hidden is None:
            raise Refused("the model shows no last hidden states")
        if logits is None:
            return [hidden]
        return [hidden, self.logps(logits)]

    def logps(self, logits: torch.Tensor) -> torch.Tensor:
        return logits[:-1].float().log_softmax(-1).gather(-1, self.ids[1:, None])[:, 0]

    def watched(self, model: torch.nn.Module, place: Place, watch: Watch) -> torch.Tensor:
        """Return the document's logits, or its last hidden states if the model has none."""
        with place.around(), watch, observed(watch.op):
            logits = self.of_document(model, "logits", place)
            results = self.of_document(model, "last_hidden_state", place) if logits is None else logits
        if results is None:
            raise Refused("the model shows no results")
        return results

    def of_document(self, model: torch.nn.Module, name: str, place: Place) -> torch.Tensor | None:
        x = getattr(model(**place.inputs), name, None)
        if x is None:
            return None
        if x.shape[:2] != place.inputs["input_ids"].shape:
            raise Refused(f"for tokens {list(place.inputs['input_ids'].shape)} the model returns {list(x.shape)}")
        return x.detach()[place.row, place.tokens.to(x.device)]


def measure_invariance(probe: Probe, inputs: Sequence[str]) -> Invariance:
    """Measure the differences of all documents of a probe in all places, and find the operations that bring the largest."""
    found: dict[str, Placement] = {}
    worst: tuple[float, Callable] = (0.0, lambda result: None)
    source = _source(probe, inputs)
    for number, part in enumerate(probe.documents):
        document = _Measurement(probe, probe.ids[part])
        for other_sums, places in ((False, document.places(source)), (True, document.with_other_sums())):
            for name, make in places:
                placement = found.setdefault(name, Placement(name, other_sums=other_sums))
                try:
                    sizes = document.differences(place := make())
                except Refused as refusal:
                    placement.reason = placement.reason or str(refusal)
                    continue
                placement.hidden_states.append(sizes[0])
                placement.logps += sizes[1:]
                if max(sizes) > worst[0] and not other_sums:
                    worst = max(sizes), partial(_search, document, place, name, number)
    result = Invariance(list(found.values()))
    try:
        worst[1](result)
    except Exception as error:  # A model may refuse the mode that sees operators. The differences remain valid.
        probe.notes.append(f"the search for operations failed: {message(error)}")
    return result


def _source(probe: Probe, inputs: Sequence[str]) -> str:
    """Return the last of the given kinds of boundaries that the model accepts, or the first one."""
    document = _Measurement(probe, probe.ids[probe.documents[0]])
    refused: list[str] = []
    for source in reversed(inputs):
        reason = probe.refusal(lambda kind: document.run(document.packed(kind, [], [16])), source)
        if reason is None:
            probe.notes.extend(refused)
            return source
        refused.append(f"rows do not pass {source}: {reason}")
    return inputs[0]


def _search(document: _Measurement, place: Place, name: str, number: int, result: Invariance) -> None:
    """Find the operations that bring the differences of a place."""
    result.worst, result.document = name, number
    if place.around == document.in_graphs:
        raise Refused("operations in a CUDA graph are not visible")
    with eager(document.probe.model) as model:
        alone = Watch(document.inner, document.alone)
        expected = document.watched(model, document.alone, alone)
        watch = Watch(document.inner, place, alone.calls)
        actual = document.watched(model, place, watch)
    result.operations = list(watch.found.values())
    result.remainder = difference(actual, expected)
    seen = document.logps(expected) if len(document.results) == 2 else expected
    if difference(seen, document.results[-1]):
        document.probe.notes.append("while operations were searched for, the document alone had other bits")
