"""The processes that share a row, and the methods by which they compute its layers."""

from typing import get_args

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ..errors import input_error
from ..parallel_methods import AttentionMethod, DeltaRuleMethod, is_size


class SequenceParallel:
    """A group of `size` neighboring processes that compute one packed row, each a contiguous part of its tokens.

    The object creates its own device mesh `("dp", "sp")`. Shards ([`RowShard`]) pass the object to the layers, so
    there is no global state. A whole row is computed as without sequence parallelism.

    Args:
        size (`int`):
            Processes per row, `P`. It must divide the number of processes.
        gated_delta_rule (`str`, *optional*, defaults to `"state"`):
            With `"state"`, each process sends the float32 state of a document that continues on the next process. This
            works with any number of heads. With `"heads"`, processes exchange tokens for heads, so that each computes
            all tokens of its heads.
        attention (`str`, *optional*):
            With `"heads"`, processes exchange tokens for heads, and repeat key and value heads if there are fewer than
            processes. With `"gather"`, each process computes its own queries with all keys and values. The default
            depends on the model's heads. It is `"gather"` if that exchanges no more than `"heads"`, FlashAttention or
            `varlen_attn` supports the call, and the row is not cut into long pieces. Long pieces would leave most of
            the work to the process after the cut.
        device_type (`str`, *optional*):
            `"cpu"` or `"cuda"`. Defaults to the device type of the default process group's backend.

    Raises:
        `ValueError`: there is no process group, `size` does not divide the number of processes, or a method is
            unknown.
    """

    def __init__(
        self,
        size: int,
        *,
        gated_delta_rule: DeltaRuleMethod = "state",
        attention: AttentionMethod | None = None,
        device_type: str | None = None,
    ):
        check_names(gated_delta_rule, attention)
        world = check_size(size)
        if device_type is None:
            device_type = "cuda" if "nccl" in dist.get_backend() else "cpu"
        self.mesh = init_device_mesh(device_type, (world // size, size), mesh_dim_names=("dp", "sp"))
        self.size = size
        self.group = self.mesh["sp"].get_group()
        self.rank = self.mesh["sp"].get_local_rank()
        self.data_parallel_size = world // size
        self.data_parallel_rank = self.mesh["dp"].get_local_rank()
        self.gated_delta_rule = gated_delta_rule
        self.attention = attention


def destroy_groups(parallel: SequenceParallel) -> None:
    """Destroy the process groups of an object that is no longer used, but not the default group."""
    for name in ("dp", "sp"):
        # A mesh takes the default group where that has the same processes.
        if (group := parallel.mesh[name].get_group()) is not dist.group.WORLD:
            dist.destroy_process_group(group)


def check_size(size: int) -> int:
    """Return the number of processes. Raise a `ValueError` if there is no process group, or if `size` does not divide it."""
    if not dist.is_initialized():
        fix = "Start the processes with `accelerate launch` or `torchrun`, and build the Trainer first."
        raise input_error("a default process group", "none", fix)
    world = dist.get_world_size()
    if not is_size(size) or world % size:
        raise input_error(f"a size that divides the {world} processes", repr(size))
    return world


def attention_method(size: int, heads: int, kv_heads: int, wanted: str | None, gather_is_even: bool) -> str:
    """Return how `size` processes share an attention layer: `wanted`, or the default of [`SequenceParallel`].

    `gather_is_even` is whether `"gather"` would balance the work of the processes.
    """
    if wanted is not None:
        return wanted
    if not fits_heads(size, heads, kv_heads):
        return "gather"
    # Per token, "gather" receives the others' keys and values. "heads" exchanges a share of query, key, value and
    # output.
    gather_is_less = size * kv_heads <= heads + max(kv_heads, size)
    return "gather" if gather_is_less and gather_is_even else "heads"


def fits_heads(size: int, heads: int, kv_heads: int) -> bool:
    """Whether `size` processes can split the heads of an attention layer."""
    return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)


def check_methods(
    size: int, gated_delta_rule: str, attention: str | None, heads: tuple[int, int], linear_heads: tuple[int, int]
) -> None:
    """Raise a `ValueError` if `size` processes cannot compute a model by these methods.

    `heads` are those of queries and keys in attention, `linear_heads` those of keys and values in the gated delta rule.
    """
    check_names(gated_delta_rule, attention)
    if gated_delta_rule == "heads":
        check_linear_heads(size, *linear_heads)
    if attention == "heads":
        check_heads(size, *heads)


def check_heads(size: int, heads: int, kv_heads: int) -> None:
    """Raise a `ValueError` if `size` processes cannot split the heads of an attention layer."""
    if not fits_heads(size, heads, kv_heads):
        expected = (
            f"attention heads divisible by {size}, and key and value heads that divide {size} or are divisible by it"
        )
        raise input_error(expected, f"{heads} and {kv_heads}", 'Use attention="gather".')


def check_linear_heads(size: int, key_heads: int, value_heads: int) -> None:
    """Raise a `ValueError` if `size` processes cannot split the heads of a delta rule."""
    if key_heads % size or value_heads % size:
        expected = f'numbers of linear key and value heads that are multiples of {size} for "heads"'
        raise input_error(expected, f"{key_heads} and {value_heads}", 'Use gated_delta_rule="state".')


def check_names(gated_delta_rule: str, attention: str | None) -> None:
    """Raise a `ValueError` if a method is unknown."""
    known = {"gated_delta_rule": get_args(DeltaRuleMethod), "attention": (None, *get_args(AttentionMethod))}
    for name, value in {"gated_delta_rule": gated_delta_rule, "attention": attention}.items():
        if value not in known[name]:
            raise input_error(f"{name} of {known[name]}", repr(value))
