"""Long documents as dense batches: which ones, and that their attention is that of each document alone."""

import itertools
import unittest
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn.functional as F
from parameterized import parameterized

from transformers_packed import SequenceBoundaries
from transformers_packed.ops import dense_attention as dense


# The package has the function under this name.
module = import_module("transformers_packed.ops.attention")


HEADS = 16, 4, 256
LAYER = SimpleNamespace(config=SimpleNamespace(_attn_implementation="sdpa"), num_key_value_groups=2)
# Without the cost of calls and copies, and with short steps, documents of some tokens are dense.
SMALL = {"_SHORTEST": 3, "CALL": 0.0, "COPY": 0.0, "padded_length": lambda length: -(-length // 8) * 8}


def time_of(lengths, groups):
    """The modelled time of a row."""
    heads, kv_heads, dim = HEADS
    work, copies = heads * dim, 2 * (heads + kv_heads) * dim * dense.COPY
    chosen = {document for documents, _ in groups for document in documents}
    time = sum(dense.VARLEN * work * n * n for at, n in enumerate(lengths) if at not in chosen)
    for documents, longest in groups:
        time += dense.CALL + len(documents) * longest * (dense.DENSE * work * longest + copies)
    order = [document for documents, _ in groups for document in sorted(documents)]
    return time + (sum(lengths) * copies if order != list(range(len(order))) else 0)


class GroupTest(unittest.TestCase):
    def test_short_documents_stay(self):
        self.assertEqual(dense.group([480] * 33, *HEADS), [])
        self.assertEqual(dense.group([2000, 300, 90], *HEADS), [])
        self.assertEqual(dense.group([], *HEADS), [])

    def test_one_long_document(self):
        self.assertEqual(dense.group([100, 65536, 30], *HEADS), [([1], 65536)])
        self.assertEqual(dense.group([16000], *HEADS), [([0], 16384)])

    def test_documents_of_one_length_are_a_batch(self):
        self.assertEqual(dense.group([4096] * 4, *HEADS), [([0, 1, 2, 3], 4096)])

    def test_similar_documents_share_a_batch_and_others_do_not(self):
        groups = dense.group([9000, 65000, 8800, 500], *HEADS)
        self.assertEqual([sorted(documents) for documents, _ in groups], [[1], [0, 2]])

    @parameterized.expand([([3000, 5000, 9000, 40000, 41000, 800],), ([4096, 4000, 2500, 2400, 2300],)])
    def test_no_other_choice_is_faster(self, lengths):
        """Among all splits of the longest documents into batches of neighbors."""
        found = dense.group(lengths, *HEADS)
        order = sorted(range(len(lengths)), key=lambda at: -lengths[at])
        best = float("inf")
        for number in range(len(order) + 1):
            for cuts in itertools.chain.from_iterable(
                itertools.combinations(range(1, number), k) for k in range(max(number, 1))
            ):
                ends = [0, *cuts, number] if number else [0]
                parts = [order[a:b] for a, b in itertools.pairwise(ends)]
                groups = [(part, dense.padded_length(lengths[part[0]])) for part in parts]
                best = min(best, time_of(lengths, groups))
        self.assertLess(time_of(lengths, found) / best, 1 + 1e-9)
        self.assertLess(time_of(lengths, found), time_of(lengths, []))


class DenseAttentionTest(unittest.TestCase):
    def setUp(self):
        self.enterContext(mock.patch.multiple(dense, **SMALL))
        causal = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
        self.enterContext(mock.patch.object(dense, "_causal", lambda q, k, v, scale: causal(q, k, v, scale=scale)))

    def run_row(self, lengths, function, dtype=torch.float64):
        generator = torch.Generator().manual_seed(0)
        total = sum(lengths)
        tensors = [torch.randn(1, h, total, 8, dtype=dtype, generator=generator).requires_grad_() for h in (4, 2, 2)]
        output = function(*tensors, boundaries=SequenceBoundaries.from_lengths(lengths))
        output.backward(torch.randn(output.shape, dtype=dtype, generator=generator))
        return output.detach(), *(x.grad for x in tensors)

    def dense(self, query, key, value, boundaries):
        self.assertIsNotNone(dense.plan_of(boundaries, 4, 2, 8))
        options = {"scaling": 0.3, "eager": None, "dropout": 0.0}
        varlen = module._per_document
        return dense.dense_attention(LAYER, query, key, value, boundaries=boundaries, varlen=varlen, **options)[0]

    def alone(self, query, key, value, boundaries):
        options = {"scaling": 0.3, "eager": None, "dropout": 0.0}
        return module._per_document(LAYER, query, key, value, boundaries=boundaries, **options)[0]

    @parameterized.expand(
        [
            ("one of a whole length", [64]),
            ("one padded", [70]),
            ("batch", [64, 64, 64]),
            ("batches in another order", [2, 130, 70, 1, 68, 131, 2]),
            ("rest first", [2, 1, 200]),
        ]
    )
    def test_equals_each_document_alone(self, _, lengths):
        for got, want in zip(self.run_row(lengths, self.dense), self.run_row(lengths, self.alone), strict=True):
            self.assertLess((got - want).abs().max(), 1e-12)

    def test_other_documents_change_no_bit(self):
        lengths = [130, 70, 2, 68]
        boundaries = SequenceBoundaries.from_lengths(lengths)
        generator = torch.Generator().manual_seed(0)
        tensors = [torch.randn(1, h, sum(lengths), 8, generator=generator) for h in (4, 2, 2)]
        before = self.dense(*tensors, boundaries)
        for x in tensors:
            x[:, :, 130:200] = float("nan")
        after = self.dense(*tensors, boundaries)
        self.assertTrue(torch.equal(before[:, :130], after[:, :130]))
        self.assertTrue(torch.equal(before[:, 200:], after[:, 200:]))
        self.assertTrue(after[:, 130:200].isnan().all())

    def test_a_row_without_long_documents_has_no_plan(self):
        self.assertIsNone(dense.plan_of(SequenceBoundaries.from_lengths([1, 2, 2]), *HEADS))


class VerifyTest(unittest.TestCase):
    def test_reasons(self):
        row = SequenceBoundaries.from_lengths([65536])
        tensors = [torch.zeros(1, h, 3, 256, dtype=torch.bfloat16) for h in (16, 4, 4)]
        self.assertRegex(dense.verify(LAYER, *tensors, boundaries=row), "compute capability 9.0")
        on_gpu = [
            mock.MagicMock(is_cuda=True, dtype=x.dtype, shape=x.shape, device=torch.device("cuda")) for x in tensors
        ]
        with (
            mock.patch("torch.cuda.get_device_capability", lambda device: (9, 0)),
            mock.patch.object(dense, "compute_dtype", lambda x: x.dtype),
            mock.patch.object(dense, "_supports", lambda *args: True),
        ):
            self.assertEqual(dense.verify(LAYER, *on_gpu, boundaries=row), "")
            self.assertEqual(dense.verify(LAYER, *on_gpu, boundaries=row, dropout=0.1), "does not support dropout")
            with mock.patch("torch.are_deterministic_algorithms_enabled", lambda: True):
                self.assertEqual(dense.verify(LAYER, *on_gpu, boundaries=row), "has no deterministic backward")
            short = SequenceBoundaries.from_lengths([100, 200])
            self.assertRegex(dense.verify(LAYER, *on_gpu, boundaries=short), "not faster for documents of this")
            with mock.patch.object(dense, "_supports", lambda *args: False):
                self.assertRegex(dense.verify(LAYER, *on_gpu, boundaries=row), "16 and 4 heads of 256")
            on_gpu[0].dtype = torch.float32
            self.assertRegex(dense.verify(LAYER, *on_gpu, boundaries=row), "not torch.float32")
        with self.assertRaisesRegex(ValueError, "cudnn"):
            options = {"eager": None, "scaling": 1.0, "boundaries": SequenceBoundaries.from_lengths([3])}
            module.attention(LAYER, *tensors, None, impl="cudnn", **options)
