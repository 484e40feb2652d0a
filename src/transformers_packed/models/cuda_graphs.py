"""Run the layers of a text model as CUDA graphs, for rows so short that the GPU waits for the host.

Forward and backward of Qwen3.5-0.8B launch about 1,400 kernels, which takes the host at least 70 ms for any number of
tokens. A graph launches them all at once, but only on the same addresses and for the same number of tokens. Each row
is therefore copied into a row of fixed length, followed by padding, and empty documents fill up the boundaries.
Kernels inside the graph derive everything else that depends on the boundaries from `cu_seqlens`.

A graph computes the same results as the layers. Embedding, final norm, head and loss run outside of graphs.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import checkpoint
from transformers.utils import logging

from ..boundaries import SequenceBoundaries
from ..errors import input_error
from ..ops.autograd import autocast_dtype, first_order
from .experts import isolates
from .registry import Model
from .releases import checkpoint_of
from .untouched import hooks_of


logger = logging.get_logger(__name__)

_CALL = "use_cuda_graphs"
# A graph supports fewer than 8, 32, 128, ... documents, which limits the number of graphs.
_FEWEST_SLOTS, _MORE_SLOTS = 8, 4
_WARM_UPS = 2
_OUTPUTS = ("output_hidden_states", "output_attentions", "output_router_logits")
# Attributes whose changes the graphs see in another way, and types of values that layers read from Python.
_OF_EVERY_MODULE = frozenset(vars(torch.nn.Module()))
_PLAIN = (bool, int, float, str)
# The module of the hooks that record layer outputs in Transformers. They stay registered after the first such call and
# do nothing in other calls.
_RECORDING = "transformers.utils.output_capturing"


def use_cuda_graphs(model: Model, row_length: int) -> Model:
    """Run the layers of a model as CUDA graphs when it trains on packed rows of up to `row_length` tokens.

    Graphs speed up rows whose kernels finish before the host can launch the next ones: up to about 8,192 tokens for
    Qwen3.5-0.8B on an H200. Every row is computed with `row_length` tokens. Recording takes seconds for the first row
    of each kind. The graphs keep their memory: the saved activations of one row, and a gradient for each trained
    parameter of the layers.

    A forward that cannot use a graph runs without it, and the log gives the reason once. Examples are a longer row, a
    layer with hooks, and a second forward before the first backward. Graphs are recorded again if parameters, modes or
    settings of the layers change, such as a dropout rate. With gradient checkpointing, their backward computes the
    layers again.

    Args:
        model (`PreTrainedModel`):
            A Qwen3.5 or Qwen3-Next model of this package, on a CUDA device.
        row_length (`int`):
            The length in tokens of the longest row that uses a graph. Must be a multiple of 64.

    Returns:
        `torch.nn.Module`: the same model. `use_cuda_graphs(model, 0)` disables graphs and frees their memory.

    Raises:
        `ValueError`: the model is not supported, or `row_length` is not a multiple of 64.

    Example:

    ```python
    >>> from transformers import Qwen3_5TextConfig
    >>> from transformers_packed import use_cuda_graphs
    >>> from transformers_packed.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM
    >>> config = Qwen3_5TextConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=4)
    >>> model = use_cuda_graphs(Qwen3_5ForCausalLM(config), row_length=2048)

    ```
    """
    if not isinstance(row_length, int) or row_length < 0 or row_length % 64:
        raise input_error(
            "row_length as a multiple of 64", repr(row_length), "Round up the length of the longest row."
        )
    for text in text_models_of(model):
        vars(text)["_layer_graphs"] = LayerGraphs(row_length) if row_length else None
    return model


def graph_length(tokens: int) -> int:
    """Return the `row_length` of [`use_cuda_graphs`] for rows of up to so many tokens."""
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


def find_text_models(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the Qwen3.5 and Qwen3-Next text models of this package in `model`."""
    return [module for module in model.modules() if getattr(module, "runs_in_graphs", False)]


def text_models_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return what [`find_text_models`] finds, or raise an error if that is none."""
    texts = find_text_models(model)
    if not texts:
        raise input_error(
            "a Qwen3.5 or Qwen3-Next model of this package",
            type(model).__name__,
            "Load it after transformers_packed.register(), or pass it to patch_model first.",
        )
    return texts


def records_graphs(text: torch.nn.Module) -> bool:
    """Whether a row of this text model has been recorded."""
    graphs = vars(text).get("_layer_graphs")
    return graphs is not None and graphs.is_recorded


def remove_graphs(model: torch.nn.Module) -> None:
    """Undo every call of [`use_cuda_graphs`] on this model, and free its graphs."""
    for module in model.modules():
        vars(module).pop("_layer_graphs", None)


def forget_graphs(model: torch.nn.Module) -> None:
    """Remove recorded graphs of modules in `model`, whose code or tensors have changed. The next rows record others."""
    for module in model.modules():
        graphs = vars(module).get("_layer_graphs")
        if graphs is not None:
            use_cuda_graphs(module, graphs.row_length)


@contextmanager
def layers_as_graphs(
    text: torch.nn.Module, boundaries: SequenceBoundaries | None, options: dict[str, Any]
) -> Iterator[None]:
    """Replace the layers of `text` with one module that runs them as graphs, if graphs are enabled and can help."""
    graphs = vars(text).get("_layer_graphs")
    if graphs is None or boundaries is None or not (text.training and torch.is_grad_enabled()):
        yield
        return
    wanted = [name for name in _OUTPUTS if options.get(name, getattr(text.config, name, False))]
    if wanted:
        _warn(f"{wanted[0]} is set")
        yield
        return
    layers = text.layers
    text._modules["layers"] = torch.nn.ModuleList([_AllLayers(graphs, text, boundaries)])
    try:
        yield
    finally:
        text._modules["layers"] = layers


def _warn(reason: str) -> None:
    logger.warning_once(f"{_CALL}: running without a graph because {reason}.")


class _AllLayers(torch.nn.Module):
    """Replacement for the layers during one forward of a packed row."""

    def __init__(self, graphs: "LayerGraphs", text: torch.nn.Module, boundaries: SequenceBoundaries):
        super().__init__()
        # Not registered as submodules, because they need no setup.
        layers = text.layers[: text.config.num_hidden_layers]
        vars(self).update(graphs=graphs, text=text, layers=layers, boundaries=boundaries)

    def forward(self, hidden_states: torch.Tensor, *, position_embeddings, **options: Any) -> torch.Tensor:
        inputs = (hidden_states, *position_embeddings)
        reason = self.graphs.reason_against(self.layers, inputs, self.boundaries)
        if not reason:
            return self.graphs.run(self.layers, self.text.config._attn_implementation, inputs, self.boundaries)
        _warn(reason)
        for layer in self.layers:
            hidden_states = layer(hidden_states, position_embeddings=position_embeddings, **options)
        return hidden_states


class LayerGraphs:
    """The graphs of one model's layers, keyed by the properties of their inputs. All graphs share one memory pool."""

    def __init__(self, row_length: int):
        self.row_length = row_length
        self._graphs: dict[tuple, _Graph] = {}
        self._parameters: list[torch.nn.Parameter] = []
        self._made_for: list = []
        self._settings: list[tuple[dict, str, Any]] = []
        self._place = None
        self._last: Callable[[], _Use | None] = lambda: None

    @property
    def is_recorded(self) -> bool:
        return bool(self._graphs)

    def __deepcopy__(self, memo: dict) -> "LayerGraphs":
        return type(self)(self.row_length)

    def __reduce__(self):
        return type(self), (self.row_length,)

    def reason_against(
        self, layers: torch.nn.ModuleList, inputs: tuple[torch.Tensor, ...], boundaries: SequenceBoundaries
    ) -> str:
        """Return the reason why the row cannot use a graph, or an empty string."""
        hidden_states = inputs[0]
        if not _is_on_gpu(hidden_states):
            return f"the row is on {hidden_states.device}, not on the current GPU"
        if boundaries.is_shard:
            return "the row is a shard"
        if boundaries.shares_prompts:
            return "the row shares prompts"
        if hidden_states.shape[1] > self.row_length:
            return f"the row has more than row_length={self.row_length} tokens"
        last = self._last()
        if last is not None and not last.over:
            return "the backward of an earlier row has not run yet"
        if reason := _reason_against_checkpointing(layers):
            return reason
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return "a saved-tensor hook is active"
        if not all(isolates(layer.mlp.experts) for layer in layers if hasattr(layer.mlp, "experts")):
            return "the kernels of the experts depend on the routing"
        trained, made_for = {}, []
        for module in layers.modules():
            if _is_hooked(module):
                return f"a {type(module).__name__} is hooked, wrapped or compiled"
            made_for += [module.training, getattr(module, "gradient_checkpointing", False)]
            for parameter in module._parameters.values():
                if parameter is None:
                    continue
                if (
                    type(parameter) not in (torch.nn.Parameter, torch.Tensor)
                    or parameter.device != hidden_states.device
                ):
                    return f"the layers have a {type(parameter).__name__} on {parameter.device}"
                made_for.append((parameter.data_ptr(), parameter.dtype, parameter.requires_grad))
                if parameter.requires_grad:
                    trained[parameter] = None
            made_for += [buffer.data_ptr() for buffer in module._buffers.values() if buffer is not None]
        if not trained and not hidden_states.requires_grad:
            return "neither the layers nor their input require gradients"
        self._parameters = list(trained)
        if made_for != self._made_for or any(where.get(name) != value for where, name, value in self._settings):
            # The existing graphs read the old addresses, and ran the layers in their old modes and settings.
            if self._graphs:
                logger.warning_once(
                    f"{_CALL}: recording the graphs again because parameters, modes or settings of the layers have "
                    "changed."
                )
            self._graphs, self._place, self._made_for = {}, None, made_for
            self._settings = list(_settings(layers))
        return ""

    def run(
        self,
        layers: torch.nn.ModuleList,
        attention: str,
        inputs: tuple[torch.Tensor, ...],
        boundaries: SequenceBoundaries,
    ) -> torch.Tensor:
        """Apply the layers to `inputs` (hidden states `[1, T, hidden]`, cosines and sines `[1, T, rotary]`)."""
        slots = _slots(boundaries.num_documents)
        cast = autocast_dtype(inputs[0])
        key = (slots, attention, cast, *((x.shape[2:], x.dtype, x.requires_grad) for x in inputs))
        graph = self._graphs.get(key)
        if graph is None:
            if self._place is None:
                self._place = _new_place()
            logger.info(f"{_CALL}: recording a graph for rows of up to {slots - 2} documents.")
            graph = _Graph(list(layers), self._parameters, inputs, self.row_length, slots, cast, self._place)
            self._graphs[key] = graph
        graph.fill(inputs, boundaries)
        use = _Use()
        self._last = weakref.ref(use)
        return _Replay.apply(graph, use, inputs[0], *self._parameters)


class _Use:
    """One forward of a graph. No other forward may overwrite its activations until its backward has finished."""

    over = False


class _Graph:
    """The recordings of one forward and one backward of the layers."""

    def __init__(self, layers, parameters, inputs, row_length, slots, cast, place):
        self.inputs = [x.new_zeros(x.shape[0], row_length, *x.shape[2:]) for x in inputs]
        self.inputs[0].requires_grad_(inputs[0].requires_grad)
        self.cu_seqlens = torch.full((slots + 1,), row_length, dtype=torch.int32, device=inputs[0].device)
        self.cu_seqlens[0] = 0
        self._segments = list(_segments(layers))
        self._stand_ins = _stand_ins(layers)
        self._wanted = [x for x in (self.inputs[0], *(self._stand_ins[x] for x in parameters)) if x.requires_grad]
        device = inputs[0].device.type
        # Without the cache, so the graph does not keep reading weights that were cast before the recording.
        self._autocast = partial(torch.autocast, device, cast, enabled=cast is not None, cache_enabled=False)
        with _without_checkpointing(layers):
            with _beside_other_work():
                for _ in range(_WARM_UPS):
                    (output,) = self._compute()
                    self.d_output = torch.zeros_like(output)
                    self._differentiate()
            # Free autograd's nodes on that stream, and after the recordings the activations in the pool.
            self._saved = None
            self._forward = _Recording(self._compute, place)
            self._backward = _Recording(self._differentiate, place)
            self._saved = self._options = None

    def _compute(self) -> list[torch.Tensor]:
        """Return the output of the layers, and save what their backward needs."""
        # A new tensor, because kernel packages cache results by the identity of this tensor.
        x, *position_embeddings = self.inputs
        boundaries = _open_boundaries(self.cu_seqlens.clone(), x.shape[1])
        self._options = {"attention_mask": None, "position_ids": boundaries.position_ids, **boundaries.layer_kwargs()}
        self._options["position_embeddings"] = tuple(position_embeddings)
        self._saved = []
        for layers, again in self._segments:
            parameters = (self._stand_ins[parameter] for layer in layers for parameter in layer.parameters())
            trained = [parameter for parameter in dict.fromkeys(parameters) if parameter.requires_grad]
            with torch.set_grad_enabled(not again):
                output = self._run(layers, x)
            self._saved.append((layers, trained, x, None if again else output))
            x = output.detach().requires_grad_(x.requires_grad or bool(trained))
        return [x.detach()]

    def _differentiate(self) -> list[torch.Tensor | None]:
        """Return the gradients of the input and of all trained parameters."""
        found, gradient = {}, self.d_output
        for layers, trained, x, output in reversed(self._saved):
            leaves = [x, *trained] if x.requires_grad else trained
            if not leaves:
                break
            output = self._run(layers, x) if output is None else output
            # Training calls backward outside of autocast.
            with torch.autocast(x.device.type, enabled=False):
                gradients = torch.autograd.grad(output, leaves, gradient, allow_unused=True)
            for leaf, new in zip(leaves, gradients, strict=True):
                # Layers may share parameters.
                if new is not None:
                    found[leaf] = found[leaf] + new if leaf in found else new
            gradient = found.get(x)
        return [found.get(leaf) for leaf in self._wanted]

    def _run(self, layers: list[torch.nn.Module], x: torch.Tensor) -> torch.Tensor:
        with self._autocast():
            for layer in layers:
                own = {name: self._stand_ins[parameter] for name, parameter in layer.named_parameters()}
                x = torch.func.functional_call(layer, own, (x,), self._options)
        return x

    @torch.no_grad()
    def fill(self, inputs: tuple[torch.Tensor, ...], boundaries: SequenceBoundaries) -> None:
        length, ends = inputs[0].shape[1], boundaries.cu_seqlens
        for mine, given in zip(self.inputs, inputs, strict=True):
            mine[:, :length].copy_(given)
        # An earlier row may have left values that are not finite.
        self.inputs[0][:, length:].zero_()
        self.cu_seqlens[: len(ends)].copy_(ends)
        self.cu_seqlens[len(ends) :].fill_(self.inputs[0].shape[1])

    def forward(self, length: int) -> torch.Tensor:
        (output,) = self._forward.replay()
        return output[:, :length].clone()

    def backward(self, d_output: torch.Tensor) -> list[torch.Tensor | None]:
        """Return the requested gradients as new tensors, because the next replay overwrites the recorded ones."""
        length = d_output.shape[1]
        self.d_output[:, :length].copy_(d_output)
        self.d_output[:, length:].zero_()
        gradients = self._backward.replay()
        copies = iter(torch._foreach_mul([x for x in gradients if x is not None], 1))
        return [None if x is None else next(copies) for x in gradients]


def _open_boundaries(cu_seqlens: torch.Tensor, row_length: int) -> SequenceBoundaries:
    """Create boundaries without a host copy, so a graph supports any documents written to `cu_seqlens`."""
    return SequenceBoundaries(
        cu_seqlens,
        length=row_length,
        device_only="CUDA graphs support the gated delta rule from flash-linear-attention or FlashQLA and attention "
        "from varlen_attn, in float16 or bfloat16 (or under autocast) and without attention dropout. Load the model "
        'in bfloat16 with attn_implementation="sdpa" and install the kernels that `transformers-packed doctor` names, '
        "or train without graphs.",
    )


def _stand_ins(layers: list[torch.nn.Module]) -> dict[torch.nn.Parameter, torch.nn.Parameter]:
    """Map each parameter of the layers to a new parameter that shares its memory.

    A reference to the loss of an earlier row also keeps autograd's nodes of the original parameters alive. These nodes
    belong to the stream of that row, and a recording cannot wait for that stream.
    """
    parameters = (parameter for layer in layers for parameter in layer.parameters())
    return {x: torch.nn.Parameter(x.detach(), requires_grad=x.requires_grad) for x in parameters}


def _segments(layers: list[torch.nn.Module]) -> Iterator[tuple[list[torch.nn.Module], bool]]:
    """Yield runs of layers, and whether the backward computes them again. A layer with checkpointing is one by itself."""
    segment = []
    for layer in layers:
        if not layer.gradient_checkpointing:
            segment.append(layer)
            continue
        if segment:
            yield segment, False
        yield [layer], True
        segment = []
    if segment:
        yield segment, False


def _settings(layers: torch.nn.ModuleList) -> Iterator[tuple[dict, str, Any]]:
    """Yield the Python values that layers may read, such as a dropout rate, each with its dictionary and name."""
    for module in layers.modules():
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
        function = checkpoint_of(layer)
        options = getattr(function, "keywords", {})
        if getattr(function, "func", function) is not checkpoint or "context_fn" in options:
            return "gradient checkpointing offloads or selects what it saves"
        if any(isinstance(module, _DropoutNd) and module.p and module.training for module in layer.modules()):
            return "gradient checkpointing would have to repeat the dropout of its layers"
    return ""


@contextmanager
def _without_checkpointing(layers: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Turn gradient checkpointing off, because the graph itself computes the layers again."""
    switched_on = [layer for layer in layers if layer.gradient_checkpointing]
    for layer in switched_on:
        layer.gradient_checkpointing = False
    try:
        yield
    finally:
        for layer in switched_on:
            layer.gradient_checkpointing = True


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, graph, use, hidden_states, *parameters):
        ctx.graph, ctx.use, ctx.length = graph, use, hidden_states.shape[1]
        ctx.parameters, ctx.versions = parameters, [x._version for x in parameters]
        return graph.forward(ctx.length)

    @staticmethod
    @first_order("Train without graphs.")
    def backward(ctx, d_output):
        if ctx.use.over:
            raise RuntimeError(
                f"{_CALL}: backward has already run for this forward, and its activations are gone. Run the forward "
                "again, or train without graphs to use retain_graph=True."
            )
        if ctx.versions != [x._version for x in ctx.parameters]:
            raise RuntimeError(
                f"{_CALL}: a parameter of these layers was changed in place between forward and backward. Change it "
                "after backward."
            )
        gradients = ctx.graph.backward(d_output)
        ctx.use.over = True
        if not ctx.needs_input_grad[2]:
            return None, None, None, *gradients
        d_hidden_states, *others = gradients
        return None, None, d_hidden_states[:, : ctx.length], *others


class _Recording:
    """A recording of a function's GPU work. `replay` recomputes the returned tensors at the same addresses."""

    def __init__(self, function: Callable[[], Any], place: tuple):
        pool, stream = place
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may keep calling CUDA, for example to pin memory.
        with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self._result = function()

    def replay(self) -> Any:
        self._graph.replay()
        return self._result


@contextmanager
def _beside_other_work() -> Iterator[None]:
    """Run on a separate stream the warm-up calls, which perform all one-time setup before a recording."""
    current, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


def _new_place() -> tuple:
    """Create the memory pool and stream for recordings on the current GPU. Torch's default stream may be in use."""
    return torch.cuda.graph_pool_handle(), torch.cuda.Stream()


def _is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and tensor.device.index == torch.cuda.current_device()


def _is_hooked(module: torch.nn.Module) -> bool:
    if "forward" in vars(module) or module._compiled_call_impl is not None:
        return True
    return any(getattr(hook, "__module__", None) != _RECORDING for hook in hooks_of(module))
