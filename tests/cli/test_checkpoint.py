"""Commands run code of a checkpoint only with `--trust-remote-code`, and name the reason if they cannot use one."""

import contextlib
import io
import json
import shutil
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import torch
from common.commands import run_command
from common.records import make_tokenizer
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from parameterized import parameterized
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from scripts.trainer_arms import TINY
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, Qwen3_5TextConfig

from transformers_packed import registered
from transformers_packed.audit.tiny import tiny_config
from transformers_packed.cli.checkpoint import load_weights


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
        self.root = Path(self.enterContext(tempfile.TemporaryDirectory()))
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
        with mock.patch("sys.stdin", io.StringIO("y\n" * 20)):
            status, _, err = run_command(*(argument.format(root=self.root) for argument in arguments))
        return status, err

    @parameterized.expand(
        [
            ("plan_tokenizer", "tokenizer", ["plan", *DATA, "--row-length", "9", "--tokenizer", "{root}/tokenizer"]),
            ("plan_model", "config", ["plan", "--data", "{root}/ids.jsonl", "--row-length", "9", "--model", "{root}/config"]),
            ("memory_file", "config", ["memory", *GPUS, "--row-length", "9", "--model", "{root}/config/config.json"]),
            ("memory", "config", ["memory", *GPUS, "--row-length", "9", "--model", "{root}/config"]),
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
        self.assertRegex(err, "got .*/config: its own code[.] Train other models with ")
        # For a configuration that Transformers supports, the tokenizer's own code is not needed.
        self.command(*command, "{root}/both")
        self.assertFalse(self.marker.exists(), "code of the checkpoint ran")
        self.command(*command, "{root}/both", "--trust-remote-code")
        self.assertTrue(self.marker.exists(), "the code cannot run, so that the test proves nothing")


def refusal(kind):
    return kind("a long text", response=mock.Mock(headers={}))


MODEL = ["--model", "nobody/nothing"]
COMMANDS = {
    "train": ["train", *DATA, "--output", "{root}/out", *MODEL],
    "memory": ["memory", *GPUS, "--row-length", "9", *MODEL],
    "plan": ["plan", *DATA, "--row-length", "9", *MODEL],
    "tokenizer": ["plan", *DATA, "--row-length", "9", "--tokenizer", "nobody/nothing"],
    "audit": ["audit", "nobody/nothing"],
    "doctor": ["doctor", *MODEL],
}


class UnavailableTest(unittest.TestCase):
    def setUp(self):
        self.root = Path(self.enterContext(tempfile.TemporaryDirectory()))
        (self.root / "text.jsonl").write_text('{"text": "a"}\n')
        self.enterContext(mock.patch("huggingface_hub.constants.HF_HUB_OFFLINE", False))

    def check(self, command, reason, source="nobody/nothing"):
        """The command prints a single line with the `reason` and fails."""
        arguments = [part.format(root=self.root).replace("nobody/nothing", source) for part in COMMANDS[command]]
        status, out, err = run_command(*arguments)
        printed = f"Loading {source} ...\n" if command == "train" else ""
        self.assertEqual((status, out), (2 if command == "audit" else 1, printed))
        option = {"tokenizer": "--tokenizer", "audit": "MODEL_OR_TYPE"}.get(command, "--model")
        kinds = f"{'a model type, ' * (command == 'audit')}a local directory or a model on the Hub"
        self.assertEqual(
            err,
            f"transformers-packed {arguments[0]}: {option}: expected {kinds}, got {source!r}: no such local directory, "
            f"and {reason}\n",
        )
        self.assertEqual([path.name for path in self.root.iterdir()], ["text.jsonl"])

    @parameterized.expand(COMMANDS)
    def test_unreachable_hub(self, command):
        with mock.patch("transformers.utils.hub.hf_hub_download", side_effect=LocalEntryNotFoundError("a long text")):
            self.check(command, "the Hub could not be reached. Check the name and the connection.")

    @parameterized.expand(["train", "audit"])
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


def without(part):
    return lambda weights: {name: x for name, x in weights.items() if part not in name}


def renamed(old, new):
    return lambda weights: {name.replace(old, new): x for name, x in weights.items()}


def reshaped(weights):
    name = next(name for name in weights if name.endswith(("mlp.down_proj.weight", "shared_expert.down_proj.weight")))
    return {**weights, name: weights[name][:, 1:].contiguous()}


# Name, change of the tensors, and what the error has to name.
BAD_WEIGHTS = [
    ("of_a_tool", renamed("attn.in_proj", "attn.proj_in"), r"[0-9]+ missing \(.*in_proj.*unexpected \(.*proj_in"),
    ("one_left_out", without("layers.1.input_layernorm"), r"1 missing \(model.layers.1.input_layernorm.weight\)"),
    ("a_layer_left_out", without("layers.0."), r"[0-9]+ missing \(model.layers.0."),
    ("no_head", without("lm_head"), r"1 missing \(lm_head.weight\)"),
    ("one_too_many", lambda w: {**w, "v_head.weight": torch.ones(1)}, r"1 unexpected \(v_head.weight\)"),
    ("another_shape", reshaped, r"1 of another shape \(model.layers.[0-9].mlp"),
]
FAMILIES = ("qwen3_5_text", "qwen3_next", "qwen3_5_moe_text")


class WeightsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.root = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        (cls.root / "text.jsonl").write_text('{"text": "a"}\n')
        for family in FAMILIES:
            config = tiny_config(family)
            config.vocab_size, config.num_hidden_layers = 264, 2
            config.layer_types = ["linear_attention", "full_attention"]
            AutoModelForCausalLM.from_config(config).save_pretrained(cls.root / family)
        vision = tiny_config("qwen3_5")
        AutoModelForImageTextToText.from_config(vision).save_pretrained(cls.root / "qwen3_5")
        for path in cls.root.glob("qwen*"):
            make_tokenizer().save_pretrained(path)

    @contextlib.contextmanager
    def changed(self, family, change):
        path = self.root / family / "model.safetensors"
        weights = load_file(path)
        try:
            save_file(change(weights), path, {"format": "pt"})
            yield path.parent
        finally:
            save_file(weights, path, {"format": "pt"})

    @parameterized.expand([(*bad, FAMILIES[n % len(FAMILIES)]) for n, bad in enumerate(BAD_WEIGHTS)])
    def test_commands_stop_before_they_write(self, _, change, message, family):
        output = self.root / "output"
        with self.changed(family, change) as source:
            train = run_command("train", "--model", source, "--data", self.root / "text.jsonl", "--output", output)
            audit = run_command("audit", source, "--lengths", "5", "5")
        for option, expected, (status, _, err) in (("--model", 1, train), ("MODEL_OR_TYPE", 2, audit)):
            self.assertEqual(status, expected, err)
            last = err.splitlines()[-1]
            self.assertRegex(
                last,
                f"{option}: expected all weights of Qwen3.*ForCausalLM and no others, got {source} with .*{message}",
            )
            self.assertRegex(last, "save_pretrained")
        self.assertFalse(output.exists(), "something was written")

    def load(self, source):
        with registered():
            return load_weights("--model", str(source), AutoModelForCausalLM, dtype=torch.float32)

    @parameterized.expand(["qwen3_5_moe_text", "qwen3_5"])
    def test_weights_that_the_class_leaves_out(self, family):
        with self.changed(family, lambda weights: {**weights, "mtp.layers.0.fc.weight": torch.ones(1)}) as source:
            model, weights = self.load(source), load_file(source / "model.safetensors")
        name = "model.language_model." if family == "qwen3_5" else "model."
        torch.testing.assert_close(model.model.norm.weight.detach(), weights[f"{name}norm.weight"])
        self.assertTrue(type(model).__module__.startswith("transformers_packed."))

    def test_a_head_that_is_tied(self):
        config = tiny_config("qwen3_5_text")
        config.tie_word_embeddings = True
        AutoModelForCausalLM.from_config(config).save_pretrained(self.root / "tied")
        self.assertNotIn("lm_head.weight", load_file(self.root / "tied" / "model.safetensors"))
        self.load(self.root / "tied")

    def test_an_expert_of_another_shape(self):
        def change(weights):
            name = next(name for name in weights if "experts.1.down_proj" in name)
            return {**weights, name: weights[name][:, 1:].contiguous()}

        with (
            self.changed("qwen3_5_moe_text", change) as source,
            self.assertRaisesRegex(
                ValueError, f"weights that Transformers can convert, got {source}: .*save_pretrained"
            ),
        ):
            self.load(source)


class AdapterTest(unittest.TestCase):
    COMMANDS = {
        "train": ["train", *DATA, "--output", "{root}/out", "--model"],
        "bench": ["bench", "--model"],
        "warmup": ["warmup", "--row-length", "9", "--model"],
        "memory": ["memory", *GPUS, "--row-length", "9", "--model"],
        "plan": ["plan", "--data", "{root}/ids.jsonl", "--row-length", "9", "--model"],
        "doctor": ["doctor", "--model"],
        "audit": ["audit"],
    }

    @classmethod
    def setUpClass(cls):
        cls.root = Path(cls.enterClassContext(tempfile.TemporaryDirectory()))
        (cls.root / "text.jsonl").write_text('{"text": "a"}\n')
        (cls.root / "ids.jsonl").write_text('{"input_ids": [1]}\n')
        model = AutoModelForCausalLM.from_config(tiny_config("qwen3_5_text"))
        model.save_pretrained(cls.root / "base")
        model = AutoModelForCausalLM.from_pretrained(cls.root / "base")
        get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear")).save_pretrained(
            cls.root / "adapter"
        )
        make_tokenizer().save_pretrained(cls.root / "adapter")
        # The cache of a model on the Hub.
        cache = cls.root / "cache" / "models--somebody--adapter"
        (cache / "refs").mkdir(parents=True)
        (cache / "refs" / "main").write_text("0" * 40)
        shutil.copytree(cls.root / "adapter", cache / "snapshots" / ("0" * 40))

    @parameterized.expand([*((command, True) for command in COMMANDS), ("train", False), ("audit", False)])
    def test_the_base_model_is_named(self, command, local):
        arguments = [part.format(root=self.root) for part in self.COMMANDS[command]]
        source = self.root / "adapter" if local else "somebody/adapter"
        with (
            mock.patch("huggingface_hub.constants.HF_HUB_CACHE", str(self.root / "cache")),
            mock.patch("huggingface_hub.constants.HF_HUB_OFFLINE", True),
            mock.patch("transformers_packed.training.warm_up.compiles_kernels", lambda device: True),
        ):
            status, _, err = run_command(*arguments, source)
        self.assertEqual(status, 2 if command == "audit" else 1)
        option = "MODEL_OR_TYPE" if command == "audit" else "--model"
        self.assertRegex(
            err, f"{option}: expected a model, got {source}, a PEFT adapter of {self.root}/base[.] .*merge_and_unload"
        )
        self.assertEqual(len(err.splitlines()), 1, err)
        self.assertFalse((self.root / "out").exists())
