"""Samples that continue a prefix, as a row in which equal prefixes occur once ([`SharedPrompts`]).

A sample with a `prefix` stands for the document "prefix and sample". The last token of a prefix predicts the first token
of each of its samples, which may differ. Each sample therefore starts with a copy of this token:

    prefix 5 6 7, samples 8 9 and 4  ->  | 5 6 | 7 8 9 | 7 4 |      labels of the first two tokens and of 7: -100
"""

from collections.abc import Iterable
from typing import Any

from ..boundaries import SequenceBoundaries
from ..errors import input_error
from ..ops.prompts import SharedPrompts
from .samples import IGNORED_LABEL


Sample = dict[str, Any]


def with_prefixes_first(samples: Iterable[Sample]) -> tuple[list[Sample], list[int]]:
    """Return the documents of the row, and the index of the prompt of each, or -1.

    `samples` are columns of tokens, and some have a `prefix`, a list of at least one token. Prefixes come first, in the
    order of their first samples, then samples without a prefix, then the others.
    """
    prompts: dict[tuple[int, ...], Sample] = {}
    alone: list[Sample] = []
    answers: list[tuple[tuple[int, ...], Sample]] = []
    for sample in samples:
        columns = {"labels": sample["input_ids"], **sample}
        *prompt, last = columns.pop("prefix", None) or [None]
        if last is None:
            alone.append(columns)
            continue
        fill = {"input_ids": last, "labels": IGNORED_LABEL}
        columns = {name: [fill.get(name, 0), *values] for name, values in columns.items()}
        if not prompt:
            alone.append(columns)
            continue
        fill = {name: [fill.get(name, 0)] * len(prompt) for name in columns}
        prompts.setdefault(tuple(prompt), fill | {"input_ids": prompt})
        answers.append((tuple(prompt), columns))
    index = {prompt: number for number, prompt in enumerate(prompts)}
    documents = [*prompts.values(), *alone, *(columns for _, columns in answers)]
    return documents, [-1] * (len(prompts) + len(alone)) + [index[prompt] for prompt, _ in answers]


def prompts_of_row(lengths: list[int], prompt_of: list[int]) -> SharedPrompts | None:
    """The boundaries of the row, or `None` if no document has a prompt."""
    boundaries = SequenceBoundaries.from_lengths(lengths)
    return SharedPrompts.of(boundaries, prompt_of) if max(prompt_of) >= 0 else None


def check_prefix(index: int, prefix: Any) -> list[int]:
    """Return the prefix as a list of tokens, or raise a `ValueError`."""
    tokens = prefix.tolist() if hasattr(prefix, "tolist") else prefix
    if not isinstance(tokens, list | tuple) or not tokens or not all(isinstance(token, int) for token in tokens):
        raise input_error(f"a prefix of at least one token in sample {index}", tokens, "Remove an empty prefix.")
    return list(tokens)
