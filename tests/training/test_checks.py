"""The reasons for which `configure_packing` declines a Trainer. A declined Trainer stays unchanged."""

import itertools
import os
from types import FunctionType, SimpleNamespace
from unittest import mock

import peft
import pytest
import torch
import transformers
from accelerate.state import AcceleratorState
from common.checkpoints import FORMATS
from common.families import tiny_model
from common.shown import shows_for_each
from datasets import Dataset
from mixins.configure import ConfigureTestCase, callbacks_of, llama, said
from mixins.patch import snapshot
from parameterized import parameterized
from scripts.configured_arms import tokenizer
from scripts.trainer_arms import CONFIGS, Samples
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.distributed import DistributedConfig
from trl import RewardTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference
from trl.trainer.utils import identity

from transformers_packed import (
    PackingDataset,
    configure_packing,
    keep_experts_in_host_memory,
    pack_dataset,
    patch_model,
)
from transformers_packed.audit.tiny import tiny_config
from transformers_packed.errors import first_error
from transformers_packed.models import verdict
from transformers_packed.models.checkpoint_formats import stored_weight
from transformers_packed.models.host_experts import names_in_host_memory
from transformers_packed.models.releases import IGNORED_BY_DDP
from transformers_packed.models.versions import supports_other_families
from transformers_packed.training import checks as module
from transformers_packed.training import setup
from transformers_packed.training.checks import _of_collator, excludes_graphs


library_collate = FunctionType((lambda rows: {}).__code__, {"__name__": "library.collators"}, "library_collate")


def mixture_on_host():
    model = patch_model(AutoModelForCausalLM.from_config(CONFIGS["qwen3_next_moe"]()))
    model.model.requires_grad_(False)
    return keep_experts_in_host_memory(model)


class OwnLoss(Trainer):
    def compute_loss(self, model, inputs, **kwargs):
        return super().compute_loss(model, inputs, **kwargs)


class ReasonsTest(ConfigureTestCase):
    """Auto mode leaves the Trainer unchanged and gives the reason in one line. An explicit request is an error."""

    def state(self, trainer: Trainer) -> dict:
        args = {k: v for k, v in vars(trainer.args).items() if k not in ("packing", "padding_free")}
        return {
            "trainer": {k: id(v) for k, v in vars(trainer).items()},
            "args": {k: repr(v) for k, v in args.items()},
            "accelerator": {k: repr(v) for k, v in vars(trainer.accelerator.dataloader_config).items()},
            "callbacks": [id(c) for c in callbacks_of(trainer)],
            "defaults": list(transformers.trainer.DEFAULT_CALLBACKS),
            "collator": repr(getattr(trainer.data_collator, "__dict__", None)),
            "model": snapshot(trainer.model),
            "config": trainer.model.config.to_dict(),
            "random": torch.random.get_rng_state().tolist(),
        }

    def check(self, trainer: Trainer, message: str, explicit: str | None = "padding_free", **options):
        before = self.state(trainer)
        output, _ = said(configure_packing, trainer)
        self.assertRegex(output, rf"^Packing off, training is unchanged: .*{message}.*\n$")
        self.assertEqual(output.count("\n"), 1)
        self.assertEqual(self.state(trainer), before)
        self.assertEqual([trainer.args.packing, trainer.args.padding_free], [False, False])
        if explicit is not None:
            with self.assertRaisesRegex(ValueError, f"^expected .*{message}"):
                configure_packing(trainer, explicit, **options)
            self.assertEqual(self.state(trainer), before)

    def test_label_smoothing_that_does_not_shift(self):
        """Trainer checks the class name, which it does not recognize for vision-language models and subclasses."""
        for own in (False, True):
            model = AutoModelForCausalLM.from_config(CONFIGS["qwen3_5"]())
            trainer = self.trainer(model, args={"label_smoothing_factor": 0.1})
            if own:
                model.__class__ = type("OwnModelForCausalLM", (type(model),), {})
                self.check(trainer, "OwnModelForCausalLM, whose labels Trainer does not shift")
            else:
                said(configure_packing, trainer)
                self.assertTrue(trainer.args.padding_free)

    def test_a_model_over_more_processes_than_the_trainer_knows(self):
        trainer = self.trainer()
        trainer.model.config.distributed_config = DistributedConfig(fsdp_size=2)
        with (
            mock.patch.object(module.dist, "is_initialized", lambda: True),
            mock.patch.object(module.dist, "get_world_size", lambda: 2),
        ):
            self.check(trainer, "a Trainer with the model's 2 processes, got 1, each of which would read all rows")

    def test_custom_collator(self):
        collator = transformers.DataCollatorForTokenClassification(tokenizer())
        self.check(self.trainer(collator=collator), r"custom data collator \(DataCollatorForTokenClassification\)")
        self.check(self.trainer(collator=lambda rows: {}), r"custom data collator \(<lambda>\)")

    @parameterized.expand(
        [
            # What the class brings.
            (RewardTrainer, DataCollatorForPreference(0), True),
            (type("LibraryTrainer", (Trainer,), {"__module__": "library.trainers"}), library_collate, True),
            # What the user has passed.
            (Trainer, identity, False),
            (type("OwnTrainer", (Trainer,), {"__module__": "__main__"}), library_collate, False),
        ]
    )
    def test_the_collator_of_a_class(self, cls, collator, brings):
        trainer = self.trainer(collator=collator)
        trainer.__class__ = cls
        name = getattr(collator, "__name__", type(collator).__name__)
        want = f"got a custom data collator ({name}), which may do more. Do not pass data_collator"
        if brings:
            want = (
                f"got a {cls.__name__}, whose own data collator ({name}) may do more. Train it as it is, or pass pack"
            )
        self.assertIn(want, str(first_error(_of_collator(trainer))))

    def test_vision_dataset_of_trl(self):
        trainer = self.build("sft")
        trainer._is_vision_dataset = True
        self.check(trainer, "a collator that processes images")

    def test_columns_of_a_processor(self):
        model = transformers.AutoModelForImageTextToText.from_config(tiny_config("gemma3"))
        rows = [{**row, "pixel_values": [[0.0]]} for row in Samples(6).rows]
        self.check(
            self.trainer(model, rows),
            r"a processor's columns pixel_values, which packed rows of Gemma3For\w+ do not support",
        )

    def test_family_that_leaks_although_patched(self):
        """No family does, so the entry of the matrix is a fake."""
        entry = {"ours": {"all": {"verdict": "leaks", "module": "Qwen3_5GatedDeltaNet", "kind": "state"}}}
        with mock.patch.object(verdict, "measurements", return_value={"qwen3_5_text": entry}):
            self.check(self.trainer(), "Qwen3_5ForCausalLM, which leaks in Qwen3_5GatedDeltaNet")

    def test_family_that_would_leak(self):
        trainer = self.trainer(AutoModelForCausalLM.from_config(tiny_config("llama")))
        with mock.patch.object(module, "judge", return_value=(ValueError("attends across"), None)):
            self.check(trainer, r"a model that leaks \(attends across\)")

    @pytest.mark.skipif(not supports_other_families(), reason="its family needs a newer release")
    def test_indexer_under_zero_3(self):
        """Its layers run for long documents only, but all processes have to gather weights equally often."""
        for stage in (2, 3):
            trainer = self.trainer(tiny_model("qwen4_exp"))
            trainer.is_deepspeed_enabled = True
            plugin = SimpleNamespace(zero_stage=stage)
            with mock.patch.object(AcceleratorState, "deepspeed_plugin", plugin):
                if stage == 3:
                    self.check(trainer, "got an indexer, which only long documents need. Train with ZeRO-2 or FSDP2")
                else:
                    said(configure_packing, trainer)
                    self.assertTrue(trainer.args.padding_free)

    @shows_for_each(
        list(itertools.product(("fp8", *FORMATS), ("is_fsdp_enabled", "is_deepspeed_enabled"))),
        "FSDP, DeepSpeed",
        says="error",
    )
    def test_weights_in_fewer_bits_that_would_be_cast(self, kind, shards):
        trainer = self.trainer()
        layer = next(x for x in trainer.model.modules() if isinstance(x, torch.nn.Linear))
        weight = layer.weight.data.to(torch.float8_e4m3fn)
        if kind in FORMATS:
            weight = stored_weight(FORMATS[kind][0](layer.weight.data)[0], FORMATS[kind][1], torch.float32)
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        setattr(trainer, shards, True)
        self.check(trainer, "weight in fewer bits, which FSDP and DeepSpeed cast without its scales")

    @parameterized.expand(["is_fsdp_enabled", "is_deepspeed_enabled"])
    def test_experts_in_host_memory_that_would_be_sharded(self, shards):
        trainer = self.trainer(mixture_on_host())
        setattr(trainer, shards, True)
        self.check(trainer, "weights on the GPUs for FSDP and DeepSpeed, got weights in host memory")

    def test_a_teacher_in_host_memory_that_would_be_sharded(self):
        trainer, teacher = self.trainer(), mixture_on_host()
        trainer.is_fsdp_enabled, trainer.accelerator.state.fsdp_plugin = True, None
        with self.assertRaisesRegex(ValueError, "a teacher that FSDP2 can shard, got one in host memory"):
            configure_packing(trainer, teacher=teacher)
        trainer.teacher_model = teacher
        self.check(trainer, "weights on the GPUs for FSDP and DeepSpeed, got weights in host memory")

    def test_experts_in_host_memory(self):
        trainer = self.trainer(mixture_on_host())
        self.assertEqual(
            excludes_graphs(trainer), "weights in host memory, whose copies have other addresses in each step"
        )
        names = names_in_host_memory(trainer.model)
        said(configure_packing, trainer)
        self.assertEqual(getattr(trainer.model, IGNORED_BY_DDP), names)
        self.assertTrue(names)

    def test_family_that_was_never_audited(self):
        trainer = self.trainer(AutoModelForCausalLM.from_config(tiny_config("llama")))
        with mock.patch.object(module, "judge", return_value=(None, "no model of the type llama was audited")):
            self.check(
                trainer, "a model that has not been audited: no model of the type llama was audited", explicit=None
            )
            with mock.patch.object(setup.logger, "warning") as warning:
                said(configure_packing, trainer, "padding_free")
        self.assertIn("no model of the type llama", warning.call_args[0][0])
        self.assertTrue(trainer.args.padding_free)

    @parameterized.expand([("flex_attention", "needs CUDA tensors"), ("paged|sdpa", "not known")])
    def test_attention_that_cannot_isolate(self, attention, why):
        trainer = self.trainer()
        trainer.model.config._attn_implementation_internal = attention
        name = attention.replace("|", r"\|")
        self.check(trainer, rf'attn_implementation="{name}" \(.*{why}.*Load the model with attn_implementation="sdpa"')

    def test_sequence_classification(self):
        model = transformers.LlamaForSequenceClassification._from_config(tiny_config("llama"))
        self.check(self.trainer(model), r"sequence classification \(LlamaForSequenceClassification\)")
        rows = [{"input_ids": row["input_ids"], "labels": 1} for row in Samples(6).rows]
        self.check(self.trainer(dataset=rows), r"one label each \(sequence classification\)")

    @parameterized.expand(
        [
            (
                "bert",
                transformers.BertLMHeadModel,
                "cannot be patched .*BertLMHeadModel: its attention is bidirectional",
            ),
            (
                "llama",
                transformers.LlamaForTokenClassification,
                "ForTokenClassification, which is not a causal language",
            ),
            ("trocr", transformers.TrOCRForCausalLM, "does not shift labels"),
        ]
    )
    def test_models(self, kind, cls, message):
        self.check(self.trainer(cls._from_config(tiny_config(kind))), message)

    @parameterized.expand(
        [
            (peft.PromptTuningConfig, {"num_virtual_tokens": 3}, "PEFT prompt learning .*virtual tokens"),
            (peft.PrefixTuningConfig, {"num_virtual_tokens": 3}, "PEFT prompt learning .*virtual tokens"),
            (peft.LoraConfig, {"target_modules": ["q_proj"], "alora_invocation_tokens": [5, 6]}, "an activated LoRA"),
        ]
    )
    def test_adapters(self, cls, options, message):
        self.check(self.trainer(peft.get_peft_model(llama(), cls(task_type="CAUSAL_LM", **options))), message)

    def test_own_loss(self):
        trainer = self.trainer()
        own = OwnLoss(trainer.model, trainer.args, train_dataset=Samples(6))
        self.check(own, "a custom OwnLoss.compute_loss, which", explicit=None)
        self.check(
            self.trainer(compute_loss_func=lambda *a, **k: 0), "a custom compute_loss_func, which", explicit=None
        )
        said(configure_packing, own, "padding_free")
        self.assertTrue(own.args.padding_free)
        # It draws no samples.
        trainer = self.trainer(dataset=Samples(24), compute_loss_func=lambda *a, **k: 0)
        self.assertIn("Packing on", said(configure_packing, trainer, True, 128)[0])

    def test_a_cache_in_a_stock_model(self):
        """With gradient checkpointing, a leak would occur in evaluation only."""
        trainer = self.trainer(llama(), args={"use_cache": True, "gradient_checkpointing": True})
        self.check(trainer, "LlamaForCausalLM with config.use_cache=True.* Set model.config.use_cache = False")

    def test_a_cache_that_trainer_leaves_on(self):
        """Trainer does not check the configuration of the text model."""
        model = transformers.AutoModelForImageTextToText.from_config(tiny_config("gemma3"))
        trainer = self.trainer(model)
        self.assertFalse(model.config.use_cache)
        self.check(trainer, r"with config.get_text_config\(\).use_cache=True")
        model.config.get_text_config().use_cache = False
        self.assertTrue(said(configure_packing, trainer)[1].args.padding_free)

    def test_batch_of_one(self):
        trainer = self.trainer(args={"per_device_train_batch_size": 1})
        self.check(trainer, "per_device_train_batch_size=1", explicit=None)
        said(configure_packing, trainer, "padding_free")

    def test_data_parallel(self):
        trainer = self.trainer()
        trainer.args._n_gpu = 2
        with mock.patch.object(TrainingArguments, "n_gpu", 2):
            self.check(trainer, "one process with 2 GPUs.*DataParallel.*torchrun --nproc_per_node=2")

    def test_context_parallelism(self):
        # Elsewhere: the denominator is wrong under accelerate's context parallelism.
        trainer = self.trainer()
        trainer.accelerator.state.parallelism_config = mock.Mock(cp_size=2, sp_size=1)
        self.addCleanup(setattr, trainer.accelerator.state, "parallelism_config", None)
        self.check(
            trainer,
            r"ParallelismConfig\(cp_size=2\), which cuts rows.*Pass sequence_parallel_size=2 to configure_packing",
        )

    def test_dispatched_batches(self):
        dataset = Dataset.from_list(Samples(24).rows).to_iterable_dataset()
        trainer = self.trainer(dataset=dataset, args={"accelerator_config": {"dispatch_batches": True}})
        self.check(trainer, "dispatch_batches=True")

    def test_wrapped_rows_of_trl(self):
        trainer = self.build("sft", packing=True, packing_strategy="wrapped")
        before = self.state(trainer)
        output, _ = said(configure_packing, trainer)
        self.assertIn('packing_strategy="wrapped", which discards the document boundaries', output)
        self.assertEqual(self.state(trainer), before)
        self.assertTrue(trainer.args.packing)

    def test_samples(self):
        self.check(self.trainer(dataset=[{"text": "x"}] * 6), "samples without input_ids: columns")
        self.check(self.trainer(dataset=[{"input_ids": [1, 2]}] * 6), "samples without labels")
        rows = pack_dataset(Dataset.from_list(Samples(12).rows), 128)
        turns = [{"input_ids": [3, 4], "labels": [-100, 4]}] * 2
        group, tree = {"prefix": [1, 2], "answers": turns}, {"input_ids": [1, 2], "labels": [1, 2], "turns": turns}
        flat = {"input_ids": [1, 2], "labels": [1, 2]}
        message = "remove_unused_columns=True, which removes the column"
        for dataset, name in ((rows, "seq_lengths"), ([group] * 6, "answers"), ([flat, tree] * 3, "turns")):
            # A table has the columns of its first sample.
            table = Dataset.from_list(list(dataset)[::-1]).select(range(len(dataset))[::-1])
            for samples in (dataset, table):
                # In every mode, because the Trainer alone would train on other samples. It keeps those of planned rows.
                for mode in ("auto", False, *([True] if name == "seq_lengths" else [])):
                    with self.assertRaisesRegex(ValueError, f"{message} {name}"):
                        configure_packing(self.trainer(dataset=samples), mode, 128 if mode is True else None)
        for samples in ([flat, tree] * 3, [group] * 6):
            trainer = configure_packing(self.trainer(dataset=samples), True, 8)
            self.assertTrue(any("parent_of" in batch for batch in trainer.get_train_dataloader()))
            trainer = self.trainer(dataset=samples)
            trainer.eval_dataset = {"one": samples}
            with self.assertRaisesRegex(ValueError, message):
                configure_packing(trainer, True, 8)

    @parameterized.expand([("missing", None), ("numbered mask", [1, 1, 2])])
    def test_a_sample_that_cannot_be_used(self, _, wrong):
        """Named by its number before training starts, not by its place in a batch in the middle of it."""
        samples = Samples(30).rows
        bad = {"input_ids": [5, 6, 7], "labels": [5, 6, 7], "attention_mask": wrong}
        if wrong is None:
            bad = {"input_ids": None, "labels": None}
        self.check(self.trainer(dataset=[*samples[:17], bad, *samples[17:]]), "in sample 17")

    def test_an_empty_sample_is_left_out(self):
        """As by Transformers' collator."""
        samples = [*Samples(5).rows, {"input_ids": [], "labels": []}]
        trainer = self.trainer(dataset=samples, args={"max_steps": -1, "num_train_epochs": 1})
        self.assertIn("Padding-free on", said(configure_packing, trainer)[0])
        self.assertIn("5 documents", said(trainer.train)[0])

    def test_switched_off(self):
        self.check_off(lambda trainer: configure_packing(trainer, "off"), "packing='off'")
        self.check_off(lambda trainer: configure_packing(trainer, False), "packing=False")
        with mock.patch.dict(os.environ, {"TRANSFORMERS_PACKED_DISABLE_AUTO": "1"}):
            self.check_off(configure_packing, "TRANSFORMERS_PACKED_DISABLE_AUTO is set")
            trainer = self.trainer()
            said(configure_packing, trainer, "padding_free")
            self.assertTrue(trainer.args.padding_free)

    def check_off(self, call, message):
        trainer = self.trainer()
        before = self.state(trainer)
        self.assertIn(message, said(call, trainer)[0])
        self.assertEqual(self.state(trainer), before)
        self.assertEqual([trainer.args.packing, trainer.args.padding_free], [False, False])

    def test_model_that_cannot_be_patched(self):
        trainer = self.trainer()
        layer = trainer.model.model.layers[0].linear_attn
        layer.forward = lambda *args, **kwargs: None
        self.check(trainer, "cannot be patched .*layers.0.linear_attn .*with its own forward")

    def test_a_sample_that_is_too_long(self):
        # Elsewhere: truncation silently drops most tokens.
        trainer = self.trainer(dataset=Samples(24))
        before = self.state(trainer)
        with self.assertRaisesRegex(ValueError, "overlong"):
            configure_packing(trainer, "pack", 16)
        self.assertEqual(self.state(trainer), before)

    def test_packing_without_a_dataset_or_of_packed_rows(self):
        trainer = self.trainer()
        trainer.train_dataset = None
        with self.assertRaisesRegex(ValueError, "expected a train_dataset to pack"):
            configure_packing(trainer, True, 128)
        trainer.train_dataset = PackingDataset(Samples(24), 128)
        with self.assertRaisesRegex(ValueError, "an unpacked dataset with max_length"):
            configure_packing(trainer, True, 128)
        with self.assertRaisesRegex(ValueError, "expected a transformers.Trainer, got str"):
            configure_packing("trainer")
