"""Resolve the arguments of a model's forward to one [`SequenceBoundaries`], or to `None` if the input is not packed.

Explicit metadata (`seq_idx`, `cu_seqlens`, `cu_seq_lens_q` or `cu_seq_lens_k`) always marks a packed row, unless it
describes a single document that has a mask. Without metadata, a row is packed if its `position_ids` restart and the call
has neither a mask nor a cache. The checks read shapes, dtypes and host copies. They compare the values of tensors on a
device only if the environment variable `TRANSFORMERS_PACKED_VALIDATE=1` allows a host sync.
"""

import inspect
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import wraps
from inspect import Parameter
from typing import Any, get_type_hints

import torch
from transformers.utils import TransformersKwargs
from transformers.utils.import_utils import is_torchdynamo_compiling

from ..boundaries import PACKING_KEYWORDS, SequenceBoundaries, may_read, text_position_ids
from ..errors import input_error
from ..shared_prompts import SharedPrompts
from .releases import CACHES


class PackingKwargs(TransformersKwargs, total=False):
    """Keyword arguments of a packed forward, from Transformers (`seq_idx`, `cu_seq_lens_q`, ...) and this package.

    Attributes:
        cu_seqlens (`torch.IntTensor` of shape `[N+1]`, *optional*):
            Cumulative sequence lengths, flash-linear-attention's name for `cu_seq_lens_q`.
        padding_tokens (`int`, *optional*):
            The length of the row's last document if that document is padding. Router statistics exclude it.
        boundaries ([`SequenceBoundaries`], *optional*):
            The boundaries with a host copy, as models pass them to their layers.
        prompt_of (`torch.LongTensor` of shape `[N]`, *optional*):
            For each document, the index of the document that it continues, or -1 ([`SharedPrompts`]).
        packs_padding (`bool`, *optional*):
            Whether this call computes only the real tokens of a padded batch. Defaults to the model's attribute.
    """

    cu_seqlens: torch.IntTensor | None
    padding_tokens: int | None
    boundaries: SequenceBoundaries | None
    prompt_of: torch.LongTensor | None
    packs_padding: bool | None


_RESTART = "position_ids that restart"
_NOT_FOR_VISION = {*PACKING_KEYWORDS, "boundaries", "packs_padding", "num_items_in_batch", "shift_labels"}


def resolve_boundaries(inputs: dict[str, Any]) -> SequenceBoundaries | None:
    """Detect at the top of a model whether its input is a packed row, and locate its documents.

    `inputs` are the arguments of a model's forward. The packing keywords are removed from them. Boundaries on the host
    avoid a host sync; they are copied to the device of the tokens.

    Raises:
        `ValueError`: the input is packed and has more than one row, an attention mask or a cache, or its metadata is
            malformed or contradictory.
    """
    given = inputs.pop("boundaries", None)
    metadata = {name: inputs.pop(name, None) for name in PACKING_KEYWORDS}
    metadata["padding_tokens"] = metadata["padding_tokens"] or None
    prompt_of = metadata.pop("prompt_of")
    tokens = tokens_of(inputs)
    if tokens is None:
        return given
    total_length = tokens.shape[1]
    position_ids, mask = inputs.get("position_ids"), inputs.get("attention_mask")
    caches = [name for name in CACHES if inputs.get(name) is not None]
    explicit = [name for name, value in metadata.items() if value is not None]
    inferred = position_ids is not None and mask is None and not caches and may_infer(tokens)
    text_row = None if position_ids is None else text_position_ids(position_ids)
    if text_row is not None and text_row.shape[-1] != total_length:
        text_row = None
    # By default the collator returns position ids alone, plus padding_tokens if the row ends with padding.
    if given is not None:
        source, boundaries = "boundaries", given
        if not is_torchdynamo_compiling():
            _check_one_row(source, tokens)
            boundaries.check_length(total_length)
            _check_agrees(boundaries, {name: metadata[name] for name in explicit})
        if metadata["padding_tokens"] and not boundaries.padding_tokens:
            boundaries = boundaries.with_padding(metadata["padding_tokens"])
    elif explicit and not (inferred and explicit == ["padding_tokens"]):
        source = " and ".join(explicit)
        _check_one_row(source, tokens)
        boundaries = SequenceBoundaries.from_kwargs(metadata, total_length)
        if mask is not None and prompt_of is None and boundaries.num_documents == 1:
            # ms-swift describes a padded batch of one row in this way. The mask also excludes padding.
            return None
    elif prompt_of is not None:
        raise input_error("cu_seqlens together with prompt_of", "no document boundaries", "Pass the batch unchanged.")
    elif not inferred or text_row is None or (boundaries := _inferred(text_row, tokens)) is None:
        return None
    else:
        source, boundaries = _RESTART, boundaries.with_padding(metadata["padding_tokens"])
    if prompt_of is not None and not boundaries.shares_prompts:
        boundaries = SharedPrompts.of(boundaries, prompt_of)
    elif explicit and not boundaries.shares_prompts and text_row is not None and may_read(position_ids):
        boundaries.check_same(SequenceBoundaries.from_position_ids(text_row[:1]), "position_ids")
    refused = caches if mask is None else ["attention_mask", *caches]
    if refused or inputs.get("use_cache"):
        got = (refused or ["use_cache=True"])[0]
        raise input_error(
            f"a packed row ({source}) without {got}", got, "Remove it: packed rows need no mask and support no cache."
        )
    made_in_graph = given is None and is_torchdynamo_compiling()
    return boundaries if made_in_graph else boundaries.to(tokens.device, non_blocking=True)


def tokens_of(inputs: dict[str, Any]) -> torch.Tensor | None:
    """The tokens `[B, T]` among a forward's arguments, or else their embeddings `[B, T, hidden]`."""
    tokens = inputs.get("input_ids")
    return inputs.get("inputs_embeds") if tokens is None else tokens


def may_infer(tokens: torch.Tensor) -> bool:
    """Whether position ids may be read for boundaries. An exported graph is the same for all of their values.

    Several rows are an error in eager mode. In a compiled graph, they are not worth a break.
    """
    return not torch.compiler.is_exporting() and (not is_torchdynamo_compiling() or len(tokens) == 1)


def _inferred(text_row: torch.Tensor, tokens: torch.Tensor) -> SequenceBoundaries | None:
    """The boundaries where position ids restart, or `None` if none does."""
    if is_torchdynamo_compiling():
        # A compiled graph cannot branch on the values of a tensor. A late import: it imports torch's compiler.
        from ..ops.dispatch import outside_of_graphs

        return outside_of_graphs(_inferred, text_row, tokens)
    if bool((text_row.diff() == 1).all()):
        return None
    _check_one_row(_RESTART, tokens)
    return SequenceBoundaries.from_position_ids(text_row)


def _check_agrees(boundaries: SequenceBoundaries, metadata: dict[str, Any]) -> None:
    """Raise a `ValueError` if packing keywords describe other documents than the boundaries beside them."""
    described = {name: x for name, x in metadata.items() if name.startswith("cu_") or name == "seq_idx"}
    if described and all(may_read(x) for x in described.values()):
        other = SequenceBoundaries.from_kwargs(described, boundaries.total_length)
        boundaries.check_same(other, " and ".join(described))
        return
    for name in described.keys() - {"seq_idx"}:
        if (documents := described[name].numel() - 1) != boundaries.num_documents:
            expected = f"{name} with the {boundaries.num_documents} documents of boundaries"
            raise input_error(expected, f"{documents} documents", "Leave one of them out.")


def named_arguments(names: list[str], args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Map the arguments of a call to their names. `names` lists the arguments that may be positional."""
    twice = [name for name in names[: len(args)] if name in kwargs]
    if twice or len(args) > len(names):
        raise TypeError(f"forward() got {f'two values for {twice[0]}' if twice else f'{len(args)} arguments'}")
    return {**dict(zip(names, args, strict=False)), **kwargs}


def forward_like(builtin: Callable, run: Callable[[Any, dict], Any], added: Iterable[Parameter] = ()) -> Callable:
    """Create a forward that has the signature of the forward `builtin` and calls `run(self, inputs)`.

    The signature matters because Trainer drops the dataset columns that it does not name. The keyword-only parameters
    in `added` come last, except those that `builtin` already names.
    """
    signature = inspect.signature(builtin)
    rest = [p for p in signature.parameters.values() if p.kind is Parameter.VAR_KEYWORD]
    parameters = [p for p in signature.parameters.values() if p not in rest]
    names = [p.name for p in parameters[1:]]
    added = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in added if p.name not in signature.parameters]

    @wraps(builtin, updated=())
    def inner(self, *args, **kwargs):
        return run(self, named_arguments(names, args, kwargs))

    # accelerate unwraps a forward by following `__wrapped__`, which must not lead to the stock forward.
    del inner.__wrapped__
    # String annotations refer to names in the stock module.
    with suppress(NameError):
        inner.__annotations__ = get_type_hints(builtin)
    inner.__signature__ = signature.replace(parameters=[*parameters, *added, *rest])

    # Hooks copy the attributes of a bound forward. These must not include a signature with `self`.
    @wraps(inner, updated=())
    def forward(self, *args, **kwargs):
        return inner(self, *args, **kwargs)

    return forward


def with_boundaries(cls: type, builtin: type) -> Callable:
    """Create the forward of `cls`: like that of `builtin`, with boundaries in place of the packing keywords.

    It calls `forward_with_boundaries(boundaries, **inputs)` of `cls`. Its signature includes the keyword-only
    parameters of that method.
    """

    def run(model: Any, inputs: dict[str, Any]) -> Any:
        boundaries = resolve_boundaries(inputs)
        return model.forward_with_boundaries(boundaries, **inputs)

    parameters = inspect.signature(cls.forward_with_boundaries).parameters.values()
    return forward_like(builtin.forward, run, [p for p in parameters if p.kind is Parameter.KEYWORD_ONLY])


def is_causal(config: Any, kwargs: dict[str, Any]) -> bool:
    """Whether attention is causal, according to forward's argument or else the configuration."""
    said = kwargs.get("is_causal"), getattr(config, "is_causal", None)
    return bool(next((value for value in said if value is not None), True))


def check_causal(config: Any, kwargs: dict[str, Any]) -> None:
    """Raise a `ValueError` unless attention is causal, as packed rows require."""
    if not is_causal(config, kwargs):
        raise input_error("causal attention for a packed row", "is_causal=False", "Use a padded batch.")


def mask_targets_across_documents(
    boundaries: SequenceBoundaries,
    labels: torch.Tensor | None,
    kwargs: dict[str, Any],
    logits_to_keep: int | torch.Tensor = 0,
) -> torch.Tensor | None:
    """Mask the targets in `labels` `[1, T]` that make a document's last token predict the next document's first token.

    `shift_labels` in `kwargs`, whose targets are one token earlier, is masked in the same way. The loss of each
    document is unchanged, because a separate document has no target for its first token either. A shard of a row
    requires `shift_labels`, which `shard_batch` has masked, because the target of its last token is in another shard.
    With `logits_to_keep`, both have one entry for each token whose logits are kept.
    """
    if boundaries.is_shard:
        if labels is not None and kwargs.get("shift_labels") is None:
            fix = "Cut the batch with transformers_packed.parallel.shard_batch."
            raise input_error("shift_labels in addition to labels for a shard of a row", "labels alone", fix)
        return labels
    shift_labels = kwargs.get("shift_labels")
    if isinstance(logits_to_keep, int) and not logits_to_keep:
        if labels is not None:
            starts = boundaries.cu_seqlens[:-1].long()
            labels = labels.index_fill(1, starts.to(labels.device), -100)
        if shift_labels is not None:
            ends = boundaries.cu_seqlens[1:].long() - 1
            kwargs["shift_labels"] = shift_labels.index_fill(1, ends.to(shift_labels.device), -100)
        return labels
    ends = torch.zeros(boundaries.total_length, dtype=torch.bool, device=boundaries.cu_seqlens.device)
    ends[boundaries.cu_seqlens[1:].long() - 1] = True
    ends = ends[None, kept_tokens(logits_to_keep)]
    for name, targets in (("labels", labels), ("shift_labels", shift_labels)):
        if targets is not None and targets.shape != ends.shape:
            expected = f"{name} of shape {tuple(ends.shape)}, one for each token that logits_to_keep keeps"
            raise input_error(expected, tuple(targets.shape), f"Index {name} like the logits.")
    if shift_labels is not None:
        kwargs["shift_labels"] = shift_labels.masked_fill(ends.to(shift_labels.device), -100)
    # A label is the target of the kept token before it.
    return labels if labels is None else labels.masked_fill(ends.roll(1, dims=1).to(labels.device), -100)


def kept_tokens(logits_to_keep: int | torch.Tensor) -> slice | torch.Tensor:
    """Return the index of the tokens for which a model computes logits, as Transformers reads `logits_to_keep`."""
    return slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep


def without_packing(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Remove document boundaries from `kwargs` for a vision tower, which would read them as image boundaries."""
    return {name: value for name, value in kwargs.items() if name not in _NOT_FOR_VISION}


def _check_one_row(source: str, tokens: torch.Tensor) -> None:
    if len(tokens) != 1:
        fix = "Flatten the batch to one row, or pass an attention_mask if the rows are padded."
        raise input_error(f"one packed row (batch size 1) with {source}", f"batch size {len(tokens)}", fix)
