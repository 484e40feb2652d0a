"""`audit_model`: change one document of a packed row, and see which other documents notice.

Four measurements, each the largest relative change of a *token*, so that a leak into the first three tokens of a long
document counts in full:

* causality, on a row of one document: a change at a token alters nothing before it. Otherwise nothing else has meaning.
* forward: all tokens of document `i` become other ones; the logits of document `j` must not move.
* alone: the logits of document `j` in the row against those of the document by itself.
* backward: the gradient of document `j`'s logits with respect to the embeddings of document `i` must be zero.

What is no leak is measured too. Causality forbids that a later document moves an earlier one, so the median of those
pairs is rounding: the median, because one planted leak from a later to an earlier document must still be seen, and at
most what other shapes of the same computation amount to, because a model that packs without causality must be seen
too. For `alone` it is the difference between a document by itself and at the start of longer rows that are not packed,
or with embeddings that are rounded otherwise.
Cost: for `N` documents `N + 2` forwards of the row per source, `N` forwards with backward, and `5 N` of single documents.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import median
from typing import Any

import torch
import transformers

from ..data.collator import DataCollatorWithFlattening
from ..errors import input_error
from ..models.registry import transformers_model
from .locate import finite, locate_alone, locate_backward, locate_forward, relative_change
from .model_state import audit_state
from .report import SOURCES, AuditReport, Leak, SourceResult


# How many times its measured noise a figure may be.
SAFETY = 8.0

_KEYS = {
    "position_ids": {"position_ids"},
    "seq_idx": {"seq_idx"},
    "cu_seq_lens": {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"},
}
_KEYS["all"] = set().union(*_KEYS.values())


class Refused(Exception):
    """The model cannot be run or measured; the message says why."""


def audit_model(
    model: torch.nn.Module,
    *,
    lengths: Sequence[int] | None = None,
    inputs: Sequence[str] = ("position_ids", "all"),
    tolerance: float | None = None,
    gradients: bool = True,
    seed: int = 0,
) -> AuditReport:
    """Measure whether a causal language model keeps the documents of a packed row apart, in forward and backward.

    The model may be any that Transformers can run: built-in, of this package or with code of its own; in any dtype, on
    any device, with any attention implementation, with gradient checkpointing, inside PEFT or `torch.compile`. Of a
    vision-language model it is the text that is audited. It runs in training mode with every dropout 0 and without a
    cache, and is afterwards exactly as it was before: mode, hooks, gradients, configuration, buffers, random state.

    Args:
        model (`torch.nn.Module`):
            The model.
        lengths (`Sequence[int]`, *optional*):
            The documents of the row, in tokens: two at least. By default short and long ones in turn, about 400 tokens
            in all: 1, 2, the width of the model's convolution less 1, 63, 64, 65 and 200.
        inputs (`Sequence[str]`, *optional*, defaults to `("position_ids", "all")`):
            Which boundaries to give the model: `"position_ids"`, `"seq_idx"`, `"cu_seq_lens"` (with `max_length_q` and
            `max_length_k`), several of these joined by `+`, or `"all"` of them, as the collator does with every flag
            set.
        tolerance (`float`, *optional*):
            The relative change that is no leak, in place of one from measured noise.
        gradients (`bool`, *optional*, defaults to `True`):
            Whether to look at gradients too.
        seed (`int`, *optional*, defaults to 0):
            Of the tokens.

    Returns:
        [`AuditReport`]: with a verdict per source. A source that the model raises on is `"refused"`, with its message;
        a model that is not causal, or that cannot be run at all, is refused for every source.

    Raises:
        `ValueError`: an argument is malformed, there is no model of Transformers in `model`, or it has no weights.

    Example:

    ```python
    >>> from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
    >>> from transformers_packed import audit_model, patch_model
    >>> config = Qwen3_5TextConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=4)
    >>> report = audit_model(patch_model(Qwen3_5ForCausalLM(config)), lengths=[20, 1, 30])
    >>> report.ok, report.leaks
    (True, [])

    ```
    """
    inner = transformers_model(model) if isinstance(model, torch.nn.Module) else None
    if inner is None:
        raise input_error("a model of Transformers, or a module with one inside", type(model).__name__)
    for name, module in inner.named_modules():
        # What accelerate offloads waits on the meta device, too, and comes back when its module is called.
        offloaded = hasattr(module, "_hf_hook") and module is not inner.get_input_embeddings()
        if not offloaded and any(parameter.is_meta for parameter in module.parameters(recurse=False)):
            fix = "Load or initialize its weights first; keep embeddings out of what is offloaded."
            raise input_error("a model with weights", f"{name} on the meta device", fix)
    if not inputs or isinstance(inputs, str) or any(not set(name.split("+")) <= set(SOURCES) for name in inputs):
        raise input_error(f"inputs among {', '.join(SOURCES)}", repr(inputs))
    width = conv_width(inner)
    lengths = list(lengths) if lengths is not None else [65, 1, 200, max(width - 1, 1), 63, 2, 64]
    if len(lengths) < 2 or any(not isinstance(n, int) or n < 1 for n in lengths):
        raise input_error("lengths of two documents or more, each of at least 1 token", lengths)
    parameter, cls = next(inner.parameters()), type(inner)
    cuda = parameter.device.type == "cuda"
    settings = {
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(parameter.device) if cuda else parameter.device.type,
        "attention": str(getattr(inner.config.get_text_config(), "_attn_implementation", None)),
        "torch": f"torch {torch.__version__}",
        "transformers": f"transformers {transformers.__version__}",
        "seed": seed,
    }
    report = AuditReport(f"{cls.__module__.partition('.')[0]}.{cls.__name__}", settings, lengths, {}, [])
    with audit_state(model, report.notes):
        probe = Probe(model, lengths, width, tolerance, gradients, seed, report.notes)
        refusal = probe.refusal(probe.prepare)
        for name in dict.fromkeys(inputs):
            refused = refusal or probe.refusal(probe.source, name, report)
            if refused:
                report.sources[name] = SourceResult("refused", refused)
    report.leaks.sort(key=lambda leak: -leak.size)
    return report


def conv_width(model: torch.nn.Module) -> int:
    """The width of the model's short convolution by its configuration, 4 if that does not say."""
    pattern = re.compile(r"conv.*(kernel|width|l_cache)|d_conv", re.IGNORECASE)
    values = vars(model.config.get_text_config()).items()
    return max((x for name, x in values if pattern.search(name) and isinstance(x, int) and x < 32), default=4)


@dataclass
class Probe:
    """The runs on one model; `prepare` first."""

    model: torch.nn.Module
    lengths: list[int]
    width: int
    tolerance: float | None
    gradients: bool
    seed: int
    notes: list[str]

    def __post_init__(self):
        self.inner = transformers_model(self.model)
        self.embeddings = self.inner.get_input_embeddings()
        self.device = self.embeddings.weight.device
        compiled = torch._dynamo.OptimizedModule
        self.compiled = any(isinstance(m, compiled) or m._compiled_call_impl is not None for m in self.model.modules())
        self.total = sum(self.lengths)
        ends = accumulate(self.lengths)
        self.documents = [slice(end - n, end) for n, end in zip(self.lengths, ends, strict=True)]
        self.generator = torch.Generator().manual_seed(self.seed)
        self.vocabulary = self._ordinary_tokens()
        self.ids = self._random_ids(self.total)
        # Every token becomes another one.
        size = len(self.vocabulary)
        rank = torch.searchsorted(self.vocabulary, self.ids.cpu())
        shift = torch.randint(1, size, (self.total,), generator=self.generator)
        self.other_ids = self.vocabulary[(rank + shift) % size].to(self.device)

    # What the model is given

    def _ordinary_tokens(self) -> torch.Tensor:
        """The vocabulary without the tokens that mean something to the model: padding, images, ends."""
        config = self.inner.config
        size = self.embeddings.weight.shape[0]
        size = min(size, getattr(config.get_text_config(), "vocab_size", None) or size)
        special = set()
        for part in (config, *vars(config).values()):
            for name, value in (vars(part) if hasattr(part, "__dict__") else {}).items():
                if name.endswith(("_token_id", "_token_ids", "_token_index")):
                    special.update(value if isinstance(value, (list, tuple)) else [value])
        tokens = [token for token in range(size) if token not in special]
        if len(tokens) < 2:
            raise input_error("a vocabulary of two ordinary tokens or more", f"{len(tokens)} of {size}")
        return torch.tensor(tokens)

    def _random_ids(self, length: int) -> torch.Tensor:
        size = len(self.vocabulary)
        if length <= size:
            # Each token once: equal tokens make equal keys, and which of those a top-k takes is chance.
            choice = torch.randperm(size, generator=self.generator)[:length]
        else:
            choice = torch.randint(0, size, (length,), generator=self.generator)
        return self.vocabulary[choice].to(self.device)

    def _packed(self, source: str) -> dict[str, Any]:
        """The boundaries that the documented collator gives for the row, of the given kind."""
        collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True, on_leak="ignore")
        batch = collator([{"input_ids": [0] * n} for n in self.lengths])
        wanted = set().union(*(_KEYS[part] for part in source.split("+")))
        found = {name: value for name, value in batch.items() if name in wanted}
        return {name: x.to(self.device) if isinstance(x, torch.Tensor) else x for name, x in found.items()}

    def changed(self, document: int) -> torch.Tensor:
        """The row's ids `[T]` with other tokens in one document."""
        ids = self.ids.clone()
        ids[self.documents[document]] = self.other_ids[self.documents[document]]
        return ids

    # Runs

    def _call(self, model, ids: torch.Tensor, **kwargs) -> torch.Tensor:
        """Logits `[T, vocab]` of the row; whatever the model raises is a refusal."""
        inputs = {"input_ids": ids[None]} if ids.ndim == 1 else {"inputs_embeds": ids[None]}
        try:
            output = model(**inputs, **kwargs)
        except Exception as error:
            raise Refused(_message(error)) from error
        outputs = (getattr(output, name, None) for name in ("logits", "last_hidden_state"))
        logits = next((x for x in outputs if x is not None), None)
        if logits is None or logits.shape[:2] != (1, len(ids)):
            got = "no logits" if logits is None else f"an output of shape {list(logits.shape)}"
            raise Refused(f"for a row of {len(ids)} tokens the model gives {got}")
        return logits[0]

    @torch.no_grad()
    def logits(self, ids: torch.Tensor, **kwargs) -> torch.Tensor:
        return self._call(self.model, ids, **kwargs).detach()

    def _through(self, change: Callable, ids: torch.Tensor, **kwargs) -> torch.Tensor:
        """Logits of the row with these ids, whose embeddings `[..., T, hidden]` are what `change` makes of them."""
        if self.compiled:
            # A compiled graph does not run hooks that were added later.
            return self._call(self.model, change(self.embeddings(ids)), **kwargs)
        changed = []

        def hook(_module, _args, output):
            if changed or output.shape[:2] != (1, len(ids)):
                return output
            changed.append(change(output))
            return changed[0]

        handle = self.embeddings.register_forward_hook(hook)
        try:
            return self._call(self.model, ids, **kwargs)
        finally:
            handle.remove()

    @torch.no_grad()
    def logits_by_other_rounding(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of the row if each number of its embeddings were rounded to one of its neighbours."""

        def change(embeddings: torch.Tensor) -> torch.Tensor:
            up = torch.randint(0, 2, embeddings.shape, generator=self.generator).to(embeddings)
            return embeddings * (1 + torch.finfo(embeddings.dtype).eps * (2 * up - 1))

        return self._through(change, ids).detach()

    def embedding_gradient(self, document: int, projection: torch.Tensor, **kwargs) -> torch.Tensor:
        """`[T]`: the size of the gradient of a document's projected logits at each token's embedding."""
        leaves = []

        def to_leaf(embeddings: torch.Tensor) -> torch.Tensor:
            leaves.append(embeddings.detach().requires_grad_())
            # A model may write into its embeddings, which no leaf allows.
            return leaves[-1].clone()

        with torch.enable_grad():
            logits = self._through(to_leaf, self.ids, **kwargs)
            if not leaves:
                raise Refused("the model does not use its input embeddings, so no gradient can be measured there")
            try:
                (logits[self.documents[document]].float() * projection).sum().backward()
            except Exception as error:
                raise Refused(f"backward: {_message(error)}") from error
        gradient = leaves[0].grad
        if gradient is None:
            raise Refused("backward: no gradient reaches the embeddings")
        return gradient.reshape(self.total, -1).float().norm(dim=-1)

    # Measurements

    def _repeat(self, row: torch.Tensor, **kwargs) -> float:
        """How far another run is from `row`."""
        if not row.isfinite().all():
            raise Refused("the logits are not finite")
        repeated = relative_change(self.logits(self.ids, **kwargs), row).max().item()
        if repeated > 0.05:
            raise Refused(f"two runs on the same row differ by {repeated:.1e}, so leaks could not be told from chance")
        return repeated

    def prepare(self) -> None:
        """Refuse what cannot be measured, and take the figures that packing has no part in."""
        row = self.logits(self.ids)
        self.floor = max(torch.finfo(row.dtype).eps, torch.finfo(self.embeddings.weight.dtype).eps)
        self.repeat_noise = repeated = self._repeat(row)
        for place in (self.total // 3, 2 * self.total // 3, self.total - 1):
            ids = torch.cat([self.ids[:place], self.other_ids[place:]])
            change = relative_change(self.logits(ids), row)[:place].max().item()
            if change > max(self.floor, SAFETY * repeated):
                what = f"in a row of one document, tokens from {place} on change earlier ones by {change:.1e}"
                raise Refused(f"not causal: {what}")
        self.alone = [self.logits(self.ids[document]) for document in self.documents]
        noise = [repeated]
        for document, alone in zip(self.documents, self.alone, strict=True):
            for extra in (17, self.total // 2, self.total):
                tail = self._random_ids(extra)
                longer = self.logits(torch.cat([self.ids[document], tail]))[: len(alone)]
                noise.append(relative_change(longer, alone).max().item())
        # What packs may compute in another order, and a model may make much of the last bit.
        rounding = [
            relative_change(self.logits_by_other_rounding(self.ids[document]), alone).max().item()
            for document, alone in zip(self.documents, self.alone, strict=True)
        ]
        # More than this is no rounding: the results depend on the length of the row (some rotary embeddings do that).
        self.shape_noise, self.alone_noise = (min(max(x), self.floor**0.5) for x in (noise, noise + rounding))

    def threshold(self, values: list[list[float]], repeat_noise: float) -> float:
        """For a matrix of influences: what later documents seem to do to earlier ones is rounding."""
        if self.tolerance is not None:
            return self.tolerance
        later = [values[i][j] for i in range(len(values)) for j in range(i)]
        return max(self.floor, SAFETY * max(repeat_noise, min(median(later), self.shape_noise)))

    def refusal(self, measure: Callable, *args) -> str | None:
        """Why `measure` could not be taken; `None` if it could."""
        try:
            measure(*args)
        except Refused as refusal:
            return str(refusal)

    def source(self, name: str, report: AuditReport) -> None:
        """Write everything about one source of boundaries into the report."""
        kwargs = self._packed(name)
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
            # What is wrong already in forward is no less wrong; what is right there may not be in backward.
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
        """Measure at `[i][j]` document `j`'s gradient in document `i`, relative to that in itself."""
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
                    if i != j and size > limits[direction]:
                        leaks.append(Leak(source, direction, i, j, size, limits[direction]))
        # A document that another one changes cannot be what it is alone.
        touched = {leak.to_document for leak in leaks}
        for j, size in enumerate(result.alone):
            if size > limits["alone"] and j not in touched:
                leaks.append(Leak(source, "alone", None, j, size, limits["alone"]))
        return leaks

    def _locate(self, leaks: list[Leak], direction: str, run: Callable, tolerance: float) -> None:
        """Name the module of one leak of the direction: the largest into a document long enough to show its kind."""
        forward = {(leak.from_document, leak.to_document) for leak in leaks if leak.direction == "forward"}
        candidates = [leak for leak in leaks if leak.direction == direction]
        if direction == "backward":
            # The rest is the forward's leak again.
            candidates = [leak for leak in candidates if (leak.from_document, leak.to_document) not in forward]
        candidates = [leak for leak in candidates if self.lengths[leak.to_document] >= 16] or candidates
        if not candidates:
            return
        leak = max(candidates, key=lambda leak: leak.size)
        try:
            found = self._find(leak, run, tolerance)
        except Exception as error:
            # Hooks and single modules meet code that nobody wrote for them. The leak stands all the same.
            found = None
            self.notes.append(f"{leak.source} {direction}: the module could not be looked for: {_message(error)}")
        if found is not None:
            module, module_class, kind = found
            if direction == "alone" and len({leak.direction for leak in leaks}) == 1:
                kind = "positions"
            if direction == "backward":
                # A pair that is below the noise in forward, in a module that leaks there too.
                kind = {leak.module: leak.kind for leak in leaks if leak.direction == "forward"}.get(module, kind)
            leaks[leaks.index(leak)] = replace(leak, module=module, module_class=module_class, kind=kind)

    def _find(self, leak: Leak, run: Callable, tolerance: float):
        tokens = self.documents[leak.to_document]
        if leak.direction == "forward":
            changed = self.changed(leak.from_document)
            return locate_forward(self.model, run, changed, tokens, self.width, tolerance)
        if leak.direction == "backward":
            origin = self.documents[leak.from_document]
            return locate_backward(self.model, run, self.total, origin, tokens, leak.threshold)
        ids = self.ids[tokens]
        return locate_alone(self.model, run, lambda model: self._call(model, ids), self.total, tokens, leak.threshold)


def _message(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
