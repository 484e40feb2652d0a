"""A teacher in a Trainer: its share of a step, where it is, that it stays as it was, and what is refused."""

import copy
import functools
import tempfile
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from common.families import tiny_config
from common.late_experts import copied_on_a_cpu
from common.processes import FSDP_ON_CPU
from common.trl_trainers import HAS_TRL, sft_trainer
from mixins.configure import ConfigureTestCase, llama, said
from mixins.model import total_relative_error
from parameterized import parameterized
from peft import LoraConfig, get_peft_model
from scripts.mtp_run import BATCH
from scripts.teacher_run import DISTILL, build, make_model
from scripts.trainer_arms import TINY, Samples, collate_padded, run_in_two_processes, updates_and_log
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    set_seed,
)

from transformers_packed import configure_packing, keep_layers_in_host_memory, patch_model, unpatch_model
from transformers_packed.models import host_parameters
from transformers_packed.models.host_experts import names_in_host_memory
from transformers_packed.training.restore import exact_for


if HAS_TRL:
    from scripts.configured_arms import tokenizer


OPTIONS = "beta", "weight", "temperature"


def stepped(samples, beta, weight, temperature, teacher=None):
    """The loss, the divergence and the gradients of stock models on documents alone, from whole logits."""
    student, teacher = make_model(), teacher or make_model(1, hidden_size=24)
    losses, divergences = [], []
    for sample in samples:
        ids, targets = torch.tensor([sample["input_ids"]]), torch.tensor(sample["labels"])[1:]
        logits = student(ids).logits[0, :-1][targets != -100]
        with torch.no_grad():
            p = (teacher(ids, use_cache=False).logits[0, :-1][targets != -100] / temperature).softmax(-1)
        q = (logits / temperature).softmax(-1)
        m = beta * p + (1 - beta) * q
        of_teacher, of_student = p * (p.log() - m.log()), q * (q.log() - m.log())
        if beta == 0:
            divergences.append((p * (p.log() - q.log())).sum(-1))
        elif beta == 1:
            divergences.append((q * (q.log() - p.log())).sum(-1))
        else:
            divergences.append((beta * of_teacher + (1 - beta) * of_student).sum(-1))
        losses.append(F.cross_entropy(logits, targets[targets != -100], reduction="none"))
    divergence = torch.cat(divergences).mean()
    loss = (1 - weight) * torch.cat(losses).mean() + weight * divergence
    loss.backward()
    return loss.item(), divergence.item(), {name: x.grad for name, x in student.named_parameters()}


@functools.cache
def alone():
    """The updates and the log of a training in a single process."""
    with tempfile.TemporaryDirectory() as folder:
        return updates_and_log(build(folder, max_steps=2))


class StepTest(ConfigureTestCase):
    @mock.patch.object(host_parameters, "SMALLEST", 512)
    def test_layers_in_host_memory(self):
        """A device that has two layers of the teacher at a time computes the same bits."""
        teacher = patch_model(make_model(1, num_hidden_layers=4, layer_types=2 * TINY["layer_types"]))
        other = keep_layers_in_host_memory(copy.deepcopy(teacher).requires_grad_(False))
        expected, _ = updates_and_log(build(self.directory, teacher=teacher, max_steps=2))
        with copied_on_a_cpu() as copies:
            trainer = build(self.directory, teacher=other, max_steps=2)
            actual, _ = updates_and_log(trainer)
        self.assertTrue(names_in_host_memory(other))
        # Its weights would be wider, too.
        self.assertEqual(exact_for(trainer.model).refused, "weights are in host memory")
        self.assertGreater(copies.copies.copies, 4)
        self.assertEqual(total_relative_error(actual, expected), 0)

    @parameterized.expand([("both", {}), ("forward", {"distill_beta": 0.0}), ("only", {"distill_weight": 1.0})])
    def test_a_step(self, _, changes):
        """Two accumulated rows, and so the mean over all of their targets. The teacher stays as it was."""
        options, teacher = DISTILL | changes, make_model(1, hidden_size=24)
        before = copy.deepcopy(teacher.state_dict())
        said_first, trainer = said(lambda: build(self.directory, teacher=teacher, **options))
        said_then, (updates, log) = said(lambda: updates_and_log(trainer))
        weight, samples = options["distill_weight"], Samples().rows[: 2 * BATCH]
        loss, divergence, gradients = stepped(samples, *(options[f"distill_{x}"] for x in OPTIONS))
        expected = {name: -trainer.args.learning_rate * x for name, x in gradients.items()}
        self.assertLess(total_relative_error(updates, expected), 1e-5)
        self.assertAlmostEqual(log[0]["loss"], loss, places=4)
        self.assertAlmostEqual(log[0]["divergence"], divergence, places=3)
        self.assertIn("Verified packing", said_then)
        told = "trains 0.6 x its own loss with 0.4 x the loss of the div"
        self.assertIn("trains only the divergence from a" if weight == 1 else told, said_first)
        self.assertFalse(teacher.training)
        self.assertTrue(all(x.grad is None and not x.requires_grad for x in teacher.parameters()))
        for name, x in teacher.state_dict().items():
            self.assertTrue(torch.equal(x, before[name]), name)
        # The model does not contain it.
        seen = {id(x) for x in trainer.model.parameters()} | {id(x) for x in trainer.model.modules()}
        self.assertTrue(seen.isdisjoint(map(id, [*teacher.parameters(), *teacher.modules()])))

    def test_a_teacher_that_leaks(self):
        """The loss of the check before the first step shows it."""
        teacher = make_model(1)
        teacher.model.layers[0].register_forward_hook(lambda *args: args[-1] + args[-1].mean(1, keepdim=True))
        trainer = build(self.directory, teacher=teacher)
        with self.assertRaisesRegex(ValueError, "expected the loss .* of the padded batch"):
            said(trainer.train)

    def test_evaluation_is_that_of_the_model_alone(self):
        trainer = build(self.directory)
        found = trainer.evaluate(Samples().rows[:6])["eval_loss"]
        self.assertAlmostEqual(found, stepped(Samples().rows[:6], 0.5, 0.0, 1.0)[0], places=4)

    @parameterized.expand(["qwen3_5_moe_text", "olmo_hybrid", "4 bit"])
    def test_teachers(self, kind):
        """Of other families, and quantized."""
        set_seed(1)
        # On some processors, bitsandbytes computes layers in bfloat16 that are not trained.
        with mock.patch("bitsandbytes.nn.modules.has_avx512bf16", lambda: False):
            if kind == "4 bit":
                make_model(1).save_pretrained(self.directory)
                options = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True), "device_map": {"": "cpu"}}
                teacher = AutoModelForCausalLM.from_pretrained(self.directory, **options)
            else:
                teacher = AutoModelForCausalLM.from_config(tiny_config(kind, vocab_size=61, initializer_range=0.05))
            trainer = build(self.directory, teacher=teacher)
            _, (updates, log) = said(lambda: updates_and_log(trainer))
            samples, options = Samples().rows[: 2 * BATCH], (DISTILL[f"distill_{x}"] for x in OPTIONS)
            loss, divergence, gradients = stepped(samples, *options, teacher=unpatch_model(teacher))
        expected = {name: -trainer.args.learning_rate * x for name, x in gradients.items()}
        self.assertLess(total_relative_error(updates, expected), 1e-5)
        self.assertAlmostEqual(log[0]["divergence"], divergence, places=3)

    def test_beside_a_head_of_multi_token_prediction(self):
        """Three losses, of which two share a product with the vocabulary."""
        set_seed(0)
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**TINY, mtp_num_hidden_layers=1))
        trainer = build(self.directory, model=model, mtp_loss_weight=0.5)
        told, (_, log) = said(lambda: updates_and_log(trainer))
        own = log[0]["loss"] - 0.5 * log[0]["mtp_loss"] - 0.4 * log[0]["divergence"]
        evaluated = trainer.evaluate(Samples().rows[: 2 * BATCH])["eval_loss"]
        self.assertAlmostEqual(own / 0.6, evaluated, delta=0.3)
        self.assertIn("Verified packing", told)

    @parameterized.expand([("padded", {"padding_free": False}), ("bfloat16", {})])
    def test_other_batches(self, name, options):
        """Padded batches, and a teacher in other precision, whose rounding is no difference to the padded batch."""
        teacher = make_model(1, hidden_size=24)
        if name == "bfloat16":
            teacher = teacher.bfloat16()
        trainer = build(self.directory, teacher=teacher, **options)
        if options:
            trainer.data_collator = collate_padded
        told, (_, log) = said(lambda: updates_and_log(trainer))
        self.assertLess(abs(log[0]["divergence"] - alone()[1][0]["divergence"]), 2e-2 if not options else 1e-4)
        self.assertEqual("Verified packing" in told, name == "bfloat16")

    @pytest.mark.skipif(not HAS_TRL, reason="needs trl and datasets")
    def test_sft_trainer(self):
        """TRL computes the loss on the data from scores of its own forward."""
        shares = {"per_device_train_batch_size": BATCH, "gradient_accumulation_steps": 2}
        shares["train_sampling_strategy"] = "sequential"
        sft = sft_trainer(self.directory, make_model(), Samples().rows, tokenizer(), max_steps=2, **shares)
        # A second call undoes the first one.
        for weight in (0.9, 0.4):
            teacher, options = make_model(1, hidden_size=24), DISTILL | {"distill_weight": weight}
            said(configure_packing, sft, "padding_free", teacher=teacher, verify=False, **options)
        (expected, log), (updates, found) = alone(), updates_and_log(sft)
        self.assertLess(total_relative_error(updates, expected), 1e-5)
        for name in ("loss", "divergence"):
            self.assertAlmostEqual(found[1][name], log[1][name], places=3)

    def test_adapters(self):
        """Of the model, and merged in the forward of the teacher."""
        adapters = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")
        model, teacher = (get_peft_model(make_model(seed), adapters) for seed in (0, 1))
        trainer = build(self.directory, model=model, teacher=teacher)
        updates, log = updates_and_log(trainer)
        self.assertTrue(all("lora" in name for name in updates))
        self.assertGreater(log[0]["divergence"], 0.01)
        self.assertIs(model.base_model.model.losses[-1].teacher, teacher.base_model.model)

    @parameterized.expand(
        [("ddp", {}), ("fsdp", FSDP_ON_CPU | {"FSDP_RESHARD_AFTER_FORWARD": "false"}), ("sequence_parallel", {})]
    )
    @pytest.mark.slow
    def test_two_processes(self, kind, variables):
        """The denominator counts the targets of all processes, and FSDP2 gives each a part of the teacher."""
        (updates, log), output = alone(), f"{self.directory}/out.pt"
        _, found = run_in_two_processes(self, "teacher_run.py", kind, output, **variables)
        self.assertLess(total_relative_error(found["updates"], updates), 1e-5)
        for name in ("loss", "divergence"):
            for got, want in zip(found["log"], log, strict=True):
                self.assertAlmostEqual(got[name], want[name], places=3)
        whole = sum(x.numel() for x in make_model(1, hidden_size=24).parameters())
        self.assertLess(abs(found["held"] - (whole / 2 if kind == "fsdp" else whole)), 0.02 * whole)


class RefusedTest(ConfigureTestCase):
    def test_what_is_refused(self):
        """With the reason, and nothing has changed."""
        hooked = make_model(1)
        hooked.lm_head.register_forward_hook(lambda *args: None)
        elsewhere = make_model(1).to("meta")
        elsewhere.hf_device_map = {"": "meta"}
        model = make_model()
        fsdp = SimpleNamespace(state=SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=1)))
        for message, teacher, changes in (
            ("a model as the teacher, got str. Load it", "Qwen/Qwen3.5-4B", {}),
            ("61 words of the model's .*, got 64 words. .*resize_token", make_model(1, vocab_size=64), {}),
            ("a teacher that is a language model of this package, got LlamaForCausalLM", llama(), {}),
            ("a teacher beside the model, got the model itself", model, {}),
            ("plain linear heads for the divergence", hooked, {}),
            ("a teacher on cpu, got its head on meta", elsewhere, {}),
            ("without DeepSpeed, got DeepSpeed", make_model(1), {"is_deepspeed_enabled": True}),
            ("FSDP2 for the divergence .*, got FSDP1", make_model(1), {"is_fsdp_enabled": True, "accelerator": fsdp}),
            ("got a custom compute_loss. Remove", make_model(1), {"compute_loss": lambda *x: None}),
            ("sharded by accelerate, got a DistributedConfig", make_model(1), {"split": True}),
        ):
            with self.subTest(message):
                trainer = self.trainer(model)
                if changes.pop("split", False):
                    model.config.distributed_config = object()
                with mock.patch.multiple(trainer, **changes, args=trainer.args):
                    with self.assertRaisesRegex(ValueError, message):
                        configure_packing(trainer, "padding_free", teacher=teacher)
                self.assertNotIn("losses", vars(model))
                self.assertTrue(all(x.requires_grad for x in model.parameters()))
