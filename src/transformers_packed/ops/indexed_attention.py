"""Causal attention of a packed row in which each query attends to blocks of keys that an index has chosen.

An index has queries and keys of its own. The keys of `ratio` consecutive tokens of a document are one block. A query
attends to the `budget / ratio` complete blocks of the highest scores, and to the tokens after the last complete block.

The first `budget + ratio - 1` tokens of a document have no more complete blocks than that, so they attend to all tokens
before them. They run as usual attention, and the index computes nothing for them. The other queries of a document run in
chunks, each with a mask for the keys up to its last query. Only the numbers of the chosen blocks stay in memory: backward
makes the mask and the attention of a chunk again. Nothing is read on the host.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..boundaries import SequenceBoundaries
from ..errors import input_error
from ..shared_prompts import SharedPrompts
from .attention import attention, implementation_of
from .dispatch import form_of, outside_of_graphs, ran


# Queries per mask.
_QUERIES = 512


class Index(NamedTuple):
    """What chooses the keys of each query in a row `[1, T]`.

    Args:
        query (`torch.Tensor` of shape `[1, T, heads, dim]`):
            Queries of the index, after the rotary embedding.
        key (`torch.Tensor` of shape `[1, T, dim]`):
            Keys of the tokens, before pooling.
        cos (`torch.Tensor` of shape `[1, T, rotary_dim]`), sin (`torch.Tensor` of shape `[1, T, rotary_dim]`):
            The rotary embedding of the tokens.
        pool (`Callable`):
            Makes the keys of blocks `[N, dim]` from those of their tokens `[N, ratio, dim]`, and from `cos` and `sin`
            `[N, rotary_dim]` of their first tokens.
        ratio (`int`):
            Tokens of a block.
        budget (`int`):
            The most tokens of the chosen blocks of a query, a multiple of `ratio`.
    """

    query: torch.Tensor
    key: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    pool: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    ratio: int
    budget: int

    @property
    def limit(self) -> int:
        """The first tokens of a document, whose queries attend to all earlier tokens."""
        return self.budget + self.ratio - 1

    def of(self, queries: slice, keys: slice) -> "Index":
        """Return the index of some queries and of some keys."""
        key, cos, sin = (x[:, keys] for x in (self.key, self.cos, self.sin))
        return self._replace(query=self.query[:, queries], key=key, cos=cos, sin=sin)

    def blocks(self) -> torch.Tensor:
        """Return the keys `[N, dim]` of all complete blocks, if the row is one document."""
        count = self.key.shape[1] // self.ratio
        tokens = self.key[0, : count * self.ratio].unflatten(0, (count, self.ratio))
        cos, sin = (x[0, : count * self.ratio : self.ratio] for x in (self.cos, self.sin))
        return self.pool(tokens, cos, sin)


def needs_index(boundaries: SequenceBoundaries, budget: int, ratio: int) -> bool:
    """Whether the choice of blocks leaves out any key of a row's documents, each with its prompt."""
    keys = boundaries.layout.keys[0] if isinstance(boundaries, SharedPrompts) else boundaries
    return keys.max_length >= budget + ratio


def choose_blocks(query: torch.Tensor, blocks: torch.Tensor, complete: torch.Tensor, count: int) -> torch.Tensor:
    """Return the numbers of the complete blocks with the highest scores for each query.

    The score of a block is `sum_h relu(query_h . block) / sqrt(dim)`, computed in float32.

    Args:
        query (`torch.Tensor` of shape `[..., T, heads, dim]`):
            Queries of the index.
        blocks (`torch.Tensor` of shape `[..., N, dim]` or `[..., T, N, dim]`):
            Keys of blocks, for all queries or for each.
        complete (`torch.LongTensor` of shape `[..., T]`):
            How many of the first blocks are complete for each query. The others are chosen last.
        count (`int`):
            How many blocks to choose.

    Returns:
        `torch.LongTensor` of shape `[..., T, min(count, N)]`.
    """
    query, blocks = query.float(), blocks.float()
    if blocks.ndim < query.ndim:
        blocks = blocks.unsqueeze(-3)
    scores = torch.matmul(query, blocks.transpose(-1, -2)).relu().sum(-2) / math.sqrt(query.shape[-1])
    scores = scores.masked_fill(~_below(complete, scores.shape[-1]), -math.inf)
    return scores.topk(min(count, scores.shape[-1]), dim=-1).indices


def _below(numbers: torch.Tensor, size: int) -> torch.Tensor:
    """Return whether each of `range(size)` is below each number, `[..., size]`."""
    return torch.arange(size, device=numbers.device) < numbers.unsqueeze(-1)


def tokens_of_blocks(
    chosen: torch.Tensor, complete: torch.Tensor, visible: torch.Tensor, ratio: int, size: int
) -> torch.Tensor:
    """Return a mask `[..., T, size]` of the tokens in chosen blocks, and of those after the last complete block.

    Args:
        chosen (`torch.LongTensor` of shape `[..., T, K]`):
            Numbers of blocks, as [`choose_blocks`] returns them.
        complete (`torch.LongTensor` of shape `[..., T]`), visible (`torch.LongTensor` of shape `[..., T]`):
            How many blocks are complete and how many tokens are visible for each query: the first ones.
        ratio (`int`):
            Tokens of a block.
        size (`int`):
            Number of tokens.
    """
    blocks = _below(complete, size // ratio)
    blocks &= torch.zeros_like(blocks).scatter_(-1, chosen, True)
    tokens = F.pad(blocks.repeat_interleave(ratio, dim=-1), (0, size % ratio))
    return tokens | (_below(visible, size) & ~_below(complete * ratio, size))


def indexed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    index: Index,
    *,
    boundaries: SequenceBoundaries,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute causal attention of a packed row with the keys that an index chooses, per document.

    Args:
        module (`torch.nn.Module`):
            Attention layer. Its `config._attn_implementation` is `"sdpa"` or `"eager"`.
        query (`torch.Tensor` of shape `[1, H, T, D]`):
            Queries after the rotary embedding.
        key (`torch.Tensor` of shape `[1, HKV, T, D]`), value (`torch.Tensor` of shape `[1, HKV, T, D]`):
            Keys after the rotary embedding, and values.
        index ([`Index`]):
            What chooses the keys. No gradient reaches it.
        boundaries ([`SequenceBoundaries`]):
            Documents of the row.
        **options (`Any`):
            Other arguments of [`attention`].

    Returns:
        `tuple`: the output `[1, T, H, D]`, and the attention weights `[1, H, T, T]` with `output_attentions=True`
            (eager only), otherwise `None`.

    Raises:
        `ValueError`: the layer has another attention implementation.
    """
    name = implementation_of(module)
    if name not in ("sdpa", "eager"):
        fix = 'Load the model with attn_implementation="sdpa".'
        raise input_error('attention with an index as "sdpa" or "eager"', f'"{name}"', fix)
    if options.get("output_attentions"):
        boundaries.check_kind("attention with output_attentions")
    function = form_of("indexed_attention", boundaries) or _of_row
    if torch.compiler.is_compiling():
        return outside_of_graphs(function, module, query, key, value, index, boundaries=boundaries, **options)
    return function(module, query, key, value, index, boundaries=boundaries, **options)


def _of_row(module, query, key, value, index: Index, *, boundaries: SequenceBoundaries, **options):
    runs = boundaries.derived(f"runs of {index.limit}", lambda: _runs(boundaries, index.limit))
    length, outputs, found = boundaries.total_length, [], []
    for begin, heads, start, end in runs:
        split = begin + heads.total_length
        q, k, v = (x[:, :, begin:split] for x in (query, key, value))
        output, weights = attention(module, q, k, v, None, boundaries=heads, **options)
        outputs.append(output)
        found.append((begin, begin, weights))
        if split < end:
            rest, document = slice(split, end), slice(start, end)
            q, k, v = query[:, :, rest], key[:, :, document], value[:, :, document]
            for output, weights in attend_last(module, q, k, v, index.of(rest, document), **options):
                outputs.append(output)
                found.append((split, start, weights))
                split += output.shape[1]
    return torch.cat(outputs, dim=1), _assembled(found, length)


def _runs(boundaries: SequenceBoundaries, limit: int) -> list[tuple[int, SequenceBoundaries, int, int]]:
    """Cut a row after each document longer than `limit`.

    Of each run: its first token, the boundaries of its documents up to the first `limit` tokens of the last one, and the
    first and the last token of that one.
    """
    runs, heads, begin, start = [], [0], 0, 0
    for document, length in enumerate(boundaries.lengths):
        heads.append(heads[-1] + min(length, limit))
        if length > limit or document == boundaries.num_documents - 1:
            host, end = torch.tensor(heads, dtype=torch.int32), start + length
            run = SequenceBoundaries(host.to(boundaries.cu_seqlens.device, non_blocking=True), host)
            runs.append((begin, run, start, end))
            heads, begin = [0], end
        start += length
    return runs


def _assembled(found: list, length: int) -> torch.Tensor | None:
    """Put the attention weights of parts `[1, H, T, S]` at their first rows and columns, if there are any."""
    if found[0][2] is None:
        return None
    whole = found[0][2].new_zeros(*found[0][2].shape[:2], length, length)
    for row, column, weights in found:
        whole[:, :, row : row + weights.shape[2], column : column + weights.shape[3]] = weights
    return whole


def attend_last(module, query, key, value, index: Index, **options) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Compute attention of the last queries of one document, in chunks with a mask.

    Args:
        module (`torch.nn.Module`):
            Attention layer.
        query (`torch.Tensor` of shape `[1, H, T, D]`):
            The last `T` queries of the document.
        key (`torch.Tensor` of shape `[1, HKV, S, D]`), value (`torch.Tensor` of shape `[1, HKV, S, D]`):
            All of its keys and values.
        index ([`Index`]):
            Of these queries and keys.
        **options (`Any`):
            Other arguments of [`attention`].

    Returns:
        `list`: for each chunk, the output `[1, t, H, D]`, and the weights `[1, H, t, s]` that were asked for.
    """
    ran("indexed_attention", f"chunks({implementation_of(module)})")
    length, before = key.shape[2], key.shape[2] - query.shape[2]
    weighs = options.pop("output_attentions", False) and implementation_of(module) == "eager"
    dropout = options.get("dropout", 0.0)
    with torch.no_grad():
        blocks = index.blocks()
    results = []
    for begin in range(before, length, _QUERIES):
        end = min(begin + _QUERIES, length)
        visible = torch.arange(begin + 1, end + 1, device=query.device)
        complete = visible // index.ratio
        with torch.no_grad():
            of_index = index.query[0, begin - before : end - before], blocks[: end // index.ratio], complete
            chosen = choose_blocks(*of_index, index.budget // index.ratio).int()
        rows = query[:, :, begin - before : end - before], key[:, :, :end], value[:, :, :end]
        function: Callable = partial(_chunk, module, chosen=chosen, visible=visible, ratio=index.ratio, **options)
        if weighs:
            results.append(function(*rows))
        elif torch.is_grad_enabled():
            # The state of random numbers is read on the host.
            again: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": dropout > 0}
            results.append((checkpoint(function, *rows, **again)[0], None))
        else:
            results.append((function(*rows)[0], None))
    return results


def _chunk(module, query, key, value, *, chosen, visible, ratio, eager, scaling, dropout=0.0, **_):
    name = implementation_of(module)
    mask = tokens_of_blocks(chosen.long(), visible // ratio, visible, ratio, key.shape[2])[None, None]
    if name == "eager":
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
    interface = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
    return interface(module, query, key, value, mask, dropout=dropout, scaling=scaling, is_causal=False)
