"""Rows in which documents continue others."""

import torch

from transformers_packed import SequenceBoundaries
from transformers_packed.shared_prompts import SharedPrompts


# Lengths, and the parent of each document. Documents are also shorter than the window of the convolution.
ROWS = {
    "one_group": ([70, 5, 1, 66], [-1, 0, 0, 0]),
    "several_groups": ([3, 9, 1, 2, 4, 1, 7, 3], [-1, -1, -1, 0, 1, 1, 2, 0]),
    "alone_and_prompts_without_answers": ([6, 2, 5, 4, 3], [-1, -1, -1, 1, 1]),
    "groups_in_any_order": ([2, 3, 4, 2, 5, 3, 1], [-1, -1, 1, 0, 1, 0, 1]),
    # Levels one after the other.
    "branches": ([5, 1, 2, 66, 3, 1, 2, 1], [-1, 0, 0, 1, 1, 2, 2, 2]),
    # Depth first, so levels are apart.
    "depth_first": ([4, 1, 2, 1, 3, 2, 1, 70, 2], [-1, 0, 1, 1, 0, -1, 5, 5, 7]),
    "chain": ([3, 1, 1, 2], [-1, 0, 1, 2]),
    "chain_apart": ([3, 2, 1, 4, 1, 2], [-1, -1, 0, 1, 2, 3]),
    # Two levels: a path of turns, which is read at each branch, and the branches.
    "conversation": ([3, 1, 70, 2, 5, 2, 1, 3, 1], [-1, 0, 1, 2, 3, 0, 1, 2, 3]),
    "conversation_depth_first": ([3, 2, 1, 1, 70, 3, 2, 1, 5], [-1, 0, 0, 2, 2, 4, 4, 6, 6]),
}


def make_row(name):
    lengths, parent_of = ROWS[name]
    return SharedPrompts.of(SequenceBoundaries.from_lengths(lengths), parent_of)


def documents_of(row):
    """Return, for each document, its tokens with those of its ancestors, and how many of these are its own."""
    tokens, found = torch.arange(row.total_length).split(row.lengths), []
    for own, parent in zip(tokens, row.parent_of, strict=True):
        found.append(torch.cat([found[parent] if parent >= 0 else own[:0], own]))
    return [(whole, len(own)) for whole, own in zip(found, tokens, strict=True)]
