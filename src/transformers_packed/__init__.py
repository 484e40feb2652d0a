"""Correct and fast packed (padding-free) training of hybrid linear-attention models in Transformers.

Importing the package neither modifies Transformers nor imports a kernel package. `register()` makes the Auto classes
build this package's models. `patch_model()` converts an existing model.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .audit import AuditReport as AuditReport
    from .audit import audit_model as audit_model
    from .audit.acceptance import MtpAcceptance as MtpAcceptance
    from .audit.acceptance import mtp_acceptance as mtp_acceptance
    from .boundaries import SequenceBoundaries as SequenceBoundaries
    from .data.collator import DataCollatorWithFlattening as DataCollatorWithFlattening
    from .data.dataset import PackingDataset as PackingDataset
    from .data.dataset import pack_dataset as pack_dataset
    from .data.planning.cost import PackingCost as PackingCost
    from .data.planning.plan import PackingPlan as PackingPlan
    from .data.planning.planner import plan_packing as plan_packing
    from .data.streaming import IterablePackingDataset as IterablePackingDataset
    from .models.cuda_graphs import use_cuda_graphs as use_cuda_graphs
    from .models.float8 import use_float8 as use_float8
    from .models.host_experts import keep_experts_in_host_memory as keep_experts_in_host_memory
    from .models.host_layers import keep_layers_in_host_memory as keep_layers_in_host_memory
    from .models.mtp_head import add_mtp as add_mtp
    from .models.registry import patch_model as patch_model
    from .models.registry import register as register
    from .models.registry import registered as registered
    from .models.registry import unpatch_model as unpatch_model
    from .models.registry import unregister as unregister
    from .ops.invariance import batch_invariant as batch_invariant
    from .training.callbacks.gradient_release import GradientReleaseCallback as GradientReleaseCallback
    from .training.callbacks.metrics import PackingMetricsCallback as PackingMetricsCallback
    from .training.callbacks.resume import PackingStateCallback as PackingStateCallback
    from .training.configure import configure_packing as configure_packing
    from .training.losses import per_document_logps as per_document_logps
    from .training.losses import per_document_loss as per_document_loss
    from .training.losses import set_loss_normalization as set_loss_normalization
    from .training.trainer import PackedTrainer as PackedTrainer
    from .training.trainer import PackedTrainingArguments as PackedTrainingArguments
    from .training.verify import Verified as Verified
    from .training.verify import verify_packing as verify_packing
    from .training.warm_up import warm_up as warm_up


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
    "models.host_experts": ("keep_experts_in_host_memory",),
    "models.host_layers": ("keep_layers_in_host_memory",),
    "models.mtp_head": ("add_mtp",),
    "ops.invariance": ("batch_invariant",),
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

__all__ = sorted(_HOMES)
