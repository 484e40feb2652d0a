"""A Trainer trains on a table of several kinds of samples as on a list of them, which has no missing columns."""

from data.test_null_columns import filled, listed, table
from mixins.configure import ConfigureTestCase, said
from parameterized import parameterized
from transformers import set_seed

from transformers_packed import configure_packing


MODES = {"auto": ("auto", None), "padding_free": ("padding_free", None), "pack": (True, 8)}
# Each kind before and behind plain samples. Other columns are refused, or need another model.
CASES = [
    ("rows", "plain", "auto"),
    ("rows", "kind", "pack"),
    ("trees", "kind", "auto"),
    ("groups", "plain", "padding_free"),
    ("masks", "plain", "pack"),
]


class KindsTest(ConfigureTestCase):
    def outcome(self, dataset, mode, metrics=None, **args):
        """The losses of training and evaluation, or the error."""
        set_seed(0)
        args = {"max_steps": 1, "logging_steps": 1, "remove_unused_columns": False, **args}
        trainer = self.trainer(dataset=dataset, args=args, eval_dataset=dataset, compute_metrics=metrics)
        try:
            output, _ = said(configure_packing, trainer, *MODES[mode], verify=False)
            said(trainer.train)
            losses = [round(log["loss"], 5) for log in trainer.state.log_history if "loss" in log]
            return output.split()[:2], losses, said(trainer.evaluate)[1].get("eval_documents")
        except ValueError as error:
            return str(error).replace("Dataset", "list")

    @parameterized.expand(CASES)
    def test_training(self, kind, first, mode):
        want, *got = (self.outcome(make(kind, first), mode) for make in (listed, filled, table))
        self.assertEqual(got, [want, want])
        # Who has rows does not plan them.
        self.assertEqual(isinstance(want, str), (kind, mode) == ("rows", "pack"), want)

    def test_evaluation_of_documents(self):
        def count(prediction):
            return {"documents": len(prediction.predictions)}

        for make in (filled, table):
            found = self.outcome(make("rows", "plain"), "padding_free", count, include_for_metrics=[])
            self.assertEqual(found[2], 5)

    @parameterized.expand([("rows", "plain"), ("trees", "kind")])
    def test_columns_that_trainer_would_remove(self, kind, first):
        want, *got = (self.outcome(make(kind, first), "auto", remove_unused_columns=True) for make in (listed, table))
        self.assertEqual(got, [want])
        column = {"rows": "seq_lengths", "trees": "turns"}[kind]
        self.assertIn(f"remove_unused_columns=True, which removes the column {column}", want)
