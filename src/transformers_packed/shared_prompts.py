"""The layout of a row in which several documents, the answers, continue the same ones, their prompts.

Answers to one prompt, as in GRPO and DPO, repeat its tokens. A row can hold the prompt once, before its answers:

    | prompt 0 | prompt 1 | answer to 0 | answer to 0 | answer to 1 |

`ops/prompts.py` has the ops for such rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from .boundaries import SequenceBoundaries, derived_property
from .errors import input_error


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
    >>> from transformers_packed.shared_prompts import SharedPrompts
    >>> row = SharedPrompts.of(SequenceBoundaries.from_lengths([3, 2, 1]), [-1, 0, 0])
    >>> row.position_ids.tolist()
    [[0, 1, 2, 3, 4, 3]]

    ```
    """

    prompt_of: tuple[int, ...] = ()
    share_prompts: ClassVar[bool] = True

    @classmethod
    def of(cls, boundaries: SequenceBoundaries, prompt_of: Sequence[int] | torch.Tensor) -> "SharedPrompts":
        """Create it from the boundaries of all documents. Raises a `ValueError` if `prompt_of` does not fit them."""
        given = prompt_of.tolist() if isinstance(prompt_of, torch.Tensor) else list(prompt_of)
        if not all(isinstance(prompt, Integral) for prompt in given):
            raise input_error("prompt_of as one integer for each document", given)
        prompt_of = tuple(map(int, given))
        alone = sum(prompt < 0 for prompt in prompt_of)
        ordered = all(prompt < 0 for prompt in prompt_of[:alone]) and all(-1 <= p < alone for p in prompt_of)
        number, padding = boundaries.num_documents, boundaries.padding_tokens
        if not (len(prompt_of) == number > alone and ordered) or padding:
            expected = (
                f"prompt_of for {number} documents without padding: -1 for prompts, then a prompt for each answer"
            )
            raise input_error(expected, f"{list(prompt_of)} and {padding} tokens of padding")
        return cls(boundaries.cu_seqlens, boundaries.cu_seqlens_cpu, prompt_of=prompt_of)

    @derived_property
    def num_prompts(self) -> int:
        """Number of documents that start on their own."""
        return sum(prompt < 0 for prompt in self.prompt_of)

    @derived_property
    def first_answer(self) -> int:
        """Index of the first token of the answers."""
        return int(self.cu_seqlens_cpu[self.num_prompts])

    @derived_property
    def prompts(self) -> SequenceBoundaries:
        """The boundaries of the tokens before the answers."""
        return SequenceBoundaries.from_lengths(self.lengths[: self.num_prompts], device=self.cu_seqlens.device)

    @derived_property
    def answers(self) -> SequenceBoundaries:
        """The boundaries of the answers, as a row of their own."""
        return SequenceBoundaries.from_lengths(self.lengths[self.num_prompts :], device=self.cu_seqlens.device)

    @derived_property
    def documents(self) -> SequenceBoundaries:
        """The boundaries of prompts and answers, which do not continue each other."""
        return SequenceBoundaries(self.cu_seqlens, self.cu_seqlens_cpu)

    @derived_property
    def states(self) -> "Copies":
        """The final states of the prompts `[num_prompts, ...]`, one for each answer."""
        return Copies.of(self.prompt_of[self.num_prompts :], self.cu_seqlens.device)

    @derived_property
    def position_ids(self) -> torch.Tensor:
        """int64 `[1, T]`: the position of each token in its document. Answers count on from their prompts."""
        before = torch.tensor([0 if prompt < 0 else self.lengths[prompt] for prompt in self.prompt_of])
        starts = (self.cu_seqlens_cpu[:-1] - before).to(self.cu_seqlens.device, non_blocking=True)
        tokens = torch.arange(self.total_length, device=self.cu_seqlens.device)
        return tokens[None] - starts[self.seq_idx.long()]

    @derived_property
    def keys(self) -> tuple[SequenceBoundaries, "Copies"]:
        """The row in which its whole prompt precedes each answer: its boundaries, and the tokens it consists of."""
        boundaries, index, _ = self._row_of(range(self.num_documents), slice(None), slice(None))
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
        boundaries, index, own = self._row_of(self.answer_indices, slice(-width, None), slice(width))
        device = self.cu_seqlens.device
        in_window, in_row = (torch.from_numpy(x).to(device, non_blocking=True) for x in (own, index[own]))
        return boundaries, Copies.of(index, device), in_window, in_row

    def _row_of(
        self, documents: range, earlier: slice, own: slice
    ) -> tuple[SequenceBoundaries, np.ndarray, np.ndarray]:
        """Return the boundaries of a row, its tokens, and which of these are not from a prompt.

        It consists of the `own` tokens of each of the documents, after the `earlier` ones of its prompt, if it has one.
        """
        tokens = np.split(np.arange(self.total_length), np.cumsum(self.lengths[:-1]))
        index, is_own, lengths = [], [], []
        for document in documents:
            prompt = self.prompt_of[document]
            before = tokens[document][:0] if prompt < 0 else tokens[prompt][earlier]
            index += [before, tokens[document][own]]
            is_own += [np.zeros(len(before), dtype=bool), np.ones(len(index[-1]), dtype=bool)]
            lengths.append(len(before) + len(index[-1]))
        boundaries = SequenceBoundaries.from_lengths(lengths, device=self.cu_seqlens.device)
        return boundaries, np.concatenate(index), np.flatnonzero(np.concatenate(is_own))

    def layer_kwargs(self) -> dict[str, Any]:
        # A layer cannot use the lengths of prompts and answers alone.
        return {"boundaries": self}

    def check_whole(self, fix: str) -> None:
        raise input_error("documents that do not share prompts", "a row with shared prompts", fix)


class Copies(NamedTuple):
    """Rows to repeat: copy `i` is row `rows[i]`.

    `copies_of` is the inverse: pairs of rows `[R]` with the same number of copies, and their copies `[R, copies]`.
    """

    rows: torch.Tensor
    copies_of: list[tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def of(cls, rows: Sequence[int] | np.ndarray, device: torch.device) -> "Copies":
        index = np.asarray(rows, dtype=np.int64)
        order = np.argsort(index, kind="stable")
        ordered = index[order]
        first = np.flatnonzero(np.diff(ordered, prepend=-1))
        counts = np.diff(first, append=len(ordered))
        move = [index]
        for count in np.flatnonzero(np.bincount(counts)):
            of_row = first[counts == count]
            move += [ordered[of_row], order[of_row[:, None] + np.arange(count)]]
        source, *pairs = (torch.from_numpy(x).to(device, non_blocking=True) for x in move)
        return cls(source, list(zip(pairs[::2], pairs[1::2], strict=True)))
