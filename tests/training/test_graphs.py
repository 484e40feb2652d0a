"""Whether trainers turn CUDA graphs on: by measured times and memory, which are given here."""

import io
import tempfile
import unittest
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from unittest import mock

import torch
from common.processes import run_once
from common.recordings import MODELS, ROW_LENGTH, RunsAgain, models_of, recordings_on_a_cpu, row_of
from common.records import make_tokenizer
from datasets import Dataset
from mixins.configure import callbacks_of
from mixins.recorded import RecordedTestCase
from parameterized import parameterized
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from transformers_packed import (
    IterablePackingDataset,
    PackedTrainer,
    PackedTrainingArguments,
    PackingDataset,
    configure_packing,
    use_cuda_graphs,
)
from transformers_packed.data.usual_rows import Rows
from transformers_packed.models import cuda_graphs, recordings
from transformers_packed.models.cuda_graphs import records_graphs
from transformers_packed.ops import offload
from transformers_packed.training import graphs, state
from transformers_packed.training import warm_up as warm_up_module
from transformers_packed.training.callbacks import verify
from transformers_packed.training.callbacks import warm_up as callback
from transformers_packed.training.graphs import choose_graphs


GIB = 2**30
WITHOUT = "without, the GPU takes 81 ms and the host about 120 ms"
SPLIT = "with graphs of all layers but those of attention"
TINY = {"vocab_size": 97, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


SHORT = [{"input_ids": [n] * n, "labels": [n] * n} for n in range(2, 40)]
SETTINGS = {"max_steps": 2, "optim": "sgd", "learning_rate": 0.1, "use_cpu": True, "report_to": "none"}


class Gpu:
    """Milliseconds (host, GPU) and GiB (kept, step) of a row without graphs and with them, and the memory of the GPU.

    A row of `short` takes other milliseconds.
    """

    def __init__(self, **options):
        self.plain, self.graphed, self.without, self.with_graphs = (80, 81), (1, 30), (6, 3), (8, 1)
        self.total = self.free = 80
        self.text = self.short = self.split = None
        self.repeats, self.rows = [], []
        vars(self).update(options)

    def time(self, run, repeats=5):
        run()
        self.repeats.append(repeats)
        if self.short and run in self.rows:
            return self.short
        if not records_graphs(self.text):
            return self.plain
        return self.graphed if self.text.layer_graphs.attention else self.split or self.graphed

    def memory(self, run):
        run()
        return [x * GIB for x in (self.with_graphs if records_graphs(self.text) else self.without)]

    def info(self):
        return self.free * GIB, self.total * GIB


@contextmanager
def given(gpu):
    """Measure this GPU."""
    with (
        mock.patch.multiple(graphs, _time=gpu.time, _memory=gpu.memory),
        mock.patch.object(torch.cuda, "mem_get_info", gpu.info),
    ):
        yield


class Steps(TrainerCallback):
    """Whether the last step had graphs."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.graphed = records_graphs(model.model)


def choose_in_processes(plain):
    """Return the choice of each of two processes, for a GPU of the second one that computes a row in other times."""
    rank, gpu = torch.distributed.get_rank(), Gpu()
    if rank:
        gpu.plain = plain
    set_seed(0)
    model, output = MODELS["qwen3_5"](), io.StringIO()
    gpu.text = model.model
    with (
        recordings_on_a_cpu(),
        given(gpu),
        mock.patch.object(callback, "compiles_kernels", lambda device: True),
        tempfile.TemporaryDirectory() as folder,
        redirect_stdout(output),
    ):
        options = {"use_cpu": True, "report_to": "none", "ddp_backend": "gloo", "max_steps": 2}
        steps = Steps()
        trainer = Trainer(model, TrainingArguments(folder, **options), train_dataset=SHORT, callbacks=[steps])
        configure_packing(trainer, "padding_free")
        trainer.train()
    return steps.graphed, [line for line in output.getvalue().splitlines() if "CUDA graphs" in line]


class GivenGpuTest(RecordedTestCase):
    def use(self, gpu):
        self.enterContext(given(gpu))
        return gpu


class ChoiceTest(GivenGpuTest):
    def choose(self, model, rows=1, some_without=False, waits=False, **options):
        self.gpu = self.use(Gpu(**options))
        self.gpu.text = model.model

        def row(*lengths):
            def run():
                model(**row_of(lengths)).loss.backward()
                model.zero_grad()

            return run

        run_short = row(2, 3)
        self.gpu.rows = [run_short]
        rows = {"rows_per_step": rows, "some_without": some_without, "waits": waits}
        return choose_graphs(model, ROW_LENGTH, row(20, 30), run_short, **rows)

    @parameterized.expand(
        [
            ("faster", {}, True, f"a row takes 30 ms with graphs; {WITHOUT}; the graphs keep 2.0 GiB", 2),
            # One of four layers, 30 ms of the host. After both kinds, or if the time of the GPU is known from the start.
            ("long rows", {"graphed": (1, 70)}, True, f"a row takes 70 ms {SPLIT}; {WITHOUT}; the graphs", 4),
            (
                "long rows, with launches in time",
                {"plain": (64, 81), "graphed": (1, 50)},
                True,
                f"a row takes 50 ms {SPLIT}; without, the GPU takes 81 ms and the host about 96 ms",
                2,
            ),
            (
                "slower by attention outside",
                {"graphed": (1, 70), "split": (1, 80)},
                True,
                f"a row takes 70 ms with graphs; {WITHOUT}; the graphs",
                6,
            ),
            # A step takes the host half more than a row alone.
            ("bound by the host", {"graphed": (1, 100)}, True, f"a row takes 100 ms {SPLIT}; {WITHOUT}", 4),
            ("bound by it in a part", {"graphed": (1, 100), "rows": 8}, False, f"a row takes 100 ms {SPLIT}", 4),
            ("bound by the GPU", {"plain": (50, 81)}, False, "a row takes the GPU 81 ms and the host about 75 ms", 0),
            ("far from the host", {"plain": (40, 81)}, False, "a row takes the GPU 81 ms and the host about", 0),
            # While the GPU is behind, the host waits in the launches of the row.
            ("blocked by the GPU", {"short": (30, 31)}, False, "the GPU 81 ms and the host about 45 ms", 0),
            # Then 12.5 ms after the backward come to the time of the GPU.
            (
                "waits for the GPU",
                {"plain": (50, 81), "waits": True},
                True,
                f"a row takes 30 ms {SPLIT}; without, the GPU takes 81 ms and the host about 75 ms, 94 ms in all because",
                2,
            ),
            (
                "waits for it, and gains nothing",
                {"plain": (50, 81), "graphed": (1, 86), "waits": True},
                False,
                "94 ms in all",
                2,
            ),
            ("waits for long rows", {"plain": (30, 81), "waits": True}, False, "81 ms and the host about 45 ms", 0),
            ("waits once in many rows", {"plain": (50, 81), "waits": True, "rows": 8}, False, "the host about 64", 0),
            ("slower", {"graphed": (1, 112)}, False, f"a row takes 112 ms {SPLIT}; {WITHOUT}", 4),
            # 0.9 * 9.9 GiB less 6 GiB between steps.
            ("no room for a row", {"total": 9.9}, False, "graphs may need 3.0 GiB, and 2.9 GiB are free", 0),
            ("no room", {"total": 6}, False, "graphs may need 3.0 GiB, and 0.0 GiB are free", 0),
            # Other processes use the GPU too.
            ("little is free", {"free": 2}, False, "graphs may need 3.0 GiB, and 2.0 GiB are free", 0),
            ("large graphs", {"with_graphs": (71.5, 1)}, False, "65.5 GiB, and a step needs 1.0 more of 66.0 GiB", 2),
            # A step of the longest row, beside the graphs.
            (
                "no room for a longer row",
                {"total": 13.2, "some_without": True},
                False,
                "graphs may need 6.0 GiB, and 5.9",
                0,
            ),
            (
                "large graphs and a longer row",
                {"with_graphs": (69.5, 1), "some_without": True},
                False,
                "graphs keep 63.5 GiB, and a step needs 3.0 more of 66.0 GiB that are free",
                2,
            ),
            ("room for both", {"with_graphs": (68.5, 1), "some_without": True}, True, "the graphs keep 62.5 GiB", 2),
        ]
    )
    def test_decision(self, _, options, expected, reason, recordings):
        model, _ = models_of()
        use_cuda_graphs(model, 0)
        on, said = self.choose(model, **options)
        self.assertEqual(on, expected)
        self.assertIn(reason, said)
        self.assertEqual(RunsAgain.made, recordings)
        self.assertEqual(records_graphs(model.model), expected)
        # One row tells that the GPU takes much longer.
        far = options.get("plain") in ((40, 81), (30, 81)) or "short" in options
        self.assertEqual(self.gpu.repeats[:3], [5, 1] if far else [5, 1, 5])

    def test_checkpointed_layers_have_no_graphs_because_the_host_waits(self):
        for checkpointing in (False, True):
            model, _ = models_of()
            use_cuda_graphs(model, 0)
            if checkpointing:
                model.gradient_checkpointing_enable()
            on, reason = self.choose(model, plain=(50, 81), waits=True)
            self.assertIs(on, not checkpointing)
            self.assertIn("the GPU 81 ms and the host about 75 ms" if checkpointing else "94 ms in all", reason)

    def test_no_outputs_are_kept_while_rows_are_measured(self):
        """More and more of them would be, for which a row takes the host long."""
        model, _ = models_of()
        found = []
        with mock.patch.object(graphs, "_choose", lambda *_: found.append(offload._keeps_outputs)):
            choose_graphs(model, ROW_LENGTH, lambda: None)
        self.assertEqual((found, offload._keeps_outputs), ([False], True))

    def test_an_error_turns_graphs_off(self):
        model, _ = models_of()
        with mock.patch.object(recordings, "_Recording", side_effect=RuntimeError("no capture")):
            self.assertEqual(self.choose(model), (False, "measuring stopped with RuntimeError: no capture"))
        self.assertEqual(model.model.layer_graphs.max_length, 0)
        with self.assertRaises(KeyboardInterrupt), mock.patch.object(graphs, "_time", side_effect=KeyboardInterrupt):
            choose_graphs(model, ROW_LENGTH, lambda: None)
        self.assertEqual(model.model.layer_graphs.max_length, 0)

    def test_memory_of_the_longest_row_and_of_further_graphs(self):
        model, _ = models_of()
        use_cuda_graphs(model, 0)
        self.gpu = self.use(Gpu())
        self.gpu.text = model.model
        ran, memory = [], self.gpu.memory

        def rows(name, *lengths):
            def run():
                ran.append(name)
                model(**row_of(lengths)).loss.backward()
                model.zero_grad()

            return run

        def noted(run):
            ran.append("memory of")
            return memory(run)

        with mock.patch.object(graphs, "_memory", noted):
            run, longest, other = rows("row", 20, 30), rows("longest", 120), rows("other", *[10] * 9)
            short = rows("short", 2, 3)
            self.assertTrue(choose_graphs(model, ROW_LENGTH, run, short, longest, [other])[0])
        timed = ["short"] * 2 + ["row"] * 3
        self.assertEqual(ran, timed + ["memory of", "longest"] + ["row"] * 2 + ["other", "memory of", "longest"])
        self.assertEqual(RunsAgain.made, 4)

    def test_moments_of_adam_need_room(self):
        model, _ = models_of()
        use_cuda_graphs(model, 0)
        moments = 2 * 4 * sum(x.numel() for x in model.parameters()) / GIB
        # And copies of gradients. The memory between steps, and a step.
        limit = (6 + 3) / 0.9
        self.assertFalse(self.choose(model, total=limit + 1.4 * moments / 0.9)[0])
        self.assertTrue(self.choose(model, total=limit + 1.6 * moments / 0.9)[0])

    @parameterized.expand([(1, True), (4, False)])
    def test_gradients_of_earlier_rows_need_room(self, rows, on):
        model, _ = models_of()
        use_cuda_graphs(model, 0)
        # The memory between steps, a step, and copies of gradients.
        total = (6 + 3 + 1 + 0.5) / 0.9
        with mock.patch.object(graphs, "bytes_of_gradients", return_value=GIB):
            self.assertIs(self.choose(model, rows, total=total, with_graphs=(8, 1))[0], on)

    def test_checkpoints_in_host_memory_need_room(self):
        model, _ = models_of()
        use_cuda_graphs(model, 0)
        moments = 2 * 4 * sum(x.numel() for x in model.parameters()) / GIB
        total = (6 + 3 + 1.5 * moments) / 0.9
        for gib, on in ((0.9, True), (1.1, False)):
            with mock.patch.object(graphs, "bytes_on_host", return_value=gib * GIB):
                self.assertIs(self.choose(model, total=total + 1 / 0.9, with_graphs=(8, 1))[0], on)

    def test_layers_that_cannot_run_as_graphs(self):
        model, _ = models_of()
        use_cuda_graphs(model, 0)
        model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
        self.assertEqual(self.choose(model), (False, "the layers cannot run as graphs"))
        self.assertIn("is hooked", self.warnings[0])
        self.assertEqual(model.model.layer_graphs.max_length, 0)


class TrainerTest(GivenGpuTest):
    def setUp(self):
        super().setUp()
        for place in (warm_up_module, callback):
            self.enterContext(mock.patch.object(place, "compiles_kernels", lambda device: True))
        self.gpu = self.use(Gpu())

    def train(self, times=1, prepare=None, **options):
        """Return the model that `PackedTrainer` has trained on rows, and the lines about graphs."""
        model = self.model(prepare)
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()) as output:
            rows = {"packing": True, "max_length": 50, "per_device_train_batch_size": 2}
            args = PackedTrainingArguments(folder, **SETTINGS | rows | options)
            trainer = PackedTrainer(model, args, train_dataset=SHORT)
            for _ in range(times):
                trainer.train()
        return model, [line for line in output.getvalue().splitlines() if "CUDA graphs" in line]

    def model(self, prepare=None):
        set_seed(0)
        model = MODELS["qwen3_5"]()
        self.gpu.text = model.model
        if prepare is not None:
            prepare(model)
        return model

    def test_on(self):
        graphed, lines = self.train()
        self.assertRegex(
            "".join(lines), r"^CUDA graphs on, because a row takes 30 ms with graphs; without, the GPU takes 81 ms"
        )
        # Forward and backward, for up to 6 and 30 documents, and none is recorded later.
        self.assertEqual((RunsAgain.made, self.warnings), (4, []))
        self.assertGreaterEqual(RunsAgain.replayed, 4)
        # The next training may have other rows.
        self.assertIsNone(graphed.model.layer_graphs)
        plain, lines = self.train(cuda_graphs=False)
        self.assertEqual((lines, RunsAgain.made), ([], 4))
        torch.testing.assert_close([*graphed.parameters()], [*plain.parameters()])

    def test_off(self):
        self.gpu.plain = (50, 81)
        model, lines = self.train(times=2, max_steps=1)
        # Each training chooses.
        self.assertEqual(["off" in line for line in lines], [True, True])
        self.assertEqual((RunsAgain.made, model.model.layer_graphs), (0, None))

    @parameterized.expand([False, True])
    def test_nothing_is_measured_if_the_layers_cannot_run_as_graphs(self, deterministic):
        """Under deterministic algorithms too, where `cuda_graphs=True` would not help."""
        torch.use_deterministic_algorithms(deterministic)
        self.addCleanup(torch.use_deterministic_algorithms, False)
        _, lines = self.train(prepare=lambda model: model.model.layers[1].mlp.register_forward_hook(lambda *_: None))
        self.assertEqual(lines, ["CUDA graphs off, because a Qwen3_5MLP is hooked, wrapped or compiled."])
        self.assertEqual((RunsAgain.made, self.gpu.repeats, self.warnings), (0, [], []))

    @parameterized.expand(["measuring", "training"])
    def test_after_an_interruption(self, when):
        """The next Trainer chooses again, though its model has graphs, or was about to get some."""

        def interrupt(*_, **__):
            raise KeyboardInterrupt

        place, name = (graphs, "_fastest_graphs") if when == "measuring" else (Steps, "on_step_end")
        for of_experts in (False, True):
            model = self.model()
            with mock.patch.object(place, name, interrupt), self.assertRaises(KeyboardInterrupt):
                self.configured(model=model)
            self.assertIsNotNone(model.model.layer_graphs)
            if of_experts:
                # The load of experts is counted in other tensors from here on.
                cuda_graphs.forget_graphs(model)
            _, lines = self.configured(model=model)
            self.assertRegex("".join(lines), "^CUDA graphs on, because a row takes 30 ms")
            self.assertIsNone(model.model.layer_graphs)

    def test_a_choice_of_the_user_stays(self):
        model, lines = self.train(prepare=lambda model: use_cuda_graphs(model, 0), max_steps=1)
        graphs = model.model.layer_graphs
        self.assertEqual((lines, graphs.max_length), ([], 0))

    @parameterized.expand(
        [
            ("asked for", {"cuda_graphs": True}, True),
            ("batches that may become shorter", {"auto_find_batch_size": True}, False),
        ]
    )
    def test_no_choice(self, _, options, records):
        model, lines = self.train(max_steps=1, **options)
        self.assertEqual((lines, records_graphs(model.model)), ([], records))

    def test_recordings_are_no_trace_of_the_check(self):
        """They have tensors with the memory of weights, which the check changes and puts back."""
        said = io.StringIO()
        with (
            mock.patch.object(state, "_COPIED_IN_ALL", 0),
            mock.patch.object(verify, "say", lambda _, x: print(x, file=said)),
        ):
            model, _ = self.train(times=2, max_steps=1, cuda_graphs=True)
        self.assertTrue(records_graphs(model.model))
        self.assertEqual((said.getvalue().count("Verified packing"), said.getvalue().count("not put back")), (2, 0))

    def test_processes_agree(self):
        (first, lines), (second, others) = run_once(choose_in_processes, 2, (50, 81))
        self.assertEqual((first, second, others), (False, False, []))
        self.assertRegex(lines[0], "^CUDA graphs off, because another process")

    def test_order_of_callbacks(self):
        trainer, _ = self.configured(train=False)
        trainer.callback_handler.callbacks.insert(0, callback.WarmUpCallback(trainer))
        for _ in range(2):
            configure_packing(trainer, "padding_free")
            kinds = [type(x).__name__.removesuffix("Callback") for x in trainer.callback_handler.callbacks[:5]]
            self.assertEqual(kinds, ["PackingPlan", "WarmUp", "Verify", "Graphs", "PackingMetrics"])

    def test_configured_again(self):
        trainer, lines = self.configured(train=False, cuda_graphs=True)
        self.assertEqual((lines, trainer.model.model.layer_graphs.max_length), ([], 128))
        for choice, expected in ((False, 0), (None, 1), (False, 0)):
            configure_packing(trainer, "padding_free", cuda_graphs=choice)
            kinds = [type(x) for x in trainer.callback_handler.callbacks]
            self.assertEqual(
                (kinds.count(callback.GraphsCallback), trainer.model.model.layer_graphs), (expected, None)
            )

    def test_deterministic_algorithms(self):
        """A measurement does not come out the same twice."""
        torch.use_deterministic_algorithms(True)
        self.addCleanup(torch.use_deterministic_algorithms, False)
        with mock.patch.object(callback, "choose_graphs") as choose:
            _, lines = self.configured()
        choose.assert_not_called()
        self.assertRegex(
            "".join(lines), "^CUDA graphs off, because two runs under deterministic algorithms could choose"
        )
        self.assertEqual(RunsAgain.made, 0)

    @parameterized.expand(
        [("none", 128, "no", False), ("the longest", 129, "no", True), ("those of an evaluation", 128, "steps", True)]
    )
    def test_rows_without_a_graph(self, _, longest, evaluates, expected):
        trainer, _ = self.configured(train=False)
        trainer.args.eval_strategy = evaluates
        rows = Rows(max_length=128, tokens=100, documents=4, longest=longest, fewest=4, most=4)
        with (
            mock.patch.object(callback, "usual_rows", return_value=rows),
            mock.patch.object(callback, "choose_graphs", return_value=(False, "a test")) as choose,
        ):
            callback.GraphsCallback(trainer).on_train_begin(trainer.args, TrainerState(max_steps=2), None)
        self.assertEqual(choose.call_args.args[-2:], (expected, False))

    def test_a_stream_of_samples(self):
        trainer, _ = self.configured(train=False)
        trainer.train_dataset = trainer.train_dataset.to_iterable_dataset()
        with mock.patch.object(callback, "choose_graphs") as choose:
            callback.GraphsCallback(trainer).on_train_begin(trainer.args, TrainerState(max_steps=2), None)
        choose.assert_not_called()

    def configured(self, sft=False, packing="padding_free", train=True, model=None, **options):
        """Return a trainer of Transformers or TRL that `configure_packing` configured, and the lines about graphs."""
        samples = Dataset.from_list([{"input_ids": [n] * n, "labels": [n] * n} for n in range(20, 30)] * 3)
        model, output = model or self.model(), io.StringIO()
        folder = self.enterContext(tempfile.TemporaryDirectory())
        settings = {**SETTINGS, "per_device_train_batch_size": 4, "bf16": False}
        if sft:
            from trl import SFTConfig, SFTTrainer

            args = SFTConfig(folder, max_length=None, **settings)
            made = SFTTrainer(model, args, train_dataset=samples, processing_class=make_tokenizer())
        else:
            made = Trainer(model, TrainingArguments(folder, **settings), train_dataset=samples, callbacks=[Steps()])
        with redirect_stdout(output):
            configure_packing(made, packing, **options)
            if train:
                made.train()
        return made, [line for line in output.getvalue().splitlines() if "CUDA graphs" in line]

    @unittest.skipUnless(find_spec("trl"), "needs trl")
    def test_batches_of_sft_trainer(self):
        with mock.patch.object(callback, "choose_graphs", wraps=choose_graphs) as choose:
            graphed, lines = self.configured(sft=True)
        self.assertRegex(
            "".join(lines), r"^CUDA graphs on, because a row takes 30 ms with graphs; without, the GPU takes 81 ms"
        )
        self.assertEqual(choose.call_args.args[1], 128)
        # Its metrics are read in each step.
        self.assertEqual(choose.call_args.args[-2:], (False, True))
        made = RunsAgain.made
        self.assertGreater(RunsAgain.replayed, 0)
        plain, lines = self.configured(sft=True, cuda_graphs=False)
        self.assertEqual((lines, RunsAgain.made), ([], made))
        torch.testing.assert_close([*graphed.model.parameters()], [*plain.model.parameters()])

    @parameterized.expand([("longer", 20, 20), ("shorter", 500, None), ("many documents", 1, 8)])
    def test_the_row_that_tells_the_host(self, _, limit, expected):
        """Batches of four documents have 84 to 114 tokens."""
        lengths = []

        def choose(model, max_length, run, short, *_):
            lengths.append(short)
            return False, "a test"

        def make_row(model, documents, *_):
            return sum(documents)

        trainer, _ = self.configured(train=False)
        with mock.patch.multiple(callback, _HOST_ROW=limit, choose_graphs=choose, make_row=make_row):
            callback.GraphsCallback(trainer).on_train_begin(trainer.args, TrainerState(max_steps=2), None)
        self.assertEqual([short and short.args[0] for short in lengths], [expected])

    @parameterized.expand(
        [
            ("padded", "off", {}, "got packing='off' or padding_free=False"),
            ("batch size", "padding_free", {"auto_find_batch_size": True}, "got auto_find_batch_size=True"),
            ("shared rows", "padding_free", {"shared": True}, "got rows that several processes share"),
            ("stream", "padding_free", {"stream": True}, "rows of known length .* got a stream of samples"),
            ("trees", "padding_free", {"trees": True}, "got trees or groups, whose rows run without graphs"),
            ("no samples", "padding_free", {"empty": True}, "rows of known length .* got no samples"),
            ("family", "auto", {"model": LlamaForCausalLM(LlamaConfig(**TINY))}, "got a LlamaForCausalLM"),
        ]
    )
    def test_refused(self, _, packing, options, expected):
        """The Trainer stays as it was."""
        trainer, _ = self.configured(packing="off", train=False)
        trainer.args.auto_find_batch_size = options.get("auto_find_batch_size", False)
        trainer.model = options.get("model", trainer.model)
        trainer.sequence_parallel = mock.Mock() if "shared" in options else None
        if "stream" in options:
            trainer.train_dataset = trainer.train_dataset.to_iterable_dataset()
            trainer.accelerator.dataloader_config.dispatch_batches = False
        if "trees" in options:
            leaf = {"input_ids": [1, 2], "labels": [1, 2]}
            trainer.train_dataset = [{**leaf, "turns": [leaf, leaf]}] * 4
            trainer.args.remove_unused_columns = False
        if "empty" in options:
            trainer.train_dataset = None
        before = callbacks_of(trainer), trainer.data_collator, type(trainer.model)
        with self.assertRaisesRegex(ValueError, expected):
            configure_packing(trainer, packing, cuda_graphs=True)
        self.assertEqual(before, (callbacks_of(trainer), trainer.data_collator, type(trainer.model)))

    def test_usual_rows(self):
        def rows(dataset, packed, batch=2, max_length=None, sampling="random"):
            args = mock.Mock(max_length=max_length, train_sampling_strategy=sampling)
            return tuple(callback.usual_rows(mock.Mock(args=args, _train_batch_size=batch), dataset, packed))

        # One long sample in 80 is in one of 40 batches of two.
        batches = Dataset.from_list([{"input_ids": [0] * n} for n in [10] * 79 + [1000]])
        self.assertEqual(rows(batches, False), (64, 20, 2, 1010, 2, 2))
        self.assertEqual(rows(batches, True), (2048, 2000, 2, 2000, 2, 2))
        self.assertEqual(rows(batches.select(range(3)), False, batch=8), (64, 30, 3, 30, 3, 3))
        # Samples of similar lengths: 2 + 3, 4 + 5, ..., 40 + 41.
        similar = Dataset.from_list([{"input_ids": [0] * n} for n in range(2, 42)])
        self.assertEqual(rows(similar, False, sampling="group_by_length"), (128, 45, 2, 81, 2, 2))
        # In the order of the dataset, every batch is the same: 2 + 41, 3 + 40, ..., 21 + 22.
        facing = Dataset.from_list([{"input_ids": [0] * n} for i in range(20) for n in (2 + i, 41 - i)])
        self.assertEqual(rows(facing, False, sampling="sequential"), (64, 43, 2, 43, 2, 2))
        planned = PackingDataset(batches, 1000, overlong="error")
        self.assertEqual(rows(planned, True, max_length=5), (2048, 2000, 80, 2000, 2, 158))
        streamed = batches.to_iterable_dataset()
        self.assertEqual(rows(IterablePackingDataset(streamed, 100), True, batch=1), (128, 100, 1, 100, 1, 1))
        self.assertEqual(rows(streamed, True, max_length=2048), (4096, 4096, 8, 4096, 8, 8))
        for unknown, packed in ((streamed, False), (streamed, True), ([], False)):
            trainer = mock.Mock(args=mock.Mock(max_length=None), _train_batch_size=2)
            self.assertIsNone(callback.usual_rows(trainer, unknown, packed))

    @parameterized.expand(
        [(1, 1, [1]), (1, 6, [1]), (1, 7, [1, 7]), (3, 200, [3, 7, 15, 31, 63, 127]), (9, 40, [9, 15, 31])]
    )
    def test_documents_of_graphs(self, fewest, most, expected):
        self.assertEqual(cuda_graphs.documents_of_graphs(fewest, most), expected)
