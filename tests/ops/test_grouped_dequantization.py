"""Weights with a scale for each group of columns have the same bits from the kernel, the reference and a loop over elements.

tests/models/test_checkpoint_formats.py compares them with the libraries that write such weights.
"""

import unittest

import numpy as np
import torch
from common.fused import guarded_buffers
from mixins.triton import bad_input_tests
from ops.test_dequantization import DTYPES, DequantizationTestCase
from parameterized import parameterized

from transformers_packed.ops.grouped_dequantization import Groups, dequantize_groups


CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)


def random_groups(code, shape, size, *, parts=1, rounded=torch.bfloat16, zero=False, ordered=False, divided=None):
    """Groups of `size` columns. `divided` is whether a whole scale divides, or `None` without one."""
    generator = torch.Generator().manual_seed(0)
    *others, rows, columns = shape
    number = columns // size

    def integers(high, *shape):
        return torch.randint(high, shape, generator=generator)

    values = integers(256, *others, rows, columns if code == "int8" else columns // 2).to(torch.uint8)
    scale = (torch.rand(*others, rows, number, generator=generator) + 0.01).to(
        torch.float8_e4m3fn if code == "nvfp4" else rounded
    )
    zeros = integers(256 if code == "int8" else 16, *others, rows, number).to(torch.uint8) if zero else None
    order = integers(number, *others, parts, columns).to(torch.int32) if ordered else None
    whole = None if divided is None else torch.rand(*others, parts, generator=generator) + 0.5
    return Groups(values, scale, code, rounded, zeros, order, whole, bool(divided))


def by_element(groups, dtype):
    """The values in float32 by a loop over elements, rounded as the libraries do."""
    rows, columns = groups.shape[-2:]
    found = []
    for at in np.ndindex(*groups.shape[:-2]):
        values, scale = groups.values[at].numpy(), groups.scale[at].float().numpy()
        for r, c in np.ndindex(rows, columns):
            code = values[r, c] if groups.code == "int8" else values[r, c // 2] >> 4 * (c % 2) & 15
            part = 0 if groups.order is None else r // (rows // groups.order.shape[-2])
            group = c // (columns // scale.shape[1]) if groups.order is None else groups.order[at][part, c]
            factor = scale[r, group]
            if groups.whole is not None:
                whole = groups.whole[at].numpy()
                whole = whole[r // (rows // len(whole))]
                factor = factor / whole if groups.divided else factor * whole
            if groups.code == "nvfp4":
                value = CODES[code & 7] * np.float32(-1 if code & 8 else 1)
            else:
                middle = 128 if groups.code == "int8" else 8
                value = np.float32(code) - np.float32(middle if groups.zero is None else groups.zero[at][r, group])
            found.append(value * factor)
    return torch.tensor(np.array(found)).view(groups.shape).to(groups.rounded).to(dtype)


class GroupsTest(DequantizationTestCase):
    @parameterized.expand(
        [
            ("groups", "int4", (6, 64), 16, {}),
            ("rows", "int4", (3, 24), 24, {"rounded": torch.float16}),
            ("zeros", "int4", (4, 48), 8, {"zero": True, "rounded": torch.float16}),
            ("8_bit", "int8", (3, 40), 20, {}),
            ("8_bit_zeros", "int8", (3, 64), 32, {"zero": True, "rounded": torch.float32}),
            ("order", "int4", (4, 32), 8, {"ordered": True, "zero": True, "rounded": torch.float16}),
            ("8_bit_order", "int8", (4, 32), 8, {"ordered": True}),
            ("experts_order", "int4", (3, 8, 32), 16, {"ordered": True, "parts": 2}),
            ("experts", "int4", (3, 4, 32), 16, {"zero": True}),
            ("nvfp4", "nvfp4", (5, 64), 16, {"divided": True}),
            ("nvfp4_multiplied", "nvfp4", (5, 48), 16, {"divided": False}),
            ("nvfp4_experts", "nvfp4", (3, 8, 32), 16, {"divided": False, "parts": 2}),
            ("many_columns", "int4", (2, 2080), 32, {}),
        ]
    )
    def test_bits(self, _, code, shape, size, options):
        groups = random_groups(code, shape, size, **options)
        for dtype in DTYPES:
            expected = by_element(groups, dtype)
            self.check_bits(dequantize_groups(groups, dtype, impl="reference"), expected, dtype)
            with guarded_buffers():
                found = dequantize_groups(groups, dtype, impl="triton")
            self.check_bits(found, expected, dtype)

    def test_all_codes(self):
        values = torch.arange(256, dtype=torch.uint8)[None].repeat(3, 1)
        scale = torch.tensor([[448.0], [2.0**-9], [1.0]]).to(torch.float8_e4m3fn)
        for code, of_code in (("nvfp4", scale), ("int4", scale.half()), ("int8", scale.bfloat16())):
            groups = Groups(values, of_code, code, torch.float16)
            expected = by_element(groups, torch.float32)
            for impl in ("reference", "triton"):
                self.check_bits(dequantize_groups(groups, torch.float32, impl=impl), expected, code)


def dequantized(impl="reference", **changes):
    groups = Groups(torch.zeros(4, 8, dtype=torch.uint8), torch.ones(4, 2))._replace(**changes)
    return dequantize_groups(groups, torch.float32, impl=impl)


class BadInputTest(
    bad_input_tests(
        [
            ("columns", lambda: dequantized(scale=torch.ones(4, 3)), r"G a divisor of C.*'scale': \(4, 3\)"),
            ("rows", lambda: dequantized(scale=torch.ones(3, 2)), r"'scale': \(3, 2\)"),
            ("zeros", lambda: dequantized(zero=torch.ones(4, 1)), r"'zero': \(4, 1\)"),
            ("order", lambda: dequantized(order=torch.ones(1, 8)), r"'order': \(1, 8\)"),
            ("parts", lambda: dequantized(whole=torch.ones(3)), r"H one of R.*'whole': \(3,\)"),
        ],
        [
            (
                "scales",
                lambda impl: dequantized(impl, scale=torch.ones(4, 2).double()),
                "float32 at most.*torch.float64",
            )
        ],
    )
):
    pass


if __name__ == "__main__":
    unittest.main()
