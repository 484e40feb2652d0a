"""Which processes share a row, and how its layers compute it together."""

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ..errors import input_error


GATED_DELTA_RULES = ("state", "heads")
ATTENTIONS = ("heads", "gather")


class SequenceParallel:
    """`size` neighbouring processes compute one packed row, each of them a contiguous part of its tokens.

    The object creates its own device mesh `("dp", "sp")`. Shards carry it to the layers ([`RowShard`]), so there is no
    global state, and a model that is given a whole row computes it as before.

    Args:
        size (`int`):
            Processes per row, `P`. The number of processes is a multiple of it.
        gated_delta_rule (`str`, *optional*, defaults to `"state"`):
            `"state"`: each process hands the state of a document that goes on to the next one, in float32, whatever the
            number of heads. `"heads"`: processes exchange tokens for heads, so each computes all tokens of its heads.
        attention (`str`, *optional*):
            `"heads"` as above, with key and value heads repeated where there are fewer than processes; `"gather"`:
            each process has all keys and values and its own queries. By default what fits the model's heads: `"gather"`
            where it exchanges no more than `"heads"`, FlashAttention or `varlen_attn` serves, and the row is not cut in
            long pieces, which would leave most of the work to the process behind the cut.
        device_type (`str`, *optional*):
            `"cpu"` or `"cuda"`; by default what the default process group's backend is for.

    Raises:
        `ValueError`: no process group, a number of processes that is no multiple of `size`, or an unknown method.
    """

    def __init__(
        self,
        size: int,
        *,
        gated_delta_rule: str = "state",
        attention: str | None = None,
        device_type: str | None = None,
    ):
        _check_names(gated_delta_rule, attention)
        if not dist.is_initialized():
            fix = "Start the processes with `accelerate launch` or `torchrun`, and build the Trainer first."
            raise input_error("a default process group", "none", fix)
        world = dist.get_world_size()
        if not isinstance(size, int) or size < 1 or world % size:
            raise input_error(f"a size that divides the {world} processes", size)
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

    def check_config(self, config) -> None:
        """Raise a `ValueError` if a model of this configuration cannot be computed with these methods."""
        check_methods(config.get_text_config(), self.size, self.gated_delta_rule, self.attention)


def attention_method(size: int, heads: int, kv_heads: int, wanted: str | None, gather_is_even: bool) -> str:
    """How `size` processes share an attention layer: as `wanted`, or as [`SequenceParallel`] says.

    `gather_is_even`: whether by `"gather"` all of them would have about as much to do.
    """
    if wanted is not None:
        return wanted
    if not fits_heads(size, heads, kv_heads):
        return "gather"
    # Of each token the others' keys and values, or a share of its own with query and output.
    gather_is_less = size * kv_heads <= heads + max(kv_heads, size)
    return "gather" if gather_is_less and gather_is_even else "heads"


def fits_heads(size: int, heads: int, kv_heads: int) -> bool:
    """Whether `size` processes can share an attention layer's heads."""
    return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)


def check_methods(config, size: int, gated_delta_rule: str, attention: str | None) -> None:
    """Raise a `ValueError` if `size` processes cannot compute a text model of this configuration in this way."""
    _check_names(gated_delta_rule, attention)
    unknown = set(getattr(config, "layer_types", None) or ["?"]) - {"linear_attention", "full_attention"}
    if unknown or not hasattr(config, "linear_num_key_heads"):
        expected = "a model of gated delta rule and full attention layers (Qwen3-Next, Qwen3.5, Qwen3.5-MoE)"
        raise input_error(expected, config.model_type, "Train this model without sequence parallelism.")
    heads, kv_heads = config.linear_num_key_heads, config.linear_num_value_heads
    if gated_delta_rule == "heads" and (heads % size or kv_heads % size):
        expected = f'numbers of linear key and value heads that are multiples of {size} for "heads"'
        raise input_error(expected, f"{heads} and {kv_heads}", 'Use gated_delta_rule="state".')
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if attention == "heads" and not fits_heads(size, heads, kv_heads):
        expected = (
            f"{size} processes to divide the attention heads, and the key and value heads or be a multiple of these"
        )
        raise input_error(expected, f"{heads} and {kv_heads}", 'Use attention="gather".')


def _check_names(gated_delta_rule: str, attention: str | None) -> None:
    known = {"gated_delta_rule": GATED_DELTA_RULES, "attention": (None, *ATTENTIONS)}
    for name, value in {"gated_delta_rule": gated_delta_rule, "attention": attention}.items():
        if value not in known[name]:
            raise input_error(f"{name} of {known[name]}", repr(value))
