"""Whether trainers turn CUDA graphs on: by measured times and memory, which are given here."""

import io
import tempfile
import unittest
from contextlib import redirect_stdout
from importlib.util import find_spec
from unittest import mock

import torch
from common.processes import run_once
from common.recordings import MODELS, REPLACEMENTS, ROW_LENGTH, RunsAgain, models_of, row_of
from common.records import make_tokenizer
from datasets import Dataset
from parameterized import parameterized
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from transformers_packed import (
    IterablePackingDataset,
    PackedTrainer,
    PackedTrainingArguments,
    PackingDataset,
    configure_packing,
    use_cuda_graphs,
)
from transformers_packed.models import cuda_graphs
from transformers_packed.models.cuda_graphs import records_graphs
from transformers_packed.training import graphs
from transformers_packed.training import warm_up as warm_up_module
from transformers_packed.training.callbacks import warm_up as callback
from transformers_packed.training.graphs import choose_graphs


GIB = 2**30
TINY = {"vocab_size": 97, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


class Gpu:
    """Milliseconds (host, GPU) and GiB (kept, step) of a row without graphs and with them, and the memory of the GPU."""

    def __init__(self, plain=(80, 81), graphed=(1, 30), without=(6, 3), with_graphs=(8, 1), total=80):
        self.plain, self.graphed, self.without, self.with_graphs = plain, graphed, without, with_graphs
        self.total, self.text = total, None

    def time(self, run):
        run()
        return self.graphed if records_graphs(self.text) else self.plain

    def memory(self, run):
        run()
        return [x * GIB for x in (self.with_graphs if records_graphs(self.text) else self.without)]

    def properties(self, device):
        return mock.Mock(total_memory=self.total * GIB)


def choose_in_processes(plain):
    """Return the choice of each of two processes, for a GPU of the second one that computes a row in other times."""
    rank, gpu = torch.distributed.get_rank(), Gpu()
    if rank:
        gpu.plain = plain
    set_seed(0)
    model, output = MODELS["qwen3_5"](), io.StringIO()
    gpu.text = model.model
    samples = [{"input_ids": [n] * n, "labels": [n] * n} for n in range(2, 40)]
    with (
        mock.patch.multiple(cuda_graphs, **REPLACEMENTS),
        mock.patch.multiple(graphs, _time=gpu.time, _memory=gpu.memory),
        mock.patch.object(torch.cuda, "get_device_properties", gpu.properties),
        mock.patch.object(callback, "compiles_kernels", lambda device: True),
        tempfile.TemporaryDirectory() as folder,
        redirect_stdout(output),
    ):
        options = {"use_cpu": True, "report_to": "none", "ddp_backend": "gloo", "max_steps": 2}
        trainer = Trainer(model, TrainingArguments(folder, **options), train_dataset=samples)
        configure_packing(trainer, "padding_free")
        trainer.train()
    return records_graphs(model.model), [line for line in output.getvalue().splitlines() if "CUDA graphs" in line]


class GivenGpuTest(unittest.TestCase):
    def setUp(self):
        RunsAgain.made = RunsAgain.replayed = 0
        self.enterContext(mock.patch.multiple(cuda_graphs, **REPLACEMENTS))
        self.warnings = []
        self.enterContext(mock.patch.object(cuda_graphs.logger, "warning_once", self.warnings.append))

    def use(self, gpu):
        self.enterContext(mock.patch.multiple(graphs, _time=gpu.time, _memory=gpu.memory))
        self.enterContext(mock.patch.object(torch.cuda, "get_device_properties", gpu.properties))
        return gpu


class ChoiceTest(GivenGpuTest):
    def choose(self, model, **options):
        self.use(Gpu(**options)).text = model.model

        def run():
            model(**row_of([20, 30])).loss.backward()
            model.zero_grad()

        return choose_graphs(model, ROW_LENGTH, run)

    @parameterized.expand(
        [
            ("faster", {}, "on, because a row takes 30 ms with graphs and 81 ms without; they keep 2.0 GiB", 2),
            ("bound by the GPU", {"plain": (70, 81)}, "off, because a row takes the GPU 81 ms and its", 0),
            ("slower", {"graphed": (1, 78)}, "off, because a row takes 78 ms with graphs and 81 ms without", 2),
            # 0.9 * 13.3 GiB less 6 GiB between steps and 3 GiB of a step.
            ("no room for a row", {"total": 13.3}, "off, because graphs may need 3.0 GiB, and 3.0 GiB are free", 0),
            ("no room", {"total": 8}, "off, because graphs may need 3.0 GiB, and 0.0 GiB are free", 0),
            ("large graphs", {"with_graphs": (70, 1)}, "off, because graphs keep 64.0 GiB, and 63.0 GiB are free", 2),
        ]
    )
    def test_decision(self, _, options, expected, recordings):
        model, _ = models_of()
        use_cuda_graphs(model, 0)
        self.assertIn(expected, self.choose(model, **options))
        self.assertEqual(RunsAgain.made, recordings)
        self.assertEqual(records_graphs(model.model), expected.startswith("on"))

    def test_moments_of_adam_need_room(self):
        model, _ = models_of()
        use_cuda_graphs(model, 0)
        moments = 2 * 4 * sum(x.numel() for x in model.parameters()) / GIB
        limit = (9 + 3) / 0.9
        self.assertIn("off", self.choose(model, total=limit + 0.9 * moments / 0.9))
        self.assertIn("on", self.choose(model, total=limit + 1.1 * moments / 0.9, with_graphs=(8, 1)))

    def test_layers_that_cannot_run_as_graphs(self):
        model, _ = models_of()
        use_cuda_graphs(model, 0)
        model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
        self.assertIn("off, because the layers cannot run as graphs", self.choose(model))
        self.assertIn("is hooked", self.warnings[0])
        self.assertIsNone(vars(model.model)["_layer_graphs"])


class TrainerTest(GivenGpuTest):
    def setUp(self):
        super().setUp()
        for place in (warm_up_module, callback):
            self.enterContext(mock.patch.object(place, "compiles_kernels", lambda device: True))
        self.gpu = self.use(Gpu())

    def train(self, times=1, **options):
        """Return the trained model, and the lines about graphs."""
        samples = [{"input_ids": [n] * n, "labels": [n] * n} for n in range(2, 40)]
        defaults = {"packing": True, "max_length": 50, "per_device_train_batch_size": 2}
        set_seed(0)
        model, output = MODELS["qwen3_5"](), io.StringIO()
        self.gpu.text = model.model
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(output):
            args = PackedTrainingArguments(
                folder,
                optim="sgd",
                learning_rate=0.1,
                max_steps=3,
                use_cpu=True,
                report_to="none",
                **defaults | options,
            )
            trainer = PackedTrainer(model, args, train_dataset=samples)
            for _ in range(times):
                trainer.train()
        return model, [line for line in output.getvalue().splitlines() if "CUDA graphs" in line]

    def test_on(self):
        graphed, lines = self.train()
        self.assertRegex("".join(lines), r"^CUDA graphs on, because a row takes 30 ms with graphs and 81 ms without")
        self.assertEqual(vars(graphed.model)["_layer_graphs"].row_length, 128)
        # Forward and backward, for up to 6 and 30 documents, and none is recorded later.
        self.assertEqual((RunsAgain.made, self.warnings), (4, []))
        plain, lines = self.train(cuda_graphs=False)
        self.assertEqual((lines, RunsAgain.made), ([], 4))
        for a, b in zip(graphed.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a, b)

    def test_off(self):
        self.gpu.plain = (50, 81)
        model, lines = self.train()
        self.assertEqual(len(lines), 1)
        self.assertIn("off", lines[0])
        self.assertEqual((RunsAgain.made, records_graphs(model.model)), (0, False))

    def test_an_earlier_choice_stays(self):
        _, lines = self.train(times=2)
        self.assertEqual((len(lines), RunsAgain.made), (1, 4))

    @parameterized.expand(
        [
            ("asked for", {"cuda_graphs": True}, True),
            ("never", {"cuda_graphs": False}, False),
            ("torch.compile", {"torch_compile": True}, False),
            ("batches that may become shorter", {"auto_find_batch_size": True}, False),
        ]
    )
    def test_no_choice(self, _, options, records):
        with mock.patch.object(torch, "compile", lambda model, **_: model):
            model, lines = self.train(**options)
        self.assertEqual((lines, records_graphs(model.model)), ([], records))

    @parameterized.expand(
        [
            ("padding-free", {"packing": None, "max_length": None}),
            ("nothing is compiled", {"compile_before_training": False}),
        ]
    )
    def test_other_rows(self, _, options):
        model, lines = self.train(**options)
        self.assertEqual((len(lines), records_graphs(model.model)), (1, True))

    @parameterized.expand([("both gain", (80, 81), True), ("one gains", (50, 81), False)])
    def test_processes_agree(self, _, plain, on):
        (first, lines), (second, others) = run_once(choose_in_processes, 2, plain)
        self.assertEqual((first, second, others), (on, on, []))
        self.assertRegex(lines[0], "^CUDA graphs " + ("on, " if on else "off, because another process"))

    def configured(self, sft=False, packing="padding_free", train=True, **options):
        """Return a trainer of Transformers or TRL that `configure_packing` configured, and the lines about graphs."""
        samples = Dataset.from_list([{"input_ids": [n] * n, "labels": [n] * n} for n in range(20, 30)] * 3)
        set_seed(0)
        model, output = MODELS["qwen3_5"](), io.StringIO()
        self.gpu.text = model.model
        folder = self.enterContext(tempfile.TemporaryDirectory())
        settings = {"max_steps": 3, "optim": "sgd", "learning_rate": 0.1, "use_cpu": True, "report_to": "none"}
        settings |= {"per_device_train_batch_size": 4, "bf16": False}
        if sft:
            from trl import SFTConfig, SFTTrainer

            args = SFTConfig(folder, max_length=None, **settings)
            made = SFTTrainer(model, args, train_dataset=samples, processing_class=make_tokenizer())
        else:
            made = Trainer(model, TrainingArguments(folder, **settings), train_dataset=samples)
        with redirect_stdout(output):
            configure_packing(made, packing, **options)
            if train:
                made.train()
        return made, [line for line in output.getvalue().splitlines() if "CUDA graphs" in line]

    @parameterized.expand(
        [
            ("batches", "padding_free", {}, 128),
            ("rows", True, {"max_length": 60}, 256),
            ("batches of SFTTrainer", "padding_free", {"sft": True}, 128),
        ]
    )
    def test_other_trainers(self, _, packing, options, length):
        if options.get("sft") and not find_spec("trl"):
            self.skipTest("needs trl")
        graphed, lines = self.configured(packing=packing, **options)
        self.assertRegex("".join(lines), r"^CUDA graphs on, because a row takes 30 ms with graphs and 81 ms without")
        self.assertEqual(vars(graphed.model.model)["_layer_graphs"].row_length, length)
        made = RunsAgain.made
        self.assertGreater(RunsAgain.replayed, 0)
        plain, lines = self.configured(packing=packing, cuda_graphs=False, **options)
        self.assertEqual((lines, RunsAgain.made), ([], made))
        for a, b in zip(graphed.model.parameters(), plain.model.parameters(), strict=True):
            torch.testing.assert_close(a, b)

    def test_without_measurement(self):
        trainer, lines = self.configured(train=False, cuda_graphs=True)
        self.assertEqual((lines, vars(trainer.model.model)["_layer_graphs"].row_length), ([], 128))

    @parameterized.expand(
        [
            ("padded", "off", {}, "got packing='off' in a Trainer, whose batches are padded"),
            ("compiled", "padding_free", {"torch_compile": True}, "got torch_compile=True"),
            ("batch size", "padding_free", {"auto_find_batch_size": True}, "got auto_find_batch_size=True"),
            ("stream", "padding_free", {"stream": True}, "rows of known length .* got a stream of samples"),
            ("no samples", "padding_free", {"empty": True}, "rows of known length .* got no samples"),
            ("family", "auto", {"model": LlamaForCausalLM(LlamaConfig(**TINY))}, "got a LlamaForCausalLM"),
        ]
    )
    def test_refused(self, _, packing, options, expected):
        """The Trainer stays as it was."""
        trainer, _ = self.configured(packing="off", train=False)
        for name in ("torch_compile", "auto_find_batch_size"):
            setattr(trainer.args, name, options.get(name, False))
        trainer.model = options.get("model", trainer.model)
        if "stream" in options:
            trainer.train_dataset = trainer.train_dataset.to_iterable_dataset()
            trainer.accelerator.dataloader_config.dispatch_batches = False
        if "empty" in options:
            trainer.train_dataset = None
        before = list(trainer.callback_handler.callbacks), trainer.data_collator, type(trainer.model)
        with self.assertRaisesRegex(ValueError, expected):
            configure_packing(trainer, packing, cuda_graphs=True)
        self.assertEqual(before, (trainer.callback_handler.callbacks, trainer.data_collator, type(trainer.model)))

    def test_batches_that_stay_padded(self):
        """With one sample per batch, nothing is gained: the line says so, and that no graph runs."""
        trainer, _ = self.configured(packing="off", train=False)
        trainer.args.per_device_train_batch_size = 1
        with redirect_stdout(io.StringIO()) as output:
            configure_packing(trainer, "auto", cuda_graphs=True)
        self.assertRegex(output.getvalue(), r"^Packing off, .*, so no row runs as a CUDA graph\n$")

    def test_a_second_call_replaces_the_choice(self):
        trainer, _ = self.configured(train=False)
        kinds = []
        for choice in (None, False):
            configure_packing(trainer, "padding_free", cuda_graphs=choice)
            kinds.append([type(x) for x in trainer.callback_handler.callbacks].count(callback.GraphsCallback))
        self.assertEqual(kinds, [1, 0])

    def test_usual_rows(self):
        def rows(dataset, packed, batch=2, max_length=None):
            trainer = mock.Mock(args=mock.Mock(max_length=max_length), _train_batch_size=batch)
            return callback.usual_rows(trainer, dataset, packed)

        # One long sample in 80 is in one of 40 batches of two.
        lengths = [10] * 79 + [1000]
        batches = Dataset.from_list([{"input_ids": [0] * n} for n in lengths])
        self.assertEqual(rows(batches, False), (64, 20, 2, False))
        self.assertEqual(rows(batches, True), (2048, 2000, 2, True))
        planned = PackingDataset(batches, 1000, overlong="error")
        self.assertEqual(rows(planned, True, max_length=5), (2048, 2000, 80, True))
        streamed = batches.to_iterable_dataset()
        self.assertEqual(rows(IterablePackingDataset(streamed, 100), True, batch=1), (128, 100, 1, True))
        self.assertEqual(rows(streamed, True, max_length=2048), (4096, 4096, 8, True))
        for unknown, packed in ((streamed, False), (streamed, True), ([], False)):
            self.assertIsNone(rows(unknown, packed))


if __name__ == "__main__":
    unittest.main()
