"""What a step of the real Trainer shows of a row of documents, and of the padded batch that the row stands for."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from ..audit.isolation import UnseenError, indices_of, watch
from ..data.documents import PaddedSamples
from ..data.excerpts import places_of
from ..foreign import swapped
from ..models.releases import PREPARE, prepare_inputs
from ..parallel.collectives import all_gather
from .compare import GRADIENT, LOSS, Measured
from .padded_steps import items_of, only_finite, own_step
from .restore import not_packing, replaced_collator, without_cache
from .sequence_parallel import PartCollator
from .typed import Trainer
from .warm_up import compiles_kernels, only_loss


class Row:
    """A row of documents, and the padded batch that it stands for, with the Trainer's step on each."""

    def __init__(
        self, trainer: Trainer, model, loader: Any, padded: Callable | None, documents: list, batch: dict, places: list
    ):
        self.trainer, self.model, self.loader, self.padded = trainer, model, loader, padded
        self.documents, self.batch, self.places = documents, batch, places
        self.longest = max(map(len, places))

    @cached_property
    def padded_batch(self) -> dict[str, Any]:
        columns = getattr(self.trainer.data_collator, "token_columns", ())
        with replaced_collator(self.loader, self.trainer.data_collator, self.padded or PaddedSamples(columns)):
            try:
                return self.loader.collate_fn(self.documents)
            except (ValueError, TypeError):
                # A collator that cannot pad labels, which packed training does not need.
                return PaddedSamples(tuple(columns))(self.documents)

    def loss(self) -> torch.Tensor:
        return loss_of(self.trainer, self.model, self.batch)

    def step(self) -> Measured:
        return step_of(self.trainer, self.model, self.batch, self.places)

    def step_padded(self) -> Measured:
        places = places_of(self.padded_batch, self.documents) or []
        # Where kernels are compiled, those of a batch that is not packed would take longer than the check.
        stock = nullcontext() if compiles_kernels(self.trainer.args.device) else not_packing(self.model)
        with stock, without_cache(self.model):
            return step_of(self.trainer, self.model, self.padded_batch, places)


@contextmanager
def whole_rows(trainer: Trainer, loader: Any) -> Iterator[None]:
    """Let each process compute whole rows and the loss of training in one process meanwhile."""
    cut, parallel = trainer.data_collator, getattr(trainer, "sequence_parallel", None)
    with ExitStack() as stack:
        # A process that stops in a step would let the others wait for its number of targets.
        stack.enter_context(swapped(vars(trainer.args), average_tokens_across_devices=False))
        if parallel is not None and isinstance(cut, PartCollator):
            originals = vars(trainer)[PREPARE].__self__.originals
            stack.enter_context(swapped(vars(trainer), data_collator=cut.rows, sequence_parallel=None, **originals))
            stack.enter_context(replaced_collator(loader, cut, cut.rows))
        yield


def loss_of(trainer: Trainer, model, batch: dict[str, Any]) -> torch.Tensor:
    batch, items = items_of(trainer, batch)
    with trainer.compute_loss_context_manager():
        return only_loss(trainer.compute_loss(model, prepare_inputs(trainer, batch), num_items_in_batch=items))


def step_of(trainer: Trainer, model, batch: dict[str, Any], places: list[torch.Tensor]) -> Measured:
    """The loss of the Trainer's own step, and its gradients with respect to the documents' embeddings and to the weights."""
    with watch(model) as seen:
        own = own_step(trainer, model, batch)
    hidden = _at(seen.hidden, batch, places)
    gradient = _at(None if seen.embeddings is None else seen.embeddings.grad, batch, places)
    # Hidden states are compared before the gradients that follow from them.
    hidden = None if hidden is None else only_finite(hidden)
    shown = {LOSS: own[LOSS], "last hidden state": hidden, GRADIENT: gradient, **own}
    return {name: x for name, x in shown.items() if x is not None}


def step_of_parts(trainer: Trainer, model, part: dict[str, Any], places: list[torch.Tensor]) -> Measured:
    """The same of a row whose parts several processes compute."""
    shared = trainer.sequence_parallel
    with watch(model) as seen:
        loss = own_step(trainer, model, part)[LOSS]
    parts = None if seen.embeddings is None else seen.embeddings.grad
    dist.all_reduce(loss, group=shared.group)
    # The mean over the processes follows in training.
    shown = {LOSS: loss / shared.size}
    if parts is None:
        return shown
    every = all_gather(parts, 1, shared.group)[0] / shared.size
    return shown | {GRADIENT: every[torch.cat(places).to(every.device)].float()}


def _at(states: torch.Tensor | None, batch: Mapping[str, Any], places: list[torch.Tensor]) -> torch.Tensor | None:
    """States `[B, T, hidden]` or their gradient at the tokens of documents `[tokens, hidden]`, if they are there."""
    if states is None or not places:
        return None
    try:
        indices = torch.cat(indices_of(states, batch, places))
    except UnseenError:
        return None
    return states.detach().flatten(0, 1)[indices.to(states.device)].float()
