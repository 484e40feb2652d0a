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

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
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
from .autograd import first_order
from .convolution import check_channels
from .gated_delta_rule import check_heads


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
    def of(cls, boundaries: SequenceBoundaries, prompt_of: Sequence[int]) -> "SharedPrompts":
        """Create it from the boundaries of all documents. Raises a `ValueError` if `prompt_of` does not fit them."""
        prompt_of = tuple(int(prompt) for prompt in prompt_of)
        alone = sum(prompt < 0 for prompt in prompt_of)
        ordered = all(prompt < 0 for prompt in prompt_of[:alone]) and all(-1 <= p < alone for p in prompt_of)
        number, padding = boundaries.num_documents, boundaries.padding_tokens
        if not (len(prompt_of) == number > alone and ordered) or padding:
            expected = f"prompt_of for {number} documents without padding: -1 for prompts, then a prompt for each answer"
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

    def with_earlier(self, tokens: int | None) -> tuple[SequenceBoundaries, "Copies", torch.Tensor]:
        """Describe the row in which the last `tokens` tokens of its prompt, or all for `None`, precede each answer.

        Returns its boundaries, the tokens of this row that it consists of, and the indices of this row's tokens in it.
        """
        return self.derived(f"with {tokens} earlier tokens", lambda: self._with_earlier(tokens))

    def _with_earlier(self, tokens: int | None) -> tuple[SequenceBoundaries, "Copies", torch.Tensor]:
        starts = self.cu_seqlens_cpu.tolist()
        index, own, lengths, total = [], [], [], 0
        for document, (prompt, length) in enumerate(zip(self.prompt_of, self.lengths, strict=True)):
            end = 0 if prompt < 0 else starts[prompt + 1]
            before = 0 if prompt < 0 else min(self.lengths[prompt], end if tokens is None else tokens)
            index += [np.arange(end - before, end), np.arange(starts[document], starts[document] + length)]
            own.append(np.arange(total + before, total + before + length))
            lengths.append(before + length)
            total += lengths[-1]
        device = self.cu_seqlens.device
        own = torch.from_numpy(np.concatenate(own)).to(device, non_blocking=True)
        boundaries = SequenceBoundaries.from_lengths(lengths, device=device)
        return boundaries, Copies.of(np.concatenate(index), device), own

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

    `rounds` splits the copies into sets in which no row occurs twice, as pairs of the copies and their rows.
    """

    index: torch.Tensor
    rounds: list[tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def of(cls, index: Sequence[int], device: torch.device) -> "Copies":
        index = np.asarray(index, dtype=np.int64)
        order = np.argsort(index, kind="stable")
        first = np.searchsorted(index[order], index[order])
        round_of = np.empty_like(index)
        round_of[order] = np.arange(len(index)) - first
        rounds = [(copies := np.flatnonzero(round_of == n), index[copies]) for n in range(round_of.max(initial=-1) + 1)]
        move = [torch.from_numpy(x).to(device, non_blocking=True) for x in (index, *sum(rounds, ()))]
        return cls(move[0], list(zip(move[1::2], move[2::2], strict=True)))


def repeat_rows(x: torch.Tensor, copies: Copies) -> torch.Tensor:
    """Return `x[copies.index]` for `x` `[T, ...]`. The gradients of the copies of a row are added in a fixed order."""
    return _RepeatRows.apply(x, copies)


class _RepeatRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, copies):
        ctx.copies, ctx.like = copies, (x.shape, x.dtype)
        return x.index_select(0, copies.index)

    @staticmethod
    @first_order("Train without shared prompts.")
    def backward(ctx, gradient):
        shape, dtype = ctx.like
        total = gradient.new_zeros(shape, dtype=torch.promote_types(dtype, torch.float32))
        for copies, rows in ctx.copies.rounds:
            # No row occurs twice in a round, so the order of atomic additions does not matter.
            total.index_add_(0, rows, gradient.index_select(0, copies).to(total.dtype))
        return total.to(dtype), None


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
    keys, copies, _ = boundaries.with_earlier(None)
    key, value = (repeat_rows(x[0].transpose(0, 1), copies).transpose(0, 1)[None] for x in (key, value))
    if query.is_cuda:
        whole = SequenceBoundaries(boundaries.cu_seqlens, boundaries.cu_seqlens_cpu)
        whole = boundaries.derived("documents", lambda: whole)
        output = attention_with_earlier_keys(module, query, key, value, boundaries=whole, keys=keys, **options)
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
    x, options["boundaries"], own = _with_window(boundaries, hidden_states, weight)
    return convolve(x, weight, *args, **options).index_select(1, own)


def causal_conv1d_qkv(
    hidden_states: torch.Tensor, weight: torch.Tensor, *args: Any, boundaries: SharedPrompts, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[`ops.causal_conv1d_qkv`] on a row with shared prompts."""
    x, options["boundaries"], own = _with_window(boundaries, hidden_states, weight)
    return tuple(y.index_select(1, own) for y in convolve_qkv(x, weight, *args, **options))


def _with_window(boundaries, hidden_states, weight):
    """Return the row with the earlier tokens in the window of each answer, its boundaries, and its own tokens."""
    longer, copies, own = boundaries.with_earlier(weight.shape[-1] - 1)
    return repeat_rows(hidden_states[0], copies)[None], longer, own


def gated_delta_rule(
    *inputs: torch.Tensor,
    boundaries: SharedPrompts,
    initial_state: None = None,
    output_final_state: bool = False,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """[`ops.gated_delta_rule`] on a row with shared prompts: query, key, value, g and beta `[1, T, heads, ...]`."""
    check_heads(inputs[1], inputs[2])
    if initial_state is not None or output_final_state:
        raise input_error("a row with shared prompts without a state", "a state", "Run the documents one by one.")
    first = boundaries.first_answer
    prompts, answers = zip(*(x.split([first, x.shape[1] - first], 1) for x in inputs), strict=True)
    of_prompts, states = rule(*prompts, boundaries=boundaries.prompts, output_final_state=True, **options)
    states = repeat_rows(states, boundaries.states)
    of_answers, _ = rule(*answers, boundaries=boundaries.answers, initial_state=states, **options)
    return torch.cat([of_prompts, of_answers], dim=1), None
