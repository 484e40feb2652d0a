"""The layers of a text model as CUDA graphs, for rows so short that the GPU waits for the host.

Forward and backward of Qwen3.5-0.8B are some 1,400 kernels, which a host needs 70 ms and more to launch, however few
tokens there are. A graph launches all of them at once, but repeats them as they were: on the same addresses, for the same
number of tokens. So a row is copied to the beginning of one of fixed length, whose rest is padding, and the documents are
filled up with empty ones. What else depends on where documents begin, kernels inside the graph make from `cu_seqlens`.

What a graph computes is what the layers would; embedding, final norm, head and loss run as ever.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.utils import logging

from ..boundaries import SequenceBoundaries
from ..errors import input_error
from ..ops.autograd import first_order
from .untouched import hooks_of


logger = logging.get_logger(__name__)

_CALL = "use_cuda_graphs"
# A graph serves fewer documents than 8, 32, 128, ..., so that few graphs are made.
_FEWEST_SLOTS, _MORE_SLOTS = 8, 4
_WARM_UPS = 2
_OUTPUTS = ("output_hidden_states", "output_attentions", "output_router_logits")
# The module of the hooks by which Transformers records the outputs of layers. They stay after the first such call, and do
# nothing in others.
_RECORDING = "transformers.utils.output_capturing"


def use_cuda_graphs(model: torch.nn.Module, row_length: int) -> torch.nn.Module:
    """Let the layers of a model run as CUDA graphs when it trains on packed rows of up to `row_length` tokens.

    For rows whose kernels are done sooner than the host can launch them: on an H200 up to about 8,192 tokens of
    Qwen3.5-0.8B. Every row is computed as one of `row_length` tokens. The first row of each kind takes seconds, and the
    graphs keep their memory: activations of one row, and a gradient of each trained parameter of the layers. Forwards
    that cannot use a graph run as without, and the first time the log says why: longer rows, layers with hooks, a second
    forward before the backward of the first one. What layers read from Python beside their inputs, such as the rate of a
    dropout, stays as it was when the graph was made.

    Args:
        model (`PreTrainedModel`):
            A Qwen3.5 or Qwen3-Next model of this package, with dense layers, on a CUDA device.
        row_length (`int`):
            Tokens of the longest row that a graph computes; a multiple of 64.

    Returns:
        `torch.nn.Module`: the same model. `use_cuda_graphs(model, 0)` turns it off again and frees the memory.

    Raises:
        `ValueError`: another model, mixtures of experts, or a `row_length` that is not a multiple of 64.

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
        raise input_error("row_length as a multiple of 64", repr(row_length), "Round up the longest row.")
    texts = [module for module in model.modules() if getattr(module, "runs_in_graphs", False)]
    if not texts:
        raise input_error(
            "a Qwen3.5 or Qwen3-Next model of this package",
            type(model).__name__,
            "Load it after transformers_packed.register(), or pass it to patch_model first.",
        )
    for text in texts:
        if row_length and any(hasattr(layer.mlp, "experts") for layer in text.layers):
            raise input_error(
                "dense layers",
                f"{type(text).__name__} with experts, whose kernels depend on what the router chooses",
                "Train it without graphs.",
            )
        vars(text)["_layer_graphs"] = LayerGraphs(row_length) if row_length else None
    return model


@contextmanager
def layers_as_graphs(
    text: torch.nn.Module, boundaries: SequenceBoundaries | None, options: dict[str, Any]
) -> Iterator[None]:
    """Inside the `with` block the layers of `text` are one that runs them all, if that is asked for and may be of use."""
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
    logger.warning_once(f"{_CALL}: a row runs without a graph, as {reason}.")


class _AllLayers(torch.nn.Module):
    """Takes the place of the layers for one forward over a packed row."""

    def __init__(self, graphs: "LayerGraphs", text: torch.nn.Module, boundaries: SequenceBoundaries):
        super().__init__()
        # Not as modules of this one: nothing is to be set up for them.
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
    """The graphs of one model's layers, by what they were made for; they share their memory."""

    def __init__(self, row_length: int):
        self.row_length = row_length
        self._graphs: dict[tuple, _Graph] = {}
        self._parameters: list[torch.nn.Parameter] = []
        self._made_for: list = []
        self._place = None
        self._last: Callable[[], _Use | None] = lambda: None

    def __deepcopy__(self, memo: dict) -> "LayerGraphs":
        return type(self)(self.row_length)

    def __reduce__(self):
        return type(self), (self.row_length,)

    def reason_against(
        self, layers: torch.nn.ModuleList, inputs: tuple[torch.Tensor, ...], boundaries: SequenceBoundaries
    ) -> str:
        """Why the row cannot be computed by a graph, or nothing."""
        hidden_states = inputs[0]
        if not _is_on_gpu(hidden_states):
            return f"it is on {hidden_states.device}, not on the current GPU"
        if boundaries.is_shard:
            return "it is a part of a row"
        if hidden_states.shape[1] > self.row_length:
            return f"it has more tokens than row_length={self.row_length}"
        last = self._last()
        if last is not None and not last.over:
            return "the backward of an earlier row is still to come"
        if any(layer.gradient_checkpointing for layer in layers):
            return "gradient checkpointing is on"
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            return "something hooks into the tensors that are kept for backward"
        trained, made_for = {}, []
        for module in layers.modules():
            if _is_hooked(module):
                return f"something hooks into a {type(module).__name__}"
            made_for.append(module.training)
            for parameter in module._parameters.values():
                if parameter is None:
                    continue
                if (
                    type(parameter) not in (torch.nn.Parameter, torch.Tensor)
                    or parameter.device != hidden_states.device
                ):
                    return f"it has a {type(parameter).__name__} on {parameter.device} among its parameters"
                made_for.append((parameter.data_ptr(), parameter.dtype, parameter.requires_grad))
                if parameter.requires_grad:
                    trained[parameter] = None
            made_for += [buffer.data_ptr() for buffer in module._buffers.values() if buffer is not None]
        if not trained and not hidden_states.requires_grad:
            return "nothing in the layers or before them is trained"
        self._parameters = list(trained)
        if made_for != self._made_for:
            # Graphs read the old addresses, and do what layers in the old mode did.
            if self._graphs:
                logger.warning_once(
                    f"{_CALL}: graphs are made anew, as parameters or modes of the layers have changed."
                )
            self._graphs, self._place, self._made_for = {}, None, made_for
        return ""

    def run(
        self,
        layers: torch.nn.ModuleList,
        attention: str,
        inputs: tuple[torch.Tensor, ...],
        boundaries: SequenceBoundaries,
    ) -> torch.Tensor:
        """What the layers make of `inputs` (hidden states `[1, T, hidden]`, cosines and sines `[1, T, rotary]`)."""
        # The row's padding is a document too, and the last slot is always empty.
        slots = _FEWEST_SLOTS
        while slots < boundaries.num_documents + 2:
            slots *= _MORE_SLOTS
        device = inputs[0].device.type
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        key = (slots, attention, cast, *((x.shape[2:], x.dtype, x.requires_grad) for x in inputs))
        graph = self._graphs.get(key)
        if graph is None:
            if self._place is None:
                self._place = _new_place()
            logger.info(f"{_CALL}: a graph is made for rows of up to {slots - 2} documents.")
            graph = _Graph(list(layers), self._parameters, inputs, self.row_length, slots, cast, self._place)
            self._graphs[key] = graph
        graph.fill(inputs, boundaries)
        use = _Use()
        self._last = weakref.ref(use)
        return _Replay.apply(graph, use, inputs[0], *self._parameters)


class _Use:
    """One forward by a graph, whose activations nothing else may overwrite until its backward is over."""

    over = False


class _Graph:
    def __init__(self, layers, parameters, inputs, row_length, slots, cast, place):
        self.inputs = [x.new_zeros(x.shape[0], row_length, *x.shape[2:]) for x in inputs]
        self.inputs[0].requires_grad_(inputs[0].requires_grad)
        self.cu_seqlens = torch.full((slots + 1,), row_length, dtype=torch.int32, device=inputs[0].device)
        self.cu_seqlens[0] = 0
        device = inputs[0].device.type
        stand_ins = _stand_ins(layers)
        wanted = [x for x in (self.inputs[0], *(stand_ins[x] for x in parameters)) if x.requires_grad]

        def forward():
            # A tensor of its own: kernel packages keep what they derived from one that they know.
            boundaries = _open_boundaries(self.cu_seqlens.clone(), row_length)
            options = {"attention_mask": None, "position_ids": boundaries.position_ids, **boundaries.layer_kwargs()}
            x, *position_embeddings = self.inputs
            # Weights that were cast before would be what the graph reads ever after.
            autocast = torch.autocast(device, cast, enabled=cast is not None, cache_enabled=False)
            options["position_embeddings"] = tuple(position_embeddings)
            with autocast:
                for layer in layers:
                    own = {name: stand_ins[parameter] for name, parameter in layer.named_parameters()}
                    x = torch.func.functional_call(layer, own, (x,), options)
            self._output = x
            return [x.detach()]

        def backward():
            # Where training calls backward autocast is off.
            with torch.autocast(device, enabled=False):
                return torch.autograd.grad(self._output, wanted, self.d_output, allow_unused=True)

        with _beside_other_work():
            for _ in range(_WARM_UPS):
                (output,) = forward()
                self.d_output = torch.zeros_like(output)
                backward()
        # Autograd's nodes on that stream must be gone, and later the activations, which are the pool's.
        self._output = None
        self._forward = _Recording(forward, place)
        self._backward = _Recording(backward, place)
        self._output = None

    @torch.no_grad()
    def fill(self, inputs: tuple[torch.Tensor, ...], boundaries: SequenceBoundaries) -> None:
        length, ends = inputs[0].shape[1], boundaries.cu_seqlens
        for mine, given in zip(self.inputs, inputs, strict=True):
            mine[:, :length].copy_(given)
        # What an earlier row left there may not even be finite.
        self.inputs[0][:, length:].zero_()
        self.cu_seqlens[: len(ends)].copy_(ends)
        self.cu_seqlens[len(ends) :].fill_(self.inputs[0].shape[1])

    def forward(self, length: int) -> torch.Tensor:
        (output,) = self._forward.replay()
        return output[:, :length].clone()

    def backward(self, d_output: torch.Tensor) -> list[torch.Tensor | None]:
        """The gradients of what was wanted; new tensors, as the next replay writes to the same ones."""
        length = d_output.shape[1]
        self.d_output[:, :length].copy_(d_output)
        self.d_output[:, length:].zero_()
        gradients = self._backward.replay()
        copies = iter(torch._foreach_mul([x for x in gradients if x is not None], 1))
        return [None if x is None else next(copies) for x in gradients]


def _open_boundaries(cu_seqlens: torch.Tensor, row_length: int) -> SequenceBoundaries:
    """Boundaries that only the device knows, so that a graph serves any documents that are written there."""
    return SequenceBoundaries(
        cu_seqlens,
        length=row_length,
        device_only="In graphs these are the gated delta rule by flash-linear-attention or FlashQLA and attention by varlen_attn, "
        "in float16 or bfloat16 (or under autocast) and without attention dropout: load the model in bfloat16 with "
        'attn_implementation="sdpa" and install the kernels that `transformers-packed env` misses, or train without graphs.',
    )


def _stand_ins(layers: list[torch.nn.Module]) -> dict[torch.nn.Parameter, torch.nn.Parameter]:
    """For each parameter of the layers another one on the same memory.

    Who holds the loss of an earlier row holds autograd's nodes of the parameters too. These belong to the stream of that
    row, for which a recording may not wait.
    """
    parameters = (parameter for layer in layers for parameter in layer.parameters())
    return {x: torch.nn.Parameter(x.detach(), requires_grad=x.requires_grad) for x in parameters}


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
                f"{_CALL}: backward through these layers ran before, and their activations are gone. Run the forward "
                "again, or train without graphs to use retain_graph=True."
            )
        if ctx.versions != [x._version for x in ctx.parameters]:
            raise RuntimeError(
                f"{_CALL}: a parameter of these layers was changed in place between forward and backward. Change it after "
                "the backward."
            )
        gradients = ctx.graph.backward(d_output)
        ctx.use.over = True
        if not ctx.needs_input_grad[2]:
            return None, None, None, *gradients
        d_hidden_states, *others = gradients
        return None, None, d_hidden_states[:, : ctx.length], *others


class _Recording:
    """What a function did to the GPU, to be repeated: `replay` makes the tensors that it returned anew, where they are."""

    def __init__(self, function: Callable[[], Any], place: tuple):
        pool, stream = place
        self._graph = torch.cuda.CUDAGraph()
        # Other threads, which pin memory for instance, may go on.
        with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            self._result = function()

    def replay(self) -> Any:
        self._graph.replay()
        return self._result


@contextmanager
def _beside_other_work() -> Iterator[None]:
    """On a stream of its own, where all that happens only in a first call has to happen before a recording."""
    current, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        yield
    current.wait_stream(stream)


def _new_place() -> tuple:
    """The memory and the stream of recordings, on the current GPU. The stream that torch would take may be another's."""
    return torch.cuda.graph_pool_handle(), torch.cuda.Stream()


def _is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and tensor.device.index == torch.cuda.current_device()


def _is_hooked(module: torch.nn.Module) -> bool:
    if "forward" in vars(module) or module._compiled_call_impl is not None:
        return True
    return any(getattr(hook, "__module__", None) != _RECORDING for hook in hooks_of(module))
