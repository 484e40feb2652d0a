"""The samples of `fuzz.py` and the collators of its users: padded batches, and rows with a mask of any kind."""

import random
from collections.abc import Callable
from functools import cache, partial

import torch
from common.records import make_tokenizer
from fuzz_setup import CONFIGURED, Setup
from mixins.vision import VISION_INPUTS, document, padded_documents
from scripts.trainer_arms import collate_padded
from torch import nn
from torch.utils.data import IterableDataset
from transformers import DataCollatorForSeq2Seq

from transformers_packed import DataCollatorWithFlattening, PackingDataset, pack_dataset


# Masks of packed rows: additive or boolean `[rows, 1, T, T]`, and the number of each token's document `[rows, T]`.
BLOCKS = ("additive", "boolean")
ROWS = (*BLOCKS, "numbered")
# Masks of padded batches, besides the usual one: all tokens count, there is none, or padding is on the left.
PADDED = ("ones", "none", "left")
_TO = 80  # tokens of a sample with padding


def samples(setup: Setup) -> list[dict]:
    """Draw samples of 1 to 70 tokens with a prompt without loss, some with images or videos.

    No sample has the token 0, which is padding.
    """
    rng = random.Random(setup.seed)
    made = []
    for number in range(setup.batch_size * setup.accumulation * setup.steps + rng.randrange(3)):
        # A batch needs at least one target.
        shortest = 2 if setup.batch_size == 1 or setup.empty else 1
        length = rng.choice(
            [shortest, 2, rng.randint(2, 12), *[rng.randint(2, 70) for _ in range(2)], rng.randint(63, 66)]
        )
        vision = {}
        if setup.family == "qwen3_5_vl" and rng.random() < 0.5 and not (setup.mask or setup.padding):
            vision = rng.choice(
                [{"images": ((1, 4, 4),)}, {"images": ((1, 4, 4), (1, 8, 4))}, {"videos": ((2, 4, 4),)}]
            )
        feature = document(length, setup.seed + number, **vision)
        ids, types = feature["input_ids"], feature.pop("mm_token_type_ids")
        prompt = rng.randrange(max(1, len(ids) - 1))
        feature["labels"] = [
            -100 if i < prompt or kind else token for i, (token, kind) in enumerate(zip(ids, types, strict=True))
        ]
        if setup.family == "qwen3_5_vl":
            feature["mm_token_type_ids"] = types
        made.append(feature)
    if setup.empty:
        made[rng.randrange(len(made))] = dict.fromkeys(made[0].keys() - set(VISION_INPUTS), [])
    return [_with_padding(sample, setup.padding) for sample in made] if setup.padding else made


class Once(IterableDataset):
    """Samples that are gone when they are read."""

    def __init__(self, rows: list[dict]):
        self.rows = list(rows)

    def __iter__(self):
        while self.rows:
            yield self.rows.pop(0)


def _with_padding(sample: dict, side: str) -> dict:
    """The sample as tokenizers return it with `padding="max_length"`.

    The first token is no target, because a padded batch would predict it from padding on the left.
    """
    length = len(sample["input_ids"])
    sample = sample | {"attention_mask": [1] * length, "labels": [-100, *sample["labels"][1:]][:length]}
    padding = {name: [-100 if name == "labels" else 0] * (_TO - length) for name in sample}
    return {name: x + padding[name] if side == "right" else padding[name] + x for name, x in sample.items()}


def without_padding(sample: dict) -> dict:
    """The real tokens of a sample."""
    mask = sample.get("attention_mask")
    if mask is None:
        return sample
    return {name: [x for x, kept in zip(values, mask, strict=True) if kept] for name, values in sample.items()}


def evaluation_set(setup: Setup, data: list[dict], ours: bool):
    """Up to 8 samples with targets, which our arm may get as packed rows."""
    chosen = [sample for sample in data if len(without_padding(sample)["input_ids"]) > 1][:8]
    if not ours or setup.eval_rows == "samples":
        return chosen
    return {"rows": PackingDataset, "packed": pack_dataset}[setup.eval_rows](chosen, 96)


def collate(rows: list) -> dict:
    """Collate samples, or rows of samples, to a padded batch."""
    features = [sample for row in rows for sample in (row if isinstance(row, list) else [row])]
    features = [feature for feature in map(without_padding, features) if feature["input_ids"]]
    batch = collate_padded(features)
    return padded_documents(features) | batch if "mm_token_type_ids" in features[0] else batch


def collate_with_other_mask(kind: str, features: list[dict]) -> dict:
    """Collate to a padded batch of which a causal model computes the same at real tokens."""
    batch = collate(features)
    mask = batch.pop("attention_mask")
    if kind == "none":
        return batch
    if kind == "ones":
        return batch | {"attention_mask": torch.ones_like(mask)}
    # A stock model would predict the first token from padding.
    batch["labels"][:, 0] = -100
    order = mask.argsort(dim=1, stable=True)
    return {name: x.gather(1, order) for name, x in batch.items()} | {"attention_mask": mask.gather(1, order)}


def collate_rows(kind: str, features: list[dict], rows: int = 1, padding: int = 0, restart: bool = False) -> dict:
    """Pack samples as users' own collators do, and tell documents apart by a mask.

    Rows end with `padding` tokens that see nothing, and the shorter of two rows with more. `restart` adds position ids.
    """
    features = [without_padding(feature) for feature in features]
    half = -(-len(features) // rows)
    groups = [features[i : i + half] for i in range(0, len(features), half)]
    longest = max(sum(len(f["input_ids"]) for f in group) for group in groups) + padding

    def stack(documents: list[list[list[int]]], fill: int) -> torch.Tensor:
        flat = [[x for document in row for x in document] for row in documents]
        return torch.tensor([row + [fill] * (longest - len(row)) for row in flat])

    names = [name for name in ("input_ids", "labels", "mm_token_type_ids") if name in features[0]]
    batch = {name: stack([[f[name] for f in g] for g in groups], -100 if name == "labels" else 0) for name in names}
    numbers = stack([[[n] * len(f["input_ids"]) for n, f in enumerate(g, 1)] for g in groups], 0)
    positions = stack([[[*range(len(f["input_ids"]))] for f in g] for g in groups], 0)
    batch["labels"][positions == 0] = -100
    if restart:
        batch["position_ids"] = positions
    if kind == "numbered":
        return batch | {"attention_mask": numbers}
    same = (numbers[:, :, None] == numbers[:, None]) & (numbers[:, None] > 0)
    mask = (same & torch.ones(longest, longest, dtype=torch.bool).tril())[:, None]
    if kind == "additive":
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    return batch | {"attention_mask": mask}


@cache
def _tokenizer():
    return make_tokenizer()


def collator(setup: Setup, ours: bool, model: nn.Module) -> Callable | None:
    """The collator of the user."""
    if ours and setup.mask in ROWS:
        return partial(collate_rows, setup.mask, **setup.mask_options)
    if ours and setup.mask:
        return partial(collate_with_other_mask, setup.mask)
    if ours and setup.way in CONFIGURED:
        return None if setup.family == "qwen3_5_vl" else DataCollatorForSeq2Seq(_tokenizer())
    if not ours or setup.mode == "padded":
        return collate
    needed = setup.family == "qwen3_5_vl" or setup.way == "stock"
    return DataCollatorWithFlattening(**setup.collator, model=model if needed else None)


def real(x: torch.Tensor, batch: dict, channels_first: bool) -> torch.Tensor:
    """Return `[real tokens of the batch, features]`, or `x` itself if it has no token dimension."""
    mask = batch["input_ids"] != 0
    tokens = int(mask.sum())
    if channels_first and x.ndim == 3:
        x = x.transpose(1, 2)
    for rows in (mask, mask.new_ones(1, tokens)):  # our model may pack a padded batch
        size = rows.numel()
        if x.shape[:2] == rows.shape:
            return x[rows].reshape(int(rows.sum()), -1)
        if x.ndim > 1 and x.shape[0] % size == 0 and x.shape[0]:
            return x.reshape(size, -1)[rows.flatten()]
    return x


def lengths(batch: dict) -> list[int]:
    """Return the document lengths of a batch, without padding."""
    if (mask := batch.get("attention_mask")) is not None:
        return mask.sum(1).tolist()
    row = batch["position_ids"].flatten(0, -2)[0].tolist()
    row = row[: len(row) - batch.get("padding_tokens", 0)]
    starts = [i for i, x in enumerate(row) if i == 0 or x != row[i - 1] + 1]
    return [end - start for start, end in zip(starts, [*starts[1:], len(row)], strict=True)]
