"""Causal softmax attention of a packed row, through the attention implementation that the model's config names.

Without boundaries the call goes to Transformers' own interface, unchanged. With boundaries:

* `sdpa` runs as `torch.nn.attention.varlen.varlen_attn` where that can serve (half precision on a GPU), else like `eager`
  on each document alone through [`per_document`]; no mask over the whole row exists.
* FlashAttention (any version, from a package or from the Hub) takes the cumulative lengths itself.
* `flex_attention` gets a block mask that is made from the boundaries without looking at pairs of tokens.
* Anything else would attend across documents, so it is refused.
"""

from collections.abc import Callable
from inspect import signature

import torch
from torch.nn.attention.flex_attention import BlockMask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import is_flash_attention_requested

from ..boundaries import SequenceBoundaries
from ..errors import input_error
from .dispatch import Implementation, always, logger, record, run
from .per_document import per_document


# Tokens along the side of a block of flex attention's mask.
_BLOCK = 128


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    eager: Callable,
    scaling: float,
    dropout: float = 0.0,
    boundaries: SequenceBoundaries | None = None,
    impl: str = "auto",
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Causal attention as Transformers' attention interface has it, isolated by document when there are boundaries.

    Args:
        module (`torch.nn.Module`):
            The attention layer; its `config._attn_implementation` names the implementation.
        query (`torch.Tensor` of shape `[B, H, T, D]`):
            Queries, after rotary embedding.
        key, value (`torch.Tensor` of shape `[B, HKV, S, D]`):
            Keys and values; each serves `H / HKV` query heads.
        attention_mask (`torch.Tensor`, *optional*):
            What Transformers' mask functions made. `None` for packed rows.
        eager (`Callable`):
            The modeling file's eager attention function.
        scaling (`float`):
            Factor of the dot products.
        dropout (`float`, *optional*, defaults to 0.0):
            Dropout probability of the attention weights.
        boundaries ([`SequenceBoundaries`], *optional*):
            The documents of a packed row (`B` = 1, `S` = `T`).
        impl (`str`, *optional*, defaults to `"auto"`):
            For packed rows, what carries out the implementation that the config names: `"auto"`, or for `sdpa`
            `"varlen_attn"` or `"per_document(sdpa)"`. The others have one way each.

    Returns:
        `tuple`: the output `[B, T, H, D]`, and the weights: what the interface returns without boundaries; for a
        packed row block-diagonal `[1, H, T, T]` when `output_attentions` asks for them (eager only), else `None`.

    Raises:
        `ValueError`: boundaries with an implementation that cannot keep documents apart, or with attention that is
        not causal.
    """
    name = module.config._attn_implementation
    options = {"dropout": dropout, "scaling": scaling}
    if boundaries is None:
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
        return interface(module, query, key, value, attention_mask, **options, **kwargs)
    options |= {"boundaries": boundaries, "eager": eager, **kwargs}
    return run("attention", impl, implementations(module), module, query, key, value, **options)


def implementations(module: torch.nn.Module) -> dict[str, Implementation]:
    """What can carry out the attention of this layer on a packed row. Nothing is a `ValueError`."""
    name = module.config._attn_implementation
    # Every version of FlashAttention has the same interface.
    flash = is_flash_attention_requested(requested_attention_implementation=name)
    table = {name: Implementation(_flash_attention, always)} if flash else IMPLEMENTATIONS.get(name)
    if table is None:
        known = f"{', '.join(IMPLEMENTATIONS)} or flash_attention_*"
        fix = 'Load the model with attn_implementation="sdpa".'
        raise input_error(f"an attention implementation that keeps packed documents apart: {known}", f'"{name}"', fix)
    if not getattr(module, "is_causal", True):
        raise input_error("a causal attention layer for a packed row", "is_causal=False", "Use a padded batch.")
    return table


def serves_packed_rows(name: str, device: torch.device) -> bool:
    """Whether the attention implementation `name` can keep documents apart on `device`."""
    if name == "flex_attention":
        return device.type == "cuda"
    return name in IMPLEMENTATIONS or is_flash_attention_requested(requested_attention_implementation=name)


def attention_with_earlier_keys(
    module, query, key, value, *, boundaries: SequenceBoundaries, keys: SequenceBoundaries, **options
) -> torch.Tensor | None:
    """Attention where documents may have more `keys` than queries, which are their last: `[B, T, H, D]`.

    `None` where neither FlashAttention nor `varlen_attn` can serve.
    """
    kernel = kernel_for_earlier_keys(module, query, **options)
    if kernel is None:
        return None
    record("attention", kernel, [], logger.info)
    function = _varlen_attn if kernel == "varlen_attn" else _flash_attention
    return function(module, query, key, value, boundaries=boundaries, keys=keys, **options)[0]


def kernel_for_earlier_keys(module, query: torch.Tensor, **options) -> str | None:
    """The kernel by which [`attention_with_earlier_keys`] would serve, if there is one."""
    name = module.config._attn_implementation
    if is_flash_attention_requested(requested_attention_implementation=name):
        return name
    if name == "sdpa" and _verify_varlen_attn(module, query, **options)[0]:
        return "varlen_attn"
    return None


def _flash_attention(module, query, key, value, *, boundaries, eager, keys=None, **kwargs):
    interface = ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, eager)
    kwargs |= boundaries.layer_kwargs()
    if keys is not None:
        kwargs |= {"cu_seq_lens_k": keys.cu_seqlens, "max_length_k": keys.max_length}
    return interface(module, query, key, value, None, **kwargs)


def _varlen_attn(module, query, key, value, *, boundaries, scaling, keys=None, **kwargs):
    from torch.nn.attention.varlen import varlen_attn

    tokens_first = (x.transpose(1, 2)[0].to(_varlen_dtype(query)) for x in (query, key, value))
    keys = boundaries if keys is None else keys
    lengths = (boundaries.cu_seqlens, keys.cu_seqlens, boundaries.max_length, keys.max_length)
    # A window without a right side is causal attention. Up to torch 2.11 grouped queries need no permission.
    grouped = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
    return varlen_attn(*tokens_first, *lengths, scale=scaling, window_size=(-1, 0), **grouped)[None], None


def _varlen_dtype(query: torch.Tensor) -> torch.dtype:
    """What autocast would make of the inputs if it knew `varlen_attn`, as it knows SDPA."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else query.dtype


def _verify_varlen_attn(module, query, *others, dropout=0.0, **options):
    if not query.is_cuda or torch.version.hip or torch.cuda.get_device_capability(query.device) < (8, 0):
        return False, "needs tensors on an NVIDIA GPU of compute capability 8.0 or later"
    if _varlen_dtype(query) not in (torch.float16, torch.bfloat16):
        return False, f"needs float16 or bfloat16, not {query.dtype}"
    if query.shape[-1] > 256 or query.shape[-1] % 8:
        return False, f"needs a head dimension of at most 256 and a multiple of 8, not {query.shape[-1]}"
    return dropout == 0, "has no dropout"


def _flex_attention(module, query, key, value, *, boundaries, eager, **kwargs):
    interface = ALL_ATTENTION_FUNCTIONS.get_interface("flex_attention", eager)
    mask = boundaries.derived("flex_attention", lambda: _block_mask(boundaries))
    return interface(module, query, key, value, mask, **kwargs)[0], None


def _verify_flex_attention(module, query, *tensors, **options):
    return query.is_cuda, "needs CUDA tensors: on a CPU it has no backward"


def _block_mask(boundaries: SequenceBoundaries) -> BlockMask:
    """Which blocks of keys each block of queries sees, from the host copy of the boundaries.

    A block of queries begins in some document: it sees nothing before the block in which that document starts, and
    nothing after itself. A block between the two is seen in full when all its keys and all the queries belong to that
    one document.
    """
    device, length = boundaries.cu_seqlens.device, boundaries.total_length
    cu_seqlens = boundaries.cu_seqlens_cpu.long()
    blocks = torch.arange(-(-length // _BLOCK))
    first = blocks * _BLOCK
    document = torch.searchsorted(cu_seqlens, first, right=True) - 1
    start, end = cu_seqlens[document], cu_seqlens[document + 1]
    row, column = blocks[:, None], blocks[None, :]
    seen = (column >= (start // _BLOCK)[:, None]) & (column <= row)
    full = seen & (column < row) & (first[None, :] >= start[:, None]) & (first + _BLOCK <= end)[:, None]

    def listed(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The number of chosen blocks in each row, and the chosen ones' columns before the others'."""
        columns = chosen.int().argsort(dim=1, descending=True, stable=True)
        return tuple(x.int()[None, None].to(device, non_blocking=True) for x in (chosen.sum(1), columns))

    seq_idx = boundaries.seq_idx[0]

    def same_document_and_not_later(batch, head, query, key):
        return (seq_idx[query] == seq_idx[key]) & (query >= key)

    options = {"BLOCK_SIZE": _BLOCK, "mask_mod": same_document_and_not_later, "seq_lengths": (length, length)}
    return BlockMask.from_kv_blocks(*listed(seen & ~full), *listed(full), **options)


def _per_document(module, query, key, value, *, boundaries, eager, scaling, dropout, **kwargs):
    name = module.config._attn_implementation
    interface = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
    options = {"dropout": dropout, "scaling": scaling, "is_causal": True}
    if kwargs.get("output_attentions") and name == "eager":
        return _eager_with_weights(interface, module, query, key, value, boundaries, options)

    def attend(*rows: torch.Tensor) -> torch.Tensor:
        heads_first = [row.transpose(1, 2) for row in rows]
        mask = causal_mask(*heads_first[:2]) if name == "eager" else None
        return interface(module, *heads_first, mask, **options)[0]

    tokens_first = (x.transpose(1, 2) for x in (query, key, value))
    return per_document(attend, *tokens_first, boundaries=boundaries), None


def _eager_with_weights(interface, module, query, key, value, boundaries, options):
    """One document after the other, so that each block of the weights can be put in its place."""
    length = boundaries.total_length
    outputs, weights, start = [], query.new_zeros(1, query.shape[1], length, length), 0
    for size in boundaries.lengths:
        block = slice(start, start + size)
        rows = [x[:, :, block] for x in (query, key, value)]
        output, weights[:, :, block, block] = interface(module, *rows, causal_mask(*rows[:2]), **options)
        outputs.append(output)
        start += size
    return torch.cat(outputs, dim=1), weights


def causal_mask(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The additive mask `[1, 1, T, S]` that eager attention expects, of the last `T` queries over `S` keys."""
    shape = query.shape[2], key.shape[2]
    mask = torch.full(shape, torch.finfo(query.dtype).min, dtype=query.dtype, device=query.device)
    return mask.triu(1 + shape[1] - shape[0])[None, None]


# For each attention implementation of Transformers what can carry it out on a packed row.
IMPLEMENTATIONS = {
    "sdpa": {
        "varlen_attn": Implementation(_varlen_attn, _verify_varlen_attn),
        "per_document(sdpa)": Implementation(_per_document, always),
    },
    "eager": {"per_document(eager)": Implementation(_per_document, always)},
    "flex_attention": {"flex_attention": Implementation(_flex_attention, _verify_flex_attention)},
}
