"""Groups of answers to one prefix, as a row in which equal prefixes occur once ([`SharedPrompts`]).

Each answer stands for the document "prefix and answer". The last token of a prefix predicts the first token of each of
its answers, which may differ. Each answer therefore starts with a copy of this token:

    {"prefix": [5, 6, 7], "answers": [{"input_ids": [8, 9]}, {"input_ids": [4]}]}  ->  | 5 6 | 7 8 9 | 7 4 |

The tokens of a prefix, and their copies, have no labels. The router's auxiliary loss counts the tokens of a row, and so
those of a prefix once.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import Any

from ..errors import input_error
from .samples import IGNORED_LABEL, PREFIX, as_list, cut_sample


Sample = dict[str, Any]


def documents_of(element: Any) -> Iterator[Mapping[str, Any]]:
    """The samples of one batch element: a sample, a group, or a row (a list of samples, or joined by `seq_lengths`)."""
    if isinstance(element, list | tuple):
        for sample in element:
            yield from documents_of(sample)
    elif "answers" in element and "input_ids" not in element:
        yield from answers_of(element)
    elif "seq_lengths" in element and "input_ids" in element:
        columns = {name: column for name, column in element.items() if name != "seq_lengths"}
        lengths, total = as_list(element["seq_lengths"]), len(columns["input_ids"])
        if sum(lengths) != total:
            fix = "Pass the rows unchanged, as pack_dataset returns them."
            raise input_error(f"seq_lengths that sum to the row's {total} tokens", sum(lengths), fix)
        for start, length in zip(accumulate(lengths, initial=0), lengths, strict=False):
            yield cut_sample(columns, start, length)
    else:
        yield element


def answers_of(group: Mapping[str, Any]) -> Iterator[Sample]:
    """The answers of a group as samples, each with the prefix."""
    answers, prefix = group["answers"], as_list(group.get("prefix"))
    if not isinstance(prefix, list | tuple) or not prefix or not all(isinstance(token, int) for token in prefix):
        raise input_error("a prefix of at least one token in a group", prefix, "Pass other samples without a group.")
    if not isinstance(answers, list | tuple) or not all(isinstance(answer, Mapping) for answer in answers):
        raise input_error("answers of a group as a list of samples", type(answers).__name__)
    if not answers:
        raise input_error("at least one answer in a group", "none", "Remove such groups from the dataset.")
    for answer in answers:
        yield {**answer, PREFIX: list(prefix)}


def with_prefixes_first(samples: Iterable[Sample]) -> tuple[list[Sample], list[int]]:
    """Return the documents of the row, and the index of the prompt of each, or -1. Without prompts, the indices are empty.

    `samples` are columns of tokens, and some have a prefix. Prefixes come first, in the order of their first samples,
    then samples without a prefix, then the others.
    """
    prompts: dict[tuple[int, ...], Sample] = {}
    alone: list[Sample] = []
    answers: list[tuple[tuple[int, ...], Sample]] = []
    for sample in samples:
        columns = {"labels": sample["input_ids"], **sample}
        *prompt, last = columns.pop(PREFIX, None) or [None]
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
    if not prompts:
        return alone, []
    documents = [*prompts.values(), *alone, *(columns for _, columns in answers)]
    return documents, [-1] * (len(prompts) + len(alone)) + [index[prompt] for prompt, _ in answers]
