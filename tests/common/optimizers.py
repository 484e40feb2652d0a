"""The bytes of an optimizer's states, and a stand-in for flashoptim where it is not installed or there is no GPU."""

from types import ModuleType

import torch


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """The bytes of all states of weights. Tables that weights share, and counters, do not count."""
    states = [x for state in optimizer.state.values() for name, x in state.items() if not name.startswith("qmap")]
    return sum(map(_bytes, states))


def _bytes(x) -> int:
    if hasattr(x, "__tensor_flatten__") and type(x) not in (torch.Tensor, torch.nn.Parameter):
        # Of torchao, with a table for the values of 8 or 4 bits.
        return sum(_bytes(getattr(x, name)) for name in x.__tensor_flatten__()[0] if name != "qmap")
    if isinstance(x, torch.Tensor):
        return x.nbytes if x.ndim else 0
    # Of flashoptim.
    return x.quantized.nbytes + x.scales.nbytes if hasattr(x, "quantized") else 0


class FlashAdamW(torch.optim.AdamW):
    """Steps one weight like flashoptim's."""

    released = False

    def step_param(self, parameter: torch.Tensor) -> None:
        before = {x: x.grad for group in self.param_groups for x in group["params"] if x is not parameter}
        for x in before:
            x.grad = None
        super().step()
        for x, gradient in before.items():
            x.grad = gradient

    def step(self, closure=None):
        return None if self.released else super().step(closure)


class Handle:
    def __init__(self, hooks: list, optimizer: FlashAdamW):
        self.hooks, self.optimizer = hooks, optimizer

    def remove(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.optimizer.released = False


def enable_gradient_release(model: torch.nn.Module, optimizer: FlashAdamW) -> Handle:
    """As flashoptim 0.1.4 does it."""

    def hook(parameter: torch.Tensor) -> None:
        optimizer.step_param(parameter)
        parameter.grad = None

    optimizer.released = True
    return Handle(
        [x.register_post_accumulate_grad_hook(hook) for x in model.parameters() if x.requires_grad], optimizer
    )


def flashoptim() -> ModuleType:
    """The stand-in, for `sys.modules`."""
    module = ModuleType("flashoptim")
    module.FlashAdamW, module.enable_gradient_release = FlashAdamW, enable_gradient_release
    return module
