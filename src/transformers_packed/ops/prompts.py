"""The ops that mix tokens, for rows in which several documents continue the same prompt ([`SharedPrompts`]).

Each answer gives the outputs and gradients of the document "prompt and answer", and depends on no other answer:

* **Attention.** The keys of an answer are those of its prompt and its own.
* **Convolution.** The window of an answer's first tokens includes the last tokens of its prompt.
* **Delta rules.** The state of an answer starts as the final state of its prompt.

All of these read parts of the prompt once for each answer. [`repeat_rows`] adds the gradients of such copies in a fixed
order, in float32. The ops of [`transformers_packed.ops`] call these functions for such rows.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

from ..errors import unsupported
from ..shared_prompts import Copies, SharedPrompts
from .attention import attention as attention_of_row
from .attention import attention_of_last_queries, attention_with_earlier_keys, implementation_of, implementations
from .autograd import first_order, is_transformed
from .convolution import causal_conv1d as convolve
from .convolution import causal_conv1d_qkv as convolve_qkv
from .convolution import check_channels, check_heads, triton_qkv, verify_triton_qkv
from .dispatch import for_rows, ran
from .gated_delta_rule import gated_delta_rule as rule
from .indexed_attention import Index, attend_last, check
from .kimi_delta_rule import kimi_delta_rule as rule_by_channel


def repeat_rows(x: torch.Tensor, copies: Copies) -> torch.Tensor:
    """Return `x[copies.rows]` for `x` `[T, ...]`. The gradients of the copies of a row are added in a fixed order."""
    return _with_copies(x, copies)[1]


def _with_copies(x: torch.Tensor, copies: Copies) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `x` and `x[copies.rows]`."""
    if is_transformed():
        return x, x.index_select(0, copies.rows)
    return _RepeatRows.apply(x, copies)


class _RepeatRows(torch.autograd.Function):
    """Return `x` as well, so that one op adds the gradients of the rows and of their copies."""

    @staticmethod
    def forward(ctx, x, copies):
        ctx.set_materialize_grads(False)
        ctx.copies, ctx.shape = copies, x.shape
        return x.view_as(x), x.index_select(0, copies.rows)

    @staticmethod
    @first_order("Train without shared prompts.")
    def backward(ctx, of_rows, of_copies):
        if of_copies is None:
            return of_rows, None
        wide = torch.promote_types(of_copies.dtype, torch.float32)
        # The backward of the op that used the rows created their gradient, and nothing else uses it.
        total = of_copies.new_zeros(ctx.shape) if of_rows is None else of_rows.contiguous()
        for rows, copies in ctx.copies.copies_of:
            gradient = of_copies.index_select(0, copies.flatten()).unflatten(0, copies.shape).sum(1, dtype=wide)
            if of_rows is not None:
                gradient += total.index_select(0, rows)
            total.index_copy_(0, rows, gradient.to(total.dtype))
        return total, None


@for_rows(SharedPrompts)
def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    boundaries: SharedPrompts,
    impl: str = "auto",
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """[`ops.attention`] on a row with shared prompts: query `[1, H, T, D]`, key and value `[1, HKV, T, D]`."""
    implementations(module)
    for name, given in (
        ("attention weights", options.get("output_attentions")),
        ("flex_attention", implementation_of(module) == "flex_attention"),
    ):
        if given:
            raise unsupported("a row with shared prompts", name, "Use sdpa, without attention weights.")
    keys, copies = boundaries.keys
    key, value = (repeat_rows(x[0].transpose(0, 1), copies).transpose(0, 1)[None] for x in (key, value))
    if query.is_cuda:
        documents = boundaries.documents
        output = attention_with_earlier_keys(module, query, key, value, boundaries=documents, keys=keys, **options)
        if output is not None:
            return output, None
    q, k, v = (x[:, :, : boundaries.first_answer] for x in (query, key, value))
    outputs = [attention_of_row(module, q, k, v, None, boundaries=boundaries.prompts, impl=impl, **options)[0]]
    starts = [*zip(*(x.cu_seqlens_cpu.tolist() for x in (boundaries, keys)), strict=True)]
    for (start, k_start), (end, k_end) in pairwise(starts[boundaries.num_prompts :]):
        rows = query[:, :, start:end], key[:, :, k_start:k_end], value[:, :, k_start:k_end]
        outputs.append(attention_of_last_queries(module, *rows, **options))
    return torch.cat(outputs, dim=1), None


@for_rows(SharedPrompts)
def indexed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    index: Index,
    *,
    boundaries: SharedPrompts,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """[`ops.indexed_attention`] on a row with shared prompts: query `[1, H, T, D]`, key and value `[1, HKV, T, D]`."""
    check(module)
    if options.get("output_attentions"):
        raise unsupported("a row with shared prompts", "attention weights", "Leave output_attentions out.")
    keys, copies = boundaries.keys
    key, value = (repeat_rows(x[0].transpose(0, 1), copies).transpose(0, 1)[None] for x in (key, value))
    of_keys = {name: getattr(index, name)[:, copies.rows] for name in ("key", "cos", "sin")}
    index = index._replace(**of_keys)
    starts = zip(*(x.cu_seqlens_cpu.tolist() for x in (boundaries, keys)), strict=True)
    outputs = []
    for (start, k_start), (end, k_end) in pairwise(starts):
        own, document = slice(start, end), slice(k_start, k_end)
        rows = query[:, :, own], key[:, :, document], value[:, :, document]
        outputs += [output for output, _ in attend_last(module, *rows, index.of(own, document), **options)]
    return torch.cat(outputs, dim=1), None


@for_rows(SharedPrompts)
def causal_conv1d(
    hidden_states: torch.Tensor, weight: torch.Tensor, *args: Any, boundaries: SharedPrompts, **options: Any
) -> torch.Tensor:
    """[`ops.causal_conv1d`] on a row with shared prompts."""
    check_channels(hidden_states, weight)

    def function(x, boundaries):
        return (convolve(x, weight, *args, boundaries=boundaries, **options),)

    return _convolution(function, hidden_states, weight, boundaries)[0]


@for_rows(SharedPrompts)
def causal_conv1d_qkv(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = "silu",
    *,
    boundaries: SharedPrompts,
    impl: str = "auto",
    **heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[`ops.causal_conv1d_qkv`] on a row with shared prompts."""
    check_heads(hidden_states, weight, **heads)
    call, width = (weight, bias, activation), weight.shape[-1] - 1
    on_triton = impl in ("auto", "triton") and not is_transformed()
    if width and on_triton and verify_triton_qkv(hidden_states, *call, **heads)[0]:
        ran("causal_conv1d_qkv", "triton")
        x, tails = _with_copies(hidden_states[0], boundaries.tails(width))
        return triton_qkv(x[None], *call, boundaries=boundaries, halo=(tails, boundaries.answer_indices), **heads)

    def function(x, boundaries):
        return convolve_qkv(x, *call, boundaries=boundaries, impl=impl, **heads)

    return _convolution(function, hidden_states, weight, boundaries)


def _convolution(function: Callable, x: torch.Tensor, weight: torch.Tensor, row: SharedPrompts) -> tuple:
    """Convolve each document alone, then overwrite the tokens whose windows include tokens of their prompts."""
    if weight.shape[-1] == 1:
        return function(x, row.documents)
    boundaries, copies, own, tokens = row.windows(weight.shape[-1] - 1)
    x, windows = _with_copies(x[0], copies)
    alone, continued = function(x[None], row.documents), function(windows[None], boundaries)
    return tuple(y.index_copy(1, tokens, z.index_select(1, own)) for y, z in zip(alone, continued, strict=True))


def _of_prompts(
    function: Callable,
    *inputs: torch.Tensor,
    boundaries: SharedPrompts,
    initial_state: None = None,
    output_final_state: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    if initial_state is not None or output_final_state:
        raise unsupported("a row with shared prompts", "initial or final states", "Run the documents one by one.")
    first = boundaries.first_answer
    prompts, answers = zip(*(x.split([first, x.shape[1] - first], 1) for x in inputs), strict=True)
    of_prompts, states = function(*prompts, boundaries=boundaries.prompts, output_final_state=True, **options)
    assert states is not None
    states = repeat_rows(states, boundaries.states)
    of_answers, _ = function(*answers, boundaries=boundaries.answers, initial_state=states, **options)
    return torch.cat([of_prompts, of_answers], dim=1), None


@for_rows(SharedPrompts)
def gated_delta_rule(*inputs: torch.Tensor, boundaries: SharedPrompts, **options: Any) -> tuple[torch.Tensor, None]:
    """[`ops.gated_delta_rule`] on a row with shared prompts: query, key, value, g and beta `[1, T, heads, ...]`."""
    return _of_prompts(rule, *inputs, boundaries=boundaries, **options)


@for_rows(SharedPrompts)
def kimi_delta_rule(*inputs: torch.Tensor, boundaries: SharedPrompts, **options: Any) -> tuple[torch.Tensor, None]:
    """[`ops.kimi_delta_rule`] on a row with shared prompts: query, key, value, g and beta `[1, T, heads, ...]`."""
    return _of_prompts(rule_by_channel, *inputs, boundaries=boundaries, **options)
