import contextlib
import json
import math
import re
import resource
import shutil
import sys
import tempfile
import unittest
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import torch
from common import pages
from common.checkpoints import FORMATS, write
from common.commands import run_command
from common.families import tiny_config
from common.late_experts import copied_on_a_cpu
from common.optimizers import flashoptim
from common.processes import EXPERTS, run_processes, run_script
from common.records import THINKING, assistant, make_tokenizer, records, user
from common.shown import shows, shows_for_each
from mixins.model import total_relative_error
from mixins.patch import OTHERS
from parameterized import parameterized
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file, save_file
from scripts.trainer_arms import TINY
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    LlamaConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Trainer,
    TrainerCallback,
    set_seed,
)
from transformers.trainer_callback import CallbackHandler
from transformers.training_args import OptimizerNames

from transformers_packed import DataCollatorWithFlattening, PackingPlan
from transformers_packed.cli import early, finetune, models, run_folder
from transformers_packed.cli.folder_trainer import RunFolderTrainer
from transformers_packed.cli.needs import needs_of_samples
from transformers_packed.data.records.samples import make_samples
from transformers_packed.models import float8, host_parameters, versions
from transformers_packed.models.checkpoint_formats import PackedWeight
from transformers_packed.models.checkpoint_kinds import stored_as
from transformers_packed.models.host_experts import names_in_host_memory
from transformers_packed.models.optimizers import DEFAULT, OPTIMIZERS
from transformers_packed.models.quantized_weights import ExpertsIn4bit
from transformers_packed.models.versions import (
    can_cut_rows,
    can_select_checkpoints,
    checkpointing_argument,
    joins_stored_experts,
)
from transformers_packed.ops import dispatch
from transformers_packed.training.callbacks import warm_up
from transformers_packed.training.kernels import Needs
from transformers_packed.training.optimizers import unwrapped


LORA_PAGE = pages.ROOT / "docs" / "how_to" / "lora.md"
TEXT_CONFIG = {**TINY, "vocab_size": 264, "eos_token_id": 1}
DEEP_CONFIG = {**TEXT_CONFIG, "num_hidden_layers": 3, "layer_types": TINY["layer_types"] + ["full_attention"]}
GOOD = b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
GOOD_TEXT = b'{"text": "a"}\n'
BAD_FILES = [
    ("not_json", GOOD_TEXT + b'\n{"text": "a"\n', 3, "got invalid JSON"),
    ("not_utf8", GOOD_TEXT + b'{"text": "\xff"}\n', 2, "expected UTF-8"),
    ("surrogate", GOOD_TEXT + b'{"text": "\\ud800"}\n', 2, "valid Unicode"),
    ("list", b"\n3\n", 2, "expected a JSON object, got a number"),
    ("missing_columns", b'{"conversations": []}\n', 1, "got the columns conversations"),
    ("mixed", GOOD + b'{"prompt": "a", "completion": "b"}\n', 2, "first record, messages, got prompt and completion"),
    ("type", GOOD_TEXT + b'{"text": 3}\n', 2, "text as a string, got a number"),
    ("empty_text", GOOD_TEXT + b'{"text": " \\n"}\n', 2, "non-empty text in text"),
    ("empty_completion", b'{"prompt": "a", "completion": ""}\n', 1, "non-empty text in completion"),
    ("half_messages", b'{"prompt": "a", "completion": [{"role": "user", "content": "a"}]}\n', 1, "got a string"),
    ("no_messages", GOOD + b'{"messages": []}\n', 2, "a list of messages, got an empty list"),
    ("message_type", GOOD + b'{"messages": ["a"]}\n', 2, "an object in messages, message 1, got a string"),
    ("role", GOOD + b'{"messages": [{"role": "human", "content": "a"}]}\n', 2, "got 'human'"),
    ("no_role", GOOD + b'{"messages": [{"from": "human", "value": "a"}]}\n', 2, "message 1, got none"),
    ("no_content", GOOD + b'{"messages": [{"role": "user"}]}\n', 2, "content in messages, message 1, got none"),
    ("empty_answer", GOOD + b'{"messages": [{"role": "assistant", "content": ""}]}\n', 2, "content in messages"),
    ("image", GOOD + b'{"messages": [{"role": "user", "content": [{"type": "image"}]}]}\n', 2, "got type 'image'"),
    ("refused", GOOD + b'{"messages": [{"role": "assistant", "content": "a"}]}\n', 2, "an error \\(No question.\\)"),
    ("empty", b"", None, "--data: expected at least one record, got none"),
]


# A script that prints how many bytes of weights in host memory are shared after the command, and how many there are.
TRAINS_AND_COUNTS = """
from transformers_packed.cli import finetune, main
from transformers_packed.models.host_experts import bytes_in_host_memory, shared_bytes

trainers, make = [], finetune.make_trainer
finetune.make_trainer = lambda *args: trainers.append(make(*args)) or trainers[-1]
main()
(trainer,) = trainers
print(shared_bytes(trainer.model), bytes_in_host_memory(trainer.model), flush=True)
"""


def train_here(model, data, output, *arguments):
    """Run the command in one of several processes."""
    return run_command("train", "--model", model, "--data", data, "--output", output, *arguments)


def logits(*models):
    with torch.no_grad():
        return [model.eval()(torch.tensor([[5, 9, 40, 33, 7]])).logits for model in models]


class CommandTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.root = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        set_seed(0)
        cls.tokenizer = cls.save("model", AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**TEXT_CONFIG)))
        words = "the quick brown fox jumps over a lazy dog".split()
        cls.rows = [
            {"prompt": words[i % 9], "completion": " ".join(words[i % 5 : 2 + i % 7])}
            for i in range(3, 21)
            if i % 7 > i % 5
        ]
        (cls.root / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in cls.rows))

    @classmethod
    def save(cls, name, model, tokenizer=None):
        model.save_pretrained(cls.root / name)
        (tokenizer or make_tokenizer(THINKING)).save_pretrained(cls.root / name)
        return AutoTokenizer.from_pretrained(cls.root / name)

    def save_mixture(self):
        set_seed(0)
        config = Qwen3_5MoeTextConfig(**TEXT_CONFIG, **EXPERTS)
        self.save("mixture", AutoModelForCausalLM.from_config(config))

    def setUp(self):
        self.directory = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.output = self.directory / "new" / "output"
        self.trainers, self.batches = [], []
        # Clear implementations recorded by other tests in this process.
        dispatch._used.clear()

    def train(self, *arguments, model="model", data=None, output=None):
        """Return status, standard output and error. `self.trainers` gets the Trainer, `self.batches` its samples."""

        def make_trainer(*args, **kwargs):
            self.trainers.append(original(*args, **kwargs))
            return self.trainers[-1]

        def collate(collator, features, *args, **kwargs):
            self.batches.append(features)
            return call(collator, features, *args, **kwargs)

        def on_epoch_begin(handler, args, state, control):
            if not state.global_step:
                # Batches before the first step verify packing.
                self.batches.clear()
            return begin(handler, args, state, control)

        original = finetune.make_trainer
        call, begin = DataCollatorWithFlattening.__call__, CallbackHandler.on_epoch_begin
        command = ["train", "--model", self.root / model, "--data", data or self.root / "pairs.jsonl"]
        command += ["--output", output or self.output, *arguments]
        with (
            mock.patch.object(finetune, "make_trainer", make_trainer),
            mock.patch.object(DataCollatorWithFlattening, "__call__", collate),
            mock.patch.object(CallbackHandler, "on_epoch_begin", on_epoch_begin),
        ):
            return run_command(*command)

    def succeeds(self, *arguments, **where):
        """Return what is printed."""
        status, out, err = self.train(*arguments, **where)
        self.assertEqual(status, 0, err)
        return out

    def fails(self, *arguments, **where):
        """Return the error."""
        status, _, err = self.train(*arguments, **where)
        self.assertEqual(status, 1)
        return err

    def check_error(self, message, *arguments, **where):
        err = self.fails(*arguments, **where)
        self.assertRegex(err, message)
        self.assertEqual(len(err.splitlines()), 1, err)
        self.assertFalse(self.output.parent.exists(), "something was written")

    def samples(self):
        return make_samples(records(*self.rows), self.tokenizer, 2048).data

    @parameterized.expand(BAD_FILES)
    def test_bad_file(self, _, content, line, message):
        path = self.directory / "data.jsonl"
        path.write_bytes(content)
        place = f"{path}, line {line}: " if line else ""
        self.check_error(f"^transformers-packed train: {place}.*{message}", data=path)

    def test_byte_order_mark_and_blank_lines(self):
        path = self.directory / "data.jsonl"
        path.write_bytes(b"\xef\xbb\xbf" + GOOD_TEXT + b"\r\n" + GOOD_TEXT)
        out = self.succeeds("--max-steps=1", "--no-cuda-graphs", data=path)
        self.assertIn("2 samples (text) with 4 tokens, 2 of them targets", out)
        self.assertIn("\n1 step, rows of up to 8 samples, 1 per step, ", out)
        self.assertEqual(self.graphs(), 0)

    def graphs(self):
        return [type(x) for x in self.trainers[0].callback_handler.callbacks].count(warm_up.GraphsCallback)

    def test_the_lines_of_a_run(self):
        out = self.succeeds("--max-steps=3", "--batch-size=2", "--logging-steps=1")
        phases = ["Importing torch and transformers ...", f"Reading {self.root / 'pairs.jsonl'} ..."]
        phases += [f"Loading {self.root / 'model'} ...", "Verifying packing ..."]
        self.assertEqual([line for line in out.splitlines() if line.endswith(" ...")], phases)
        self.assertEqual(self.graphs(), 1)
        steps = re.findall(r"^step (\d)/3, epoch [0-9.]+: loss [0-9.]+, [0-9,]+ tokens/s(.*)$", out, re.MULTILINE)
        self.assertEqual(
            [(number, bool(re.fullmatch(r", \d+ s left", left))) for number, left in steps],
            [("1", False), ("2", True), ("3", False)],
        )

    def test_processes_that_share_rows(self):
        """Two processes train what one trains, on the same rows."""
        options = "--row-length=30", "--max-steps=3", "--logging-steps=1", "--learning-rate=0.001"
        where, name = (str(self.root / "model"), str(self.root / "pairs.jsonl")), "model.safetensors"
        start, updates, lines = load_file(self.root / "model" / name), [], []
        for processes in (1, 2):
            output, shared = str(self.directory / str(processes)), ("--sequence-parallel-size", str(processes))
            found = run_processes(train_here, processes, *where, output, *options, *shared)
            self.assertEqual([status for status, _, _ in found], [0] * processes, found)
            saved = load_file(Path(output, name))
            updates.append({key: weight - start[key] for key, weight in saved.items()})
            lines.append(re.findall(r"^step .*: loss [0-9.]+", found[0][1], re.MULTILINE))
            self.assertIn("3 steps, rows of up to 30 tokens, 1 per step", found[0][1])
        self.assertEqual(len(lines[0]), 3)
        self.assertEqual(*lines)
        # AdamW divides small gradients by their own size, with their rounding.
        self.assertLess(total_relative_error(*updates), 1e-2)

    def test_processes_that_cannot_share_rows(self):
        message = "--sequence-parallel-size: expected a multiple of 2 processes, got 1 process. Start the command with"
        self.check_error(f"^transformers-packed train: {message} torchrun", "--sequence-parallel-size=2")

    def test_full_rows_are_those_of_plan(self):
        saved, model = self.directory / "plan.npz", self.root / "model"
        options = ["--row-length=30", "--gradient-accumulation-steps=2", "--seed=3"]
        command = ["plan", "--data", str(self.root / "pairs.jsonl"), "--model", str(model), *options]
        self.assertEqual(run_command(*command, "--save", saved)[0], 0)
        out = self.succeeds(*options)
        planned, trained = PackingPlan.load(saved), self.trainers[0].train_dataset.plan
        for row in range(len(planned)):
            self.assertEqual([x.tolist() for x in trained.row(row)], [x.tolist() for x in planned.row(row)])
        self.assertEqual((len(trained), trained.cost), (len(planned), planned.cost))
        self.assertIn(f"{len(planned) // 2} steps, rows of up to 30 tokens, 2 per step", out)
        for size in (2, 8):
            message = "--batch-size: not allowed with argument --row-length"
            self.assertIn(message, self.train(*options, f"--batch-size={size}")[2])

    def test_the_compiler_starts_after_the_checks_and_before_the_weights(self):
        calls, empty = [], self.directory / "empty.jsonl"
        empty.touch()
        load = lambda *args, **kwargs: calls.append("weights") or original(*args, **kwargs)  # noqa: E731
        original = finetune.load_model
        with (
            mock.patch.object(finetune, "start_compiling", lambda *given: calls.append(given)),
            mock.patch.object(finetune, "load_model", load),
        ):
            self.check_error("--data: expected at least one record", data=empty)
            self.assertEqual(calls, [])
            self.succeeds("--max-steps", 1)
        (config, device, dtype, needs), loaded = calls
        self.assertEqual((needs.trees, needs.segment_tokens, needs.processes), (False, math.inf, 1))
        self.assertEqual((config.model_type, device.type, dtype), ("qwen3_5_text", "cpu", torch.float32))
        self.assertEqual(loaded, "weights")

    def test_what_the_training_needs(self):
        leaf = {"input_ids": [1, 2, 3], "labels": [1, 2, 3]}
        settings = Namespace(row_length=None, batch_size=2, segment_tokens=None, sequence_parallel_size=1)
        samples = Namespace(data=[leaf, {**leaf, "input_ids": [1] * 5}, leaf])
        self.assertEqual(needs_of_samples(samples, settings), Needs(8))
        settings.row_length, settings.segment_tokens, settings.sequence_parallel_size = 512, 64, 2
        self.assertEqual(needs_of_samples(samples, settings), Needs(512, segment_tokens=64, processes=2))
        # The number is chosen when the model is there.
        settings.segment_tokens, samples.data = "auto", [{**leaf, "turns": [leaf]}]
        self.assertEqual(needs_of_samples(samples, settings), Needs(512, trees=True, processes=2))

    def test_bad_models(self):
        config = LlamaConfig(
            vocab_size=264, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
        )
        self.save("llama", AutoModelForCausalLM.from_config(config))
        self.check_error("a checkpoint of Qwen3-Next, .*, got .*LlamaConfig", model="llama")
        (self.root / "unknown").mkdir()
        (self.root / "unknown" / "config.json").write_text('{"model_type": "abacus"}')
        self.check_error("a checkpoint of Qwen3-Next, .*, got .*abacus", model="unknown")
        (self.root / "empty").mkdir()
        self.check_error("cannot read a checkpoint from .*/empty: it has no config.json$", model="empty")
        self.check_error(
            "expected a local directory or a model on the Hub, got '.*/nothing': no such", model="nothing"
        )

    def test_bad_tokenizers(self):
        chat = self.directory / "data.jsonl"
        chat.write_bytes(GOOD)
        model = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**TEXT_CONFIG))
        self.save("no_template", model, make_tokenizer(None))
        self.check_error(
            "a tokenizer with a chat template, for messages, got one without", model="no_template", data=chat
        )
        self.save("no_eos", model, make_tokenizer(eos_token=None))
        with mock.patch.object(finetune, "load_tokenizer", lambda *_: make_tokenizer(eos_token=None)):
            self.check_error("a tokenizer with an EOS token to end each sample, got one without")
        model.save_pretrained(self.root / "no_tokenizer")
        self.check_error(
            "--model: expected a tokenizer in .*/no_tokenizer, got none. Save the tokenizer of the model",
            model="no_tokenizer",
        )
        small = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**{**TEXT_CONFIG, "vocab_size": 50}))
        self.save("small", small)
        self.check_error("--model: expected a tokenizer with ids below 50, .* got the id", model="small")
        data = self.directory / "ids.jsonl"
        data.write_text('{"input_ids": [5, 6, 99]}\n')
        message = "--data: expected records with ids below 50, .* got the id 99. Tokenize with the model's own"
        self.check_error(message, model="small", data=data)

    def test_attention_is_checked_before_the_data_is_read(self):
        """The file of data does not exist."""
        data = self.directory / "missing.jsonl"
        known = "sdpa, eager, flex_attention, flash_attention_2, flash_attention_3 or flash_attention_4"
        self.check_error(f"--attn: .*, got 'foo'. Choose {known}.\n$", "--attn", "foo", data=data)
        for number, package in ((2, "flash-attn"), (3, "flash-attn-3"), (4, "flash-attn-4")):
            name, needs = (
                f"flash_attention_{number}",
                f"--attn flash_attention_{number} needs {package}: pip install {package}\n$",
            )
            # With `kernels`, Transformers downloads one.
            for installed, message in ((None, needs), (package, "--data: file "), ("kernels", "--data: file ")):
                with mock.patch.object(early, "version", lambda name, installed=installed: name == installed or None):
                    self.check_error(message, "--attn", name, data=data)
        for name in ("sdpa", "eager", "kernels-community/flash-attn2"):
            self.check_error("--data: file .* not found", "--attn", name, data=data)

    def test_bad_flags(self):
        self.check_error("--data: file .*missing.jsonl not found", data=self.directory / "missing.jsonl")
        self.check_error("a dataset with split or subset, got the file", "--split", "test")
        self.check_error("flex_attention", "--attn", "flex_attention")
        self.check_error("got none in .* longer than 1 token\\). Raise --max-length", "--max-length", "1")
        data = self.root / "long_prompts.jsonl"
        data.write_text(json.dumps({"prompt": "a long prompt", "completion": "b"}) + "\n")
        for raised, *given in (("row", "--row-length=4"), ("max", "--max-length=4", "--row-length=9")):
            message = f"1 longer than 4 tokens\\). Raise --{raised}-length, or"
            self.check_error(message, *given, data=data)
        self.check_error("--max-length: expected at most --row-length, 9 tokens", "--max-length=10", "--row-length=9")
        shared = "--sequence-parallel-size"
        self.check_error(f"--every-turn without {shared}, got both. Remove", "--every-turn", f"{shared}=2")
        both = ("--every-turn", "--gradient-checkpointing", "--segment-tokens=64")
        self.check_error("--every-turn without --segment-tokens, got both. Remove", *both)
        cut = ("--gradient-checkpointing", "--segment-tokens=auto")
        self.check_error(f"--segment-tokens without {shared}, got both. Remove", *cut, f"{shared}=2")
        for option, flag, what, *value in (
            ("--segment-tokens", "--teacher", "teachers", "x"),
            ("--segment-tokens", "--cuda-graphs", "graphs"),
            ("--every-n-layers", "--teacher", "teachers", "x"),
            ("--every-n-layers", "--cuda-graphs", "graphs"),
            ("--every-n-layers", "--every-turn", "trees of turns"),
        ):
            message = f"{option}: expected a number with {flag}, got auto. The plan of memory leaves {what} out."
            self.check_error(message, "--gradient-checkpointing", option, "auto", flag, *value)
        with mock.patch("datasets.__version__", "3.6.0"):
            self.check_error("needs datasets >= 4, which does not run dataset code", data="a/name")
        with mock.patch.object(early, "find_spec", lambda name: None):
            self.check_error("--lora needs peft: pip install peft", "--lora")
        with mock.patch.object(early, "find_spec", lambda name: None if name == "bitsandbytes" else name):
            self.check_error("--load-in-4bit needs bitsandbytes: pip install bitsandbytes", "--lora", "--load-in-4bit")
        # Without --lora, the rank would be ignored.
        for flag, value in (
            ("--epochs", "-1"),
            ("--learning-rate", "nan"),
            ("--batch-size", "0"),
            ("--lora-rank", "4"),
            ("--every-n-layers", "2"),
            ("--every-n-layers", "all"),
            ("--segment-tokens", "63"),
        ):
            self.assertEqual(self.train(flag, value)[0], 2)
        for flag, value, lowest in (("--every-n-layers", "all", 1), ("--segment-tokens", "63", 64)):
            message = f"{flag}: expected a whole number of at least {lowest}, or auto, got '{value}'"
            self.assertIn(message, self.train(flag, value)[-1])
        # Also if a value is the default.
        self.assertEqual(self.train("--epochs", "1", "--max-steps", "1")[0], 2)

    def test_a_release_without_the_options_of_checkpointing(self):
        with mock.patch.object(versions, "can_select_checkpoints", lambda: False):
            for option in ("--offload", "--keep-attention", "--every-n-layers=2", "--every-n-layers=auto"):
                message = f"expected Transformers 5.23 or later for {option.partition('=')[0]}, got Transformers 5"
                self.check_error(message, "--gradient-checkpointing", option)
        with mock.patch.object(versions, "can_cut_rows", lambda: False):
            message = "expected Transformers 5.24 or later for --segment-tokens, got Transformers 5"
            self.check_error(message, "--gradient-checkpointing", "--segment-tokens=64")

    @unittest.skipUnless(can_cut_rows(), "needs Transformers 5.24")
    def test_segments_by_memory(self):
        """A CPU has none that is known. With memory, the segments are those of the plan."""
        for chosen in (None, 64):
            found = mock.patch.object(finetune, "chosen_checkpoints", return_value=(None, chosen))
            where = found if chosen else contextlib.nullcontext()
            options = ("--max-steps=1", "--gradient-checkpointing", "--segment-tokens=auto")
            with where, mock.patch.object(finetune, "TrainingArguments", wraps=finetune.TrainingArguments) as given:
                out = self.succeeds(*options, output=self.directory / f"{chosen}")
            line = "--segment-tokens auto: the memory of a step on a CPU is not known, so rows are not cut."
            self.assertEqual(line in out, chosen is None)
            kwargs = given.call_args.kwargs[f"{checkpointing_argument()}_kwargs"]
            self.assertEqual(kwargs.get("segment_tokens"), chosen)

    @unittest.skipUnless(can_select_checkpoints(), "needs Transformers 5.23")
    def test_layers_by_memory(self):
        """`auto` implies gradient checkpointing, of all layers on a CPU. With memory, the layers are those of the plan."""
        for chosen in (None, 0, 2):
            found = mock.patch.object(finetune, "chosen_checkpoints", return_value=(chosen, None))
            where = contextlib.nullcontext() if chosen is None else found
            options = ("--max-steps=1", "--every-n-layers=auto", "--keep-attention")
            with where, mock.patch.object(finetune, "TrainingArguments", wraps=finetune.TrainingArguments) as given:
                out = self.succeeds(*options, output=self.directory / f"{chosen}")
            line = "--every-n-layers auto: the memory of a step on a CPU is not known, so all layers are checkpointed."
            self.assertEqual(line in out, chosen is None)
            name = checkpointing_argument()
            expected = {"use_reentrant": False, "every_n_layers": chosen or 1, "keep_attention": True}
            self.assertEqual(given.call_args.kwargs[f"{name}_kwargs"], None if chosen == 0 else expected)
            self.assertEqual(given.call_args.kwargs[name], chosen != 0)

    def test_bad_datasets(self):
        start = "^transformers-packed train: --data: "
        expected = (
            f"{start}expected a file, a local directory or a dataset on the Hub, got '{{}}': no such file or directory"
        )
        message = "Couldn't reach 'rows' on the Hub"
        with mock.patch("datasets.load_dataset", side_effect=ConnectionError(message)):
            self.check_error(f"{expected.format('rows')} [(]{message}[)]. Check the path or", data="rows")
        self.check_error("--data: file rows.csv not found", data="rows.csv")
        missing = self.directory / "missing"
        self.check_error(f"{expected.format(missing)} [(].+[^.][)]. Check the path or the name.$", data=missing)
        empty = self.directory / "empty"
        empty.mkdir()
        self.check_error(f"{start}cannot read a dataset from {empty}: .*[^.].$", data=empty)
        parquet = self.directory / "rows.parquet"
        parquet.write_bytes(b"x" * 100)
        self.check_error("expected a parquet file, got .*[^.][.]$", data=parquet)

    def test_bad_outputs(self):
        (self.directory / "file").write_text("x")
        for output, message in (
            (self.directory, "the output of an earlier run of this command, got .*, which holds other files"),
            (self.directory / "file", "expected a directory, got the file"),
            (self.directory / "file" / "below", "not a writable directory"),
        ):
            for resume in ([], ["--resume"]):
                self.check_error(message, *resume, output=output)
        with mock.patch.object(run_folder.tempfile, "TemporaryFile", side_effect=PermissionError):
            self.check_error("not a writable directory")
        self.assertEqual(sorted(path.name for path in self.directory.iterdir()), ["file"])

    def test_training(self):
        arguments = ["--batch-size=3", "--gradient-accumulation-steps=2", "--epochs=2", "--learning-rate=0.01"]
        options = ["--offload", "--every-n-layers=2", "--keep-attention"] if can_select_checkpoints() else []
        options += ["--segment-tokens=64"] * can_cut_rows()
        with mock.patch.object(finetune, "TrainingArguments", wraps=finetune.TrainingArguments) as given:
            out = self.succeeds(*arguments, "--logging-steps=1", "--gradient-checkpointing", *options)
        kwargs = given.call_args.kwargs[f"{checkpointing_argument()}_kwargs"]
        selected = {"offload": True, "every_n_layers": 2, "keep_attention": True} if options else {}
        selected |= {"segment_tokens": 64} if can_cut_rows() else {}
        self.assertEqual(kwargs, {"use_reentrant": False} | selected)
        samples = self.samples()
        self.assertGreater(len(samples), 6)
        steps = 2 * -(-len(samples) // 6)
        tokens = sum(len(sample["input_ids"]) for sample in samples)
        targets = sum((sample["labels"] != -100).sum() for sample in samples)
        self.assertIn(
            f"{len(samples)} samples (prompt-completion) with {tokens} tokens, {targets} of them targets; 0 truncated to 2,048 "
            "tokens, 0 without a target dropped.",
            out,
        )
        self.assertIn(f"{steps} steps, rows of up to 3 samples, 2 per step, learning rate up to 0.01", out)
        self.assertRegex(out, f"with {2 * tokens:,} tokens in [0-9.]+ s, ")
        for op in ("causal_conv1d: reference", "gated_delta_rule: .*reference", r"attention: .*per_document\(sdpa\)"):
            self.assertRegex(out, op)
        self.assertEqual("states of segments" in out, can_cut_rows())
        self.assertNotIn("checkpoint", out)

        trainer = self.trainers[0]
        self.assertEqual(type(trainer.model).__module__, "transformers_packed.models.qwen3_5.modeling_qwen3_5")
        untrained = AutoModelForCausalLM.from_pretrained(self.root / "model", dtype=torch.float32)
        self.assertEqual(len(self.check_first_loss(untrained)), steps)
        self.check_saved(trainer.model)

    def check_first_loss(self, stock):
        """It is the mean over all targets of two batches of three samples, by the stock class on each sample alone."""
        total, count = 0.0, 0
        self.assertEqual([len(features) for features in self.batches[:2]], [3, 3])
        for sample in sum(self.batches[:2], []):
            ids, labels = (torch.tensor(sample[name].tolist()) for name in ("input_ids", "labels"))
            with torch.no_grad():
                logits = stock(ids[None]).logits[0, :-1]
            total += torch.nn.functional.cross_entropy(logits, labels[1:], reduction="sum").item()
            count += int((labels[1:] != -100).sum())
        losses = [entry["loss"] for entry in self.trainers[0].state.log_history if "loss" in entry]
        self.assertAlmostEqual(losses[0], total / count, places=4)
        self.assertLess(losses[-1], losses[0])
        return losses

    def check_saved(self, trained):
        """The stock class loads the saved model and returns the same logits as the trained model."""
        loaded, info = AutoModelForCausalLM.from_pretrained(self.output, output_loading_info=True)
        self.assertEqual(type(loaded).__module__, "transformers.models.qwen3_5.modeling_qwen3_5")
        self.assertFalse(any(info.values()), info)
        got, want = logits(loaded, trained)
        self.assertLess((got - want).abs().max(), 1e-5)
        start = AutoModelForCausalLM.from_pretrained(self.root / "model").state_dict()
        for name, weight in loaded.state_dict().items():
            self.assertFalse(torch.equal(weight, start[name]), f"{name} was not trained")
        config = json.loads((self.output / "config.json").read_text())
        self.assertTrue(config["use_cache"])
        self.assertEqual(config["architectures"], ["Qwen3_5ForCausalLM"])
        tokenizer = AutoTokenizer.from_pretrained(self.output)
        self.assertEqual(tokenizer("a fox")["input_ids"], self.tokenizer("a fox")["input_ids"])
        self.assertEqual(tokenizer.chat_template, THINKING)

    def test_composite_checkpoint(self):
        """Text trains the language model of a vision-language checkpoint, whose weights have other names."""
        vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
        set_seed(1)
        model = AutoModelForImageTextToText.from_config(Qwen3_5Config(text_config=TEXT_CONFIG, vision_config=vision))
        self.save("composite", model)
        out = self.succeeds("--max-steps=2", "--batch-size=2", "--learning-rate=0.01", model="composite")
        self.assertIn("Qwen3_5ForCausalLM from Qwen3_5Config, only its language model: ", out)
        name = "embed_tokens.weight"
        trained = self.trainers[0].model.model.state_dict()[name]
        self.assertLess((trained - model.model.language_model.state_dict()[name]).abs().max(), 0.05)
        self.check_saved(self.trainers[0].model)

    def test_every_turn(self):
        """The losses are those of a run on a record for each turn, also in rows of a bounded length."""
        turns = [user("one"), assistant("a", reasoning_content="z" * 9), user("two"), assistant("b")]
        alone = [turns[:2], [turns[0], turns[1] | {"weight": 0}, *turns[2:]]]
        # So that the turns share more tokens than another document costs.
        system = {"role": "system", "content": "s" * 99}
        losses, rows = [], "--gradient-accumulation-steps=2"
        for name, conversations, *options in (
            ("alone", alone, "--batch-size=2"),
            ("tree", [turns], "--every-turn", "--batch-size=2"),
            ("row", [turns], "--every-turn", "--row-length=512"),
            # The turns have 162 and 178 tokens, and the tree 209.
            ("short_rows", [turns], "--every-turn", "--row-length=200", rows),
        ):
            data, output = self.directory / f"{name}.jsonl", self.directory / name
            data.write_text("".join(json.dumps({"messages": [system, *some]}) + "\n" for some in conversations))
            arguments = ["--max-steps=2", "--logging-steps=1", *options]
            out = self.succeeds(*arguments, data=data, output=output)
            self.assertIn("of them targets; 0 truncated", out)
            losses.append([log["loss"] for log in self.trainers[-1].state.log_history if "loss" in log])
        for found in losses[1:]:
            for loss, expected in zip(found, losses[0], strict=True):
                self.assertAlmostEqual(loss, expected, places=4)
        datasets = [trainer.train_dataset for trainer in self.trainers[1:]]
        for (sample,) in (datasets[0], datasets[1][0]):
            self.assertEqual(len(sample["turns"]), 2)
        self.assertEqual(sorted(len(sample["input_ids"]) for (sample,) in datasets[2]), [162, 178])

    def test_lora_of_experts(self):
        """The experts have adapters only with `--experts`, of the given rank, and stock classes load them."""
        self.save_mixture()
        # The names and shapes that servers read: first `gate_up_proj`, and around it `down_proj`.
        experts = {
            "mlp.experts.base_layer.lora_A.weight": (8 * 4, 32),
            "mlp.experts.base_layer.lora_B.weight": (2 * 16, 8 * 4),
            "mlp.experts.lora_A.weight": (8 * 4, 16),
            "mlp.experts.lora_B.weight": (32, 8 * 4),
        }
        # Releases of PEFT that take the layers of the shared expert for experts find no way to the former.
        shared = [f"mlp.shared_expert.{name}.lora_A.weight" for name in ("gate_proj", "up_proj", "down_proj")]
        command = ["--lora", "--lora-rank=4", "--max-steps=3", "--learning-rate=0.05"]
        for given in ([], ["--experts"]):
            output = self.directory / "".join(["output", *given])
            out = self.succeeds(*command, *given, model="mixture", output=output)
            self.assertIn(f"ForCausalLM with LoRA{', on experts too,' * len(given)} from ", out)
            adapter = load_file(output / "adapter_model.safetensors")
            self.assertFalse((output / "model.safetensors").exists())
            self.assertNotIn("transformers_packed", (output / "adapter_config.json").read_text())
            for layer in range(len(TEXT_CONFIG["layer_types"])):
                start = f"base_model.model.model.layers.{layer}."
                found = {name.removeprefix(start): tuple(x.shape) for name, x in adapter.items() if start in name}
                self.assertEqual(
                    {name: shape for name, shape in found.items() if "experts." in name},
                    experts if given else {},
                )
                self.assertEqual([name in found for name in shared], [True] * 3)
                self.assertNotIn("mlp.gate.lora_A.weight", found)
                self.assertTrue(all(4 in shape for name, shape in found.items() if name not in experts), found)
            stock = AutoModelForCausalLM.from_pretrained(output)
            got, want = logits(stock, self.trainers[-1].model)
            self.assertLess((got - want).abs().max(), 1e-5)
            adapted = [x for name, x in stock.named_parameters() if "experts." in name and "lora_B" in name]
            self.assertTrue(all(x.abs().max() > 1e-3 for x in adapted))
            # The adapter of PEFT, which Transformers does not merge.
            merged = AutoPeftModelForCausalLM.from_pretrained(output).merge_and_unload()
            merged.save_pretrained(output / "merged")
            (merged,) = logits(AutoModelForCausalLM.from_pretrained(output / "merged"))
            self.assertLess((merged - want).abs().max(), 1e-5)
        self.assertEqual(len(adapted), 2 * len(TEXT_CONFIG["layer_types"]))
        self.assertIn("experts_lora", dispatch.implementations_used())

    @unittest.skipUnless("kimi_linear" in OTHERS, "this release has no such family")
    def test_other_families(self):
        """The first loss is that of the stock class on each sample alone, which loads what was trained."""
        set_seed(0)
        family = "kimi_linear"
        self.save(family, AutoModelForCausalLM.from_config(tiny_config(family, vocab_size=264)))
        rows = ["--batch-size=3", "--gradient-accumulation-steps=2"]
        command = [*rows, "--max-steps=2", "--learning-rate=0.05", "--logging-steps=1", "--lora", "--experts"]
        self.succeeds(*command, model=family)
        trainer, stock = self.trainers[0], AutoModelForCausalLM.from_pretrained(self.root / family)
        base = trainer.model.get_base_model()
        self.assertEqual(type(base).__module__, f"transformers_packed.models.{family}.modeling_{family}")
        self.check_first_loss(stock)
        loaded = AutoModelForCausalLM.from_pretrained(self.output)
        self.assertEqual(type(loaded).__module__, f"transformers.models.{family}.modeling_{family}")
        got, want, before = logits(loaded, trainer.model, stock)
        self.assertLess((got - want).abs().max(), 1e-4)
        self.assertGreater((got - before).abs().max(), 1e-2)

    @unittest.skipUnless("olmo_hybrid" in OTHERS, "this release has no such family")
    def save_teacher(self, name="teacher", **sizes):
        set_seed(1)
        config = Qwen3_5TextConfig(**TEXT_CONFIG | {"hidden_size": 24} | sizes)
        self.save(name, AutoModelForCausalLM.from_config(config))
        return self.root / name

    def test_a_teacher(self):
        """Its divergence is a part of the loss and in the log, a resumed run keeps it, and nothing of it is saved."""
        teacher = self.save_teacher()
        options = ["--teacher", teacher, "--distill-beta=0.5", "--logging-steps=1", "--save-steps=1"]
        out = self.succeeds(*options, "--max-steps=2", "--distill-weight=0.25")
        self.assertIn(f"\nDistilling from Qwen3_5ForCausalLM of {teacher}, ", out)
        self.assertIn("trains 0.75 x its own loss with 0.25 x the loss of the divergence from a teacher", out)
        self.assertRegex(out, r"\nstep 2/2, epoch [0-9.]+: loss [0-9.]+, divergence 0.[0-9]+, ")
        loss = self.trainers[-1].model.losses[-1]
        self.assertEqual((loss.weight, loss.beta, loss.temperature), (0.25, 0.5, 1.0))
        _, loading = AutoModelForCausalLM.from_pretrained(self.output, output_loading_info=True)
        self.assertFalse(any(loading.values()), loading)
        err = self.fails(*options, "--max-steps=3", "--distill-weight=0.5", "--resume")
        self.assertIn("--resume: expected the settings of the run", err)
        self.assertIn("got --distill-weight 0.5 instead of 0.25.", err)
        out = self.succeeds(*options, "--max-steps=3", "--distill-weight=0.25", "--resume")
        self.assertIn("\nstep 3/3, ", out)
        loads, moved = models.load_weights, []

        def load(option, *args, **kwargs):
            # bitsandbytes would quantize on a GPU, which may not have room for all of it.
            moved.append((option, host_parameters._LOADS["layers"]))
            return loads(option, *args, **kwargs)

        small = mock.patch.object(host_parameters, "SMALLEST", 512)
        with small, mock.patch.object(models, "load_weights", load):
            host = self.directory / "host"
            out = self.succeeds(*options, "--teacher-in-host-memory", "--max-steps=1", output=host)
        self.assertIn("\nThe teacher's layers in host memory: 0.0 GiB.\n", out)
        self.assertTrue(names_in_host_memory(self.trainers[-1].model.losses[-1].teacher))
        self.assertEqual(moved, [("--model", False), ("--teacher", True)])
        # Without a tokenizer, nobody knows the ids of the teacher.
        for path in teacher.glob("*token*"):
            path.unlink()
        out = self.succeeds("--teacher", teacher, "--max-steps=1", output=self.directory / "other")
        self.assertIn(
            "The ids of tokens are not compared with those of the teacher: --teacher: expected a tokenizer", out
        )

    def test_teachers_that_are_refused(self):
        lacking = self.save_teacher("lacking")
        weights = load_file(lacking / "model.safetensors")
        del weights["model.norm.weight"]
        save_file(weights, lacking / "model.safetensors", {"format": "pt"})
        path = self.save_teacher("swapped") / "tokenizer.json"
        tokens = json.loads(path.read_text())
        words = tokens["model"]["vocab"]
        words["a"], words["b"] = words["b"], words["a"]
        path.write_text(json.dumps(tokens))
        self.save("olmo", AutoModelForCausalLM.from_config(tiny_config("olmo_hybrid", vocab_size=264)))
        host = "--teacher-in-host-memory"
        for message, arguments in (
            (
                f"{host}: .* as --teacher, got .*, a olmo_hybrid. Remove {host}",
                ["--teacher", self.root / "olmo", host],
            ),
            ("--teacher: expected all weights of Qwen3_5ForCausalLM .* 1 missing", ["--teacher", lacking]),
            ("got 300 words", ["--teacher", self.save_teacher("wide", vocab_size=300)]),
            ("--teacher: .* got .*swapped with other ids of 2 tokens \\(a, b\\)", ["--teacher", path.parent]),
            ("--teacher: expected a local directory or a model on the Hub, got .none.:", ["--teacher", "none"]),
            ("expected a teacher with --?distill[-_]beta, got none", ["--distill-beta=0.5"]),
            ("--mtp-only.* with teacher", ["--teacher", lacking, "--mtp-only"]),
        ):
            with self.subTest(message):
                self.check_error(message, *arguments)

    def test_what_other_families_cannot_do(self):
        self.save("other", AutoModelForCausalLM.from_config(tiny_config("olmo_hybrid", vocab_size=264)))
        for option, message in (
            ("--mtp", "expected a head of multi-token prediction"),
            ("--mtp-only", "expected a head"),
            ("--float8", "expected a checkpoint of Qwen3-Next, .*, a olmo_hybrid. Remove --float8"),
            (
                "--layers-in-host-memory --lora",
                "expected a checkpoint of .* as --model, got .*, a olmo_hybrid. Remove --l",
            ),
        ):
            with self.subTest(option):
                first, *others = option.split()
                self.check_error(f"{first}: {message}", first, *others, model="other")

    @unittest.skipUnless(find_spec("bitsandbytes"), "needs bitsandbytes")
    # bitsandbytes would pack the weights of small layers anew for inference on some CPUs, which fails.
    @mock.patch("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)
    def test_base_weights_in_4_bit(self):
        """Linear layers and experts are quantized, and the adapter is that of a base in full precision."""
        from bitsandbytes.nn import Linear4bit

        self.save_mixture()
        command = ["--lora", "--lora-rank=4", "--experts", "--max-steps=3", "--learning-rate=0.05"]
        adapters = []
        for given in ([], ["--load-in-4bit"]):
            output = self.directory / "".join(["output", *given])
            out = self.succeeds(*command, *given, model="mixture", output=output)
            adapters.append(load_file(output / "adapter_model.safetensors"))
        said = "ForCausalLM with LoRA, on experts too, in NF4, from .*: [1-9][0-9,]* of [0-9,]* parameters"
        self.assertRegex(out, said)
        shapes = [{name: (x.shape, x.dtype) for name, x in adapter.items()} for adapter in adapters]
        self.assertEqual(*shapes)
        trained = self.trainers[-1].model.eval()
        layers = [x.weight.quant_state for x in trained.modules() if isinstance(x, Linear4bit)]
        weights = [x.state for x in trained.parameters() if isinstance(x, ExpertsIn4bit)]
        self.assertEqual(len(weights), 2 * len(TEXT_CONFIG["layer_types"]))
        kinds = {(state.quant_type, state.nested, state.dtype) for state in [*layers, *weights]}
        self.assertEqual(kinds, {("nf4", True, torch.float32)})
        # The adapter of the values that were trained with: those of the base in 4 bit.
        settings = Namespace(load_in_4bit=True, lora=False, attn=None, optim=DEFAULT)
        base = models.load_model(str(self.root / "mixture"), settings, torch.float32)
        again, stock = PeftModel.from_pretrained(base, output), AutoPeftModelForCausalLM.from_pretrained(output)
        want, got, whole = logits(trained, again, stock)
        self.assertLess((got - want).abs().max(), 1e-5)
        (merged,) = logits(stock.merge_and_unload())
        self.assertLess((merged - whole).abs().max(), 1e-5)
        self.assertLess(total_relative_error({"logits": whole}, {"logits": want}), 0.3)

    @shows_for_each([*FORMATS], "`--load-in-4bit`", says="error")
    @unittest.skipUnless(joins_stored_experts(), "needs Transformers 5.21")
    def test_a_quantized_base_in_4_bit(self, name):
        config = Qwen3_5TextConfig(**TEXT_CONFIG)
        config.quantization_config = FORMATS[name][1]
        config.save_pretrained(self.directory)
        with self.assertRaisesRegex(ValueError, "with --load-in-4bit, got .*, whose weights are in .* Remove --load"):
            models.supported_config(str(self.directory), Namespace(load_in_4bit=True))

    @shows("fp8", "`--load-in-4bit`", says="error")
    def test_a_base_that_is_stored_in_fp8(self):
        config = Qwen3_5TextConfig(**TEXT_CONFIG)
        config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        config.save_pretrained(self.directory)
        settings = Namespace(load_in_4bit=False)
        self.assertEqual(stored_as(models.supported_config(str(self.directory), settings)).title, "FP8")
        settings.load_in_4bit = True
        message = "16 or 32 bit with --load-in-4bit, got .*, whose weights are in FP8. Remove --load-in-4bit"
        with self.assertRaisesRegex(ValueError, message):
            models.supported_config(str(self.directory), settings)
        settings = Namespace(load_in_4bit=False, lora=False, mtp_only=False)
        with self.assertRaisesRegex(ValueError, "16 or 32 bit, got .*, whose weights are in FP8. Add --lora"):
            models.supported_config(str(self.directory), settings)
        settings.mtp_only = True
        models.supported_config(str(self.directory), settings)
        options = Namespace(
            model=str(self.directory), dtype="auto", float8=False, lora=True, experts=False, load_in_4bit=False
        )
        with self.assertRaisesRegex(ValueError, "weights are drawn here, got .*, in FP8. Pass the one that"):
            models.config_and_dtype(options)

    @unittest.skipUnless(joins_stored_experts(), "needs Transformers 5.21")
    @shows("nvfp4", "training goes on after a stop")
    def test_a_quantized_checkpoint(self):
        """LoRA trains on its weights as they are, goes on after a stop, and its adapter is one of the checkpoint."""
        set_seed(0)
        config = Qwen3_5MoeTextConfig(**TEXT_CONFIG, **EXPERTS)
        write(AutoModelForCausalLM.from_config(config), self.directory / "base", "nvfp4")
        make_tokenizer(THINKING).save_pretrained(self.directory / "base")
        command = ["--lora", "--lora-rank=4", "--experts", "--max-steps=2", "--save-steps=1", "--learning-rate=0.05"]
        base, whole = {"model": self.directory / "base"}, self.directory / "whole"
        out = self.succeeds(*command, output=whole, **base)
        said = "ForCausalLM with LoRA, on experts too, in NVFP4, from .*: [1-9][0-9,]* of [0-9,]* parameters"
        self.assertRegex(out, said)
        trained = self.trainers[-1].model.eval()
        self.assertGreater(sum(isinstance(x, PackedWeight) for x in trained.parameters()), 8)
        self.interrupted(*command, steps=1, **base)
        self.succeeds(*command, "--resume", **base)
        adapters = [load_file(x / "adapter_model.safetensors") for x in (whole, self.output)]
        self.assertEqual(adapters[0].keys(), adapters[1].keys())
        self.assertTrue(all(torch.equal(x, adapters[1][name]) for name, x in adapters[0].items()))
        settings = Namespace(load_in_4bit=False, lora=False, attn=None, optim=DEFAULT)
        base = models.load_model(str(self.directory / "base"), settings, torch.float32)
        want, got = logits(trained, PeftModel.from_pretrained(base, self.output))
        self.assertLess((got - want).abs().max(), 1e-5)

    def test_the_names_of_a_whole_model(self):
        """A vision-language model loads the adapter of its language model with `language_model` in the names."""
        vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
        set_seed(1)
        config = Qwen3_5MoeConfig(text_config={**TEXT_CONFIG, **EXPERTS}, vision_config=vision)
        self.save("whole_mixture", AutoModelForImageTextToText.from_config(config))
        command = ["--lora", "--experts", "--lora-rank=4", "--max-steps=3", "--learning-rate=0.05"]
        self.succeeds(*command, model="whole_mixture")
        (block,) = (block for block in pages.blocks(LORA_PAGE.read_text()) if "language_model" in block.code)
        shutil.copytree(self.output, self.directory / "adapter")
        with contextlib.chdir(self.directory):
            exec(block.code, {})
        base = AutoModelForImageTextToText.from_pretrained(self.root / "whole_mixture")
        (before,) = logits(base)
        found, want = logits(PeftModel.from_pretrained(base, self.directory / "served"), self.trainers[0].model)
        self.assertLess((found - want).abs().max(), 1e-5)
        self.assertGreater((found - before).abs().max(), 1e-3)

    def test_experts_of_other_models(self):
        self.check_error(
            "--experts: expected a mixture of experts as --model, got .*model, a qwen3_5_text. Remove --experts.",
            "--lora",
            "--experts",
        )
        expected = "--lora-rank: expected a rank of at most 64 with --experts, got 65. Lower it."
        self.check_error(expected, "--lora", "--experts", "--lora-rank=65")
        for given, message in (
            (["--experts"], "--experts needs --lora: without it, experts are trained as all parameters are"),
            (["--load-in-4bit"], "--load-in-4bit needs --lora: weights in 4 bit are not trained"),
            (["--experts-in-host-memory"], "--experts-in-host-memory needs --lora: trained experts stay on the GPU"),
            (["--layers-in-host-memory"], "--layers-in-host-memory needs --lora: trained layers stay on the GPU"),
            (["--teacher-in-host-memory"], "--teacher-in-host-memory needs --teacher: there is no other model"),
        ):
            self.assertIn(message, self.train(*given)[2])

    @parameterized.expand([("plain", []), ("4_bit", ["--load-in-4bit"])])
    # bitsandbytes would pack the weights of small layers anew for inference on some CPUs, which fails.
    @mock.patch("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)
    @shows("nf4", "`--load-in-4bit`", "experts in host memory", "training goes on after a stop")
    def test_experts_in_host_memory(self, _, given):
        """The adapter is that of a run with experts on the device, after a stop too."""
        self.save_mixture()
        command = [*given, "--lora", "--lora-rank=4", "--experts", "--max-steps=2", "--save-steps=1"]
        command += ["--learning-rate=0.05", "--gradient-checkpointing"]
        whole, where = self.directory / "whole", {"model": "mixture"}
        self.succeeds(*command, output=whole, **where)
        command.append("--experts-in-host-memory")
        with copied_on_a_cpu() as copies:
            self.interrupted(*command, steps=1, **where)
            out = self.succeeds(*command, "--resume", **where)
        self.assertEqual(copies.copies.copies, 2 * 2 * len(TEXT_CONFIG["layer_types"]))
        self.assertIn("\nExperts in host memory: 0.0 GiB.\n", out)
        self.assertEqual(len(names_in_host_memory(self.trainers[-1].model)), 2 * len(TEXT_CONFIG["layer_types"]))
        self.check_same_weights(whole, self.output)

    @parameterized.expand([("plain", []), ("4_bit", ["--load-in-4bit"])])
    @mock.patch("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)
    def test_layers_in_host_memory(self, _, given):
        """The adapter is that of a run with layers on the device."""
        command = [*given, "--lora", "--lora-rank=4", "--max-steps=2", "--learning-rate=0.05"]
        whole = self.directory / "whole"
        self.succeeds(*command, "--gradient-checkpointing", output=whole)
        with copied_on_a_cpu() as copies, mock.patch.object(host_parameters, "SMALLEST", 256):
            out = self.succeeds(*command, "--layers-in-host-memory", "--gradient-checkpointing")
        # The device has both of two layers.
        self.assertEqual(copies.copies.copies, len(TEXT_CONFIG["layer_types"]))
        self.assertIn("\nLayers in host memory: 0.0 GiB.\n", out)
        self.assertGreater(len(names_in_host_memory(self.trainers[-1].model)), 4 * len(TEXT_CONFIG["layer_types"]))
        self.check_same_weights(whole, self.output)

    def test_experts_in_host_memory_of_two_processes(self):
        """The processes of a launcher have no group when they load the model, and share its experts all the same."""
        self.save_mixture()
        command = [f"--model={self.root / 'mixture'}", f"--data={self.root / 'pairs.jsonl'}", "--max-steps=2"]
        command += ["--lora", "--lora-rank=4", "--learning-rate=0.05", "--experts-in-host-memory"]
        script = self.directory / "command.py"
        script.write_text(TRAINS_AND_COUNTS)
        first, second = run_script(script, "train", *command, f"--output={self.output}", processes=2)
        self.assertEqual((first.status, second.status), (0, 0), first.stderr + second.stderr)
        self.assertIn("\nExperts in host memory: 0.0 GiB, once for all processes of a machine.\n", first.stdout)
        self.assertNotIn("host memory", first.stderr + second.stderr)
        # The training has not made a process copy them.
        for process in (first, second):
            shared, on_host = map(int, process.stdout.split()[-2:])
            self.assertEqual((shared, on_host > 0), (on_host, True))
        self.assertTrue((self.output / "adapter_model.safetensors").exists())

    def test_experts_in_host_memory_of_other_runs(self):
        option = "--experts-in-host-memory"
        expected = f"{option}: expected a mixture of experts as --model, got .*model, a qwen3_5_text. Remove {option}."
        self.check_error(expected, "--lora", option)
        expected = f"{option}: expected no --cuda-graphs, got it. A graph would read the experts at one address."
        self.check_error(expected, "--lora", option, "--cuda-graphs")
        option = "--layers-in-host-memory"
        expected = f"{option}: expected no --cuda-graphs, got it. A graph would read the layers at one address."
        self.check_error(expected, "--lora", option, "--cuda-graphs")

    def test_float8(self):
        self.save("deep", AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**DEEP_CONFIG)))
        with mock.patch.object(float8, "_LEAST_WORK", 0):
            self.succeeds("--float8", "--max-steps=1", "--lora", model="deep")
        self.assertIn("linear_float8_lora", dispatch.implementations_used())

    def test_float8_is_checked_first(self):
        with mock.patch.object(models, "verify", return_value="needs another GPU"):
            self.check_error("--float8: expected a device and a dtype .*: it needs another GPU", "--float8")

    def test_a_dataset(self):
        """Create a directory that `datasets` loads. In its table every record has the columns of all others."""
        source = self.directory / "dataset"
        source.mkdir()
        rows = [[user("a"), assistant("b")], [user("c"), assistant("d", reasoning_content="e"), user("f", name="g")]]
        lines = [json.dumps({"messages": row}) + "\n" for row in [*rows, *rows]]
        (source / "train.jsonl").write_text("".join(lines))
        with mock.patch("datasets.config.HF_DATASETS_CACHE", self.directory / "cache"):
            out = self.succeeds("--split=train[:50%]", "--max-steps=1", data=source)
            self.assertIn("2 samples (messages)", out)
            want = make_samples(records(*({"messages": row} for row in rows)), self.tokenizer, 99).data
            for got, sample in zip(self.trainers[0].train_dataset, want, strict=True):
                self.assertEqual(got["input_ids"].tolist(), sample["input_ids"].tolist())
                self.assertEqual(got["labels"].tolist(), sample["labels"].tolist())
            output = self.directory / "other"
            err = self.fails("--split=test", data=source, output=output)
            self.assertFalse(output.exists())
            self.assertRegex(err, "a dataset with the split 'test', got .*Unknown split")

    @parameterized.expand(
        [
            ("full", [], {}),
            ("muon", ["--optim=muon"], {"model": "mixture"}),
            (
                "4_bit",
                ["--lora", "--experts", "--load-in-4bit", "--optim=adamw_torch_4bit"],
                {"model": "mixture"},
            ),
        ]
    )
    def test_resume(self, _, arguments, where):
        """An interrupted run resumes to exactly the weights of an uninterrupted one."""
        # A compiled step of torchao takes seconds for each shape of a weight.
        self.enterContext(mock.patch.object(torch, "compile", lambda function, **kwargs: function))
        if where:
            self.save_mixture()
        command = [*arguments, "--max-steps=2", "--batch-size=2", "--learning-rate=0.02", "--warmup-steps=1"]
        whole = self.directory / "whole"
        self.succeeds(*command, output=whole, **where)
        command += ["--save-steps=1"]
        err = self.interrupted(*command, steps=1, **where)
        said = f"step 1; {self.output}/checkpoint-1 is complete; --resume continues from it\n"
        self.assertEqual(err, f"transformers-packed train: interrupted at {said}")
        # The files of a run that is killed while it writes a checkpoint.
        (self.output / "checkpoint-2").mkdir()
        (self.output / "checkpoint-2" / "trainer_state.json").write_text('{"epoch": 1')
        out = self.succeeds(*command, "--resume", **where)
        self.assertIn(f"Resuming from {self.output}/checkpoint-1.", out)
        self.assertEqual(self.trainers[-1].state.global_step, 2)
        self.check_same_weights(whole, self.output)

    def test_a_run_is_resumed_by_its_own_command_alone(self):
        command = ["--lora", "--max-steps=2", "--save-steps=1", "--learning-rate=0.02"]
        self.interrupted(*command, steps=1)
        for given, message in (
            (command, "which holds an earlier run. Add --resume to continue that run"),
            (
                [*command, "--resume", "--seed=5", "--learning-rate=0.03"],
                "got --learning-rate 0.03 instead of 0.02; --seed 5 instead of 0. Use the command of that run",
            ),
            ([*command, "--resume", "--max-length=5"], "got other samples. Use the command of that run"),
            ([*command, "--resume", "--optim=paged_adamw_8bit"], "got --optim paged_adamw_8bit instead of adamw"),
            ([*command[1:], "--resume"], "got --lora-rank None instead of 16"),
            ([*command, "--resume", "--seed=5", "--max-steps=3"], "got --seed 5 instead of 0. Use"),
        ):
            self.assertRegex(self.fails(*given), message)
        out = self.succeeds(*command, "--resume", "--max-steps=3")
        self.assertIn("The run goes on with --max-steps 3 instead of 2. The learning rate follows the new number", out)
        self.assertEqual(self.trainers[-1].state.global_step, 3)

    def interrupted(self, *command, steps, **where):
        """Interrupt the command after some steps. Return what it says."""
        original = CallbackHandler.on_step_begin

        def on_step_begin(handler, args, state, control):
            if state.global_step == steps:
                raise KeyboardInterrupt
            return original(handler, args, state, control)

        with mock.patch.object(CallbackHandler, "on_step_begin", on_step_begin):
            status, _, err = self.train(*command, **where)
        self.assertEqual(status, 130)
        return err

    def check_same_weights(self, one, other):
        name = "adapter_model.safetensors" if (one / "adapter_config.json").exists() else "model.safetensors"
        weights, others = (load_file(directory / name) for directory in (one, other))
        self.assertEqual(weights.keys(), others.keys())
        for key, weight in weights.items():
            self.assertTrue(torch.equal(weight, others[key]), key)

    def test_resume_before_the_first_checkpoint_and_after_the_end(self):
        command = ["--max-steps=2", "--learning-rate=0.02"]
        whole = self.directory / "whole"
        self.succeeds(*command, "--resume", output=whole)
        err = self.interrupted(*command, steps=1)
        self.assertEqual(
            err,
            "transformers-packed train: interrupted at step 1; no checkpoint was written, so the same command starts "
            "from the beginning\n",
        )
        out = self.succeeds(*command, "--resume")
        self.assertIn(f"No checkpoint in {self.output} yet: starting from the beginning.\n", out)
        self.check_same_weights(whole, self.output)
        self.assertRegex(
            self.fails(*command, "--resume"), "an unfinished run, or a run with checkpoints, got a finished run"
        )

    def test_starting_over_before_the_first_checkpoint(self):
        """The folder then holds only the settings, and perhaps an incomplete checkpoint."""
        command = ["--max-steps=2", "--learning-rate=0.02"]
        whole = self.directory / "whole"
        self.succeeds(*command, output=whole)
        self.interrupted(*command, steps=1)
        settings = self.output / run_folder.SETTINGS_FILE
        before = settings.read_bytes()

        other = self.output / "notes.txt"
        other.write_text("x")
        self.assertRegex(
            self.fails(*command),
            "a new or empty directory, got .*/output, which holds other files [(]notes.txt[)]. Remove them",
        )
        self.assertEqual((other.read_text(), settings.read_bytes()), ("x", before))
        other.unlink()

        (self.output / "partial" / "checkpoint-2").mkdir(parents=True)
        out = self.succeeds(*command)
        self.assertIn(f"The earlier run in {self.output} wrote no checkpoint: starting over.\n", out)
        self.assertNotIn("starting over", self.train(*command, output=self.directory / "first")[1])
        self.check_same_weights(whole, self.output)
        self.assertFalse((self.output / "partial").exists())

        self.assertRegex(self.fails(*command), "which holds a finished run. Choose another --output.")

    @contextlib.contextmanager
    def small_disk(self, method, size, after=0):
        """From a later call of a Trainer method on, limit files to `size` bytes."""
        original, calls = getattr(Trainer, method), []

        def limited(trainer, *args, **kwargs):
            calls.append(None)
            if len(calls) <= after:
                return original(trainer, *args, **kwargs)
            before = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
            try:
                return original(trainer, *args, **kwargs)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, before)

        with mock.patch.object(Trainer, method, limited):
            yield

    def check_nothing_partial(self, *checkpoints):
        names = sorted(path.name for path in self.output.iterdir())
        self.assertEqual(names, [*checkpoints, run_folder.SETTINGS_FILE])

    def test_a_full_disk_while_a_checkpoint_is_written(self):
        command = ["--max-steps=5", "--learning-rate=0.02", "--batch-size=2"]
        whole = self.directory / "whole"
        self.succeeds(*command, output=whole)
        command += ["--save-steps=2"]
        with self.small_disk("_save_optimizer_and_scheduler", 20_000, after=1):
            err = self.fails(*command)
        self.assertEqual(len(err.splitlines()), 1, err)
        self.assertRegex(
            err, "train: checkpoint-4 cannot be written to .*/output, with [0-9,]+ MiB of free space [(].+[)]; "
        )
        self.assertIn(f"; {self.output}/checkpoint-2 is complete; --resume continues from it. Free space ", err)
        self.check_nothing_partial("checkpoint-2")
        self.assertTrue(
            err.endswith("Free space (checkpoint-4 needs about 1 MiB), or choose another --output.\n"), err
        )
        out = self.succeeds(*command, "--resume")
        self.assertIn(f"Resuming from {self.output}/checkpoint-2.", out)
        self.check_same_weights(whole, self.output)

    @parameterized.expand([(), ("--lora",)])
    def test_bytes_of_a_checkpoint(self, *options):
        """They are about those of the files of weights and of the optimizer."""
        found, write = [], RunFolderTrainer._write

        def measured(trainer, what, *args):
            write(trainer, what, *args)
            found.append((what, trainer._size(what.startswith("checkpoint-"))))

        with mock.patch.object(RunFolderTrainer, "_write", measured):
            self.succeeds("--max-steps=2", "--save-steps=2", *options)
        names = [*self.output.glob("*.safetensors"), *(self.output / "checkpoint-2").glob("optimizer.pt")]
        weights, states = (path.stat().st_size for path in names)
        self.assertEqual([what for what, _ in found], ["checkpoint-2", "the model"])
        for size, (_, estimate) in zip((weights + states, weights), found, strict=True):
            self.assertTrue(0.7 * size < estimate < size, (size, estimate))

    def test_a_full_disk_while_the_model_is_written(self):
        command = ["--max-steps=3", "--learning-rate=0.02", "--batch-size=2", "--save-steps=2"]
        with self.small_disk("save_model", 20_000, after=2):
            err = self.fails(*command)
        self.assertEqual(len(err.splitlines()), 1, err)
        self.assertRegex(err, "the model cannot be written to .*checkpoint-3 is complete; --resume continues from it")
        self.check_nothing_partial("checkpoint-2", "checkpoint-3")
        out = self.succeeds(*command, "--resume")
        self.assertIn("No steps left to train.", out)
        saved = load_file(self.output / "model.safetensors")
        # If saving fails, the existing model is kept.
        with self.small_disk("save_model", 20_000):
            self.fails(*command, "--resume")
        self.assertEqual(load_file(self.output / "model.safetensors").keys(), saved.keys())
        AutoModelForCausalLM.from_pretrained(self.output)

    def test_damaged_checkpoints_are_named(self):
        command = ["--max-steps=5", "--batch-size=2", "--save-steps=2"]
        self.interrupted(*command, steps=4)
        for name in ("model.safetensors", "optimizer.pt", "trainer_state.json"):
            damaged = Path(shutil.copytree(self.output, self.directory / name))
            for path in damaged.glob(f"checkpoint-*/{name}"):
                path.write_bytes(path.read_bytes()[:-50])
            err = self.fails(*command, "--resume", output=damaged)
            wrong = [f"{damaged}/checkpoint-{n}, which is incomplete or damaged [(]{name}: [^;]+[)]" for n in (4, 2)]
            wrong = f"--resume: .* got {'; '.join(wrong)}. Restore it, or delete it"
            self.assertRegex(err, f"^transformers-packed train: {wrong}")
        (self.output / "checkpoint-4" / "model.safetensors").unlink()
        out = self.succeeds(*command, "--resume")
        self.assertRegex(out, "Skipped .*/checkpoint-4, which is incomplete or damaged [(]no weights[)][.]")
        self.assertIn(f"Resuming from {self.output}/checkpoint-2.", out)

    # One of each package.
    @parameterized.expand([*{x.package: name for name, x in OPTIMIZERS.items() if name in [*OptimizerNames]}.values()])
    def test_optimizers(self, name):
        """Weights have the dtype in which the optimizer loses no update."""
        self.enterContext(mock.patch.object(torch, "compile", lambda function, **kwargs: function))
        optimizer = OPTIMIZERS[name]
        if find_spec(optimizer.package) is None:
            self.skipTest(f"needs {optimizer.package}")
        with self.assertNoLogs("transformers_packed.training.callbacks.weights", "WARNING"):
            out = self.succeeds("--max-steps=1", "--optim", name)
        self.assertEqual("The first step compiles" in out, optimizer.package == "torchao")
        trainer, dtype = self.trainers[-1], getattr(torch, optimizer.weights)
        self.assertEqual({x.dtype for x in load_file(self.output / "model.safetensors").values()}, {dtype})
        self.assertTrue(type(unwrapped(trainer.optimizer)).__module__.startswith(f"{optimizer.package}."))
        self.assertFalse(trainer.args.bf16)

    def test_gradient_release(self):
        """Of the stand-in: no clipping, and no gradient before a step."""
        released = []

        class Gone(TrainerCallback):
            def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
                released.append(all(x.grad is None for x in model.parameters()))

        with self.flash(), mock.patch.object(finetune, "_Progress", lambda *given: Gone()):
            self.succeeds("--max-steps=2", "--optim=flash_adamw_release", "--learning-rate=0.01")
        self.assertEqual(released, [True, True])
        trainer = self.trainers[-1]
        self.assertEqual((trainer.args.max_grad_norm, trainer.model.dtype), (0, torch.bfloat16))
        self.assertEqual(trainer.optimizer.param_groups[0]["betas"], (0.9, 0.999))

    @contextlib.contextmanager
    def flash(self):
        found = lambda name: name == "flashoptim" or find_spec(name)  # noqa: E731
        with (
            mock.patch.dict(sys.modules, {"flashoptim": flashoptim()}),
            mock.patch.object(early, "find_spec", found),
            mock.patch.object(finetune, "_has_gpu", lambda: True),
        ):
            yield

    @parameterized.expand(
        [
            (["--lora"], "--optim: expected trained weights in bfloat16 with flash_adamw_release, got float32. LoRA"),
            (
                ["--dtype=float32"],
                "--optim: expected weights in bfloat16 with flash_adamw_release, got --dtype float32",
            ),
            (["--gradient-accumulation-steps=2"], "one row per step with flash_adamw_release, got 2 rows"),
            (["--cuda-graphs"], "no --cuda-graphs with flash_adamw_release, got it"),
        ]
    )
    def test_what_an_optimizer_excludes(self, arguments, message):
        with self.flash():
            self.check_error(message, "--optim=flash_adamw_release", *arguments)

    def test_processes_and_machines_of_an_optimizer(self):
        message = "needs flashoptim: pip install flashoptim"
        with mock.patch.object(early, "find_spec", lambda name: None):
            self.check_error(message, "--optim=flash_adamw")
        self.check_error("expected all weights trained with muon, got LoRA adapters.", "--optim=muon", "--lora")
        with self.flash(), mock.patch.object(finetune, "_has_gpu", lambda: False):
            self.check_error("expected a GPU with flash_adamw, got none", "--optim=flash_adamw")
        with self.flash(), mock.patch.dict("os.environ", {"WORLD_SIZE": "2"}):
            self.check_error("expected one process with flash_adamw_release, got 2", "--optim=flash_adamw_release")

    def test_bfloat16(self):
        """Under autocast, trained weights stay float32, and the base of an adapter is bfloat16."""
        for arguments, base in (([], torch.float32), (["--lora"], torch.bfloat16)):
            output = self.directory / str(base)
            out = self.succeeds("--dtype=bfloat16", "--max-steps=1", *arguments, output=output)
            self.assertIn("bfloat16 on cpu", out)
            for name, parameter in self.trainers[-1].model.named_parameters():
                want = torch.float32 if parameter.requires_grad else base
                self.assertEqual(parameter.dtype, want, name)
