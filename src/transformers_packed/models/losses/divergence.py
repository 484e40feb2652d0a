"""The divergence from a teacher, for distillation."""

from collections.abc import Mapping
from typing import Any

import torch

from ...errors import input_error
from ...ops.linear_divergence import linear_divergence
from ..trunk_row import fill_ends
from ..untouched import is_bare_linear
from .loss import TOKENS, Loss, LossStep, shifted_labels


class DivergenceLoss(Loss):
    """The divergence of a model from a teacher with the same vocabulary, at the tokens that predict a target.

    The teacher reads the same packed rows, in eval mode and without gradients. Its logits are never kept.

    Args:
        teacher (`PreTrainedModel`):
            A language model with classes of this package. It is frozen, and belongs on the device of the model.
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
        if not hasattr(type(teacher), "losses"):
            expected = "a teacher that is a language model of this package"
            raise input_error(expected, type(teacher).__name__, "Call patch_model(teacher).")
        self.teacher, self.beta, self.temperature = teacher.eval().requires_grad_(False), beta, temperature

    @property
    def models(self) -> tuple[torch.nn.Module, ...]:
        return (self.teacher,)

    @staticmethod
    def targets_of(batch: Mapping[str, Any]) -> torch.Tensor | None:
        return shifted_labels(batch)

    def begin(self, step: LossStep) -> Any:
        if step.inputs.get("input_ids") is None or step.inputs.get("pixel_values") is not None:
            raise input_error(f"tokens without images for {self.title}", "embeddings or images")
        for head in (step.model.lm_head, self.teacher.lm_head):
            if not is_bare_linear(head):
                raise input_error(f"plain linear heads for {self.title}", type(head).__name__)
        shifted: Any = self.targets_of({**step.inputs, "labels": step.labels})
        row = step.read_trunk()
        with torch.no_grad():
            tokens = {name: x for name, x in step.inputs.items() if name in TOKENS}
            taught = self.teacher.model(**tokens, use_cache=False).last_hidden_state

        def finish(step: LossStep) -> torch.Tensor:
            is_target = fill_ends(row.of_row(shifted), row.boundaries, -100) != -100
            number, items = is_target.sum(), step.items[self.items]
            student, teacher = step.model.lm_head, self.teacher.lm_head
            call = row.hidden_states, student.weight, row.of_row(taught), teacher.weight, is_target
            options: dict[str, Any] = {"beta": self.beta, "temperature": self.temperature}
            options["num_items_in_batch"] = items = number if items is None else items
            loss = linear_divergence(*call, student.bias, teacher.bias, **options)
            self.note(loss * torch.as_tensor(items, device=loss.device).clamp(min=1), number)
            return loss

        return finish

    def figures(self, *sums: float) -> dict[str, float]:
        return {"divergence": round(sums[0] / sums[1], 4)} if sums[1] else {}
