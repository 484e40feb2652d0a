import unittest

import torch
from parameterized import parameterized

from transformers_packed import DataCollatorWithFlattening, SequenceBoundaries, ops
from transformers_packed.parallel import RowShard, shard_batch


LENGTHS = [[4, 4], [5, 3], [8], [1, 1, 1, 1, 1, 1, 1, 1], [3, 2, 2], [1, 9], [13]]


def make_batch(lengths, **options):
    samples = [
        {"input_ids": list(range(100 * n, 100 * n + length)), "weights": [n + 0.5] * length}
        for n, length in enumerate(lengths, start=1)
    ]
    collator = DataCollatorWithFlattening(return_cu_seqlens=True, token_columns="weights", on_leak="ignore", **options)
    return collator(samples)


class ShardBatchTest(unittest.TestCase):
    @parameterized.expand([(lengths, size) for lengths in LENGTHS for size in (1, 2, 4)])
    def test_parts_join_to_the_row(self, lengths, size):
        batch = make_batch(lengths)
        parts = [shard_batch(batch, rank, size, pad_token_id=7, token_columns=("weights",)) for rank in range(size)]
        total = sum(lengths)
        padding = -total % size
        joined = {
            name: torch.cat([part[name] for part in parts], dim=1)
            for name in ("input_ids", "position_ids", "shift_labels", "weights")
        }
        self.assertEqual(joined["input_ids"][:, :total].tolist(), batch["input_ids"].tolist())
        self.assertEqual(joined["input_ids"][0, total:].tolist(), [7] * padding)
        self.assertEqual(joined["weights"][:, :total].tolist(), batch["weights"].tolist())
        documents = [*lengths, padding] if padding else lengths
        self.assertEqual(joined["position_ids"][0].tolist(), [i for n in documents for i in range(n)])
        # Each document predicts all its tokens except the first, regardless of the cuts.
        targets = [[*range(100 * n + 1, 100 * n + length), -100] for n, length in enumerate(lengths, start=1)]
        self.assertEqual(joined["shift_labels"][0].tolist(), sum(targets, []) + [-100] * padding)
        for part in parts:
            self.assertEqual(part["input_ids"].shape[1], (total + padding) // size)
            self.assertEqual(part["labels"].tolist(), part["shift_labels"].tolist())
            self.assertEqual(part["boundaries"].position_ids.tolist(), part["position_ids"].tolist())
            self.assertEqual(part["boundaries"].row.padding_tokens, padding)
            self.assertNotIn("cu_seqlens", part)

    def test_padding_of_the_collator_grows(self):
        batch = make_batch([5], pad_to_multiple_of=3, pad_token_id=0)
        part = shard_batch(batch, 3, 4)
        self.assertEqual(part["boundaries"].row.lengths, [5, 3])
        self.assertEqual(part["boundaries"].row.padding_tokens, 3)
        self.assertEqual(part["position_ids"].tolist(), [[1, 2]])

    def test_a_short_row_is_padded_for_each_rank(self):
        part = shard_batch(make_batch([2, 3]), 1, 4, minimum=3)
        self.assertEqual((part["boundaries"].row.lengths, part["boundaries"].lengths), ([2, 3, 7], [2, 1]))

    def test_boundaries_from_position_ids(self):
        batch = {"input_ids": torch.arange(6)[None], "position_ids": torch.tensor([[0, 1, 0, 1, 2, 3]])}
        shard = shard_batch(batch, 1, 2)["boundaries"]
        self.assertEqual((shard.lengths, shard.tokens_before, shard.row.lengths), ([3], 1, [2, 4]))

    def test_mrope_positions_are_cut_in_their_last_dimension(self):
        batch = make_batch([3, 3])
        batch["position_ids"] = batch["position_ids"].expand(4, 1, 6)
        self.assertEqual(tuple(shard_batch(batch, 0, 4)["position_ids"].shape), (4, 1, 2))

    @parameterized.expand(
        [
            ("two rows", {"input_ids": torch.zeros(2, 4, dtype=torch.long)}, "one packed row"),
            ("no boundaries", {"input_ids": torch.zeros(1, 4, dtype=torch.long)}, "boundaries"),
            (
                "labels of documents",
                {
                    "input_ids": torch.zeros(1, 4, dtype=torch.long),
                    "cu_seqlens": torch.tensor([0, 2, 4]),
                    "labels": torch.tensor([1, 0]),
                },
                "labels with one entry for each",
            ),
        ]
    )
    def test_refuses(self, _, batch, message):
        with self.assertRaisesRegex(ValueError, message):
            shard_batch(batch, 0, 2)


class RowShardTest(unittest.TestCase):
    @parameterized.expand([(lengths,) for lengths in LENGTHS])
    def test_pieces(self, lengths):
        lengths = [*lengths, -sum(lengths) % 4] if sum(lengths) % 4 else lengths
        row = SequenceBoundaries.from_lengths(lengths)
        documents, positions = row.seq_idx[0].tolist(), row.position_ids[0].tolist()
        length = len(documents) // 4
        for rank in range(4):
            shard = RowShard.cut(row, rank, 4)
            here = documents[rank * length : (rank + 1) * length]
            self.assertEqual(shard.lengths, [here.count(n) for n in dict.fromkeys(here)])
            self.assertEqual(shard.tokens_before, positions[rank * length])
            self.assertEqual(shard.goes_on, here[-1:] == documents[(rank + 1) * length :][:1])

    def test_a_row_that_does_not_fit(self):
        with self.assertRaisesRegex(ValueError, "multiple of 2"):
            RowShard.cut(SequenceBoundaries.from_lengths([3]), 0, 2)

    def test_moves_with_its_row(self):
        shard = RowShard.cut(SequenceBoundaries.from_lengths([3, 1]), 1, 2)
        moved = shard.to("meta")
        self.assertEqual((moved.cu_seqlens.device.type, moved.row.cu_seqlens.device.type), ("meta", "meta"))
        self.assertEqual((moved.rank, moved.lengths), (1, [1, 1]))

    def test_alone_it_computes_nothing(self):
        shard = RowShard.cut(SequenceBoundaries.from_lengths([3, 1]), 1, 2)
        row, weight, rule = (
            torch.ones(1, 2, 1),
            torch.ones(1, 2),
            [torch.ones(1, 2, 1, 1)] * 3 + [torch.ones(1, 2, 1)] * 2,
        )
        calls = [
            lambda: ops.causal_conv1d(row, weight, boundaries=shard),
            lambda: ops.causal_conv1d_qkv(
                row.expand(1, 2, 3), weight.expand(3, 2), key_heads=1, key_dim=1, value_dim=1, boundaries=shard
            ),
            lambda: ops.gated_delta_rule(*rule, boundaries=shard),
        ]
        for call in calls:
            with self.assertRaisesRegex(ValueError, "expected a shard with a process group"):
                call()

    def test_functions_of_one_document_want_whole_rows(self):
        # They would treat its pieces as documents.
        shard = RowShard.cut(SequenceBoundaries.from_lengths([3, 1]), 1, 2)
        with self.assertRaisesRegex(
            ValueError, "a function of each document does not support a part of a row. Train without sequence"
        ):
            ops.per_document(lambda x: x, torch.ones(1, 2), boundaries=shard)
