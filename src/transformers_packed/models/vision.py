"""Images and videos in packed rows: which document an image belongs to, and the position ids of M-RoPE per document.

Qwen3.5 gives each token four positions: its place in the text, and time, height and width for vision tokens (M-RoPE).
All four restart with every document. Transformers' `get_rope_index` knows padded batches only, so the documents of a
row are laid out as one, and its result is packed again.
"""

from functools import partial
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_MAPPING

from ..boundaries import VISION_KINDS, SequenceBoundaries
from ..errors import input_error


# `mm_token_type_ids` of a vision token, and the argument with the grids of such tokens.
_GRIDS = {token_type: (kind, grid) for kind, (token_type, _, grid) in VISION_KINDS.items()}


def packed_mrope_position_ids(
    config: Any,
    boundaries: SequenceBoundaries,
    *,
    input_ids: torch.Tensor | None,
    mm_token_type_ids: torch.Tensor | None,
    image_grid_thw: torch.Tensor | None = None,
    video_grid_thw: torch.Tensor | None = None,
) -> torch.Tensor:
    """The position ids `[4, 1, T]` of a packed row with images or videos.

    Works on the host, so tensors on a device cost a synchronisation: let the collator call this.

    Args:
        config (`PreTrainedConfig`):
            A composite configuration, such as `Qwen3_5Config`.
        boundaries ([`SequenceBoundaries`]):
            The documents of the row.
        input_ids (`torch.LongTensor` of shape `[1, T]`):
            The row.
        mm_token_type_ids (`torch.IntTensor` of shape `[1, T]`):
            0 for text, 1 for image and 2 for video tokens, as the processor returns them.
        image_grid_thw (`torch.LongTensor` of shape `[images, 3]`, *optional*):
            Time, height and width of each image, in patches, in row order.
        video_grid_thw (`torch.LongTensor` of shape `[videos, 3]`, *optional*):
            The same of each video.

    Returns:
        `torch.LongTensor` of shape `[4, 1, T]` on the device of `input_ids`: row 0 counts text tokens, rows 1 to 3 are
        time, height and width; all restart in every document.

    Raises:
        `ValueError`: an image or video that a boundary cuts, vision tokens that do not match the grids, or a part of a row.
    """
    if boundaries.is_shard:
        expected = "position_ids [4, 1, T] beside images or videos in a part of a row"
        raise input_error(expected, "none", "Pass model= to DataCollatorWithFlattening.")
    for name, tensor in (("input_ids", input_ids), ("mm_token_type_ids", mm_token_type_ids)):
        if tensor is None or tensor.shape != (1, boundaries.total_length):
            expected = f"{name} of shape [1, {boundaries.total_length}] beside images or videos in a packed row"
            got = None if tensor is None else tuple(tensor.shape)
            raise input_error(expected, got, "Pass the processor's, or position_ids of shape [4, 1, T].")
    grids = {"image_grid_thw": image_grid_thw, "video_grid_thw": video_grid_thw}
    grids = {name: None if grid is None else grid.to("cpu") for name, grid in grids.items()}
    token_types = mm_token_type_ids.to("cpu")
    _check_vision_tokens(config.vision_config.spatial_merge_size, boundaries, token_types, grids)

    host = boundaries.to("cpu")
    model_class = MODEL_MAPPING[type(config)]
    # The method needs no weights: a stand-in with what it reads of a model is enough.
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


def packed_position_ids(config: Any, boundaries: SequenceBoundaries, inputs: dict[str, Any]) -> torch.Tensor:
    """The position ids of a packed row with the arguments `inputs`: those of M-RoPE if there are images or videos."""
    if inputs.get("image_grid_thw") is None and inputs.get("video_grid_thw") is None:
        return boundaries.position_ids
    names = ("input_ids", "mm_token_type_ids", "image_grid_thw", "video_grid_thw")
    return packed_mrope_position_ids(config, boundaries, **{name: inputs.get(name) for name in names})


def features_of_tokens(kind: str, outputs: Any, kwargs: dict[str, Any]) -> Any:
    """The vision tower's `outputs` with the features of the tokens that this process has, if it has a part of a row."""
    boundaries = kwargs.get("boundaries")
    if boundaries is not None and boundaries.is_shard:
        outputs.pooler_output = (boundaries.vision_features(kind, torch.cat(outputs.pooler_output)),)
    return outputs


def _check_vision_tokens(
    merge: int, boundaries: SequenceBoundaries, token_types: torch.Tensor, grids: dict[str, Any]
) -> None:
    """Every run of vision tokens is one whole image or one frame of a video, in the order of the grids."""
    expected = {}
    for token_type, (kind, name) in _GRIDS.items():
        sizes = []
        for time, height, width in [] if grids[name] is None else grids[name].tolist():
            tokens = height * width // merge**2
            # Timestamps stand between the frames of a video, so each frame is a run of its own.
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
                fix = "A document boundary may cut it, or tokens were truncated: keep each image in one document."
                raise input_error(entries, f"{length} in document {document}", fix)
            seen[token_type] += 1
    for token_type, (kind, name) in _GRIDS.items():
        if seen[token_type] != len(expected[token_type]):
            entries = f"tokens for all {len(expected[token_type])} entries of {name} ({kind}s; frames count singly)"
            got = f"{seen[token_type]} in the row's {boundaries.num_documents} documents"
            raise input_error(entries, got, "Pass the grids of this row's images and videos only.")
