"""Experts of a mixture through this package's op, as an `experts_implementation` of Transformers.

Our models choose it by default, and `patch_model` sets it in place of Transformers' default. Any other implementation
that the user sets is kept.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.checkpoint import checkpoint
from transformers.activations import SiLUActivation
from transformers.integrations import moe
from transformers.integrations.finegrained_fp8 import fp8_grouped_mm_experts_forward

from ..errors import input_error
from ..foreign import experts_of, set_experts
from ..ops import experts
from ..ops.dispatch import ran
from ..ops.moe import verify_triton
from ..ops.terms import Adapter, DequantizedExperts, Float8Experts
from .families import EXPERT_CLASSES
from .float8_marks import is_in_float8, warn_about
from .host_parameters import needs_copies, with_copies
from .installed import EXPERTS
from .lora import adapter_of_parameter, is_lora, lora_class
from .quantized_weights import is_replaced
from .releases import has_usual_gate
from .stored_weights import has_experts_in_blocks, weight_of_experts, why_not_in_float8
from .untouched import is_untouched
from .versions import has_post_expert_norm


# A weight of experts for the op.
Weight = torch.Tensor | DequantizedExperts | Float8Experts
_DEFAULT = "grouped_mm"
_ON_GPU = "Or leave the experts on the GPU."


def switch_implementation(model: torch.nn.Module, ours: bool) -> None:
    """Replace Transformers' default implementation of all experts in `model` by ours, or ours by that default."""
    before, after = (_DEFAULT, EXPERTS) if ours else (EXPERTS, _DEFAULT)
    configs: list[Any] = [module.config for module in model.modules() if is_known(module)]
    for config in configs:
        if experts_of(config) == before:
            set_experts(config, after)


def replaced_experts(model: torch.nn.Module) -> list[torch.nn.Module]:
    """List the experts of our models whose weights bitsandbytes' `replace_parameter_4bit` has replaced.

    Raises:
        `ValueError`: PEFT has wrapped such a weight. Its adapters are of another shape.
    """
    found = []
    for parent in model.modules():
        for module in parent.children():
            if is_replaced(module) and any(cls.__name__ in EXPERT_CLASSES for cls in type(module).__mro__):
                if any(map(is_lora, (parent, *module.parametrizations.values()))):  # type: ignore[operator]
                    got = "adapters on weights that bitsandbytes has replaced"
                    raise input_error("patch_model before get_peft_model for experts in 4 bit", got)
                found.append(module)
    return found


def isolates(module: Any) -> bool:
    """Whether the result of a token in this module of experts is bit-identical whatever other tokens there are."""
    module = _inside_adapters(module)
    # Any other module may lack these attributes, or have a forward of its own.
    if not is_known(module) or experts_of(module.config) != EXPERTS:
        return False
    # The dtype of the input does not matter.
    x = torch.empty(1, module.config.hidden_size, dtype=torch.bfloat16, device=next(module.parameters()).device)
    return not isinstance(_weights_for_op(module, x, None, None), str)


def run_experts(
    module: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    shared: torch.Tensor,
    shared_gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add the outputs of a module of experts and of the shared expert, in one op if that computes what the module does.

    The op also computes LoRA adapters of the experts, without adding them to the weights.

    Args:
        module (`torch.nn.Module`):
            The experts, which may be inside PEFT's wrappers.
        hidden_states, top_k_index, top_k_weights (`torch.Tensor`):
            Arguments of [`experts_forward`].
        shared (`torch.Tensor` of shape `[T, hidden]`):
            Output of the shared expert.
        shared_gate (`torch.Tensor` of shape `[T, 1]`, *optional*):
            Its gate before the sigmoid. Some families have none.

    Returns:
        `torch.Tensor` of shape `[T, hidden]`.
    """
    base, adapters = _adapters_of(module)
    if adapters is not None:
        weights = _weights_for_op(base, hidden_states, top_k_index, top_k_weights, *adapters)
        if not isinstance(weights, str):
            gate_up, down = adapters
            gated = None if shared_gate is None else (shared, shared_gate)
            options: Any = {"gate_up_adapter": gate_up, "down_adapter": down, "shared": gated}
            output = experts(hidden_states, top_k_index, top_k_weights, *weights, **options)
            return output + shared if gated is None else output
        if any(adapters):
            ran("experts_lora", "peft", [weights])
            warn_about(base, hidden_states, weights)
    _check_implementation(module, hidden_states)
    shared = shared if shared_gate is None else torch.sigmoid(shared_gate) * shared
    return module(hidden_states, top_k_index, top_k_weights) + shared


def _adapters_of(module: Any) -> tuple[Any, list[Adapter | None] | None]:
    """Return the experts inside PEFT's wrappers, and the adapters of `gate_up_proj` and `down_proj`.

    There are no adapters, but `None`, if one of these modules has to run.
    """
    found: dict[str, Adapter] = {}
    wrapper: Any = lora_class("lora.layer", "ParamWrapper")
    while wrapper is not None and type(module) is wrapper:
        adapter = adapter_of_parameter(module)
        if isinstance(adapter, str):
            ran("experts_lora", "peft", [adapter])
            return module, None
        if adapter is not None and module.parameter_name in found:
            return module, None
        if adapter is not None:
            found[module.parameter_name] = adapter
        module = module.base_layer
    # [`weight_of_experts`] knows the types of weights.
    kinds = tuple(map(type, module._parameters.values()))
    plain = is_known(module) and is_untouched(module, type(module), parameters=kinds)
    if not plain or experts_of(module.config) != EXPERTS:
        return module, None
    return module, [found.get(name) for name in ("gate_up_proj", "down_proj")]


def experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Forward of a module of experts. Where the op would not be faster, this is Transformers' `grouped_mm`.

    Args:
        hidden_states (`torch.Tensor` of shape `[T, hidden]`):
            Input of the experts.
        top_k_index (`torch.LongTensor` of shape `[T, top_k]`), top_k_weights (`torch.Tensor` of shape `[T, top_k]`):
            Experts of each token, and their weights.

    Returns:
        `torch.Tensor` of shape `[T, hidden]`.
    """
    weights = _weights_for_op(self, hidden_states, top_k_index, top_k_weights)
    if not isinstance(weights, str):
        return experts(hidden_states, top_k_index, top_k_weights, *weights)
    warn_about(self, hidden_states, weights)
    grouped_mm = fp8_grouped_mm_experts_forward if has_experts_in_blocks(self) else moe.grouped_mm_experts_forward
    call = hidden_states, top_k_index, top_k_weights
    if needs_copies(self, hidden_states.device):
        if is_parametrized(self) or torch.compiler.is_compiling():
            raise input_error("plain experts in host memory", f"others: {weights}", "Leave the experts on the GPU.")
        ran("experts", _DEFAULT, [weights])
        # Otherwise, each layer would save its copies for backward.
        options: Any = {"use_reentrant": False, "preserve_rng_state": False}
        return checkpoint(_with_copies, grouped_mm, self, *call, **options)
    ran("experts", _DEFAULT, [weights])
    return grouped_mm(self, *call)


def _with_copies(grouped_mm: Callable, module: Any, hidden_states: torch.Tensor, *choices: torch.Tensor) -> Any:
    with with_copies(module, hidden_states.device):
        return grouped_mm(module, hidden_states, *choices)


def weights_of(module: Any, hidden_states: torch.Tensor) -> list[Weight] | str:
    """Return both weights of the experts for the op, or why it cannot have them."""
    # Each read of a parametrized weight computes it again, which changes the state of a spectral norm.
    if is_parametrized(module):
        return "their weights are parametrized"
    in_float8 = is_in_float8(module, hidden_states)
    # The weights may be others than those that [`use_float8`] has seen.
    if in_float8 and (reason := why_not_in_float8(module)) != "":
        warn_about(module, hidden_states, "its weights are not stored in float8" if reason is None else f"it {reason}")
        in_float8 = False
    names = "gate_up_proj", "down_proj"
    gate_up, down = (weight_of_experts(module, name, in_float8, hidden_states) for name in names)
    if gate_up is None or down is None:
        return "their weights are sharded, or quantized in another way"
    return [gate_up, down]


def _inside_adapters(module: Any) -> Any:
    while hasattr(module, "base_layer"):
        module = module.base_layer
    return module


def _check_implementation(module: Any, hidden_states: torch.Tensor) -> None:
    """Raise a `ValueError` if a function of Transformers would read weights that are in host memory.

    Log it if such a function, or the module's own, runs experts that should run in float8.
    """
    inner = _inside_adapters(module)
    found = experts_of(getattr(inner, "config", None))
    if found != EXPERTS and needs_copies(inner, hidden_states.device):
        expected = f'experts_implementation="{EXPERTS}" for experts in host memory'
        raise input_error(expected, repr(found), _ON_GPU)
    if found != EXPERTS:
        warn_about(inner, hidden_states, f"its implementation is {found!r}, not {EXPERTS!r}")
    elif "forward" in vars(inner):
        warn_about(inner, hidden_states, "it has a forward of its own")


def is_known(module: torch.nn.Module) -> bool:
    """Whether the class of these experts is one that the op can compute."""
    return type(module).__name__ in EXPERT_CLASSES or has_experts_in_blocks(module)


def _weights_for_op(
    module, hidden_states, index, weights, gate_up_adapter=None, down_adapter=None
) -> list[Weight] | str:
    """Return both weights of the experts, or why the op would fail, be slow or compute something else than this module."""
    if not has_usual_gate(module) or not module.has_gate or not module.is_concatenated:
        return "their gate is computed in another way"
    if not is_untouched(module.act_fn, SiLUActivation, torch.nn.SiLU):
        return "their activation is not SiLU, or is hooked"
    if module.has_bias or module.is_transposed or has_post_expert_norm(module):
        return "they have biases, transposed weights or a norm"
    if torch.compiler.is_compiling():
        return "torch.compile runs Transformers' own"
    found = weights_of(module, hidden_states)
    # The reference is for CPUs. It copies the number of each expert's rows to the host.
    if isinstance(found, str) or hidden_states.device.type == "cpu":
        return found
    gate_up, down = found
    reason = verify_triton(hidden_states, index, weights, gate_up, down, gate_up_adapter, down_adapter, None)
    if reason and isinstance(gate_up, Float8Experts):
        fix = "Call use_float8 with a module_filter that leaves experts out."
        raise input_error("experts whose products can run in float8", f"others: the kernel {reason}", fix)
    return reason or found
