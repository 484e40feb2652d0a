"""A recording of layers: one forward and one backward as CUDA graphs, and the autograd function that replays them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from ..boundaries import SequenceBoundaries
from ..device_boundaries import DeviceBoundaries
from ..foreign import swapped
from ..ops.autograd import first_order


_WARM_UPS = 2


class Use:
    """One forward of a graph. No other forward may overwrite its activations until its backward has finished."""

    over = False


class RecordedLayers:
    """The recordings of one forward and one backward of layers, for rows of up to a number of documents."""

    def __init__(self, layers, parameters, inputs, max_length, slots, cast, place):
        self.inputs = [x.new_zeros(x.shape[0], max_length, *x.shape[2:]) for x in inputs]
        self.inputs[0].requires_grad_(inputs[0].requires_grad)
        self.cu_seqlens = torch.full((slots + 1,), max_length, dtype=torch.int32, device=inputs[0].device)
        self.cu_seqlens[0] = 0
        self._segments = list(_segments(layers))
        self._stand_ins = _stand_ins(layers)
        self._wanted = [x for x in (self.inputs[0], *(self._stand_ins[x] for x in parameters)) if x.requires_grad]
        device = inputs[0].device.type
        # Without the cache, so the graph does not keep reading weights that were cast before the recording.
        self._autocast = partial(torch.autocast, device, cast, enabled=cast is not None, cache_enabled=False)
        # The graph itself computes the layers again.
        with swapped(*map(vars, layers), gradient_checkpointing=False):
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
        self._options = {"attention_mask": None, "position_ids": boundaries.position_ids, "boundaries": boundaries}
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
        found: dict[torch.Tensor, torch.Tensor] = {}
        gradient: torch.Tensor | None = self.d_output
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

    def run(self, use: Use, hidden_states: torch.Tensor, parameters: list[torch.nn.Parameter]) -> torch.Tensor:
        """Apply the layers to a row that [`RecordedLayers.fill`] has copied, as one node of autograd."""
        return _Replay.apply(self, use, hidden_states, *parameters)

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


def _open_boundaries(cu_seqlens: torch.Tensor, max_length: int) -> SequenceBoundaries:
    """Create boundaries without a host copy, so a graph supports any documents written to `cu_seqlens`."""
    return DeviceBoundaries(
        cu_seqlens,
        length=max_length,
        advice="CUDA graphs support the gated delta rule from flash-linear-attention or FlashQLA and attention "
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
                "use_cuda_graphs: backward has already run for this forward, and its activations are gone. Run the forward "
                "again, or train without graphs to use retain_graph=True."
            )
        if ctx.versions != [x._version for x in ctx.parameters]:
            raise RuntimeError(
                "use_cuda_graphs: a parameter of these layers was changed in place between forward and backward. Change it "
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


def new_place() -> tuple:
    """Create the memory pool and stream for recordings on the current GPU. Torch's default stream may be in use."""
    return torch.cuda.graph_pool_handle(), torch.cuda.Stream()


def is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and tensor.device.index == torch.cuda.current_device()
