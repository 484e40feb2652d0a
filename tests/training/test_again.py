"""A second `configure_packing` on a Trainer equals a single call with its arguments."""

from unittest import mock

import torch
from mixins.configure import ConfigureTestCase, callbacks_of, said, train_configured
from parameterized import parameterized
from scripts.configured_arms import tokenizer
from scripts.trainer_arms import TINY, Samples
from transformers import DataCollatorForSeq2Seq, Qwen3_5ForCausalLM, Qwen3_5TextConfig, TrainerCallback

from transformers_packed import DataCollatorWithFlattening, PackingDataset, configure_packing, patch_model
from transformers_packed.models import float8
from transformers_packed.training.apply import Applied


def make_model():
    torch.manual_seed(0)
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**TINY, mtp_num_hidden_layers=1))


CALLS = {
    "auto": {},
    "padding_free": {"packing": "padding_free"},
    "pack": {"packing": True, "max_length": 128},
    "float8": {"packing": False, "float8": True},
    "mtp": {"packing": "padding_free", "mtp_loss_weight": 0.1},
    "mtp_only": {"packing": "padding_free", "mtp_only": True},
    "batches": {"packing": "batches"},
    "no graphs": {"packing": "padding_free", "cuda_graphs": False},
}


# What each call leaves to undo, and what each finds after packing.
PAIRS = [(first, "padding_free") for first in ("padding_free", "pack", "float8", "mtp_only", "batches", "no graphs")]
PAIRS += [("mtp", second) for second in ("pack", "float8")]


def text(value):
    """What a value is, without where it lies in memory."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {name: text(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [text(x) for x in value]
    return repr(value).partition(" object at ")[0].partition(" at 0x")[0]


def state(trainer):
    model, args = trainer.model, trainer.args
    others = args.accelerator_config, trainer.accelerator.dataloader_config, trainer.accelerator.ddp_handler
    torch.manual_seed(0)
    return {
        "batches": [text(dict(batch)) for batch in trainer.get_train_dataloader()],
        "evaluated": [text(dict(batch)) for batch in trainer.get_eval_dataloader(trainer.eval_dataset)],
        "callbacks": [type(x).__name__ for x in callbacks_of(trainer)],
        "trainer": {name: type(x).__name__ for name, x in vars(trainer).items()},
        "step": type(getattr(trainer.training_step, "step", None)).__name__,
        "args": {name: text(x) for name, x in vars(args).items()},
        "others": [text(vars(x)) for x in others if x is not None],
        "model": [(name, type(x), x.training) for name, x in model.named_modules()],
        "attributes": [
            {key: text(x) for key, x in vars(module).items() if not isinstance(x, dict) and "config" not in key}
            for module in model.modules()
        ],
        "trained": [(name, x.requires_grad) for name, x in model.named_parameters()],
        "config": text(model.config.to_dict()),
    }


class AgainTest(ConfigureTestCase):
    def build(self, model=None, **kwargs):
        args = {"seed": 3, "gradient_accumulation_steps": 2}
        kwargs = {"dataset": Samples(12).rows, "eval_dataset": Samples(3).rows, "args": args} | kwargs
        return self.trainer(model or make_model(), **{"collator": DataCollatorForSeq2Seq(tokenizer())} | kwargs)

    def check(self, first, second, make):
        with mock.patch.object(float8, "_LEAST_WORK", 0):
            once, twice = make(), make()
            line, _ = said(configure_packing, once, **second)
            said(configure_packing, twice, **first)
            again, _ = said(configure_packing, twice, **second)
        self.assertEqual(again, line)
        self.check_same_state(twice, state(once))
        return twice

    def check_same_state(self, trainer, expected):
        found = state(trainer)
        for name, value in expected.items():
            self.assertEqual(found[name], value, name)

    @parameterized.expand(PAIRS)
    def test_the_last_call_counts(self, first, second):
        trainer = self.check(CALLS[first], CALLS[second], self.build)
        self.assertEqual(sum(type(x) is Applied for x in trainer.callback_handler.callbacks), 1)

    @parameterized.expand(["auto", "pack", "float8", "mtp", "batches"])
    def test_off_leaves_the_trainer_as_built(self, first):
        built, trainer = self.build(), self.build()
        said(configure_packing, trainer, **CALLS[first])
        said(configure_packing, trainer, False)
        built.args.packing = built.args.padding_free = False
        self.check_same_state(trainer, state(built))

    def test_an_error_leaves_the_earlier_set_up(self):
        trainer = self.build()
        said(configure_packing, trainer, **CALLS["pack"])
        trainer.add_callback(TrainerCallback())
        before = state(trainer)
        with self.assertRaisesRegex(ValueError, "expected packing of True"):
            configure_packing(trainer, "all")
        trainer.args.torch_compile = True
        with self.assertRaisesRegex(ValueError, "batch_invariant=True without torch_compile"):
            configure_packing(trainer, batch_invariant=True)
        trainer.args.torch_compile = False
        self.check_same_state(trainer, before)
        said(configure_packing, trainer, False)
        self.assertEqual(
            {type(x).__module__ for x in trainer.model.modules() if "qwen3_5" in type(x).__module__},
            {"transformers.models.qwen3_5.modeling_qwen3_5"},
        )

    def test_a_model_that_was_ours_stays(self):
        for second in ({}, {"packing": False}):
            self.check({}, second, lambda: self.build(patch_model(make_model())))

    def test_what_the_user_changes_in_between_stays(self):
        trainer, collator, callback = self.build(), DataCollatorWithFlattening(), TrainerCallback()
        said(configure_packing, trainer)
        trainer.data_collator, trainer.args.seed = collator, 7
        trainer.add_callback(callback)
        said(configure_packing, trainer, False)
        self.assertIs(trainer.data_collator, collator)
        self.assertIs(trainer.callback_handler.callbacks[-2], callback)

    @parameterized.expand([("train_dataset", "PackingDataset"), ("data_collator", "DataCollatorWithFlattening")])
    def test_off_says_what_stays_packed(self, place, kind):
        """What the user has built packs the batches, so nothing is undone."""
        rows = PackingDataset(Samples(12).rows, 128) if place == "train_dataset" else Samples(12).rows
        trainer = self.build(dataset=rows, collator=DataCollatorWithFlattening())
        before = [len(batch["input_ids"]) for batch in trainer.get_train_dataloader()]
        line, _ = said(configure_packing, trainer, False)
        what = f"{place} ({kind})"
        self.assertEqual(line, f"Packing off, training is unchanged, on packed rows of the {what}: packing=False\n")
        self.assertEqual([len(batch["input_ids"]) for batch in trainer.get_train_dataloader()], before)

    def test_a_head_that_has_trained_stays(self):
        trainer = self.build()
        train_configured(trainer, **CALLS["mtp"] | {"verify": False})
        head = trainer.model.mtp
        line, _ = said(configure_packing, trainer, False)
        self.assertIn("; the head of multi-token prediction, which has trained, stays in the model", line)
        self.assertFalse(any(x.requires_grad for x in head.parameters()))
        self.assertTrue(trainer.model.lm_head.weight.requires_grad)
        said(configure_packing, trainer, **CALLS["mtp"])
        self.assertIs(trainer.model.mtp, head)
        self.assertTrue(all(x.requires_grad for x in head.parameters()))
