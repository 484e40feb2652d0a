"""Rows in which several documents continue the same prompt, and the ops that mix tokens, for such rows.

Answers to one prompt, as in GRPO and DPO, repeat its tokens. A row can hold the prompt once, before its answers:

    | prompt 0 | prompt 1 | answer to 0 | answer to 0 | answer to 1 |

Each answer gives the outputs and gradients of the document "prompt and answer", and depends on no other answer:

* **Attention.** The keys of an answer are those of its prompt and its own.
* **Convolution.** The window of an answer's first tokens includes the last tokens of its prompt.
* **Gated delta rule.** The state of an answer starts as the final state of its prompt.

All of these read parts of the prompt once for each answer. [`repeat_rows`] adds the gradients of such copies in a fixed
order, in float32. The functions have the names and arguments of those in [`transformers_packed.ops`].
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from numbers import Integral
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from ..boundaries import SequenceBoundaries
from ..errors import input_error
from . import attention as attention_of_row
from . import causal_conv1d as convolve
from . import causal_conv1d_qkv as convolve_qkv
from . import gated_delta_rule as rule
from .attention import attention_of_last_queries, attention_with_earlier_keys, implementations
from .autograd import first_order, is_transformed
from .convolution import check_channels, check_heads, slots_of, triton_qkv, verify_triton_qkv
from .dispatch import logger, record
from .gated_delta_rule import check_groups


@dataclass(frozen=True, eq=False)
class SharedPrompts(SequenceBoundaries):
    """The boundaries of a row whose last documents, the answers, continue earlier documents, their prompts.

    Args:
        cu_seqlens (`torch.IntTensor` of shape `[N+1]`):
            Cumulative lengths of the prompts and answers.
        host (`torch.IntTensor` of shape `[N+1]`):
            The same values on the host.
        prompt_of (`tuple[int, ...]`):
            For each document, the index of its prompt, or -1 for a document that starts on its own. Those come first.

    Example:

    ```python
    >>> from transformers_packed import SequenceBoundaries
    >>> from transformers_packed.ops.prompts import SharedPrompts
    >>> row = SharedPrompts.of(SequenceBoundaries.from_lengths([3, 2, 1]), [-1, 0, 0])
    >>> row.position_ids.tolist()
    [[0, 1, 2, 3, 4, 3]]

    ```
    """

    prompt_of: tuple[int, ...] = ()
    shares_prompts: ClassVar[bool] = True

    @classmethod
    def of(cls, boundaries: SequenceBoundaries, prompt_of: Sequence[int] | torch.Tensor) -> "SharedPrompts":
        """Create it from the boundaries of all documents. Raises a `ValueError` if `prompt_of` does not fit them."""
        prompt_of = tuple(prompt_of.tolist() if isinstance(prompt_of, torch.Tensor) else prompt_of)
        if not all(isinstance(prompt, Integral) for prompt in prompt_of):
            raise input_error("prompt_of as one integer for each document", list(prompt_of))
        prompt_of = tuple(map(int, prompt_of))
        alone = sum(prompt < 0 for prompt in prompt_of)
        ordered = all(prompt < 0 for prompt in prompt_of[:alone]) and all(-1 <= p < alone for p in prompt_of)
        number, padding = boundaries.num_documents, boundaries.padding_tokens
        if not (len(prompt_of) == number > alone and ordered) or padding:
            expected = (
                f"prompt_of for {number} documents without padding: -1 for prompts, then a prompt for each answer"
            )
            raise input_error(expected, f"{list(prompt_of)} and {padding} tokens of padding")
        return cls(boundaries.cu_seqlens, boundaries.cu_seqlens_cpu, prompt_of=prompt_of)

    @cached_property
    def num_prompts(self) -> int:
        """Number of documents that start on their own."""
        return sum(prompt < 0 for prompt in self.prompt_of)

    @cached_property
    def first_answer(self) -> int:
        """Index of the first token of the answers."""
        return int(self.cu_seqlens_cpu[self.num_prompts])

    @cached_property
    def prompts(self) -> SequenceBoundaries:
        """The boundaries of the tokens before the answers."""
        return SequenceBoundaries.from_lengths(self.lengths[: self.num_prompts], device=self.cu_seqlens.device)

    @cached_property
    def answers(self) -> SequenceBoundaries:
        """The boundaries of the answers, as a row of their own."""
        return SequenceBoundaries.from_lengths(self.lengths[self.num_prompts :], device=self.cu_seqlens.device)

    @cached_property
    def documents(self) -> SequenceBoundaries:
        """The boundaries of prompts and answers, which do not continue each other."""
        return SequenceBoundaries(self.cu_seqlens, self.cu_seqlens_cpu)

    @cached_property
    def states(self) -> "Copies":
        """The final states of the prompts `[num_prompts, ...]`, one for each answer."""
        return Copies.of(self.prompt_of[self.num_prompts :], self.cu_seqlens.device)

    @cached_property
    def position_ids(self) -> torch.Tensor:
        """int64 `[1, T]`: the position of each token in its document. Answers count on from their prompts."""
        before = torch.tensor([0 if prompt < 0 else self.lengths[prompt] for prompt in self.prompt_of])
        starts = (self.cu_seqlens_cpu[:-1] - before).to(self.cu_seqlens.device, non_blocking=True)
        tokens = torch.arange(self.total_length, device=self.cu_seqlens.device)
        return tokens[None] - starts[self.seq_idx.long()]

    @cached_property
    def keys(self) -> tuple[SequenceBoundaries, "Copies"]:
        """The row in which its whole prompt precedes each answer: its boundaries, and the tokens it consists of."""
        pieces = [(prompt, None, slice(None)) for prompt in range(self.num_prompts)]
        pieces += [(n, slice(None), slice(None)) for n in self.answer_indices]
        boundaries, index, _ = self._row_of(pieces)
        return boundaries, Copies.of(index, self.cu_seqlens.device)

    @property
    def answer_indices(self) -> range:
        """Which documents are answers."""
        return range(self.num_prompts, self.num_documents)

    def tails(self, width: int) -> "Copies":
        """The last `width` tokens of its prompt, for each answer. The first token is repeated in front of fewer."""
        return self.derived(f"tails of {width}", lambda: self._tails(width))

    def _tails(self, width: int) -> "Copies":
        starts = np.cumsum([0, *self.lengths])
        prompts = np.array(self.prompt_of[self.num_prompts :])
        tokens = starts[prompts + 1, None] + np.arange(-width, 0)
        return Copies.of(np.maximum(tokens, starts[prompts, None]).flatten(), self.cu_seqlens.device)

    def windows(self, width: int) -> tuple[SequenceBoundaries, "Copies", torch.Tensor, torch.Tensor]:
        """Describe the row of the first `width` tokens of each answer, each after the last `width` of its prompt.

        Returns its boundaries, the tokens it consists of, and the indices of the answers' tokens in it and in this row.
        """
        return self.derived(f"windows of {width}", lambda: self._windows(width))

    def _windows(self, width: int) -> tuple[SequenceBoundaries, "Copies", torch.Tensor, torch.Tensor]:
        pieces = [(n, slice(-width, None), slice(width)) for n in self.answer_indices]
        boundaries, index, own = self._row_of(pieces)
        device = self.cu_seqlens.device
        tokens = (torch.from_numpy(x).to(device, non_blocking=True) for x in (own, index[own]))
        return boundaries, Copies.of(index, device), *tokens

    def _row_of(self, pieces: list[tuple[int, slice | None, slice]]) -> tuple[SequenceBoundaries, Any, Any]:
        """Return the boundaries of a row, its tokens, and which of these are not from a prompt.

        Each document of the row consists of tokens of the prompt of a document, if any, and of tokens of the document.
        """
        tokens = np.split(np.arange(self.total_length), np.cumsum(self.lengths[:-1]))
        index, is_own, lengths = [], [], []
        for document, earlier, own in pieces:
            before = tokens[self.prompt_of[document]][earlier] if earlier is not None else tokens[document][:0]
            index += [before, tokens[document][own]]
            is_own += [np.zeros(len(before), dtype=bool), np.ones(len(index[-1]), dtype=bool)]
            lengths.append(len(before) + len(index[-1]))
        boundaries = SequenceBoundaries.from_lengths(lengths, device=self.cu_seqlens.device)
        return boundaries, np.concatenate(index), np.flatnonzero(np.concatenate(is_own))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "SharedPrompts":
        moved = super().to(device, non_blocking)
        return moved if moved is self else replace(moved)

    def layer_kwargs(self) -> dict[str, Any]:
        # A layer cannot use the lengths of prompts and answers alone.
        return {"boundaries": self}

    def check_whole(self, fix: str) -> None:
        raise input_error("documents that do not share prompts", "a row with shared prompts", fix)


class Copies(NamedTuple):
    """Rows to repeat: row `index[i]` is copy `i`.

    `copies_of` is the inverse: pairs of rows `[R]` with the same number of copies, and their copies `[R, copies]`.
    """

    index: torch.Tensor
    copies_of: list[tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def of(cls, index: Sequence[int], device: torch.device) -> "Copies":
        index = np.asarray(index, dtype=np.int64)
        order = np.argsort(index, kind="stable")
        rows = index[order]
        first = np.flatnonzero(np.diff(rows, prepend=-1))
        counts = np.diff(first, append=len(rows))
        move = [index]
        for count in np.flatnonzero(np.bincount(counts)):
            of_row = first[counts == count]
            move += [rows[of_row], order[of_row[:, None] + np.arange(count)]]
        index, *pairs = (torch.from_numpy(x).to(device, non_blocking=True) for x in move)
        return cls(index, list(zip(pairs[::2], pairs[1::2], strict=True)))


def repeat_rows(x: torch.Tensor, copies: Copies) -> torch.Tensor:
    """Return `x[copies.index]` for `x` `[T, ...]`. The gradients of the copies of a row are added in a fixed order."""
    return _with_copies(x, copies)[1]


def _with_copies(x: torch.Tensor, copies: Copies) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `x` and `x[copies.index]`."""
    if is_transformed():
        return x, x.index_select(0, copies.index)
    return _RepeatRows.apply(x, copies)


class _RepeatRows(torch.autograd.Function):
    """Return `x` as well, so that one op adds the gradients of the rows and of their copies."""

    @staticmethod
    def forward(ctx, x, copies):
        ctx.set_materialize_grads(False)
        ctx.copies, ctx.shape = copies, x.shape
        return x.view_as(x), x.index_select(0, copies.index)

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
        ("flex_attention", module.config._attn_implementation == "flex_attention"),
    ):
        if given:
            raise input_error("attention that supports shared prompts", name, "Use sdpa, without attention weights.")
    keys, copies = boundaries.keys
    key, value = (repeat_rows(x[0].transpose(0, 1), copies).transpose(0, 1)[None] for x in (key, value))
    if query.is_cuda:
        documents = boundaries.documents
        output = attention_with_earlier_keys(module, query, key, value, boundaries=documents, keys=keys, **options)
        if output is not None:
            return output, None
    prompts = (x[:, :, : boundaries.first_answer] for x in (query, key, value))
    outputs = [attention_of_row(module, *prompts, None, boundaries=boundaries.prompts, impl=impl, **options)[0]]
    starts = [*zip(*(x.cu_seqlens_cpu.tolist() for x in (boundaries, keys)), strict=True)]
    for (q, k), (q_end, k_end) in pairwise(starts[boundaries.num_prompts :]):
        rows = query[:, :, q:q_end], key[:, :, k:k_end], value[:, :, k:k_end]
        outputs.append(attention_of_last_queries(module, *rows, **options))
    return torch.cat(outputs, dim=1), None


def causal_conv1d(
    hidden_states: torch.Tensor, weight: torch.Tensor, *args: Any, boundaries: SharedPrompts, **options: Any
) -> torch.Tensor:
    """[`ops.causal_conv1d`] on a row with shared prompts."""
    check_channels(hidden_states, weight)

    def function(x, boundaries):
        return (convolve(x, weight, *args, boundaries=boundaries, **options),)

    return _convolution(function, hidden_states, weight, boundaries)[0]


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
        record("causal_conv1d_qkv", "triton", [], logger.info)
        x, tails = _with_copies(hidden_states[0], boundaries.tails(width))
        halo = tails, slots_of(boundaries, boundaries.answer_indices, width)
        return triton_qkv(x[None], *call, boundaries=boundaries, halo=halo, **heads)

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


def gated_delta_rule(
    *inputs: torch.Tensor,
    boundaries: SharedPrompts,
    initial_state: None = None,
    output_final_state: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """[`ops.gated_delta_rule`] on a row with shared prompts: query, key, value, g and beta `[1, T, heads, ...]`."""
    check_groups(inputs[1], inputs[2])
    if initial_state is not None or output_final_state:
        raise input_error("a row with shared prompts without a state", "a state", "Run the documents one by one.")
    first = boundaries.first_answer
    prompts, answers = zip(*(x.split([first, x.shape[1] - first], 1) for x in inputs), strict=True)
    of_prompts, states = rule(*prompts, boundaries=boundaries.prompts, output_final_state=True, **options)
    states = repeat_rows(states, boundaries.states)
    of_answers, _ = rule(*answers, boundaries=boundaries.answers, initial_state=states, **options)
    return torch.cat([of_prompts, of_answers], dim=1), None
