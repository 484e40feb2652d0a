"""Measure whether the documents of a batch depend on one another, and on which neighbors their bits depend.

The last hidden states of one document, times fixed random weights, have a gradient of exactly 0 with respect to the
embeddings of every other document. Hidden states and not the loss, because trainers of preferences have no loss per
document, and a router's loss couples documents by design.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ..models.registry import inner_model
from ..models.text_model import PackedTextModelMixin
from .model_state import off_zero


class UnseenError(RuntimeError):
    """A model does not show what a measurement needs."""


class NotFiniteError(UnseenError):
    """The hidden states of a document, or their gradient, have values that are not finite."""


def leak_between(
    model,
    forward: Callable[[], Any],
    batch: Mapping[str, Any],
    places: list[torch.Tensor],
    sources: list[torch.Tensor] | None = None,
) -> float:
    """The largest gradient of a document's last hidden states at other documents, relative to the largest at its own.

    `sources` are the tokens that each document may depend on, by default its own. Weights are [`off_zero`] meanwhile.

    Raises:
        [`UnseenError`]: the model shows no embeddings or no last hidden states.
        [`NotFiniteError`]: NaN or infinity within a document, from which gradients at others follow.
    """
    largest = inside = 0.0
    with off_zero(model), ExitStack() as stack:
        # What follows may compute gradients, also after an error.
        stack.callback(model.zero_grad)
        for number in range(len(places)):
            # A forward for each backward: selective checkpoints allow no second one.
            with watch(model) as seen:
                forward()
            embeddings, hidden = seen.embeddings, seen.hidden
            if embeddings is None or hidden is None:
                raise UnseenError("the model shows no embeddings or no last hidden states")
            of_input, of_output = indices_of(embeddings, batch, sources or places), indices_of(hidden, batch, places)
            weights = torch.randn(hidden.shape[-1], generator=torch.Generator().manual_seed(0)).to(hidden)
            own = hidden.flatten(0, 1)[of_output[number]]
            if not own.isfinite().all():
                raise NotFiniteError("last hidden states that are not finite")
            # A full backward: gradients of chosen tensors fail with reentrant checkpoints.
            (own * weights).float().sum().backward()
            if embeddings.grad is None:
                raise UnseenError("no hidden state depends on an embedding")
            gradient = embeddings.grad.flatten(0, 1).abs().amax(-1).float()
            embeddings.grad = None
            within = gradient[of_input[number]].max().item()
            if not math.isfinite(within):
                raise NotFiniteError("gradients within a document that are not finite")
            inside = max(inside, within)
            gradient[of_input[number]] = 0
            # NaN is larger than any number here.
            largest = max(largest, gradient.nan_to_num(nan=float("inf")).max().item())
    if not inside:
        raise UnseenError("no hidden state depends on an embedding")
    return largest / inside


def changed_by_others(
    model, forward: Callable[[], Any], batch: Mapping[str, Any], places: list[torch.Tensor]
) -> float:
    """The largest difference of a document's last hidden states in a batch from those of the document alone.

    Raises:
        [`UnseenError`]: the model shows no last hidden states.
    """
    inner, largest = inner_model(model), 0.0
    with watch(model) as seen:
        forward()
    together = _last_hidden(seen)
    for place, own in zip(places, indices_of(together, batch, places), strict=True):
        ids = batch["input_ids"].flatten()[place.to(batch["input_ids"].device)][None]
        with watch(model) as seen:
            inner(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        difference = together.flatten(0, 1)[own.to(together.device)] - _last_hidden(seen).flatten(0, 1)
        # NaN is larger than any number here.
        largest = max(largest, difference.abs().nan_to_num(nan=float("inf")).max().item())
    return largest


def _last_hidden(seen: "Seen") -> torch.Tensor:
    if seen.hidden is None:
        raise UnseenError("the model shows no last hidden states")
    return seen.hidden.detach().float()


def indices_of(states: torch.Tensor, batch: Mapping[str, Any], places: list[torch.Tensor]) -> list[torch.Tensor]:
    """The indices of documents in flattened states, which may leave out the padding of the batch."""
    ids = batch["input_ids"]
    if states.shape[:2] == ids.shape:
        return places
    real = batch["attention_mask"].flatten().bool().cpu()
    if states.shape[:2] != (1, int(real.sum())):
        raise UnseenError(f"states of shape {tuple(states.shape)} for tokens of shape {tuple(ids.shape)}")
    ranks = real.cumsum(0) - 1
    return [ranks[place] for place in places]


class Seen:
    """The output of the embedding in a forward, which keeps its gradient, and the last hidden states.

    Of several forwards, `embedded` has the inputs and the outputs of all that have a gradient, and `tokens` the number of
    tokens that the layers of our text models compute, with and without one.
    """

    embeddings: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    tokens = 0

    def __init__(self) -> None:
        self.embedded: list[tuple[tuple, torch.Tensor]] = []
        self._counted = True

    def embed(self, module, inputs, output: torch.Tensor) -> None:
        self._counted = False
        # Some trainers run another forward for their metrics.
        if not torch.is_grad_enabled():
            return
        if output.requires_grad:
            output.retain_grad()
        else:
            output.requires_grad_(True)
        self.embeddings = output
        self.embedded.append((inputs, output))

    def enter(self, layer, args: tuple, kwargs: dict[str, Any]) -> None:
        # Checkpoints compute a layer again in backward. A larger model embeds the padding that its text model leaves out.
        if not self._counted:
            hidden = args[0] if args else kwargs["hidden_states"]
            self.tokens, self._counted = self.tokens + hidden.shape[:-1].numel(), True

    def leave(self, module, inputs, output: Any) -> None:
        hidden = getattr(output, "last_hidden_state", None)
        # Vision towers come before the language model, and wrappers of it return the same states.
        if isinstance(hidden, torch.Tensor) and hidden.ndim == 3 and hidden.requires_grad:
            self.hidden = hidden


@contextmanager
def watch(model: torch.nn.Module) -> Iterator[Seen]:
    seen, inner = Seen(), inner_model(model)
    models = [module for module in inner.modules() if hasattr(module, "get_input_embeddings")]
    with ExitStack() as hooks:
        for module in models:
            hooks.enter_context(module.register_forward_hook(seen.leave))
        texts: Any = (module for module in inner.modules() if isinstance(module, PackedTextModelMixin))
        for text in texts:
            hooks.enter_context(text.layers[0].register_forward_pre_hook(seen.enter, with_kwargs=True))
        hooks.enter_context(inner.get_input_embeddings().register_forward_hook(seen.embed))
        yield seen
