"""From the arguments of a model's forward to one [`SequenceBoundaries`], or to `None` when the input is not packed.

Explicit metadata (`seq_idx`, `cu_seqlens`, `cu_seq_lens_q`, `cu_seq_lens_k`) always means a packed row; any one of them
is enough. Without it a row is packed when `position_ids` restart and there is neither a mask nor a cache. The checks
read shapes, dtypes and host copies; contents of tensors on a device are compared only where they are on the CPU
anyway, or when the environment variable `TRANSFORMERS_PACKED_VALIDATE=1` allows a synchronisation.
"""

from typing import Any

import torch
from transformers.utils import TransformersKwargs
from transformers.utils.import_utils import is_torchdynamo_compiling

from ..boundaries import PACKING_KEYWORDS, SequenceBoundaries, may_read, text_position_ids
from ..errors import input_error


class PackingKwargs(TransformersKwargs, total=False):
    """Keyword arguments of a packed forward: Transformers' own (`seq_idx`, `cu_seq_lens_q`, ...) and ours.

    Attributes:
        cu_seqlens (`torch.IntTensor` of shape `[N+1]`, *optional*):
            Cumulative document lengths, flash-linear-attention's name for `cu_seq_lens_q`.
        padding_tokens (`int`, *optional*):
            The length of the row's last document, if that is padding: it is left out of router statistics.
        boundaries ([`SequenceBoundaries`], *optional*):
            The same with a host copy, as models hand it to their layers.
        packs_padding (`bool`, *optional*):
            Whether this call computes the real tokens of a padded batch only; by default as the model's attribute says.
    """

    cu_seqlens: torch.IntTensor | None
    padding_tokens: int | None
    boundaries: SequenceBoundaries | None
    packs_padding: bool | None


METADATA = PACKING_KEYWORDS
_NOT_FOR_VISION = {*METADATA, "boundaries", "packs_padding", "num_items_in_batch", "shift_labels"}


def resolve_boundaries(
    call: str,
    kwargs: dict[str, Any],
    *,
    input_ids: torch.Tensor | None,
    inputs_embeds: torch.Tensor | None,
    attention_mask: Any,
    position_ids: torch.Tensor | None,
    past_key_values: Any,
    use_cache: bool | None,
) -> SequenceBoundaries | None:
    """Decide once, at the top of a model, whether its input is a packed row and where its documents are.

    The packing keywords are taken out of `kwargs`, so that a row that is not packed leaves no trace of them. Boundaries
    that come on the host, which saves a wait for the device, go to where the tokens are.

    Raises:
        `ValueError`: the input is packed and has more than one row, an attention mask or a cache, or its metadata is
        malformed or contradictory.
    """
    given = kwargs.pop("boundaries", None)
    metadata = {name: kwargs.pop(name, None) for name in METADATA}
    metadata["padding_tokens"] = metadata["padding_tokens"] or None
    tokens = input_ids if input_ids is not None else inputs_embeds
    if given is not None:
        return given if tokens is None else given.to(tokens.device, non_blocking=True)
    if tokens is None:
        return None
    rows, total_length = tokens.shape[:2]
    explicit = [name for name, value in metadata.items() if value is not None]
    # A compiled graph cannot branch on what position_ids hold: there, packing needs explicit metadata.
    inferred = position_ids is not None and attention_mask is None and past_key_values is None
    inferred = inferred and not is_torchdynamo_compiling()
    # The collator's default has positions alone, and a number beside them when some of the row is padding.
    if explicit and not (inferred and explicit == ["padding_tokens"]):
        source = " and ".join(explicit)
        _check_one_row(call, source, rows)
        boundaries = SequenceBoundaries.from_kwargs(metadata, total_length)
        if position_ids is not None and may_read(position_ids):
            text_row = text_position_ids(position_ids)
            if text_row is not None and text_row.shape[-1] == total_length:
                boundaries.check_same(SequenceBoundaries.from_position_ids(text_row[:1]), "position_ids")
    else:
        text_row = text_position_ids(position_ids) if inferred else None
        if text_row is None or text_row.shape[-1] != total_length:
            return None
        if bool((text_row.diff() == 1).all()):
            return None
        source = "position_ids that restart"
        _check_one_row(call, source, rows)
        boundaries = SequenceBoundaries.from_position_ids(text_row).with_padding(metadata["padding_tokens"])
    for name, value, fix in (
        ("attention_mask", attention_mask, "Leave attention_mask out: the boundaries say all that a mask could."),
        ("past_key_values", past_key_values, "Run packed rows without a cache, or decode the documents one by one."),
        ("use_cache=True", use_cache or None, "Leave use_cache out or set it to False."),
    ):
        if value is not None:
            raise input_error(f"a packed row ({source}) without {name}", name, fix)
    return boundaries if is_torchdynamo_compiling() else boundaries.to(tokens.device, non_blocking=True)


def is_causal(config: Any, kwargs: dict[str, Any]) -> bool:
    """Whether attention looks back only: as the argument of forward says, else the configuration."""
    said = kwargs.get("is_causal"), getattr(config, "is_causal", None)
    return bool(next((value for value in said if value is not None), True))


def check_causal(call: str, config: Any, kwargs: dict[str, Any]) -> None:
    """Raise unless attention is causal, as that of packed rows is."""
    if not is_causal(config, kwargs):
        raise input_error(
            "causal attention for a packed row",
            "is_causal=False",
            "Leave is_causal out, also of the configuration, or use a padded batch.",
        )


def mask_targets_across_documents(
    boundaries: SequenceBoundaries, labels: torch.Tensor | None, kwargs: dict[str, Any]
) -> torch.Tensor | None:
    """`labels` `[1, T]` without targets that would make one document's last token predict the next one's first.

    The same is done to `shift_labels` in `kwargs`, whose targets stand one token earlier. A document alone has no
    target for its first token either, so its own loss is untouched. A part of a row has to come with `shift_labels`, as the
    target of its last token stands elsewhere; who cut them saw to what is done here.
    """
    if boundaries.is_shard:
        if labels is not None and kwargs.get("shift_labels") is None:
            raise input_error(
                "shift_labels beside labels for a part of a row",
                "labels alone",
                "Cut the batch with transformers_packed.parallel.shard_batch.",
            )
        return labels
    if labels is not None:
        starts = boundaries.cu_seqlens[:-1].long()
        labels = labels.index_fill(1, starts.to(labels.device), -100)
    shift_labels = kwargs.get("shift_labels")
    if shift_labels is not None:
        ends = boundaries.cu_seqlens[1:].long() - 1
        kwargs["shift_labels"] = shift_labels.index_fill(1, ends.to(shift_labels.device), -100)
    return labels


def without_packing(kwargs: dict[str, Any]) -> dict[str, Any]:
    """`kwargs` for a vision tower: document boundaries would be taken for image boundaries there."""
    return {name: value for name, value in kwargs.items() if name not in _NOT_FOR_VISION}


def _check_one_row(call: str, source: str, rows: int) -> None:
    if rows != 1:
        raise input_error(
            f"one packed row (batch size 1) beside {source}",
            f"batch size {rows}",
            "Flatten the batch to one row, or pass an attention_mask if the rows are padded.",
        )
