"""Correct and fast packed (padding-free) training of hybrid linear-attention models in Transformers.

Importing the package changes nothing in Transformers and imports no kernel package; `register()` lets the Auto
classes build its models, and `patch_model()` converts a model that exists already.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .boundaries import SequenceBoundaries
from .data.collator import DataCollatorWithFlattening
from .data.cost import PackingCost
from .data.dataset import PackingDataset, pack_dataset
from .data.packing_plan import PackingPlan
from .data.plan import plan_packing
from .data.streaming import IterablePackingDataset
from .models.auto import register, registered, unregister
from .models.cuda_graphs import use_cuda_graphs
from .models.patch import patch_model, unpatch_model
from .training.losses import per_document_logps, per_document_loss, set_loss_normalization


if TYPE_CHECKING:
    from .audit import AuditReport, audit_model
    from .training.configure import configure_packing
    from .training.metrics import PackingMetricsCallback
    from .training.packed_trainer import PackedTrainer, PackedTrainingArguments
    from .training.packing_state import PackingStateCallback


# Imported when they are asked for: they bring Trainer along, and with it PEFT and triton.
_LATE = {
    "AuditReport": ".audit",
    "PackedTrainer": ".training.packed_trainer",
    "PackedTrainingArguments": ".training.packed_trainer",
    "PackingMetricsCallback": ".training.metrics",
    "PackingStateCallback": ".training.packing_state",
    "audit_model": ".audit",
    "configure_packing": ".training.configure",
}


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(import_module(_LATE[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__version__ = "0.1.0"

__all__ = [
    "AuditReport",
    "DataCollatorWithFlattening",
    "IterablePackingDataset",
    "PackedTrainer",
    "PackedTrainingArguments",
    "PackingCost",
    "PackingDataset",
    "PackingMetricsCallback",
    "PackingPlan",
    "PackingStateCallback",
    "SequenceBoundaries",
    "pack_dataset",
    "audit_model",
    "configure_packing",
    "patch_model",
    "per_document_logps",
    "per_document_loss",
    "plan_packing",
    "register",
    "registered",
    "set_loss_normalization",
    "unpatch_model",
    "unregister",
    "use_cuda_graphs",
]
