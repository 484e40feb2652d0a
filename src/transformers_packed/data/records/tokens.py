"""Records of token ids, with labels or masks of the loss."""

from typing import Any

import numpy as np

from ...errors import input_error
from ..samples import IGNORED_LABEL, MASK, TURNS, real_sample
from .columns import LOSS_MASKS


_TOKENS, _LABELS = "input_ids", "labels"
_CORRECT = "Correct the record."
_LARGEST_ID = np.iinfo(np.int32).max


def read_tokens(record: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """The token ids of a record and their labels, int32 `[tokens]`, without masked tokens.

    Without labels, the targets are the tokens that all masks of the loss have.

    Raises:
        `ValueError`: a column is malformed or has another length, or labels and masks disagree.
    """
    ids = _ids(record, _TOKENS, 0)
    masks = [name for name in LOSS_MASKS if name in record]
    targets = np.ones(len(ids), bool)
    for name in masks:
        targets &= _mask(name, record[name], len(ids))
    sample = {_TOKENS: ids, "targets": targets} | {name: record[name] for name in (MASK, TURNS) if name in record}
    if _LABELS in record:
        sample[_LABELS] = labels = _ids(record, _LABELS, IGNORED_LABEL)
        _check_length(_LABELS, len(labels), len(ids))
        if masks and ((labels != IGNORED_LABEL) != targets).any():
            raise input_error(f"labels with the targets of {' and '.join(masks)}", "others", "Remove one of them.")
    if not isinstance(record.get(MASK, []), list):
        raise input_error(f"{MASK} as a list", repr(record[MASK])[:60], _CORRECT)
    real = real_sample(sample)
    if not len(real[_TOKENS]):
        raise input_error("at least one token", "only masked tokens", "Remove the record.")
    if _LABELS in real:
        return real[_TOKENS], real[_LABELS]
    return real[_TOKENS], np.where(real["targets"], real[_TOKENS], IGNORED_LABEL)


def _ids(record: dict[str, Any], name: str, lowest: int) -> np.ndarray:
    column = _array(record[name])
    if column.ndim != 1 or column.dtype.kind not in "iu" or len(column) == 0:
        got = repr(record[name])[:60]
        raise input_error(f"{name} as a list of at least one token id", got, _CORRECT)
    wrong = column[(column < 0) & (column != lowest) | (column > _LARGEST_ID)]
    if len(wrong):
        expected = f"token ids from 0 to {_LARGEST_ID}{f' or {lowest}' if lowest else ''} in {name}"
        raise input_error(expected, wrong[0], _CORRECT)
    return column.astype(np.int32)


def _mask(name: str, value: Any, tokens: int) -> np.ndarray:
    mask = _array(value)
    if mask.ndim != 1 or mask.dtype.kind not in "biu" or not np.isin(mask, (0, 1)).all():
        raise input_error(f"{name} as a list of 0 and 1", repr(value)[:60], _CORRECT)
    _check_length(name, len(mask), tokens)
    return mask.astype(bool)


def _array(value: Any) -> np.ndarray:
    try:
        return np.asarray(value)
    except ValueError:
        return np.empty((0, 0))


def _check_length(name: str, length: int, tokens: int) -> None:
    if length != tokens:
        raise input_error(f"{name} with the length of {_TOKENS}, {tokens}", length, _CORRECT)
