"""Run the layers of a text model as CUDA graphs, for rows so short that the GPU waits for the host.

Forward and backward of Qwen3.5-0.8B launch about 1,400 kernels, which takes the host at least 70 ms for any number of
tokens. A graph launches them all at once, but only on the same addresses and for the same number of tokens. Each row
is therefore copied into a row of fixed length, followed by padding, and empty documents fill up the boundaries.
Kernels inside the graph derive everything else that depends on the boundaries from `cu_seqlens`.

A graph computes the same results as the layers. Embedding, final norm, head and loss run outside of graphs.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from itertools import groupby
from typing import Any

import torch
from transformers.utils import logging
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from ..boundaries import WHOLE, SequenceBoundaries
from ..errors import input_error
from ..foreign import attention_of, swapped
from ..ops.autograd import autocast_dtype
from ..ops.invariance import is_batch_invariant
from .families import OWN, families_of, titles
from .family import Family, Own
from .inspections import InspectedLayers, are_same
from .recordings import RecordedLayers, RecordedRow, Use, is_on_gpu, new_place, same_counts
from .releases import router_logits_of_forward
from .replacements import Model


logger = logging.get_logger(__name__)

_CALL = "use_cuda_graphs"
# A graph supports fewer than 8, 16, 32, ... documents, which limits the number of graphs. Some kernels compute as many parts
# of the row as so many documents may have.
_FEWEST_SLOTS = 8
# What graphs do not return.
_OUTPUTS = ("output_hidden_states", "output_attentions")


def use_cuda_graphs(model: Model, max_length: int, *, attention: bool = True) -> Model:
    """Run the layers of a model as CUDA graphs when it trains on packed rows of up to `max_length` tokens.

    Graphs speed up rows whose kernels finish before the host can launch the next ones: up to about 8,192 tokens for
    Qwen3.5-0.8B on an H200. Every row is computed with `max_length` tokens. Recording takes seconds for the first row
    of each kind. The graphs keep the memory of one row, which all of them share: its saved activations and the gradients
    of the layers.

    What cannot use a graph runs without it, and the log gives the reason once. Examples are a longer row, a second forward
    before the first backward, and a layer with hooks, together with the layers of its graph. Graphs are recorded again if
    parameters, modes or settings of the layers change, such as a dropout rate. With gradient checkpointing, their
    backward computes the layers again.

    Args:
        model (`PreTrainedModel`):
            A Qwen3.5/3.6/3.8, Qwen3-Next, Kimi-Linear, Bailing-Hybrid or OLMo-Hybrid model of this package, on a CUDA
            device.
        max_length (`int`):
            The length in tokens of the longest row that uses a graph. Must be a multiple of 64.
        attention (`bool`, *optional*, defaults to `True`):
            Whether layers of softmax attention are recorded too. On long rows, `False` is faster if the host can launch
            these layers in time: a graph does not know the documents' lengths, by which attention chooses kernels. The
            layers between have graphs of their own, and those of attention may have hooks.

    Returns:
        `torch.nn.Module`: the same model. `use_cuda_graphs(model, 0)` disables graphs and frees their memory.

    Raises:
        `ValueError`: the model is not supported, or `max_length` is not a multiple of 64.

    Example:

    ```python
    >>> from transformers import Qwen3_5TextConfig
    >>> from transformers_packed import use_cuda_graphs
    >>> from transformers_packed.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM
    >>> config = Qwen3_5TextConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=4)
    >>> model = use_cuda_graphs(Qwen3_5ForCausalLM(config), max_length=2048)

    ```
    """
    if not isinstance(max_length, int) or max_length < 0 or max_length % 64:
        raise input_error(
            "max_length as a multiple of 64", repr(max_length), "Round up the length of the longest row."
        )
    for text in text_models_of(model):
        text.layer_graphs = LayerGraphs(max_length, attention)
    return model


def try_cuda_graphs(model: Model, max_length: int, attention: bool = True) -> None:
    """Do the same as [`use_cuda_graphs`], and note that nobody asked for it."""
    for text in find_text_models(use_cuda_graphs(model, max_length, attention=attention)):
        text.layer_graphs.asked = False


def graph_length(tokens: int) -> int:
    """Return the `max_length` of [`use_cuda_graphs`] for rows of up to so many tokens."""
    return -(-tokens // 64) * 64


def documents_of_graphs(fewest: int, most: int) -> list[int]:
    """Return a number of documents for each graph that rows of `fewest` to `most` documents need."""
    found, documents = [], fewest
    while documents <= most:
        found.append(documents)
        documents = _slots(documents) - 1
    return found


def _slots(documents: int) -> int:
    """The documents of a graph. Padding counts as one, and the last slot is always empty."""
    slots = _FEWEST_SLOTS
    while slots < documents + 2:
        slots *= 2
    return slots


def find_text_models(model: torch.nn.Module) -> list[Any]:
    """Return the text models of this package in `model` whose layers can run as graphs."""
    return [module for module in model.modules() if hasattr(type(module), "layer_graphs")]


def text_models_of(model: torch.nn.Module) -> list[Any]:
    """Return what [`find_text_models`] finds, or raise an error if that is none."""
    texts = find_text_models(model)
    check_family(model, [family for family in OWN if family.has_graphs], bool(texts), "CUDA graphs")
    return texts


def check_family(model: torch.nn.Module, able: list[Family], has_our_classes: bool, what: str) -> None:
    """Raise a `ValueError` unless `model` is one of this package and of one of these families, which have `what`."""
    found = families_of(model, Own)
    if has_our_classes and found & {*able}:
        return
    fix = "Load it after transformers_packed.register(), or pass it to patch_model first."
    if found and not found & {*able}:
        fix = f"Train it without {what}."
    raise input_error(f"a {titles(able)} model of this package", type(model).__name__, fix)


def share_of_attention(model: torch.nn.Module) -> float:
    """Return the share of layers that `use_cuda_graphs(..., attention=False)` leaves outside of graphs."""
    layers = [layer for text in find_text_models(model) for layer in _layers_of(text)]
    return sum(map(_has_attention, layers)) / len(layers)


def records_graphs(text: Any) -> bool:
    """Whether a row of this text model has been recorded."""
    return text.layer_graphs is not None and bool(text.layer_graphs._graphs)


def remove_graphs(model: torch.nn.Module, unasked_only: bool = False) -> None:
    """Undo every call of [`use_cuda_graphs`] on this model, or of [`try_cuda_graphs`] alone, and free its graphs."""
    for text in find_text_models(model):
        if text.layer_graphs is not None and not (unasked_only and text.layer_graphs.asked):
            text.layer_graphs = None
            # Nothing else can use their pool.
            torch.cuda.empty_cache()


def forget_graphs(model: torch.nn.Module) -> None:
    """Remove recorded graphs of modules in `model`, whose code or tensors have changed. The next rows record others."""
    for text in find_text_models(model):
        if text.layer_graphs is not None:
            text.layer_graphs = copy(text.layer_graphs)


def without_graphs(model: torch.nn.Module) -> AbstractContextManager:
    """Run and record no graphs meanwhile. Those of earlier rows stay."""
    return swapped(*map(vars, find_text_models(model)), layer_graphs=None)


def layers_as_graphs(
    text: Any, boundaries: SequenceBoundaries | None, options: dict[str, Any]
) -> AbstractContextManager:
    """Replace the layers of `text` with one module that runs them as graphs, if graphs are enabled and can help."""
    # Not all text models have graphs.
    graphs: LayerGraphs | None = getattr(text, "layer_graphs", None)
    trains = text.training and torch.is_grad_enabled()
    if graphs is None or not graphs.max_length or boundaries is None or not trains:
        return nullcontext()

    def is_set(name: str) -> bool:
        return options.get(name, getattr(text.config, name, False))

    outputs = list(filter(is_set, _OUTPUTS))
    if outputs:
        _warn(f"{outputs[0]} is set")
        return nullcontext()
    if is_set("output_router_logits"):
        # It does not find the layers in one module.
        maybe_install_capturing_hooks(text)
    # The stock loop over the layers then calls one module.
    return swapped(text._modules, layers=torch.nn.ModuleList([_AllLayers(graphs, text, boundaries)]))


def _warn(reason: str) -> None:
    logger.warning_once(f"{_CALL}: running without a graph because {reason}.")


class _AllLayers(torch.nn.Module):
    """Replacement for the layers during one forward of a packed row."""

    graphs: "LayerGraphs"
    text: Any
    layers: list[torch.nn.Module]
    boundaries: SequenceBoundaries

    def __init__(self, graphs: "LayerGraphs", text: Any, boundaries: SequenceBoundaries):
        super().__init__()
        # Not registered as submodules, because they need no setup.
        vars(self).update(graphs=graphs, text=text, layers=_layers_of(text), boundaries=boundaries)

    def forward(self, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        if options.get("position_embeddings") is None and getattr(self.text, "rotary_emb", None) is not None:
            # OLMo-Hybrid passes them to layers of attention alone, and these options are those of the first layer.
            embeddings = self.text.rotary_emb(hidden_states, options["position_ids"])
            options["position_embeddings"] = embeddings
        attention = attention_of(self.text.config)
        return self.graphs.run(self.layers, attention, hidden_states, self.boundaries, options)


class LayerGraphs:
    """The graphs of one model's layers, keyed by the properties of their inputs. All graphs share one memory pool.

    A part of the layers runs as its graph if nothing speaks against it at the moment of its launch. The host inspects its
    modules only then, while the GPU computes the parts before.
    """

    def __init__(self, max_length: int, attention: bool = True, asked: bool = True):
        self.max_length, self.attention, self.asked = max_length, attention, asked
        # Consecutive layers, and by their numbers: their recordings, and what these were made for. Parts that run outside
        # of graphs have none.
        self._parts: list[list[torch.nn.Module]] = []
        self._graphs: dict[tuple, tuple[RecordedRow, dict[int, RecordedLayers]]] = {}
        self._made_for: dict[int, InspectedLayers] = {}
        # The numbers of parts whose input has got gradients since they were recorded, from layers outside or hooks.
        self._trained_later: set[int] = set()
        self._buffers: dict[tuple, torch.Tensor] = {}
        self._place: tuple | None = None
        self._last: Callable[[], Use | None] = lambda: None

    def __reduce__(self):
        # Graphs stay where they are.
        return type(self), (self.max_length, self.attention, self.asked)

    def reasons_against(
        self, hidden_states: torch.Tensor, boundaries: SequenceBoundaries
    ) -> Iterator[tuple[bool, str]]:
        """Yield why a row cannot use a graph, each with whether it holds."""
        yield not is_on_gpu(hidden_states), f"the row is on {hidden_states.device}, not on the current GPU"
        yield boundaries.kind != WHOLE, f"the row is {boundaries.kind}"
        longer = hidden_states.shape[1] > self.max_length
        yield longer, f"the row has more than max_length={self.max_length} tokens"
        last = self._last()
        yield last is not None and bool(last.left), "the backward of an earlier row has not run yet"

    def run(
        self,
        layers: list[torch.nn.Module],
        attention: str,
        hidden_states: torch.Tensor,
        boundaries: SequenceBoundaries,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Apply the layers to hidden states `[1, T, hidden]`. `options` are the arguments of a layer."""
        reason = _first(self.reasons_against(hidden_states, boundaries))
        if reason:
            _warn(reason)
            return _run(layers, hidden_states, options)
        slots = _slots(boundaries.num_documents)
        cast = autocast_dtype(hidden_states)
        # Some families have none.
        positions = options.get("position_embeddings")
        kernels = attention, cast, is_batch_invariant()
        inputs = hidden_states, *(positions or ())
        returns_logits = router_logits_of_forward() is not None
        key = (slots, *kernels, returns_logits, *((x.shape[2:], x.dtype, x.requires_grad) for x in inputs))
        if not are_same(layers, [layer for part in self._parts for layer in part]):
            self._forget()
            self._trained_later = set()
        is_new = key not in self._graphs
        if is_new:
            reason = self._prepare(layers, hidden_states)
            if reason:
                _warn(reason)
                return _run(layers, hidden_states, options)
            logger.info(f"{_CALL}: recording a graph for rows of up to {slots - 2} documents.")
            device = hidden_states.device
            row = RecordedRow(positions, self.max_length, slots, cast, device, self._buffers, returns_logits)
            with same_counts(layers):
                self._graphs[key] = row, self._record(row, hidden_states)
        row, recordings = self._graphs[key]
        row.fill(positions, boundaries)
        use = Use()
        self._last = weakref.ref(use)
        for number, part in enumerate(self._parts):
            # None is left after a part that has changed.
            recording = recordings.get(number) if self._graphs else None
            if recording is not None and self._is_ready(number, recording, hidden_states, is_new):
                hidden_states = recording.run(use, hidden_states)
            elif number == 0 and not self._graphs:
                # Nothing has run yet, so this row is recorded again.
                return self.run(layers, attention, hidden_states, boundaries, options)
            else:
                hidden_states = _run(part, hidden_states, options)
        return hidden_states

    def _prepare(self, layers: list[torch.nn.Module], hidden_states: torch.Tensor) -> str:
        """Inspect all layers that a new row records, and forget graphs of others. Return why none can be recorded."""
        parts: list[list[torch.nn.Module]] = []
        made_for = {}
        for outside, run in groupby(layers, lambda layer: not self.attention and _has_attention(layer)):
            parts.append(list(run))
            if outside:
                continue
            made_for[len(parts) - 1] = now = InspectedLayers(parts[-1], hidden_states.device)
            if now.reason:
                return now.reason
        if not hidden_states.requires_grad and not _train(layers):
            return "neither the layers nor their input require gradients"
        before = self._made_for
        if before.keys() != made_for.keys() or not all(before[n].are_still(now) for n, now in made_for.items()):
            self._forget()
        for now in made_for.values():
            now.remember_settings()
        self._parts, self._made_for = parts, made_for
        return ""

    def _is_ready(self, number: int, recording: RecordedLayers, hidden_states: torch.Tensor, is_new: bool) -> bool:
        """Whether a part can run as its graph now. Forget all graphs if it has changed, or has to return a gradient."""
        if not recording.takes(hidden_states):
            _warn("layers or hooks between graphs have changed the shape or the dtype of the hidden states")
            return False
        changed = hidden_states.requires_grad and not recording.has_trained_input
        if changed:
            self._trained_later.add(number)
        elif not is_new:
            now = InspectedLayers(self._parts[number], hidden_states.device)
            if now.reason:
                _warn(now.reason)
                return False
            changed = not self._made_for[number].are_still(now)
        if changed:
            self._forget()
        return not changed

    def _forget(self) -> None:
        """Forget all graphs. Those of a row whose backward has not run yet stay with it, and so does their memory."""
        if self._graphs:
            logger.warning_once(
                f"{_CALL}: recording the graphs again because parameters, modes or settings of the layers have changed."
            )
        self._graphs, self._buffers, self._place = {}, {}, None

    def _record(self, row: RecordedRow, like: torch.Tensor) -> dict[int, RecordedLayers]:
        """Record the parts but those outside of graphs, from an input `like` this one."""
        self._place = self._place or new_place()
        recordings = {}
        trained = False
        for number, layers in enumerate(self._parts):
            if number in self._made_for:
                trained = trained or like.requires_grad or number in self._trained_later
                recordings[number] = RecordedLayers(layers, row, number, like, trained)
                like = recordings[number].output
            trained = trained or _train(layers)
        recorded = list(recordings.values())
        for recording in recorded:
            recording.record_forward(self._place)
        for recording in reversed(recorded):
            recording.record_backward(self._place)
        for recording in recorded:
            recording.finish()
        return recordings


def reason_of_layers(text: Any, device: torch.device) -> str:
    """Return why the layers of a text model cannot run as graphs on a GPU in training, or an empty string."""
    return InspectedLayers(_layers_of(text), torch.empty(0, device=device).device).reason


def _layers_of(text: Any) -> list[torch.nn.Module]:
    return list(text.layers)[: text.config.num_hidden_layers]


def _has_attention(layer: torch.nn.Module) -> bool:
    # Some families use the name for the layers of a delta rule, too.
    mixer = getattr(layer, "self_attn", None)
    return mixer is not None and not hasattr(mixer, "rule")


def _train(layers: Iterable[torch.nn.Module]) -> bool:
    return any(x.requires_grad for layer in layers for x in layer.parameters())


def _run(layers: Iterable[torch.nn.Module], hidden_states: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    for layer in layers:
        hidden_states = layer(hidden_states, **options)
    return hidden_states


def _first(reasons: Iterator[tuple[bool, str]]) -> str:
    return next((reason for holds, reason in reasons if holds), "")
