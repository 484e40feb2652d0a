"""The options of packing are declared once, and what excludes them is checked in one place."""

import unittest
from dataclasses import fields
from inspect import Parameter, signature

from parameterized import parameterized
from transformers import TrainingArguments

from transformers_packed import PackedTrainingArguments, configure_packing
from transformers_packed.cli.options import parsers
from transformers_packed.training.options import Options, TrainingOptions


class DeclaredOnceTest(unittest.TestCase):
    def test_the_signature_has_the_fields(self):
        _, *parameters, plan_options = signature(configure_packing).parameters.values()
        found = {x.name: (x.annotation, x.default) for x in parameters}
        expected = {x.name: (x.type, x.default) for x in fields(Options) if x.name != "plan_options"}
        self.assertEqual(found, expected)
        self.assertEqual((plan_options.name, plan_options.kind), ("plan_options", Parameter.VAR_KEYWORD))

    def test_every_field_is_documented(self):
        for function, names in (
            (configure_packing, {x.name for x in fields(Options)}),
            (PackedTrainingArguments, {x.name for x in fields(PackedTrainingArguments)}),
        ):
            names -= {x.name for x in fields(TrainingArguments)}
            documented = function.__doc__.partition("Args:")[2].partition("Raises:")[0]
            self.assertEqual({name for name in names if f" {name}" not in documented}, set())

    def test_arguments_keep_their_order(self):
        """Those of Transformers may be passed by position."""
        names = [x.name for x in fields(PackedTrainingArguments) if not x.kw_only]
        self.assertEqual(names[: len(fields(TrainingArguments))], [x.name for x in fields(TrainingArguments)])

    def test_flags_have_the_defaults_and_the_help(self):
        declared = {x.name: x for x in fields(TrainingOptions)}
        actions = [action for action in parsers()[1]["train"]._actions if action.dest in {*declared} - {"max_length"}]
        self.assertEqual(len(actions), 8)
        for action in actions:
            option = declared[action.dest]
            self.assertEqual(action.default, option.default)
            self.assertEqual(action.help.lower() + ".", option.metadata["help"].lower())


class CheckTest(unittest.TestCase):
    @parameterized.expand(
        [
            ({"packing": "always"}, "packing of True, False or one of .*, got 'always'"),
            ({"mtp_loss_weight": -1}, "mtp_loss_weight of 0 or more, got -1"),
            ({"sequence_parallel_size": 0}, "sequence_parallel_size of 1 or more, got 0"),
            ({"sequence_parallel_size": True}, "sequence_parallel_size of 1 or more, got True"),
            ({"sequence_parallel_attention": "typo"}, r"attention of \(None, 'heads', 'gather'\), got 'typo'"),
            ({"sequence_parallel_gated_delta_rule": "gather"}, r"rule of \('state', 'heads'\), got 'gather'"),
            ({"max_length": 0}, "packing=True with max_length, got packing='auto'. Pass packing=True, or remove max"),
            (
                {"packing": "auto", "plan_options": {"seed": 0, "overlong": "drop"}},
                "packing=True with overlong, seed, got",
            ),
            ({"packing": False, "share_prompts": True}, "other than False with share_prompts, got packing=False"),
            ({"packing": "off", "cuda_graphs": True}, "with cuda_graphs, got packing='off' or padding_free=False"),
            ({"packing": False, "sequence_parallel_size": 2}, "with sequence_parallel_size, got packing=False"),
            ({"sequence_parallel_attention": "gather"}, "above 1 with sequence_parallel_attention, got seq.*_size=1"),
            ({"sequence_parallel_gated_delta_rule": "heads"}, "above 1 with sequence_parallel_gated_delta_rule"),
            ({"cuda_graphs": True, "mtp_only": True}, "no mtp_only with cuda_graphs, got mtp_only=True"),
            ({"teacher": "model", "mtp_only": True}, "no mtp_only with teacher, got mtp_only=True"),
            (
                {"distill_beta": 0.5, "distill_weight": 1.0},
                "a teacher with distill_weight, distill_beta, got none. Pass a",
            ),
            ({"distill_beta": 1.5}, "distill_beta of 0 to 1, got 1.5"),
            ({"distill_weight": 0.0}, "distill_weight of above 0 and up to 1, got 0.0"),
            ({"distill_temperature": 0.0}, "distill_temperature of above 0, got 0.0"),
            (
                {"cuda_graphs": True, "sequence_parallel_size": 2},
                "sequence_parallel_size=1 with cuda_graphs, got .*=2",
            ),
        ]
    )
    def test_refused(self, options, message):
        with self.assertRaisesRegex(ValueError, f"^expected .*{message}"):
            Options(**options).check()

    def test_accepted(self):
        for options in (
            {},
            {"packing": False, "float8": True, "mtp_loss_weight": 0.1, "cuda_graphs": False},
            {"packing": True, "max_length": 8, "plan_options": {"seed": 0}, "cuda_graphs": True},
            {"cuda_graphs": False, "mtp_only": True, "sequence_parallel_size": 2},
            {"sequence_parallel_size": 2, "sequence_parallel_attention": "heads"},
        ):
            Options(**options).check()
