"""What a comparison of a packed row excuses: rounding and noise as they are measured, and nothing else."""

import unittest
from contextlib import nullcontext
from itertools import product

import torch
from common.memory import Memory
from parameterized import parameterized

from transformers_packed.audit.isolation import UnseenError
from transformers_packed.training import padded_steps
from transformers_packed.training.compare import (
    BARS,
    GRADIENT,
    LOSS,
    RUNS,
    DifferenceError,
    Exact,
    Side,
    find_difference,
)


NOISES, DIFFERENCES = (0.0, 1e-6, 1e-3, 0.02, 0.3), (0.0, 1e-6, 1e-3, 0.02, 0.3, 3.0)


def side(seed, value, noise=0.0, name=GRADIENT, size=1, row_noise=None):
    """The steps of a side whose runs vary by the standard deviation `noise`, which all values share or not."""
    generator = torch.Generator().manual_seed(seed)

    def step():
        change = noise * torch.randn(size, generator=generator)
        return {LOSS: torch.tensor(4.0), name: (value + change).double()}

    return Side(step)


def different(row, other, precision="float32", exact=None):
    """What differs, or nothing."""
    try:
        find_difference(row, other, precision, exact)
    except DifferenceError as error:
        return str(error)
    return None


class NoiseTest(unittest.TestCase):
    @parameterized.expand([(name, size) for name in (LOSS, GRADIENT) for size in (1, 64)])
    def test_a_table(self, name, size):
        """A difference passes if it is at most half the bar or the noise, and never if it exceeds both tenfold."""
        bar = BARS["float32"][name != LOSS]
        for noise, difference in product(NOISES, DIFFERENCES):
            sides = [side(seed, value, noise, name, size) for seed, value in ((1, 1 + difference), (2, 1.0))]
            found = different(*sides)
            message = f"noise {noise}, difference {difference}: {found}"
            if difference <= max(bar, noise) / 2:
                self.assertIsNone(found, message)
            elif difference >= 10 * max(bar, noise):
                self.assertIsNotNone(found, message)

    def test_equal_noise_is_rarely_a_difference(self):
        found = [different(side(2 * at, 1.0, 0.1), side(2 * at + 1, 1.0, 0.1)) for at in range(300)]
        self.assertLessEqual(sum(x is not None for x in found), 2)

    def test_the_noise_of_the_row_alone(self):
        """As of a fault that changes by chance."""
        noisy = different(side(1, 1.0, 0.3), side(2, 1.0))
        self.assertRegex(noisy, "a gradient of the row that varies from run to run like that of .*, by 0.0e.00, got")
        more = different(side(1, 1.0, 0.3), side(2, 1.0, 0.01))
        self.assertRegex(
            more, "a gradient of the row that varies from run to run like that of .*, by [0-9.]+e-0[23], got"
        )
        # A mean over rows varies less than a row.
        self.assertIsNone(different(side(1, 1.0, 0.3), side(2, 1.0, 0.1)))

    def test_equal_sides_run_once(self):
        sides = side(1, 1.0), side(2, 1.0)
        self.assertIsNone(different(*sides))
        self.assertEqual([len(x.runs) for x in sides], [1, 1])
        noisy = side(1, 1.0, 0.1), side(2, 1.0, 0.1)
        self.assertIn("which differs from run to run by", find_difference(*noisy, "float32"))
        self.assertEqual([len(x.runs) for x in noisy], [RUNS, RUNS])


class NotFiniteTest(unittest.TestCase):
    @parameterized.expand(product((LOSS, GRADIENT, "last hidden state"), ("all", "one"), (float("nan"), float("inf"))))
    def test_a_side(self, name, where, value):
        good = torch.ones(4, 3)
        bad = good.clone()
        bad[slice(None) if where == "all" else 2] = value
        noise = torch.Generator().manual_seed(0)

        def measured(values):
            # Noise excuses no value that is not finite.
            return Side(lambda: {LOSS: torch.rand((), generator=noise), name: values})

        expected = f"expected a finite {name} of the row, as of the padded"
        self.assertRegex(different(measured(bad), measured(good)), expected)
        expected = f"expected a finite {name} of the padded batch of the same documents, as of the row"
        self.assertRegex(different(measured(good), measured(bad)), expected)
        expected = f"the row and the padded batch of the same documents both have NaN or infinity in their {name}"
        with self.assertRaisesRegex(UnseenError, expected):
            find_difference(measured(bad), measured(bad), "float32")


class RoundingTest(unittest.TestCase):
    def check(self, exact_difference, rounding, refused=None, error=None):
        """The reason against a difference of 10 %, where the next precision and other rounding change the row so much."""
        self.row, self.generator = 1.1, torch.Generator().manual_seed(0)

        class Use(nullcontext):
            def __enter__(context):
                if error is not None:
                    raise error
                self.row = 1.0 + exact_difference

            def __exit__(context, *_):
                self.row = 1.1

        class Rounded(nullcontext):
            def __enter__(context):
                self.rounding = rounding

        self.rounding = 0.0

        def step(value):
            change = self.rounding * torch.randn(1, generator=self.generator)
            return {LOSS: torch.tensor(4.0), GRADIENT: value + change}

        exact = Exact("float64", Use, lambda: ("float32", None), Rounded, refused)
        return different(Side(lambda: step(self.row)), Side(lambda: step(1.0)), exact=exact)

    def test_what_is_rounding(self):
        self.assertIsNone(self.check(0.0, 0.1))

    @parameterized.expand(
        [
            (0.1, 0.1, None, "more than rounding: float64 differs too"),
            (0.0, 1e-3, None, "more than rounding: float64 shows no difference, and other rounding changes less"),
            (
                0.0,
                1e-3,
                "weights are sharded",
                "e-01. This is more than rounding: other rounding changes less. Use padded",
            ),
        ]
    )
    def test_what_is_not(self, exact_difference, rounding, refused, message):
        self.assertIn(message, self.check(exact_difference, rounding, refused))

    @parameterized.expand(
        [
            ("weights are sharded", None, "weights are sharded"),
            (None, torch.OutOfMemoryError("CUDA out of memory. Tried"), "it does not fit the memory"),
            (None, KeyError("weight"), "it stopped: KeyError: 'weight'"),
        ]
    )
    def test_what_is_unknown(self, refused, error, message):
        """The error says what differs, and what nobody knows."""
        found = self.check(0.0, 0.1, refused, error)
        self.assertIn("got a relative difference of 1.0e-01", found)
        unknown = "Other rounding changes as much. float64 would show whether there is a fault too, but"
        self.assertIn(f"{unknown} {message}. Use padded batches", found)

    def test_another_process_has_no_memory(self):
        """All of them go on in the same way, and none runs a step in the next precision."""
        steps, exact = [], Exact("float64", nullcontext, lambda: ("float32", None), nullcontext)

        def step(value):
            steps.append(value)
            return {LOSS: torch.tensor(4.0), GRADIENT: torch.tensor([value])}

        # Differences are there, the memory is not.
        answers = [False, False, True, True, True]
        with self.assertRaisesRegex(DifferenceError, "other rounding changes less"):
            row, other = Side(lambda: step(1.1)), Side(lambda: step(1.0))
            find_difference(row, other, "float32", exact, anywhere=lambda found: answers.pop(0) if answers else found)
        self.assertEqual(len(steps), 4 * RUNS)


class WeightsTest(unittest.TestCase):
    """Sums of the gradient of a weight."""

    def sums(self, gradient):
        return padded_steps._sums_of(gradient, torch.device("cpu"))

    @parameterized.expand(
        [((1 << 18 | 5,),), ((512, 512),), ((512, 512), True), ((8, 64, 512),), ((512, 512, 1),), ((1, 1 << 18),)]
    )
    def test_tell_each_element_and_take_less_memory_than_the_gradient(self, shape, is_transposed=False):
        """Also of vectors, as which FSDP1 shards all weights."""
        gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        gradient = gradient.mT if is_transposed else gradient
        storage, memory = gradient.untyped_storage(), Memory()
        memory.known.add(storage)
        with memory:
            sums = self.sums(gradient)
        self.assertLess(memory.peak, gradient.nbytes / 2)
        size = gradient.norm()
        for at in (0, -1):
            other = gradient.clone()
            other[(at,) * other.ndim] += 0.1 * size
            self.assertGreater((self.sums(other) - sums).norm() / sums.norm(), 0.01)

    @parameterized.expand([((0,),), ((0, 4),), ((0, 3, 4),)])
    def test_of_nothing(self, shape):
        """As a process has of a small weight that FSDP shards."""
        self.assertEqual(self.sums(torch.zeros(shape)).tolist(), self.sums(None).tolist())
