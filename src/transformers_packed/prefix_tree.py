"""The common beginnings of documents, and the row that has each of them once ([`SharedPrompts`]).

The common beginnings of sorted neighbors form a tree. To share one saves tokens, but costs another document of the row.
[`prefix_pieces`] chooses those that make the row cheapest.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from .shared_prompts import to_level_order


# A shared beginning saves at least so many tokens, because another document costs about as much.
_LEAST_SAVED = 64


class Piece(NamedTuple):
    """Tokens that follow each other in one document, or in all documents that begin with the same tokens.

    Args:
        document (`int`):
            The document, or the first of them.
        begin (`int`):
            The first token.
        end (`int`):
            The token after the last one.
        parent (`int`):
            The index of the piece that the tokens follow, or -1 at the beginning of a document.
    """

    document: int
    begin: int
    end: int
    parent: int


class _Node:
    """The first `depth` tokens of all documents below. Without children, it is a whole document."""

    def __init__(self, document: int, depth: int):
        self.document, self.depth = document, depth
        self.children: list[_Node] = []
        # For each node above as the last one that is kept: its depth, whether to keep this node, and the cost from there.
        self.above = self.keeps = self.costs = np.zeros(0, dtype=np.int64)


def prefix_pieces(documents: Sequence[np.ndarray]) -> list[Piece]:
    """Divide documents into pieces, which documents with a common beginning share.

    The tokens of all pieces, and 64 for each shared one, are as few as possible. The last token of a document is not
    shared.

    Args:
        documents (`Sequence[np.ndarray]`):
            The tokens of each document, int `[T]`, of which there is at least one.

    Returns:
        `list[Piece]`: the pieces in the order of [`level_order`]. If nothing is shared, they are the documents.

    Example:

    ```python
    >>> import numpy as np
    >>> from transformers_packed.prefix_tree import prefix_pieces
    >>> prompt = np.arange(100)
    >>> [tuple(piece) for piece in prefix_pieces([np.append(prompt, [7, 8]), np.append(prompt, 9)])]
    [(0, 0, 100, -1), (0, 100, 102, 0), (1, 100, 101, 0)]

    ```
    """
    root = _tree(documents)
    _choose(root)
    pieces: list[Piece] = []
    # Kept nodes, the places of their pieces, and the places of the nodes in `above` of those below.
    kept = [(root, -1, 0)]
    for node, parent, at in kept:
        for child in _kept_below(node, at):
            kept.append((child, len(pieces), len(child.above)))
            pieces.append(Piece(child.document, node.depth, child.depth, parent))
    order, parents = to_level_order([piece.parent for piece in pieces])
    return [pieces[number]._replace(parent=parent) for number, parent in zip(order, parents, strict=True)]


def _tree(documents: Sequence[np.ndarray]) -> _Node:
    """The tree of all common beginnings, below an empty one."""
    # Big-endian bytes sort like the tokens.
    order = sorted(range(len(documents)), key=lambda document: documents[document].astype(">u8").tobytes())
    common = [0]
    for left, right in pairwise(documents[document] for document in order):
        n = min(len(left), len(right)) - 1
        differs = left[:n] != right[:n]
        common.append(int(differs.argmax()) if differs.any() else n)
    path = [_Node(0, 0)]
    for document, depth in zip(order, common, strict=False):
        last = path[-1]
        while path[-1].depth > depth:
            last = path.pop()
        if path[-1].depth < depth:
            # The node's last child and the document begin with more common tokens than the node has.
            branch = _Node(last.document, depth)
            path[-1].children[-1], branch.children = branch, [last]
            path.append(branch)
        leaf = _Node(document, len(documents[document]))
        path[-1].children.append(leaf)
        path.append(leaf)
    return path[0]


def _choose(root: _Node) -> None:
    """Decide for each node, and for each one above that may be the last kept one, whether to keep the node."""
    nodes = [root]
    for node in nodes:
        above = np.append(node.above, node.depth)
        for child in node.children:
            child.above = above
        nodes += node.children
    for node in reversed(nodes[1:]):
        own = node.depth - node.above
        node.costs, node.keeps = own, np.ones(len(own), dtype=bool)
        if node.children:
            node.document = min(child.document for child in node.children)
            below = np.sum([child.costs for child in node.children], axis=0)
            own = own + below[-1] + _LEAST_SAVED
            node.costs, node.keeps = np.minimum(own, below[:-1]), own <= below[:-1]


def _kept_below(node: _Node, at: int) -> list[_Node]:
    """The next kept nodes below a kept one, which is at place `at` of their `above`. Shared beginnings come first."""
    kept, nodes = [], list(node.children)
    for child in nodes:
        if child.keeps[at]:
            kept.append(child)
        else:
            nodes += child.children
    return sorted(kept, key=lambda child: (not child.children, child.document))
