"""Correct and fast packed (padding-free) training of hybrid linear-attention models in Transformers.

Importing the package neither modifies Transformers nor imports a kernel package. `register()` makes the Auto classes
build this package's models. `patch_model()` converts an existing model.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .audit import AuditReport, audit_model
    from .audit.acceptance import MtpAcceptance, mtp_acceptance
    from .boundaries import SequenceBoundaries
    from .data.collator import DataCollatorWithFlattening
    from .data.dataset import PackingDataset, pack_dataset
    from .data.planning.cost import PackingCost
    from .data.planning.plan import PackingPlan
    from .data.planning.planner import plan_packing
    from .data.streaming import IterablePackingDataset
    from .models.cuda_graphs import use_cuda_graphs
    from .models.float8 import use_float8
    from .models.mtp_head import add_mtp
    from .models.registry import patch_model, register, registered, unpatch_model, unregister
    from .training.callbacks.gradient_release import GradientReleaseCallback
    from .training.callbacks.metrics import PackingMetricsCallback
    from .training.callbacks.resume import PackingStateCallback
    from .training.configure import configure_packing
    from .training.losses import per_document_logps, per_document_loss, set_loss_normalization
    from .training.trainer import PackedTrainer, PackedTrainingArguments
    from .training.verify import Verified, verify_packing
    from .training.warm_up import warm_up


# Lazy imports: torch and Transformers take seconds to import, and the command line must respond before that.
_MODULES = {
    "audit": ("AuditReport", "audit_model"),
    "audit.acceptance": ("MtpAcceptance", "mtp_acceptance"),
    "boundaries": ("SequenceBoundaries",),
    "data.collator": ("DataCollatorWithFlattening",),
    "data.planning.cost": ("PackingCost",),
    "data.dataset": ("PackingDataset", "pack_dataset"),
    "data.planning.plan": ("PackingPlan",),
    "data.planning.planner": ("plan_packing",),
    "data.streaming": ("IterablePackingDataset",),
    "models.cuda_graphs": ("use_cuda_graphs",),
    "models.float8": ("use_float8",),
    "models.registry": ("patch_model", "register", "registered", "unpatch_model", "unregister"),
    "models.mtp_head": ("add_mtp",),
    "training.configure": ("configure_packing",),
    "training.losses": ("per_document_logps", "per_document_loss", "set_loss_normalization"),
    "training.callbacks.gradient_release": ("GradientReleaseCallback",),
    "training.callbacks.metrics": ("PackingMetricsCallback",),
    "training.trainer": ("PackedTrainer", "PackedTrainingArguments"),
    "training.verify": ("Verified", "verify_packing"),
    "training.callbacks.resume": ("PackingStateCallback",),
    "training.warm_up": ("warm_up",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    if find_spec(f"{__name__}.{name}") is not None:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__version__ = "0.1.0"

__all__ = [
    "AuditReport",
    "DataCollatorWithFlattening",
    "GradientReleaseCallback",
    "IterablePackingDataset",
    "MtpAcceptance",
    "PackedTrainer",
    "PackedTrainingArguments",
    "PackingCost",
    "PackingDataset",
    "PackingMetricsCallback",
    "PackingPlan",
    "PackingStateCallback",
    "SequenceBoundaries",
    "Verified",
    "add_mtp",
    "pack_dataset",
    "audit_model",
    "configure_packing",
    "mtp_acceptance",
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
    "use_float8",
    "verify_packing",
    "warm_up",
]
