"""`warm_up` leaves the model as it was, its rows select all variants, and `PackedTrainer` calls it before its first step."""

import contextlib
import copy
import io
import itertools
import random
import tempfile
import unittest
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from common.launches import specializations
from common.processes import run_once
from mixins.triton import InterpretedKernelsTest
from mixins.vision import TEXT, vision_config
from parameterized import parameterized
from scripts.trainer_arms import CONFIGS, OPTIONS, Samples, collate_padded
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    Qwen3_5Config,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from transformers_packed import (
    DataCollatorWithFlattening,
    PackedTrainer,
    PackedTrainingArguments,
    SequenceBoundaries,
    patch_model,
    use_float8,
    warm_up,
)
from transformers_packed.audit.model_state import as_before
from transformers_packed.audit.tiny import tiny_config
from transformers_packed.models.losses import DivergenceLoss
from transformers_packed.models.versions import can_cut_rows
from transformers_packed.ops.dispatch import observed
from transformers_packed.training import kernels, sequence_parallel
from transformers_packed.training import warm_up as module
from transformers_packed.training.callbacks import warm_up as callback
from transformers_packed.training.callbacks.verify import VerifyCallback
from transformers_packed.training.callbacks.warm_up import WarmUpCallback
from transformers_packed.training.kernels import CUT, TREES, WHOLE, Needs
from transformers_packed.training.warm_up import compile_kernels


VERIFY = VerifyCallback.on_train_begin


def small(family="qwen3_5", **options):
    """A patched model with two layers, with other sizes in `options`."""
    set_seed(0)
    config = CONFIGS[family]()
    for name, value in options.items():
        setattr(config, name, value)
    return patch_model(AutoModelForCausalLM.from_config(config))


def quiet():
    return contextlib.redirect_stdout(io.StringIO())


class KernelsTestCase(unittest.TestCase):
    """The CPU counts as a device for which kernels are compiled."""

    def setUp(self):
        for place in (module, callback):
            self.enterContext(mock.patch.object(place, "compiles_kernels", lambda device: True))


class RowsTest(unittest.TestCase):
    @parameterized.expand(list(itertools.product((2, 3, 17, 64, 100, 2048, 16384), (None, 1, 5, 300))))
    def test_they_fit(self, max_length, max_documents):
        rows = Needs(max_length, max_documents).rows
        most = min(max_documents or 128, max_length // 2)
        self.assertEqual(max(map(len, rows)), max(most, -(-max_length // 4096)))
        self.assertEqual(max(map(sum, rows)), max_length)
        self.assertGreaterEqual(min(map(min, rows)), 1)
        self.assertEqual(len({tuple(row) for row in rows}), len(rows))

    def test_each_kernel_of_flash_qla_has_a_row(self):
        numbers = sorted({len(row) for row in Needs(4096).rows})
        for multiprocessors, heads in itertools.product((132, 148, 160), range(1, 129)):
            limit = int(0.7 * multiprocessors)
            kernel = {n: (n * heads >= limit) + (2 * n * heads >= limit) for n in range(1, 129)}
            self.assertEqual({kernel[n] for n in numbers}, set(kernel.values()))

    @parameterized.expand([(128,), (4096,), (5000,)])
    def test_short_and_long_rows_are_multiples_and_not(self, max_length):
        totals = [sum(row) for row in Needs(max_length).rows]
        self.assertTrue({total % 16 == 0 for total in totals} == {True, False})
        self.assertEqual({max_length, max_length - 1} - {*totals}, set())
        self.assertTrue(min(totals) <= 128)

    def test_each_graph_has_a_row(self):
        """Graphs serve fewer than 8, 16, 32, ... slots: one for each document, one for padding, and an empty one."""

        def slots(documents):
            return next(x for x in (8, 16, 32, 64, 128, 256, 512, 1024) if x >= documents + 2)

        for most in (1, 6, 7, 14, 15, 30, 31, 126, 127, 200, 510, 511):
            ran = {slots(len(row)) for row in Needs(4096, most).rows}
            self.assertEqual(ran, {slots(documents) for documents in range(1, most + 1)})

    @parameterized.expand([({"max_length": 1},), ({"max_length": 64, "max_documents": 0},)])
    def test_contradictions(self, options):
        with self.assertRaisesRegex(ValueError, "expected max_length of at least 2 and max_documents of at least 1"):
            warm_up(small(), **options)


class StateTest(KernelsTestCase):
    def state(self, model):
        tensors = [x.clone() for x in (*model.parameters(), *model.buffers())]
        gradients = [x.grad if x.grad is None else x.grad.clone() for x in model.parameters()]
        hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()]
        return [*tensors, *gradients, torch.get_rng_state(), hooks, [m.training for m in model.modules()]]

    def check(self, before, after):
        for a, b in zip(before, after, strict=True):
            self.assertTrue(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b)

    @parameterized.expand([("stopped",), ("lora",), ("checkpointing",), ("float8",), ("experts",)])
    def test_it_leaves_the_model_as_it_was(self, kind):
        model = small("qwen3_next_moe" if kind == "experts" else "qwen3_5")
        if kind == "lora":
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(target_modules="all-linear", lora_dropout=0.5))
        if kind == "checkpointing":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if kind == "float8":
            use_float8(model)
        # Modes and gradients that a restored `train` or `None` would not give.
        model.train()
        next(model.children()).eval()
        trained = [x for x in model.parameters() if x.requires_grad]
        trained[0].grad = torch.ones_like(trained[0])
        model.register_buffer("seen", torch.zeros(()))
        model.register_forward_pre_hook(lambda *_: model.seen.add_(1) and None)
        before, losses = self.state(model), []

        def loss(model, batch):
            self.assertTrue(all(x.training for x in model.modules()) or not torch.is_grad_enabled())
            losses.append(model(**batch).loss)
            if kind == "stopped" and len(losses) == 2:
                raise KeyboardInterrupt
            return losses[-1]

        if kind == "stopped":
            with self.assertRaisesRegex(KeyboardInterrupt, "while compiling kernels, before the first step"):
                warm_up(model, 24, max_documents=3, loss=loss)
        else:
            warm_up(model, 24, max_documents=3, loss=loss)
            self.assertEqual(len(losses), len(Needs(24, 3).rows) + 1)
            self.assertEqual([x.requires_grad for x in losses], [True] * (len(losses) - 1) + [False])
            self.assertTrue(all(x.isfinite() for x in losses))
        self.check(before, self.state(model))

    def test_frequencies_that_follow_the_length(self):
        """A longer row replaces the buffer of dynamic frequencies, and notes its length in an attribute."""
        rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4, "partial_rotary_factor": 1.0}
        model = small(max_position_embeddings=32, rope_parameters=rope | {"mrope_section": [4, 2, 2]}, head_dim=16)
        row = {"input_ids": torch.ones(1, 64, dtype=torch.long), "cu_seqlens": torch.tensor([0, 64])}
        expected = copy.deepcopy(model).eval()(**row).logits
        with as_before(model):
            model(**row)
        torch.testing.assert_close(model.eval()(**row).logits, expected)

    def test_hooks_of_gradients_wait(self):
        """They may update a weight, as gradient release does."""
        model, taken = small(), []
        weight = model.lm_head.weight
        hook = weight.register_post_accumulate_grad_hook(taken.append)
        warm_up(model, 24, max_documents=2)
        self.assertEqual(taken, [])
        model(input_ids=torch.ones(1, 8, dtype=torch.long)).logits.sum().backward()
        self.assertEqual(len(taken), 1)
        hook.remove()
        weight.register_post_accumulate_grad_hook(taken.append)
        with self.assertRaises(KeyboardInterrupt), as_before(model):
            raise KeyboardInterrupt
        self.assertEqual(len(weight._post_accumulate_grad_hooks), 1)

    def test_it_runs_the_rows_that_it_promises(self):
        rows = []

        def loss(model, batch):
            boundaries = SequenceBoundaries.from_cu_seqlens(batch["cu_seq_lens_q"])
            rows.append(boundaries.lengths)
            return model(**batch).loss

        warm_up(small(), 24, loss=loss)
        self.assertEqual([list(row) for row in rows], [*Needs(24).rows, Needs(24).rows[0]])
        rows.clear()
        warm_up(small(), 24, loss=loss, evaluation=False)
        self.assertEqual([list(row) for row in rows], Needs(24).rows)

    def test_what_takes_longest_starts_before_the_first_row(self):
        model, calls = small(), []

        def loss(model, batch):
            calls.append("row")
            return model(**batch).loss

        with mock.patch.object(kernels.flash_qla, "start_compiling", lambda *sizes: calls.append(sizes) or []):
            warm_up(model, 24, loss=loss, dtype=torch.bfloat16)
            config = model.config
            heads = config.linear_num_key_heads, config.linear_num_value_heads
            dims = config.linear_key_head_dim, config.linear_value_head_dim
            self.assertEqual(calls[:2], [(torch.device("cpu"), torch.bfloat16, heads, dims, WHOLE, True), "row"])
            self.assertEqual(calls[2:], ["row"] * len(Needs(24).rows))
            # Of a family without these layers, nothing is known.
            calls.clear()
            given = tiny_config("llama"), torch.device("cpu"), torch.bfloat16, Needs(24)
            self.assertEqual(kernels.start_compiling(*given), [])
        self.assertEqual(calls, [])

    def test_trees(self):
        """Their rows have calls of the delta rule that begin with states, end with them, or both."""
        model, rows, states = small(), [], set()

        def loss(model, batch):
            rows.append("parent_of" in batch)
            return model(**batch).loss

        def observe(op, name, function):
            def run(*args, **given):
                states.add((given["initial_state"] is not None, given["output_final_state"]))
                return function(*args, **given)

            return run if op == "gated_delta_rule" else function

        with mock.patch.object(kernels.flash_qla, "start_compiling", return_value=[]) as started, observed(observe):
            warm_up(model, 200, max_documents=2, loss=loss, trees=True)
        self.assertEqual(started.call_args[0][4], TREES)
        # The last one is that of an evaluation.
        self.assertEqual(rows[-4:], [True, True, False, True])
        self.assertEqual(sum(rows), 3)
        self.assertEqual(states, {(False, False), (False, True), (True, False), (True, True)})

    @parameterized.expand([("plain", False), ("trees", True)])
    def test_a_trainer_knows_its_trees(self, _, trees):
        leaf = {"input_ids": [1, 2, 3], "labels": [1, 2, 3]}
        samples = [{**leaf, "turns": [leaf, leaf]} if trees else leaf] * 4
        args = PackedTrainingArguments(self.enterContext(tempfile.TemporaryDirectory()), max_steps=1, **OPTIONS)
        args.remove_unused_columns = False
        given = []
        record = lambda model, needs, **options: given.append(needs.trees)  # noqa: E731
        with mock.patch.object(callback, "compile_kernels", record), quiet():
            trainer = PackedTrainer(
                AutoModelForCausalLM.from_config(CONFIGS["qwen3_5"]()), args, train_dataset=samples
            )
            WarmUpCallback(trainer).on_train_begin(trainer.args, TrainerState(max_steps=1), None)
        self.assertEqual(given, [trees])

    def test_the_set_up_selects_calls_and_heads(self):
        config, device = small().config, torch.device("cpu")
        keys, values = config.linear_num_key_heads, config.linear_num_value_heads
        for options, calls, share in (
            ({}, WHOLE, 1),
            ({"segment_tokens": 256}, WHOLE, 1),
            ({"segment_tokens": 255}, CUT, 1),
            ({"segment_tokens": 64, "trees": True}, TREES, 1),
            ({"processes": 2}, CUT, 1),
            ({"processes": 2, "method": "heads"}, WHOLE, 2),
        ):
            with mock.patch.object(kernels.flash_qla, "start_compiling", return_value=[]) as started:
                kernels.start_compiling(config, device, torch.bfloat16, Needs(256, **options))
            self.assertEqual(started.call_args[0][2], (keys // share, values // share), options)
            self.assertEqual(started.call_args[0][4], calls, options)

    def test_a_model_tells_its_segments_its_shared_prompts_and_its_teacher(self):
        def calls(model, needs):
            with mock.patch.object(kernels.flash_qla, "start_compiling", return_value=[]) as started:
                kernels.start_for(model, torch.device("cpu"), torch.bfloat16, needs)
            return [(call.args[2], *call.args[4:]) for call in started.mock_calls]

        model = small()
        heads = model.config.linear_num_key_heads, model.config.linear_num_value_heads
        self.assertEqual(calls(model, Needs(256)), [(heads, WHOLE, True)])
        model.share_prompts = True
        self.assertEqual(calls(model, Needs(256)), [(heads, TREES, True)])
        model.share_prompts = False
        teacher = small(linear_num_key_heads=1, linear_num_value_heads=1)
        model.losses = (*model.losses, DivergenceLoss(teacher))
        self.assertEqual(calls(model, Needs(256)), [(heads, WHOLE, True), ((1, 1), WHOLE, False)])
        if can_cut_rows():
            model.activation_checkpointing_enable({"use_reentrant": False, "segment_tokens": 64})
            self.assertEqual(calls(model, Needs(64))[0], (heads, WHOLE, True))
            # A teacher has no gradients, and its rows are whole.
            self.assertEqual(calls(model, Needs(256)), [(heads, CUT, True), ((1, 1), WHOLE, False)])

    @parameterized.expand([("vision",), ("mamba2",), ("classifier",)])
    def test_other_models(self, kind):
        with quiet(), contextlib.redirect_stderr(io.StringIO()):
            if kind == "vision":
                config = Qwen3_5Config(**vision_config(TEXT))
                # The first tokens stand for images and videos, which the rows do not have.
                config.image_token_id, config.video_token_id, config.vision_start_token_id = 1, 2, 3
                model = AutoModelForImageTextToText.from_config(config)
            elif kind == "classifier":
                model = AutoModelForSequenceClassification.from_config(CONFIGS["qwen3_5"]())
            else:
                model = AutoModelForCausalLM.from_config(tiny_config(kind))
            tokens = []
            embeddings = model.get_input_embeddings()
            embeddings.register_forward_pre_hook(lambda module, inputs: tokens.extend(inputs[0].flatten().tolist()))
            warm_up(patch_model(model), 24, max_documents=2)
        self.assertTrue(tokens)
        if kind == "vision":
            self.assertFalse({1, 2, 3} & {*tokens})

    def test_nothing_runs_on_a_device_without_kernels(self):
        with mock.patch.object(module, "compiles_kernels", lambda device: device.type == "cuda"):
            self.assertEqual(warm_up(small(), 16, loss=None, collator=self.fail), [])


class OurKernelsTest(InterpretedKernelsTest, KernelsTestCase):
    """The specializations of this package's Triton kernels, by the types and values that Triton would compile for."""

    def setUp(self):
        InterpretedKernelsTest.setUp(self)
        KernelsTestCase.setUp(self)
        # Kernels only record their arguments, and their outputs are zeros.
        self.found = self.enterContext(specializations())
        for place, name, value in (
            (torch, "empty", torch.zeros),
            (torch, "empty_like", torch.zeros_like),
            (torch.Tensor, "new_empty", torch.Tensor.new_zeros),
        ):
            self.enterContext(mock.patch.object(place, name, value))

    @parameterized.expand([("float8",), ("lora",), ("experts",)])
    def test_no_row_needs_another_kernel(self, kind):
        # Multiples of 16, as in released models.
        widths = {"intermediate_size": 96, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
        model = small("qwen3_next_moe" if kind == "experts" else "qwen3_5", **widths)
        if kind == "float8":
            use_float8(model, lambda layer, name: "mlp" in name or name.endswith("o_proj"))
        if kind == "lora":
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", lora_dropout=0.1))
        warm_up(model, 128, max_documents=4)
        known = set(self.found)
        self.assertGreaterEqual(len({name for name, *_ in known}), 11)
        collator, draw = DataCollatorWithFlattening(model=model, return_cu_seqlens=True), random.Random(0)
        model.train()
        for total in (2, 3, 16, 33, 48, 65, 80, 100, 128):
            cut = draw.randint(1, total - 1)
            lengths = [cut, total - cut]
            model(**collator([{"input_ids": [5] * n, "labels": [5] * n} for n in lengths])).loss.backward()
            self.assertEqual(self.found - known, set())


class TrainerTest(KernelsTestCase):
    def setUp(self):
        super().setUp()
        self.directory = self.enterContext(tempfile.TemporaryDirectory())
        self.events = []
        # Its steps would be events as well.
        self.enterContext(mock.patch.object(VerifyCallback, "on_train_begin", return_value=None))

    def build(self, cls=PackedTrainer, model=None, arguments=PackedTrainingArguments, **options):
        defaults = {"max_steps": 2, "per_device_train_batch_size": 2, "save_strategy": "no", "report_to": "none"}
        args = arguments(
            self.directory, **defaults | {"use_cpu": True, "disable_tqdm": True, "logging_steps": 1} | options
        )
        with quiet():
            trainer = cls(model or small(), args, train_dataset=Samples(24), eval_dataset=Samples(8))
        trainer.training_step = self.noted("step", trainer.training_step)
        return trainer

    def noted(self, event, function):
        def wrapped(*args, **kwargs):
            self.events.append(event)
            return function(*args, **kwargs)

        return wrapped

    def train(self, trainer, **options):
        with mock.patch.object(callback, "compile_kernels", self.noted("warm up", compile_kernels)), quiet():
            trainer.train(**options)
        return self.events

    @parameterized.expand([({"packing": True, "max_length": 96},), ({},)])
    def test_it_runs_once_before_the_first_step_and_changes_nothing(self, options):
        trainer = self.build(**options)
        self.assertEqual(self.train(trainer), ["warm up", "step", "step"])
        other = self.build(compile_before_training=False, **options)
        self.events.clear()
        self.assertEqual(self.train(other), ["step", "step"])
        torch.testing.assert_close([*trainer.model.parameters()], [*other.model.parameters()], rtol=0, atol=0)
        keys = ("loss", "grad_norm", "documents_per_row", "padding_avoided")
        for a, b in zip(trainer.state.log_history[:2], other.state.log_history[:2], strict=True):
            self.assertEqual([a[key] for key in keys], [b[key] for key in keys])

    def test_it_does_not_run_on_a_cpu_or_for_padded_batches(self):
        with mock.patch.object(callback, "compiles_kernels", lambda device: device.type == "cuda"):
            self.assertEqual(self.train(self.build()), ["step", "step"])
        self.events.clear()
        trainer = self.build(padding_free=False)
        trainer.data_collator = collate_padded
        with self.assertLogs("transformers_packed", "INFO") as logs:
            self.assertEqual(self.train(trainer), ["step", "step"])
        self.assertIn("to compile kernels, because batches are padded", "".join(logs.output))

    def test_a_loss_of_a_subclass_does_not_see_its_rows(self):
        class Own(PackedTrainer):
            def compute_loss(trainer, model, inputs, *args, **kwargs):
                self.events.append("own loss")
                return PackedTrainer.compute_loss(trainer, model, inputs, *args, **kwargs)

        self.assertEqual(
            self.train(self.build(Own, padding_free=True)), ["warm up", "step", "own loss", "step", "own loss"]
        )

    def test_a_collator_that_needs_other_columns(self):
        trainer = self.build(padding_free=True)
        collator = trainer.data_collator

        def with_scores(features):
            # Only the rows of `warm_up` predict every token.
            if features[0]["labels"] == features[0]["input_ids"]:
                raise KeyError("score")
            return collator(features)

        trainer.data_collator = with_scores
        with self.assertLogs("transformers_packed", "WARNING") as logs:
            self.assertEqual(self.train(trainer), ["warm up", "step", "step"])
        self.assertIn("to compile kernels stopped with KeyError: 'score'", "".join(logs.output))
        self.assertTrue(trainer.model.training)
        # With several processes, the others would wait.
        self.events.clear()
        with mock.patch.object(TrainingArguments, "world_size", 2), self.assertRaises(KeyError) as raised:
            WarmUpCallback(trainer).on_train_begin(trainer.args, TrainerState(max_steps=2), None)
        self.assertIn("compile_before_training=False", raised.exception.__notes__[0])

    def test_plain_arguments(self):
        trainer = self.build(arguments=TrainingArguments)
        # An error of one process would only be logged.
        measures = mock.patch.object(callback.GraphsCallback, "_prepare")
        with self.assertNoLogs("transformers_packed", "WARNING"), measures:
            self.assertEqual(self.train(trainer), ["warm up", "step", "step"])

    @parameterized.expand(
        [
            ("rows", {"verify": False, "cuda_graphs": False}),
            ("padded", {"padding_free": False}),
            ("check", {"compile_before_training": False, "cuda_graphs": False}),
            ("graphs", {"compile_before_training": False, "verify": False}),
        ]
    )
    def test_threads_start_before_anything_waits(self, who, options):
        """Whoever comes first starts them: the warm-up, the check of the set-up, or the measurement of CUDA graphs."""
        trainer = self.build(max_steps=1, **options)
        if who == "padded":
            trainer.data_collator = collate_padded
        started, model = [], trainer.model

        def start(model, device, dtype, needs):
            self.events.append("start")
            started.append(needs)
            return []

        model.register_forward_pre_hook(lambda *_: self.events.append("forward"))
        with (
            mock.patch.object(module, "start_for", start),
            mock.patch.object(callback, "start_for", start),
            mock.patch.object(VerifyCallback, "on_train_begin", VERIFY),
            quiet(),
        ):
            trainer.train()
        self.assertEqual(self.events[0], "start")
        self.assertIn("forward", self.events)
        self.assertEqual({needs.max_length for needs in started}, {callback.largest_row(trainer)[0]})

    def test_what_a_trainer_needs(self):
        trainer = self.build()
        largest = callback.largest_row(trainer)
        self.assertEqual(callback.needs_of_trainer(trainer), Needs(*largest))
        trainer.sequence_parallel = SimpleNamespace(size=2, gated_delta_rule="heads")
        self.assertEqual(callback.needs_of_trainer(trainer), Needs(*largest, processes=2, method="heads"))
        # What cannot be started is started by the first forward.
        callback._OF_DATA.clear()
        with (
            mock.patch.object(callback, "largest_row", side_effect=KeyError("input_ids")),
            self.assertLogs("transformers_packed", "INFO") as logs,
        ):
            callback.start_threads(trainer)
        self.assertIn("No kernel is compiled before the first row: KeyError: 'input_ids'", logs.output[0])

    def test_reading_samples_leaves_no_trace(self):
        """Several callbacks ask. Augmented samples of the training are those that it would have without them."""
        trainer = self.build()
        rows = trainer.train_dataset

        class Augmented(torch.utils.data.Dataset):
            numbers = torch.Generator()

            def __len__(self):
                return len(rows)

            def __getitem__(self, number):
                drawn = torch.rand(()) + torch.rand((), generator=self.numbers) + random.random() + np.random.rand()
                return rows[number] | {"noise": float(drawn)}

        def states():
            return [
                str(x)
                for x in (torch.get_rng_state(), data.numbers.get_state(), random.getstate(), np.random.get_state())
            ]

        trainer.train_dataset = data = Augmented()
        before = states()
        with mock.patch.object(callback, "sampled_lengths", wraps=callback.sampled_lengths) as reads:
            needs = callback.needs_of_trainer(trainer)
            self.assertEqual(states(), before)
            self.assertEqual(callback.needs_of_trainer(trainer), needs)
        reads.assert_called_once_with(data)
        trainer.train_dataset = rows[:3]
        self.assertNotEqual(callback.needs_of_trainer(trainer), needs)

    def test_the_largest_row(self):
        trainer = self.build(packing=True, max_length=96)
        documents = sorted(len(row) for row in trainer.train_dataset)
        self.assertEqual(callback.largest_row(trainer), (192, sum(documents[-2:])))
        lengths = sorted(len(sample["input_ids"]) for sample in Samples(24))
        self.assertEqual(callback.largest_row(self.build()), (sum(lengths[-2:]), None))


def train_in_processes(size, compiles):
    """Return the updates of a training in two processes, the rows that they compared, and the rows of `warm_up`."""
    ran, compared, rank = [], [], torch.distributed.get_rank()
    check = sequence_parallel._check_same_row

    def recorded(model, *args, loss, **kwargs):
        def counted(model, batch):
            ran.append((type(model).__name__, batch["input_ids"].shape[1]))
            return loss(model, batch)

        return compile_kernels(model, *args, loss=counted, **kwargs)

    with (
        mock.patch.object(module, "compiles_kernels", lambda device: True),
        mock.patch.object(callback, "compiles_kernels", lambda device: compiles),
        mock.patch.object(callback, "compile_kernels", recorded),
        mock.patch.object(sequence_parallel, "_check_same_row", lambda x: (compared.append(len(ran)), check(x))),
        tempfile.TemporaryDirectory() as directory,
        quiet(),
    ):
        options = OPTIONS | {"max_steps": 3, "per_device_train_batch_size": 2, "ddp_backend": "gloo"}
        options |= {"padding_free": True, "cuda_graphs": False}
        args = PackedTrainingArguments(directory, sequence_parallel_size=size, **options)
        trainer = PackedTrainer(small(num_attention_heads=4), args, train_dataset=Samples(24))
        before = [x.detach().clone() for x in trainer.model.parameters()]
        trainer.train()
    updates = [x.detach() - y for x, y in zip(trainer.model.parameters(), before, strict=True)]
    return rank, updates, compared, ran, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def shard_and_train(compiles):
    """Return the weights of a model under FSDP2 after a step, and the losses of `warm_up`."""
    model, mesh, losses = small(), init_device_mesh("cpu", (2,)), []
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def loss(model, batch):
        losses.append(model(**batch).loss)
        return losses[-1]

    if compiles:
        with mock.patch.object(module, "compiles_kernels", lambda device: True):
            warm_up(model, 24, max_documents=3, loss=loss)
    assert all(x.grad is None for x in model.parameters())
    rows = DataCollatorWithFlattening(return_cu_seqlens=True, model=model)(list(Samples(2)))
    model.train()(**rows).loss.backward()
    with torch.no_grad():
        weights = [(x - 0.1 * x.grad).full_tensor() for x in model.parameters()]
    return weights, [float(x.detach()) for x in losses]


class ProcessesTest(unittest.TestCase):
    def test_training_is_the_same_afterwards(self):
        size = 2
        expected, found = (run_once(train_in_processes, 2, size, compiles) for compiles in (False, True))
        for without, with_it in zip(expected, found, strict=True):
            self.assertEqual(without[3], [])
            # DDP is not part of it, and each process runs its part of the same rows.
            self.assertEqual({name for name, _ in with_it[3]}, {"Qwen3_5ForCausalLM"})
            self.assertEqual(with_it[3], found[0][3])
            self.assertGreater(len(with_it[3]), 5)
            # The rows of the check and of the dataset are compared after it, as without it.
            self.assertEqual(len(without[2]), 2 * (size - 1))
            self.assertEqual(with_it[2][1:], 2 * [len(with_it[3])] * (size - 1))
            self.assertEqual(without[4], with_it[4])
            torch.testing.assert_close(without[1], with_it[1], rtol=0, atol=0)

    def test_a_sharded_model(self):
        (expected, _), _ = run_once(shard_and_train, 2, False)
        results = run_once(shard_and_train, 2, True)
        self.assertEqual(results[0][1], results[1][1])
        self.assertEqual(len(results[0][1]), len(Needs(24, 3).rows) + 1)
        for weights, _ in results:
            torch.testing.assert_close(expected, weights, rtol=0, atol=0)
