import copy
import itertools
import pickle
import unittest
from functools import partial
from unittest import mock

import numpy as np
import torch
from common.releases import RELEASE
from packaging.version import Version
from parameterized import parameterized
from transformers import DataCollatorWithFlattening as BuiltinDataCollatorWithFlattening

import transformers_packed
from transformers_packed import SequenceBoundaries
from transformers_packed.data import samples as samples_module


# No model trains on these batches, so skip the check for leaks.
DataCollatorWithFlattening = partial(transformers_packed.DataCollatorWithFlattening, on_leak="ignore")


SKIPS_EMPTY = RELEASE >= Version("5.24")
KINDS = {"lists": list, "numpy": np.array, "tensors": torch.tensor}
LOGGER = "transformers_packed.data.collator"


def make_features(kind="lists", labels=True, lengths=(3, 1, 5)):
    """Create samples with distinct tokens, and labels that differ from them."""
    features, token = [], 10
    for length in lengths:
        feature = {"input_ids": KINDS[kind](list(range(token, token + length)))}
        if labels:
            feature["labels"] = KINDS[kind](list(range(token + 500, token + 500 + length)))
        features.append(feature)
        token += length
    return features


def as_lists(batch):
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in batch.items()}


class SameAsBuiltinTest(unittest.TestCase):
    def assert_same_batch(self, ours, builtin):
        self.assertEqual(list(ours), list(builtin))
        for name, expected in builtin.items():
            self.assertIs(type(ours[name]), type(expected), name)
            if not isinstance(expected, int):
                self.assertEqual(ours[name].dtype, expected.dtype, name)
                self.assertEqual(ours[name].shape, expected.shape, name)
                expected = expected.tolist()
            self.assertEqual(as_lists(ours)[name], expected, name)

    @parameterized.expand(itertools.product(KINDS, (True, False), ("pt", "np")))
    def test_every_argument(self, kind, labels, return_tensors):
        features = make_features(kind, labels)
        choices = {
            "return_position_ids": (True, False),
            "separator_id": (-100, 7),
            "return_flash_attn_kwargs": (False, True),
            "return_seq_idx": (False, True),
            "position_ids_start": (0, 2),
        }
        for values in itertools.product(*choices.values()):
            arguments = dict(zip(choices, values, strict=True))
            with self.subTest(**arguments):
                self.assert_same_batch(
                    DataCollatorWithFlattening(**arguments, return_tensors=return_tensors)(features),
                    BuiltinDataCollatorWithFlattening(**arguments, return_tensors=return_tensors)(features),
                )

    def test_other_columns_are_left_out(self):
        features = [{"input_ids": [1, 2], "text": "ab", "id": 3, "spans": [[0, 1], [2]], "meta": {"a": 1, "b": 2}}]
        self.assert_same_batch(DataCollatorWithFlattening()(features), BuiltinDataCollatorWithFlattening()(features))

    @parameterized.expand(itertools.product(KINDS, (True, False), ("pt", "np")))
    def test_samples_without_tokens_are_left_out(self, kind, labels, return_tensors):
        arguments = {"return_seq_idx": True, "return_flash_attn_kwargs": True, "return_tensors": return_tensors}
        builtin = BuiltinDataCollatorWithFlattening(**arguments)
        for lengths in ((0, 3, 1, 5), (3, 0, 0, 1, 5), (3, 1, 5, 0)):
            features = make_features(kind, labels, lengths)
            ours = DataCollatorWithFlattening(**arguments)(features)
            # Releases before 5.24 keep such samples as documents without tokens.
            self.assert_same_batch(ours, builtin(features if SKIPS_EMPTY else make_features(kind, labels)))
            masked = [{**f, "attention_mask": [1] * len(f["input_ids"])} for f in features]
            masked.append({**make_features(kind, labels)[0], "attention_mask": [0, 0, 0]})
            self.assert_same_batch(DataCollatorWithFlattening(**arguments)(masked), ours)

    def test_is_a_builtin_collator(self):
        # Trainers check for the class.
        self.assertIsInstance(DataCollatorWithFlattening(), BuiltinDataCollatorWithFlattening)


class CuSeqlensTest(unittest.TestCase):
    @parameterized.expand([("pt",), ("np",)])
    def test_values(self, return_tensors):
        collator = DataCollatorWithFlattening(
            return_cu_seqlens=True, return_flash_attn_kwargs=True, return_tensors=return_tensors
        )
        batch = collator(make_features())
        self.assertEqual(batch["cu_seqlens"].tolist(), [0, 3, 4, 9])
        self.assertEqual(batch["cu_seqlens"].tolist(), batch["cu_seq_lens_q"].tolist())
        self.assertEqual(batch["cu_seqlens"].dtype, batch["cu_seq_lens_q"].dtype)
        self.assertIs(type(batch["cu_seqlens"]), type(batch["cu_seq_lens_q"]))

    def test_every_spelling_gives_the_same_boundaries(self):
        collator = DataCollatorWithFlattening(
            return_cu_seqlens=True, return_seq_idx=True, pad_to_multiple_of=8, pad_token_id=0
        )
        batch = collator(make_features())
        boundaries = SequenceBoundaries.from_cu_seqlens(batch["cu_seqlens"], total_length=batch["input_ids"].shape[1])
        self.assertEqual(boundaries.lengths, [3, 1, 5, 7])
        self.assertTrue(boundaries.same_as(SequenceBoundaries.from_seq_idx(batch["seq_idx"])))
        self.assertTrue(boundaries.same_as(SequenceBoundaries.from_position_ids(batch["position_ids"])))


class BoundariesTest(unittest.TestCase):
    def test_lengths_on_the_host(self):
        collator = DataCollatorWithFlattening(return_boundaries=True, pad_to_multiple_of=8, pad_token_id=0)
        boundaries = pickle.loads(pickle.dumps(collator(make_features())["boundaries"]))
        self.assertEqual((boundaries.lengths, boundaries.padding_tokens), ([3, 1, 5, 7], 7))
        self.assertEqual(boundaries.to("meta").lengths, [3, 1, 5, 7])
        self.assertNotIn("boundaries", collator(make_features(), return_tensors="np"))


class PaddingTest(unittest.TestCase):
    def collate(self, features, pad_to_multiple_of=4, **arguments):
        collator = DataCollatorWithFlattening(
            pad_to_multiple_of=pad_to_multiple_of,
            pad_token_id=99,
            return_cu_seqlens=True,
            return_seq_idx=True,
            return_flash_attn_kwargs=True,
            **arguments,
        )
        return collator(features)

    @parameterized.expand(itertools.product(KINDS, ("pt", "np"), (-100, 7)))
    def test_padding_is_one_document(self, kind, return_tensors, separator_id):
        # Elsewhere: empty or one-token documents at the end of a row crash kernels.
        batch = self.collate(
            make_features(kind), return_tensors=return_tensors, separator_id=separator_id, position_ids_start=2
        )
        expected = {
            "input_ids": [[10, 11, 12, 13, 14, 15, 16, 17, 18, 99, 99, 99]],
            "labels": [
                [separator_id, 511, 512, separator_id, separator_id, 515, 516, 517, 518, -100, -100, -100],
            ],
            "position_ids": [[2, 3, 4, 2, 2, 3, 4, 5, 6, 2, 3, 4]],
            "seq_idx": [[0, 0, 0, 1, 2, 2, 2, 2, 2, 3, 3, 3]],
            "cu_seq_lens_q": [0, 3, 4, 9, 12],
            "cu_seq_lens_k": [0, 3, 4, 9, 12],
            "max_length_q": 5,
            "max_length_k": 5,
            "padding_tokens": 3,
            "cu_seqlens": [0, 3, 4, 9, 12],
        }
        self.assertEqual(as_lists(batch), expected)

    @parameterized.expand(KINDS)
    def test_labels_are_the_tokens_without_a_labels_column(self, kind):
        batch = self.collate(make_features(kind, labels=False))
        self.assertEqual(batch["labels"].tolist(), [[-100, 11, 12, -100, -100, 15, 16, 17, 18, -100, -100, -100]])

    def test_long_padding_counts_for_the_maximum(self):
        batch = self.collate(make_features(), pad_to_multiple_of=100)
        self.assertEqual(batch["max_length_q"], 91)
        self.assertEqual(batch["cu_seqlens"].tolist(), [0, 3, 4, 9, 100])

    @parameterized.expand([(1,), (3,), (9,)])
    def test_no_padding_document_when_the_length_fits(self, multiple):
        batch = self.collate(make_features(), pad_to_multiple_of=multiple)
        expected = DataCollatorWithFlattening(
            return_cu_seqlens=True, return_seq_idx=True, return_flash_attn_kwargs=True
        )(make_features())
        self.assertEqual(as_lists(batch), as_lists(expected))

    def test_separator_of_the_call(self):
        collator = DataCollatorWithFlattening(pad_to_multiple_of=4, pad_token_id=0)
        batch = collator([{"input_ids": [1, 2, 3]}], separator_id=5)
        self.assertEqual(batch["labels"].tolist(), [[5, 2, 3, -100]])


class AttentionMaskTest(unittest.TestCase):
    MASKS = [
        ("right", [1, 1, 1, 0, 0], [0, 1, 2]),
        ("left", [0, 0, 1, 1, 1], [2, 3, 4]),
        ("holes", [1, 0, 1, 0, 1], [0, 2, 4]),
        ("nothing_masked", [1, 1, 1, 1, 1], [0, 1, 2, 3, 4]),
    ]

    @parameterized.expand([(*mask, kind) for mask, kind in zip(MASKS, (*KINDS, "lists"), strict=True)])
    def test_masked_tokens_leave_all_columns(self, _, mask, kept, kind):
        make = KINDS[kind]
        tokens, labels, weights = [10, 11, 12, 13, 14], [20, 21, 22, 23, 24], [0, 1, 2, 3, 4]
        features = [
            {
                "input_ids": make(tokens),
                "labels": make(labels),
                "weights": make(weights),
                "attention_mask": make(mask),
            },
            {"input_ids": make([30, 31]), "labels": make([40, 41]), "weights": make([8, 9])},
        ]
        batch = DataCollatorWithFlattening(token_columns=["weights"], return_cu_seqlens=True)(features)
        self.assertEqual(
            as_lists(batch),
            {
                "input_ids": [[*(tokens[i] for i in kept), 30, 31]],
                "labels": [[-100, *(labels[i] for i in kept[1:]), -100, 41]],
                "position_ids": [[*range(len(kept)), 0, 1]],
                "weights": [[*(weights[i] for i in kept), 8, 9]],
                "cu_seqlens": [0, len(kept), len(kept) + 2],
            },
        )

    @parameterized.expand([([1, -100], 0), (3, 0), ([1, 2], 1)])
    def test_masked_targets_are_noted(self, labels, warnings):
        with mock.patch.object(samples_module.logger, "warning_once") as warned:
            DataCollatorWithFlattening()([{"input_ids": [1, 2], "attention_mask": [1, 0], "labels": labels}])
        self.assertEqual(warned.call_count, warnings)

    @parameterized.expand(
        [([0, 1, 1, 1], 0), ([1, 1, 0, 0], 0), ([1, 0, 0, 1], 1), ([0, 1, 0, 1], 1), ([0, 0, 0, 0], 0)]
    )
    def test_a_gap_in_a_mask_is_noted(self, mask, warnings):
        with mock.patch.object(samples_module.logger, "warning_once") as warned:
            samples_module.real_sample({"input_ids": [5, 6, 7, 8], "attention_mask": mask})
        self.assertEqual(warned.call_count, warnings)

    def test_bool_mask_and_labels_from_tokens(self):
        features = [{"input_ids": [1, 2, 3], "attention_mask": torch.tensor([False, True, True])}]
        self.assertEqual(DataCollatorWithFlattening()(features)["labels"].tolist(), [[-100, 3]])

    def test_a_label_per_sample_is_kept(self):
        features = [{"input_ids": [1, 2, 3], "attention_mask": [0, 1, 1], "labels": 6}]
        batch = DataCollatorWithFlattening()(features)
        self.assertEqual(batch["input_ids"].tolist(), [[2, 3]])
        self.assertEqual(batch["labels"].tolist(), [6])


class TokenColumnsTest(unittest.TestCase):
    FEATURES = [
        {"input_ids": [1, 2], "kind": [5, 6], "weight": [0.5, 1.0], "keep": [True, False]},
        {"input_ids": [3], "kind": [7], "weight": [2.0], "keep": [True]},
    ]
    DTYPES = {"kind": "int64", "weight": "float32", "keep": "bool"}

    @parameterized.expand(itertools.product(("pt", "np"), (None, 4)))
    def test_flattened_alongside(self, return_tensors, multiple):
        collator = DataCollatorWithFlattening(
            token_columns=("kind", "weight", "keep"),
            return_tensors=return_tensors,
            pad_to_multiple_of=multiple,
            pad_token_id=9,
        )
        batch = collator(self.FEATURES)
        padding = 0 if multiple is None else 1
        self.assertEqual(batch["kind"].tolist(), [[5, 6, 7] + [0] * padding])
        self.assertEqual(batch["weight"].tolist(), [[0.5, 1.0, 2.0] + [0.0] * padding])
        self.assertEqual(batch["keep"].tolist(), [[True, False, True] + [False] * padding])
        for name, dtype in self.DTYPES.items():
            # Padding must not change the dtype of a column between batches.
            self.assertEqual(str(batch[name].dtype).removeprefix("torch."), dtype)
            self.assertIs(type(batch[name]), type(batch["input_ids"]))


class ScalarLabelsTest(unittest.TestCase):
    @parameterized.expand(
        [
            ("ints", [2, 0], "int64"),
            ("floats", [0.5, -1.5], "float32"),
            ("numpy_ints", [np.int64(2), np.int64(0)], "int64"),
            ("tensors", [torch.tensor(2), torch.tensor(0)], "int64"),
            ("float_tensors", [torch.tensor(0.5), torch.tensor(-1.5)], "float32"),
        ]
    )
    def test_one_number_per_sample(self, _, labels, dtype):
        features = [{"input_ids": [1, 2, 3], "labels": labels[0]}, {"input_ids": [4], "labels": labels[1]}]
        for return_tensors in ("pt", "np"):
            batch = DataCollatorWithFlattening(return_tensors=return_tensors)(features)
            self.assertEqual(batch["labels"].tolist(), [float(label) for label in labels])
            self.assertEqual(str(batch["labels"].dtype).removeprefix("torch."), dtype)
            self.assertEqual(batch["input_ids"].tolist(), [[1, 2, 3, 4]])


def collate(features, **arguments):
    return lambda: DataCollatorWithFlattening(**arguments)(features)


# A call, and what its error expected and got.
BAD_INPUTS = [
    (collate([]), "at least one sample.*, got .*an empty batch"),
    (collate([{"input_ids": []}, {"input_ids": []}]), "a sample with tokens in the batch.*, got .*2 without any"),
    (
        collate([{"input_ids": [1, 2], "attention_mask": [0, 0]}]),
        "a sample with tokens in the batch.*, got .*1 without any .*only masked tokens",
    ),
    (
        collate([{"input_ids": [1], "labels": 1}, {"input_ids": [], "labels": 0}]),
        "at least one token in sample 1, which has a label of its own.*, got .*none",
    ),
    (collate([{"input_ids": torch.tensor([[1, 2]])}]), r"input_ids \[tokens\] in sample 0.*, got .*nested"),
    (
        collate([{"input_ids": [1, 2], "labels": [1]}]),
        "labels with the length of input_ids, 2, in sample 0.*, got .*1",
    ),
    (
        collate([{"input_ids": [1], "labels": [1]}, {"input_ids": [1]}]),
        "labels in all samples or in none.*, got .*labels in some",
    ),
    (
        collate([{"input_ids": [1], "labels": 1}, {"input_ids": [1], "labels": [1]}]),
        "one label per token in all samples, or one number per sample.*, got .*both",
    ),
    (
        collate([{"input_ids": [1], "weight": [1]}, {"input_ids": [1]}], token_columns=["weight"]),
        "the token column 'weight' in every sample.*, got .*none in sample 1",
    ),
    (
        collate([{"input_ids": [1], "labels": 0.5}], pad_to_multiple_of=2, pad_token_id=0),
        "integer labels.*, got .*floating-point",
    ),
    (lambda: DataCollatorWithFlattening(pad_to_multiple_of=8), "pad_token_id with pad_to_multiple_of.*, got .*none"),
    (lambda: DataCollatorWithFlattening(pad_to_multiple_of=0, pad_token_id=0), "at least 1.*, got .*0"),
    (
        lambda: DataCollatorWithFlattening()([{"input_ids": [1, 2, 3], "position_ids": [0, 1, 0]}]),
        "position_ids of one document in sample 0.*, got .*0 after 1",
    ),
]


class BadInputTest(unittest.TestCase):
    @parameterized.expand(BAD_INPUTS)
    def test_message(self, function, message):
        with self.assertRaisesRegex(ValueError, rf"^expected .*{message}.*\."):
            function()

    @parameterized.expand(
        itertools.product(("input_ids", "labels", "attention_mask", "weight", "mm_token_type_ids"), ("pt", "np"))
    )
    def test_missing_values_name_their_sample(self, name, return_tensors):
        names = ("input_ids", "labels", "attention_mask", "weight", "mm_token_type_ids")
        collator = DataCollatorWithFlattening(token_columns=["weight"], return_tensors=return_tensors)
        samples = [dict.fromkeys(names, [1, 1, 1]) for _ in range(4)]
        missing = "None" if name in ("input_ids", "labels") else None
        for value, got in ((None, missing), ([1, None, 1], "None at token 1")):
            for first in (2, 0):
                # In one sample of a row, or in all samples.
                bad = [{**s, name: value} if i == 2 or not first else s for i, s in enumerate(samples)]
                pattern = f"{name} without missing values in sample {first}, got {got}[.]"
                if got is None and name != "weight":
                    # An absent column.
                    continue
                pattern = pattern if got else f"the token column 'weight' in every sample, got none in sample {first}"
                with self.subTest(value=value, first=first), self.assertRaisesRegex(ValueError, pattern):
                    collator([bad[:1], *bad[1:]])


class DataCollatorWithFlatteningTest(unittest.TestCase):
    def test_left_out_columns_are_named_once(self):
        make, name = np.array, "reward"
        features = [
            {
                "input_ids": make([1, 2, 3]),
                "attention_mask": make([0, 1, 1]),
                "position_ids": make([0, 1, 2]),
                name: make([0.1, 0.2, 0.3]),
                "text": "abc",
                "messages": ["a", "b", "c"],
                "length": 3,
            }
        ]
        collator = DataCollatorWithFlattening()
        with self.assertLogs(LOGGER, "WARNING") as logs:
            batch = collator(features)
        self.assertEqual(len(logs.output), 1)
        self.assertRegex(
            logs.output[0], rf"columns {name} are not part of the packed row.*token_columns=\('{name}',\)"
        )
        self.assertNotIn(name, batch)
        with self.assertNoLogs(LOGGER, "WARNING"):
            collator(features)
            DataCollatorWithFlattening(token_columns=[name])(features)

    def test_features_are_not_modified(self, kind="tensors"):
        features = make_features(kind)
        for feature in features:
            feature["attention_mask"] = KINDS[kind]([0] + [1] * (len(feature["input_ids"]) - 1))
            feature["weight"] = KINDS[kind]([1] * len(feature["input_ids"]))
        del features[1]
        before = copy.deepcopy(features)
        collator = DataCollatorWithFlattening(
            pad_to_multiple_of=16, pad_token_id=0, token_columns=["weight"], separator_id=7
        )
        first = collator(features)
        self.assertEqual([as_lists(feature) for feature in features], [as_lists(feature) for feature in before])
        self.assertEqual([list(feature) for feature in features], [list(feature) for feature in before])
        self.assertEqual(as_lists(collator(features)), as_lists(first))
