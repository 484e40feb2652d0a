"""`transformers-packed doctor` on machines and models of all kinds. Verifiers see tensors that claim to be on a GPU."""

import contextlib
import io
import json
import tempfile
import unittest
from contextlib import redirect_stderr, redirect_stdout
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from common.commands import fails, run_command
from common.families import tiny_config
from common.sizes import SIZES
from parameterized import parameterized
from safetensors.torch import save_file
from scripts.trainer_arms import TINY
from transformers import BertConfig, PreTrainedConfig, Qwen3_5MoeTextConfig, Qwen3_5TextConfig, ViTConfig

from transformers_packed import SequenceBoundaries, cli
from transformers_packed.cli import diagnosis, env
from transformers_packed.ops import dense_attention, dispatch
from transformers_packed.ops.backends import fla, flash_qla, triton


NO_FLASH_QLA = "cannot be imported: No module named 'flash_qla' (pip install flash-qla)"
NO_TRITON = "needs triton, which is not installed (pip install triton)"
WITH_HEADS = TINY | {"head_dim": 64, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
IN_BLOCKS = {
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["in_proj_a", "in_proj_b"],
}


class OnGpu(torch.Tensor):
    is_cuda = True
    device = property(lambda self: torch.device("cuda:0"))


@contextlib.contextmanager
def gpu(capability=(9, 0), missing=(), flash_qla_problem="", triton_problem=""):
    """A machine with a GPU, on which the packages in `missing` are not installed."""

    def zeros(shape, device=None, requires_grad=False, **options):
        return torch.zeros(shape, **options).as_subclass(OnGpu).requires_grad_(requires_grad)

    fake = {name: getattr(torch, name) for name in ("Tensor", "device", "dtype", "float32")}
    from_lengths = SequenceBoundaries.from_lengths
    with contextlib.ExitStack() as stack:
        for target, name, value in (
            (torch.cuda, "is_available", lambda: True),
            (torch.cuda, "get_device_capability", lambda device=None: capability),
            (env, "gpus", lambda: ["cuda:0 (a GPU)"]),
            (dispatch, "torch", SimpleNamespace(zeros=zeros, **fake)),
            (dispatch.SequenceBoundaries, "from_lengths", lambda lengths, device: from_lengths(lengths)),
            (dense_attention, "_supports", lambda *args: True),
            (fla, "importable", lambda module, name: f"is not installed (pip install {name})" * (name in missing)),
            (fla, "_backward_problem", lambda: ""),
            (fla, "_row_problem", lambda: ""),
            (flash_qla, "_problem", lambda: flash_qla_problem),
            (triton, "problem", lambda: triton_problem),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        yield


def doctor(*arguments, status=0) -> str:
    """What the command prints when it ends with this status."""
    found, stdout, stderr = run_command("doctor", *arguments)
    assert (found, stderr) == (status, ""), stdout + stderr
    return stdout


def sections(text: str) -> dict[str, list[str]]:
    """The lines below each heading, without spaces at their start."""
    paragraphs = (paragraph.splitlines() for paragraph in text.split("\n\n"))
    return {heading.rstrip(":"): [line.strip() for line in lines] for heading, *lines in paragraphs}


class MachineTest(unittest.TestCase):
    def test_a_gpu_with_all_kernels(self):
        with gpu():
            stdout = doctor()
        found = sections(stdout)
        self.assertEqual(set(found) & {"Problems", "Slow"}, set())
        self.assertIn("use_cuda_graphs(model, max_length=4096)", found["Notes"])
        self.assertIn("use_cuda_graphs(model, max_length=2048)", found["Notes"])
        self.assertIn("float8=True", found["Notes"])
        table = found["On cuda, bfloat16, a packed row would train with"]
        self.assertEqual(table[0].split(), ["flash_qla", "gated_delta_rule"])
        kernels = [line.split() for line in table]
        self.assertIn(["varlen_attn", "attention", "sdpa"], kernels)
        self.assertIn(["cudnn", "attention", "sdpa", "of", "long", "documents"], kernels)
        self.assertNotRegex(stdout, " not |reference|per_document")

    def test_one_command_for_all_ops_that_need_it(self):
        packages = {"flash_qla_problem": NO_FLASH_QLA, "triton_problem": NO_TRITON}
        with gpu(missing=["flash-linear-attention"], **packages):
            stdout = doctor(status=1)
        found = sections(stdout)
        for_fla, install_fla, for_triton, install_triton = found["Problems"]
        self.assertEqual((install_fla, install_triton), ("pip install flash-linear-attention", "pip install triton"))
        self.assertTrue(for_fla.startswith("No kernel for gated_delta_rule, causal_conv1d: fla is not installed."))
        self.assertRegex(
            for_triton, "^No kernel for gated_delta_gates, causal_conv1d_qkv, rms_norm.*: triton needs triton"
        )
        # Graphs would not help with a gated delta rule in PyTorch.
        self.assertNotIn("use_cuda_graphs", stdout)
        self.assertIn("Linear layers cannot run in FP8: fused needs triton, which is not installed", stdout)
        with gpu(missing=["flash-linear-attention"]):
            # Another kernel computes the convolution.
            self.assertNotIn("Problems", sections(doctor()))

    def test_attention(self):
        with gpu():
            stdout = doctor("--attn", "eager")
            self.assertEqual(sections(stdout)["Slow"][1], 'attn_implementation="sdpa"')
            for unknown in ("paged|sdpa", "none"):
                stdout = doctor("--attn", unknown, status=1)
                self.assertRegex(stdout, "Problems:\n.* is not known to keep the documents of a packed row apart")
            doctor("--attn", "kernels-community/flash-attn2")
        doctor("--attn", "flex_attention", status=1)

    def test_a_cpu(self):
        with mock.patch.object(diagnosis.shutil, "which", lambda name: None):
            stdout = doctor()
        self.assertIn("On a CPU all ops run in PyTorch. Training there is for tests.", stdout)
        table = sections(stdout)["On cpu, float32, a packed row would train with"]
        self.assertTrue(table[0].startswith("reference "), table)
        self.assertNotIn(" not ", "".join(table))
        self.assertEqual(set(sections(stdout)) & {"Problems", "Slow"}, set())

    def test_packages_for_a_gpu_on_a_cpu(self):
        """They are no problem, so that nothing advises to remove them."""
        with mock.patch.object(diagnosis, "find_spec", lambda name: name):
            stdout = doctor()
        self.assertIn(
            "While flash-linear-attention is installed, Transformers' own linear attention needs a GPU.", stdout
        )
        self.assertNotIn("pip ", stdout)

    @parameterized.expand(
        [("cpu_build", None, "pip install --force-reinstall torch"), ("driver", "13.0", "nvidia-smi")]
    )
    def test_a_gpu_that_torch_does_not_find(self, _, version, command):
        with (
            mock.patch.object(diagnosis.shutil, "which", lambda name: name),
            mock.patch("torch.version.cuda", version),
        ):
            stdout = doctor(status=1)
        self.assertEqual(sections(stdout)["Problems"][1], command)


class Terminal(io.StringIO):
    def isatty(self):
        return True


class PhasesTest(unittest.TestCase):
    """What is printed while torch, Transformers and our models are imported."""

    def test_on_a_terminal(self):
        expected = ["Importing torch ...", "Importing transformers ...", "Checking models and ops ..."]
        with redirect_stdout(io.StringIO()) as stdout, redirect_stderr(Terminal()) as stderr:
            cli.main(["doctor", "--json"])
        self.assertEqual(stderr.getvalue().splitlines(), expected)
        self.assertIn("ops", json.loads(stdout.getvalue()))

    def test_the_environment_comes_first(self):
        with mock.patch.object(diagnosis, "diagnose", side_effect=ValueError("no diagnosis")):
            found = run_command("doctor")
        self.assertEqual(found, (1, f"{env.describe_environment()}\n", "transformers-packed doctor: no diagnosis\n"))


class ModelTest(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.enterContext(mock.patch.object(diagnosis.shutil, "which", lambda name: None))

    def doctor(self, config: PreTrainedConfig, *arguments, **options):
        """Run the command on a folder with only a configuration."""
        config.save_pretrained(self.folder)
        return doctor("--model", self.folder, *arguments, **options)

    def test_a_checkpoint_of_ours(self):
        config = Qwen3_5TextConfig(**WITH_HEADS, dtype="float32")
        stdout = self.doctor(config)
        named = "Qwen3_5ForCausalLM (Qwen3.5/3.6/3.8), 0.00B parameters"
        self.assertIn(f"{named}: classes of this package with fused ops", stdout)
        self.assertRegex(stdout, "of this package: .*Qwen3_5GatedDeltaNet")
        self.assertRegex(stdout, "of Transformers: .*Qwen3_5TextRotaryEmbedding")
        self.assertIn("Transformers' own Qwen3_5ForCausalLM mixes the documents of a packed row.", stdout)
        self.assertNotIn("bf16=True", stdout)
        lines = stdout.splitlines()
        lines.remove(f"  {self.folder} has no model.safetensors, so its weights cannot be loaded.")
        self.assertEqual(doctor("--model", self.folder / "config.json").splitlines(), lines)
        with gpu():
            stdout = self.doctor(config)
        notes = sections(stdout)["Notes"]
        self.assertIn("bf16=True", notes)
        self.assertTrue(any(note.startswith("FP8 computes 0% of the products in layers") for note in notes))
        self.assertIn("use_cuda_graphs(model, max_length=4096)", notes)
        self.assertNotIn("experts", stdout)

    def test_the_head_of_a_checkpoint(self):
        with tempfile.TemporaryDirectory() as folder:
            Qwen3_5TextConfig(**TINY, mtp_num_hidden_layers=1).save_pretrained(folder)
            # Nothing is known of weights that are not there.
            self.assertNotIn("mtp", doctor("--model", folder))
            for tensors, level, text in (
                ({"mtp.fc.weight": torch.ones(2)}, "Notes", "keep it. To train it too, use train --mtp, or"),
                (
                    {"lm_head.weight": torch.ones(2)},
                    "Problems",
                    "and the checkpoint has none. vLLM does not start with it.",
                ),
            ):
                save_file(tensors, Path(folder, "model.safetensors"))
                stdout = doctor("--model", folder, status=int(level == "Problems"))
                self.assertIn(text, " ".join(sections(stdout)[level]))

    def test_files_of_weights_that_are_missing(self):
        config = Qwen3_5TextConfig(**TINY, mtp_num_hidden_layers=1)
        lacks = f"{self.folder} has no %s, so its weights cannot be loaded."
        stdout = self.doctor(config)
        self.assertIn(lacks % "model.safetensors", sections(stdout)["Notes"])
        # Whoever passes a configuration needs no weights.
        self.assertNotIn("has no", doctor("--model", self.folder / "config.json"))
        names = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
        index = {"metadata": {}, "weight_map": dict(zip(("a", "mtp.fc.weight", "c"), names, strict=True))}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index))
        for tensor, missing in index["weight_map"].items():
            stdout = doctor("--model", self.folder, status=1)
            # Nothing is said of the head, which may be in the file.
            self.assertEqual(sections(stdout)["Problems"], [lacks % missing, "download or save it again"])
            save_file({tensor: torch.ones(2)}, self.folder / missing)
        self.assertNotIn("has no", doctor("--model", self.folder))
        # Transformers loads the file of all weights if there is one.
        (self.folder / names[2]).unlink()
        save_file({"mtp.fc.weight": torch.ones(2)}, self.folder / "model.safetensors")
        self.assertNotIn("has no", doctor("--model", self.folder))

    @parameterized.expand([(None, True), ((8, 0), True), ((8, 9), False)])
    def test_what_becomes_of_weights_in_fp8(self, capability, dequantized):
        config = Qwen3_5TextConfig(**TINY, quantization_config=IN_BLOCKS)
        with gpu(capability) if capability else contextlib.nullcontext():
            stdout = self.doctor(config)
        (note,) = (line for line in sections(stdout)["Notes"] if "The checkpoint is in FP8." in line)
        self.assertEqual(
            ("dequantizes its weights at loading" in note, "stay so" in note), (dequantized, not dequantized)
        )

    @parameterized.expand([("qwen3_next", False), ("qwen3_5_text", True)])
    def test_a_head_that_is_not_declared(self, family, says):
        """Servers assume a head of Qwen3-Next, whose released configurations declare none."""
        with tempfile.TemporaryDirectory() as folder:
            tiny_config(family).save_pretrained(folder)
            save_file({"mtp.fc.weight": torch.ones(2)}, Path(folder, "model.safetensors"))
            stdout = doctor("--model", folder)
        notes = " ".join(sections(stdout)["Notes"])
        self.assertIn("has a head of multi-token prediction", notes)
        self.assertEqual("does not declare it" in notes, says)

    @parameterized.expand(["qwen3_5_text", "qwen3_5"])
    def test_padded_batches_that_would_not_be_packed(self, family):
        config = tiny_config(family)
        self.assertNotIn("with their padding", self.doctor(config))
        config.get_text_config().output_hidden_states = True
        stdout = self.doctor(config)
        slow = [line for line in sections(stdout)["Slow"] if "padding:" in line]
        self.assertEqual(slow, ["Padded batches are computed with their padding: output_hidden_states."])

    def test_sizes_that_kernels_refuse(self):
        sizes = {"head_dim": 48, "linear_key_head_dim": 96, "linear_value_head_dim": 512}
        with gpu():
            stdout = self.doctor(Qwen3_5TextConfig(**TINY | sizes))
            slow = "\n".join(sections(stdout)["Slow"])
            self.assertIn(
                "gated_delta_rule runs as reference: flash_qla needs head dimensions of 128, not 96 and 512", slow
            )
            self.assertIn("fla supports head dimensions up to 256, not 96 and 512", slow)
            self.assertIn("qk_norm_rope runs as reference: triton needs a head dimension that is a power of two", slow)
            # The convolution and a split take the place of the fused kernel.
            self.assertNotIn("causal_conv1d", slow)
            self.assertIn("not triton: it needs keys of 16 to 256 channels and values of a multiple of them", stdout)
            stdout = self.doctor(Qwen3_5TextConfig(**TINY | {"head_dim": 12}))
            self.assertIn("attention sdpa runs as per_document(sdpa): varlen_attn needs a head dimension", stdout)

    @parameterized.expand(
        [
            (
                Qwen3_5TextConfig(**SIZES["27B"]),
                "FP8 computes 97% of the products .* tokens, which is faster",
                True,
            ),
            (Qwen3_5TextConfig(**SIZES["0.8B"]), "FP8 computes 29% of .* saves little", False),
            (Qwen3_5MoeTextConfig(), "FP8 computes 50% of .* because experts stay in bfloat16", False),
            (Qwen3_5MoeTextConfig(quantization_config=IN_BLOCKS), "FP8 computes 90% of .*, with experts,", True),
            (
                Qwen3_5MoeTextConfig(quantization_config=IN_BLOCKS | {"weight_block_size": [64, 64]}),
                "FP8 computes 0% of .* because experts stay",
                False,
            ),
            (tiny_config("olmo_hybrid"), None, False),
        ]
    )
    def test_float8(self, config, expected, advises):
        """By the products that would run in it. Only Qwen's families have it."""
        with gpu():
            notes = sections(self.doctor(config))["Notes"]
        found = [note for note in notes if "FP8" in note and "The checkpoint is in FP8." not in note]
        self.assertEqual(len(found), int(expected is not None))
        if expected:
            self.assertRegex(found[0], expected)
        self.assertEqual("float8=True" in notes, advises)

    @parameterized.expand(
        [
            ("bamba", "modules that mix along the row compute it with the ops of this package"),
            (
                "opt",
                "the base model computes the documents as padded batches, because its attention mask ignores position ids",
            ),
            ("llama", "Transformers' own classes keep documents apart"),
        ]
    )
    def test_other_families(self, family, support):
        config = tiny_config(family)
        stdout = self.doctor(config)
        self.assertIn(f"ForCausalLM, 0.00B parameters: {support}", stdout)
        self.assertNotIn("would train with", stdout)
        mixes = f"Transformers' own {family.title() if family != 'opt' else 'OPT'}ForCausalLM mixes the documents"
        self.assertEqual(mixes in stdout, family != "llama")
        # Documents of a padded batch are apart with any attention.
        self.doctor(config, "--attn", "paged|sdpa", status=int(family != "opt"))
        with gpu():
            masks = sections(self.doctor(config)).get("Slow", [])
            self.assertEqual(
                masks[:1], [] if family in ("opt", "bamba") else ["Attention sdpa applies a mask over the whole row."]
            )
            self.assertNotIn("Slow", sections(self.doctor(config, "--attn", "flash_attention_2")))

    def test_families_that_cannot_be_packed(self):
        stdout = self.doctor(BertConfig(num_hidden_layers=1), status=1)
        (problem,) = sections(stdout)["Problems"]
        self.assertIn("its attention is bidirectional", problem)
        stdout = self.doctor(tiny_config("llava"), status=1)
        self.assertEqual(sections(stdout)["Problems"][1], f"transformers-packed audit {self.folder}")

    def test_no_language_model(self):
        ViTConfig().save_pretrained(self.folder)
        error = "expected a causal language model, got the type vit. Choose a model that generates text.\n"
        self.assertEqual(fails("doctor", "--model", self.folder), f"transformers-packed doctor: {error}")

    def test_a_wrong_configuration(self):
        for text, error in (
            ('{"model_type": "qwen3_5_text"', "cannot read a configuration from .*not a valid JSON file"),
            (
                '{"model_type": "qwen3_5_text", "hidden_size": "x"}',
                "expected a valid configuration, got .*'hidden_size'",
            ),
            ("{}", "Unrecognized model in .*"),
        ):
            (self.folder / "config.json").write_text(text)
            stderr = fails("doctor", "--model", self.folder)
            self.assertRegex(stderr, f"^transformers-packed doctor: .*{error}")
            self.assertEqual(len(stderr.splitlines()), 1, stderr)

    def test_json(self):
        config = Qwen3_5MoeTextConfig(**TINY)
        for machine, device in ((contextlib.nullcontext(), "cpu"), (gpu(flash_qla_problem=NO_FLASH_QLA), "cuda")):
            with machine:
                found = json.loads(self.doctor(config, "--json"))
            self.assertEqual((found["ok"], found["device"]), (True, device))
            self.assertEqual(found["versions"]["torch"], metadata.version("torch"))
            self.assertEqual(found["model"]["class"], "Qwen3_5MoeForCausalLM")
            self.assertEqual({finding["level"] for finding in found["findings"]} - {"warning"}, {"note"})
        refused = {"implementation": "flash_qla", "reason": "needs head dimensions of 128, not 8 and 8"}
        self.assertEqual(found["ops"]["gated_delta_rule"], {"runs": "fla", "refused": [refused]})
