"""Causal softmax attention of a packed row, by the attention implementation in the model's config.

Without boundaries, the call goes to Transformers' attention interface unchanged. With boundaries:

* `sdpa` runs cuDNN on long documents on a Hopper GPU (`dense_attention.py`), and on all others
  `torch.nn.attention.varlen.varlen_attn` if that supports the call (half precision on a GPU). Otherwise it runs on each
  document separately through [`per_document`], like `eager`. No mask over the whole row is built.
* FlashAttention (any version, from a package or from the Hub) takes the cumulative lengths.
* `flex_attention` takes a block mask that is built from the boundaries without evaluating pairs of tokens.
* Other implementations would attend across documents and raise a `ValueError`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available
from transformers.utils.generic import is_flash_attention_requested
from transformers.utils.import_utils import is_flash_attn_4_available

from ..boundaries import SequenceBoundaries
from ..errors import input_error
from ..foreign import attention_of
from . import earlier_keys
from .autograd import compute_dtype
from .dense_attention import dense_attention
from .dense_attention import verify as verify_dense_attention
from .dispatch import Call, Implementation, Setting, ran, run
from .earlier_keys import Pair
from .per_document import per_document


# Tokens per side of a block in the mask of flex attention.
_BLOCK = 128
# Tokens of a document that is long for every kernel.
_LONG = 65536


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
    """Compute causal attention as Transformers' attention interface does, per document if `boundaries` are passed.

    Args:
        module (`torch.nn.Module`):
            Attention layer. Its `config._attn_implementation` names the implementation.
        query (`torch.Tensor` of shape `[B, H, T, D]`):
            Queries after the rotary embedding.
        key (`torch.Tensor` of shape `[B, HKV, S, D]`):
            Keys after the rotary embedding. `H / HKV` query heads share one key head.
        value (`torch.Tensor` of shape `[B, HKV, S, DV]`):
            Values. They may be smaller than keys, as in multi-head latent attention.
        attention_mask (`torch.Tensor`, *optional*):
            Mask from Transformers' mask functions. `None` for packed rows.
        eager (`Callable`):
            Eager attention function of the modeling file.
        scaling (`float`):
            Scaling factor of the dot products.
        dropout (`float`, *optional*, defaults to 0.0):
            Dropout probability of the attention weights.
        boundaries ([`SequenceBoundaries`], *optional*):
            Documents of a packed row (`B` = 1, `S` = `T`).
        impl (`str`, *optional*, defaults to `"auto"`):
            Function that runs the configured implementation on packed rows: `"auto"`, or for `sdpa` `"cudnn"`,
            `"varlen_attn"` or `"per_document(sdpa)"`. The other implementations have one function each.

    Returns:
        `tuple`: the output `[B, T, H, DV]` and the attention weights. Without boundaries, the weights are those of
            Transformers' interface. For a packed row, they are block-diagonal `[1, H, T, T]` with
            `output_attentions=True` (eager only), otherwise `None`.

    Raises:
        `ValueError`: boundaries are passed with an implementation that does not isolate documents, or to attention
            that is not causal.
    """
    name = implementation_of(module)
    options: dict[str, Any] = {"dropout": dropout, "scaling": scaling}
    if boundaries is None:
        interface = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
        return interface(module, query, key, value, attention_mask, **options, **kwargs)
    if kwargs.get("output_attentions"):
        boundaries.check_kind("attention with output_attentions")
    options |= {"boundaries": boundaries, "eager": eager, **kwargs}
    return run("attention", impl, implementations(module), module, query, key, value, **options)


def options_of_layer(module: Any, eager: Callable, kwargs: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Return the options of [`attention`] of a layer that got these keyword arguments, for rows of `length` tokens."""
    dropout = float(getattr(module, "attention_dropout", None) or 0) if module.training else 0.0
    options = {"eager": eager, "scaling": module.scaling, "dropout": dropout, **kwargs}
    return options | {"boundaries": SequenceBoundaries.from_kwargs(kwargs, length)}


def implementation_of(module: torch.nn.Module) -> str:
    """Return the name of the attention implementation that a layer's configuration selects."""
    config: Any = module.config
    return attention_of(config)


def implementations(module: torch.nn.Module) -> dict[str, Implementation]:
    """Return the functions that compute this layer's attention on a packed row, or raise a `ValueError`."""
    name = implementation_of(module)
    # Every version of FlashAttention has the same interface.
    flash = is_flash_attention_requested(requested_attention_implementation=name)
    table = {name: Implementation(_flash_attention)} if flash else IMPLEMENTATIONS.get(name)
    if table is None:
        known = f"{', '.join(IMPLEMENTATIONS)} or flash_attention_*"
        fix = 'Load the model with attn_implementation="sdpa".'
        raise input_error(f"an attention implementation that keeps packed documents apart: {known}", f'"{name}"', fix)
    if not getattr(module, "is_causal", True):
        raise input_error("a causal attention layer for a packed row", "is_causal=False", "Use a padded batch.")
    return table


def serves_packed_rows(name: str, device: torch.device) -> bool:
    """Whether the attention implementation `name` can isolate documents on `device`."""
    if name == "flex_attention":
        return device.type == "cuda"
    return name in IMPLEMENTATIONS or is_flash_attention_requested(requested_attention_implementation=name)


def attention_with_earlier_keys(
    module, query, key, value, *, boundaries: SequenceBoundaries, keys: SequenceBoundaries, **options
) -> torch.Tensor | None:
    """Compute attention `[B, T, H, D]` of the last tokens of each document, whose `keys` include earlier tokens.

    Return `None` if neither FlashAttention nor `varlen_attn` supports the call.
    """
    kernel = kernel_for_earlier_keys(module, query, **options)
    if kernel is None:
        return None
    ran("attention", kernel)
    function = _varlen_attn if kernel == "varlen_attn" else _flash_attention
    return function(module, query, key, value, boundaries=boundaries, keys=keys, **options)[0]


def attention_after_pieces(
    module, query, key, value, earlier: Sequence[Pair], *, impl: str, scaling: float, dropout: float = 0.0, **options
) -> torch.Tensor | None:
    """Compute [`earlier_keys.attention_after_pieces`], or return `None` if that does not support the call or is slower."""
    if implementation_of(module) != "sdpa" or impl not in ("auto", "cudnn"):
        return None
    if earlier_keys.why_not(query, key, value, earlier, dropout):
        return None
    ran("attention", "cudnn after pieces")
    return earlier_keys.attention_after_pieces(query, key, value, earlier, scaling)


def attention_of_last_queries(module, query, key, value, *, eager, scaling, dropout=0.0, **kwargs) -> torch.Tensor:
    """Compute attention `[1, T, H, D]` of the last `T` queries of one document with all of its keys up to them."""
    interface = ALL_ATTENTION_FUNCTIONS.get_interface(implementation_of(module), eager)
    mask = causal_mask(query, key)
    return interface(module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=False)[0]


def kernel_for_earlier_keys(module, query: torch.Tensor, **options) -> str | None:
    """Return the kernel that [`attention_with_earlier_keys`] would use, or `None`."""
    name = implementation_of(module)
    if is_flash_attention_requested(requested_attention_implementation=name):
        return name
    if name == "sdpa" and not _verify_varlen_attn(module, query, **options):
        return "varlen_attn"
    return None


def _flash_attention(module, query, key, value, *, boundaries, eager, keys=None, **kwargs):
    interface = ALL_ATTENTION_FUNCTIONS.get_interface(implementation_of(module), eager)
    kwargs |= boundaries.kernel_kwargs()
    if keys is not None:
        kwargs |= {"cu_seq_lens_k": keys.cu_seqlens, "max_length_k": keys.max_length}
    return interface(module, query, key, value, None, **kwargs)


def _varlen_attn(module, query, key, value, *, boundaries, scaling, keys=None, **kwargs):
    from torch.nn.attention.varlen import varlen_attn

    # The kernel takes values of the size of the keys.
    size = value.shape[-1]
    value = torch.nn.functional.pad(value, (0, query.shape[-1] - size))
    # Autocast supports SDPA, but not `varlen_attn`.
    tokens_first = (x.transpose(1, 2)[0].to(compute_dtype(query)) for x in (query, key, value))
    keys = boundaries if keys is None else keys
    lengths = (boundaries.cu_seqlens, keys.cu_seqlens, boundaries.max_length, keys.max_length)
    # A window without a right side is causal attention.
    output = varlen_attn(*tokens_first, *lengths, scale=scaling, window_size=(-1, 0), **_grouped())[None]
    return output[..., :size], None


@lru_cache
def _grouped() -> dict[str, bool]:
    """Return the flag for grouped queries. Up to torch 2.11, they need none."""
    from torch.nn.attention.varlen import varlen_attn

    return {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


def _verify_varlen_attn(module, query, key=None, value=None, dropout=0.0, **options):
    if not query.is_cuda or torch.version.hip or torch.cuda.get_device_capability(query.device) < (8, 0):
        return "needs tensors on an NVIDIA GPU of compute capability 8.0 or later"
    if compute_dtype(query) not in (torch.float16, torch.bfloat16):
        return f"needs float16 or bfloat16, not {query.dtype}"
    if query.shape[-1] > 256 or query.shape[-1] % 8:
        return f"needs a head dimension of at most 256 and a multiple of 8, not {query.shape[-1]}"
    if value is not None and value.shape[-1] > query.shape[-1]:
        return f"needs values of at most the size of the keys, {query.shape[-1]}, not {value.shape[-1]}"
    return "does not support dropout" if dropout else ""


def _flex_attention(module, query, key, value, *, boundaries, eager, **kwargs):
    interface = ALL_ATTENTION_FUNCTIONS.get_interface("flex_attention", eager)
    mask = boundaries.derived("flex_attention", lambda: _block_mask(boundaries))
    return interface(module, query, key, value, mask, **kwargs)[0], None


def _verify_flex_attention(module, query, *_, **__):
    return "" if query.is_cuda else "needs CUDA tensors, because it has no backward on a CPU"


def _block_mask(boundaries: SequenceBoundaries) -> BlockMask:
    """Compute the blocks of keys that each block of queries attends to, from the host copy of the boundaries.

    Let `d` be the document of the first query in a block. The block attends to the key blocks from the one where `d`
    starts up to itself. A key block in between needs no mask if all its keys and all queries belong to `d`.
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

    def moved(x: torch.Tensor) -> torch.Tensor:
        return x.int()[None, None].to(device, non_blocking=True)

    def listed(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the number of chosen blocks in each row, and the columns in order with the chosen ones first."""
        columns = chosen.int().argsort(dim=1, descending=True, stable=True)
        return moved(chosen.sum(1)), moved(columns)

    seq_idx = boundaries.seq_idx[0]

    def same_document_and_not_later(batch, head, query, key):
        return (seq_idx[query] == seq_idx[key]) & (query >= key)

    options: dict[str, Any] = {
        "BLOCK_SIZE": _BLOCK,
        "mask_mod": same_document_and_not_later,
        "seq_lengths": (length, length),
    }
    return BlockMask.from_kv_blocks(*listed(seen & ~full), *listed(full), **options)


def _per_document(module, query, key, value, *, boundaries, eager, scaling, dropout, **kwargs):
    name = implementation_of(module)
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
    """Run one document at a time to write its block of the attention weights."""
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
    """Return the additive mask `[1, 1, T, S]` for eager attention of the last `T` queries over `S` keys."""
    shape = query.shape[2], key.shape[2]
    mask = torch.full(shape, torch.finfo(query.dtype).min, dtype=query.dtype, device=query.device)
    return mask.triu(1 + shape[1] - shape[0])[None, None]


# The functions that run each attention implementation of Transformers on a packed row.
IMPLEMENTATIONS = {
    "sdpa": {
        "cudnn": Implementation(
            partial(dense_attention, varlen=_varlen_attn),
            verify_dense_attention,
            "other documents decide what it computes",
        ),
        "varlen_attn": Implementation(_varlen_attn, _verify_varlen_attn),
        "per_document(sdpa)": Implementation(_per_document),
    },
    "eager": {"per_document(eager)": Implementation(_per_document)},
    "flex_attention": {
        "flex_attention": Implementation(
            _flex_attention, _verify_flex_attention, "its blocks of keys do not begin with documents"
        )
    },
}


def example(setting: Setting) -> dict[str, Call]:
    """The call of a layer with each implementation of Transformers, for [`availability`]."""
    heads, found = setting.zeros(1, 2, 3, setting.head_dim), {}
    for name, table in IMPLEMENTATIONS.items():
        module = SimpleNamespace(config=SimpleNamespace(_attn_implementation=name))
        call = module, heads, heads, heads
        if name == "sdpa":
            long = {"boundaries": SequenceBoundaries.from_lengths([_LONG], device=setting.device)}
            found["attention sdpa of long documents"] = Call(table, call, long)
            # Short documents have another kernel.
            table = {name: implementation for name, implementation in table.items() if name != "cudnn"}
        found[f"attention {name}"] = Call(table, call, setting.row())
    # Transformers checks these when it loads a model. The op itself has no check.
    for name, is_available in _FLASH_ATTENTION.items():
        verify = partial(_verify_flash_attention, is_available)
        found[f"attention {name}"] = Call({"its own kernel": Implementation(_flash_attention, verify)}, (heads,))
    return found


def _verify_flash_attention(is_available, query):
    if not query.is_cuda or query.dtype == torch.float32:
        return "needs CUDA tensors in float16 or bfloat16"
    return "" if is_available() else "is not installed"


_FLASH_ATTENTION = {
    "flash_attention_2": is_flash_attn_2_available,
    "flash_attention_3": is_flash_attn_3_available,
    "flash_attention_4": is_flash_attn_4_available,
}
