"""From the arguments of a model's forward to one [`SequenceBoundaries`], or to `None` when the input is not packed.

Explicit metadata (`seq_idx`, `cu_seqlens`, `cu_seq_lens_q`, `cu_seq_lens_k`) always means a packed row; any one of them
is enough. Without it a row is packed when `position_ids` restart and there is neither a mask nor a cache. The checks
read shapes, dtypes and host copies; contents of tensors on a device are compared only where they are on the CPU
anyway, or when the environment variable `TRANSFORMERS_PACKED_VALIDATE=1` allows a synchronisation.
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


# How a forward may call its cache.
CACHES = ("past_key_values", "cache_params", "state")
_NOT_FOR_VISION = {*PACKING_KEYWORDS, "boundaries", "packs_padding", "num_items_in_batch", "shift_labels"}


def resolve_boundaries(inputs: dict[str, Any]) -> SequenceBoundaries | None:
    """Decide once, at the top of a model, whether its input is a packed row and where its documents are.

    `inputs` are the arguments of a model's forward. The packing keywords are taken out, so that a row that is not packed
    leaves no trace of them. Boundaries on the host, which save a wait for the device, go to where the tokens are.

    Raises:
        `ValueError`: the input is packed and has more than one row, an attention mask or a cache, or its metadata is
        malformed or contradictory.
    """
    given = inputs.pop("boundaries", None)
    metadata = {name: inputs.pop(name, None) for name in PACKING_KEYWORDS}
    metadata["padding_tokens"] = metadata["padding_tokens"] or None
    tokens = inputs.get("input_ids")
    tokens = inputs.get("inputs_embeds") if tokens is None else tokens
    if given is not None or tokens is None:
        return given if tokens is None else given.to(tokens.device, non_blocking=True)
    total_length = tokens.shape[1]
    position_ids, mask = inputs.get("position_ids"), inputs.get("attention_mask")
    caches = [name for name in CACHES if inputs.get(name) is not None]
    explicit = [name for name, value in metadata.items() if value is not None]
    # A compiled graph cannot branch on what position_ids hold: there, packing needs explicit metadata.
    inferred = position_ids is not None and mask is None and not caches and not is_torchdynamo_compiling()
    text_row = None if position_ids is None else text_position_ids(position_ids)
    if text_row is not None and text_row.shape[-1] != total_length:
        text_row = None
    # The collator's default has positions alone, and a number beside them when some of the row is padding.
    if explicit and not (inferred and explicit == ["padding_tokens"]):
        source = " and ".join(explicit)
        _check_one_row(source, tokens)
        boundaries = SequenceBoundaries.from_kwargs(metadata, total_length)
        if text_row is not None and may_read(position_ids):
            boundaries.check_same(SequenceBoundaries.from_position_ids(text_row[:1]), "position_ids")
    elif not inferred or text_row is None or bool((text_row.diff() == 1).all()):
        return None
    else:
        source = "position_ids that restart"
        _check_one_row(source, tokens)
        boundaries = SequenceBoundaries.from_position_ids(text_row).with_padding(metadata["padding_tokens"])
    refused = caches if mask is None else ["attention_mask", *caches]
    if refused or inputs.get("use_cache"):
        got = (refused or ["use_cache=True"])[0]
        raise input_error(
            f"a packed row ({source}) without {got}", got, "Leave it out: a packed row needs no mask and has no cache."
        )
    return boundaries if is_torchdynamo_compiling() else boundaries.to(tokens.device, non_blocking=True)


def named_arguments(names: list[str], args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name; `names` are those that may be given by position."""
    twice = [name for name in names[: len(args)] if name in kwargs]
    if twice or len(args) > len(names):
        raise TypeError(f"forward() got {f'two values for {twice[0]}' if twice else f'{len(args)} arguments'}")
    return {**dict(zip(names, args, strict=False)), **kwargs}


def forward_like(builtin: Callable, run: Callable[[Any, dict], Any], added: Iterable[Parameter] = ()) -> Callable:
    """A forward with the signature of `builtin`, a forward too, that calls `run(self, inputs)`.

    Trainer drops the columns of a dataset that a signature does not name, so it is kept. Parameters `added`, keywords
    that the built-in does not name, come last.
    """
    signature = inspect.signature(builtin)
    rest = [p for p in signature.parameters.values() if p.kind is Parameter.VAR_KEYWORD]
    parameters = [p for p in signature.parameters.values() if p not in rest]
    names = [p.name for p in parameters[1:]]
    added = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in added if p.name not in signature.parameters]

    @wraps(builtin, updated=())
    def inner(self, *args, **kwargs):
        return run(self, named_arguments(names, args, kwargs))

    # accelerate looks for the forward below its wrappers by `__wrapped__`: that of the built-in must not be found.
    del inner.__wrapped__
    # Annotations that are strings mean names of the built-in's module.
    with suppress(NameError):
        inner.__annotations__ = get_type_hints(builtin)
    inner.__signature__ = signature.replace(parameters=[*parameters, *added, *rest])

    # Hooks copy the attributes of a bound forward, of which a signature that names `self` must not be one.
    @wraps(inner, updated=())
    def forward(self, *args, **kwargs):
        return inner(self, *args, **kwargs)

    return forward


def with_boundaries(cls: type, builtin: type) -> Callable:
    """The forward of `cls`: that of `builtin`, with boundaries in the place of the packing keywords.

    It calls `forward_with_boundaries(boundaries, **inputs)` of `cls`, whose keyword arguments are added to its own.
    """

    def run(model: Any, inputs: dict[str, Any]) -> Any:
        boundaries = resolve_boundaries(inputs)
        return model.forward_with_boundaries(boundaries, **inputs)

    parameters = inspect.signature(cls.forward_with_boundaries).parameters.values()
    return forward_like(builtin.forward, run, [p for p in parameters if p.kind is Parameter.KEYWORD_ONLY])


def is_causal(config: Any, kwargs: dict[str, Any]) -> bool:
    """Whether attention looks back only: as the argument of forward says, else the configuration."""
    said = kwargs.get("is_causal"), getattr(config, "is_causal", None)
    return bool(next((value for value in said if value is not None), True))


def check_causal(config: Any, kwargs: dict[str, Any]) -> None:
    """Raise unless attention is causal, as that of packed rows is."""
    if not is_causal(config, kwargs):
        raise input_error("causal attention for a packed row", "is_causal=False", "Use a padded batch.")


def mask_targets_across_documents(
    boundaries: SequenceBoundaries, labels: torch.Tensor | None, kwargs: dict[str, Any]
) -> torch.Tensor | None:
    """`labels` `[1, T]` without targets that would make one document's last token predict the next one's first.

    The same is done to `shift_labels` in `kwargs`, whose targets stand one token earlier. A document alone has no
    target for its first token either, so its own loss is untouched. A part of a row has to come with `shift_labels`: the
    target of its last token is in another part, and whoever cut the row has masked them already.
    """
    if boundaries.is_shard:
        if labels is not None and kwargs.get("shift_labels") is None:
            fix = "Cut the batch with transformers_packed.parallel.shard_batch."
            raise input_error("shift_labels beside labels for a part of a row", "labels alone", fix)
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


def _check_one_row(source: str, tokens: torch.Tensor) -> None:
    if len(tokens) != 1:
        fix = "Flatten the batch to one row, or pass an attention_mask if the rows are padded."
        raise input_error(f"one packed row (batch size 1) beside {source}", f"batch size {len(tokens)}", fix)
