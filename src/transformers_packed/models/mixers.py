"""Modules that mix along the row, made to stop at documents: classes derived from the built-in ones, by table.

On a packed row such a module runs the built-in forward on each document alone (`ops.per_document`), or once on the row
where its kernels can be told of boundaries and only the layers above fail to. The classes are made when a family is
first asked for, and kept in `base.REPLACEMENTS` like those written by hand. They are pickled by name: this module finds
`bamba__BambaMixer` when that is asked for.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from ..boundaries import LAYER_KEYWORDS
from ..ops.dispatch import record
from ..ops.per_document import per_document
from .base import REPLACEMENTS
from .current import boundaries_set_to, current_boundaries, running
from .families import MIXERS, UNPACKED, Mixer
from .roots import Root, root_class
from .unpacked import run_unpacked


_NO_TEXT = ("VisionModel", "AudioModel")


def family_of(cls: type) -> str | None:
    """The family of a class of Transformers: the name of its modeling module."""
    parts = cls.__module__.split(".")
    if parts[:2] == ["transformers", "models"] and parts[-1].startswith("modeling_"):
        return parts[-2]
    return None


def families_of(model: torch.nn.Module) -> set[str]:
    """The families of all modules of a model, and of the classes that theirs derive from."""
    bases = {base for module in model.modules() for base in type(module).__mro__}
    return {family_of(base) for base in bases} - {None}


def announce(family: str) -> None:
    """Put our classes of a family of `MIXERS` or `UNPACKED` into `base.REPLACEMENTS`, once."""
    for name in (*MIXERS.get(family, ()), *language_models(family)):
        _replace(family, name)


def packed_class(family: str, name: str) -> type:
    """Our class for a built-in one, which may also be that of a model around one of the families."""
    if family in MIXERS or family in UNPACKED:
        announce(family)
    return _replace(family, name)


def language_models(family: str) -> dict[str, type]:
    """The built-in models of a family that take text, by name."""
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    return {
        name: cls
        for name, cls in vars(module).items()
        if isinstance(cls, type) and issubclass(cls, PreTrainedModel) and cls.__module__ == module.__name__
        if cls.forward is not PreTrainedModel.forward
        if "For" in name or (name.endswith("Model") and not name.endswith(_NO_TEXT)) or name == _base_name(family)
    }


def text_model(family: str) -> type:
    """The built-in base model of a family: of one with images, that of its text."""
    models = language_models(family)
    if family in UNPACKED:
        return models[_base_name(family)]
    bases = [cls for name, cls in models.items() if "For" not in name]
    return next((cls for cls in bases if cls.__name__.endswith("TextModel")), bases[0])


def _base_name(family: str) -> str | None:
    return UNPACKED[family].base if family in UNPACKED else None


def _replace(family: str, name: str) -> type:
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    builtin = getattr(module, name)
    ours = REPLACEMENTS.get(builtin)
    if ours is None:
        mixers = MIXERS.get(family, {})
        if name in mixers:
            ours = _mixer_class(builtin, mixers[name])
        else:
            run = run_unpacked if name == _base_name(family) else None
            masked = any(mixer.masked for mixer in mixers.values())
            root = Root(
                builtin,
                run=run,
                has_attention_weights=not (run or masked),
                shifts_labels=family not in UNPACKED or UNPACKED[family].shifts_labels,
            )
            ours = root_class(root)
        ours.__module__, ours.__qualname__ = __name__, f"{family}__{name}"
        REPLACEMENTS[builtin] = ours
    return ours


def __getattr__(name: str) -> type:
    family, separator, cls = name.partition("__")
    if separator and cls and family:
        return packed_class(family, cls)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _mixer_class(builtin: type, mixer: Mixer) -> type:
    signature = inspect.signature(builtin.forward)
    names = tuple(signature.parameters)[1:]

    @wraps(builtin.forward)
    def forward(self, *args, **kwargs):
        if running.count == 0:
            return builtin.forward(self, *args, **kwargs)
        return _forward(self, builtin.forward, mixer, names, args, kwargs)

    return type(builtin.__name__, (builtin,), {"forward": forward, "__doc__": builtin.__doc__})


@torch.compiler.disable(reason="packed rows differ in the lengths of their documents")
def _forward(module, builtin: Callable, mixer: Mixer, names: tuple[str, ...], args: tuple, kwargs: dict[str, Any]):
    boundaries = current_boundaries()
    if boundaries is None:
        return builtin(module, *args, **kwargs)
    arguments = dict(zip(names, args, strict=False)) | kwargs
    name = type(module).__name__
    if _has_kernels(builtin, mixer, arguments):
        record(name, "kernels", [], lambda _: None)
        described = boundaries.layer_kwargs()
        with boundaries_set_to(None):
            return builtin(module, **arguments, **{keyword: described[keyword] for keyword in mixer.keywords})
    record(name, "per_document", [], lambda _: None)
    return _on_each_document(module, builtin, mixer, arguments, boundaries)


def _has_kernels(builtin: Callable, mixer: Mixer, arguments: dict[str, Any]) -> bool:
    """Whether the module runs kernels that can be told of boundaries, and no torch reference that ignores them."""
    if not mixer.kernels:
        return False
    tensors = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
    module = inspect.unwrap(builtin).__globals__
    return _on_gpu(tensors) and all(_is_kernel(module.get(name)) for name in mixer.kernels)


def _on_gpu(tensors: list[torch.Tensor]) -> bool:
    return all(tensor.is_cuda for tensor in tensors)


def _is_kernel(function: Callable | None) -> bool:
    """What Transformers found for a function when it was imported: a kernel package's, or only its own reference."""
    while function is not None:
        code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None)
        if code is not None and cells and "is_new_implementation" in code.co_freevars:
            return bool(cells[code.co_freevars.index("is_new_implementation")].cell_contents)
        function = getattr(function, "__wrapped__", None)
    return False


def _on_each_document(module, builtin: Callable, mixer: Mixer, arguments: dict[str, Any], boundaries):
    """The built-in forward on right-padded batches of documents: it is causal, so what it makes of them is exact."""
    row = (1, boundaries.total_length)
    arguments = {name: value for name, value in arguments.items() if name not in LAYER_KEYWORDS}
    if mixer.masked:
        arguments["attention_mask"] = None
    leaves, structure = tree_flatten(arguments)
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.shape[:2] == row]
    single = []

    def run(*batches: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        filled = list(leaves)
        for place, batch in zip(places, batches, strict=True):
            filled[place] = batch
        inputs = tree_unflatten(filled, structure)
        if mixer.masked:
            inputs["attention_mask"] = _causal_mask(module, inputs["hidden_states"])
        outputs = builtin(module, **inputs)
        single.append(isinstance(outputs, torch.Tensor))
        if single[-1]:
            return (outputs,)
        return tuple(output if i in mixer.outputs else None for i, output in enumerate(outputs))

    # Modules inside this one get documents, not the row.
    with boundaries_set_to(None):
        outputs = per_document(run, *(leaves[place] for place in places), boundaries=boundaries)
    return outputs[0] if single[0] else outputs


def _causal_mask(module: torch.nn.Module, hidden_states: torch.Tensor) -> Any:
    make = create_sliding_window_causal_mask if getattr(module, "sliding_window", None) else create_causal_mask
    return make(config=module.config, inputs_embeds=hidden_states, attention_mask=None, past_key_values=None)
