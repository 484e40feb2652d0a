"""A stand-in for DeepSpeed's ZeRO-3, in one process.

A parameter is empty, except while a module that has it runs its forward or its backward. Hooks on modules see to this, as
in DeepSpeed. A parameter that another module reads in its forward belongs to that module too from then on.
"""

from collections import Counter
from typing import Any

import torch


class Zero3:
    """Partition the parameters of a model. Modules inside of a leaf module get no hooks, and it gathers theirs.

    `gathers` lists the modules that gathered parameters, in forward and backward. In DeepSpeed, this list has to be the
    same in all processes.
    """

    def __init__(self, model: torch.nn.Module, leaves: tuple[type, ...] = ()):
        self.names = {module: name for name, module in model.named_modules()}
        self.whole = {parameter: parameter.data for parameter in model.parameters()}
        self.gathers: list[str] = []
        self.users: Counter[torch.Tensor] = Counter()
        self.running: list[_Call] = []
        self.external: dict[torch.nn.Module, set[torch.Tensor]] = {module: set() for module in self.names}
        for number, (parameter, data) in enumerate(self.whole.items()):
            # The part of the first of two processes.
            parameter.ds_id, parameter.ds_tensor = number, data.view(-1)[: -(-data.numel() // 2)]
            parameter.data = data.new_empty(0)
        for module in self.names:
            vars(module)["_parameters"] = _Parameters(self, module._parameters)
        self._register(model, leaves)

    def _register(self, module: torch.nn.Module, leaves: tuple[type, ...]) -> None:
        is_leaf = isinstance(module, leaves)

        def before(module, inputs):
            call = _Call(self, module, is_leaf)
            call.gather()
            self.running.append(call)
            return _mapped(call.watch_input, inputs)

        def after(module, inputs, output):
            call = self.running.pop()
            call.free()
            return _mapped(call.watch_output, output)

        # DeepSpeed wraps the second one for profiles.
        before.__module__, after.__module__ = "deepspeed.runtime.zero.parameter_offload", "deepspeed.utils.nvtx"
        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
        for child in () if is_leaf else module.children():
            self._register(child, leaves)

    def change(self, parameter: torch.Tensor) -> None:
        """Change a parameter as an optimizer does."""
        self.whole[parameter].add_(1)


class _Call:
    """A forward of a module, and its backward."""

    def __init__(self, zero: Zero3, module: torch.nn.Module, is_leaf: bool):
        self.zero, self.module, self.is_leaf = zero, module, is_leaf
        self.used: set[torch.Tensor] = set()
        self.gradients_to_come = 0

    def gather(self) -> None:
        if not self.used:
            own = {*self.module.parameters(recurse=self.is_leaf), *self.zero.external[self.module]}
            gathered = [self.use(parameter) for parameter in own]
            if any(gathered):
                self.zero.gathers.append(self.zero.names[self.module])

    def use(self, parameter: torch.Tensor) -> bool:
        """Use a parameter, and return whether nobody else does."""
        self.used.add(parameter)
        self.zero.users[parameter] += 1
        parameter.data = self.zero.whole[parameter]
        return self.zero.users[parameter] == 1

    def free(self) -> None:
        for parameter in self.used:
            self.zero.users[parameter] -= 1
            if not self.zero.users[parameter]:
                parameter.data = parameter.data.new_empty(0)
        self.used = set()

    def watch_input(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not x.requires_grad:
            return x
        self.gradients_to_come += 1
        return _CallInBackward.apply(self.gradient_of_input, x)

    def gradient_of_input(self) -> None:
        self.gradients_to_come -= 1
        if not self.gradients_to_come:
            self.free()

    def watch_output(self, x: Any) -> Any:
        return _CallInBackward.apply(self.gather, x) if isinstance(x, torch.Tensor) and x.requires_grad else x


class _CallInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        return x.detach()

    @staticmethod
    def backward(ctx, gradient):
        ctx.function()
        return None, gradient


class _Parameters(dict):
    """The parameters of a module. A forward that reads one by name gathers it for the innermost module that runs."""

    def __init__(self, zero: Zero3, parameters: dict):
        super().__init__(parameters)
        self.zero = zero

    def __getitem__(self, name: str) -> Any:
        parameter, running = super().__getitem__(name), self.zero.running
        if parameter is not None and running and not self.zero.users[parameter]:
            self.zero.external[running[-1].module].add(parameter)
            running[-1].use(parameter)
        return parameter


def _mapped(function: Any, values: Any) -> Any:
    if isinstance(values, dict):
        for name, value in values.items():
            values[name] = function(value)
        return values
    return tuple(map(function, values)) if isinstance(values, tuple) else function(values)
