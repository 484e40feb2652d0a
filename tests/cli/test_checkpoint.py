"""Commands run code of a checkpoint only with `--trust-remote-code`, and name the reason if they cannot read one."""

import contextlib
import io
import json
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from common.records import make_tokenizer
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from parameterized import parameterized
from scripts.trainer_arms import TINY
from transformers import AutoTokenizer, Qwen3_5TextConfig

from transformers_packed.cli import main
from transformers_packed.cli.checkpoint import load_config


CODE = """
open({marker!r}, "w").close()
from transformers import PreTrainedConfig, PreTrainedTokenizerFast

class OwnConfig(PreTrainedConfig):
    model_type = "abacus"

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
DATA = ["--data", "{root}/text.jsonl"]
GPUS = ["--gpus", "8", "--gpu-memory", "80"]


class OwnCodeTest(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.root = Path(directory.name)
        self.marker = self.root / "ran"
        (self.root / "text.jsonl").write_text('{"text": "a"}\n')
        (self.root / "ids.jsonl").write_text('{"input_ids": [1]}\n')
        for name in ("config", "tokenizer", "both"):
            path = self.root / name
            make_tokenizer().save_pretrained(path)
            (path / "code.py").write_text(CODE.format(marker=str(self.marker)))
            if name == "config":
                config = {"model_type": "abacus", "auto_map": {"AutoConfig": "code.OwnConfig"}}
                (path / "config.json").write_text(json.dumps(config))
            else:
                settings = path / "tokenizer_config.json"
                own = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "code.OwnTokenizer"]}}
                settings.write_text(json.dumps({**json.loads(settings.read_text()), **own}))
            if name == "both":
                Qwen3_5TextConfig(**TINY).save_pretrained(path)

    def command(self, *arguments):
        """Return exit status and standard error, with yes to every question."""
        arguments = [argument.format(root=self.root) for argument in arguments]
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()) as stderr,
            mock.patch("sys.stdin", io.StringIO("y\n" * 20)),
        ):
            return main(arguments), stderr.getvalue()

    @parameterized.expand(
        [
            ("plan_tokenizer", "tokenizer", ["plan", *DATA, "--max-length", "9", "--tokenizer", "{root}/tokenizer"]),
            ("plan_model", "config", ["plan", "--data", "{root}/ids.jsonl", "--max-length", "9", "--model", "{root}/config"]),
            ("memory_file", "config", ["memory", *GPUS, "--max-length", "9", "--model", "{root}/config/config.json"]),
            ("memory", "config", ["memory", *GPUS, "--max-length", "9", "--model", "{root}/config"]),
            ("audit", "config", ["audit", "{root}/config"]),
            ("doctor", "config", ["doctor", "--model", "{root}/config"]),
        ]
    )  # fmt: skip
    def test_is_refused_unless_it_is_trusted(self, _, source, command):
        status, err = self.command(*command)
        self.assertIn(status, (1, 2))
        self.assertRegex(
            err,
            f"a checkpoint without its own code, got {self.root}/{source}.* add --trust-remote-code to run it[.]\n$",
        )
        self.assertEqual(len(err.splitlines()), 1, err)
        self.assertFalse(self.marker.exists(), "code of the checkpoint ran")
        self.command(*command, "--trust-remote-code")
        self.assertTrue(self.marker.exists(), "the code cannot run, so that the test proves nothing")

    def test_train(self):
        command = ["train", *DATA, "--output", "{root}/out", "--max-steps", "1", "--model"]
        status, err = self.command(*command, "{root}/config")
        self.assertEqual(status, 1)
        self.assertRegex(err, "got .*/config: its own code[.]\n$")
        # For a configuration that Transformers supports, the tokenizer's own code is not needed.
        self.command(*command, "{root}/both")
        self.assertFalse(self.marker.exists(), "code of the checkpoint ran")
        self.command(*command, "{root}/both", "--trust-remote-code")
        self.assertTrue(self.marker.exists(), "the code cannot run, so that the test proves nothing")

    def test_the_test_can_fail(self):
        with mock.patch("sys.stdin", io.StringIO("y\n")), contextlib.redirect_stdout(io.StringIO()):
            AutoTokenizer.from_pretrained(self.root / "tokenizer")
        self.assertTrue(self.marker.exists())


def refusal(kind):
    return kind("a long text", response=mock.Mock(headers={}))


MODEL = ["--model", "nobody/nothing"]
COMMANDS = {
    "train": ["train", *DATA, "--output", "{root}/out", *MODEL],
    "memory": ["memory", *GPUS, "--max-length", "9", *MODEL],
    "plan": ["plan", *DATA, "--max-length", "9", *MODEL],
    "tokenizer": ["plan", *DATA, "--max-length", "9", "--tokenizer", "nobody/nothing"],
    "audit": ["audit", "nobody/nothing"],
    "doctor": ["doctor", *MODEL],
}


class UnavailableTest(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.root = Path(directory.name)
        (self.root / "text.jsonl").write_text('{"text": "a"}\n')

    def check(self, command, reason, source="nobody/nothing"):
        """The command prints a single line with the `reason` and fails."""
        arguments = [part.format(root=self.root).replace("nobody/nothing", source) for part in COMMANDS[command]]
        with (
            contextlib.redirect_stdout(io.StringIO()) as stdout,
            contextlib.redirect_stderr(io.StringIO()) as stderr,
        ):
            status = main(arguments)
        self.assertEqual((status, stdout.getvalue()), (2 if command == "audit" else 1, ""))
        option = {"tokenizer": "--tokenizer", "audit": "MODEL_OR_TYPE"}.get(command, "--model")
        kinds = f"{'a model type, ' * (command == 'audit')}a local directory or a model on the Hub"
        self.assertEqual(
            stderr.getvalue(),
            f"transformers-packed {arguments[0]}: {option}: expected {kinds}, got {source!r}: no such local directory, "
            f"and {reason}\n",
        )
        self.assertEqual([path.name for path in self.root.iterdir()], ["text.jsonl"])

    @parameterized.expand(COMMANDS)
    def test_unreachable_hub(self, command):
        with mock.patch("transformers.utils.hub.hf_hub_download", side_effect=LocalEntryNotFoundError("a long text")):
            self.check(command, "the Hub could not be reached. Check the name and the connection.")

    @parameterized.expand(COMMANDS)
    def test_offline(self, command):
        with mock.patch("huggingface_hub.constants.HF_HUB_OFFLINE", True):
            self.check(command, "no such model in the cache (HF_HUB_OFFLINE is set). Unset it to download.")

    def test_no_such_model(self):
        with mock.patch("transformers.utils.hub.hf_hub_download", side_effect=refusal(RepositoryNotFoundError)):
            fix = "Check the name; for a private model, log in with `hf auth login`."
            self.check("train", f"the Hub has no such model. {fix}")

    def test_restricted_model(self):
        with mock.patch("transformers.utils.hub.hf_hub_download", side_effect=refusal(GatedRepoError)):
            fix = "Request access, then log in with `hf auth login`."
            self.check("train", f"access to this model on the Hub is restricted. {fix}")

    @parameterized.expand(["./no/such/directory", "/no/such", "a/b/c", "with space"])
    def test_no_name_of_a_model(self, source):
        self.check("train", "the name is not valid on the Hub. Check the path.", source)

    def test_the_cause_is_kept(self):
        error = LocalEntryNotFoundError("a long text")
        with (
            mock.patch("transformers.utils.hub.hf_hub_download", side_effect=error),
            self.assertRaisesRegex(OSError, "could not be reached") as raised,
        ):
            load_config("--model", "nobody/nothing", False)
        self.assertIs(raised.exception.__cause__.__cause__, error)
