"""The memory of a computation on a CPU."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Memory(TorchDispatchMode):
    """The most bytes of the tensors that operators have made, at a time."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.known = weakref.WeakSet()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        result = operator(*args, **(kwargs or {}))
        for x in result if isinstance(result, tuple | list) else (result,):
            if isinstance(x, torch.Tensor) and x.untyped_storage() not in self.known:
                storage = x.untyped_storage()
                self.known.add(storage)
                self.add(storage.nbytes())
                weakref.finalize(storage, self.add, -storage.nbytes())
        return result

    def add(self, size: int) -> None:
        self.now += size
        self.peak = max(self.peak, self.now)
