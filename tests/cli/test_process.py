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


# Several commands in one process share the imports, which is where other packages have something to say. The last one is
# interrupted while a thread compiles, whose compiler holds the output of errors.
SEVERAL = """
import os, subprocess, sys, threading
from transformers_packed import cli

def start(*config):
    import torch
    from transformers_packed.ops.backends import flash_qla_kernels

    started = threading.Event()

    def compile():
        started.set()
        # It ends with this process.
        subprocess.run(["cat"], stdin=os.pipe()[0])

    flash_qla_kernels._GROUPS["row"] = flash_qla_kernels.Kernels(torch.device("cpu"), [compile], [])
    started.wait()

*commands, last = sys.argv[1:]
for command in commands:
    sys.argv = ["transformers-packed", *command.split()]
    print(f"{command}: {cli.main()}", flush=True)
from transformers_packed.cli import finetune
finetune.start_compiling = start
sys.argv = ["transformers-packed", *last.split()]
sys.exit(cli.main())
"""
# The start of every line of `train --lora`.
TRAIN = (
    "Importing torch and transformers ...",
    "Reading chats.jsonl ...",
    "6 samples (messages) with ",
    "Loading model ...",
    "Padding-free on: ",
    "Qwen3_5ForCausalLM with LoRA from ",
    "Verifying packing ...",
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


def start(folder, *command, **variables):
    """Start Python with what a user's environment has, whatever the tests set."""
    environment = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONWARNINGS", *process._ASKED)
    }
    for name in ("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "TRITON_INTERPRET"):
        environment.pop(name, None)
    options = {"cwd": folder, "env": environment | variables, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # Processes in the background of a shell ignore the signal, and their children would.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen([sys.executable, *command], text=True, **options)
    finally:
        signal.signal(signal.SIGINT, before)


def run(folder, *command, **variables):
    """Return the exit status, and what Python wrote to stdout and stderr."""
    with start(folder, *command, **variables) as running:
        stdout, stderr = running.communicate(timeout=200)
    return running.returncode, stdout, stderr


def test_only_our_lines_and_an_interrupt_while_training(folder):
    """The end does not wait for the thread."""
    train = "train --model model --data chats.jsonl --output adapter --lora"
    quiet = ["doctor --model model", "plan --data chats.jsonl --model model --row-length 64", "env"]
    quiet += ["memory --model model --gpus 2 --gpu-memory 9 --row-length 64"]
    last = "train --model model --data chats.jsonl --output stopped --epochs 1e6 --logging-steps 1"
    running, lines = start(folder, "-c", SEVERAL, train, *quiet, "warmup --model model", last), []
    for line in running.stdout:
        lines.append(line.rstrip("\n"))
        if line.startswith("step 2/"):
            break
    time.sleep(0.1)
    running.send_signal(signal.SIGINT)
    _, stderr = running.communicate(timeout=60)
    error = ""
    if "warmup --model model: 1" in lines:
        error = r"transformers-packed warmup: expected a CUDA device, [^\n]+\n"
    stop = r"transformers-packed train: interrupted at step \d+; no checkpoint was written, .*\n"
    assert running.returncode == 130
    assert re.fullmatch(error + stop, stderr), stderr
    first = lines[: lines.index(f"{train}: 0")]
    assert len(first) == len(TRAIN)
    assert all(line.startswith(start) for line, start in zip(first, TRAIN, strict=True)), first
    # All other commands print nothing but their report, so a line of a package would name it.
    assert all(f"{command}: 0" in lines for command in quiet), lines
    assert not re.search("torchao|bitsandbytes|deprecated|Warning|site-packages", "\n".join(lines))


@pytest.mark.slow
def test_processes_of_bench_print_nothing(folder):
    command = ("bench", "--model", "model", "--row-length=32", "--seconds=0.01")
    status, stdout, stderr = run(folder, "-m", "transformers_packed.cli", *command)
    assert (status, stderr) == (0, "")
    assert [line.split(" ")[0] for line in stdout.splitlines() if line] == [
        *("qwen3_5_text", "arm", "padded,", "packed,", "Speed,", "Memory,", "Relative")
    ]


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
    assert run(folder, "-c", WARN)[2].splitlines() == [
        "other fails",
        "transformers_packed.models warns",
        "transformers_packed.models fails",
    ]
    # Who asks for warnings gets them.
    for variables in ({"PYTHONWARNINGS": "default"}, {"TRANSFORMERS_VERBOSITY": "info"}):
        assert "other warns" in run(folder, "-c", WARN, **variables)[2]


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
    assert run(folder, "-c", IMPORTING, "doctor")[::2] == (130, "transformers-packed doctor: interrupted\n")


WITHOUT_TORCH = """
import sys

sys.modules["torch"] = None
from transformers_packed.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("train --output=model", "--output: expected a new or empty directory"),
        ("train --output=/proc/x", "--output: /proc is not a writable directory. Choose another --output."),
        ("train --output=new --data=chat.jsonl", "--data: file chat.jsonl not found"),
        (
            "train --output=new --data=model/config.json",
            "model/config.json, line 1: expected one JSON object per line",
        ),
        (
            "train --output=new --model=./mdoel",
            "--model: expected a local directory or a model on the Hub, got './mdoel'",
        ),
        ("plan --row-length=9 --data=chat.jsonl", "--data: file chat.jsonl not found"),
    ],
)
def test_what_is_refused_without_torch(folder, command, message):
    name, *given = command.split()
    defaults = ["--model=model", "--data=chats.jsonl"][: 2 if name == "train" else 0]
    status, stdout, stderr = run(folder, "-c", WITHOUT_TORCH, name, *defaults, *given)
    assert (status, stdout) == (1, "")
    assert stderr.startswith(f"transformers-packed {name}: {message}"), stderr
