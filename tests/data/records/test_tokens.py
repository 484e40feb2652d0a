import unittest

from common.records import records
from parameterized import parameterized

from transformers_packed.data.records.columns import LOSS_MASKS
from transformers_packed.data.records.samples import make_samples


IDS = [5, 6, 7, 8]


class TokensTest(unittest.TestCase):
    @parameterized.expand(
        [
            ("alone", {}, IDS, IDS),
            ("labels", {"labels": [-100, 6, -100, 9]}, IDS, [-100, 6, -100, 9]),
            ("padding", {"attention_mask": [0, 1, 1, 1]}, IDS[1:], IDS[1:]),
            (
                "padding and labels",
                {"attention_mask": [1, 1, 1, 0], "labels": [-100, 6, 7, -100]},
                IDS[:3],
                [-100, 6, 7],
            ),
            *[(name, {name: [0, 1, 0, 1]}, IDS, [-100, 6, -100, 8]) for name in LOSS_MASKS],
            ("booleans", {"loss_mask": [False, True, True, False]}, IDS, [-100, 6, 7, -100]),
            ("two masks", {"completion_mask": [0, 1, 1, 1], "assistant_masks": [1, 1, 0, 1]}, IDS, [-100, 6, -100, 8]),
            ("mask and padding", {"loss_mask": [1, 0, 1, 1], "attention_mask": [1, 1, 1, 0]}, IDS[:3], [5, -100, 7]),
            ("mask and labels", {"loss_mask": [0, 1, 1, 0], "labels": [-100, 6, 9, -100]}, IDS, [-100, 6, 9, -100]),
        ]
    )
    def test_labels(self, _, columns, ids, labels):
        (sample,) = make_samples(records({"input_ids": IDS} | columns), None, 99).data
        self.assertEqual((sample["input_ids"].tolist(), sample["labels"].tolist()), (ids, labels))

    @parameterized.expand(
        [
            *[({name: [1]}, f"{name} with the length of input_ids, 4, got 1") for name in ("labels", *LOSS_MASKS)],
            *[({name: [0, 1, 2, 1]}, f"{name} as a list of 0 and 1") for name in LOSS_MASKS],
            *[({name: "0101"}, f"{name} as a list of 0 and 1") for name in LOSS_MASKS],
            *[
                ({name: [0, 0, 0, 1], "labels": IDS}, f"labels with the targets of {name}, got others")
                for name in LOSS_MASKS
            ],
            ({"attention_mask": [1]}, "attention_mask with the length of input_ids, 4"),
            ({"attention_mask": 1}, "attention_mask as a list"),
            ({"attention_mask": [0] * 4}, "at least one token, got only masked tokens"),
            ({"turns": [{"input_ids": [9]}]}, ""),
        ]
    )
    def test_errors(self, columns, message):
        with self.assertRaisesRegex(ValueError, f"record 1: expected {message}"):
            make_samples(records({"input_ids": IDS} | columns), None, 99)

    def test_other_records_need_a_tokenizer(self):
        with self.assertRaisesRegex(
            ValueError, "record 1: expected the column input_ids, or a tokenizer, got neither"
        ):
            make_samples(records({"text": "a"}), None, 99)
