"""Gradient checkpointing that does not compute softmax attention again."""

from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ..errors import input_error
from .autograd import detached
from .offload import HostCheckpoints


def keeping_attention(host: HostCheckpoints | None = None, unasked: bool = False) -> tuple[Any, Any]:
    """A `context_fn` of `torch.utils.checkpoint.checkpoint`: the backward does not compute softmax attention again.

    For a layer it keeps the outputs of the kernel, `[T, H, D]` in the compute dtype and `[T, H]` in float32. Kernels with
    dropout are computed again, and so are those that write into arguments or are no operators of torch, such as those for
    shared prompts on GPUs.

    Args:
        host ([`HostCheckpoints`], *optional*):
            Keeps large outputs in host memory.
        unasked (`bool`, *optional*, defaults to `False`):
            Whether a kernel is computed again if its output would stay on the GPU, or if somebody writes into it.
    """
    if host is None or torch.compiler.is_compiling():
        return create_selective_checkpoint_contexts(_keep)
    kept: list[Any] = []
    return _Keeping(kept, host, unasked), _Using(kept, host)


class _Keeping(TorchDispatchMode):
    """Notes attention kernels and their outputs, or `None` for those that are computed again."""

    def __init__(self, kept: list[Any], host: HostCheckpoints, unasked: bool):
        super().__init__()
        self.kept, self.host, self.unasked = kept, host, unasked

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        found = operator(*args, **(kwargs or {}))
        if _is_kept(operator, args, kwargs or {}):
            self.kept.append((operator, self.save(found)))
        return found

    def save(self, found: Any) -> Any:
        """Save the outputs of a kernel, or none if the largest one has to go to the host and does not."""
        # Autograd makes these tensors the outputs of a node, which would keep itself.
        outputs = tree_map_only(torch.Tensor, detached, found)
        largest = max((x for x in tree_leaves(outputs) if isinstance(x, torch.Tensor)), key=lambda x: x.nbytes)
        first = self.host.save(largest, inside=True, unasked=self.unasked)
        on_host = self.host.has(first)
        if self.unasked and not on_host:
            return None
        beside = partial(self.host.save, inside=True, beside=on_host, unasked=self.unasked)
        return tree_map_only(torch.Tensor, lambda x: first if x is largest else beside(x), outputs)


class _Using(TorchDispatchMode):
    """Returns what was kept, in the same order, each time that a layer is computed again."""

    def __init__(self, kept: list[Any], host: HostCheckpoints):
        super().__init__()
        self.kept, self.host = kept, host

    def __enter__(self):
        self.left = iter(self.kept)
        return super().__enter__()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        saved = None
        if _is_kept(operator, args, kwargs or {}):
            before, saved = next(self.left, ("none", None))
            if before is not operator:
                expected = f"the kernel of the forward where keep_attention computes a layer again, {before}"
                fix = "Run the backward under the same torch.nn.attention.sdpa_kernel, or set keep_attention=False."
                raise input_error(expected, operator, fix)
        if saved is None or any(map(self.host.is_changed, tree_leaves(saved))):
            return operator(*args, **(kwargs or {}))
        return tree_map_only(torch.Tensor, detached, tree_map(self.host.load, saved))


def _keep(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_kept(operator, args, kwargs) else CheckpointPolicy.PREFER_RECOMPUTE


def _is_kept(operator: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    # Such as `aten._scaled_dot_product_cudnn_attention.default` and `torch_attn._varlen_attn.default`.
    name = str(operator)
    # Operators of higher order, such as `flex_attention`, have no schema.
    schema = getattr(operator, "_schema", None)
    if schema is None or not ("attn" in name or "attention" in name):
        return False
    given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    # What a kernel writes into its arguments is no output that can be kept.
    writes = [x.name for x in schema.arguments if x.alias_info is not None and x.alias_info.is_write]
    # A kernel that draws random numbers has to draw them again, or the dropout behind it would draw others.
    drops = [argument for argument in given if "dropout" in argument and given[argument]]
    return not drops and all(given.get(name) is None for name in writes)
