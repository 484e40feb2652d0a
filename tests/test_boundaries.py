import dataclasses
import unittest

import numpy as np
import torch
from parameterized import parameterized
from torch.distributed.utils import _apply_to_tensors

from transformers_packed import SequenceBoundaries
from transformers_packed.device_boundaries import DeviceBoundaries
from transformers_packed.models.inputs import resolve_boundaries
from transformers_packed.parallel import RowShard
from transformers_packed.shared_prompts import SharedPrompts


LENGTHS = [
    ("one_token", [1]),
    ("short_and_long", [5, 1, 70, 7]),
    ("around_the_chunk", [63, 64, 65]),
    ("many", [1 + 7 * n % 131 for n in range(150)]),
]


def reference(lengths):
    """Compute the derived values in plain Python."""
    cu_seqlens, documents, positions = [0], [], []
    for document, length in enumerate(lengths):
        cu_seqlens.append(cu_seqlens[-1] + length)
        documents += [document] * length
        positions += range(length)
    return cu_seqlens, documents, positions


def padding_masks(lengths):
    """Build masks of three kinds with `lengths` real tokens: right padding, left padding, and holes."""
    width = max(lengths) + 3
    right = torch.zeros(len(lengths), width, dtype=torch.int64)
    left, holes = right.clone(), right.clone()
    generator = torch.Generator().manual_seed(0)
    for row, length in enumerate(lengths):
        right[row, :length] = 1
        left[row, width - length :] = 1
        holes[row, torch.randperm(width, generator=generator)[:length]] = 1
    return {"right": right, "left": left, "holes": holes}


class SequenceBoundariesTest(unittest.TestCase):
    def assert_describes(self, boundaries, lengths):
        cu_seqlens, documents, positions = reference(lengths)
        self.assertEqual(boundaries.cu_seqlens.tolist(), cu_seqlens)
        self.assertEqual(boundaries.cu_seqlens_cpu.tolist(), cu_seqlens)
        self.assertEqual(boundaries.lengths, lengths)
        self.assertEqual(boundaries.seq_idx.tolist(), [documents])
        self.assertEqual(boundaries.position_ids.tolist(), [positions])
        self.assertEqual(boundaries.num_documents, len(lengths))
        self.assertEqual(boundaries.total_length, sum(lengths))
        self.assertEqual(boundaries.max_length, max(lengths))
        dtypes = [x.dtype for x in (boundaries.cu_seqlens, boundaries.cu_seqlens_cpu, boundaries.seq_idx)]
        self.assertEqual([*dtypes, boundaries.position_ids.dtype], [torch.int32] * 3 + [torch.int64])
        # A tensor would cost one host sync in every FlashAttention call.
        for number in (boundaries.max_length, boundaries.total_length, boundaries.lengths[0]):
            self.assertIs(type(number), int)

    @parameterized.expand(LENGTHS)
    def test_from_lengths(self, _, lengths):
        for given in (lengths, np.array(lengths, dtype=np.int32), torch.tensor(lengths)):
            with self.subTest(type=type(given), dtype=getattr(given, "dtype", None)):
                self.assert_describes(SequenceBoundaries.from_lengths(given), lengths)

    @parameterized.expand(LENGTHS)
    def test_from_cu_seqlens(self, _, lengths):
        cu_seqlens = reference(lengths)[0]
        for given in (cu_seqlens, np.array(cu_seqlens), torch.tensor(cu_seqlens, dtype=torch.int32)):
            with self.subTest(type=type(given), dtype=getattr(given, "dtype", None)):
                self.assert_describes(SequenceBoundaries.from_cu_seqlens(given), lengths)
                with_length = SequenceBoundaries.from_cu_seqlens(given, total_length=sum(lengths))
                self.assert_describes(with_length, lengths)

    @parameterized.expand(LENGTHS)
    def test_from_seq_idx(self, _, lengths):
        documents = torch.tensor([reference(lengths)[1]])
        for given in (documents, documents.int(), 3 * documents + 2):
            self.assert_describes(SequenceBoundaries.from_seq_idx(given), lengths)

    @parameterized.expand(LENGTHS)
    def test_from_position_ids(self, _, lengths):
        positions = torch.tensor([reference(lengths)[2]])
        # The other three rows are image positions, which differ from the text positions.
        four_rows = torch.stack([positions, torch.zeros_like(positions), positions, positions])
        counting = torch.arange(positions.shape[1])[None, None]
        three_rows = positions.expand(3, 1, -1)
        several = four_rows, three_rows, torch.cat([counting, three_rows])
        for given in (positions, positions.int(), positions + 2, positions[0], *several):
            self.assert_describes(SequenceBoundaries.from_position_ids(given), lengths)

    @parameterized.expand(LENGTHS)
    def test_from_attention_mask(self, _, lengths):
        for kind, mask in padding_masks(lengths).items():
            for dtype in (torch.int64, torch.bool, torch.float32):
                with self.subTest(kind=kind, dtype=dtype):
                    self.assert_describes(SequenceBoundaries.from_attention_mask(mask.to(dtype)), lengths)

    def test_a_jump_in_position_ids_starts_a_document(self):
        boundaries = SequenceBoundaries.from_position_ids(torch.tensor([[0, 1, 5, 6, 6, 3]]))
        self.assertEqual(boundaries.lengths, [2, 2, 1, 1])

    def test_same_as_tells_different_documents_apart(self):
        boundaries = SequenceBoundaries.from_lengths([2, 3])
        for lengths in ([3, 2], [5], [2, 3, 1], [2, 2, 1]):
            self.assertFalse(boundaries.same_as(SequenceBoundaries.from_lengths(lengths)))

    def test_immutable(self):
        boundaries = SequenceBoundaries.from_lengths([2, 3])
        for name in ("cu_seqlens", "cu_seqlens_cpu", "seq_idx", "max_length"):
            with self.assertRaises(dataclasses.FrozenInstanceError):
                setattr(boundaries, name, torch.tensor([0, 5]))
        self.assertEqual(boundaries.lengths, [2, 3])

    def test_derived_tensors_are_made_once(self):
        boundaries = SequenceBoundaries.from_lengths([2, 3])
        self.assertIs(boundaries.seq_idx, boundaries.seq_idx)
        self.assertIs(boundaries.position_ids, boundaries.position_ids)
        first = boundaries.derived("name", object)
        self.assertIs(boundaries.derived("name", object), first)
        self.assertIsNot(boundaries.derived("other name", object), first)

    def test_copies_of_fsdp_share_what_is_derived(self):
        """FSDP2 with mixed precision copies the arguments of each layer in this way."""
        for original in (
            SequenceBoundaries.from_lengths([3, 2]),
            SharedPrompts.of(SequenceBoundaries.from_lengths([3, 2]), [-1, 0]),
            RowShard.cut(SequenceBoundaries.from_lengths([3, 3]), 0, 2),
        ):
            with self.subTest(type(original).__name__):
                first, second = (_apply_to_tensors(lambda x: x, {"boundaries": original})["boundaries"] for _ in "ab")
                self.assertIsNot(first, original)
                made = first.derived("indices", object)
                self.assertIs(second.derived("indices", object), made)
                self.assertIs(original.seq_idx, second.seq_idx)
                self.assertIs(second.position_ids.dtype, torch.int64)

    def test_copies_with_other_values_do_not(self):
        boundaries = SequenceBoundaries.from_lengths([3, 2])
        made = boundaries.derived("indices", object)
        for other in (boundaries.with_padding(2), boundaries.to("meta")):
            self.assertIsNot(other.derived("indices", object), made)

    def test_to(self):
        boundaries = SequenceBoundaries.from_lengths([2, 3])
        self.assertIs(boundaries.to("cpu"), boundaries)
        moved = boundaries.to("meta")
        self.assertIs(boundaries.to("meta"), moved)
        self.assertEqual(moved.cu_seqlens.device.type, "meta")
        self.assertEqual(boundaries.cu_seqlens.device.type, "cpu")
        self.assertIs(moved.cu_seqlens_cpu, boundaries.cu_seqlens_cpu)
        self.assertTrue(moved.same_as(boundaries))

    def test_a_model_takes_boundaries_on_the_host_to_its_tokens(self):
        tokens = torch.zeros(1, 5, dtype=torch.long, device="meta")
        for given in ({"cu_seqlens": ids(0, 2, 5)}, {"boundaries": SequenceBoundaries.from_lengths([2, 3])}):
            boundaries = resolve_boundaries({**given, "input_ids": tokens})
            self.assertEqual(boundaries.cu_seqlens.device.type, "meta")
            self.assertEqual(boundaries.lengths, [2, 3])

    def test_parents_beside_boundaries_are_compared_or_refused(self):
        row, tokens = SequenceBoundaries.from_lengths([3, 2, 1]), torch.zeros(1, 6, dtype=torch.long)

        def resolved(boundaries, parent_of):
            return resolve_boundaries({"boundaries": boundaries, "parent_of": parent_of, "input_ids": tokens})

        shared = SharedPrompts.of(row, [-1, 0, 0])
        for given in (row, shared):
            self.assertEqual(resolved(given, [-1, 0, 0]).parent_of, (-1, 0, 0))
        with self.assertRaisesRegex(ValueError, r"parent_of as in boundaries: \[-1, 0, 0\], got \[-1, 0, 1\]"):
            resolved(shared, [-1, 0, 1])
        part = type("Part", (SequenceBoundaries,), {"kind": "a part"})(row.cu_seqlens, row.cu_seqlens_cpu)
        with self.assertRaisesRegex(ValueError, "a part"):
            resolved(part, [-1, 0, 0])

    def test_a_class_of_rows_says_its_kind(self):
        with self.assertRaisesRegex(TypeError, "the kind of row that Other stands for"):
            type("Other", (SequenceBoundaries,), {})
        self.assertIsNot(type("Own", (SequenceBoundaries,), {"kind": "own"}).forms, SequenceBoundaries.forms)

    def test_derived_values_never_read_the_device(self):
        # A meta tensor has no contents, so any read of values fails, including a host sync.
        on_device = SequenceBoundaries.from_lengths([2, 70, 3], device="meta")
        self.assertEqual(on_device.seq_idx.shape, (1, 75))
        self.assertEqual(on_device.position_ids.shape, (1, 75))
        self.assertEqual(on_device.max_length, 70)
        self.assertEqual(on_device.lengths, [2, 70, 3])
        with self.assertRaises((RuntimeError, NotImplementedError)):
            SequenceBoundaries.from_cu_seqlens(on_device.cu_seqlens)
        kept = SequenceBoundaries.from_cu_seqlens(on_device.cu_seqlens, cu_seqlens_cpu=on_device.cu_seqlens_cpu)
        self.assertTrue(kept.same_as(on_device))

    def test_kernel_kwargs(self):
        boundaries = SequenceBoundaries.from_lengths([2, 3])
        kwargs = boundaries.kernel_kwargs()
        names = {"cu_seqlens", "seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
        self.assertEqual(set(kwargs), names)
        self.assertIs(kwargs["seq_idx"], boundaries.seq_idx)
        for name in ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k"):
            self.assertIs(kwargs[name], boundaries.cu_seqlens)
        for name in ("max_length_q", "max_length_k"):
            self.assertEqual(kwargs[name], 3)


class HostCopyTest(unittest.TestCase):
    def test_it_is_made_on_first_use(self):
        boundaries = SequenceBoundaries(ids(0, 3, 5).int(), length=5)
        self.assertIsNone(boundaries.host)
        self.assertEqual((boundaries.num_documents, boundaries.lengths), (2, [3, 2]))
        self.assertIs(boundaries.cu_seqlens_cpu, boundaries.cu_seqlens_cpu)
        self.assertIs(type(boundaries), SequenceBoundaries)

    def test_it_is_checked(self):
        for cu_seqlens, message in (([0, 3, 4], "ends at the row's 5 tokens"), ([0, 5, 5], "strictly increasing")):
            for name in ("lengths", "seq_idx", "position_ids", "max_length", "total_length"):
                with self.subTest(name), self.assertRaisesRegex(ValueError, message):
                    getattr(SequenceBoundaries(ids(*cu_seqlens).int(), length=5), name)

    def test_where_only_the_device_knows_it(self):
        boundaries = DeviceBoundaries(ids(0, 3, 5, 5).int(), length=5, advice="Do that.")
        self.assertEqual((boundaries.num_documents, boundaries.total_length, boundaries.max_length), (3, 5, 5))
        self.assertEqual(boundaries.seq_idx.tolist(), [[0, 0, 0, 1, 1]])
        for name in ("lengths", "cu_seqlens_cpu"):
            with self.assertRaisesRegex(
                ValueError, "row without lengths on the host does not support an op that reads them. Do that"
            ):
                getattr(boundaries, name)


class PackUnpackTest(unittest.TestCase):
    @parameterized.expand(LENGTHS)
    def test_pack_then_unpack(self, _, lengths):
        boundaries = SequenceBoundaries.from_lengths(lengths)
        masks = padding_masks(lengths)
        # Without a mask, documents are padded on the right to the longest one.
        cases = [(mask, mask) for mask in masks.values()] + [(None, masks["right"][:, : max(lengths)])]
        for given, mask in cases:
            for shape in ((), (3,), (2, 3)):
                padded = torch.randn(*mask.shape, *shape)
                padded[mask == 0] = -7.0
                packed = boundaries.pack(padded, given)
                self.assertEqual(packed.shape, (1, sum(lengths), *shape))
                self.assertTrue(torch.equal(packed[0], padded[mask.bool()]))
                self.assertTrue(torch.equal(boundaries.unpack(packed, given, padding_value=-7.0), padded))

    def test_dtype_is_kept(self):
        boundaries = SequenceBoundaries.from_lengths([1, 2])
        for dtype in (torch.int64, torch.bfloat16, torch.bool):
            padded = boundaries.unpack(torch.ones(1, 3, dtype=dtype))
            self.assertEqual(padded.dtype, dtype)
            self.assertEqual(boundaries.pack(padded).dtype, dtype)

    @parameterized.expand([("default", None), ("right", "right"), ("left", "left"), ("holes", "holes")])
    def test_gradients_flow(self, _, kind):
        lengths = [2, 5, 1]
        mask = None if kind is None else padding_masks(lengths)[kind]
        boundaries = SequenceBoundaries.from_lengths(lengths)
        row = torch.randn(1, 8, 2, requires_grad=True)
        weight = torch.randn(1, 8, 2)
        padded = boundaries.unpack(row, mask)
        (boundaries.pack(padded, mask) * weight).sum().backward()
        self.assertTrue(torch.equal(row.grad, weight))

        padded = padded.detach().requires_grad_()
        (boundaries.pack(padded, mask) * weight).sum().backward()
        # Padding gets no gradient, and each real token gets its own.
        self.assertTrue(torch.equal(padded.grad, boundaries.unpack(weight, mask)))


def ids(*rows):
    return torch.tensor(rows)


make = SequenceBoundaries
two = SequenceBoundaries.from_lengths([1, 3])

# A call, and what its error expected and got.
BAD_INPUTS = [
    (lambda: make.from_cu_seqlens(ids(1, 3, 5)), "starts at 0.*, got .*1"),
    (lambda: make.from_cu_seqlens(ids(0, 3, 5), total_length=6), "ends at the row's 6 tokens.*, got .*5"),
    (lambda: make.from_cu_seqlens(ids(0, 3, 3, 5)), "strictly increasing.*, got .*3 followed by 3 at document 1"),
    (lambda: make.from_cu_seqlens(ids(0.0, 3.0)), r"int32 or int64.*, got .*torch.float32 \(2,\)"),
    (lambda: make.from_cu_seqlens(ids([0, 3])), r"\[N\+1\].*, got .*torch.int64 \(1, 2\)"),
    (lambda: make.from_cu_seqlens(ids(0, 2**31)), r"at most 2\*\*31 - 1 tokens.*, got .*2147483648"),
    (lambda: make.from_cu_seqlens(ids(0, 3, 5), cu_seqlens_cpu=ids(0, 5)), r"shape \(3,\).*, got .*\(2,\)"),
    (
        lambda: make.from_cu_seqlens(ids(0, 3, 5), cu_seqlens_cpu=ids(0, 3, 5).to("meta")),
        "on the CPU.*, got .*on meta",
    ),
    (lambda: make.from_cu_seqlens(ids(0, 3, 5), cu_seqlens_cpu=ids(0, 2, 5)), r"\[0, 3, 5\].*, got .*\[0, 2, 5\]"),
    (lambda: make.from_lengths([3, 0]), "at least 1.*, got .*0 at document 1"),
    (lambda: make.from_lengths([3.0, 2.0]), "int32 or int64.*, got .*float32"),
    (lambda: make.from_lengths([]), r"N >= 1.*, got .*\(0,\)"),
    (lambda: make.from_seq_idx(ids([0, 1, 0])), "never decreases.*, got .*0 at token 2 after 1"),
    (lambda: make.from_seq_idx(ids([-1, 0])), "never negative.*, got .*-1 at token 0"),
    (lambda: make.from_seq_idx(ids([0, 1], [0, 1])), "batch size 1.*, got .*2 rows"),
    (lambda: make.from_seq_idx(ids(0, 1)), r"\[1, T\].*, got .*torch.int64 \(2,\)"),
    (lambda: make.from_seq_idx(ids([0.0, 1.0])), "int32 or int64.*, got .*float32"),
    (lambda: make.from_position_ids(ids([0, 1], [0, 1])), "batch size 1.*, got .*2 rows"),
    (
        lambda: make.from_position_ids(ids([[0, 1, 1, 0]], [[0, 1, 2, 0]], [[0, 1, 1, 0]])),
        "cu_seq_lens_q or seq_idx.*, got .*position_ids of images that restart",
    ),
    (lambda: make.from_position_ids(torch.zeros(1, 1, 1, 2, dtype=torch.int64)), r"\[1, T\].*, got .*\(1, 1, 1, 2\)"),
    (lambda: make.from_attention_mask(ids(1, 1)), r"\[B, L\].*, got .*\(2,\)"),
    (lambda: make.from_attention_mask(ids([1, 2], [1, 0])), "0 and 1.*, got .*0 to 2"),
    (
        lambda: make.from_attention_mask(ids([1, 1], [0, 0])),
        "one real token in each row.*, got .*only padding in row 1",
    ),
    (lambda: two.pack(torch.zeros(3, 3)), r"N = 2 documents.*, got .*shape \(3, 3\)"),
    (lambda: two.pack(torch.zeros(2, 2)), "at least 3 tokens.*, got .*2"),
    (lambda: two.pack(torch.zeros(2, 3), ids([1, 1, 0], [1, 1, 0])), r"\[1, 3\] real tokens.*, got .*\[2, 2\]"),
    (lambda: two.pack(torch.zeros(2, 5), ids([1, 0, 0, 0], [1, 1, 1, 0])), r"shape \[2, 5\].*, got .*\[2, 4\]"),
    (lambda: two.unpack(torch.zeros(1, 5)), r"T = 4.*, got .*shape \(1, 5\)"),
    (lambda: two.unpack(torch.zeros(2, 4)), r"\[1, T, ...\].*, got .*shape \(2, 4\)"),
    (lambda: two.unpack(torch.zeros(1, 4), ids([1, 1, 0], [1, 1, 0])), r"\[1, 3\] real tokens.*, got .*\[2, 2\]"),
]


class BadInputTest(unittest.TestCase):
    @parameterized.expand(BAD_INPUTS)
    def test_message(self, function, message):
        with self.assertRaisesRegex(ValueError, rf"^expected .*{message}.*\."):
            function()
