"""Detect modules that a fused op may replace: those that do exactly what their class does.

Hooks (those of pruning and old weight norms too), wrappers, replacements, parametrizations and sharding are visible in a
module's attributes. Such a module is called normally, so they have the same effect as on the stock model.
[`terms_of`] adds plain LoRA layers and quantized weights.
"""

from typing import Any, TypeGuard

import torch


# The attributes with a module's hooks, and torch's global hooks for all modules.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = [getattr(torch.nn.modules.module, f"_global{name}") for name in HOOKS]
# Modules of the functions that ZeRO-3 registers as hooks. The latter has the wrapper around some of them.
_ZERO_3 = "deepspeed.runtime.zero.", "deepspeed.utils.nvtx"
# The module of the hooks by which Transformers' forwards return outputs of layers. They stay registered after the first such
# call and do nothing in other calls.
_RECORDING = "transformers.utils.output_capturing"
# Types of plain parameters. FSDP1's parameters are views of type `torch.Tensor`.
_PLAIN = (torch.nn.Parameter, torch.Tensor)


def modules_of(module: torch.nn.Module) -> list[torch.nn.Module]:
    """List a module and all modules in it. `Module.modules` passes each one up through all levels, which takes longer."""
    found = [module]
    seen = {module}
    for outer in found:
        for inner in outer._modules.values():
            if inner is not None and inner not in seen:
                seen.add(inner)
                found.append(inner)
    return found


def hooks_of(module: torch.nn.Module) -> list:
    """List the hooks that run with the module's forward: its own, and torch's global hooks."""
    # Graphs look at thousands of modules in each step, and few have any.
    found, state = [], vars(module)
    for name in HOOKS:
        if state[name]:
            found += state[name].values()
    for hooks in _GLOBAL_HOOKS:
        if hooks:
            found += hooks.values()
    return found


def records_outputs(hook: Any) -> bool:
    """Whether Transformers registered this hook in a forward, and needs it in later ones."""
    return getattr(hook, "__module__", None) == _RECORDING


def is_untouched(module: torch.nn.Module, *classes: type, parameters: tuple[type, ...] = _PLAIN) -> bool:
    """Whether calling the module does exactly what one of `classes` does with `parameters` of these types.

    This is `False` for modules with hooks, a `forward` set on the instance (accelerate, tensor parallelism, kernels),
    a compiled call, another class (adapters, parametrizations, FSDP2, quantization) or parameters of another type.
    """
    # This runs hundreds of times per step, so it builds no lists.
    state = vars(module)
    if type(module) not in classes or "forward" in state or module._compiled_call_impl is not None:
        return False
    for name in HOOKS:
        if state[name]:
            return False
    for hooks in _GLOBAL_HOOKS:
        if hooks:
            return False
    for parameter in state["_parameters"].values():
        if parameter is not None and type(parameter) not in parameters:
            return False
    return True


def is_bare_linear(module: torch.nn.Module) -> TypeGuard[torch.nn.Linear]:
    """Whether the weight and the bias fully determine the output of this linear layer."""
    return is_untouched(module, torch.nn.Linear)


def is_fsdp(module: torch.nn.Module) -> bool:
    """Whether FSDP shards the module as a unit."""
    return any(base.__module__.startswith("torch.distributed.fsdp") for base in type(module).__mro__)


def gathers_weights(module: torch.nn.Module) -> bool:
    """Whether each call of this module, or of a part of it, gathers weights from all processes: FSDP or DeepSpeed's ZeRO-3.

    All processes then have to make the same number of calls.
    """
    return any(
        is_fsdp(part) or any(map(_is_of_zero_3, vars(part)["_forward_pre_hooks"].values()))
        for part in module.modules()
    )


def is_sharded_linear(module: torch.nn.Module) -> bool:
    """Whether the module is a linear layer with no hooks but those of FSDP2 or ZeRO-3, which shards it separately."""
    state = vars(module)
    if "forward" in state or state["_backward_hooks"] or state["_backward_pre_hooks"]:
        return False
    before, after = state["_forward_pre_hooks"], state["_forward_hooks"]
    if type(module) is torch.nn.Linear:
        hooks = [*before.values(), *after.values()]
        return bool(hooks) and all(map(_is_of_zero_3, hooks))
    # FSDP2 derives the class from that of the layer, and registers a hook of each kind.
    return is_fsdp(module) and torch.nn.Linear in type(module).__bases__ and len(before) == len(after) == 1


def _is_of_zero_3(hook: Any) -> bool:
    # ZeRO-3 registers hooks on all modules but those inside of its leaf modules.
    return (getattr(hook, "__module__", None) or "").startswith(_ZERO_3)


def norm_of_stream(
    norm: Any, cls: type, hidden_states: torch.Tensor, residual: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of the residual stream, and the stream: `hidden_states`, added to the `residual` if there is one.

    A norm that is no untouched `cls` of this package takes the stream as its only argument.
    """
    if is_untouched(norm, cls):
        return norm(hidden_states, stream=True) if residual is None else norm(hidden_states, residual)
    stream = hidden_states if residual is None else residual + hidden_states
    return norm(stream), stream
