"""`Loss`, what a language model trains, and `LossStep`, the losses of one forward.

Then the losses that stock models compute, too, the cross-entropy of each next token and that of routers, and the divergence
from a teacher, for distillation.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from ...boundaries import PACKING_KEYWORDS
from ...errors import input_error
from ...foreign import swapped
from ...ops.autograd import compute_dtype
from ...ops.cross_entropy import TargetCount, shift_labels
from ...ops.divergence import linear_divergence
from ...parallel.shard import RowShard
from ..inputs import kept_tokens
from ..trunk_row import TrunkRow, fill_ends
from ..untouched import is_fsdp
from .head import Prediction, is_plain, weighted_sum, with_weight


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

    def check(self, model: Any) -> None:
        """Raise a `ValueError` for a language model that cannot train the loss."""

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


_COEFFICIENT = "router_aux_loss_coef"


class CrossEntropyLoss(Loss):
    """The loss of every causal language model, which Trainer counts the targets of."""

    title = "cross-entropy"
    items = "num_items_in_batch"
    is_own = True

    def begin(self, step: LossStep) -> Any:
        inputs = step.inputs
        ignore_index = inputs.get("ignore_index", -100)
        targets: Any = shifted_labels({**inputs, "labels": step.labels}, ignore_index)
        number = TargetCount(targets, ignore_index)

        def finish(step: LossStep) -> Prediction:
            hidden_states = step.outputs.last_hidden_state[:, kept_tokens(step.logits_to_keep)]
            options = ignore_index, inputs.get("label_smoothing", 0.0)
            return Prediction(hidden_states, targets, int(number), inputs.get(self.items), *options)

        return finish


class RouterLoss(Loss):
    """The load balancing loss, which mixtures with `output_router_logits` add with the weight of their configuration."""

    title = "the loss of the routers"
    is_own = True

    def begin(self, step: LossStep) -> Any:
        config, inputs = step.model.config.get_text_config(), step.inputs
        if not self.is_of_rows(step.model):
            # Some mixtures have no loss of their routers.
            return None
        if inputs.get("output_router_logits") is None:
            inputs["output_router_logits"] = config.output_router_logits
        return self._of_outputs if inputs["output_router_logits"] else None

    def _of_outputs(self, step: LossStep) -> torch.Tensor:
        # Modeling files import kernels.
        from transformers.models.qwen3_next.modeling_qwen3_next import load_balancing_loss_func

        config, inputs = step.model.config.get_text_config(), step.inputs
        choices = config.num_experts, config.num_experts_per_tok
        aux_loss: Any = load_balancing_loss_func(step.outputs.router_logits, *choices, inputs.get("attention_mask"))
        boundaries = inputs.get("boundaries")
        if isinstance(boundaries, RowShard) and inputs.get("num_items_in_batch") is not None:
            # Every rank computes the loss of the whole row, and the losses of the ranks are summed.
            aux_loss = aux_loss / boundaries.size
        step.fields["aux_loss"] = aux_loss
        return getattr(config, _COEFFICIENT) * torch.as_tensor(aux_loss)

    def is_of_rows(self, model: Any) -> bool:
        return hasattr(model.config.get_text_config(), _COEFFICIENT)

    def against_parts(self, model: Any) -> str | None:
        # It counts once for each row of a step, so not as often in the check as in a step of one row.
        on = getattr(model.config.get_text_config(), "output_router_logits", False)
        return "routers have a loss for each row of a step" if on else None


class DivergenceLoss(Loss):
    """The divergence of a model from a teacher with the same vocabulary, at the tokens that predict a target.

    The teacher reads the same packed rows, in eval mode and without gradients. Its logits are never kept. It is no part of
    the model: no optimizer and no checkpoint sees it.

    Args:
        teacher (`PreTrainedModel`):
            A language model. A Trainer freezes it, patches it, and puts it on the device of the model. Elsewhere, call
            `patch_model(teacher).eval()`.
        weight (`float`, *optional*, defaults to 1.0):
            The factor of the loss in the sum.
        beta (`float`, *optional*, defaults to 0.5), temperature (`float`, *optional*, defaults to 1.0):
            As in [`linear_divergence`].
    """

    title = "the divergence from a teacher"
    items = "num_divergence_items_in_batch"
    num_sums = 2

    def __init__(self, teacher: Any, weight: float = 1.0, beta: float = 0.5, temperature: float = 1.0):
        super().__init__(weight)
        self.teacher, self.beta, self.temperature = teacher, beta, temperature

    @classmethod
    def of_options(cls, options: Any) -> "DivergenceLoss | None":
        if options.teacher is None:
            return None
        return cls(options.teacher, options.distill_weight, options.distill_beta, options.distill_temperature)

    @property
    def models(self) -> tuple[torch.nn.Module, ...]:
        return (self.teacher,)

    @staticmethod
    def targets_of(batch: Mapping[str, Any]) -> torch.Tensor | None:
        return shifted_labels(batch)

    def check(self, model: Any) -> None:
        if self.teacher is model:
            fix = "Load it again, or copy it: copy.deepcopy(model)."
            raise input_error("a teacher beside the model", "the model itself, which trains", fix)
        if not hasattr(type(self.teacher), "losses"):
            expected = "a teacher that is a language model of this package"
            fix = "Call patch_model(teacher), if its family has classes of its own here."
            raise input_error(expected, type(self.teacher).__name__, fix)
        heads = model.lm_head, self.teacher.lm_head
        for head in heads:
            if not is_plain(head):
                raise input_error(f"plain linear heads for {self.title}", type(head).__name__)
        own, taught = (len(head.weight) for head in heads)
        if own != taught:
            expected = f"a teacher with the {own:,} words of the model's vocabulary"
            fix = "If they have one tokenizer, and only the padding of the embeddings differs, call "
            fix += f"resize_token_embeddings({min(own, taught)}) on the larger one."
            raise input_error(expected, f"{taught:,} words", fix)

    def prepare(self, model: torch.nn.Module, dtype: torch.dtype | None) -> None:
        """Freeze the teacher."""
        self.teacher.eval().requires_grad_(False)

    def begin(self, step: LossStep) -> Any:
        if self.teacher.training:
            raise input_error("a teacher in eval mode", "one in training mode", "Call teacher.eval().")
        if step.inputs.get("input_ids") is None or step.inputs.get("pixel_values") is not None:
            raise input_error(f"tokens without images for {self.title}", "embeddings or images")
        self.check(step.model)
        shifted: Any = self.targets_of({**step.inputs, "labels": step.labels})
        row = step.read_trunk()
        tokens = {name: x for name, x in step.inputs.items() if name in TOKENS}
        with torch.no_grad():
            taught = _trunk_of(self.teacher, {**tokens, "use_cache": False})

        def finish(step: LossStep) -> torch.Tensor:
            is_target = fill_ends(row.of_row(shifted), row.boundaries, -100) != -100
            number, items = is_target.sum(), step.items[self.items]
            items = number if items is None else items
            options: dict[str, Any] = {"beta": self.beta, "temperature": self.temperature, "num_items_in_batch": items}
            head, source = step.model.lm_head, self.teacher.lm_head
            weight, bias = (_whole(x, taught) for x in (source.weight, source.bias))
            of_teacher = row.of_row(taught).to(weight.dtype)

            def compute(hidden_states: torch.Tensor) -> torch.Tensor:
                call = hidden_states, head.weight, of_teacher, weight, is_target, head.bias, bias
                return linear_divergence(*call, **options)

            loss = with_weight(head, compute, row.hidden_states)
            self.note(loss * torch.as_tensor(items, device=loss.device).clamp(min=1), number)
            return loss

        return finish

    def figures(self, *sums: float) -> dict[str, float]:
        return {"divergence": round(sums[0] / sums[1], 4)} if sums[1] else {}


def _trunk_of(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """The last hidden states of a language model. All of its weights are sharded again afterwards, if they were."""
    if not is_fsdp(model):
        return model.model(**inputs).last_hidden_state
    head = model.lm_head

    def trunk(**inputs: Any) -> torch.Tensor:
        hidden_states = model.model(**inputs).last_hidden_state
        # accelerate lets FSDP2 gather the head with the last norm, and a group ends when all of it has run.
        with swapped(vars(head), forward=lambda x: x):
            return head(hidden_states)

    # Weights outside of the layers are gathered around the forward of the whole model, and stay so for a backward.
    with swapped(vars(model), forward=trunk):
        hidden_states = model(**inputs)
    for unit in (model, head):
        if is_fsdp(unit):
            unit.reshard()
    return hidden_states


def _whole(weight: Any, like: torch.Tensor) -> Any:
    """A weight, gathered in the dtype of its product with `like` if FSDP2 has sharded it."""
    if hasattr(weight, "full_tensor"):
        weight = weight.detach().to(like.device, compute_dtype(like)).full_tensor()
    return weight
