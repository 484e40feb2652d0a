"""Causal softmax attention of a packed row, through the attention implementation that the model's config names.

Without boundaries the call goes to Transformers' own interface, unchanged. With boundaries:

* `sdpa` and `eager` run on each document alone through [`per_document`]; no mask over the whole row exists.
* FlashAttention (any version, from a package or from the Hub) takes the cumulative lengths itself.
* Anything else would attend across documents, so it is refused.
"""

from collections.abc import Callable

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.generic import is_flash_attention_requested

from ..boundaries import SequenceBoundaries
from ..errors import input_error
from .dispatch import record
from .per_document import per_document


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

    Returns:
        `tuple`: the output `[B, T, H, D]`, and the weights: what the interface returns without boundaries; for a
        packed row block-diagonal `[1, H, T, T]` when `output_attentions` asks for them (eager only), else `None`.

    Raises:
        `ValueError`: boundaries with an implementation that cannot keep documents apart.
    """
    name = module.config._attn_implementation
    interface = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
    options = {"dropout": dropout, "scaling": scaling}
    if boundaries is None:
        return interface(module, query, key, value, attention_mask, **options, **kwargs)
    if is_flash_attention_requested(requested_attention_implementation=name):
        record("attention", name)
        return interface(module, query, key, value, None, **options, **(kwargs | boundaries.layer_kwargs()))
    if name not in ("eager", "sdpa"):
        raise input_error(
            "attention",
            expected="an attention implementation that keeps packed documents apart: eager, sdpa or flash_attention_*",
            got=f'"{name}"',
            fix='Load the model with attn_implementation="sdpa".',
        )
    record("attention", f"per_document({name})")
    options["is_causal"] = True
    if kwargs.get("output_attentions") and name == "eager":
        return _eager_with_weights(interface, module, query, key, value, boundaries, options)

    def attend(*rows: torch.Tensor) -> torch.Tensor:
        heads_first = [row.transpose(1, 2) for row in rows]
        mask = _causal_mask(heads_first[0]) if name == "eager" else None
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
        output, weights[:, :, block, block] = interface(module, *rows, _causal_mask(rows[0]), **options)
        outputs.append(output)
        start += size
    return torch.cat(outputs, dim=1), weights


def _causal_mask(query: torch.Tensor) -> torch.Tensor:
    """The additive mask `[1, 1, T, T]` that eager attention expects."""
    length = query.shape[2]
    mask = torch.full((length, length), torch.finfo(query.dtype).min, dtype=query.dtype, device=query.device)
    return mask.triu(1)[None, None]
