"""Which modules a fused op may stand in for: those that do what their class does and nothing else.

What hooks into, wraps, replaces, parametrises or shards a module shows in its attributes. Such a module is called as it
is, so that adapters, hooks, sharding and quantization have the effect that they have on the built-in model.
"""

import torch

from ..ops.backends import triton
from ..ops.linear import can_share_input, shared_input_linears


# Where a module keeps what hooks into it, and torch what hooks into all of them.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = [getattr(torch.nn.modules.module, f"_global{name}") for name in _HOOKS]
# Parameters that are nothing but their values. Those of FSDP1 are views of its own type.
_PLAIN = (torch.nn.Parameter, torch.Tensor)


def hooks_of(module: torch.nn.Module) -> list:
    """What is called beside the module's forward: its own hooks, and those that torch calls for every module."""
    state = vars(module)
    return [hook for hooks in [*(state[name] for name in _HOOKS), *_GLOBAL_HOOKS] for hook in hooks.values()]


def is_untouched(module: torch.nn.Module, *classes: type) -> bool:
    """Whether a call of the module does what one of `classes` does with plain parameters of its own, and nothing else.

    Tells hooks, a `forward` of its own (accelerate, tensor parallelism, kernels), a compiled call, another class
    (adapters, parametrizations, FSDP2, quantization) and parameters of another type.
    """
    # Asked hundreds of times in a step, so without lists.
    state = vars(module)
    if type(module) not in classes or "forward" in state or module._compiled_call_impl is not None:
        return False
    for name in _HOOKS:
        if state[name]:
            return False
    for hooks in _GLOBAL_HOOKS:
        if hooks:
            return False
    for parameter in state["_parameters"].values():
        if parameter is not None and type(parameter) not in _PLAIN:
            return False
    return True


def is_bare_linear(module: torch.nn.Module) -> bool:
    """Whether the weight and the bias of this linear layer say all that it does."""
    return is_untouched(module, torch.nn.Linear)


def is_sharded_linear(module: torch.nn.Module) -> bool:
    """Whether the module is a linear layer that nothing but FSDP2 hooks into, sharded by itself."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.fsdp import FSDPModule

    state = vars(module)
    return (
        isinstance(module, FSDPModule)
        and torch.nn.Linear in type(module).__bases__
        and "forward" not in state
        and len(state["_forward_hooks"]) == len(state["_forward_pre_hooks"]) == 1
        and not (state["_backward_hooks"] or state["_backward_pre_hooks"])
    )


def has_only_a_weight(module: torch.nn.Module) -> bool:
    """Whether the module is a [`is_bare_linear`] without a bias."""
    return is_bare_linear(module) and module.bias is None


def weight_to_fuse(layer: torch.nn.Module, hidden_states: torch.Tensor) -> torch.Tensor | None:
    """The weight of this linear layer where the op before it computes the layer too, which saves memory on a GPU."""
    return layer.weight if triton.on_gpu(hidden_states) and has_only_a_weight(layer) else None


def project(hidden_states: torch.Tensor, *layers: torch.nn.Module) -> tuple[torch.Tensor, ...]:
    """What each of these linear layers makes of `hidden_states`, in one step of autograd where that is possible."""
    if not torch.compiler.is_compiling() and all(map(has_only_a_weight, layers)):
        weights = [layer.weight for layer in layers]
        if can_share_input(hidden_states, weights):
            return shared_input_linears(hidden_states, *weights)
    return tuple(layer(hidden_states) for layer in layers)
