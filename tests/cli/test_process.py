"""A command in a process of its own: only our lines, and an end by Ctrl-C at any moment."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from common.records import THINKING, assistant, make_tokenizer, user
from scripts.trainer_arms import TINY
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from transformers_packed.cli import process


# Several commands in one process share the imports, which is where other packages have something to say.
SEVERAL = """
import sys
from transformers_packed import cli

for command in sys.argv[1:]:
    sys.argv = ["transformers-packed", *command.split()]
    print(f"{command}: {cli.main()}", flush=True)
"""
# The start of every line of `train --lora`.
TRAIN = (
    "Loading ",
    "6 samples (messages) with ",
    "Padding-free on: ",
    "Qwen3_5ForCausalLM with LoRA from ",
    "Verified packing on ",
    "1 step, rows of up to 8 samples",
    "step 1/1, epoch ",
    "Padding-free: 6 documents ",
    "Saved the adapter ",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("process")
    AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**TINY | {"vocab_size": 264})).save_pretrained(path / "model")
    make_tokenizer(THINKING).save_pretrained(path / "model")
    chats = [json.dumps({"messages": [user("a" * n), assistant("b")]}) + "\n" for n in range(1, 7)]
    (path / "chats.jsonl").write_text("".join(chats))
    return path


def run(folder, *command, **variables):
    """Run Python with what a user's environment has, whatever the tests set."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONWARNINGS", *process._ASKED)
    }
    for name in ("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "TRITON_INTERPRET"):
        environment.pop(name, None)
    command = [sys.executable, *command]
    options = {"cwd": folder, "env": environment | variables, "timeout": 200}
    return subprocess.run(command, capture_output=True, text=True, **options)


def test_only_our_lines(folder):
    train = "train --model model --data chats.jsonl --output adapter --lora"
    quiet = ["doctor --model model", "plan --data chats.jsonl --model model --row-length 64", "env"]
    quiet += ["audit qwen3_5_text --lengths 3 5", "memory --model model --gpus 2 --gpu-memory 9 --row-length 64"]
    done = run(folder, "-c", SEVERAL, train, *quiet, "warmup --model model")
    assert done.returncode == 0
    error = (
        r"transformers-packed warmup: expected a CUDA device, [^\n]+\n"
        if "warmup --model model: 1\n" in done.stdout
        else ""
    )
    assert re.fullmatch(error, done.stderr), done.stderr
    lines = done.stdout.split(f"{train}: 0\n")[0].splitlines()
    assert len(lines) == len(TRAIN)
    assert all(line.startswith(start) for line, start in zip(lines, TRAIN, strict=True)), lines
    # All other commands print nothing but their report, so a line of a package would name it.
    assert all(f"{command}: 0\n" in done.stdout for command in quiet), done.stdout
    assert not re.search("torchao|bitsandbytes|deprecated|Warning|site-packages", done.stdout)


@pytest.mark.slow
def test_processes_of_bench_print_nothing(folder):
    done = run(
        folder, "-m", "transformers_packed.cli", "bench", "--model", "model", "--row-length=32", "--seconds=0.01"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split(" ")[0] for line in done.stdout.splitlines() if line] == [
        *("qwen3_5_text", "arm", "padded,", "packed,", "Speed,", "Memory,", "Relative")
    ]


@pytest.mark.slow
def test_processes_of_demo_print_only_our_lines(folder):
    done = run(folder, "-m", "transformers_packed.cli", "demo", "--samples=40", "--steps=2")
    assert (done.returncode, done.stderr) == (0, "")
    assert not re.search("torchao|bitsandbytes|deprecated|Warning|site-packages|\r", done.stdout)
    assert "training, packed: step 2/2, loss " in done.stdout


WARN = """
import logging, sys, warnings
from transformers_packed.cli import process

process.silence_other_packages()
for name in ("other", "transformers_packed.models"):
    logger = logging.getLogger(name)
    logger.setLevel(logging.INFO)
    logger.warning("%s warns", name)
    logger.error("%s fails", name)
warnings.warn("deprecated")
"""


def test_what_is_silent(folder):
    done = run(folder, "-c", WARN)
    assert done.stderr.splitlines() == [
        "other fails",
        "transformers_packed.models warns",
        "transformers_packed.models fails",
    ]
    # Who asks for warnings gets them.
    for variables in ({"PYTHONWARNINGS": "default"}, {"TRANSFORMERS_VERBOSITY": "info"}):
        assert "other warns" in run(folder, "-c", WARN, **variables).stderr


# An interrupt where Python only reports an exception: in a `__del__`.
IMPORTING = """
import os, signal, sys

class Last:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            Last()

sys.meta_path.insert(0, Interrupt())
from transformers_packed.cli import main
sys.exit(main())
"""


def test_an_interrupt_while_torch_is_imported(folder):
    done = run(folder, "-c", IMPORTING, "doctor")
    assert (done.returncode, done.stderr) == (130, "transformers-packed doctor: interrupted\n")


def test_an_interrupt_while_training(folder):
    command = ["train", "--model=model", "--data=chats.jsonl", "--output=stopped", "--epochs=1e6", "--logging-steps=1"]
    command = [sys.executable, "-m", "transformers_packed.cli", *command]
    running = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in running.stdout:
        if line.startswith("step 2/"):
            break
    time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    _, stderr = running.communicate(timeout=60)
    assert running.returncode == 130
    assert re.fullmatch(r"transformers-packed train: interrupted at step \d+; no checkpoint was written, .*\n", stderr)


WITHOUT_TORCH = """
import sys

sys.modules["torch"] = None
from transformers_packed.cli import main
sys.exit(main())
"""


# `train` stops while a thread compiles and its compiler holds the output of errors, with the error of the second argument.
COMPILING = """
import builtins, os, signal, subprocess, sys, threading
import torch
from transformers_packed import cli
from transformers_packed.cli import finetune
from transformers_packed.ops.backends import flash_qla_kernels

def start(*config):
    started = threading.Event()

    def compile():
        started.set()
        # It ends with this process.
        subprocess.run(["cat"], stdin=os.pipe()[0])

    flash_qla_kernels._GROUPS["row"] = flash_qla_kernels.Kernels(torch.device("cpu"), [compile], [])
    started.wait()

def load(*args):
    if error == "Ctrl-C":
        signal.raise_signal(signal.SIGINT)
    raise getattr(builtins, error)("while a thread compiles")

error = sys.argv.pop()
finetune.start_compiling, finetune.load_model = start, load
sys.exit(cli.main())
"""


@pytest.mark.parametrize(
    "error, status, line",
    [
        pytest.param("ValueError", 1, "transformers-packed train: while a thread compiles", marks=pytest.mark.slow),
        pytest.param("RuntimeError", 1, "RuntimeError: while a thread compiles", marks=pytest.mark.slow),
        pytest.param(
            "KeyboardInterrupt",
            130,
            "transformers-packed train: interrupted while a thread compiles",
            marks=pytest.mark.slow,
        ),
        ("Ctrl-C", 130, "transformers-packed train: interrupted"),
    ],
)
def test_the_end_does_not_wait_for_threads_that_compile(folder, error, status, line):
    command = ("train", "--model=model", "--data=chats.jsonl", "--output=ended", error)
    found = run(folder, "-c", COMPILING, *command)
    assert (found.returncode, found.stderr.splitlines()[-1:]) == (status, [line]), found.stderr


def test_an_occupied_folder_is_refused_without_torch(folder):
    done = run(folder, "-c", WITHOUT_TORCH, "train", "--model=model", "--data=chats.jsonl", "--output=model")
    assert done.returncode == 1
    assert done.stderr.startswith("transformers-packed train: --output: expected a new or empty directory"), (
        done.stderr
    )
    assert done.stdout == ""
