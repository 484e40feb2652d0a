import dataclasses
import tempfile
import unittest
import zipfile
from bisect import bisect_left, insort
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from common.families import tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st
from mixins.patch import OTHERS
from parameterized import parameterized
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3_5Config, Qwen3_5TextConfig, Qwen3NextConfig

from transformers_packed import PackingCost, PackingPlan, plan_packing
from transformers_packed.models.families import SIZED, family_named


def lognormal(samples, mean=400, sigma=0.8, most=4096, seed=0):
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, samples)
    return drawn.astype(int).clip(8, most)


def distributions(samples):
    rng = np.random.default_rng(1)
    return {
        "lognormal": lognormal(samples),
        "uniform": rng.integers(1, 4097, samples),
        "bimodal": np.where(rng.random(samples) < 0.7, rng.normal(200, 40, samples), rng.normal(3000, 300, samples))
        .astype(int)
        .clip(1, 4096),
        "nearly the cap": rng.integers(3900, 4097, samples),
        "all equal": np.full(samples, 700),
    }


def rows_of_best_fit_decreasing(lengths, max_length):
    """Pack one document at a time, longest first, into the row with the least sufficient space."""
    rooms = []
    rows = 0
    for length in sorted(lengths, reverse=True):
        place = bisect_left(rooms, length)
        if place == len(rooms):
            rows += 1
            room = max_length
        else:
            room = rooms.pop(place)
        insort(rooms, room - length)
    return rows


def step_means(plan):
    """Return the mean document length of each step."""
    tokens, documents = (x.reshape(plan.steps, -1).sum(1) for x in (plan.row_tokens, plan.documents_per_row))
    return tokens / documents


ARGUMENTS = {
    "lengths": st.lists(st.integers(1, 40), min_size=1, max_size=120),
    "max_length": st.integers(1, 50),
    "overlong": st.sampled_from(["truncate", "split", "drop"]),
    "truncation_side": st.sampled_from(["left", "right"]),
    "world_size": st.integers(1, 4),
    "gradient_accumulation_steps": st.integers(1, 3),
    "balance": st.sampled_from([True, False, PackingCost(quadratic=0.1), PackingCost(chunked=1.0)]),
    "seed": st.integers(0, 5),
}


class PropertiesTest(unittest.TestCase):
    def plan(self, lengths, max_length, **arguments):
        """Return the plan, or None if the arguments ask for the impossible."""
        try:
            return plan_packing(lengths, max_length, **arguments)
        except ValueError as error:
            step = arguments["world_size"] * arguments["gradient_accumulation_steps"]
            fitting = [length for length in lengths if length <= max_length]
            if "a sample of at most" in str(error):
                self.assertEqual((arguments["overlong"], fitting), ("drop", []))
                return None
            self.assertIn("one per row with", str(error))
            if arguments["overlong"] == "drop":
                documents = len(fitting)
            elif arguments["overlong"] == "truncate":
                documents = len(lengths)
            else:
                documents = sum(-(-length // max_length) for length in lengths)
            self.assertNotEqual(documents % step, 0)
            return None

    @settings(max_examples=120, deadline=None)
    @given(**ARGUMENTS)
    def test_every_kept_token_stands_in_one_row(self, lengths, max_length, **arguments):
        # Elsewhere: a row is longer than requested, and memory runs out at random.
        plan = self.plan(lengths, max_length, **arguments)
        if plan is None:
            return
        parts = {}
        for index in range(len(plan)):
            row = list(zip(*(array.tolist() for array in plan.row(index)), strict=True))
            self.assertGreater(len(row), 0)
            self.assertLessEqual(sum(length for _, _, length in row), max_length)
            for sample, start, length in row:
                parts.setdefault(sample, []).append((start, start + length))
        for sample, length in enumerate(lengths):
            if length <= max_length:
                expected = [(0, length)]
            elif arguments["overlong"] == "drop":
                expected = []
            elif arguments["overlong"] == "split":
                expected = [(start, min(start + max_length, length)) for start in range(0, length, max_length)]
            elif arguments["truncation_side"] == "right":
                expected = [(0, max_length)]
            else:
                expected = [(length - max_length, length)]
            self.assertEqual(sorted(parts.pop(sample, [])), expected)
        self.assertEqual(parts, {})

        self.assertEqual(len(plan) % (arguments["world_size"] * arguments["gradient_accumulation_steps"]), 0)
        self.assertEqual(plan.overlong_samples, sum(length > max_length for length in lengths))
        self.assertEqual(plan.tokens + plan.lost_tokens, sum(lengths))
        self.assertEqual((plan.input_samples, plan.input_tokens), (len(lengths), sum(lengths)))

    @settings(max_examples=40, deadline=None)
    @given(epoch=st.integers(0, 3), **ARGUMENTS)
    def test_shards_and_epochs_hold_each_row_once(self, lengths, max_length, epoch, **arguments):
        # Elsewhere: training hangs at the end of an epoch, because processes have different numbers of rows.
        whole = self.plan(lengths, max_length, **arguments)
        if whole is None:
            return
        plan = whole.shuffled(epoch)
        rows = [[array.tolist() for array in plan.row(index)] for index in range(len(plan))]
        self.assertEqual(sorted(rows), sorted([array.tolist() for array in whole.row(i)] for i in range(len(whole))))
        shards = [plan.shard(rank, plan.world_size) for rank in range(plan.world_size)]
        for rank, shard in enumerate(shards):
            self.assertEqual(len(shard), len(plan) // plan.world_size)
            self.assertEqual(shard.steps, plan.steps)
            self.assertEqual(
                [[array.tolist() for array in shard.row(i)] for i in range(len(shard))], rows[rank :: len(shards)]
            )

    @settings(max_examples=30, deadline=None)
    @given(**ARGUMENTS)
    def test_the_same_seed_gives_the_same_plan_and_the_file_too(self, lengths, max_length, **arguments):
        # Elsewhere: processes time out while one of them packs. Here each process plans alone, and the plans agree.
        plan = self.plan(lengths, max_length, **arguments)
        if plan is None:
            return
        with tempfile.TemporaryDirectory() as directory:
            plan.save(Path(directory) / "plan")
            others = [plan_packing(lengths, max_length, **arguments), PackingPlan.load(Path(directory) / "plan")]
        for other in others:
            assert_same(self, plan, other)
            assert_same(self, plan.shuffled(2), other.shuffled(2))


def assert_same(test, plan, other):
    for name, value in vars(plan).items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(value, getattr(other, name))
            test.assertEqual(value.dtype, getattr(other, name).dtype)
        elif name in plan.__dataclass_fields__:
            test.assertEqual(value, getattr(other, name), name)


class FillTest(unittest.TestCase):
    @parameterized.expand(distributions(3000).items())
    def test_as_few_rows_as_best_fit_decreasing(self, _, lengths):
        plan = plan_packing(lengths, 4096)
        self.assertEqual(len(plan), rows_of_best_fit_decreasing(lengths, 4096))
        self.assertLessEqual(plan.row_tokens.max(), 4096)

    @settings(max_examples=200, deadline=None)
    @given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=200), room=st.integers(0, 60))
    def test_as_few_rows_for_any_lengths(self, lengths, room):
        # Elsewhere: a packer fails to pack for some row lengths.
        most = max(lengths) + room
        self.assertEqual(len(plan_packing(lengths, most)), rows_of_best_fit_decreasing(lengths, most))

    def test_figures_of_a_small_plan(self):
        plan = plan_packing([5, 3, 8, 2, 6], 8, balance=PackingCost(linear=1, quadratic=0.5))
        self.assertEqual((len(plan), plan.steps, plan.tokens, plan.fill), (3, 3, 24, 1.0))
        self.assertEqual(sorted(plan.row_cost.tolist()), [8 + 17.0, 8 + 20.0, 8 + 32.0])
        self.assertEqual(sorted(plan.documents_per_row.tolist()), [1, 2, 2])
        self.assertEqual(plan.row_tokens.tolist(), [8, 8, 8])
        # The longest of five, drawn with replacement and weighted by hand.
        longest = sum(n * (((i + 1) / 5) ** 5 - (i / 5) ** 5) for i, n in enumerate([2, 3, 5, 6, 8]))
        self.assertAlmostEqual(plan.padding_avoided, 1 - 4.8 / longest)
        text = plan.summary()
        for part in ("5 with 24 tokens", "100.00% full", "too long            none", "1 / 2 / 2"):
            self.assertIn(part, text)


class BalanceTest(unittest.TestCase):
    """Use the cost of the smallest Qwen3.5, in which long documents weigh most."""

    cost = PackingCost.from_config(
        Qwen3_5TextConfig(
            hidden_size=1024,
            intermediate_size=3584,
            num_hidden_layers=24,
            num_attention_heads=8,
            num_key_value_heads=2,
            linear_num_value_heads=16,
        )
    )

    def plan(self, world_size, accumulation=1, **arguments):
        arguments = {"balance": self.cost, **arguments}
        return plan_packing(
            lognormal(300_000), 4096, world_size=world_size, gradient_accumulation_steps=accumulation, **arguments
        )

    @parameterized.expand([(8, 4, 0.015), (64, 1, 0.065)])
    def test_ranks_cost_the_same(self, world_size, accumulation, most):
        plan = self.plan(world_size, accumulation)
        self.assertLess(plan.imbalance, most)
        ranks = [plan.shard(rank, world_size).row_cost.reshape(-1, accumulation).sum(1) for rank in range(world_size)]
        self.assertAlmostEqual(plan.imbalance, (np.max(ranks, 0) / np.mean(ranks, 0)).mean() - 1)
        self.assertAlmostEqual(plan.shuffled(1).imbalance, plan.imbalance, delta=0.002)
        densest = len(self.plan(1))
        self.assertLess(len(plan), 1.005 * densest + world_size * accumulation)
        unbalanced = self.plan(world_size, accumulation, balance=False)
        ranks = self.cost.documents(np.arange(4097))[unbalanced.lengths]
        ranks = np.add.reduceat(ranks, unbalanced.row_offsets[:-1]).reshape(-1, accumulation, world_size).sum(1)
        self.assertLess(plan.imbalance, 0.7 * ((ranks.max(1) / ranks.mean(1)).mean() - 1))

    def test_steps_are_as_random_as_a_random_order(self, world_size=8, accumulation=4):
        """Average over ten epochs, because the few hundred steps of one epoch vary by chance."""
        plan = self.plan(world_size, accumulation)
        rng = np.random.default_rng(0)
        expected, variances, correlations = [], [], []
        for epoch in range(10):
            random = plan._take(rng.permutation(len(plan)))
            expected.append(step_means(random).var())
            means = step_means(plan.shuffled(epoch))
            variances.append(means.var())
            correlations.append(np.corrcoef(means, np.arange(plan.steps))[0, 1])
        self.assertLess(abs(np.mean(correlations)), 0.05)
        self.assertAlmostEqual(np.mean(variances) / np.mean(expected), 1, delta=0.1)

    @parameterized.expand([(64, False, 0.1), (8, True, 0.25)])
    def test_steps_vary_as_those_of_samples_in_random_order(self, world_size, balance, tolerance):
        """Best-fit decreasing puts similar lengths into a row, with nine times the variance. Mixing fixes this."""
        lengths = lognormal(300_000)
        plan = plan_packing(lengths, 4096, world_size=world_size, balance=balance)
        rng = np.random.default_rng(0)
        expected = []
        for _ in range(10):
            shuffled = rng.permutation(lengths)
            step = (np.cumsum(shuffled) - 1) // (world_size * 4096)
            tokens, documents = np.bincount(step, weights=shuffled), np.bincount(step)
            expected.append((tokens / documents)[:-1].var())
        found = np.mean([step_means(plan.shuffled(epoch)).var() for epoch in range(10)])
        self.assertAlmostEqual(found / np.mean(expected), 1, delta=tolerance)

    @parameterized.expand([(True, "truncate"), (True, "split"), (False, "drop")])
    def test_steps_do_not_depend_on_who_computes_them(self, balance, overlong):
        """A run can continue on another number of ranks, in every epoch."""

        lengths = lognormal(2000, most=6000)

        def plan(world_size, accumulation, seed=0, lengths=lengths):
            options = {"balance": balance, "overlong": overlong, "seed": seed}
            sizes = {"world_size": world_size, "gradient_accumulation_steps": accumulation}
            return plan_packing(lengths, 4096, **options, **sizes)

        def steps(plan):
            columns = plan.samples, plan._starts(slice(None)), plan.lengths
            documents = list(zip(*(column.tolist() for column in columns), strict=True))
            rows = [documents[start:end] for start, end in pairwise(plan.row_offsets.tolist())]
            return [sorted(sum(rows[at : at + 8], [])) for at in range(0, len(rows), 8)]

        expected = plan(1, 8)
        for epoch in (0, 1, 2):
            for world_size in (2, 4, 8):
                other = plan(world_size, 8 // world_size).shuffled(epoch)
                self.assertEqual(steps(other), steps(expected.shuffled(epoch)))
                self.assertEqual(other.fingerprint, expected.shuffled(epoch).fingerprint)
        changed = [plan(1, 8, seed=1), plan(1, 4), plan(1, 8, lengths=lengths[::-1]), expected.shuffled(1)]
        self.assertEqual(len({x.fingerprint for x in (expected, *changed)}), 5)

    def test_samples_are_dealt_at_random(self):
        """Equal samples do not follow the order of the dataset, and neighbours are separated."""
        plan = plan_packing(np.full(40_000, 400), 4096)
        self.assertLess(abs(np.corrcoef(plan.samples, np.arange(40_000))[0, 1]), 0.02)
        self.assertLess((np.abs(np.diff(plan.samples)) == 1).mean(), 0.001)

    def test_seeds_and_epochs_differ(self):
        lengths = lognormal(1000)
        plans = [plan_packing(lengths, 4096, seed=seed) for seed in (0, 1)]
        plans += [plans[0].shuffled(1), plans[0].shuffled(2)]
        orders = {plan.samples.tobytes() for plan in plans}
        self.assertEqual(len(orders), 4)
        self.assertNotEqual(plans[0].epoch_order(1).tolist(), plans[1].epoch_order(1).tolist())
        assert_same(self, plans[0].shuffled(0), plans[0])
        np.testing.assert_array_equal(plans[0].epoch_order(0), np.arange(len(plans[0])))


class ErrorsTest(unittest.TestCase):
    @parameterized.expand(
        [
            ("no sample", {"lengths": []}, "got no sample"),
            ("an empty sample", {"lengths": [3, 0, 0]}, r"got 0 at sample 1 \(2 of 3"),
            ("a negative length", {"lengths": [3, -2]}, "got -2 at sample 1"),
            ("fractions", {"lengths": [1.5]}, "an array of float64"),
            ("two dimensions", {"lengths": [[1, 2]]}, r"shape \(1, 2\)"),
            ("too large a number", {"lengths": [2**31]}, "up to 2147483647"),
            ("too long", {"lengths": [9, 11, 10, 30]}, r"got 2 longer ones among 4, the longest \(sample 3\) of 30"),
            ("all dropped", {"lengths": [11], "overlong": "drop"}, "1 samples, all longer"),
            ("max_length 0", {"max_length": 0}, "max_length as a whole number of at least 1, got 0"),
            ("a fractional world", {"world_size": 2.0}, "world_size"),
            ("no accumulation", {"gradient_accumulation_steps": 0}, "gradient_accumulation_steps"),
            ("a negative seed", {"seed": -1}, "seed"),
            ("another overlong", {"overlong": "cut"}, "overlong 'error' or"),
            ("another side", {"truncation_side": "middle"}, "truncation_side"),
            ("fewer samples than ranks", {"lengths": [3, 3], "world_size": 4}, "at least 4 documents"),
            ("full rows that do not add up", {"lengths": [10] * 5, "world_size": 4}, "Remove 1 samples"),
            ("another model", {"balance": LlamaConfig()}, "the configuration of a Qwen3-Next, .* model, got llama"),
        ]
    )
    def test_plan_packing(self, _, arguments, message):
        with self.assertRaisesRegex(ValueError, f"^expected .*{message}"):
            plan_packing(**{"lengths": [3, 4], "max_length": 10, **arguments})

    def test_the_plan(self):
        plan = plan_packing([3, 4, 5, 6], 10, world_size=2)
        for rank, world_size, message in (
            (2, 2, "rank from 0 to 1, got 2"),
            (-1, 2, "got -1"),
            (0, 3, "world_size=2"),
        ):
            with self.assertRaisesRegex(ValueError, message):
                plan.shard(rank, world_size)
        shard = plan.shard(1, 2)
        for call in (lambda: shard.shard(0, 1), lambda: shard.shuffled(1)):
            with self.assertRaisesRegex(ValueError, "the shard of rank 1"):
                call()
        with self.assertRaisesRegex(ValueError, "an epoch from 0 on, got -1"):
            plan.shuffled(-1)
        for index in (len(plan), -1):
            with self.assertRaises(IndexError):
                plan.row(index)
        with self.assertRaises(ValueError):
            plan.samples[0] = 3

    @parameterized.expand([({"linear": 0},), ({"quadratic": -1},), ({"chunked": float("nan")},)])
    def test_cost(self, coefficients):
        with self.assertRaisesRegex(ValueError, "^expected finite"):
            PackingCost(**coefficients)


class FileTest(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.path = Path(directory.name) / "plan.npz"
        self.plan = plan_packing(lognormal(500), 4096, overlong="split", world_size=2)
        self.plan.save(self.path)

    def refuses(self, message="expected a file written by PackingPlan.save"):
        with self.assertRaisesRegex(ValueError, message):
            PackingPlan.load(self.path)

    def rewrite(self, **changes):
        with np.load(self.path) as stored:
            arrays = {**stored, **changes}
        np.savez(self.path, **{name: array for name, array in arrays.items() if array is not None})

    def test_nothing_else_is_left_beside_it(self):
        self.assertEqual(list(self.path.parent.iterdir()), [self.path])
        assert_same(self, self.plan, PackingPlan.load(str(self.path)))

    def test_foreign_files(self):
        for content in (b"", b"text", b"\x93NUMPY broken", b'{"rows": []}'):
            self.path.write_bytes(content)
            self.refuses()
        for value in (np.arange(3), np.array([{}], dtype=object)):
            np.save(self.path.open("wb"), value, allow_pickle=True)
            self.refuses()
        np.savez(self.path, header=np.array([object()]))
        self.refuses()
        np.savez(self.path, samples=np.arange(3))
        self.refuses()

    def test_any_damaged_byte_is_noticed(self):
        content = self.path.read_bytes()
        with zipfile.ZipFile(self.path) as archive:
            begins = [info.header_offset + 200 for info in archive.infolist()]
        for place in (*begins, len(content) - 10):
            damaged = bytearray(content)
            damaged[place] ^= 0xFF
            self.path.write_bytes(damaged)
            self.refuses()
        for size in (10, len(content) // 2, len(content) - 5):
            self.path.write_bytes(content[:size])
            self.refuses()

    def test_arrays_that_contradict_each_other(self):
        samples, offsets, lengths = self.plan.samples, self.plan.row_offsets, self.plan.lengths
        for changes in (
            {"samples": samples[:-1]},
            {"samples": samples + 1},
            {"samples": None},
            {"lengths": lengths * 2},
            {"row_offsets": offsets[::-1]},
            {"starts": samples - 5},
            {"other": samples},
        ):
            with self.subTest(**dict.fromkeys(changes)):
                self.rewrite(**changes)
                self.refuses()
                self.plan.save(self.path)


class CostTest(unittest.TestCase):
    sizes = {
        "vocab_size": 96,
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
    }
    experts = {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 10,
        "shared_expert_intermediate_size": 14,
    }

    @parameterized.expand(
        [
            (Qwen3_5TextConfig(**sizes),),
            (Qwen3NextConfig(**sizes, **experts, mlp_only_layers=[1]),),
            (Qwen3NextConfig(**sizes, **experts, decoder_sparse_step=2),),
            *((tiny_config(family, vocab_size=96),) for family in OTHERS if family_named(family) in SIZED),
        ],
        name_func=lambda function, number, _: f"{function.__name__}_{number}",
    )
    def test_linear_part_is_what_a_token_is_multiplied_with(self, config):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        multiplied = 0.0
        for name, parameter in model.named_parameters():
            if ".experts." in name:
                multiplied += parameter.numel() * config.num_experts_per_tok / config.num_experts
            elif parameter.dim() > 1 and not name.endswith(("embed_tokens.weight", "A_log")):
                multiplied += parameter.numel()
        self.assertEqual(PackingCost.from_config(config).linear, 2 * multiplied)

    def test_the_other_parts(self):
        cost = PackingCost.from_config(Qwen3_5TextConfig(**self.sizes))
        # One full-attention layer: 6 heads of dimension 16, two products over half of the square, which weigh three times.
        self.assertEqual(cost.quadratic, 3 * 2 * 6 * 16)
        counted = PackingCost.from_config(Qwen3_5TextConfig(**self.sizes), quadratic_weight=1)
        self.assertEqual(counted, dataclasses.replace(cost, quadratic=2 * 6 * 16))
        within = 64 * 8 * 3 + 64 * 12 * 2 + 64 * 64 / 3
        self.assertEqual(cost.chunked, 3 * 2 * 4 * (within + 3 * 8 * 12))
        self.assertEqual(
            cost.documents([1, 65]).tolist(),
            [
                cost.linear + 64 * cost.chunked + cost.quadratic,
                65 * cost.linear + 128 * cost.chunked + 65**2 * cost.quadratic,
            ],
        )

    def test_the_text_part_of_a_composite_configuration(self):
        config = Qwen3_5Config()
        self.assertEqual(PackingCost.from_config(config), PackingCost.from_config(config.text_config))
        self.assertEqual(plan_packing([1], 1).cost, PackingCost.from_config(Qwen3_5TextConfig()))
