"""Images and videos in packed rows: M-RoPE position ids per document, and a check that no boundary cuts an image.

Qwen3.5 gives each token four positions: its index in the text, and time, height and width for vision tokens (M-RoPE).
All four restart in every document. Transformers' `get_rope_index` supports only padded batches, so this module unpacks
the documents into a padded batch and packs the result again.
"""

from collections.abc import Mapping
from functools import partial
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from ..boundaries import PART, TOKEN_TYPES, VISION_KINDS, SequenceBoundaries
from ..errors import input_error


# For each value of `mm_token_type_ids`: the kind of vision token and the argument with its grids.
_GRIDS = {token_type: (kind, grid) for kind, (token_type, _, grid) in VISION_KINDS.items()}


def packed_position_ids(config: Any, boundaries: SequenceBoundaries, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Compute the position ids of a packed row, with M-RoPE if it has images or videos.

    The computation runs on the host, so tensors on a device cause a host sync. Let the collator call this function.

    Args:
        config (`PreTrainedConfig`):
            A composite configuration, such as `Qwen3_5Config`.
        boundaries ([`SequenceBoundaries`]):
            The documents of the row.
        inputs (`Mapping`):
            The arguments of a forward: `input_ids` and `mm_token_type_ids` `[1, T]`, the latter 0 for text, 1 for image and
            2 for video tokens, and `image_grid_thw` and `video_grid_thw` `[n, 3]`, with the time, height and width of each
            image and video in patches and in row order.

    Returns:
        `torch.LongTensor` of shape `[4, 1, T]` on the device of `input_ids`: row 0 counts text tokens, rows 1 to 3 are
            time, height and width. All four restart in every document. Of shape `[1, T]` without images and videos.

    Raises:
        `ValueError`: a boundary cuts an image or video, the vision tokens do not match the grids, or the row is a
            shard or shares prompts.
    """
    given = {name: inputs.get(name) for _, name in _GRIDS.values()}
    if all(grid is None for grid in given.values()):
        return boundaries.position_ids
    boundaries.check_kind("a row with images or videos", PART)
    if boundaries.kind == PART:
        expected = "position_ids [4, 1, T] with images or videos in a shard of a row"
        raise input_error(expected, "none", "Pass model= to DataCollatorWithFlattening.")
    for name in ("input_ids", TOKEN_TYPES):
        tensor = inputs.get(name)
        if tensor is None or tensor.shape != (1, boundaries.total_length):
            expected = f"{name} of shape [1, {boundaries.total_length}] with images or videos in a packed row"
            got = None if tensor is None else tuple(tensor.shape)
            raise input_error(expected, got, f"Pass {name} of the processor, or position_ids of shape [4, 1, T].")
    grids = {name: None if grid is None else grid.to("cpu") for name, grid in given.items()}
    input_ids, token_types = inputs["input_ids"], inputs[TOKEN_TYPES].to("cpu")
    _check_vision_tokens(config.vision_config.spatial_merge_size, boundaries, token_types, grids)

    host = boundaries.to("cpu")
    model_class: Any = MODEL_MAPPING[type(config)]
    # The method needs no weights, so an object with the attributes that it reads is enough.
    reader = SimpleNamespace(config=config, get_vision_position_ids=partial(model_class.get_vision_position_ids, None))
    positions, _ = model_class.get_rope_index(
        reader,
        host.unpack(input_ids.to("cpu")),
        host.unpack(token_types),
        attention_mask=host.unpack(torch.ones_like(token_types)),
        **grids,
    )
    rows = [host.position_ids, *(host.pack(row) for row in positions)]
    return torch.stack(rows).to(input_ids.device)


def features_of_tokens(kind: str, outputs: Any, kwargs: dict[str, Any]) -> Any:
    """Keep only the vision features of this process's tokens in `outputs` if it holds a shard of a row."""
    boundaries = kwargs.get("boundaries")
    if boundaries is not None and boundaries.kind == PART:
        outputs.pooler_output = (boundaries.vision_features(kind, torch.cat(outputs.pooler_output)),)
    return outputs


def _check_vision_tokens(
    merge: int, boundaries: SequenceBoundaries, token_types: torch.Tensor, grids: dict[str, Any]
) -> None:
    """Check that every run of vision tokens is one whole image or one video frame, in the order of the grids."""
    expected = {}
    for token_type, (kind, name) in _GRIDS.items():
        sizes = []
        for time, height, width in [] if grids[name] is None else grids[name].tolist():
            tokens = height * width // merge**2
            # Timestamps separate the frames of a video, so each frame is a separate run.
            sizes += [time * tokens] if kind == "image" else [tokens] * time
        expected[token_type] = sizes
    seen = dict.fromkeys(_GRIDS, 0)
    for document, row in enumerate(token_types[0].split(boundaries.lengths)):
        for token_type, run in groupby(row.tolist()):
            if token_type not in _GRIDS:
                continue
            kind, name = _GRIDS[token_type]
            length, place = len(list(run)), seen[token_type]
            wanted = expected[token_type][place] if place < len(expected[token_type]) else 0
            if length != wanted:
                entries = f"{wanted} {kind} tokens for entry {place} of {name}'s {len(expected[token_type])}"
                fix = "A document boundary may cut it, or truncation removed tokens. Keep each image in one document."
                raise input_error(entries, f"{length} in document {document}", fix)
            seen[token_type] += 1
    for token_type, (kind, name) in _GRIDS.items():
        if seen[token_type] != len(expected[token_type]):
            entries = f"tokens for all {len(expected[token_type])} entries of {name} ({kind}s, or frames of videos)"
            got = f"{seen[token_type]} in the row's {boundaries.num_documents} documents"
            raise input_error(entries, got, "Pass only the grids of this row's images and videos.")
