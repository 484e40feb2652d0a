"""Trees of samples, and rows in which documents continue others."""

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from scripts.trainer_arms import CONFIGS
from transformers import AutoModelForCausalLM, set_seed

from transformers_packed import SequenceBoundaries, patch_model
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


def make_model(family="qwen3_5", dtype=torch.float64):
    set_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[family](), attn_implementation="sdpa").to(dtype)
    return patch_model(model).train()


def group(prefix, *answers, **columns):
    """A group whose answers have these tokens, and these columns, one value for each answer."""
    samples = [{"input_ids": tokens} | {n: v[k] for n, v in columns.items()} for k, tokens in enumerate(answers)]
    return {"prefix": prefix, "answers": samples}


def loss_and_gradients(model, batch, wide=False):
    """The loss of a row, with 7 targets in the step, and its gradients. The loss of a model has float32."""
    model.zero_grad()
    batch = {name: x for name, x in batch.items() if name != "weight"}
    if wide:
        labels = batch.pop("labels")
        loss = F.cross_entropy(model(**batch).logits[0, :-1], labels[0, 1:], reduction="sum") / 7
    else:
        loss = model(**batch, num_items_in_batch=7).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def node(tokens, labels, *turns, **columns):
    """A node with these tokens, of which `labels` has the positions with labels."""
    kept = [token if at in labels else -100 for at, token in enumerate(tokens)]
    return {"input_ids": tokens, "labels": kept, **columns} | ({"turns": list(turns)} if turns else {})


@st.composite
def batches(draw, most_tokens):
    """One to three trees of up to 7 nodes. Each label has a weight of 1."""
    random, elements = np.random.default_rng(draw(st.integers(0, 2**16))), []
    for _ in range(draw(st.integers(1, 3))):
        nodes = []
        for number in range(draw(st.integers(1, 7))):
            tokens = random.integers(1, 61, draw(st.integers(1, most_tokens))).tolist()
            kept = random.random(len(tokens)) < draw(st.sampled_from([0, 0.5, 1]))
            kept[0] = draw(st.booleans())
            nodes.append(node(tokens, np.flatnonzero(kept), weight=kept.astype(float).tolist()))
            if number:
                nodes[draw(st.integers(0, number - 1))].setdefault("turns", []).append(nodes[-1])
        elements.append(nodes[0])
    return elements


def paths(nodes, before=()):
    """Each node as a whole document, in which only its own tokens have labels."""
    for node in nodes:
        tokens = [*before, *node["input_ids"]]
        yield {"input_ids": tokens, "labels": [-100] * len(before) + node["labels"]}
        yield from paths(node.get("turns", []), tokens)
