"""Trainers of this package wait for no value of the GPU between steps."""

import pickle
from types import SimpleNamespace
from unittest import mock

import torch
from mixins.configure import ConfigureTestCase
from parameterized import parameterized
from scripts.trainer_arms import CONFIGS, OPTIONS
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from transformers_packed import SequenceBoundaries, configure_packing
from transformers_packed.training import setup
from transformers_packed.training.facts import Facts
from transformers_packed.training.options import Options
from transformers_packed.training.run_ahead import RunAheadCallback


SAMPLES = [{"input_ids": [n] * n, "labels": [n] * n} for n in range(2, 26)]


class NotFinite(Trainer):
    """Returns a loss that is not finite for some calls. Weights are updated as ever."""

    def __init__(self, *args, losses=(), **kwargs):
        super().__init__(*args, **kwargs)
        self.losses, self.returned, self.lengths = list(losses), [], []

    def training_step(self, model, inputs, *args, **kwargs):
        self.lengths.append(inputs["input_ids"].numel())
        loss = super().training_step(model, inputs, *args, **kwargs)
        replaced = self.losses.pop(0) if self.losses else None
        loss = loss if replaced is None else torch.full_like(loss, replaced)
        self.returned.append(loss.item())
        return loss


class Stepping:
    """What the callback reads of a Trainer."""

    def __init__(self):
        self.args = SimpleNamespace(
            device=torch.device("cpu"), dataloader_pin_memory=True, logging_nan_inf_filter=True
        )

    def training_step(self, model):
        return torch.ones(())

    def floating_point_ops(self, inputs):
        return 0


class RunAheadTest(ConfigureTestCase):
    def trainer(self, packed=True, losses=(), **options):
        options = {**OPTIONS, "logging_nan_inf_filter": True, "logging_steps": 4, "max_steps": 4, **options}
        args = TrainingArguments(self.directory, per_device_train_batch_size=4, **options)
        model = AutoModelForCausalLM.from_config(CONFIGS["qwen3_5"]())
        samples = SAMPLES if packed else SAMPLES[:1] * 16
        trainer = NotFinite(model, args, losses=losses, train_dataset=samples)
        # The steps of these tests return what the tests want.
        return configure_packing(trainer, "padding_free", verify=False) if packed else trainer

    def logged(self, trainer) -> float:
        trainer.train()
        return next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)

    @parameterized.expand([(0,), (1,)])
    def test_lengths_are_not_read_from_the_device(self, workers):
        trainer = self.trainer(dataloader_num_workers=workers)
        # Tensors of a GPU cannot be read without a wait.
        with mock.patch("transformers_packed.models.inputs.may_read", return_value=False):
            for reading in ("from_cu_seqlens", "from_seq_idx", "from_position_ids"):
                patch = mock.patch.object(SequenceBoundaries, reading, side_effect=AssertionError(reading))
                self.enterContext(patch)
            trainer.train()
        self.assertEqual(trainer.state.global_step, 4)

    def test_same_losses_as_without_lengths_on_the_host(self):
        losses = []
        for given in (True, False):
            torch.manual_seed(0)
            trainer = self.trainer()
            self.assertTrue(trainer.data_collator.return_boundaries)
            trainer.data_collator.return_boundaries = given
            losses.append(self.logged(trainer))
            self.assertAlmostEqual(losses[-1], sum(trainer.returned) / 4, places=6)
        self.assertEqual(*losses)

    def test_own_losses_get_no_lengths_on_the_host(self):
        own = mock.patch.object(NotFinite, "compute_loss", lambda *args, **kwargs: None, create=True)
        with own:
            self.assertFalse(self.trainer().data_collator.return_boundaries)

    @parameterized.expand([(float("nan"),), (float("inf"),)])
    def test_losses_that_are_not_finite(self, wrong):
        trainer = self.trainer(losses=[None, wrong, wrong, None])
        found, losses = self.logged(trainer), trainer.returned
        self.assertAlmostEqual(found, (3 * losses[0] + losses[3]) / 4, places=6)
        self.assertTrue(trainer.args.logging_nan_inf_filter)
        # As Trainer does. A second run remembers nothing of the first.
        trainer.losses = [wrong] * 4
        trainer.state.log_history.clear()
        with self.assertLogs("transformers_packed.training.run_ahead", "WARNING") as logs:
            self.assertEqual(self.logged(trainer), 0.0)
        self.assertIn("4 of 4 losses since the last log were not finite", logs.output[0])

    def test_micro_steps_that_are_not_finite(self):
        trainer = self.trainer(losses=[None, float("nan")] * 4, gradient_accumulation_steps=2)
        found, losses = self.logged(trainer), trainer.returned[::2]
        counted = []
        for loss in losses:
            counted.append(loss)
            counted.append(sum(counted) / len(counted))
        self.assertAlmostEqual(found, sum(counted) / 4, places=5)

    def test_evaluation_keeps_its_filter(self):
        """Trainer logs and evaluates after the end of a step, with its own setting."""
        seen = []

        class Seen(TrainerCallback):
            def on_log(self, args, state, control, **kwargs):
                seen.append(args.logging_nan_inf_filter)

        trainer = self.trainer(gradient_accumulation_steps=2)
        trainer.add_callback(Seen())
        trainer.train()
        self.assertEqual(seen, [True, True])

    def test_pickles_with_its_trainer(self):
        trainer = Stepping()
        trainer.training_step = RunAheadCallback(trainer)
        again = pickle.loads(pickle.dumps(trainer))
        self.assertIs(again.training_step.trainer, again)
        self.assertIs(again.training_step.step.__self__, again)
        self.assertEqual(again.training_step(torch.nn.Linear(1, 1)), torch.ones(()))

    def test_modules_are_not_visited_where_that_changes_nothing(self):
        trainer, steps = self.trainer(), []

        class Watch(TrainerCallback):
            def on_step_begin(self, args, state, control, model=None, **kwargs):
                if state.global_step == 1:
                    # Trainer puts this back.
                    model.lm_head.eval()
                visited.reset_mock()

            def on_step_end(self, args, state, control, model=None, **kwargs):
                left = {"train", "num_parameters"} & {*vars(model)}
                steps.append((visited.call_count, all(x.training for x in model.modules()), left))

        trainer.add_callback(Watch())
        modules = [*trainer.model.modules()]
        # `train` asks each module for those in it.
        visited = mock.patch.object(torch.nn.Module, "children", autospec=True, side_effect=torch.nn.Module.children)
        size = mock.patch.object(type(trainer.model), "num_parameters", autospec=True, return_value=1000)
        with visited as visited, size as size:
            trainer.train()
        self.assertEqual(steps, [(number, True, set()) for number in (0, len(modules), 0, 0)])
        self.assertEqual((size.call_count, trainer.state.total_flos), (1, 6 * 1000 * sum(trainer.lengths)))

    def test_methods_of_the_user_run_in_each_step(self):
        trainer, called = self.trainer(packed=False), []

        class Frozen(type(trainer.model.model.norm)):
            def train(self, mode=True):
                called.append("train")
                return super().train(mode)

        def noted(method):
            def run(*args, **kwargs):
                called.append(method.__name__)
                return method(*args, **kwargs)

            return run

        trainer.model.model.norm.__class__ = Frozen
        trainer.floating_point_ops = noted(trainer.floating_point_ops)
        configure_packing(trainer, "padding_free", verify=False)
        called.clear()
        trainer.train()
        self.assertEqual(called.count("floating_point_ops"), 4)
        # It runs when training begins, too.
        self.assertGreaterEqual(called.count("train"), 4)

    def test_no_filter_if_none_is_wanted(self):
        trainer = self.trainer(losses=[float("nan")], logging_nan_inf_filter=False)
        self.assertNotEqual(found := self.logged(trainer), found)

    def test_the_host_reads_no_loss(self):
        for packed, reads in ((False, 4), (True, 0)):
            trainer = self.trainer(packed)
            with mock.patch.object(torch, "isnan", wraps=torch.isnan) as isnan:
                trainer.train()
            self.assertEqual(isnan.call_count, reads)

    @parameterized.expand([("cuda", True, True), ("cuda", False, False), ("cpu", True, False)])
    def test_batches_are_copied_without_waiting_from_pinned_memory(self, device, pinned, expected):
        trainer = self.trainer(packed=False)
        trainer.args.dataloader_pin_memory = pinned
        configs = [trainer.args.accelerator_config, trainer.accelerator.dataloader_config]
        with mock.patch.object(TrainingArguments, "device", torch.device(device)):
            changes = setup._of_data(Facts.of(trainer, Options()), SAMPLES, False)
        found = [change.target for change in changes if change.name == "non_blocking"]
        self.assertEqual(found, configs if expected else [])
