"""Keep the layers in full precision whose errors grow along a document, when bitsandbytes quantizes a model."""

from copy import copy
from typing import Any

from .adapters import AdapterMixin
from .families import OWN, family_of


# The names of the sensitive layers of all families.
SENSITIVE = tuple(dict.fromkeys(name for family in OWN for name in family.sensitive))
# Transformers skips the head by default, but not if `llm_int8_skip_modules` is set.
_HEADS = ("lm_head", "score", "qa_outputs", "mtp")


class QuantizationMixin(AdapterMixin):
    """Adds the head and a family's sensitive layers to the modules that bitsandbytes leaves in full precision.

    Only linear layers are quantized. Convolutions, norms and experts, which are parameters with three dimensions, stay
    in full precision in any case.
    """

    @classmethod
    def from_pretrained(cls, *args: Any, quantization_config: Any = None, **kwargs: Any) -> Any:
        # The heads of other families have other names, so these keep the default of Transformers.
        family = family_of(cls)
        sensitive = () if family is None else family.sensitive
        if sensitive and quantization_config is not None:
            quantization_config = _with_skipped_modules(quantization_config, sensitive)
        return super().from_pretrained(*args, quantization_config=quantization_config, **kwargs)


def _with_skipped_modules(quantization_config: Any, sensitive: tuple[str, ...]) -> Any:
    """Return a copy of the configuration that skips these modules too. Only bitsandbytes' configurations have a list."""
    name, kinds = "llm_int8_skip_modules", ("load_in_4bit", "load_in_8bit")
    if isinstance(quantization_config, dict):
        if not any(quantization_config.get(kind) for kind in kinds):
            return quantization_config
        return quantization_config | {name: _joined(quantization_config.get(name), sensitive)}
    if not hasattr(quantization_config, name):
        return quantization_config
    changed = copy(quantization_config)
    setattr(changed, name, _joined(getattr(quantization_config, name), sensitive))
    return changed


def _joined(skipped: list[str] | None, sensitive: tuple[str, ...]) -> list[str]:
    return list(dict.fromkeys([*(skipped or ()), *_HEADS, *sensitive]))
