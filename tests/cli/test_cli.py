"""Shared behaviour of all commands: permitted output paths, and exit."""

import ast
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import torch
from common.commands import run_command
from parameterized import parameterized

from transformers_packed import __version__, cli
from transformers_packed.cli import main
from transformers_packed.cli.options import parse, parsers


# Each command in the same process, up to the import of torch.
UNTIL_TORCH = """
import sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise {error}

sys.meta_path.insert(0, Finder())
from transformers_packed.cli import main
for command in sys.argv[1:]:
    try:
        status = main(command.split())
    except SystemExit as exit:
        status = exit.code
    print(status, flush=True)
"""
PLAN = ["plan", "--data", "{root}/data.jsonl", "--row-length", "9"]


class CommandLineTest(unittest.TestCase):
    def setUp(self):
        self.root = Path(self.enterContext(tempfile.TemporaryDirectory()))
        (self.root / "data.jsonl").write_text('{"input_ids": [1]}\n')

    @parameterized.expand(
        [
            ("--batch-size 2", "Pass --gradient-checkpointing or lower --batch-size."),
            (
                "--row-length 99 --lora",
                "Pass --gradient-checkpointing, pass --load-in-4bit, pass --layers-in-host-memory or lower --row-length.",
            ),
            (
                "--gradient-checkpointing --offload --lora --load-in-4bit --cuda-graphs --batch-size 1",
                "Use a larger GPU.",
            ),
            (
                "--gradient-checkpointing --offload --teacher=t --batch-size 1",
                "Pass --teacher-in-host-memory.",
            ),
            ("--gradient-checkpointing --batch-size 8", "Lower --batch-size."),
            ("--gradient-checkpointing --every-n-layers 2 --batch-size 1", "Lower --every-n-layers."),
            ("--every-n-layers auto --batch-size 8", "Lower --batch-size."),
            (
                "--gradient-checkpointing --offload --lora --load-in-4bit --layers-in-host-memory --batch-size 1",
                "Use a larger GPU.",
            ),
            (
                "--gradient-checkpointing --no-offload --batch-size 8 --max-length 9",
                "Pass --offload, lower --batch-size or lower --max-length.",
            ),
        ]
    )
    def test_out_of_memory(self, options, advice):
        error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of")
        self.check_error(
            error,
            "expected a GPU with enough memory, got OutOfMemoryError: CUDA out of memory. "
            f"{advice} The command memory computes what fits.",
            *options.split(),
        )

    def test_out_of_memory_without_checkpoints_by_choice(self):
        """`auto` would choose the same again."""
        args = parse("train --model=m --data=d --output=o --every-n-layers=auto --batch-size=1".split())
        args.gradient_checkpointing, args.every_n_layers = False, 0
        message = args.parser.out_of_memory(args, torch.OutOfMemoryError("x"))
        self.assertIn(". Pass --gradient-checkpointing without --every-n-layers. The", message)

    def test_out_of_memory_on_the_host(self):
        error, message = "offload: expected more memory. Use every_n_layers", "Use --every-n-layers"
        self.check_error(MemoryError(error), f"offload: expected more memory. {message}")
        self.check_error(MemoryError(), "MemoryError")

    def check_error(self, error, message, *options):
        with mock.patch("transformers_packed.cli.train.run", side_effect=error):
            status, _, err = run_command("train", "--model=m", "--data=d", "--output=o", *options)
        self.assertEqual((status, err), (1, f"transformers-packed train: {message}\n"))

    def test_other_errors_have_a_traceback(self):
        with (
            mock.patch("transformers_packed.cli.env.run", side_effect=RuntimeError("CUDA error")),
            self.assertRaisesRegex(RuntimeError, "CUDA error"),
        ):
            main(["env"])

    @parameterized.expand(
        [
            ("plan_save", [*PLAN, "--save"]),
            ("plan_plot", [*PLAN, "--plot"]),
            ("audit_plot", ["audit", "llama", "--plot"]),
        ]
    )
    def test_files_are_written_where_they_are_named_or_not_at_all(self, _, command):
        for name, message in (
            (".", "expected a file, got the directory"),
            ("missing/file.md", "directory .*missing of .* does not exist"),
        ):
            arguments = [argument.format(root=self.root) for argument in [*command, "{root}/" + name]]
            status, out, err = run_command(*arguments)
            self.assertEqual((status, out), (2, ""))
            self.assertRegex(err, f"error: argument {command[-1]}: .*{message}")
            self.assertEqual([path.name for path in self.root.iterdir()], ["data.jsonl"])

    def until_torch(self, error, commands):
        code = UNTIL_TORCH.format(error=error)
        result = subprocess.run([sys.executable, "-c", code, *commands], capture_output=True, text=True)
        self.assertEqual(result.returncode, 0, result.stderr)
        return result.stdout, result.stderr

    def test_help_without_torch(self):
        names = ("demo", "train", "warmup", "plan", "memory", "audit", "doctor", "env")
        stdout, stderr = self.until_torch("AssertionError", ["--help", *(f"{name} --help" for name in names)])
        self.assertEqual(stderr, "")
        for command in ("", *(f" {name}" for name in names)):
            self.assertIn(f"usage: transformers-packed{command} [-h]", stdout)
        self.assertEqual(re.findall(r"^\d+$", stdout, re.MULTILINE), ["0"] * 9)
        self.assertNotRegex(stdout, r"default: None|default: False|default:.*default:")

    def test_interrupted_while_torch_is_imported(self):
        commands = [
            *("env", "doctor", "doctor --model m --json", "audit llama", "demo", "warmup --model m --row-length 9"),
            f"plan --data {self.root}/data.jsonl --row-length 9",
            "memory --model m --gpus 2 --gpu-memory 9 --row-length 9",
            f"train --model {self.root} --data d --output o",
        ]
        stdout, stderr = self.until_torch("KeyboardInterrupt", commands)
        self.assertEqual(re.findall(r"^\d+$", stdout, re.MULTILINE), ["130"] * len(commands))
        lines = [f"transformers-packed {command.split()[0]}: interrupted" for command in commands]
        self.assertEqual(stderr.splitlines(), lines)

    def test_a_missing_argument(self):
        status, _, err = run_command("audit")
        self.assertEqual(status, 2)
        self.assertIn("arguments are required: MODEL_OR_TYPE", err)

    @parameterized.expand(
        [
            ("train", ["--model", "m", "--data", "d", "--output", "o"]),
            ("env", []),
        ]
    )
    def test_unknown_options_show_the_usage_of_the_command(self, command, needed):
        for arguments in ([command, *needed, "--foo"], [command, "--foo", *needed]):
            status, _, err = run_command(*arguments)
            self.assertEqual(status, 2)
            self.assertRegex(err, f"^usage: transformers-packed {command} ")
            end = f"transformers-packed {command}: error: unrecognized arguments: --foo\n"
            self.assertTrue(err.endswith(end), err)

    def test_an_abbreviation_is_no_option(self):
        status, _, err = run_command("train", "--model=m", "--data=d", "--output=o", "--learning-rat", "1e-4")
        self.assertEqual(status, 2)
        end = "unrecognized arguments: --learning-rat 1e-4. Did you mean --learning-rate?\n"
        self.assertTrue(err.endswith(end), err)

    def test_initials_are_no_option(self):
        _, _, err = run_command("train", "--model=m", "--data=d", "--output=o", "--bs=4")
        self.assertTrue(err.endswith("unrecognized arguments: --bs=4. Did you mean --batch-size?\n"), err)

    def test_a_mistyped_option_that_is_required(self):
        _, _, err = run_command("train", "--modle=m", "--data=d", "--output=o")
        end = "the following arguments are required: --model, got --modle. Did you mean --model?\n"
        self.assertTrue(err.endswith(end), err)

    @parameterized.expand(["model", "data", "output", "teacher"])
    def test_an_empty_value(self, name):
        given = {"model": "m", "data": "d", "output": "o", name: ""}
        status, _, err = run_command("train", *(f"--{option}={value}" for option, value in given.items()))
        self.assertEqual(status, 2)
        self.assertTrue(err.endswith(f"error: argument --{name}: expected a value, got an empty one\n"), err)

    @parameterized.expand(["--save", "--plot"])
    def test_an_empty_output_file(self, option):
        _, _, err = run_command("plan", "--data=d", "--row-length=64", f"{option}=")
        self.assertTrue(err.endswith(f"error: argument {option}: expected a value, got an empty one\n"), err)

    def test_version(self):
        self.assertEqual(run_command("--version"), (0, f"transformers-packed {__version__}\n", ""))

    @parameterized.expand(
        [
            (
                "plan",
                'Pass overlong="truncate", or raise max_length.',
                "Pass --overlong truncate, or raise --row-length.",
            ),
            ("train", "Remove cuda_graphs=True.", "Remove --cuda-graphs."),
            ("train", 'Pass attn_implementation="sdpa".', "Pass --attn sdpa."),
            ("train", 'Only "attn_implementation=sdpa" works.', 'Only "--attn sdpa" works.'),
            ("train", "--lora-rank needs --lora", "--lora-rank needs --lora"),
        ]
    )
    def test_errors_name_options(self, command, message, expected):
        _, commands = parsers()
        self.assertEqual(commands[command].with_options(message), expected)

    @parameterized.expand(
        [
            (["--mtp-only"], "expected no --mtp-only with --cuda-graphs, got --mtp-only, whose trunk runs without"),
            (["--sequence-parallel-size=2"], "--sequence-parallel-size 1 with --cuda-graphs, got --sequence-paral"),
        ]
    )
    def test_options_that_exclude_each_other(self, given, message):
        """They are refused before anything is loaded."""
        with mock.patch.dict("os.environ", {"WORLD_SIZE": "2"}):
            command = "train", "--model=m", "--data=d", "--output=o", "--cuda-graphs", *given
            status, out, err = run_command(*command)
        self.assertEqual((status, out), (1, ""))
        self.assertIn(message, err)

    def test_errors_say_what_to_do(self):
        """All errors of the commands have a third part."""
        for path in Path(cli.__file__).parent.glob("*.py"):
            for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "input_error":
                    self.assertEqual(len(call.args), 3, f"{path}, line {call.lineno}")
