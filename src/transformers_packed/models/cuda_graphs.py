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
from itertools import chain, groupby
from operator import is_
from typing import Any

import torch
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import checkpoint
from transformers.utils import logging

from ..boundaries import WHOLE, SequenceBoundaries
from ..errors import input_error
from ..foreign import attention_of, swapped
from ..ops.autograd import autocast_dtype, saved_tensor_hooks
from ..ops.invariance import is_batch_invariant
from ..ops.offload import HostCheckpoints
from .checkpointing import keep_long_attention
from .experts import isolates
from .families import OWN, families_of, titles
from .family import Family, Own
from .host_parameters import host_of
from .quantized_weights import has_parts, tensors_of
from .recordings import RecordedLayers, RecordedRow, Use, is_on_gpu, new_place, same_counts
from .releases import checkpoint_of
from .replacements import Model
from .untouched import hooks_of


logger = logging.get_logger(__name__)

_CALL = "use_cuda_graphs"
# A graph supports fewer than 8, 32, 128, ... documents, which limits the number of graphs.
_FEWEST_SLOTS, _MORE_SLOTS = 8, 4
_OUTPUTS = ("output_hidden_states", "output_attentions", "output_router_logits")
# Attributes whose changes the graphs see in another way, and types of values that layers read from Python.
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
_PLAIN = (bool, int, float, str)
_WEIGHTS = (torch.nn.Parameter, torch.Tensor)
# The module of the hooks that record layer outputs in Transformers. They stay registered after the first such call and
# do nothing in other calls.
_RECORDING = "transformers.utils.output_capturing"


def use_cuda_graphs(model: Model, max_length: int, *, attention: bool = True) -> Model:
    """Run the layers of a model as CUDA graphs when it trains on packed rows of up to `max_length` tokens.

    Graphs speed up rows whose kernels finish before the host can launch the next ones: up to about 8,192 tokens for
    Qwen3.5-0.8B on an H200. Every row is computed with `max_length` tokens. Recording takes seconds for the first row
    of each kind. The graphs keep the memory of one row, which all of them share: its saved activations and the gradients
    of the layers.

    A forward that cannot use a graph runs without it, and the log gives the reason once. Examples are a longer row, a
    layer with hooks, and a second forward before the first backward. Graphs are recorded again if parameters, modes or
    settings of the layers change, such as a dropout rate. With gradient checkpointing, their backward computes the
    layers again.

    Args:
        model (`PreTrainedModel`):
            A Qwen3.5/3.6/3.8, Qwen3-Next, Kimi-Linear, Bailing-Hybrid or OLMo-Hybrid model of this package, on a CUDA
            device.
        max_length (`int`):
            The length in tokens of the longest row that uses a graph. Must be a multiple of 64.
        attention (`bool`, *optional*, defaults to `True`):
            Whether layers of softmax attention are recorded too. On long rows, `False` is faster if the host can launch
            these layers in time: a graph does not know the documents' lengths, by which attention chooses kernels.

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
        slots *= _MORE_SLOTS
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


def remove_graphs(model: torch.nn.Module) -> None:
    """Undo every call of [`use_cuda_graphs`] on this model, and free its graphs."""
    for text in find_text_models(model):
        text.layer_graphs = None


def forget_graphs(model: torch.nn.Module) -> None:
    """Remove recorded graphs of modules in `model`, whose code or tensors have changed. The next rows record others."""
    for text in find_text_models(model):
        if text.layer_graphs is not None:
            text.layer_graphs = LayerGraphs(text.layer_graphs.max_length, text.layer_graphs.attention)


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
    outputs = [name for name in _OUTPUTS if options.get(name, getattr(text.config, name, False))]
    if outputs:
        _warn(f"{outputs[0]} is set")
        return nullcontext()
    # The stock loop over the layers then calls one module.
    return swapped(text._modules, layers=torch.nn.ModuleList([_AllLayers(graphs, text, boundaries)]))


def _warn(reason: str) -> None:
    logger.warning_once(f"{_CALL}: running without a graph because {reason}.")


class _AllLayers(torch.nn.Module):
    """Replacement for the layers during one forward of a packed row."""

    graphs: "LayerGraphs"
    text: Any
    layers: torch.nn.ModuleList
    boundaries: SequenceBoundaries

    def __init__(self, graphs: "LayerGraphs", text: Any, boundaries: SequenceBoundaries):
        super().__init__()
        # Not registered as submodules, because they need no setup.
        layers = _layers_of(text)
        vars(self).update(graphs=graphs, text=text, layers=layers, boundaries=boundaries)

    def forward(self, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        if options.get("position_embeddings") is None and getattr(self.text, "rotary_emb", None) is not None:
            # OLMo-Hybrid passes them to layers of attention alone, and these options are those of the first layer.
            embeddings = self.text.rotary_emb(hidden_states, options["position_ids"])
            options["position_embeddings"] = embeddings
        # Walking through the modules takes the host a millisecond.
        modules = list(self.layers.modules())
        reasons = self.graphs.reasons_against(hidden_states, self.boundaries)
        reason = _first(chain(reasons, _reasons_of_layers(self.layers, modules, hidden_states)))
        if not reason:
            self.graphs.follow(modules)
            attention = attention_of(self.text.config)
            return self.graphs.run(self.layers, attention, hidden_states, self.boundaries, options)
        _warn(reason)
        for layer in self.layers:
            hidden_states = layer(hidden_states, **options)
        return hidden_states


# Layers of a recording, or one that runs outside.
_Part = RecordedLayers | torch.nn.Module


class LayerGraphs:
    """The graphs of one model's layers, keyed by the properties of their inputs. All graphs share one memory pool."""

    def __init__(self, max_length: int, attention: bool = True):
        self.max_length, self.attention = max_length, attention
        self._graphs: dict[tuple, tuple[RecordedRow, list[_Part]]] = {}
        self._buffers: dict[tuple, torch.Tensor] = {}
        self._parameters: list[torch.nn.Parameter] = []
        self._made_for: list = []
        self._parts: list[object] = []
        self._settings: list[tuple[dict, str, Any]] = []
        self._place: tuple | None = None
        self._last: Callable[[], Use | None] = lambda: None

    def __reduce__(self):
        return type(self), (self.max_length, self.attention)

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

    def follow(self, modules: list[torch.nn.Module]) -> None:
        """Forget all graphs if they read old addresses, or ran the layers in their old modes and settings."""
        parameters = [x for module in modules for x in module._parameters.values() if x is not None]
        made_for = _state_of(modules, parameters)
        # Recordings return gradients to these parameters, and modules outside of them run themselves. The list of layers
        # is a new one in each forward.
        parts: list[object] = [*modules[1:], *parameters]
        same = made_for == self._made_for and len(parts) == len(self._parts) and all(map(is_, parts, self._parts))
        # Layers may share parameters.
        self._parameters = list(dict.fromkeys(x for x in parameters if x.requires_grad))
        if same and all(where.get(name) == value for where, name, value in self._settings):
            return
        if self._graphs:
            logger.warning_once(
                f"{_CALL}: recording the graphs again because parameters, modes or settings of the layers have changed."
            )
        self._graphs, self._buffers, self._place = {}, {}, None
        self._made_for, self._parts = made_for, parts
        self._settings = list(_settings(modules))

    def run(
        self,
        layers: torch.nn.ModuleList,
        attention: str,
        hidden_states: torch.Tensor,
        boundaries: SequenceBoundaries,
        options: dict[str, Any],
    ) -> torch.Tensor:
        """Apply the layers to hidden states `[1, T, hidden]`. `options` are the arguments of a layer."""
        slots = _slots(boundaries.num_documents)
        cast = autocast_dtype(hidden_states)
        # Some families have none.
        positions = options.get("position_embeddings")
        kernels = attention, cast, is_batch_invariant()
        inputs = hidden_states, *(positions or ())
        key = (slots, *kernels, *((x.shape[2:], x.dtype, x.requires_grad) for x in inputs))
        if key not in self._graphs:
            logger.info(f"{_CALL}: recording a graph for rows of up to {slots - 2} documents.")
            row = RecordedRow(positions, self.max_length, slots, cast, hidden_states.device, self._buffers)
            with same_counts(layers):
                self._graphs[key] = row, self._record(layers, row, hidden_states)
        row, parts = self._graphs[key]
        row.fill(positions, boundaries)
        use = Use()
        self._last = weakref.ref(use)
        for part in parts:
            if isinstance(part, RecordedLayers):
                hidden_states = part.run(use, hidden_states)
            else:
                hidden_states = part(hidden_states, **options)
        return hidden_states

    def _record(self, layers: torch.nn.ModuleList, row: RecordedRow, like: torch.Tensor) -> "list[_Part]":
        """Record the layers, but return those of attention as they are if they run outside of graphs."""
        self._place = self._place or new_place()
        parts: list[_Part] = []
        trained = like.requires_grad
        for outside, run in groupby(layers, lambda layer: not self.attention and _has_attention(layer)):
            span = list(run)
            if outside:
                parts += span
            else:
                recording = RecordedLayers(span, self._parameters, row, len(parts), like, trained)
                parts.append(recording)
                like = recording.output
            trained = trained or any(x.requires_grad for layer in span for x in layer.parameters())
        recorded = [part for part in parts if isinstance(part, RecordedLayers)]
        for part in recorded:
            part.record_forward(self._place)
        for part in reversed(recorded):
            part.record_backward(self._place)
        for part in recorded:
            part.finish()
        return parts


def reason_of_layers(text: Any, device: torch.device) -> str:
    """Return why the layers of a text model cannot run as graphs on a GPU in training, or an empty string."""
    layers = _layers_of(text)
    inputs = torch.empty(0, device=device, requires_grad=True)
    return _first(_reasons_of_layers(layers, list(layers.modules()), inputs))


def _layers_of(text: Any) -> torch.nn.ModuleList:
    return text.layers[: text.config.num_hidden_layers]


def _has_attention(layer: torch.nn.Module) -> bool:
    # Some families use the name for the layers of a delta rule, too.
    mixer = getattr(layer, "self_attn", None)
    return mixer is not None and not hasattr(mixer, "rule")


def _state_of(modules: list[torch.nn.Module], parameters: list[torch.nn.Parameter]) -> list[Any]:
    """Return the modes of modules, and where graphs read their parameters and buffers."""
    buffers = [x for module in modules for x in module._buffers.values() if x is not None]
    # torch looks for a missing attribute of a module in three more places.
    modes: list[Any] = [(module.training, vars(module).get("gradient_checkpointing", False)) for module in modules]
    return modes + _places(parameters) + [x.data_ptr() for x in buffers]


def _places(parameters: Iterable[torch.Tensor]) -> list[tuple[int, torch.dtype, bool]]:
    """List where graphs read the parameters, or the tensors that hold them in fewer bits."""
    return [(x.data_ptr(), x.dtype, x.requires_grad) for parameter in parameters for x in tensors_of(parameter)]


def _first(reasons: Iterator[tuple[bool, str]]) -> str:
    return next((reason for holds, reason in reasons if holds), "")


def _reasons_of_layers(
    layers: torch.nn.ModuleList, modules: list[torch.nn.Module], hidden_states: torch.Tensor
) -> Iterator[tuple[bool, str]]:
    """Yield why layers cannot run as a graph, each with whether it holds."""
    reason = _reason_against_checkpointing(layers)
    yield bool(reason), reason
    yield saved_tensor_hooks() is not None, "a saved-tensor hook is active"
    isolated = all(isolates(layer.mlp.experts) for layer in layers if hasattr(layer.mlp, "experts"))
    yield not isolated, "the kernels of the experts depend on the routing"
    trained = hidden_states.requires_grad
    for module in modules:
        if host_of(module) is not None:
            yield True, "weights are in host memory"
        if _is_hooked(module):
            yield True, f"a {type(module).__name__} is hooked, wrapped or compiled"
        for parameter in module._parameters.values():
            if parameter is None:
                continue
            known = type(parameter) in _WEIGHTS or has_parts(parameter)
            if not known or parameter.device != hidden_states.device:
                yield True, f"the layers have a {type(parameter).__name__} on {parameter.device}"
            trained = trained or parameter.requires_grad
    yield not trained, "neither the layers nor their input require gradients"


def _settings(modules: list[torch.nn.Module]) -> Iterator[tuple[dict, str, Any]]:
    """Yield the Python values that layers may read, such as a dropout rate, each with its dictionary and name."""
    for module in modules:
        for name, value in vars(module).items():
            if name in _OF_EVERY_MODULE:
                continue
            if isinstance(value, _PLAIN):
                yield vars(module), name, value
            elif type(value) is dict:
                # PEFT's adapters have dictionaries of scales and dropout rates.
                yield from ((value, key, one) for key, one in value.items() if isinstance(one, _PLAIN))


def _reason_against_checkpointing(layers: Iterable[torch.nn.Module]) -> str:
    """Return why a graph would not compute layers again as their checkpointing does, or an empty string."""
    for layer in layers:
        if not layer.gradient_checkpointing:
            continue
        function: Any = checkpoint_of(layer)
        while _automatic(function):
            # A graph keeps inputs of layers in its own memory.
            function = function.args[-1]
        options = getattr(function, "keywords", {})
        if getattr(function, "func", function) is not checkpoint or "context_fn" in options:
            return "gradient checkpointing offloads or selects what it saves, or cuts rows"
        if any(isinstance(module, _DropoutNd) and module.p and module.training for module in layer.modules()):
            return "gradient checkpointing would have to repeat the dropout of its layers"
    return ""


def _automatic(function: Any) -> bool:
    run = getattr(function, "func", None)
    return run is keep_long_attention or (isinstance(run, HostCheckpoints) and run.automatic)


def _is_hooked(module: torch.nn.Module) -> bool:
    if "forward" in vars(module) or module._compiled_call_impl is not None:
        return True
    return any(getattr(hook, "__module__", None) != _RECORDING for hook in hooks_of(module))
