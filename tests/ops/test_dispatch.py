import unittest
from unittest import mock

import torch
from parameterized import parameterized

from transformers_packed import SequenceBoundaries
from transformers_packed.ops import dispatch, implementations_used
from transformers_packed.ops.dispatch import Implementation, choose, run
from transformers_packed.parallel import RowShard
from transformers_packed.shared_prompts import SharedPrompts


LOGGER = "transformers_packed.ops.dispatch"


def needs(words):
    """A verifier that always refuses."""
    return lambda *args, **kwargs: words


class DispatchTest(unittest.TestCase):
    def setUp(self):
        # Clear the records of earlier tests.
        self.enterContext(mock.patch.multiple(dispatch, _used={}, _of_tokens=set()))
        self.table = {
            "first": Implementation(lambda: "first", needs("needs a GPU")),
            "second": Implementation(lambda: "second", needs("needs bfloat16")),
            "third": Implementation(lambda: "third"),
            "fourth": Implementation(lambda: "fourth"),
        }

    def test_auto_takes_the_first_that_can_serve(self):
        self.assertEqual(choose("op", "auto", self.table)(), "third")

    def test_which_ops_keep_documents_apart(self):
        table = {"only": Implementation(lambda **kwargs: None)}
        run("mixes", "auto", table, boundaries=None)
        run("each token by itself", "auto", table)
        self.assertEqual(list(implementations_used()), ["mixes", "each token by itself"])
        self.assertEqual(implementations_used(isolating=True), {"mixes": ["only"]})

    @parameterized.expand([("third",), ("fourth",)])
    def test_a_name_asks_for_that_one(self, name):
        self.assertEqual(choose("op", name, self.table)(), name)

    def test_a_choice_is_not_kept_for_another_call(self):
        def verify(x):
            return "" if torch.is_autocast_enabled("cpu") and x.dtype == torch.float32 else "needs autocast"

        table = {"kernel": Implementation(torch.cos, verify), "reference": Implementation(torch.sin)}
        x = torch.ones(3)
        for _ in range(2):
            self.assertIs(choose("op", "auto", table, x), torch.sin)
            with torch.autocast("cpu"):
                self.assertIs(choose("op", "auto", table, x), torch.cos)
                self.assertIs(choose("op", "auto", table, x.double()), torch.sin)
                transformed = torch.func.vmap(lambda y: run("op", "auto", table, y))
                self.assertTrue(torch.equal(transformed(x), x.sin()))
            with mock.patch.dict(table, kernel=Implementation(torch.tan)):
                self.assertIs(choose("op", "auto", table, x), torch.tan)

    def test_the_compiler_gets_the_reference(self):
        def fused(x):
            raise AssertionError("kernels are opaque to the compiler")

        table = {"fused": Implementation(fused), "reference": Implementation(torch.sin)}
        compiled = torch.compile(lambda x: run("op", "auto", table, x), backend="eager", fullgraph=True)
        self.assertTrue(compiled(torch.ones(3)).equal(torch.ones(3).sin()))

    def test_the_compiler_does_not_get_slow_references(self):
        for op in ("gated_delta_rule", "linear_cross_entropy"):
            table = {"fast": Implementation(torch.cos), "reference": Implementation(torch.sin)}
            compiled = torch.compile(lambda x, op=op, table=table: run(op, "auto", table, x), backend="eager")
            self.assertTrue(compiled(torch.ones(3)).equal(torch.ones(3).cos()), op)

    def test_a_row_for_which_the_op_has_no_form(self):
        whole = SequenceBoundaries.from_lengths([2, 2])
        rows = [(SharedPrompts.of(whole, [-1, 0]), "a row with shared prompts. Train without shared prompts")]
        rows.append((RowShard.cut(whole, 0, 2), "a part of a row. Train without sequence parallelism"))
        for row, expected in rows:
            with self.assertRaisesRegex(ValueError, f"^the op mix does not support {expected}"):
                run("mix", "auto", {"reference": Implementation(print)}, boundaries=row)

    def test_a_name_that_cannot_serve(self):
        pattern = r'^expected an input that impl="first" supports, got first: needs a GPU\. Use impl="auto"'
        with self.assertRaisesRegex(ValueError, pattern) as caught:
            choose("op", "first", self.table)
        self.assertNotIn("bfloat16", str(caught.exception))
        self.assertEqual(implementations_used(), {})

    def test_nothing_can_serve(self):
        del self.table["third"], self.table["fourth"]
        pattern = r"^expected .*, got first: needs a GPU; second: needs bfloat16\. .*install the missing package"
        with self.assertRaisesRegex(ValueError, pattern):
            choose("op", "auto", self.table)

    def test_an_unknown_name(self):
        pattern = r"^expected impl=\"auto\" or one of \['first', 'fourth', 'second', 'third'\], got \"fifth\"\. Use"
        with self.assertRaisesRegex(ValueError, pattern):
            choose("op", "fifth", self.table)

    def test_logs_once_what_ran_and_why_others_did_not(self):
        with self.assertLogs(LOGGER, "INFO") as logs:
            for _ in range(3):
                choose("op", "auto", self.table)
            choose("op", "fourth", self.table)
        self.assertEqual(
            [record.getMessage() for record in logs.records],
            ["op: third (first: needs a GPU; second: needs bfloat16)", "op: fourth"],
        )

    def test_warns_of_the_reference_on_a_gpu(self):
        table = {"kernel": self.table["first"], "reference": Implementation(print)}
        on_gpu, on_cpu = mock.Mock(is_cuda=True), mock.Mock(is_cuda=False)
        with self.assertNoLogs(LOGGER, "WARNING"):
            choose("on_cpu", "auto", table, on_cpu)
            choose("asked_for", "reference", table, on_gpu)
        with self.assertLogs(LOGGER, "WARNING") as logs:
            choose("op", "auto", table, on_gpu)
        self.assertEqual(logs.records[0].getMessage(), "op: reference (kernel: needs a GPU)")
