"""Layers of a model whose products run in float8 during training: linear ones, and experts that are stored in float8."""

import re
from collections.abc import Callable, Iterable

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..errors import input_error
from ..ops.float8 import MULTIPLE
from ..ops.float8_blocks import BLOCK
from ..ops.invariance import VARIES
from .cuda_graphs import check_family, find_text_models, forget_graphs
from .families import OWN, sizes_of
from .float8_marks import MARK
from .quantization import SENSITIVE
from .replacements import Model
from .sizes import Experts
from .stored_weights import why_not_in_float8


logger = logging.get_logger(__name__)

# By default, smaller products (tokens * out * in) keep the dtype of the model: casts would take longer than they save.
_LEAST_WORK = 1e11
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def use_float8(model: Model, module_filter: Callable[[torch.nn.Module, str], bool] | None = None) -> Model:
    """Run matrix products in float8 (e4m3) when the model trains, forward and backward: those of linear layers, and of experts
    whose weights are stored in float8.

    Parameters, gradients, the optimizer and saved files keep their dtypes. Each row of an input and of a weight is cast
    with a scale of its own, in each forward and backward. Experts of a checkpoint in FP8 with a scale for each 128 x 128
    weights multiply the stored bytes, and cast each 128 columns of a row with a scale of their own. In evaluation mode, the
    layers run in the dtype of the model. So do layers with hooks or with a replaced forward: the log names them.

    Args:
        model (`PreTrainedModel`):
            A Qwen3.5/3.6/3.8 or Qwen3-Next model of this package, in bfloat16 or trained under autocast to bfloat16.
        module_filter (`Callable[[torch.nn.Module, str], bool]`, *optional*):
            Called with each `torch.nn.Linear`, each module of experts in FP8, and its name. Returns whether the layer
            trains in float8. By default these are the experts, and the linear layers with sizes in multiples of 16, in all
            decoder layers but the first and the last one, without the gates of the gated delta rule. Linear layers use
            float8 for rows whose `tokens * out * in` is at least 1e11 for the largest layer with the same input, below which
            it is slower. `lambda module, name: False` disables float8.

    Returns:
        `torch.nn.Module`: the same model.

    Raises:
        `ValueError`: the model is not supported, or `module_filter` selects a layer that cannot run in float8. The
            forward on a GPU without products in float8, or with another dtype, raises it too.

    Example:

    ```python
    >>> from transformers import Qwen3_5TextConfig
    >>> from transformers_packed import use_float8
    >>> from transformers_packed.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM
    >>> config = Qwen3_5TextConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=4)
    >>> model = use_float8(Qwen3_5ForCausalLM(config))

    ```
    """
    able = [family for family in OWN if family.has_float8]
    check_family(model, able, bool(find_text_models(model)), "float8")
    layers, experts = _candidates(model)
    every: dict[str, torch.nn.Module] = {**layers, **experts}
    if module_filter is None:
        fewest = _by_default(model, layers, experts)
    else:
        fewest = _filtered(model, every, module_filter)
    for name, layer in every.items():
        vars(layer)[MARK] = fewest.get(name)
    forget_graphs(model)
    log = logger.info if module_filter or fewest else logger.warning
    found = f"{len(fewest.keys() & layers)} of {len(layers)} linear layers"
    found += f" and {len(fewest.keys() & experts)} of {len(experts)} modules of experts" if experts else ""
    log(f"use_float8: {found} train in float8.")
    return model


def check_invariance(model: torch.nn.Module) -> None:
    """Check that the layers that train in float8 give a document the same bits in every row, as [`batch_invariant`] promises.

    Raises:
        `ValueError`: a layer multiplies another weight than one that is stored in float8 with scales of blocks.
    """
    for name, layer in model.named_modules():
        if vars(layer).get(MARK) is not None and why_not_in_float8(layer) != "":
            expected = (
                f"weights stored in FP8 in blocks of {BLOCK} x {BLOCK} in all layers with float8 and batch_invariant"
            )
            fix = "Remove one of both, or call use_float8 with a module_filter instead of float8=True."
            raise input_error(expected, f"{name}, which {VARIES}", fix)


def _filtered(
    model: torch.nn.Module, layers: dict[str, torch.nn.Module], module_filter: Callable[[torch.nn.Module, str], bool]
) -> dict[str, float]:
    """Return the layers that a filter selects, each with the fewest tokens."""
    found = {name: float(isinstance(x, torch.nn.Linear)) for name, x in layers.items() if module_filter(x, name)}
    for name in found:
        if problem := _problem(model, name, layers[name]):
            raise input_error("a module_filter that selects supported layers", f"{name}, which {problem}")
    return found


def share_in_float8(model: PreTrainedModel, tokens: int) -> float:
    """Return the share of the products in decoder layers that run in float8 by default, for a row of so many tokens.

    A token counts with the experts that it uses.
    """
    layers, experts = _candidates(model)
    fewest, sizes = _by_default(model, layers, experts), sizes_of(model.config)
    work = {name: x.in_features * x.out_features for name, x in layers.items() if _LAYER.search(name)}
    mixtures = {n: x.mlp for n, x in enumerate(sizes.layers) if isinstance(x.mlp, Experts)}
    chosen = {n: 3 * x.chosen * x.width * sizes.hidden for n, x in mixtures.items()}
    every = work | {name: chosen[number] for name, number in _numbers(experts).items()}
    found = sum(every[name] for name, least in fewest.items() if least <= tokens)
    return found / (sum(work.values()) + sum(chosen.values()))


def _candidates(model: torch.nn.Module) -> tuple[dict[str, torch.nn.Linear], dict[str, torch.nn.Module]]:
    """Return the linear layers, and the modules of experts that are stored in float8 with scales of blocks."""
    layers = {name: x for name, x in model.named_modules() if isinstance(x, torch.nn.Linear)}
    stored = {name: x for name, x in model.named_modules() if why_not_in_float8(x) is not None}
    return layers, {name: x for name, x in stored.items() if name not in layers}


def _by_default(
    model: torch.nn.Module, layers: dict[str, torch.nn.Linear], experts: dict[str, torch.nn.Module]
) -> dict[str, float]:
    """Return the layers and experts that train in float8 by default, each with the fewest tokens for which that is worth its
    casts.

    They are supported, and neither sensitive nor in the first or the last decoder layer.
    """
    inner = [name for name in _inner(layers) if not _problem(model, name, layers[name])]
    chosen = {name: layers[name] for name in inner if not any(part in SENSITIVE for part in name.split("."))}
    largest: dict[tuple, int] = {}
    for name, layer in chosen.items():
        group = _group_of(name, layer)
        largest[group] = max(layer.in_features * layer.out_features, largest.get(group, 0))
    found = {name: _LEAST_WORK / largest[_group_of(name, layer)] for name, layer in chosen.items()}
    # Experts would be dequantized, which takes longer than casts of any number of rows.
    return found | {name: 0.0 for name in _inner(experts) if not _problem(model, name, experts[name])}


def _numbers(names: Iterable[str]) -> dict[str, int]:
    """Return the decoder layer of each module that is in one."""
    return {name: int(found[1]) for name in names if (found := _LAYER.search(name))}


def _inner(names: Iterable[str]) -> list[str]:
    """Return the names of modules that are neither in the first nor in the last decoder layer which has one."""
    numbers = _numbers(names)
    ends = {min(numbers.values(), default=0), max(numbers.values(), default=0)}
    return [name for name, number in numbers.items() if number not in ends]


def _group_of(name: str, layer: torch.nn.Linear) -> tuple[str, int]:
    """Return a key of the layers that share an input. It is cast once, so small layers among them gain too."""
    return name.removesuffix(".base_layer").rpartition(".")[0], layer.in_features


def _problem(model: torch.nn.Module, name: str, layer: torch.nn.Module) -> str:
    """Return why a layer cannot run in float8, or an empty string."""
    if (problem := why_not_in_float8(layer)) or not isinstance(layer, torch.nn.Linear):
        return problem or ""
    if layer.in_features % MULTIPLE or layer.out_features % MULTIPLE:
        return f"is {layer.out_features} x {layer.in_features}, not multiples of {MULTIPLE}"
    parent = model.get_submodule(name.removesuffix(".base_layer").rpartition(".")[0])
    ours = type(parent).__module__.startswith(__package__) and _LAYER.search(name) is not None
    return "" if ours else f"{type(parent).__name__} calls outside of the ops of this package"
