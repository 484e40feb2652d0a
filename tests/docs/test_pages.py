"""The code blocks of the documentation: Python blocks run, and commands refer to existing files and options."""

import io
import re
import shlex
import shutil
import tempfile
import traceback
import unittest
from contextlib import chdir, redirect_stderr
from functools import cache
from pathlib import Path

import torch
from common import pages
from common.processes import run_script
from parameterized import parameterized
from safetensors.torch import load_file

from transformers_packed.cli.options import parse
from transformers_packed.models.versions import can_cut_rows


# A script that `ScriptsTest` runs.
TWO_PROCESSES = "runs in two processes"
# Permitted reasons for not running a Python block.
REASONS = {
    "needs a GPU",
    "needs two GPUs",
    "needs four processes",
    "changes a checkout of Transformers",
    "needs the network",
    "needs a server with vLLM",
    "needs sentence-transformers",
    TWO_PROCESSES,
}
# Pages that need Transformers 5.24.
LATER = {"docs/how_to/long_rows.md", "docs/how_to/quantized_checkpoints.md"}
SCRIPT = pages.ROOT / "tests" / "common" / "pages.py"
PAGES = {name: (pages.ROOT / name).read_text(encoding="utf-8") for name in pages.pages()}
WITH_PYTHON = [
    name
    for name, text in PAGES.items()
    if any(block.language == "python" and block.not_run is None for block in pages.blocks(text))
]
# The loop of the same page, written with `Trainer`, saves this checkpoint.
AS_TRAINER = """
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from transformers_packed import DataCollatorWithFlattening, PackingDataset, patch_model
from transformers_packed.data.records.samples import make_samples, read_records

tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3.5-0.8B")
samples = make_samples(read_records("examples/chats.jsonl"), tokenizer, max_length=1024).data
rows = PackingDataset(samples, max_length=1024, gradient_accumulation_steps=2)
model = patch_model(AutoModelForCausalLM.from_pretrained("Qwen/Qwen3.5-0.8B", dtype="float32"))
args = TrainingArguments(
    "checkpoints", num_train_epochs=2, per_device_train_batch_size=1, gradient_accumulation_steps=2, learning_rate=2e-5,
    lr_scheduler_type="constant", train_sampling_strategy="sequential", report_to="none"
)
collator = DataCollatorWithFlattening(model=model, return_boundaries=True)
Trainer(model, args, train_dataset=rows, data_collator=collator).train()
model.save_pretrained("tuned_by_trainer")
"""
# Scripts that readers write themselves.
OWN_SCRIPTS = {"train.py", "two_processes.py"}
MAKE_TARGETS = set(re.findall(r"^([a-z-]+):", (pages.ROOT / "Makefile").read_text(encoding="utf-8"), re.M))


def run(page: str) -> None:
    """Run a page in a process and a folder of its own, so that registrations and patches do not affect another page."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(files().name, folder, dirs_exist_ok=True)
        (done,) = run_script(SCRIPT, folder, page, folder=folder, CUDA_VISIBLE_DEVICES="")
    if done.status:
        raise RuntimeError(f"exit status {done.status}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


@cache
def files() -> tempfile.TemporaryDirectory:
    """Return a folder with the files of a reader, which lasts as long as the tests."""
    folder = tempfile.TemporaryDirectory()
    (done,) = run_script(SCRIPT, folder.name, CUDA_VISIBLE_DEVICES="")
    if done.status:
        raise RuntimeError(done.stderr[-3000:])
    return folder


def commands(text: str):
    """Yield the commands of the `bash` blocks of a page as lists of words, without pipes and redirections."""
    for block in pages.blocks(text):
        if block.language != "bash" or block.not_run is not None:
            continue
        for line in block.code.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            end = next((n for n, word in enumerate(words) if word in ("|", ">", "&&", ";", "&")), len(words))
            if words := words[:end]:
                yield words


def wrong_with(words: list[str]) -> str | None:
    """Return the error if a command would fail immediately, as far as this is detectable."""
    if missing := [word for word in words if word.startswith("examples/") and not (pages.ROOT / word).is_file()]:
        return f"there is no {missing[0]}"
    if "transformers-packed" in words:
        stderr = io.StringIO()
        with redirect_stderr(stderr):
            try:
                parse(words[words.index("transformers-packed") + 1 :])
            except SystemExit as exit:
                return stderr.getvalue() if exit.code else None
        return None
    while re.match(r"\w+=", words[0]) and len(words) > 1:
        words = words[1:]
    if words[0] == "make":
        unknown = {word for word in words[1:] if "=" not in word} - MAKE_TARGETS
        return f"no target {', '.join(sorted(unknown))} in the Makefile" if unknown else None
    if words[0] in ("accelerate", "python", "torchrun"):
        for word in words[1:]:
            if word.endswith((".py", ".yaml")) and word not in OWN_SCRIPTS and not (pages.ROOT / word).is_file():
                return f"there is no {word}"
    return None


class PagesTest(unittest.TestCase):
    @parameterized.expand(WITH_PYTHON)
    def test_python_blocks_run(self, name):
        if name in LATER and not can_cut_rows():
            self.skipTest("needs Transformers 5.24")
        run(name)

    @parameterized.expand(PAGES)
    def test_commands_name_what_exists(self, name):
        # An output file of a command must not exist as a folder.
        with tempfile.TemporaryDirectory() as folder, chdir(folder):
            for words in commands(PAGES[name]):
                with self.subTest(command=shlex.join(words)):
                    self.assertIsNone(wrong_with(words))

    @parameterized.expand(PAGES)
    def test_reasons_not_to_run_are_listed(self, name):
        reasons = {block.not_run for block in pages.blocks(PAGES[name])} - {None}
        self.assertEqual(reasons - REASONS, set())


class ScriptsTest(unittest.TestCase):
    """What other tests cannot run: scripts that start in several processes."""

    def test_two_processes_and_trainer_train_as_the_loop(self):
        page = "docs/how_to/own_loop.md"
        (script,) = [block.code for block in pages.blocks(PAGES[page]) if block.not_run == TWO_PROCESSES]
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            shutil.copytree(files().name, folder, dirs_exist_ok=True)
            both, trainer = folder / "two_processes.py", folder / "as_trainer.py"
            both.write_text(script, encoding="utf-8")
            trainer.write_text(AS_TRAINER, encoding="utf-8")
            for path, arguments, processes in ((SCRIPT, (name, page), 1), (both, (), 2), (trainer, (), 1)):
                done = run_script(path, *arguments, processes=processes, folder=folder, CUDA_VISIBLE_DEVICES="")
                self.assertFalse(any(one.status for one in done), [one.stderr[-3000:] for one in done])
            folders = "tuned", "tuned_by_two", "tuned_by_trainer"
            alone, *others = (load_file(folder / name / "model.safetensors") for name in folders)
        for other in others:
            torch.testing.assert_close(other, alone, rtol=1e-4, atol=1e-6)

    def test_two_processes_on_a_cpu_share_the_samples(self):
        variables = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
        arguments = "--max-steps", "2", "--batch-size", "4"
        with tempfile.TemporaryDirectory() as name:
            script = pages.ROOT / "examples" / "trainer.py"
            first, _ = run_script(script, *arguments, processes=2, folder=name, **variables)
        self.assertEqual(first.status, 0, first.stderr[-3000:])
        self.assertIn("Padding-free: 16 documents", first.stdout + first.stderr)


class BlocksTest(unittest.TestCase):
    """The parser finds every fence, because blocks that it misses would not run."""

    TEXT = '```python\na = 1\n```\n\nText\n\n=== "Tab"\n\n    ```python\n    a += 1\n    b = a / (a - 2)\n    ```\n'

    def test_all_fences_are_found(self):
        for name, text in PAGES.items():
            with self.subTest(page=name):
                opened = re.findall(r"^ *```\w+", text, re.M)
                self.assertEqual(len(list(pages.blocks(text))), len(opened))

    def test_a_block_that_fails_is_named_by_its_line(self):
        try:
            pages.run_blocks("page.md", self.TEXT)
        except ZeroDivisionError as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
        self.assertEqual((last.filename, last.lineno), ("page.md", 11))
