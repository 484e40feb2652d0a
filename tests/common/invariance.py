"""For tests of batch invariance: kernels whose sums depend on the number of rows, and the places of a document."""

from itertools import accumulate
from unittest import mock

import torch

from transformers_packed.ops import invariance


class SplitSums:
    """A kernel that sums in as many parts as its number of rows leaves as a remainder, as libraries split sums."""

    def __init__(self, name: str):
        self.name = name

    def call_boxed(self, keys, *args, out, **options):
        added, (rows, matrix) = (args[0], args[1:3]) if self.name.startswith("addmm") else (None, args[:2])
        parts = zip(rows.chunk(1 + len(rows) % 7, 1), matrix.chunk(1 + len(rows) % 7, 0), strict=True)
        total = sum((x[:, :, None] * y).sum(1) for x, y in parts)
        if added is not None:
            total = options.get("alpha", 1) * total
            # Without a factor, memory that nothing has written may be added, with NaN in it.
            total = total + options.get("beta", 1) * added if options.get("beta", 1) else total
        return out.copy_(total)


def with_split_sums():
    """Within the mode, products run by kernels whose sums depend on the number of rows."""
    kernels = {(name, "CPU"): SplitSums(name) for name in ("mm.out", "addmm.out")}
    return mock.patch.dict(invariance._kernels, kernels)


def packed(lengths: list[int]) -> dict:
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": max(lengths), "max_length_k": max(lengths)}


def padded(documents: list[torch.Tensor], extra: int, side: str) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, documents)) + extra
    ids, mask = (torch.zeros(len(documents), width, dtype=torch.long) for _ in range(2))
    for row, document in enumerate(documents):
        place = slice(0, len(document)) if side == "right" else slice(width - len(document), width)
        ids[row, place], mask[row, place] = document, 1
    return ids, mask


def logps_in_places(model, document: torch.Tensor):
    """The log-probabilities of a document by the place where they were computed. The first one is alone in a row."""
    vocab, generator = model.config.get_text_config().vocab_size, torch.Generator().manual_seed(0)

    def others(*lengths: int) -> list[torch.Tensor]:
        return [torch.randint(1, vocab, (length,), generator=generator).to(document.device) for length in lengths]

    def logps(**batch) -> torch.Tensor:
        batch = {name: x.to(document.device) if isinstance(x, torch.Tensor) else x for name, x in batch.items()}
        return model(**batch, use_cache=False).logits.float().log_softmax(-1)

    def in_row(before: list[int], after: list[int]) -> torch.Tensor:
        row = torch.cat([*others(*before), document, *others(*after)])[None]
        found = logps(input_ids=row, **packed([*before, len(document), *after]))
        return found[0, sum(before) : sum(before) + len(document)]

    yield "alone", in_row([], [])
    for before, after in (([32], []), ([], [160]), ([96, 32], [64]), ([32] * 5, [160])):
        yield f"after {before} and before {after}", in_row(before, after)
    yield "without a mask", logps(input_ids=document[None])[0]
    for size in (1, 4):
        batch = [*others(*[32 * (1 + row) for row in range(size - 1)]), document]
        for side in ("right", "left"):
            ids, mask = padded(batch, 32, side)
            yield f"{size} rows padded on the {side}", logps(input_ids=ids, attention_mask=mask)[-1][mask[-1] == 1]
    equal = torch.stack([*others(*[len(document)] * 3), document])
    yield "a batch without padding", logps(input_ids=equal, attention_mask=torch.ones_like(equal))[-1]
