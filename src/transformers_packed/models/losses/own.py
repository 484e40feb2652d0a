"""The losses that stock models compute, too: the cross-entropy of each next token, and that of routers."""

from typing import Any

import torch

from ...ops.cross_entropy import TargetCount
from ...parallel.shard import RowShard
from ..inputs import kept_tokens
from .head import Prediction
from .loss import Loss, LossStep, shifted_labels


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
