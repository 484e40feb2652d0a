"""Generic support for all families of Transformers without dedicated classes, whose layers do not pass boundaries on.

The first use of a family derives classes from its stock classes, following its record in `families`:

* A model (`root_class`) accepts the packing keywords, resolves the boundaries, and runs the stock forward with
  position ids that restart, no mask and no cache. A base model that is `Unpacked` runs it on each document separately.
* A token mixer (`mixer_class`) runs the stock forward on each document separately, or once on the whole row if its
  kernels accept boundaries. For some, `mixers` has a function that computes the whole row.

The layers in between pass no boundaries on, so a context variable holds them while a model runs. Input that is not
packed reaches the stock forward unchanged. The classes are pickled by name, such as `bamba__BambaMixer` from here.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
import transformers
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.utils import ModelOutput
from transformers.utils.generic import is_flash_attention_requested

from ..boundaries import FLASH_KEYWORDS, LAYER_KEYWORDS, PACKING_KEYWORDS, SequenceBoundaries
from ..errors import input_error
from ..foreign import swapped
from ..ops.dispatch import observable, ran
from .families import (
    LANGUAGE_MODELS,
    OWN,
    families_of,
    family_named,
    family_of,
    modeling_module,
    stock_family,
    titles,
)
from .family import PATCHED, Family, Mixer, Mixers, Own, Unpacked
from .inputs import (
    check_config,
    forward_like,
    mask_targets_across_documents,
    may_be_packed,
    resolve_boundaries,
    tokens_of,
)
from .mixers import ROWS
from .on_documents import by_row, on_documents
from .packed_model import PackedModelMixin
from .releases import CHECKPOINTS, FLEX, class_names
from .replacements import REPLACEMENTS
from .versions import CACHE, CACHES, check_other_families, outside


_NO_TEXT = ("VisionModel", "AudioModel")
# Prefixes of arguments that packed rows of text do not support.
_NOT_TEXT = ("pixel", "image", "video", "audio", "mm_", "token_type", "input_features")
_EXPLICIT = (*PACKING_KEYWORDS, "boundaries")
# Part of the signatures, because Trainer drops dataset columns that a signature does not name.
_KEYWORDS = [
    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in ("position_ids", *LAYER_KEYWORDS)
]


def announce(family: Family) -> None:
    """Add our classes for a family with `Mixers` or `Unpacked` to `replacements.REPLACEMENTS`, once."""
    for name in (*family.mixers, *language_models(family)):
        _replace(family, name)


def announce_families_of(model: torch.nn.Module) -> None:
    """Add our classes for the families of `model` to `replacements.REPLACEMENTS`."""
    families = families_of(model, *PATCHED)
    for family in families:
        if not isinstance(family.apart, Own):
            check_other_families(family.name)
            announce(family)
    # An enclosing model, such as a vision-language model, masks targets and creates position ids.
    texts = tuple(_text_model(family) for family in families)
    for outer in model.modules() if families else ():
        if isinstance(outer, PreTrainedModel) and any(isinstance(module, texts) for module in outer.modules()):
            class_around(type(outer))


def class_around(cls: type[torch.nn.Module]) -> type | None:
    """Return our class for a stock class around a text model, or `None` if it only passes its arguments on."""
    family = stock_family(cls)
    if family is not None and cls not in REPLACEMENTS and "input_ids" in inspect.signature(cls.forward).parameters:
        packed_class(family, cls.__name__)
    return REPLACEMENTS.get(cls)


def packed_class(family: Family, name: str) -> type:
    """Return our class for a stock class. The stock class may also enclose a model of another family."""
    if isinstance(family.apart, Mixers | Unpacked):
        announce(family)
    return _replace(family, name)


def auto_entries(*apart: type) -> Iterator[tuple]:
    """Yield (Auto class, configuration class, our class) for the models that they build, of families of these ways."""
    for auto in filter(lambda value: isinstance(value, type), list(vars(modeling_auto).values())):
        for model_type, class_name in class_names(auto).items():
            family = family_of(model_type)
            ours = _model_of_ours(family, class_name) if isinstance(family.apart, apart) else None
            if ours is not None:
                # Not from CONFIG_MAPPING, because importing flash-linear-attention registers its own Mamba there.
                yield auto, getattr(transformers, CONFIG_MAPPING_NAMES[model_type]), ours
    for family in OWN:
        for auto, config, name in family.apart.also if isinstance(family.apart, Own) else ():
            yield getattr(modeling_auto, auto), getattr(transformers, config), _model_of_ours(family, name)


def _model_of_ours(family: Family, name: str) -> type | None:
    if isinstance(family.apart, Own):
        return getattr(modeling_module(family.name), name, None)
    return packed_class(family, name) if name in language_models(family) else None


def language_models(family: Family) -> dict[str, type]:
    """Return the stock models of a family that accept text, by name."""
    module = import_module(family.stock)
    return {
        name: cls
        for name, cls in vars(module).items()
        if isinstance(cls, type) and issubclass(cls, PreTrainedModel) and cls.__module__ == module.__name__
        if cls.forward is not PreTrainedModel.forward
        if "For" in name or (name.endswith("Model") and not name.endswith(_NO_TEXT)) or _is_unpacked(family, name)
    }


def _text_model(family: Family) -> type:
    """Return the stock base model of a family, or its text model if the family supports images."""
    models = {name: cls for name, cls in language_models(family).items() if "For" not in name}
    if isinstance(family.apart, Unpacked):
        return models[family.apart.base]
    return next((cls for name, cls in models.items() if name.endswith("TextModel")), next(iter(models.values())))


def _is_unpacked(family: Family, name: str) -> bool:
    return isinstance(family.apart, Unpacked) and family.apart.base == name


def _replace(family: Family, name: str) -> type:
    builtin = getattr(import_module(family.stock), name)
    ours = REPLACEMENTS.get(builtin)
    if ours is None:
        mixer = family.mixers.get(name)
        ours = root_class(Root(builtin, family)) if mixer is None else mixer_class(builtin, mixer)
        ours.__module__, ours.__qualname__ = __name__, f"{family.name}__{name}"
        REPLACEMENTS[builtin] = ours
    return ours


def __getattr__(name: str) -> type:
    family, _, cls = name.partition("__")
    if family and cls:
        return packed_class(family_named(family), cls)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# The boundaries of the current packed row. Only this file reads it.
_current: ContextVar[SequenceBoundaries | None] = ContextVar("packed_row", default=None)


class _Running:
    """The number of running packed forwards in this process, the only value that a compiled graph needs to guard."""

    count = 0


running = _Running()


@contextmanager
def _boundaries_set_to(boundaries: SequenceBoundaries | None) -> Iterator[None]:
    token = _current.set(boundaries)
    running.count += 1
    try:
        yield
    finally:
        running.count -= 1
        _current.reset(token)


@contextmanager
def _packed_row(model: torch.nn.Module, boundaries: SequenceBoundaries) -> Iterator[None]:
    """Make `boundaries` available to the modules of `model` inside the `with` block.

    Gradient checkpointing reruns layers in backward, after the forward has ended and others may have run. The rerun
    uses the boundaries of its own forward.
    """
    with ExitStack() as stack:
        for module in model.modules() if model.training else ():
            for name in CHECKPOINTS:
                checkpoint = vars(module).get(name)
                if checkpoint is not None and getattr(checkpoint, "func", None) is not _checkpoint:
                    ours = partial(_checkpoint, module, boundaries, checkpoint)
                    stack.enter_context(swapped(vars(module), **{name: ours}))
        stack.enter_context(_boundaries_set_to(boundaries))
        yield


def _checkpoint(module, boundaries: SequenceBoundaries, checkpoint: Callable, function: Callable, *args, **kwargs):
    return checkpoint(partial(_run_again, module, boundaries, function), *args, **kwargs)


def _run_again(module, boundaries: SequenceBoundaries, function: Callable, *args, **kwargs) -> Any:
    # Layers inside this one may be checkpointed too.
    with _packed_row(module, boundaries):
        return function(*args, **kwargs)


class Root:
    """How an outermost model handles a packed row.

    Args:
        builtin (`type`):
            The stock model class. Its name determines whether it is a base model, a head with one result per token, a
            language model or another head. A language model masks the targets across documents. Other heads reject
            packed rows.
        family ([`Family`]):
            Its family.
    """

    def __init__(self, builtin: type[torch.nn.Module], family: Family):
        # An unpacked base model runs on each document separately.
        self.builtin, self.unpacked = builtin, _is_unpacked(family, builtin.__name__)
        # Whether layers would ignore a mask for attention.
        self.mixes = bool(family.mixers)
        # Whether it can return attention weights over the row.
        self.has_attention_weights = not (self.unpacked or any(mixer.masked for mixer in family.mixers.values()))
        # Whether the loss compares a token's logits with the next label, as in most models.
        self.shifts_labels = not isinstance(family.apart, Unpacked) or family.apart.shifts_labels
        parameters = inspect.signature(builtin.forward).parameters
        self.known = tuple(parameters)[1:]
        # Whether the stock forward accepts arguments that it does not name, and may pass them on.
        self.takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
        name = builtin.__name__
        self.is_base = name.endswith(("Model", "Decoder")) and not name.endswith(LANGUAGE_MODELS)
        self.is_language_model = name.endswith(LANGUAGE_MODELS)
        self.can_be_packed = self.is_base or self.is_language_model or name.endswith("ForTokenClassification")

    def reads_patterns(self, model: torch.nn.Module, inputs: dict[str, Any]) -> bool:
        """Whether a mask for attention is the user's, for these tokens.

        An enclosing model may pass a mask for each kind of layer to a base model, and an encoder has its own.
        """
        by_layer = self.is_base and isinstance(inputs.get("attention_mask"), dict)
        return not by_layer and not getattr(model.config, "is_encoder_decoder", False)

    def run_builtin(self, model: torch.nn.Module, inputs: dict[str, Any]) -> Any:
        """Run the stock forward without the packing keywords that it does not accept."""
        return self.builtin.forward(model, **(inputs if self.takes_any else self.of_builtin(inputs)))

    def of_builtin(self, inputs: dict[str, Any]) -> dict[str, Any]:
        ours = (*_EXPLICIT, "position_ids")
        return {name: value for name, value in inputs.items() if name in self.known or name not in ours}


def root_class(root: Root) -> type:
    """Create the subclass of `root.builtin` that accepts packed rows."""

    def run(model: PreTrainedModel, inputs: dict[str, Any]) -> Any:
        if running.count == 0 and not may_be_packed(inputs, root.reads_patterns(model, inputs)):
            return root.run_builtin(model, inputs)
        if torch.compiler.is_dynamo_compiling():
            return outside(_run_root, model, root, inputs)
        return _run_root(model, root, inputs)

    namespace = {
        "forward": forward_like(root.builtin.forward, run, _KEYWORDS),
        FLEX: getattr(root.builtin, FLEX),
        "__doc__": f"[`{root.builtin.__name__}`] with support for packed rows, whose documents it keeps apart.",
    }
    return type(root.builtin.__name__, (PackedModelMixin, root.builtin), namespace)


def _run_root(model: PreTrainedModel, root: Root, inputs: dict[str, Any]) -> Any:
    tokens = tokens_of(inputs)
    outer = _current.get()
    boundaries = outer
    if outer is None:
        boundaries = resolve_boundaries(inputs, mixes=root.mixes, reads_patterns=root.reads_patterns(model, inputs))
    if boundaries is None:
        return root.run_builtin(model, inputs)
    boundaries.check_kind(f"a family without classes of this package (which {titles()} have)")
    inputs = root.of_builtin(inputs)
    _check_root(model, root, boundaries, inputs, tokens)
    _complete(inputs, model, root, boundaries)
    with _packed_row(model, boundaries) if outer is None else nullcontext():
        if root.unpacked:
            outputs = _run_unpacked(model, root.builtin.forward, boundaries, inputs)
        else:
            outputs = root.builtin.forward(model, **inputs)
    layers = outputs.get("router_logits") if root.is_base and isinstance(outputs, ModelOutput) else None
    if layers:
        outputs["router_logits"] = tuple(x if x is None else boundaries.real_tokens(x) for x in layers)
    return outputs


def _complete(inputs: dict[str, Any], model: PreTrainedModel, root: Root, boundaries: SequenceBoundaries) -> None:
    """Set the arguments of the stock forward for a packed row, in place."""
    if root.is_language_model and root.shifts_labels:
        labels = mask_targets_across_documents(boundaries, inputs.get("labels"), inputs)
        if labels is not None:
            inputs["labels"] = labels
    if "position_ids" in root.known and inputs.get("position_ids") is None:
        inputs["position_ids"] = boundaries.position_ids
    if root.is_base:
        # Also if only the inner text model names the argument, because it would create a cache by default.
        inputs["use_cache"] = False
        if is_flash_attention_requested(model.config) and not root.unpacked:
            kwargs = boundaries.kernel_kwargs()
            inputs |= {name: kwargs[name] for name in FLASH_KEYWORDS}
    if _has_text_model_of_ours(model):
        inputs |= {"boundaries": boundaries, "settled": True}


def _has_text_model_of_ours(model: PreTrainedModel) -> bool:
    """Whether an enclosing model has a text model that takes boundaries as an argument."""
    return isinstance(family_of(model.config.get_text_config()).apart, Own)


def _check_root(model, root: Root, boundaries: SequenceBoundaries, inputs: dict[str, Any], tokens) -> None:
    """Raise a `ValueError` if the results of a packed row cannot equal those of the separate documents."""
    if tokens is None or tokens.shape[:2] != (1, boundaries.total_length):
        got = "no tokens" if tokens is None else f"shape {tuple(tokens.shape)}"
        raise input_error(f"the packed row of {boundaries.total_length} tokens", got)
    if not root.can_be_packed or getattr(model.config, "is_encoder_decoder", False):
        got = f"a packed row of {boundaries.num_documents} documents"
        raise input_error("one document per row for this model", got, "Use a padded batch.")
    check_config(model.config, inputs)
    # Without positions of its own, an image is a run of embeddings in its document.
    is_embedded = _has_text_model_of_ours(model) and not any(hasattr(x, "get_rope_index") for x in model.modules())
    for name, value in inputs.items():
        if value is not None and name.startswith(_NOT_TEXT) and not is_embedded:
            raise input_error("a packed row with text only", name, "Use a padded batch for other modalities.")
    wants_weights = inputs.get("output_attentions") or getattr(model.config, "output_attentions", False)
    if wants_weights and not root.has_attention_weights:
        expected = "a packed row without output_attentions, because attention runs on each document separately"
        raise input_error(expected, "output_attentions=True")


def _run_unpacked(model, forward: Callable, boundaries: SequenceBoundaries, inputs: dict[str, Any]) -> Any:
    """Compute the outputs of a base model for a packed row on its documents, as right-padded batches.

    Causal attention ignores padding on the right, and positions start at 0 in each row. An output without an entry per
    token cannot be packed again and raises a `ValueError`.
    """
    inputs = {name: value for name, value in inputs.items() if name != "position_ids"}
    if inputs.get("inputs_embeds") is None:
        # Embed the row once, as without packing.
        inputs["inputs_embeds"] = model.get_input_embeddings()(inputs.pop("input_ids"))
    as_tuple = inputs.pop("return_dict", None) is False
    forms = []

    def run(**batch: Any) -> dict[str, Any]:
        outputs = forward(model, return_dict=True, **batch)
        fields, without_rows = by_row(outputs, batch["inputs_embeds"].shape[:2])
        forms.append((type(outputs), without_rows))
        return fields

    with _boundaries_set_to(None):
        fields = on_documents(run, model, inputs, boundaries)
    make, without_rows = forms[0]
    for name in without_rows:
        fields[name] = tree_map_only(torch.Tensor, lambda x: x[0], fields[name])
    return make(**fields).to_tuple() if as_tuple else make(**fields)


def mixer_class(builtin: type[torch.nn.Module], mixer: Mixer) -> type:
    """Create the subclass of a token mixer that keeps documents apart."""

    def run(module: torch.nn.Module, arguments: dict[str, Any]) -> Any:
        name, function = ("stock", builtin.forward) if running.count == 0 else ("documents apart", forward)
        return observable(type(module).__name__, name, function)(module, **arguments)

    @torch.compiler.disable(reason="packed rows differ in the lengths of their documents")
    def forward(module: torch.nn.Module, **arguments: Any) -> Any:
        boundaries = _current.get()
        if boundaries is None:
            return builtin.forward(module, **arguments)
        output = _on_the_row(module, mixer, arguments, boundaries)
        if output is not None:
            ran(type(module).__name__, "row")
            return output
        if mixer.keeps_apart:
            return builtin.forward(module, **arguments)
        with_kernels = _has_kernels(builtin, mixer, arguments)
        ran(type(module).__name__, "kernels" if with_kernels else "per_document")
        # Modules inside this one receive either documents or the boundaries as arguments.
        with _boundaries_set_to(None):
            if not with_kernels:
                return _on_each_document(module, builtin.forward, mixer, arguments, boundaries)
            described = boundaries.kernel_kwargs()
            return builtin.forward(module, **arguments | {keyword: described[keyword] for keyword in mixer.keywords})

    namespace = {"forward": forward_like(builtin.forward, run), "__doc__": builtin.__doc__}
    return type(builtin.__name__, (builtin,), namespace)


def _on_the_row(module, mixer: Mixer, arguments: dict[str, Any], boundaries: SequenceBoundaries) -> Any:
    """Compute the module with the function of its record, or return `None` if it has none or does not support the call."""
    conv = getattr(module, "conv1d", None) or getattr(module, "conv", None)
    # A convolution of another class may compute something else, and padding is set to 0 before it.
    known = conv is None or (isinstance(conv, torch.nn.Conv1d) and arguments.get("attention_mask") is None)
    if not mixer.row or not known or any(arguments.get(name) is not None for name in CACHES):
        return None
    return ROWS[mixer.row](module, boundaries, **{k: v for k, v in arguments.items() if k != "boundaries"})


def _has_kernels(builtin: type, mixer: Mixer, arguments: dict[str, Any]) -> bool:
    """Whether the module runs kernels that accept boundaries, not a torch reference that ignores them."""
    tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
    functions = [getattr(import_module(builtin.__module__), name, None) for name in mixer.kernels]
    return bool(functions) and _on_gpu(tensors) and all(map(_is_kernel, functions))


def _on_gpu(tensors: list[torch.Tensor]) -> bool:
    return all(tensor.is_cuda for tensor in tensors)


@cache
def _is_kernel(function: Any) -> bool:
    """Whether Transformers found a package's kernel for one of its functions, not only its own reference.

    Only a call reveals this: a wrapped reference rejects boundaries with a `ValueError` before it checks its other
    arguments, while a kernel raises another error because its tensors are missing.
    """
    try:
        function(seq_idx=True, cu_seqlens=True)
    except ValueError:
        return False
    except Exception:
        # A reference without Transformers' wrapper would ignore boundaries.
        return hasattr(function, "__wrapped__")
    return False


def _on_each_document(module, forward: Callable, mixer: Mixer, arguments: dict[str, Any], boundaries) -> Any:
    """Run the stock forward on right-padded batches of documents. It is causal, so the results are exact."""
    # Separate documents need no boundaries.
    arguments = {name: value for name, value in arguments.items() if name not in _EXPLICIT}
    if mixer.masked:
        arguments["attention_mask"] = None

    def run(**batch: Any) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
        if mixer.masked:
            batch["attention_mask"] = _causal_mask(module, batch["hidden_states"])
        outputs = forward(module, **batch)
        if isinstance(outputs, torch.Tensor):
            return outputs
        return tuple(output if i in mixer.outputs else None for i, output in enumerate(outputs))

    return on_documents(run, module, arguments, boundaries)


def _causal_mask(module: torch.nn.Module, hidden_states: torch.Tensor) -> Any:
    make = create_sliding_window_causal_mask if getattr(module, "sliding_window", None) else create_causal_mask
    return make(config=module.config, inputs_embeds=hidden_states, attention_mask=None, **{CACHE: None})
