"""A token has the same bits in every row, also where the kernel of a product depends on the number of rows."""

import unittest
from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch
import torch.nn.functional as F
from common.invariance import SplitSums, with_split_sums
from hypothesis import given, settings
from hypothesis import strategies as st
from parameterized import parameterized

from transformers_packed import SequenceBoundaries, batch_invariant
from transformers_packed.ops import attention, invariance, per_document
from transformers_packed.ops.dispatch import Implementation, choose
from transformers_packed.ops.float8 import verify
from transformers_packed.ops.invariance import is_batch_invariant, set_batch_invariant


# Of rows, a matrix, a bias and a summand. The last one gives the result in float64.
PRODUCTS = {
    "mm": lambda x, w, b, y: x @ w.T,
    "linear": lambda x, w, b, y: F.linear(x, w, b),
    "linear of a batch": lambda x, w, b, y: F.linear(x[None], w, b)[0],
    "linear without bias": lambda x, w, b, y: F.linear(x[None], w)[0],
    "addmm": lambda x, w, b, y: torch.addmm(y, x, w.T, beta=0.25, alpha=0.5),
    "addmm in place": lambda x, w, b, y: y.clone().addmm_(x, w.T, alpha=0.5),
    "addmm to a tensor": lambda x, w, b, y: torch.addmm(y, x, w.T, out=torch.empty_like(y)),
    "mm to columns": lambda x, w, b, y: torch.mm(x, w.T, out=y.new_empty(len(y), 2 * y.shape[1])[:, : y.shape[1]]),
    "mm to a transposed tensor": lambda x, w, b, y: torch.mm(x, w.T, out=y.new_empty(y.shape[::-1]).T),
}


class ProductsTest(unittest.TestCase):
    @parameterized.expand(PRODUCTS)
    @settings(max_examples=25, deadline=None)
    @given(data=st.data())
    def test_bits_do_not_depend_on_the_other_rows(self, name, data):
        number, width, columns = (data.draw(st.integers(1, most)) for most in (200, 40, 9))
        own = data.draw(st.integers(1, number))
        place = data.draw(st.integers(0, number - own))
        generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
        x, y, w = (
            torch.randn(n, m, generator=generator) for n, m in ((number, width), (number, columns), (columns, width))
        )
        bias, rows = torch.randn(columns, generator=generator), slice(place, place + own)
        product = PRODUCTS[name]
        exact = product(x.double(), w.double(), bias.double(), y.double())
        with batch_invariant(), with_split_sums():
            together, alone = product(x, w, bias, y), product(x[rows], w, bias, y[rows])
        self.assertTrue(torch.equal(together[rows], alone))
        torch.testing.assert_close(together.double(), exact, atol=1e-5, rtol=1e-5)

    def test_products_in_another_dtype(self):
        """Only GPUs have these kernels."""
        x, w, y = torch.randn(100, 40), torch.randn(40, 9), torch.randn(100, 9)

        def kernel(keys, *args, out, **scales):
            *args, dtype = args
            self.assertIs(dtype, torch.float64)
            return SplitSums("mm" if len(args) == 2 else "addmm").call_boxed(keys, *args, out=out, **scales)

        names = {(name, "CPU"): SimpleNamespace(call_boxed=kernel) for name in ("mm.dtype_out", "addmm.dtype_out")}
        with mock.patch.dict(invariance._kernels, names):
            for name, added in (("mm", ()), ("addmm", (y,))):
                call, scales = (*added, x, w, torch.float64), {"beta": 0.5} if added else {}
                expected = x.double() @ w.double() + (0.5 * y.double() if added else 0)
                found = invariance._PRODUCTS[f"{name}.dtype"](None, *call, **scales)
                self.assertIs(found.dtype, torch.float64)
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
                out = torch.empty(100, 9, dtype=torch.float64)
                self.assertIs(invariance._PRODUCTS[f"{name}.dtype_out"](None, *call, out=out, **scales), out)
                self.assertTrue(torch.equal(out, found))

    def test_without_the_mode_they_do(self):
        x, w = torch.randn(100, 40), torch.randn(40, 9)
        kernel = SplitSums("mm.out")
        together, alone = (kernel.call_boxed(None, rows, w, out=torch.empty(len(rows), 9)) for rows in (x, x[:3]))
        self.assertFalse(torch.equal(together[:3], alone))

    @parameterized.expand([torch.float32, torch.bfloat16, torch.float64])
    def test_kernels_of_torch(self, dtype):
        x, w = torch.randn(130, 48).to(dtype), torch.randn(33, 48).to(dtype)
        with batch_invariant():
            together, alone = F.linear(x, w), F.linear(x[70:75], w)
        self.assertTrue(torch.equal(together[70:75], alone))
        torch.testing.assert_close(together, F.linear(x, w))

    def test_gradients_of_weights_stay_as_they_are(self):
        x, w = torch.randn(100, 8), torch.randn(3, 8, requires_grad=True)

        def gradient():
            return torch.autograd.grad(F.linear(x, w).square().sum(), w)[0]

        expected = gradient()
        with batch_invariant(), mock.patch.object(invariance, "_rows_of_a_block", wraps=lambda *_: 64) as blocks:
            found = gradient()
        self.assertTrue(torch.equal(found, expected))
        # Only the forward is a product of rows: the sum over rows has no blocks.
        self.assertEqual(blocks.call_count, 1)

    @parameterized.expand([((0, 4), (4, 3)), ((3, 0), (0, 2)), ((1, 4), (4, 1))])
    def test_small_products(self, rows, matrix):
        x, w = torch.randn(rows), torch.randn(matrix)
        with batch_invariant():
            found = x @ w
        torch.testing.assert_close(found, x @ w)

    def test_a_block_depends_on_the_matrix_alone(self):
        columns = (1, 9216, 40_000, 248_320, 10**7)
        sizes = [invariance._rows_of_a_block(x, torch.float32, False, True) for x in columns]
        self.assertEqual(sizes, [4096, 4096, 2048, 512, 256])

    def test_without_splits(self):
        """What a GPU runs: PyTorch's own kernel, but for few rows or columns and other dtypes."""
        called, allowed = [], {"bf16": (True, True)}
        kernel = SimpleNamespace(call_boxed=lambda keys, *args: called.append("kernel"))
        half, single = torch.bfloat16, torch.float32
        self.enterContext(mock.patch.object(invariance, "_before", (None, allowed)))
        allow = self.enterContext(mock.patch.object(invariance, "_allow"))
        for name, rows, columns, dtype, expected in (
            ("mm", (128, 8), 2, half, "kernel"),
            ("mm", (127, 8), 2, half, "blocks"),
            ("mm", (128, 8), 2, single, "blocks"),
            ("mm", (128, 8), 1, half, "blocks"),
            ("addmm", (128, 8), 64, half, "kernel"),
            ("addmm", (128, 8), 63, half, "blocks"),
        ):
            product = invariance._without_splits(name, kernel, lambda keys, *args: called.append("blocks"))
            added = [torch.zeros(columns)] if name == "addmm" else []
            product(None, *added, torch.zeros(rows, dtype=dtype), torch.zeros(rows[1], columns, dtype=dtype))
            self.assertEqual(called.pop(), expected, (name, rows, columns, dtype))
        allow.assert_not_called()
        # The gradient of a weight may be split.
        gradient = torch.zeros(300, 128, dtype=half).t()
        invariance._without_splits("mm", kernel, None)(None, gradient, torch.zeros(300, 8, dtype=half))
        self.assertEqual([x.args[0] for x in allow.call_args_list], [allowed, {"bf16": (False, False)}])
        few = invariance._rows_of_a_block(9216, half, False, True), invariance._rows_of_a_block(16, half, True, True)
        self.assertEqual(few, (128, 4096))


class ModeTest(unittest.TestCase):
    def test_it_ends(self):
        self.assertFalse(is_batch_invariant())
        with batch_invariant():
            with batch_invariant():
                pass
            self.assertTrue(is_batch_invariant())
        self.assertFalse(is_batch_invariant())
        with mock.patch.object(invariance, "_in_blocks", side_effect=AssertionError):
            torch.randn(3, 4) @ torch.randn(4, 5)

    def test_it_ends_after_an_error(self):
        with self.assertRaises(ZeroDivisionError), batch_invariant():
            1 / 0  # noqa: B018
        self.assertFalse(is_batch_invariant())

    def test_switch(self):
        set_batch_invariant(True)
        try:
            self.assertTrue(is_batch_invariant())
        finally:
            set_batch_invariant(False)
        self.assertFalse(is_batch_invariant())


class OpsTest(unittest.TestCase):
    def test_each_document_is_a_batch_of_its_own(self):
        row, shapes = torch.randn(1, 75, 2), []

        def function(x):
            shapes.append(tuple(x.shape))
            return x

        boundaries = SequenceBoundaries.from_lengths([30, 5, 40])
        with batch_invariant():
            for once in (False, True):
                self.assertTrue(torch.equal(per_document(function, row, boundaries=boundaries, once=once), row))
        self.assertEqual(shapes, [(1, 30, 2), (1, 5, 2), (1, 40, 2)] * 2)
        shapes.clear()
        # The layout that the row has kept is not that of the mode.
        per_document(function, row, boundaries=boundaries)
        self.assertEqual(shapes, [(3, 40, 2)])

    def test_an_implementation_that_varies(self):
        table = {
            "fast": Implementation(max, varies="its chunks do not begin with documents"),
            "other": Implementation(min),
        }
        self.assertIs(choose("op", "auto", table, 1), max)
        with batch_invariant():
            self.assertIs(choose("op", "auto", table, 1), min)
            with self.assertRaisesRegex(
                ValueError, "fast: is not batch invariant: its chunks do not begin with documents"
            ):
                choose("op", "fast", table, 1)

    def test_flex_attention_is_refused(self):
        config = torch.nn.Module()
        config._attn_implementation = "flex_attention"
        module = torch.nn.Module()
        module.config = config
        x = torch.randn(1, 2, 8, 4)
        options = {"eager": None, "scaling": 1.0, "boundaries": SequenceBoundaries.from_lengths([3, 5])}
        with (
            batch_invariant(),
            self.assertRaisesRegex(ValueError, "flex_attention: is not batch invariant: its blocks of"),
        ):
            attention(module, x, x, x, None, **options)

    def test_float8_is_refused(self):
        weight = torch.zeros(16, 16)
        self.assertEqual(verify(weight, weight, torch.bfloat16), "")
        with batch_invariant():
            self.assertIn("is not batch invariant", verify(weight, weight, torch.bfloat16))

    def test_scaled_products_of_others_are_refused(self):
        """Such as those of torchao's layers."""
        values, scale = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(())
        product = partial(torch._scaled_mm, values, values.t(), scale, scale, out_dtype=torch.float32)
        expected = product()
        with batch_invariant(), self.assertRaisesRegex(ValueError, "torch._scaled_mm, which is not batch invariant"):
            product()
        self.assertTrue(torch.equal(product(), expected))


if __name__ == "__main__":
    unittest.main()
