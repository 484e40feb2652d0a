"""Commands run code of a checkpoint only with `--trust-remote-code`, and name the reason if they cannot use one."""

import contextlib
import io
import json
import re
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
from transformers_packed.cli.checkpoint import lacking_weights, load_weights


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


# Of the command's model, or of its tokenizer.
COMMANDS = {
    "train": ["train", *DATA, "--output", "{root}/out", "--model", "{model}"],
    "memory": ["memory", *GPUS, "--row-length", "9", "--model", "{model}"],
    "plan": ["plan", "--data", "{root}/ids.jsonl", "--row-length", "9", "--model", "{model}"],
    "tokenizer": ["plan", *DATA, "--row-length", "9", "--tokenizer", "{model}"],
    "audit": ["audit", "{model}"],
    "doctor": ["doctor", "--model", "{model}"],
    "bench": ["bench", "--model", "{model}"],
    "warmup": ["warmup", "--row-length", "9", "--model", "{model}"],
}
LOADING = ("train", "memory", "plan", "tokenizer", "audit", "doctor")


class CommandsTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.root = cls.write_data(cls.enterClassContext(tempfile.TemporaryDirectory()))

    @staticmethod
    def write_data(folder):
        root = Path(folder)
        (root / "text.jsonl").write_text('{"text": "a"}\n')
        (root / "ids.jsonl").write_text('{"input_ids": [1]}\n')
        return root

    def call(self, name, model, *options):
        """Return exit status and standard error, with yes to every question."""
        command = [argument.format(root=self.root, model=model) for argument in COMMANDS[name]]
        with mock.patch("sys.stdin", io.StringIO("y\n" * 20)):
            status, _, err = run_command(*command, *options)
        return status, err

    def check_refused(self, name, model, message):
        """The command prints one line, and fails before it writes."""
        status, err = self.call(name, model)
        self.assertEqual(status, 2 if name == "audit" else 1)
        option = {"tokenizer": "--tokenizer", "audit": "MODEL_OR_TYPE"}.get(name, "--model")
        self.assertRegex(
            err, f"^transformers-packed {COMMANDS[name][0]}: (.* cannot be built: )?{option}: expected {message}\n$"
        )
        self.assertEqual(len(err.splitlines()), 1, err)
        self.assertFalse((self.root / "out").exists())


class OwnCodeTest(CommandsTest):
    def setUp(self):
        # Transformers runs the code of a folder once.
        self.root = self.write_data(self.enterContext(tempfile.TemporaryDirectory()))
        self.marker = self.root / "ran"
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

    @parameterized.expand(
        [(name, "tokenizer" if name == "tokenizer" else "config") for name in LOADING if name != "train"]
        + [("memory", "config/config.json")]
    )
    def test_is_refused_unless_it_is_trusted(self, name, source):
        model = f"{self.root}/{source}"
        self.check_refused(
            name, model, f"a checkpoint without its own code, got {model}.* add --trust-remote-code to .*"
        )
        self.check_runs_with_trust(name, model)

    def check_runs_with_trust(self, name, model):
        self.assertFalse(self.marker.exists(), "code of the checkpoint ran")
        self.call(name, model, "--trust-remote-code")
        self.assertTrue(self.marker.exists(), "the code cannot run, so that the test proves nothing")

    def test_train(self):
        self.check_refused(
            "train", self.root / "config", ".*, got .*/config: its own code[.] Train other models with .*"
        )
        # For a configuration that Transformers supports, the tokenizer's own code is not needed.
        self.call("train", self.root / "both")
        self.check_runs_with_trust("train", self.root / "both")


def refusal(kind):
    return kind("a long text", response=mock.Mock(headers={}))


class UnavailableTest(CommandsTest):
    def setUp(self):
        self.enterContext(mock.patch("huggingface_hub.constants.HF_HUB_OFFLINE", False))
        self.enterContext(mock.patch("transformers_packed.cli.early._fails_at_once", lambda url: False))

    def check(self, name, reason, source="nobody/nothing"):
        kinds = f"{'a model type, ' * (name == 'audit')}a local directory or a model on the Hub"
        self.check_refused(name, source, re.escape(f"{kinds}, got {source!r}: no such local directory, and {reason}"))

    @parameterized.expand(LOADING)
    def test_unreachable_hub(self, name):
        with mock.patch("transformers.utils.hub.hf_hub_download", side_effect=LocalEntryNotFoundError("a long text")):
            self.check(name, "the Hub could not be reached. Check the name and the connection.")

    @parameterized.expand(["train", "audit"])
    def test_offline(self, name):
        with mock.patch("huggingface_hub.constants.HF_HUB_OFFLINE", True):
            self.check(name, "no such model in the cache (HF_HUB_OFFLINE is set). Unset it to download.")

    @parameterized.expand(
        [
            (
                RepositoryNotFoundError,
                "the Hub has no such model. Check the name; for a private model, log in with `hf auth login`.",
            ),
            (
                GatedRepoError,
                "access to this model on the Hub is restricted. Request access, then log in with `hf auth login`.",
            ),
        ]
    )
    def test_what_the_hub_refuses(self, kind, reason):
        with mock.patch("transformers.utils.hub.hf_hub_download", side_effect=refusal(kind)):
            self.check("train", reason)

    @parameterized.expand(["./no/such/directory", "/no/such", "a/b/c", "with space"])
    def test_no_name_of_a_model(self, source):
        self.check("train", "the name is not valid on the Hub. Check the path.", source)

    @parameterized.expand(["train", "memory", "audit", "doctor"])
    def test_a_directory_without_a_configuration(self, name):
        (self.root / "empty").mkdir(exist_ok=True)
        _, err = self.call(name, self.root / "empty")
        self.assertRegex(err, r": cannot read a (checkpoint|configuration) from .*: it has no config.json\n$")


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


class WeightsTest(CommandsTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
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
        with self.changed(family, change) as source:
            for name in ("train", "audit"):
                named = f"all weights of Qwen3.*ForCausalLM and no others, got {source} with .*{message}.*save_pretrained.*"
                self.check_refused(name, source, named)

    @parameterized.expand([True, False])
    def test_a_file_that_is_missing(self, safetensors):
        """What `doctor` names is what Transformers does not find."""
        folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        config = tiny_config("qwen3_5_text")
        model = AutoModelForCausalLM.from_config(config)
        for size in ("1KB", "1GB"):
            path = folder / size
            model.save_pretrained(path, max_shard_size=size)
            if not safetensors:
                for file in path.glob("*.safetensors"):
                    torch.save(load_file(file), file.with_name(file.stem.replace("model", "pytorch_model") + ".bin"))
                    file.unlink()
                for index in path.glob("*.index.json"):
                    text = index.read_text().replace("model-", "pytorch_model-").replace(".safetensors", ".bin")
                    index.unlink()
                    index.with_name("pytorch_model.bin.index.json").write_text(text)
            self.load(path)
            self.assertIsNone(lacking_weights(str(path)))
            last = max(path.glob("*.safetensors" if safetensors else "*.bin"))
            last.unlink()
            lacking = lacking_weights(str(path))
            self.assertEqual(lacking, last.name if size == "1KB" else "model.safetensors")
            with self.assertRaisesRegex(OSError, lacking):
                self.load(path)
        # A file of a process in a distributed checkpoint, which has no other file of weights.
        (path / "shard-00000-model-00001-of-00001.safetensors").touch()
        self.assertIsNone(lacking_weights(str(path)))

    @parameterized.expand(["train", "audit", "doctor"])
    def test_a_file_that_is_cut_off(self, name):
        path = self.root / "qwen3_5_text" / "model.safetensors"
        content = path.read_bytes()
        try:
            path.write_bytes(content[: len(content) // 2])
            _, err = self.call(name, path.parent)
        finally:
            path.write_bytes(content)
        self.assertRegex(
            err, f"expected complete safetensors files, got {path.parent}.*Download or save them again.\n$"
        )
        self.assertEqual(len(err.splitlines()), 1, err)

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


class AdapterTest(CommandsTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
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

    @parameterized.expand(
        [*((name, True) for name in COMMANDS if name != "tokenizer"), ("train", False), ("audit", False)]
    )
    def test_the_base_model_is_named(self, name, local):
        source = self.root / "adapter" if local else "somebody/adapter"
        with (
            mock.patch("huggingface_hub.constants.HF_HUB_CACHE", str(self.root / "cache")),
            mock.patch("huggingface_hub.constants.HF_HUB_OFFLINE", True),
            mock.patch("transformers_packed.training.warm_up.compiles_kernels", lambda device: True),
        ):
            message = f"a model, got {source}, a PEFT adapter of {self.root}/base[.] .*merge_and_unload.*"
            self.check_refused(name, source, message)
