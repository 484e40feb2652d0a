"""The loss of a head of multi-token prediction, which predicts the token after the next one."""

from collections.abc import Mapping
from typing import Any

import torch

from ...errors import input_error
from ...ops.cross_entropy import TargetCount
from ...parallel.shard import RowShard
from ..host_experts import names_in_host_memory
from ..inputs import resolve_boundaries
from ..mtp_head import MtpHead, add_mtp, first_choices, head_of
from ..trunk_row import TrunkRow, fill_ends
from .head import Prediction
from .loss import TOKENS, Loss, LossStep, shifted_labels


# The label of a token without a target.
_IGNORED = -100


class MtpLoss(Loss):
    """The loss of the head that [`add_mtp`] has added.

    It notes its sum, the targets, and how often the first choice of the head is that of the model.

    Args:
        weight (`float`, *optional*, defaults to 1.0):
            The factor of the loss in the sum.
        alone (`bool`, *optional*, defaults to `False`):
            Whether only the head trains.
    """

    title = "the head of multi-token prediction"
    items = "num_mtp_items_in_batch"
    trains_trunk = False
    num_sums = 4

    def __init__(self, weight: float = 1.0, alone: bool = False):
        super().__init__(weight)
        self.alone = alone

    @classmethod
    def of_options(cls, options: Any) -> "MtpLoss | None":
        weight, alone = options.mtp_loss_weight, options.mtp_only
        return cls(weight or 1.0, alone) if weight or alone else None

    @staticmethod
    def targets_of(batch: Mapping[str, Any]) -> torch.Tensor | None:
        """Return labels of which as many are targets as the head has in a batch, or `None` without labels.

        Those of the trunk one token ahead are those of the head one token before, but for the first token of a document.
        """
        shifted, mask = shifted_labels(batch), batch.get("attention_mask")
        if shifted is None or batch.get("labels") is None:
            return None
        boundaries = resolve_boundaries({name: x for name, x in batch.items() if name in TOKENS})
        if boundaries is None:
            # The row of a token has a target two tokens ahead, if the token is real.
            shifted = shifted[..., 1:]
            return shifted if mask is None else shifted.masked_fill(mask[:, :-1].to(shifted.device) == 0, _IGNORED)
        places = torch.cat([boundaries.first_tokens, boundaries.ends])
        return shifted.index_fill(1, places.to(shifted.device), _IGNORED)

    def begin(self, step: LossStep) -> Any:
        if not hasattr(step.model, "mtp"):
            fix = "Call add_mtp, or train without MtpLoss."
            raise input_error("a model with a head of multi-token prediction", "one without", fix)
        inputs = step.inputs
        is_shard = isinstance(inputs.get("boundaries"), RowShard)
        # Counted before the trunk runs. The number of a shard needs the first token of the next one.
        batch = {**inputs, "labels": step.labels}
        counted = None if is_shard else self.targets_of(batch)
        number = None if counted is None else TargetCount(counted, _IGNORED)
        shifted: Any = shifted_labels(batch)
        row = step.read_trunk()

        def finish(step: LossStep) -> Prediction:
            # No target of the trunk is in another document, but a caller may not have masked it.
            targets = row.following(fill_ends(row.of_row(shifted), row.boundaries, _IGNORED), _IGNORED)
            found, items = int(number or TargetCount(targets, _IGNORED)), step.items[self.items]
            # Without a target, the loss is 0, and the head gets gradients of 0.
            items = max(found, 1) if items is None else torch.as_tensor(items, device=targets.device).clamp(min=1)
            hidden_states = step.model.mtp(row)

            def note(losses: torch.Tensor) -> None:
                self._note(step.model, row, hidden_states, targets, losses)

            return Prediction(hidden_states, targets, found, items, note=note)

        return finish

    @torch.no_grad()
    def _note(
        self, model: Any, row: TrunkRow, hidden_states: torch.Tensor, targets: torch.Tensor, losses: Any
    ) -> None:
        if self.record is None:
            return
        same: Any = (0, 0)
        if self.is_detailed:
            rows = (targets[0] != _IGNORED).nonzero()[:, 0]
            own = row.following(row.hidden_states, 0)
            drafted, chosen = (first_choices(model.lm_head, x[0].index_select(0, rows)) for x in (hidden_states, own))
            same = (drafted == chosen).sum(), len(rows)
        self.note(losses.sum(), (targets != _IGNORED).sum(), *same)

    def figures(self, *sums: float) -> dict[str, float]:
        loss, targets, same, compared = sums
        found = {"mtp_loss": round(loss / targets, 4)} if targets else {}
        return found | ({"mtp_acceptance": round(same / compared, 4)} if compared else {})

    def prepare(self, model: torch.nn.Module, dtype: torch.dtype | None) -> None:
        """Add the head, unless the model has it."""
        head = head_of(model) or add_mtp(model, dtype=dtype)
        if any(hasattr(module, "base_layer") for module in head.modules()):
            fix = 'Add the head after the adapters, or pass exclude_modules=r".*mtp\\..*" to PEFT.'
            raise input_error("a head of multi-token prediction without adapters, which no server reads", "some", fix)
        if not any(x.requires_grad for x in head.parameters()):
            if names_in_host_memory(head):
                expected, got = (
                    "a head of multi-token prediction on the GPU, where it trains",
                    "a frozen one in host memory",
                )
                fix = "Call head.requires_grad_(True) before keep_layers_in_host_memory."
                raise input_error(expected, got, fix)
            # PEFT freezes everything but its adapters.
            head.requires_grad_(True)

    def trained_in(self, model: torch.nn.Module) -> MtpHead | None:
        return head_of(model)
