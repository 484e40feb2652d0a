"""`Loss`, what a language model trains, and `LossStep`, the losses of one forward."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from ...boundaries import PACKING_KEYWORDS
from ...ops.cross_entropy import shift_labels
from ..trunk_row import TrunkRow
from .head import Prediction, weighted_sum


# What a batch, or the inputs of a trunk, say of tokens and their documents.
TOKENS = {"input_ids", "inputs_embeds", "position_ids", "attention_mask", "boundaries", "settled", *PACKING_KEYWORDS}


def shifted_labels(batch: Mapping[str, Any], ignore_index: int = -100) -> torch.Tensor | None:
    """Return what each token of a batch predicts: its `shift_labels`, or else its `labels` shifted, if it has any."""
    labels, shifted = batch.get("labels"), batch.get("shift_labels")
    return shift_labels(labels, ignore_index) if shifted is None and labels is not None else shifted


class Loss:
    """A loss of a language model. The model computes the weighted sum of those in its list `losses`.

    A subclass says in `begin` what it needs of the trunk, and how it is computed from that without logits. What else it
    has to say has a default: a loss without targets of its own, that logs nothing, and that nobody asks for by an option.

    Args:
        weight (`float`, *optional*, defaults to 1.0):
            The factor of the loss in the sum.
    """

    # What errors and the line of a set-up call it.
    title: ClassVar[str]
    # The argument of a forward with its divisor, the number of its targets in a step of all processes.
    items: ClassVar[str] = ""
    # Whether the stock forward computes it too, from logits.
    is_own: ClassVar[bool] = False
    # Whether the trunk needs gradients for it, if no other loss trains.
    trains_trunk: ClassVar[bool] = True
    # How many sums it notes for the log.
    num_sums: ClassVar[int] = 0

    # Whether it trains without the losses of the model.
    alone = False
    # Set by the callback of a Trainer: the sums since the last log, and whether those that take longer are wanted.
    record: list[torch.Tensor] | None = None
    is_detailed = False

    def __init__(self, weight: float = 1.0):
        self.weight = weight

    @classmethod
    def of_options(cls, options: Any) -> "Loss | None":
        """Return the loss that the options of [`configure_packing`] ask for, if they do."""
        return None

    @staticmethod
    def targets_of(batch: Mapping[str, Any]) -> torch.Tensor | None:
        """Return labels of which as many are targets as the loss has in a batch, or `None` without labels."""
        return None

    def begin(self, step: "LossStep") -> "Callable[[LossStep], torch.Tensor | Prediction] | None":
        """Prepare the loss before the trunk runs, which gets `step.inputs`, and return what computes it afterwards.

        The result is the loss without its weight, or hidden states and their targets, whose product with the vocabulary
        several losses then share. `None` if this forward has no such loss.
        """
        raise NotImplementedError

    def note(self, *sums: Any) -> None:
        """Keep the sums of a forward for the log."""
        if self.record is not None:
            device = sums[0].device
            self.record.append(torch.stack([torch.as_tensor(x, device=device).detach().float() for x in sums]))

    def figures(self, *sums: float) -> dict[str, float]:
        """Return what to log, of the sums over all forwards and processes since the last log."""
        return {}

    def prepare(self, model: torch.nn.Module, dtype: torch.dtype | None) -> None:
        """Add to a model what the loss trains. `dtype` is that of new parameters, by default that of the model."""

    def trained_in(self, model: torch.nn.Module) -> torch.nn.Module | None:
        """Return the module that only this loss trains, if there is one."""
        return None

    @property
    def models(self) -> tuple[torch.nn.Module, ...]:
        """Other models that it reads. The check before the first step runs them as it runs the model."""
        return ()

    def is_of_rows(self, model: Any) -> bool:
        """Whether it belongs to a whole row, so that of the parts of a row, only `begin` counts it once."""
        return False

    def against_parts(self, model: Any) -> str | None:
        """Why the check cannot compare the parts of one row with the row, where a step has several rows."""
        return None


def trains_trunk(losses: Iterable[Loss]) -> bool:
    """Whether one of them gives the trunk gradients. Otherwise it runs without them."""
    return any(loss.trains_trunk for loss in losses)


@dataclass
class LossStep:
    """The losses of a forward.

    Args:
        model (`PreTrainedModel`):
            The language model.
        losses (`tuple[Loss, ...]`):
            What it trains.
        labels (`torch.LongTensor` of shape `[B, T]`):
            As in the forward of every causal language model.
        logits_to_keep (`int` or `torch.Tensor`):
            As in forward. The labels are those of the kept tokens.
        inputs (`dict`):
            The other arguments of the trunk, to which a loss adds what it asks for.
        items (`dict`):
            The divisors of the added losses, by the name of the argument.
        fields (`dict`):
            What the output of the model shows of the losses.
        outputs (`ModelOutput`):
            What the trunk has returned: the output of the base model, or of the whole one if it computes logits.
    """

    model: Any
    losses: tuple[Loss, ...]
    labels: torch.Tensor
    logits_to_keep: int | torch.Tensor
    inputs: dict[str, Any]
    items: dict[str, Any]
    fields: dict[str, Any] = field(default_factory=dict)
    outputs: Any = None
    _begun: list[tuple[Loss, Callable]] = field(default_factory=list)

    @property
    def keeps_all(self) -> bool:
        return isinstance(self.logits_to_keep, int) and not self.logits_to_keep

    def read_trunk(self) -> TrunkRow:
        """Let the text model fill what losses read of it. They all read the same one."""
        return self.inputs.setdefault("trunk_row", TrunkRow())

    def run(self, losses: Iterable[Loss], trunk: Callable[[], Any]) -> Any:
        """Prepare these losses, and run the trunk, without gradients if no loss of the step gives it any."""
        self._begun = [(loss, finish) for loss in losses if (finish := loss.begin(self)) is not None]
        with torch.set_grad_enabled(torch.is_grad_enabled() and trains_trunk(self.losses)):
            self.outputs = trunk()
        return self.outputs

    def terms(self) -> list[torch.Tensor]:
        """The losses that were prepared, with their weights. Predictions are one term, and share their product."""
        found = [(loss.weight, finish(self)) for loss, finish in self._begun]
        predictions = [(weight, x) for weight, x in found if isinstance(x, Prediction)]
        others = [weight * x for weight, x in found if not isinstance(x, Prediction)]
        return [weighted_sum(self.model.lm_head, predictions), *others] if predictions else others
