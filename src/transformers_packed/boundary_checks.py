"""Checks of the tensors that describe document boundaries, and what position ids say of them.

A check raises a `ValueError` that describes the problem.
"""

from typing import Any

import torch

from .errors import input_error


def check_integers(name: str, tensor: Any, shape: str, *, ndim: int, minimum_size: int = 1) -> None:
    integral = isinstance(tensor, torch.Tensor) and tensor.dtype in (torch.int32, torch.int64)
    if not integral or tensor.ndim != ndim or tensor.shape[-1] < minimum_size:
        cut = "If the collator's was correct, accelerate's dispatcher may have split it: set `dispatch_batches=False`."
        fix = cut if name == "cu_seqlens" else "Convert it first."
        raise input_error(f"{name} as an int32 or int64 tensor {shape}", describe(tensor), fix)


def check_row(name: str, tensor: torch.Tensor) -> None:
    """Check that a tensor has an integer for each token of one row, `[1, T]`."""
    check_integers(name, tensor, "[1, T] with T >= 1", ndim=2)
    if len(tensor) != 1:
        fix = "Concatenate all documents in one row, as DataCollatorWithFlattening does."
        raise input_error(f"{name} of one packed row, batch size 1", f"{len(tensor)} rows", fix)


def check_lengths(lengths: torch.Tensor) -> None:
    if bool((lengths < 1).any()):
        document = int((lengths < 1).nonzero()[0])
        got = f"{int(lengths[document])} at document {document}"
        raise input_error("lengths of at least 1", got, "Leave empty documents out of the row.")


def check_cumulative(host: torch.Tensor, total_length: int | None) -> None:
    """Check cumulative lengths on the host, int64 `[N+1]`, optionally of a row of `total_length` tokens."""
    fix = "Give the cumulative document lengths [0, n_1, n_1 + n_2, ..., T] of one packed row."
    if int(host[0]) != 0:
        raise input_error("cu_seqlens that starts at 0", int(host[0]), fix)
    lengths = host.diff()
    if bool((lengths <= 0).any()):
        document = int((lengths <= 0).nonzero()[0])
        got = f"{int(host[document])} followed by {int(host[document + 1])} at document {document}"
        raise input_error("strictly increasing cu_seqlens (no document is empty)", got, fix)
    total = int(host[-1])
    check_total(total, total_length, fix)
    if total > torch.iinfo(torch.int32).max:
        raise input_error("at most 2**31 - 1 tokens in a row", total, "Split the row.")


def check_total(total: int, total_length: int | None, fix: str) -> None:
    if total_length is None or total == total_length:
        return
    fix += (
        " If the collator's values were correct, the batch was split on the way to the model: by accelerate's"
        " dispatcher (set `dispatch_batches=False`) or by torch.nn.DataParallel (launch one process per GPU)."
    )
    if total < total_length:
        fix += " Or tokens were added before the row, as PEFT prompt learning does: use padded batches."
    raise input_error(f"cu_seqlens that ends at the row's {total_length} tokens", total, fix)


def check_host_copy(host: torch.Tensor, cu_seqlens: torch.Tensor) -> None:
    check_integers("cu_seqlens_cpu", host, "[N+1] with N >= 1", ndim=1, minimum_size=2)
    expected, got = tuple(cu_seqlens.shape), f"{tuple(host.shape)} on {host.device}"
    if host.device.type != "cpu" or host.shape != cu_seqlens.shape:
        raise input_error(f"cu_seqlens_cpu on the CPU with shape {expected}", got, "Pass a host copy.")
    if cu_seqlens.device.type == "cpu" and not torch.equal(host.long(), cu_seqlens.long()):
        values = f"cu_seqlens_cpu with the values {short(cu_seqlens.tolist())}"
        raise input_error(values, short(host.tolist()), "Pass a host copy.")


def check_document_numbers(row: torch.Tensor, steps: torch.Tensor) -> None:
    """Check the document numbers of a row, `[T]` on the host, and the steps between them, `[T-1]`."""
    if bool((steps < 0).any()) or int(row[0]) < 0:
        where = 0 if int(row[0]) < 0 else int((steps < 0).nonzero()[0]) + 1
        got = f"{int(row[where])} at token {where}" + (f" after {int(row[where - 1])}" if where else "")
        raise input_error("seq_idx that is never negative and never decreases", got, "Number the documents 0, 1, ...")


def position_rows(position_ids: Any, length: int | None = None) -> torch.Tensor | None:
    """Return position ids of any shape as `[R, B, T]`, or `None` if they are not those of rows of `length` tokens.

    `R` is 1, or 3 for time, height and width (M-RoPE), or 4 with the positions in the text before these.
    """
    if not isinstance(position_ids, torch.Tensor) or position_ids.ndim not in (1, 2, 3):
        return None
    if length not in (None, position_ids.shape[-1]):
        return None
    return position_ids[(None,) * (3 - position_ids.ndim)]


def restarts_in(rows: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Return where position ids `[R, B, T]` restart, bool `[B, T-1]` for all tokens but the first, and whether it is all.

    The text positions of four rows tell it, unless they count over the whole row. Of the others, those of text are equal
    and count on within a document. Those of an image differ and do not, so with images only a token that returns to the
    first position is sure to start a document.
    """
    in_text = rows[0].diff() != 1
    if len(rows) == 4 and bool(in_text.any()):
        return in_text, True
    grid = rows[-3:]
    is_text = (grid == grid[:1]).all(0)
    only_text = bool(is_text.all())
    found = grid[0].diff() != 1 if only_text else (is_text & (grid[0] <= grid[0, :, :1]))[:, 1:]
    return found, only_text


def check_tokens(name: str, tensor: torch.Tensor, total_length: int) -> None:
    if tensor.shape != (1, total_length):
        expected = f"{name} of shape [1, {total_length}], one document number per token"
        raise input_error(expected, f"{tuple(tensor.shape)}", f"Pass the {name} of this row.")


def check_padding_mask(attention_mask: torch.Tensor) -> torch.Tensor:
    """Validate the mask and return it as bool `[B, L]`."""
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.ndim != 2:
        raise input_error("an attention_mask tensor [B, L]", describe(attention_mask), "Pass the 2-D padding mask.")
    if attention_mask.dtype != torch.bool and bool(((attention_mask != 0) & (attention_mask != 1)).any()):
        got = f"values from {attention_mask.min().item()} to {attention_mask.max().item()}"
        raise input_error("an attention_mask of 0 and 1", got, "Mark real tokens with 1 and padding with 0.")
    return attention_mask.bool()


def describe(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def short(values: list[int]) -> str:
    return str(values) if len(values) <= 8 else f"[{', '.join(map(str, values[:8]))}, ...] ({len(values)} values)"
