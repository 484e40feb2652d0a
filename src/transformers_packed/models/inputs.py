"""Resolve the arguments of a model's forward to one [`SequenceBoundaries`], or to `None` if the input is not packed.

Explicit metadata (`seq_idx`, `cu_seqlens`, `cu_seq_lens_q` or `cu_seq_lens_k`) always marks a packed row, unless it
describes a single document that has a mask. Without metadata and without a cache, a row is packed if it has a 4-D mask
with several causal blocks, or if its `position_ids` restart and it has no mask. The checks read shapes, dtypes and host
copies. They compare the values of metadata on a device only if the environment variable
`TRANSFORMERS_PACKED_VALIDATE=1` allows a host sync.
"""

import inspect
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import wraps
from inspect import Parameter
from typing import Any, get_type_hints

import torch
import torch.nn.functional as F
from transformers.utils import TransformersKwargs, logging
from transformers.utils.import_utils import is_torchdynamo_compiling

from ..boundaries import PACKING_KEYWORDS, SequenceBoundaries, may_read
from ..boundary_checks import check_total, position_rows, restarts_in
from ..errors import input_error
from ..foreign import is_exporting
from ..shared_prompts import SharedPrompts
from .masks import is_padding, read_documents, read_padding, restarts_with
from .versions import CACHES, outside, with_signature


logger = logging.get_logger(__name__)


class PackingKwargs(TransformersKwargs, total=False):
    """Keyword arguments of a packed forward, from Transformers (`seq_idx`, `cu_seq_lens_q`, ...) and this package.

    Attributes:
        cu_seqlens (`torch.IntTensor` of shape `[N+1]`, *optional*):
            Cumulative sequence lengths, flash-linear-attention's name for `cu_seq_lens_q`.
        padding_tokens (`int`, *optional*):
            The length of the row's last document if that document is padding. Router statistics exclude it.
        boundaries ([`SequenceBoundaries`], *optional*):
            The boundaries with a host copy, as models pass them to their layers.
        parent_of (`torch.LongTensor` of shape `[N]`, *optional*):
            For each document, the index of the earlier document that it continues, or -1 ([`SharedPrompts`]).
        trunk_row (`TrunkRow`, *optional*):
            What the text model fills for losses that read more of it than its output.
        packs_padding (`bool`, *optional*):
            Whether this call computes only the real tokens of a padded batch. Defaults to the model's attribute.
        settled (`bool`, *optional*):
            Whether an enclosing model has settled what this call is. It is packed if there are `boundaries`.
    """

    cu_seqlens: torch.IntTensor | None
    padding_tokens: int | None
    boundaries: SequenceBoundaries | None
    parent_of: torch.LongTensor | None
    trunk_row: Any
    packs_padding: bool | None
    settled: bool | None


_RESTART = "position_ids that restart"
_OF_MODELS = {"boundaries", "settled", "packs_padding", "trunk_row"}
_NOT_FOR_VISION = {*PACKING_KEYWORDS, *_OF_MODELS, "num_items_in_batch", "shift_labels"}


def resolve_boundaries(
    inputs: dict[str, Any], *, mixes: bool = True, reads_patterns: bool = True
) -> SequenceBoundaries | None:
    """Say at the top of a model what a call is: a packed row with these boundaries, or `None`.

    `inputs` are the arguments of a model's forward. The packing keywords are removed from them, and a 4-D mask becomes
    boundaries or a padding mask. With `None`, the batch is padded if an `attention_mask` is left, else not. Boundaries
    on the host avoid a host sync; they are copied to the device of the tokens. A model inside of another one gets what
    that one has settled.

    Args:
        inputs (`dict`):
            The arguments, which are changed in place.
        mixes (`bool`, *optional*, defaults to `True`):
            Whether layers mix tokens without regard to a mask for attention, which is then an error if it is no block
            for each document.
        reads_patterns (`bool`, *optional*, defaults to `True`):
            Whether a mask for attention is the user's and that of these tokens. Otherwise it stays as it is.

    Raises:
        `ValueError`: the input is packed and has more than one row, an attention mask or a cache, its metadata is
            malformed or contradictory, or its mask is neither boundaries nor padding.
    """
    given = inputs.pop("boundaries", None)
    if inputs.pop("settled", False):
        return given
    metadata = {name: x for name in PACKING_KEYWORDS if (x := inputs.pop(name, None)) is not None}
    parent_of, padding = (metadata.pop(name, None) for name in ("parent_of", "padding_tokens"))
    metadata |= {"padding_tokens": padding} if padding else {}
    tokens = tokens_of(inputs)
    if tokens is None:
        return given
    if is_padding(inputs.get("attention_mask")):
        # The stock forward would take the numbers of several documents for one document.
        read_padding(inputs["attention_mask"])
    source = " and ".join(metadata) if given is None else "boundaries"
    boundaries = _described(given, metadata, parent_of, inputs, tokens)
    if boundaries is None and reads_patterns and holds_pattern(inputs):
        source, boundaries = "attention_mask", _of_pattern(inputs, tokens, mixes)
    elif boundaries is None:
        source, boundaries = _RESTART, _inferred(inputs, tokens, padding)
    if boundaries is None:
        return None
    _check_beside(source, inputs)
    if parent_of is not None and not isinstance(boundaries, SharedPrompts):
        boundaries = SharedPrompts.of(boundaries, parent_of)
    made_in_graph = given is None and is_torchdynamo_compiling()
    return boundaries if made_in_graph else boundaries.to(tokens.device, non_blocking=True)


def _described(given, metadata: dict, parent_of, inputs: dict[str, Any], tokens) -> SequenceBoundaries | None:
    """The boundaries of explicit metadata, if there is any."""
    if given is not None:
        if not is_torchdynamo_compiling():
            _check_one_row("boundaries", tokens)
            check_total(given.total_length, tokens.shape[1], "Change the batch's `boundaries` with its tokens.")
            _check_agrees(given, metadata)
            _check_parents(given, parent_of)
            if metadata and not isinstance(given, SharedPrompts):
                _check_positions(given, inputs, tokens)
        return given if given.padding_tokens else given.with_padding(metadata.get("padding_tokens"))
    # By default the collator returns position ids alone, plus padding_tokens if the row ends with padding.
    by_positions = metadata.keys() == {"padding_tokens"} and _readable_rows(inputs, tokens) is not None
    if not metadata or by_positions:
        if parent_of is not None:
            fix = "Pass the batch unchanged."
            raise input_error("cu_seqlens together with parent_of", "no document boundaries", fix)
        return None
    _check_one_row(" and ".join(metadata), tokens)
    boundaries = SequenceBoundaries.from_kwargs(metadata, tokens.shape[1])
    # ms-swift describes a padded batch of one row as one document. The mask also excludes padding.
    assert boundaries is not None
    if boundaries.num_documents == 1 and inputs.get("attention_mask") is not None and parent_of is None:
        return None
    if inputs.get("position_ids") is not None and parent_of is None:
        _check_positions(boundaries, inputs, tokens)
    return boundaries


def _readable_rows(inputs: dict[str, Any], tokens: torch.Tensor) -> torch.Tensor | None:
    """The position ids `[R, B, T]`, if documents start where they restart."""
    if any(inputs.get(name) is not None for name in ("attention_mask", *CACHES)) or not may_infer(tokens):
        return None
    return position_rows(inputs.get("position_ids"), tokens.shape[1])


def _check_positions(boundaries: SequenceBoundaries, inputs: dict[str, Any], tokens: torch.Tensor) -> None:
    """Raise a `ValueError` if there are position ids of other documents."""
    rows = position_rows(inputs.get("position_ids"), tokens.shape[1])
    if rows is None or not may_read(rows):
        return
    starts, complete = restarts_in(rows[:, :1].to("cpu"))
    if not complete:
        # Those of images tell some of the documents. The others are no contradiction.
        starts |= boundaries.seq_idx.to("cpu").diff() != 0
    boundaries.check_same(SequenceBoundaries.from_seq_idx(F.pad(starts, (1, 0)).cumsum(1)), "position_ids")


def _check_beside(source: str, inputs: dict[str, Any]) -> None:
    """Raise a `ValueError` if a packed row has a mask or a cache."""
    refused = [name for name in ("attention_mask", *CACHES) if inputs.get(name) is not None]
    if refused or inputs.get("use_cache"):
        got = (refused or ["use_cache=True"])[0]
        raise input_error(
            f"a packed row ({source}) without {got}", got, "Remove it: packed rows need no mask and support no cache."
        )


def may_be_packed(inputs: dict[str, Any], reads_patterns: bool = True) -> bool:
    """Whether a forward's arguments may describe a packed row. Reads no values, and can be traced."""
    for name in (*PACKING_KEYWORDS, "boundaries"):
        if inputs.get(name) is not None:
            return True
    mask, tokens = inputs.get("attention_mask"), tokens_of(inputs)
    if mask is None and tokens is not None and all(inputs.get(name) is None for name in CACHES):
        return inputs.get("position_ids") is not None and may_infer(tokens)
    # Masks of padding are read outside of graphs, because they may number documents.
    return mask is not None and (not is_torchdynamo_compiling() or (reads_patterns and holds_pattern(inputs)))


def holds_pattern(inputs: dict[str, Any]) -> bool:
    """Whether a call has a mask for attention, not for padding. With a cache, `generate` creates such masks."""
    mask = inputs.get("attention_mask")
    return mask is not None and not is_padding(mask) and all(inputs.get(name) is None for name in CACHES)


def _of_pattern(inputs: dict[str, Any], tokens: torch.Tensor, mixes: bool) -> SequenceBoundaries | None:
    """The boundaries in a mask for attention, or `None` if no row has several documents.

    The mask is removed or becomes one of padding. Position ids that count over all documents are removed too.
    """
    rows, length = tokens.shape[:2]
    found = read_documents(inputs["attention_mask"], rows, length, mixes)
    if found is None:
        return None
    real, boundaries = found
    inputs["attention_mask"] = None if boundaries or real.all() else real.long().to(tokens.device)
    position_ids = position_rows(inputs.get("position_ids"), tokens.shape[1])
    if boundaries and position_ids is not None and not restarts_with(boundaries, real, position_ids):
        inputs["position_ids"] = None
    return boundaries


def tokens_of(inputs: dict[str, Any]) -> torch.Tensor | None:
    """The tokens `[B, T]` among a forward's arguments, or else their embeddings `[B, T, hidden]`."""
    tokens = inputs.get("input_ids")
    return inputs.get("inputs_embeds") if tokens is None else tokens


def may_infer(tokens: torch.Tensor) -> bool:
    """Whether position ids may be read for boundaries. An exported graph is the same for all of their values.

    Several rows are an error in eager mode. In a compiled graph, they are not worth a break.
    """
    return not is_exporting() and (not is_torchdynamo_compiling() or len(tokens) == 1)


def _inferred(inputs: dict[str, Any], tokens: torch.Tensor, padding: int | None) -> SequenceBoundaries | None:
    """The boundaries where position ids restart, or `None` if none does."""
    rows = _readable_rows(inputs, tokens)
    boundaries = None if rows is None else _of_positions(inputs, rows, tokens)
    return boundaries and boundaries.with_padding(padding)


def _of_positions(inputs: dict[str, Any], rows: torch.Tensor, tokens: torch.Tensor) -> SequenceBoundaries | None:
    """The boundaries in position ids `[R, B, T]`. Those of text become one row, which every model takes."""
    rows = rows.to("cpu")
    if not bool(restarts_in(rows)[0].any()):
        return None
    _check_one_row(_RESTART, tokens)
    boundaries = SequenceBoundaries.from_position_ids(rows)
    if inputs["position_ids"].ndim != 2 and bool((rows[-3:] == rows[-1]).all()):
        inputs["position_ids"] = boundaries.to(tokens.device).position_ids
    return boundaries


def _check_agrees(boundaries: SequenceBoundaries, metadata: dict[str, Any]) -> None:
    """Raise a `ValueError` if packing keywords describe other documents than the boundaries beside them."""
    described = {name: x for name, x in metadata.items() if name.startswith("cu_") or name == "seq_idx"}
    if described and all(may_read(x) for x in described.values()):
        other = SequenceBoundaries.from_kwargs(described, boundaries.total_length)
        assert other is not None
        boundaries.check_same(other, " and ".join(described))
        return
    for name in described.keys() - {"seq_idx"}:
        if (documents := described[name].numel() - 1) != boundaries.num_documents:
            expected = f"{name} with the {boundaries.num_documents} documents of boundaries"
            raise input_error(expected, f"{documents} documents", "Leave one of them out.")


def _check_parents(boundaries: SequenceBoundaries, parent_of: Any) -> None:
    """Raise a `ValueError` if `parent_of` beside the boundaries says what they do not."""
    if parent_of is None or type(boundaries) is SequenceBoundaries:
        return
    if not isinstance(boundaries, SharedPrompts):
        boundaries.check_kind("parent_of beside boundaries")
    elif (other := SharedPrompts.of(boundaries, parent_of).parent_of) != boundaries.parent_of:
        expected = f"parent_of as in boundaries: {list(boundaries.parent_of)}"
        raise input_error(expected, list(other), "Leave one of them out.")


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
    return with_signature(inner, signature.replace(parameters=[*parameters, *added, *rest]))


def with_boundaries(cls: Any, builtin: Any) -> Callable:
    """Create the forward of `cls`: like that of `builtin`, with boundaries in place of the packing keywords.

    It calls `forward_with_boundaries(boundaries, **inputs)` of `cls`. Its signature includes the keyword-only
    parameters of that method.
    """

    def run(model: Any, inputs: dict[str, Any]) -> Any:
        traced = torch.compiler.is_dynamo_compiling() and not is_exporting()
        if traced and _trains_or_packs(model, inputs):
            return outside(run, model, inputs)
        boundaries = resolve_boundaries(inputs)
        return model.forward_with_boundaries(boundaries, settled=True, **inputs)

    parameters = inspect.signature(cls.forward_with_boundaries).parameters.values()
    return forward_like(builtin.forward, run, [p for p in parameters if p.kind is Parameter.KEYWORD_ONLY])


def _trains_or_packs(model: Any, inputs: dict[str, Any]) -> bool:
    """Whether a call trains the model, or may be a packed row or a padded batch that becomes one. Reads no values."""
    if model.training or inputs.get("boundaries") is not None:
        return True
    if inputs.get("settled"):
        return False
    allowed, cached = inputs.get("packs_padding"), any(inputs.get(name) is not None for name in CACHES)
    packs_padding = (model.packs_padding if allowed is None else allowed) and not cached
    return may_be_packed(inputs) or (packs_padding and inputs.get("attention_mask") is not None)


def is_causal(config: Any, kwargs: dict[str, Any]) -> bool:
    """Whether attention is causal, according to forward's argument or else the configuration."""
    said = kwargs.get("is_causal"), getattr(config, "is_causal", None)
    return bool(next((value for value in said if value is not None), True))


def check_config(config: Any, kwargs: dict[str, Any]) -> None:
    """Raise a `ValueError` unless attention is causal, as packed rows require. Warn if RoPE depends on the row."""
    if not is_causal(config, kwargs):
        raise input_error("causal attention for a packed row", "is_causal=False", "Use a padded batch.")
    warn_of_rope(config)


def warn_of_rope(config: Any) -> None:
    """Warn once of a configuration whose rotary embeddings depend on the longest document of a row."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    kinds = {x.get("rope_type") for x in (parameters, *parameters.values()) if isinstance(x, dict)}
    for kind in kinds & {"dynamic", "longrope"}:
        logger.warning_once(
            f'rope_type="{kind}" takes its frequencies from the longest document of a row, so documents longer than '
            "the original context change the shorter ones beside them, as in a padded batch."
        )


def mask_targets_across_documents(
    boundaries: SequenceBoundaries,
    labels: torch.Tensor | None,
    kwargs: dict[str, Any],
    logits_to_keep: int | torch.Tensor = 0,
) -> Any:
    """Mask the targets in `labels` `[1, T]`, or `None`, that make a document's last token predict the next document's first token.

    `shift_labels` in `kwargs`, whose targets are one token earlier, is masked in the same way. It may have a target at
    the end of a document that others continue, which is the first token of all of these. The loss of each document is
    unchanged, because a separate document has no target for its first token either. A shard of a row requires
    `shift_labels`, which `shard_batch` has masked, because the target of its last token is in another shard. With
    `logits_to_keep`, both have one entry for each token whose logits are kept.
    """
    shift_labels = kwargs.get("shift_labels")
    if boundaries.has_masked_targets(labels, shift_labels):
        return labels
    if isinstance(logits_to_keep, int) and not logits_to_keep:
        # Reads neither a value nor the length of the row, as compiled graphs need.
        if labels is not None:
            labels = labels.index_fill(1, boundaries.cu_seqlens[:-1].long().to(labels.device), -100)
        if shift_labels is not None:
            ends = boundaries.final_tokens.to(shift_labels.device)
            kwargs["shift_labels"] = shift_labels.index_fill(1, ends, -100)
        return labels
    nowhere = torch.zeros(boundaries.total_length, dtype=torch.bool, device=boundaries.cu_seqlens.device)
    # An assignment would copy the value from the host and wait for the GPU.
    last, final = (
        nowhere.index_fill(0, ends, True)[None, kept_tokens(logits_to_keep)]
        for ends in (boundaries.ends, boundaries.final_tokens)
    )
    for name, targets in (("labels", labels), ("shift_labels", shift_labels)):
        if targets is not None and targets.shape != last.shape:
            expected = f"{name} of shape {tuple(last.shape)}, one for each token that logits_to_keep keeps"
            raise input_error(expected, tuple(targets.shape), f"Index {name} like the logits.")
    if shift_labels is not None:
        kwargs["shift_labels"] = shift_labels.masked_fill(final.to(shift_labels.device), -100)
    # A label is the target of the kept token before it.
    return labels if labels is None else labels.masked_fill(last.roll(1, dims=1).to(labels.device), -100)


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
