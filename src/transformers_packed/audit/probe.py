"""Change one document of a packed row, and measure the effect on all other documents.

There are four measurements. Each one is the largest relative change of a *token*, so a leak into the first three
tokens of a long document counts in full:

* causality, on a row of one document: a changed token must not affect earlier tokens. Otherwise the audit is refused.
* forward: replace all tokens of document `i`. The logits of document `j` must not change.
* alone: compare the logits of document `j` in the row with those of the same document in a separate row.
* backward: the gradient of document `j`'s logits with respect to the embeddings of document `i` must be zero.

The audit also measures the noise. In a causal model a later document cannot change an earlier one, so the median
change of these pairs is rounding. The median ignores a single leak from a later to an earlier document. It is capped
at the noise of the same computation with other shapes, so a model whose packing is not causal is still detected. For
`alone`, the noise is the difference between a separate document and the same document at the start of longer rows that
are not packed, or with embeddings that are rounded differently.

The cost for `N` documents is `N + 2` forwards of the row and `N` forwards with backward per source, plus `5 N`
forwards of separate documents.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import median
from typing import Any

import torch
import transformers

from ..boundaries import SequenceBoundaries
from ..data.collator import DataCollatorWithFlattening
from ..errors import input_error
from ..models.registry import inner_model
from ..shared_prompts import SharedPrompts
from .locate import Found, finite, locate_alone, locate_backward, locate_forward, relative_change
from .report import AuditReport, Leak, SourceResult


# The threshold as a multiple of the measured noise.
SAFETY = 8.0

# The source of boundaries of a row with shared prompts.
SHARED = "parent_of"
_KEYS = {
    "position_ids": {"position_ids"},
    "seq_idx": {"seq_idx"},
    "cu_seq_lens": {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"},
}
_KEYS["all"] = set().union(*_KEYS.values())


class Refused(Exception):
    """The model cannot run or cannot be measured. The message gives the reason."""


def conv_width(model: transformers.PreTrainedModel) -> int:
    """Return the width of the model's short convolution from its configuration, or 4 if it is not configured."""
    pattern = re.compile(r"conv.*(kernel|width|l_cache)|d_conv", re.IGNORECASE)
    values = vars(model.config.get_text_config()).items()
    return max((x for name, x in values if pattern.search(name) and isinstance(x, int) and x < 32), default=4)


@dataclass
class Probe:
    """The measurements on one model. Call `prepare` first."""

    model: torch.nn.Module
    lengths: list[int]
    parent_of: Sequence[int]
    width: int
    tolerance: float | None
    gradients: bool
    seed: int
    notes: list[str]

    def __post_init__(self):
        self.inner = inner_model(self.model)
        self.embeddings = self.inner.get_input_embeddings()
        self.device = self.embeddings.weight.device
        compiled = torch._dynamo.OptimizedModule
        self.compiled = any(isinstance(m, compiled) or m._compiled_call_impl is not None for m in self.model.modules())
        self.total = sum(self.lengths)
        ends = accumulate(self.lengths)
        self.documents = [slice(end - n, end) for n, end in zip(self.lengths, ends, strict=True)]
        self.generator = torch.Generator().manual_seed(self.seed)
        self.vocabulary = self._ordinary_tokens()
        self.ids = self.random_ids(self.total)
        # Every token becomes another one.
        size = len(self.vocabulary)
        rank = torch.searchsorted(self.vocabulary, self.ids.cpu())
        shift = torch.randint(1, size, (self.total,), generator=self.generator)
        self.other_ids = self.vocabulary[(rank + shift) % size].to(self.device)

    # Inputs of the model

    def _ordinary_tokens(self) -> torch.Tensor:
        """Return the vocabulary without special tokens, such as padding, image and end tokens."""
        config = self.inner.config
        size = self.embeddings.weight.shape[0]
        size = min(size, getattr(config.get_text_config(), "vocab_size", None) or size)
        special: set[int] = set()
        for part in (config, *vars(config).values()):
            for name, value in (vars(part) if hasattr(part, "__dict__") else {}).items():
                if name.endswith(("_token_id", "_token_ids", "_token_index")):
                    special.update(value if isinstance(value, (list, tuple)) else [value])
        tokens = [token for token in range(size) if token not in special]
        if len(tokens) < 2:
            raise input_error("a vocabulary with at least two ordinary tokens", f"{len(tokens)} of {size}")
        return torch.tensor(tokens)

    def random_ids(self, length: int) -> torch.Tensor:
        size = len(self.vocabulary)
        if length <= size:
            # Use each token once: equal tokens have equal keys, and top-k selects among these arbitrarily.
            choice = torch.randperm(size, generator=self.generator)[:length]
        else:
            choice = torch.randint(0, size, (length,), generator=self.generator)
        return self.vocabulary[choice].to(self.device)

    def packed(self, source: str, lengths: list[int]) -> dict[str, Any]:
        """Return the boundaries of the given kind for a row of such documents, as the collator returns them."""
        if source == SHARED:
            row = SharedPrompts.of(SequenceBoundaries.from_lengths(lengths), self.parent_of).to(self.device)
            return {"cu_seqlens": row.cu_seqlens, "parent_of": torch.tensor(self.parent_of)}
        collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True, on_leak="ignore")
        batch = collator([{"input_ids": [0] * n} for n in lengths])
        wanted = set().union(*(_KEYS[part] for part in source.split("+")))
        found = {name: value for name, value in batch.items() if name in wanted}
        return {name: x.to(self.device) if isinstance(x, torch.Tensor) else x for name, x in found.items()}

    def path(self, document: int) -> list[int]:
        """Return the ancestors of a document and itself, in the order of their tokens."""
        parent = self.parent_of[document]
        return [*(self.path(parent) if parent >= 0 else ()), document]

    def whole(self, document: int) -> torch.Tensor:
        """Return the ids of a document after those of its ancestors."""
        return torch.cat([self.ids[self.documents[part]] for part in self.path(document)])

    def changed(self, document: int) -> torch.Tensor:
        """Return the row's ids `[T]` with all tokens of one document replaced."""
        ids = self.ids.clone()
        ids[self.documents[document]] = self.other_ids[self.documents[document]]
        return ids

    # Runs

    def _call(self, model, ids: torch.Tensor, **kwargs) -> torch.Tensor:
        """Return the logits `[T, vocab]` of the row. Any error of the model is a refusal."""
        inputs = {"input_ids": ids[None]} if ids.ndim == 1 else {"inputs_embeds": ids[None]}
        try:
            output = model(**inputs, **kwargs)
        except Exception as error:
            raise Refused(message(error)) from error
        outputs = (getattr(output, name, None) for name in ("logits", "last_hidden_state"))
        logits = next((x for x in outputs if x is not None), None)
        if logits is None or logits.shape[:2] != (1, len(ids)):
            got = "no logits" if logits is None else f"an output of shape {list(logits.shape)}"
            raise Refused(f"for a row of {len(ids)} tokens the model returns {got}")
        return logits[0]

    @torch.no_grad()
    def logits(self, ids: torch.Tensor, **kwargs) -> torch.Tensor:
        return self._call(self.model, ids, **kwargs).detach()

    def _through(self, change: Callable, ids: torch.Tensor, **kwargs) -> torch.Tensor:
        """Return the logits of the row with these ids after applying `change` to its embeddings `[..., T, hidden]`."""
        if self.compiled:
            # A compiled graph ignores hooks that are registered later.
            return self._call(self.model, change(self.embeddings(ids)), **kwargs)
        changed: list[torch.Tensor] = []

        def hook(_module, _args, output):
            if changed or output.shape[:2] != (1, len(ids)):
                return output
            changed.append(change(output))
            return changed[0]

        with self.embeddings.register_forward_hook(hook):
            return self._call(self.model, ids, **kwargs)

    @torch.no_grad()
    def logits_by_other_rounding(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the logits of the row with each number of its embeddings rounded to one of its neighbours."""

        def change(embeddings: torch.Tensor) -> torch.Tensor:
            up = torch.randint(0, 2, embeddings.shape, generator=self.generator).to(embeddings)
            return embeddings * (1 + torch.finfo(embeddings.dtype).eps * (2 * up - 1))

        return self._through(change, ids).detach()

    def embedding_gradient(self, document: int, projection: torch.Tensor, **kwargs) -> torch.Tensor:
        """Return the size `[T]` of the gradient of a document's projected logits at each token's embedding."""
        leaves = []

        def to_leaf(embeddings: torch.Tensor) -> torch.Tensor:
            leaves.append(embeddings.detach().requires_grad_())
            # A model may write into its embeddings, which autograd forbids for leaves.
            return leaves[-1].clone()

        with torch.enable_grad():
            logits = self._through(to_leaf, self.ids, **kwargs)
            if not leaves:
                raise Refused("the model does not use its input embeddings, so their gradient cannot be measured")
            try:
                (logits[self.documents[document]].float() * projection).sum().backward()
            except Exception as error:
                raise Refused(f"backward: {message(error)}") from error
        gradient = leaves[0].grad
        if gradient is None:
            raise Refused("backward: no gradient reaches the embeddings")
        return gradient.reshape(self.total, -1).float().norm(dim=-1)

    # Measurements

    def _repeat(self, row: torch.Tensor, **kwargs) -> float:
        """Return the relative change between `row` and another run."""
        if not row.isfinite().all():
            raise Refused("the logits are not finite")
        repeated = relative_change(self.logits(self.ids, **kwargs), row).max().item()
        if repeated > 0.05:
            raise Refused(f"two runs on the same row differ by {repeated:.1e}, so leaks cannot be told from noise")
        return repeated

    def prepare(self) -> None:
        """Refuse models that cannot be measured, and take the measurements without packing."""
        row = self.logits(self.ids)
        self.floor = max(torch.finfo(row.dtype).eps, torch.finfo(self.embeddings.weight.dtype).eps)
        self.repeat_noise = repeated = self._repeat(row)
        for place in (self.total // 3, 2 * self.total // 3, self.total - 1):
            ids = torch.cat([self.ids[:place], self.other_ids[place:]])
            change = relative_change(self.logits(ids), row)[:place].max().item()
            if change > max(self.floor, SAFETY * repeated):
                what = f"in a row of one document, tokens from {place} on change earlier ones by {change:.1e}"
                raise Refused(f"not causal: {what}")
        documents = [self.whole(document) for document in range(len(self.lengths))]
        wholes = [self.logits(ids) for ids in documents]
        self.alone = [alone[-n:] for alone, n in zip(wholes, self.lengths, strict=True)]
        noise = [repeated]
        for ids, alone in zip(documents, wholes, strict=True):
            for extra in (17, self.total // 2, self.total):
                tail = self.random_ids(extra)
                longer = self.logits(torch.cat([ids, tail]))[: len(alone)]
                noise.append(relative_change(longer, alone).max().item())
        # Packed kernels may compute in another order, and a model may amplify changes of the last bit.
        rounding = [
            relative_change(self.logits_by_other_rounding(ids), alone).max().item()
            for ids, alone in zip(documents, wholes, strict=True)
        ]
        # A larger change is not rounding: the results depend on the row's length, as with some rotary embeddings.
        self.shape_noise, self.alone_noise = (min(max(x), self.floor**0.5) for x in (noise, noise + rounding))

    def threshold(self, values: list[list[float]], repeat_noise: float) -> float:
        """Return the threshold of an influence matrix. Later documents affect earlier ones only by rounding."""
        if self.tolerance is not None:
            return self.tolerance
        later = [values[i][j] for i in range(len(values)) for j in range(i)]
        return max(self.floor, SAFETY * max(repeat_noise, min(median(later), self.shape_noise)))

    def refusal(self, measure: Callable, *args) -> str | None:
        """Run `measure`. Returns the reason if it was refused, otherwise `None`."""
        try:
            measure(*args)
        except Refused as refusal:
            return str(refusal)
        return None

    def source(self, name: str, report: AuditReport) -> None:
        """Measure one source of boundaries and add the results to the report."""
        kwargs = self.packed(name, self.lengths)
        row = self.logits(self.ids, **kwargs)
        repeated = max(self.repeat_noise, self._repeat(row, **kwargs))
        influence = []
        for i in range(len(self.lengths)):
            change = relative_change(self.logits(self.changed(i), **kwargs), row)
            influence.append([change[document].max().item() for document in self.documents])
        documents = zip(self.documents, self.alone, strict=True)
        alone = [relative_change(row[document], expected).max().item() for document, expected in documents]
        result = SourceResult("isolated", influence=influence, alone=alone)
        forward = self.threshold(influence, repeated)
        noise = max(SAFETY * self.alone_noise, forward) if self.tolerance is None else self.tolerance
        result.thresholds = {"forward": forward, "alone": noise}
        refused = self.gradients and self.refusal(self._backward, row, kwargs, result)
        leaks = self._leaks(name, result)
        if refused:
            # A leak in forward remains a leak. Without one, backward might still leak, so the source is refused.
            if not leaks:
                raise Refused(refused)
            self.notes.append(f"{name}: {refused}")

        def run(model, ids=self.ids):
            return self._call(model, ids, **kwargs)

        for direction in dict.fromkeys(leak.direction for leak in leaks):
            self._locate(leaks, direction, run, 0.0 if repeated == 0.0 else result.thresholds[direction])
        result.verdict = "leaks" if leaks else "isolated"
        report.sources[name] = result
        report.leaks += leaks

    def _backward(self, row: torch.Tensor, kwargs: dict[str, Any], result: SourceResult) -> None:
        """Measure at `[i][j]` the gradient of document `j` in document `i`, relative to that in document `j`."""
        columns = []
        for j, document in enumerate(self.documents):
            projection = torch.randn(row[document].shape, generator=self.generator).to(row.device)
            sizes = self.embedding_gradient(j, projection, **kwargs)
            own = sizes[document].max().item()
            if not 0 < own < float("inf"):
                raise Refused(f"backward: the gradient of document {j} at its own embeddings is {own}")
            columns.append([finite(sizes[other] / own).max().item() for other in self.documents])
        result.backward = [list(line) for line in zip(*columns, strict=True)]
        result.thresholds["backward"] = self.threshold(result.backward, 0.0)

    def _leaks(self, source: str, result: SourceResult) -> list[Leak]:
        leaks, limits = [], result.thresholds
        for direction, matrix in (("forward", result.influence), ("backward", result.backward)):
            for i, line in enumerate(matrix or ()):
                for j, size in enumerate(line):
                    if size > limits[direction] and i not in self.path(j):
                        leaks.append(Leak(source, direction, i, j, size, limits[direction]))
        # A document that another one changes always differs from its separate row.
        touched = {leak.to_document for leak in leaks}
        for j, size in enumerate(result.alone or ()):
            if size > limits["alone"] and j not in touched:
                leaks.append(Leak(source, "alone", None, j, size, limits["alone"]))
        return leaks

    def _locate(self, leaks: list[Leak], direction: str, run: Callable, tolerance: float) -> None:
        """Find the module of the largest leak in this direction into a document long enough to show its kind."""
        forward = [leak for leak in leaks if leak.direction == "forward"]
        # Other pairs repeat leaks of the forward in backward.
        pairs = {leak.pair for leak in forward} if direction == "backward" else set()
        candidates = [leak for leak in leaks if leak.direction == direction and leak.pair not in pairs]
        if not candidates:
            return
        leak = max(candidates, key=lambda leak: (self.lengths[leak.to_document] >= 16, leak.size))
        try:
            found = self._find(leak, run, tolerance)
        except Exception as error:
            # Custom code may not support hooks or separate calls of modules. The leak remains valid.
            self.notes.append(f"{leak.source} {direction}: the search for the module failed: {message(error)}")
            return
        if found is not None:
            module, module_class, kind = found
            if all(leak.direction == "alone" for leak in leaks):
                kind = "positions"
            if direction == "backward":
                # The pair is below the noise in forward, but the module may also leak there.
                kind = {leak.module: leak.kind for leak in forward}.get(module) or kind
            leaks[leaks.index(leak)] = replace(leak, module=module, module_class=module_class, kind=kind)

    def _find(self, leak: Leak, run: Callable, tolerance: float) -> Found | None:
        tokens = self.documents[leak.to_document]
        if leak.from_document is None:
            if self.parent_of[leak.to_document] >= 0:
                return None
            ids = self.ids[tokens]
            run_alone = lambda model: self._call(model, ids)  # noqa: E731
            return locate_alone(self.model, run, run_alone, self.total, tokens, leak.threshold)
        if leak.direction == "forward":
            changed = self.changed(leak.from_document)
            return locate_forward(self.model, run, changed, tokens, self.width, tolerance)
        origin = self.documents[leak.from_document]
        return locate_backward(self.model, run, self.total, origin, tokens, leak.threshold)


def message(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
