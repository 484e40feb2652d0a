"""The cross-entropy of each next token."""

from typing import Any

from ...ops.cross_entropy import TargetCount
from ..inputs import kept_tokens
from .head import Prediction
from .loss import Loss, LossStep, shifted_labels


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
