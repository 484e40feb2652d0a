"""Trees of samples, as a row that holds once what several of them share ([`SharedPrompts`]).

A node of a tree is a sample. It continues its parent, and stands for the tokens of its ancestors and its own:

    {"input_ids": [5, 6, 7], "turns": [{"input_ids": [8, 9]}, {"input_ids": [4], "turns": [...]}]}

A group, `{"prefix": tokens, "answers": nodes}`, is a tree whose first node has no labels. Groups with the same prefix form
one tree. An only turn joins its parent, so a conversation without branches is one document.

No token of a document predicts its first one. If the first token of a turn has a label, the end of its parent therefore
moves to the start of each turn. It begins with the last token without a label, which needs no token before it. With
labels on the tokens in brackets:

    | 5 6  7  | 8  9 | 4 |    stays as it is
    | 5 6  7  |(8) 9 | 4 |    becomes    | 5 6 | 7 (8) 9 | 7 4 |
    | 5 6 (7) |(8) 9 | 4 |    becomes    | 5 | 6 (7)(8) 9 | 6 7 4 |

The first turn gets these tokens with their labels and other columns. The other turns get copies, without labels and with
0 in other columns, so that each value counts once. If all tokens of a node move, its turns continue its parent.

Rows of TRL's trainer for asynchronous GRPO are such rows already: `trl.experimental.async_grpo.packing.TreeRow.pack()`
returns the segments of a trie, depth first, and for each segment the places of all keys from the first one to its own.
Tokens count as the same if the next ones are, too. The last token of a segment therefore has the same target in all that
continue it, and the row has shifted labels.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..boundaries import SequenceBoundaries
from ..errors import input_error
from ..shared_prompts import SharedPrompts, to_level_order
from .samples import (
    ANSWERS,
    IGNORED_LABEL,
    PREFIX,
    TURNS,
    as_list,
    check_lengths,
    is_number,
    is_tree,
    place,
    present,
    real_length,
    real_sample,
)


Sample = dict[str, Any]
# What a node continues: another node, by its number in the batch, the tokens of a prefix, or nothing.
Parent = int | tuple[int, ...] | None


def nodes_of(samples: Iterable[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[Parent]]:
    """Return the nodes of a batch and the parent of each, parents first. A sample without turns is a node alone."""
    nodes: list[Mapping[str, Any]] = []
    parents: list[Parent] = []
    for sample in samples:
        waiting: list[tuple[Mapping[str, Any], Parent]] = [(sample, None)]
        if is_tree(sample) and sample.get("input_ids") is None:
            prefix = _prefix_of(sample)
            waiting = [(answer, prefix) for answer in reversed(_samples_in(sample, ANSWERS))]
            if not waiting:
                raise input_error("at least one answer in a group", "none", "Remove such groups from the dataset.")
        while waiting:
            node, parent = waiting.pop()
            node = present(node)
            if parent is not None or is_tree(node):
                waiting += [(turn, len(nodes)) for turn in reversed(_samples_in(node, TURNS))]
                node = {name: column for name, column in node.items() if name != TURNS}
            nodes.append(node)
            parents.append(parent)
    return nodes, parents


def as_packed(
    sample: Mapping[str, Any], index: int | None = None, longest: int | None = None
) -> tuple[Mapping[str, Any], int]:
    """A sample as packed rows have it, without masked tokens or as an unchanged tree, and the number of its tokens."""
    if is_tree(sample):
        return sample, tokens_in(sample, index, longest)
    sample = real_sample(sample, index)
    return sample, len(sample["input_ids"])


def tokens_in(sample: Mapping[str, Any], index: int | None = None, longest: int | None = None) -> int:
    """The number of real tokens of a sample, or the number of tokens that a row computes for a tree.

    For a group, it is the most: groups with the same prefix share it, and if an answer of any of them starts with a
    target, the end of the prefix moves to all answers. The end is therefore counted as moved.

    Args:
        sample (`Mapping`):
            A sample, a tree or a group.
        index (`int`, *optional*):
            The number of the sample, for error messages.
        longest (`int`, *optional*):
            The most tokens of a tree.

    Raises:
        `ValueError`: as in [`real_sample`], a node without tokens, or a tree with more than `longest` tokens.
    """
    if not is_tree(sample):
        return real_length(sample, index)
    nodes, parents = nodes_of([sample])
    columns: dict[int, Sample] = {}
    for number, node in enumerate(nodes):
        real = real_sample(node, index)
        check_lengths(index, node)
        tokens = as_list(real["input_ids"])
        labels = real.get("labels", tokens)
        if len(tokens):
            # The collator refuses one label per sample.
            columns[number] = {"input_ids": tokens, "labels": [*(tokens if is_number(labels) else as_list(labels))]}
    if isinstance(parents[0], tuple) and 0 in columns:
        columns[0]["labels"][0] = columns[0]["input_ids"][0]
    documents, _ = row_of(columns, parents, place(index))
    total = sum(len(document["input_ids"]) for document in documents)
    if longest is not None and total > longest:
        fix = 'Raise max_length, or pass overlong="drop". A tree is neither truncated nor split.'
        raise input_error(f"a tree of at most {longest} computed tokens in {place(index)}", total, fix)
    return total


def _prefix_of(group: Mapping[str, Any]) -> tuple[int, ...]:
    prefix = as_list(group[PREFIX])
    if not isinstance(prefix, list | tuple) or not prefix or not all(isinstance(token, int) for token in prefix):
        raise input_error("a prefix of at least one token in a group", prefix, "Pass other samples without a group.")
    return tuple(prefix)


def _samples_in(node: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    samples = as_list(node.get(name))
    if samples is None:
        return []
    if not isinstance(samples, list | tuple):
        raise input_error(f"{name} as a list of samples", type(samples).__name__)
    for sample in samples:
        if not isinstance(sample, Mapping):
            raise input_error(f"{name} as a list of samples", f"{type(sample).__name__} in the list")
    return list(samples)


@dataclass
class Node:
    """A node of a tree: its columns, each with one value per token, and the nodes that continue it."""

    columns: Sample
    turns: list["Node"] = field(default_factory=list)

    def join_only_turns(self) -> None:
        while len(self.turns) == 1:
            (turn,) = self.turns
            for name, column in self.columns.items():
                column += turn.columns[name]
            self.turns = turn.turns

    def move_end(self) -> None:
        """Move the end to the turns if one of them starts with a target. Their own ends have moved before."""
        self.turns = _without_empty(self.turns)
        if all(turn.columns["labels"][0] == IGNORED_LABEL for turn in self.turns):
            return
        labels = self.columns["labels"]
        start = next((at for at in reversed(range(len(labels))) if labels[at] == IGNORED_LABEL), 0)
        end = {name: column[start:] for name, column in self.columns.items()}
        self.columns = {name: column[:start] for name, column in self.columns.items()}
        for turn in self.turns:
            turn.columns = {name: end[name] + column for name, column in turn.columns.items()}
            end = _unlabelled(end["input_ids"], end)


def row_of(
    samples: Mapping[int, Sample], parents: list[Parent], where: str | None = None
) -> tuple[list[Sample], list[int]]:
    """Return the documents of a row, and the document that each continues, or -1. The latter is empty if none does.

    Args:
        samples (`Mapping`):
            The columns of nodes by their numbers, each with one value per token. Nodes without tokens are left out.
        parents (`list`):
            The parents of all nodes.
        where (`str`, *optional*):
            The sample that has all nodes, for error messages. By default, each node is one.
    """
    roots = _trees(samples, parents, where)
    for node in _downwards(roots):
        node.join_only_turns()
    for node in reversed([*_downwards(roots)]):
        node.move_end()
    nodes = [*_downwards(_without_empty(roots))]
    number = {id(node): at for at, node in enumerate(nodes)}
    parent_of = [-1] * len(nodes)
    for at, node in enumerate(nodes):
        for turn in node.turns:
            parent_of[number[id(turn)]] = at
    order, moved = to_level_order(parent_of)
    return [nodes[document].columns for document in order], moved if max(moved) >= 0 else []


def _trees(samples: Mapping[int, Sample], parents: list[Parent], where: str | None) -> list[Node]:
    """Return the first nodes of all trees."""
    roots: list[Node] = []
    found: dict[Parent, Node] = {}
    for number, parent in enumerate(parents):
        if number not in samples:
            if parent is not None or number in parents:
                got = f"none in {where or place(number)}"
                raise input_error("at least one token in each node of a tree", got, "Leave the node out.")
            continue
        columns = {"labels": samples[number]["input_ids"], **samples[number]}
        found[number] = Node({name: list(column) for name, column in columns.items()})
        if isinstance(parent, tuple) and parent not in found:
            found[parent] = Node(_unlabelled(list(parent), columns))
            roots.append(found[parent])
        siblings = roots if parent is None else found[parent].turns
        siblings.append(found[number])
    return roots


def _unlabelled(tokens: list[int], names: Iterable[str]) -> Sample:
    """The columns `names` of tokens that do not count."""
    fill = {"labels": IGNORED_LABEL}
    return {name: [fill.get(name, 0)] * len(tokens) for name in names} | {"input_ids": tokens}


def _without_empty(nodes: list[Node]) -> list[Node]:
    """The nodes, with their turns in place of those whose tokens have all moved."""
    return [kept for node in nodes for kept in ([node] if node.columns["input_ids"] else node.turns)]


def _downwards(roots: list[Node]) -> Iterator[Node]:
    """Yield all nodes, each before its turns, which are read after the caller has seen the node."""
    waiting = roots[::-1]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += reversed(node.turns)


# The columns of TRL that describe the segments, and those with one value per token.
SEGMENTS = ("tree_cu_seqlens_q", "tree_cu_seqlens_k", "tree_kv_index")
TOKENS = ("input_ids", "position_ids", "shift_labels")
_FIX = "Pass the row unchanged."


def is_trl_row(element: Any) -> bool:
    """Whether a batch element is a row of `TreeRow.pack()`."""
    return isinstance(element, Mapping) and element.get(SEGMENTS[0]) is not None


def read_trl_row(row: Mapping[str, Any]) -> tuple[SequenceBoundaries, list[int], dict[str, torch.Tensor]]:
    """Return the documents of a row, the document that each one continues, or -1, and the other columns of the row.

    Args:
        row (`Mapping`):
            `input_ids`, `position_ids` and `shift_labels` `[N]`, `tree_kv_index` `[K]`, and `tree_cu_seqlens_q` and
            `tree_cu_seqlens_k` `[S+1]` for `S` segments. Other columns, those of the terms of the loss, are unchanged.

    Returns:
        `tuple`: the segments, [`SharedPrompts`] if one continues another and else [`SequenceBoundaries`], their parents,
            and the columns, with tokens as `[1, N]`. `labels` equals `shift_labels`, for code that checks whether a batch
            has labels.

    Raises:
        `ValueError`: a tensor is missing or has another shape, or the segments are no trees.
    """
    for name in (*SEGMENTS, *TOKENS):
        if not isinstance(row.get(name), torch.Tensor) or row[name].ndim != 1:
            got = f"shape {tuple(row[name].shape)}" if isinstance(row.get(name), torch.Tensor) else "none"
            raise input_error(f"{name} of TreeRow.pack(), a flat tensor", got, _FIX)
    queries, keys, places = (row[name].long() for name in SEGMENTS)
    boundaries = SequenceBoundaries.from_cu_seqlens(queries, total_length=row["input_ids"].numel())
    SequenceBoundaries.from_cu_seqlens(keys, total_length=places.numel())
    if keys.shape != queries.shape:
        got = f"{keys.numel() - 1} paths"
        raise input_error(f"a path of keys for each of the {boundaries.num_documents} segments", got, _FIX)
    before = keys.diff() - queries.diff()
    # The last key before those of the segment itself.
    last = places[(keys[:-1] + before - 1).clamp(min=0)]
    parent_of = (torch.searchsorted(queries, last, right=True) - 1).masked_fill(before <= 0, -1).tolist()
    if max(parent_of) >= 0:
        boundaries = SharedPrompts.of(boundaries, parent_of)
    if not torch.equal(boundaries.position_ids[0], row["position_ids"]):
        raise input_error("position_ids that count on from the segment before", "others", _FIX)
    columns = {name: x for name, x in row.items() if not name.startswith("tree_")}
    columns |= {name: row[name][None] for name in TOKENS}
    return boundaries, parent_of, columns | {"labels": columns["shift_labels"]}
