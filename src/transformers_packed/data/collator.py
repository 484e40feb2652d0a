"""Flatten a batch of samples, or of rows of samples, into one packed row."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from transformers import DataCollatorWithFlattening as BuiltinDataCollatorWithFlattening
from transformers.utils import logging

from ..boundaries import SequenceBoundaries
from ..errors import input_error, unsupported
from ..models.families import families_of
from ..models.family import Own
from ..models.registry import cache_warning, has_our_classes, transformers_model
from ..models.verdict import cache_setting, complain, judge
from ..models.vision import packed_position_ids
from ..shared_prompts import SharedPrompts
from .samples import (
    IGNORED_LABEL,
    TOKEN_COLUMNS,
    TOKEN_TYPES,
    VISION_COLUMNS,
    VISION_GRIDS,
    as_list,
    check_lengths,
    check_one_document,
    documents_of,
    has_tokens,
    is_number,
    real_sample,
    refuse_missing,
)
from .trees import Parent, is_trl_row, nodes_of, read_trl_row, row_of


logger = logging.get_logger(__name__)

OnLeak = Literal["error", "warn", "ignore"]
_CALL = "DataCollatorWithFlattening"


class DataCollatorWithFlattening(BuiltinDataCollatorWithFlattening):
    """Transformers' `DataCollatorWithFlattening` with cumulative lengths, tail padding, masks and per-token columns.

    Concatenates the samples of a batch into one packed row with batch size 1. The first label of each sample becomes
    `separator_id`, because no token of the same document predicts it. The default arguments return the same batch as
    Transformers' collator if the samples have no `attention_mask`. As there, samples without tokens are left out.

    A batch element is a sample, a row of `PackingDataset` or `IterablePackingDataset` (a list of samples), or a row of
    `pack_dataset` (concatenated samples with their `seq_lengths`). The collator returns one packed row in each case.

    A sample may have `turns`, a list of samples that continue it and may have turns of their own. Each stands for the
    tokens of all that it continues and its own, and the row holds what several of them share once ([`SharedPrompts`]).
    A group, `{"prefix": tokens, "answers": samples}`, is such a tree whose first node has no labels. `data/trees.py`
    has the layout. Trees require a `model` with classes of this package.

    A row of TRL's `TreeRow.pack()` is the only element of its batch, which has `input_ids`, `position_ids` and
    `shift_labels` `[1, N]`, `cu_seqlens`, `parent_of`, and the columns of its terms.

    A sample holds `input_ids` (a list, numpy array or tensor) and these optional columns. One that is `None` is absent, but
    `labels` that are `None` are an error:

    * `labels`: one per token, or a single number per sample (sequence classification). Numbers are returned as
      `labels` `[N]`.
    * `attention_mask`: tokens with a mask of 0 are removed from every column. A warning notes those with a label.
    * the columns in `token_columns`: one value per token, flattened to `[1, T]`.
    * `pixel_values`, `image_grid_thw`, `pixel_values_videos`, `video_grid_thw`: concatenated along dimension 0.
    * `mm_token_type_ids`: flattened.

    Args:
        return_cu_seqlens (`bool`, *optional*, defaults to `False`):
            Return `cu_seqlens` (int32 `[N+1]`), the cumulative sample lengths.
        return_boundaries (`bool`, *optional*, defaults to `False`):
            Return `boundaries` ([`SequenceBoundaries`]), which keep the sample lengths on the host when the batch moves to
            a GPU. A model with classes of this package then does not wait for the GPU to read them. Not with
            `return_tensors="np"`.
        pad_to_multiple_of (`int`, *optional*):
            Pad the end of the row to a multiple of this number of tokens. The padding is an additional document with
            label -100. `padding_tokens` (`int`) in the batch holds its length.
        pad_token_id (`int`, *optional*):
            The padding token for `pad_to_multiple_of`.
        token_columns (`Sequence[str]`, *optional*, defaults to `()`):
            Additional per-token columns to flatten; tail padding holds 0 in them. All other columns are dropped, as in
            Transformers' collator.
        model (`PreTrainedModel` or `PreTrainedConfig`, *optional*):
            The model to train. The collator checks at once whether the model keeps the documents of its batches apart.
            It warns about a stock model with a cache, because only `Trainer` turns the cache off. Without a model, or
            with a configuration, nothing is checked, and the log says so once. With a vision-language model or its
            configuration, rows with images or videos get position ids `[4, 1, T]` (text, time, height, width) that
            restart in every sample. Otherwise the model computes them.
        on_leak (`str`, *optional*, defaults to `"error"`):
            Action for a model that is known to leak between the documents of these batches, or for an adapter that
            acts once per row (PEFT prompt learning): `"error"`, `"warn"` or `"ignore"`, which skips the check. Only
            [`configure_packing`] also refuses `label_smoothing_factor` where `Trainer` does not shift the labels, and
            scales NEFTune noise per document.

    Keyword Args:
        return_position_ids (`bool`, *optional*, defaults to `True`):
            Return `position_ids` `[1, T]`, which restart in every sample. Another form of boundaries can replace them.
        separator_id (`int`, *optional*, defaults to -100):
            The label of each sample's first token.
        return_flash_attn_kwargs (`bool`, *optional*, defaults to `False`):
            Return `cu_seq_lens_q`, `cu_seq_lens_k` (int32 `[N+1]`), `max_length_q` and `max_length_k` (`int`).
        return_seq_idx (`bool`, *optional*, defaults to `False`):
            Return `seq_idx` (int32 `[1, T]`), the sample index of each token.
        position_ids_start (`int`, *optional*, defaults to 0):
            The position id of each sample's first token.
        return_tensors (`str`, *optional*, defaults to `"pt"`):
            `"pt"` or `"np"`.

    Raises:
        `ValueError`: a batch without tokens, a sample without tokens that has a label of its own, a sample of several documents (`position_ids` that restart), columns of
            different lengths, documents without any boundaries, `pad_to_multiple_of` without `pad_token_id`, an unknown
            `on_leak`, or a `model` that leaks or does not shift labels.

    Example:

    ```python
    >>> from transformers_packed import DataCollatorWithFlattening
    >>> options = {"return_cu_seqlens": True, "pad_to_multiple_of": 4, "pad_token_id": 0}
    >>> collator = DataCollatorWithFlattening(**options, on_leak="ignore")  # with a Trainer, pass model=model instead
    >>> batch = collator([{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}])
    >>> batch["input_ids"].tolist(), batch["cu_seqlens"].tolist()
    ([[5, 6, 7, 8, 9, 0, 0, 0]], [0, 3, 5, 8])
    >>> batch["labels"].tolist()
    [[-100, 6, 7, -100, 9, -100, -100, -100]]

    ```
    """

    # That of the collator in whose place it is. Trainer saves it beside the model.
    tokenizer: Any = None

    def __init__(
        self,
        *args,
        return_cu_seqlens: bool = False,
        return_boundaries: bool = False,
        pad_to_multiple_of: int | None = None,
        pad_token_id: int | None = None,
        token_columns: Sequence[str] = (),
        model: Any = None,
        on_leak: OnLeak = "error",
        **kwargs,
    ):
        super().__init__(*args, **kwargs)
        if on_leak not in get_args(OnLeak):
            raise input_error('on_leak "error", "warn" or "ignore"', repr(on_leak))
        if pad_to_multiple_of is not None and pad_to_multiple_of < 1:
            raise input_error("pad_to_multiple_of of at least 1", f"{pad_to_multiple_of}", "Change it.")
        if pad_to_multiple_of is not None and pad_token_id is None:
            fix = "Pass pad_token_id=tokenizer.pad_token_id."
            raise input_error("pad_token_id with pad_to_multiple_of", "none", fix)
        self.on_leak = on_leak
        inner = transformers_model(model) if isinstance(model, torch.nn.Module) else None
        self.model_shares_prompts = inner is not None and has_our_classes(inner) and bool(families_of(inner, Own))
        self.config = getattr(model if inner is None else inner, "config", model)
        self.return_cu_seqlens = return_cu_seqlens
        self.return_boundaries = return_boundaries
        self.pad_to_multiple_of = pad_to_multiple_of
        self.pad_token_id = pad_token_id
        self.token_columns = (token_columns,) if isinstance(token_columns, str) else tuple(token_columns)
        if on_leak != "ignore":
            self._judge(model)

    def _judge(self, model: Any) -> None:
        if not isinstance(model, torch.nn.Module):
            logger.warning_once(
                f"{_CALL}: no model, label smoothing or NEFTune is checked. Pass model=model, or call configure_packing(trainer)."
            )
            return
        inner, (leak, doubt) = transformers_model(model), judge(model, **self.given())
        complain(model, leak, doubt, self.on_leak)
        if inner is None or leak is not None or doubt is not None:
            return
        if not has_our_classes(inner) and cache_setting(inner):
            logger.warning_once(f"{_CALL}: {cache_warning(inner)}")

    def given(self) -> dict[str, Any]:
        """The boundaries that the batches carry, as arguments of [`models.verdict.judge`]."""
        flags = {"position_ids": self.return_position_ids, "seq_idx": self.return_seq_idx}
        names = [name for name, flag in (flags | {"cu_seq_lens": self.return_flash_attn_kwargs}).items() if flag]
        source = "all" if len(names) == 3 else "+".join(names) if self.return_position_ids else None
        return {"source": source, "cu_seqlens": self.return_cu_seqlens}

    def __call__(
        self,
        features: Sequence[Mapping[str, Any] | Sequence[Mapping[str, Any]]],
        return_tensors: str | None = None,
        separator_id: int | None = None,
    ) -> dict[str, Any]:
        """Flatten `features` into one packed row. The class docstring describes features and batches."""
        if any(map(is_trl_row, features)):
            return self._of_trl_row(features, return_tensors)
        nodes, parents = nodes_of(sample for feature in features for sample in documents_of(feature))
        try:
            return self._flatten(nodes, parents, return_tensors, separator_id)
        except TypeError:
            # Searched for only after a failure, because the search takes as long as the rest.
            for index, feature in enumerate(nodes):
                known = {*TOKEN_COLUMNS, *self.token_columns}
                refuse_missing(index, {name: column for name, column in feature.items() if name in known})
            raise

    def _flatten(
        self,
        features: list[Mapping[str, Any]],
        parents: list[Parent],
        return_tensors: str | None,
        separator_id: int | None,
    ) -> dict[str, Any]:
        numbers, features = self._with_tokens(features)
        token_columns = self.token_columns
        if any(TOKEN_TYPES in feature for feature in features) and TOKEN_TYPES not in token_columns:
            # A text-only sample may lack the column: all its tokens are text.
            token_columns += (TOKEN_TYPES,)
            features = [{TOKEN_TYPES: [0] * len(f["input_ids"]), **f} for f in features]
        samples = [self._sample(*part, token_columns) for part in zip(numbers, features, strict=True)]
        self._note_left_out_columns(features[0])
        document_labels = _take_document_labels(samples)
        parent_of: list[int] = []
        if any(parent is not None for parent in parents):
            self._check_trees(features, document_labels)
            samples, parent_of = row_of(dict(zip(numbers, samples, strict=True)), parents)
        padding = self._add_padding(samples)
        self._check_marks(len(samples))
        lengths = [len(sample["input_ids"]) for sample in samples]
        to_tensor = self._to_tensor(return_tensors)
        others = self._tokens(samples, return_tensors, separator_id)
        # In the order of Transformers' collator.
        batch = {name: others.pop(name) for name in ("input_ids", "labels")}
        batch |= self._places(lengths, to_tensor) | others
        if padding:
            # Transformers' collator sets separator_id on the first token of every document; padding must not have a label.
            batch["labels"][0, -padding:] = IGNORED_LABEL
            batch["padding_tokens"] = padding

        if document_labels is not None:
            batch["labels"] = to_tensor(_labels_of_documents(document_labels, bool(padding)))
        for name in token_columns:
            column = np.concatenate([_as_array(s[name]) for s in samples[: len(samples) - bool(padding)]])
            batch[name] = to_tensor(np.pad(column, (0, padding))[None])
        batch |= self._boundaries(lengths, padding, parent_of, to_tensor)
        return self._with_vision(batch, features, lengths, to_tensor)

    def _tokens(
        self, samples: list[dict[str, Any]], return_tensors: str | None, separator_id: int | None
    ) -> dict[str, Any]:
        """What Transformers' collator returns but the places of tokens, which it lists one by one."""
        flags = {"return_position_ids": False, "return_flash_attn_kwargs": self.return_flash_attn_kwargs}
        separator_id = self.separator_id if separator_id is None else separator_id
        return BuiltinDataCollatorWithFlattening(self.return_tensors, **flags)(samples, return_tensors, separator_id)

    def _places(self, lengths: list[int], to_tensor: Callable) -> dict[str, Any]:
        """The place of each token in its document, and the number of this document."""
        found, numbers = {}, np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        if self.return_position_ids:
            starts = np.cumsum([0, *lengths])[numbers]
            found["position_ids"] = to_tensor((np.arange(len(numbers)) - starts + self.position_ids_start)[None])
        if self.return_seq_idx:
            found["seq_idx"] = to_tensor(numbers[None])
        return found

    def _of_trl_row(self, features: Sequence[Any], return_tensors: str | None) -> dict[str, Any]:
        """The batch of a row of TRL, whose terms keep their places."""
        if len(features) > 1:
            got = f"{len(features)} elements"
            raise input_error("a row of TreeRow.pack() alone in its batch", got, "Set the batch size to 1.")
        self._check_trees(features, None)
        boundaries, parent_of, columns = read_trl_row(features[0])
        positions = columns["position_ids"] + self.position_ids_start
        columns |= {"cu_seqlens": boundaries.cu_seqlens, "position_ids": positions}
        if not self.return_position_ids:
            del columns["position_ids"]
        to_tensor = self._to_tensor(return_tensors)
        batch = {name: to_tensor(column) for name, column in columns.items()}
        return batch | self._boundaries(boundaries.lengths, 0, parent_of if max(parent_of) >= 0 else [], to_tensor)

    def _to_tensor(self, return_tensors: str | None) -> Callable:
        return np.asarray if (return_tensors or self.return_tensors) == "np" else torch.as_tensor

    def _add_padding(self, samples: list[dict[str, Any]]) -> int:
        """Add the padding at the end of the row as a document. Returns its length."""
        real_tokens = sum(len(sample["input_ids"]) for sample in samples)
        padding = -real_tokens % self.pad_to_multiple_of if self.pad_to_multiple_of else 0
        if padding:
            samples.append({"input_ids": [self.pad_token_id] * padding, "labels": [IGNORED_LABEL] * padding})
            for sample in samples:
                sample.setdefault("labels", sample["input_ids"])
        return padding

    def _boundaries(
        self, lengths: list[int], padding: int, parent_of: list[int], to_tensor: Callable
    ) -> dict[str, Any]:
        """The forms of boundaries that Transformers' collator does not return."""
        row = SharedPrompts.of(SequenceBoundaries.from_lengths(lengths), parent_of) if parent_of else None
        found: dict[str, Any] = {}
        if self.return_cu_seqlens or row is not None:
            found["cu_seqlens"] = to_tensor(np.cumsum([0, *lengths], dtype=np.int32))
        if row is not None:
            found["parent_of"] = to_tensor(np.array(parent_of))
            if self.return_position_ids:
                found["position_ids"] = to_tensor(row.position_ids + self.position_ids_start)
        if self.return_boundaries and to_tensor is torch.as_tensor:
            found["boundaries"] = row or SequenceBoundaries.from_lengths(lengths).with_padding(padding)
        return found

    def _with_vision(
        self, batch: dict[str, Any], features: list[Mapping[str, Any]], lengths: list[int], to_tensor: Callable
    ) -> dict[str, Any]:
        """Add the images and videos of the samples to a batch, and position ids for them."""
        for name in VISION_COLUMNS:
            parts = [torch.as_tensor(f[name]) for f in features if f.get(name) is not None]
            if parts:
                batch[name] = to_tensor(torch.cat(parts))
        if self.config is not None and self.return_position_ids and not batch.keys().isdisjoint(VISION_GRIDS):
            names = ("input_ids", TOKEN_TYPES, *VISION_GRIDS)
            columns = {name: torch.as_tensor(batch[name]) for name in names if name in batch}
            boundaries = SequenceBoundaries.from_lengths(lengths)
            batch["position_ids"] = to_tensor(packed_position_ids(self.config, boundaries, columns))
        return batch

    def _check_marks(self, documents: int) -> None:
        forms = "position_ids seq_idx flash_attn_kwargs cu_seqlens boundaries".split()
        if documents > 1 and self.on_leak == "error" and not any(getattr(self, f"return_{form}") for form in forms):
            fix = 'Set return_position_ids=True or another form, or on_leak="ignore" to let documents mix.'
            raise input_error(
                f"boundaries of the batch's {documents} documents", "return_position_ids=False alone", fix
            )

    def _check_trees(self, features: Sequence[Mapping[str, Any]], document_labels: list | None) -> None:
        """Raise a `ValueError` for options and columns that trees do not support."""
        found = {
            "a model without classes of this package, or none": not self.model_shares_prompts,
            "pad_to_multiple_of": self.pad_to_multiple_of,
            "one label per sample": document_labels is not None,
            "images or videos": any(f.get(name) is not None for f in features for name in VISION_COLUMNS),
        }
        if got := next((what for what, given in found.items() if given), None):
            fix = "Pass model=model after patch_model(model), and drop other options, or pass whole documents."
            raise input_error("trees of samples for a model that shares prompts", got, fix)

    def _with_tokens(self, features: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[Mapping[str, Any]]]:
        """The samples without masked tokens, and their numbers. Samples without any token are left out."""
        if not features:
            raise input_error("at least one sample", "an empty batch")
        real = {}
        for index, feature in enumerate(features):
            sample = real_sample(feature, index)
            check_lengths(index, feature, self.token_columns)
            if has_tokens(index, sample):
                real[index] = sample
        if not real:
            got = f"{len(features)} without any (empty input_ids, or only masked tokens)"
            raise input_error("a sample with tokens in the batch", got, "Remove such samples from the dataset.")
        for index, sample in real.items():
            for name in self.token_columns:
                if name not in sample:
                    fix = "Add it, or remove it from token_columns."
                    raise input_error(f"the token column {name!r} in every sample", f"none in sample {index}", fix)
        return list(real), list(real.values())

    def _sample(self, index: int, feature: Mapping[str, Any], token_columns: tuple[str, ...]) -> dict[str, Any]:
        """The columns of a sample as lists. A label per sample stays a number."""
        names = dict.fromkeys(("input_ids", "labels", *token_columns))
        if "position_ids" not in token_columns:
            check_one_document(index, feature)
        return {name: as_list(feature[name]) for name in names if name in feature}

    def _note_left_out_columns(self, feature: Mapping[str, Any]) -> None:
        tokens = len(feature["input_ids"])
        known = {*TOKEN_COLUMNS, *VISION_COLUMNS, "position_ids", *self.token_columns}
        others = {name: as_list(column) for name, column in feature.items() if name not in known}
        alike = [name for name, values in others.items() if isinstance(values, list) and len(values) == tokens]
        left_out = [name for name in alike if isinstance(others[name][0], int | float)]
        if left_out:
            logger.warning_once(
                f"{_CALL}: the per-token columns {', '.join(left_out)} are not part of the packed row, as in "
                f"Transformers' collator. Pass token_columns={tuple(left_out)} to flatten them as well."
            )


def _take_document_labels(samples: list[dict[str, Any]]) -> list | None:
    """Remove labels that are one number per sample, and return them. Labels per token stay."""
    labelled = {"labels" in sample for sample in samples}
    if len(labelled) > 1:
        raise input_error("labels in all samples or in none", "labels in some", "Add or drop the column.")
    scalar = {is_number(sample["labels"]) for sample in samples} if labelled == {True} else {False}
    if len(scalar) > 1:
        raise input_error("one label per token in all samples, or one number per sample in all of them", "both")
    return [sample.pop("labels") for sample in samples] if scalar == {True} else None


def _labels_of_documents(labels: list, padded: bool) -> np.ndarray:
    if padded and any(isinstance(label, float) for label in labels):
        expected = "integer labels with pad_to_multiple_of, which marks padding with -100"
        raise input_error(expected, "floating-point labels", "Remove pad_to_multiple_of for regression.")
    return _as_array(labels + [IGNORED_LABEL] * padded)


def _as_array(values: list) -> np.ndarray:
    """Floats are float32, as in Transformers' default collator."""
    array = np.asarray(values)
    if array.dtype == object:
        raise TypeError(f"expected numbers, got {values[:10]}")
    return array.astype(np.float32) if array.dtype == np.float64 else array


class CausalLabelsCollator(DataCollatorWithFlattening):
    """Our collator with the labels of `DataCollatorForLanguageModeling(mlm=False)`: all tokens except padding tokens.

    Args:
        ignored_token (`int`, *optional*):
            The padding token. It is never a target, even where it has another meaning.
        kwargs (`Any`, *optional*):
            Arguments of [`DataCollatorWithFlattening`].
    """

    def __init__(self, ignored_token: int | None, **kwargs):
        super().__init__(**kwargs)
        self.ignored_token = ignored_token

    def _check_trees(self, features: Sequence[Mapping[str, Any]], document_labels: list | None) -> None:
        raise unsupported("a collator that labels all tokens", "trees of samples", "Give their nodes labels.")

    def __call__(self, features: Any, return_tensors: str | None = None, separator_id: int | None = None) -> dict:
        batch = super().__call__(features, return_tensors, separator_id)
        not_targets = batch["position_ids"] == 0
        if self.ignored_token is not None:
            not_targets = not_targets | (batch["input_ids"] == self.ignored_token)
        batch["labels"] = torch.where(not_targets, -100, batch["input_ids"])
        return batch
