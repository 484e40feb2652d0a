"""Recordings of layers: one forward and one backward as CUDA graphs, and the autograd function that replays them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ..boundaries import SequenceBoundaries
from ..device_boundaries import DeviceBoundaries
from ..foreign import swapped
from ..ops.autograd import first_order
from .releases import collected_router_logits, router_logits_of_forward


_WARM_UPS = 2


class Use:
    """One forward of the graphs of a row. No other forward may overwrite its activations until its backward has finished."""

    def __init__(self):
        # The recordings whose backward has not run yet, in the order of their forwards.
        self.left: list[RecordedLayers] = []


class RecordedRow:
    """What the recordings of a row read: cosines and sines, and the boundaries of up to a number of documents.

    `buffers` are the tensors that recordings of all rows use, one row after the other. With `returns_logits`, they return the
    logits of routers.
    """

    def __init__(self, position_embeddings, max_length, slots, cast, device, buffers, returns_logits):
        self.position_embeddings: list[torch.Tensor] | None = None
        if position_embeddings is not None:
            self.position_embeddings = [x.new_zeros(x.shape[0], max_length, *x.shape[2:]) for x in position_embeddings]
        self.max_length, self.length, self.returns_logits = max_length, 0, returns_logits
        self.cu_seqlens = torch.full((slots + 1,), max_length, dtype=torch.int32, device=device)
        self.cu_seqlens[0] = 0
        # Without the cache, so the graph does not keep reading weights that were cast before the recording.
        self.autocast = partial(torch.autocast, device.type, cast, enabled=cast is not None, cache_enabled=False)
        self._buffers: dict[tuple, torch.Tensor] = buffers

    def fill(self, position_embeddings: Iterable[torch.Tensor] | None, boundaries: SequenceBoundaries) -> None:
        self.length = boundaries.total_length
        for mine, given in zip(self.position_embeddings or (), position_embeddings or (), strict=True):
            mine[:, : given.shape[1]].copy_(given)
        ends = boundaries.cu_seqlens
        self.cu_seqlens[: len(ends)].copy_(ends)
        self.cu_seqlens[len(ends) :].fill_(self.max_length)

    def options(self) -> dict[str, Any]:
        """Return the arguments of a layer."""
        # A new tensor, because kernel packages cache results by the identity of this tensor.
        boundaries = _open_boundaries(self.cu_seqlens.clone(), self.max_length)
        options = {"attention_mask": None, "position_ids": boundaries.position_ids, "boundaries": boundaries}
        if self.position_embeddings is None:
            return options
        return options | {"position_embeddings": tuple(self.position_embeddings)}

    def buffer(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor of a full row, beside those of other names and kinds."""
        shape = like.shape[0], self.max_length, *like.shape[2:]
        key = name, shape, like.dtype
        if key not in self._buffers:
            self._buffers[key] = like.new_zeros(shape)
        return self._buffers[key]


class RecordedLayers:
    """The recordings of one forward and one backward of consecutive layers of a [`RecordedRow`].

    Recordings with one memory pool have to run in the order in which they were made: each writes only to memory that no
    earlier one still needs. A row may leave out some of them, and less is written.
    """

    def __init__(self, layers, row, number, like, trained):
        """Run each layer a few times, on rows `like` this one, which requires gradients if `trained`.

        `number` is the place in the row.
        """
        # Layers may share parameters.
        parameters = (parameter for layer in layers for parameter in layer.parameters())
        self._parameters = [parameter for parameter in dict.fromkeys(parameters) if parameter.requires_grad]
        self._row, self._layers = row, layers
        self._input = row.buffer(f"input {number}", like).detach().requires_grad_(trained)
        self._segments = list(_segments(layers))
        self._stand_ins = _stand_ins(layers)
        self._wanted = [x for x in (self._input, *(self._stand_ins[x] for x in self._parameters)) if x.requires_grad]
        self._saved: list[tuple] | None = None
        # All one-time setup happens before a recording.
        with self._as_recorded():
            for _ in range(_WARM_UPS):
                self.output, logits = self._warm_up()
        self._d_output = row.buffer("gradient", self.output)
        # Of a router, `[1, T, experts]`.
        self._d_logits = [row.buffer(f"gradient of router {number}.{i}", x) for i, x in enumerate(logits)]
        self.finish()

    @property
    def trained(self) -> bool:
        return bool(self._wanted)

    @property
    def has_trained_input(self) -> bool:
        return self._input.requires_grad

    def record_forward(self, place: tuple) -> None:
        with self._as_recorded():
            self._forward = _Recording(self._compute, place)

    def record_backward(self, place: tuple) -> None:
        if self.trained:
            with self._as_recorded():
                self._backward = _Recording(self._differentiate, place)

    def finish(self) -> None:
        """Free the activations in the pool, when no other recording of the row can take their memory."""
        self._saved = self._options = None

    def _as_recorded(self) -> AbstractContextManager:
        # The graph itself computes the layers again.
        return swapped(*map(vars, self._layers), gradient_checkpointing=False)

    def _warm_up(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run forward and backward of one layer after the other, in the memory of one.

        Return the tensor for their output, and the logits of routers.
        """
        x, self._options = self._input, self._row.options()
        found: list[torch.Tensor] = []
        for layer in self._layers:
            output, *logits = self._run([layer], x)
            # Trained parameters may be unused.
            if output.requires_grad:
                leaves = _leaves(x, self._trained_in([layer]))
                gradients = [self._row.buffer("gradient", output), *map(torch.zeros_like, logits)]
                _gradients([output, *logits], leaves, gradients)
            x = output.detach().requires_grad_(output.requires_grad)
            found += (y.detach() for y in logits)
        return self._row.buffer("output", x), found

    def _compute(self) -> list[torch.Tensor]:
        """Return the output of the layers and the logits of routers, and save what their backward needs."""
        x, self._options = self._input, self._row.options()
        self._saved = []
        found: list[torch.Tensor] = []
        for layers, again in self._segments:
            trained = self._trained_in(layers)
            outputs = self._run_again(layers, x) if again else self._run(layers, x)
            self._saved.append((trained, x, outputs))
            output, *logits = outputs
            x = output.detach().requires_grad_(bool(_leaves(x, trained)))
            found += (y.detach() for y in logits)
        return [self._row.buffer("output", x).copy_(x.detach()), *found]

    def _differentiate(self) -> list[torch.Tensor | None]:
        """Return the gradients of the input and of all trained parameters."""
        found: dict[torch.Tensor, torch.Tensor] = {}
        gradient: torch.Tensor | None = self._d_output
        d_logits = [*self._d_logits]
        # What one segment is done with, the next one's memory can have.
        while self._saved:
            trained, x, outputs = self._saved.pop()
            if not outputs[0].requires_grad:
                break
            leaves = _leaves(x, trained)
            of_routers = [d_logits.pop() for _ in outputs[1:]][::-1]
            for leaf, new in zip(leaves, _gradients(outputs, leaves, [gradient, *of_routers]), strict=True):
                # Layers may share parameters.
                if new is not None:
                    found[leaf] = found[leaf] + new if leaf in found else new
            gradient = found.get(x) if x is self._input else found.pop(x, None)
        return [found.get(leaf) for leaf in self._wanted]

    def _trained_in(self, layers: list[torch.nn.Module]) -> list[torch.nn.Parameter]:
        parameters = (self._stand_ins[parameter] for layer in layers for parameter in layer.parameters())
        return [parameter for parameter in dict.fromkeys(parameters) if parameter.requires_grad]

    def _run(self, layers: list[torch.nn.Module], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the output of the layers, and the logits `[1, T, experts]` of their routers if the row returns them."""
        returned: AbstractContextManager[list[torch.Tensor]] = nullcontext([])
        if self._row.returns_logits:
            returned = collected_router_logits()
        with self._row.autocast(), returned as logits:
            for layer in layers:
                own = {name: self._stand_ins[parameter] for name, parameter in layer.named_parameters()}
                x = torch.func.functional_call(layer, own, (x,), self._options)
        return x, *(y[None] for y in logits)

    def _run_again(self, layers: list[torch.nn.Module], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run layers that the backward computes again, up to the last tensor that it needs. They have no dropout."""
        return checkpoint(self._run, layers, x, use_reentrant=False, preserve_rng_state=False)

    def takes(self, hidden_states: torch.Tensor) -> bool:
        """Whether hidden states of the row have the shape and the dtype that was recorded."""
        shape = self._input.shape[0], self._row.length, *self._input.shape[2:]
        return hidden_states.shape == shape and hidden_states.dtype == self._input.dtype

    def run(self, use: Use, hidden_states: torch.Tensor) -> torch.Tensor:
        """Apply the layers to a row whose boundaries [`RecordedRow.fill`] has copied, as one node of autograd."""
        output, *logits = _Replay.apply(self, use, hidden_states, *self._parameters)
        if output.requires_grad:
            use.left.append(self)
        of_forward = router_logits_of_forward()
        if of_forward is not None:
            of_forward += logits
        return output

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
        length = hidden_states.shape[1]
        with torch.no_grad():
            self._input[:, :length].copy_(hidden_states)
            # An earlier row may have left values that are not finite.
            self._input[:, length:].zero_()
        output, *logits = self._forward.replay()
        return output[:, :length].clone(), *(x[0, :length].clone() for x in logits)

    def backward(self, d_output: torch.Tensor, *d_logits: torch.Tensor) -> list[torch.Tensor | None]:
        """Return the requested gradients as new tensors, because the next replay overwrites the recorded ones."""
        length = d_output.shape[1]
        given = d_output, *(x[None] for x in d_logits)
        for mine, gradient in zip((self._d_output, *self._d_logits), given, strict=True):
            mine[:, :length].copy_(gradient)
            mine[:, length:].zero_()
        gradients = self._backward.replay()
        copies = iter(torch._foreach_mul([x for x in gradients if x is not None], 1))
        return [None if x is None else next(copies) for x in gradients]


def _open_boundaries(cu_seqlens: torch.Tensor, max_length: int) -> SequenceBoundaries:
    """Create boundaries without a host copy, so a graph supports any documents written to `cu_seqlens`."""
    return DeviceBoundaries(
        cu_seqlens,
        length=max_length,
        advice="CUDA graphs support the delta rules from flash-linear-attention or FlashQLA and attention "
        "from varlen_attn, in float16 or bfloat16 (or under autocast) and without attention dropout. Load the model "
        'in bfloat16 with attn_implementation="sdpa" and install the kernels that `transformers-packed doctor` names, '
        "or train without graphs.",
    )


def _stand_ins(layers: list[torch.nn.Module]) -> dict[torch.nn.Parameter, torch.nn.Parameter]:
    """Map each parameter of the layers to what a recording reads: if it is trained, a new one that shares its memory.

    A reference to the loss of an earlier row also keeps autograd's nodes of the original parameters alive. These nodes
    belong to the stream of that row, and a recording cannot wait for that stream.
    """
    parameters = (parameter for layer in layers for parameter in layer.parameters())
    return {x: torch.nn.Parameter(x.detach()) if x.requires_grad else x for x in parameters}


def _leaves(x: torch.Tensor, trained: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Return what layers with this input have gradients for."""
    return [x, *trained] if x.requires_grad else [*trained]


def _gradients(
    outputs: Sequence[torch.Tensor], leaves: list[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor | None, ...]:
    # The logits of a frozen router have none if nothing before it has.
    pairs = ((x, gradient) for x, gradient in zip(outputs, gradients, strict=True) if x.requires_grad)
    outputs, gradients = zip(*pairs, strict=True)
    # Training calls backward outside of autocast.
    with torch.autocast(outputs[0].device.type, enabled=False):
        return torch.autograd.grad(outputs, leaves, gradients, allow_unused=True)


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


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, graph, use, hidden_states, *parameters):
        ctx.graph, ctx.use, ctx.length = graph, use, hidden_states.shape[1]
        ctx.parameters, ctx.versions = parameters, [x._version for x in parameters]
        return graph.forward(hidden_states)

    @staticmethod
    @first_order("Train without graphs.")
    def backward(ctx, *d_outputs):
        if ctx.graph not in ctx.use.left:
            raise RuntimeError(
                "use_cuda_graphs: backward has already run for this forward, and its activations are gone. Run the forward "
                "again, or train without graphs to use retain_graph=True."
            )
        if ctx.versions != [x._version for x in ctx.parameters]:
            raise RuntimeError(
                "use_cuda_graphs: a parameter of these layers was changed in place between forward and backward. Change it "
                "after backward."
            )
        gradients = ctx.graph.backward(*d_outputs)
        # Later ones should have run theirs before. This one may have overwritten their activations.
        del ctx.use.left[ctx.use.left.index(ctx.graph) :]
        if not ctx.graph.has_trained_input:
            return None, None, None, *gradients
        d_hidden_states, *others = gradients
        return None, None, d_hidden_states[:, : ctx.length], *others


class _Recording:
    """A recording of a function's GPU work. `replay` recomputes the returned tensors at the same addresses.

    Whatever memory of the pool they have, later recordings may have, too: use the results before another replay.
    """

    def __init__(self, function: Callable[[], Sequence[torch.Tensor | None]], place: tuple):
        pool, stream = place
        self._graph = torch.cuda.CUDAGraph()
        # Other threads may keep calling CUDA, for example to pin memory.
        with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            result = function()
        self._result = [None if x is None else _without_memory(x) for x in result]

    def replay(self) -> list[Any]:
        self._graph.replay()
        return self._result


class _Address:
    """The place of a GPU tensor, as other packages describe it to `torch.as_tensor`."""

    def __init__(self, tensor: torch.Tensor):
        size = tensor.element_size()
        self.__cuda_array_interface__ = {
            "data": (tensor.data_ptr(), False),
            # NumPy has no bfloat16.
            "typestr": f"<i{size}",
            "shape": tuple(tensor.shape),
            "strides": tuple(size * stride for stride in tensor.stride()),
            "version": 2,
        }


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor at the same address, whose memory the allocator may give away."""
    return torch.as_tensor(_Address(tensor), device=tensor.device).view(tensor.dtype)


@contextmanager
def same_counts(layers: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Put back how often experts were chosen: the rows of warm-ups do not count."""
    modules = [module for layer in layers for module in layer.modules()]
    counts = [x for module in modules if (x := getattr(module, "expert_counts", None)) is not None]
    before = [x.clone() for x in counts]
    yield
    for x, earlier in zip(counts, before, strict=True):
        x.copy_(earlier)


def new_place() -> tuple:
    """Create the memory pool and stream for recordings on the current GPU. Torch's default stream may be in use."""
    return torch.cuda.graph_pool_handle(), torch.cuda.Stream()


def is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and tensor.device.index == torch.cuda.current_device()
