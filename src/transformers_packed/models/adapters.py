"""PEFT's adapters beside packed rows: which of them keep documents apart, and the class that they name when saved."""

from typing import Any

import torch

from .installed import hold
from .mtp import load_beside
from .typed import ModelBase


# The types of PEFT's adapters, and the variants of LoRA, that act on each token alone, as tests measure for all of PEFT's
# registry. Others may mix the tokens of a row (Lily averages its router over them), run a second model (Shadow), keep
# scales in the layout of the row (X-LoRA) or take an argument for each row (Poly).
PER_TOKEN = frozenset(
    "ADALORA ADAMSS ADAPTION_PROMPT BEFT BOFT C3A DEFT DELORA FOURIERFT FROD GLORA GRALORA HIRA HRA IA3 LN_TUNING LOHA "
    "LOKR LORA MISS OFT OSF PEANUT PSOFT PVERA RANDLORA ROAD SHIRA SUPERTUNING TINYLORA TRAINABLE_TOKENS UNILORA VBLORA "
    "VERA WAVEFT".split()
)
VARIANTS_PER_TOKEN = ("Arrow", "BdLora", "Dora", "Kasa", "MiCA", "Monteclora", "QALora", "Velora")


def adapter_per_row(model: torch.nn.Module) -> str | None:
    """Describe an adapter of the model that may act once per row instead of on each token alone, if there is one.

    Inactive adapters count, because a trainer may activate them later.
    """
    for module in model.modules():
        # PEFT sets it on its wrappers, and on each model that it puts adapters into.
        configs = getattr(module, "peft_config", None)
        adapters = [
            *(configs.values() if isinstance(configs, dict) else ()),
            *vars(module).get("lora_variant", {}).values(),
        ]
        if reason := next(filter(None, map(_per_row, adapters)), None):
            return reason
    return None


def _per_row(adapter: Any) -> str | None:
    """The reason why an adapter with this configuration, or this variant of LoRA, may act once per row."""
    if hasattr(adapter, "peft_type"):
        kind = getattr(adapter.peft_type, "value", adapter.peft_type)
        if adapter.is_prompt_learning:
            return f"PEFT prompt learning ({kind}), which prepends its virtual tokens once per row"
        if getattr(adapter, "alora_invocation_tokens", None):
            return "an activated LoRA (alora_invocation_tokens), which searches for its invocation once per row"
        known = kind in PER_TOKEN
    else:
        kind = type(adapter).__name__
        known = kind.startswith(VARIANTS_PER_TOKEN)
    return None if known else f"PEFT's {kind}, which is not known to act on each token alone"


def acts_per_token(layer: torch.nn.Module) -> bool:
    """Whether a module of `peft.tuners` acts on each token alone. The name of its package is that of the adapter's type."""
    return type(layer).__module__.split(".")[2].upper() in PER_TOKEN


class AdapterMixin(ModelBase):
    """Lets PEFT name the stock class of a model in saved adapters, and keeps a trained head."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "peft_config":
            # PEFT may have been imported since the model was made.
            hold(self)
        super().__setattr__(name, value)

    def load_adapter(
        self, peft_model_id: str | None = None, adapter_name: str | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Load an adapter as Transformers does, with the head of multi-token prediction beside it."""
        result = super().load_adapter(peft_model_id, adapter_name, *args, **kwargs)
        if peft_model_id is not None:
            options = (kwargs.get("adapter_kwargs") or {}) | kwargs
            load_beside(self, peft_model_id, adapter_name or "default", options)
        return result
