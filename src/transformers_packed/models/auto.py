"""`register`: let Transformers' Auto classes build our models. `unregister` takes it back exactly."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType

import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES, model_type_to_module_name

from ..errors import input_error
from .families import MIXERS, UNPACKED


# Per family: the module of its configuration classes, and per configuration the class that each Auto class builds.
FAMILIES = {
    "qwen3_next": {
        "Qwen3NextConfig": {
            "AutoModel": "Qwen3NextModel",
            "AutoModelForCausalLM": "Qwen3NextForCausalLM",
            "AutoModelForSequenceClassification": "Qwen3NextForSequenceClassification",
            "AutoModelForTokenClassification": "Qwen3NextForTokenClassification",
            "AutoModelForQuestionAnswering": "Qwen3NextForQuestionAnswering",
        },
    },
    "qwen3_5": {
        "Qwen3_5TextConfig": {
            "AutoModel": "Qwen3_5TextModel",
            "AutoModelForCausalLM": "Qwen3_5ForCausalLM",
            "AutoModelForSequenceClassification": "Qwen3_5TextForSequenceClassification",
            "AutoModelForTokenClassification": "Qwen3_5ForTokenClassification",
        },
        "Qwen3_5Config": {
            "AutoModel": "Qwen3_5Model",
            "AutoModelForCausalLM": "Qwen3_5ForCausalLM",
            "AutoModelForImageTextToText": "Qwen3_5ForConditionalGeneration",
            "AutoModelForSequenceClassification": "Qwen3_5ForSequenceClassification",
            "AutoModelForTokenClassification": "Qwen3_5ForTokenClassification",
        },
    },
    "qwen3_5_moe": {
        "Qwen3_5MoeTextConfig": {
            "AutoModel": "Qwen3_5MoeTextModel",
            "AutoModelForCausalLM": "Qwen3_5MoeForCausalLM",
        },
        "Qwen3_5MoeConfig": {
            "AutoModel": "Qwen3_5MoeModel",
            "AutoModelForCausalLM": "Qwen3_5MoeForCausalLM",
            "AutoModelForImageTextToText": "Qwen3_5MoeForConditionalGeneration",
        },
    },
}

# Those that build the models of `families.MIXERS` and `families.UNPACKED`.
_AUTO_CLASSES = (
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForQuestionAnswering",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
)

# What our methods use of the built-in modules: without it a model would fail in the middle of a forward.
_REQUIRED = {
    "transformers.cache_utils": (
        "Cache.get_recurrent_state",
        "Cache.update_conv_state",
        "Cache.update_recurrent_state",
    ),
    "transformers.integrations.accelerate": ("force_accelerate_hooks",),
    "transformers.utils.output_capturing": ("_CAN_RECORD_REGISTRY",),
    "transformers.utils.generic": ("is_flash_attention_requested", "TransformersKwargs.__annotations__"),
    "transformers.models.qwen3_next.modeling_qwen3_next": (
        "Qwen3NextGatedDeltaNet.fix_query_key_value_ordering",
        "apply_mask_to_padding_states",
        "apply_rotary_pos_emb",
        "eager_attention_forward",
    ),
    "transformers.models.qwen3_5.modeling_qwen3_5": (
        "Qwen3_5ForSequenceClassification",
        "Qwen3_5GatedDeltaNet",
        "Qwen3_5Model.get_rope_index",
        "Qwen3_5TextForSequenceClassification",
        "apply_mask_to_padding_states",
        "apply_rotary_pos_emb",
        "eager_attention_forward",
    ),
    "transformers.models.qwen3_5_moe.modeling_qwen3_5_moe": ("Qwen3_5MoeGatedDeltaNet", "Qwen3_5MoeModel"),
}


def register() -> None:
    """Make `AutoModel`, `AutoModelForCausalLM` and the other Auto classes build this package's models.

    From then on `from_pretrained` and `from_config` on a configuration of Qwen3-Next, Qwen3.5 or one of the families
    in `families.MIXERS` and `families.UNPACKED` return our classes, which have the built-in names, parameters and
    results and keep the documents of a packed row apart. Registering again changes nothing.

    Raises:
        `ImportError`: the installed Transformers lacks something that our models use.
        `ValueError`: somebody else's class is registered for one of the configurations.

    Example:

    ```python
    >>> import transformers_packed
    >>> from transformers import AutoModelForCausalLM, Qwen3_5TextConfig
    >>> config = Qwen3_5TextConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=4)
    >>> with transformers_packed.registered():
    ...     type(AutoModelForCausalLM.from_config(config)).__module__
    'transformers_packed.models.qwen3_5.modeling_qwen3_5'

    ```
    """
    check_transformers("register")
    entries = list(_entries())
    for mapping, config, ours in entries:
        current = mapping._extra_content.get(config, ours)
        if current is not ours:
            raise input_error(
                f"no other class registered for {config.__name__}",
                f"{current.__module__}.{current.__name__}",
                "Call register() without it, or build our class directly from transformers_packed.models.",
            )
    for mapping, config, ours in entries:
        mapping.register(config, ours, exist_ok=True)


def unregister() -> None:
    """Undo [`register`]: the Auto classes build the built-in models again. Without a registration nothing happens."""
    for mapping, config, ours in _entries():
        if mapping._extra_content.get(config) is ours:
            del mapping._extra_content[config]


@contextmanager
def registered() -> Iterator[None]:
    """[`register`] for the length of a `with` block; an earlier registration stays afterwards."""
    before = all(mapping._extra_content.get(config) is ours for mapping, config, ours in _entries())
    register()
    try:
        yield
    finally:
        if not before:
            unregister()


def _entries() -> Iterator[tuple]:
    """(mapping of an Auto class, configuration class, our model class) for all that we register."""
    # Brings triton along, which importing this package may not.
    from .mixers import language_models, packed_class

    for family, configs in FAMILIES.items():
        modeling = modeling_module(family)
        for config_name, classes in configs.items():
            config = getattr(transformers, config_name)
            for auto_name, class_name in classes.items():
                yield getattr(modeling_auto, auto_name)._model_mapping, config, getattr(modeling, class_name)
    for auto_name in _AUTO_CLASSES:
        mapping = getattr(modeling_auto, auto_name)._model_mapping
        for model_type, class_name in mapping._model_mapping.items():
            family = model_type_to_module_name(model_type)
            if (family in MIXERS or family in UNPACKED) and class_name in language_models(family):
                # Not CONFIG_MAPPING's: flash-linear-attention puts its own Mamba there when it is imported.
                config = getattr(transformers, CONFIG_MAPPING_NAMES[model_type])
                yield mapping, config, packed_class(family, class_name)


def modeling_module(family: str) -> ModuleType:
    """The generated modeling file of one of `FAMILIES`; importing it announces its classes in `base.REPLACEMENTS`."""
    return import_module(f"{__package__}.{family}.modeling_{family}")


def check_transformers(call: str) -> None:
    """Raise an `ImportError` that names everything the installed Transformers lacks."""
    missing = []
    for module_name, paths in _REQUIRED.items():
        for path in paths:
            try:
                found = import_module(module_name)
                for part in path.split("."):
                    found = getattr(found, part)
            except (ImportError, AttributeError):
                missing.append(f"{module_name}.{path}")
    if missing:
        raise ImportError(
            f"{call}: transformers {transformers.__version__} lacks {', '.join(missing)}, which the models of "
            "transformers_packed use. Install a supported release: pip install 'transformers>=5.23,<6'."
        )
