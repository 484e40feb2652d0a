"""Checkpoints in the formats of the Hub: sharded, with separate or fused experts, text-only and composite."""

import copy
import json
import tempfile
from pathlib import Path

import torch
import transformers
from common.processes import run_script
from mixins.model import packed_batch, relative_error
from mixins.patch import BUILTINS, COMPOSITE, PatchTestCase, builtin_model, documents, ours
from mixins.vision import alone_batch, document
from parameterized import parameterized
from safetensors.torch import load_file

import transformers_packed
from transformers_packed.models.families import family_of, modeling_module
from transformers_packed.models.family import Own
from transformers_packed.models.generic import auto_entries


# Family, whether the checkpoint is composite, and whether each expert has separate tensors.
STORED = [
    ("qwen3_next", False, True),
    ("qwen3_5", True, False),
    ("qwen3_5_moe", False, False),
    ("qwen3_5_moe", True, True),
]
FEATURE = document(40, 3, images=((1, 4, 4),), videos=((2, 4, 4),))
HEADS = {"AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModel"}
CASES = [
    (
        f"{config.__name__}_{auto.__name__}_{'unfused' if unfused else 'as_is'}",
        family,
        composite,
        unfused,
        auto.__name__,
    )
    for family, composite, unfused in STORED
    for auto, config, ours in auto_entries(Own)
    if family_of(ours).name == family and composite == ("vision_config" in config.sub_configs)
    if auto.__name__ in HEADS and (auto.__name__ != "AutoModel" or not unfused)
]


def source(family: str, composite: bool) -> torch.nn.Module:
    """Build the stock model of the checkpoint."""
    head = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}.get(family, "") + "ForConditionalGeneration"
    return builtin_model(family, head, COMPOSITE[family]).eval() if composite else builtin_model(family).eval()


def store(model: torch.nn.Module, directory: str, unfused: bool) -> dict:
    """Save in shards. The index has the location of each tensor."""
    model.save_pretrained(directory, max_shard_size="20KB", save_original_format=unfused)
    return json.loads(Path(directory, "model.safetensors.index.json").read_text())["weight_map"]


class CheckpointTest(PatchTestCase):
    def load(self, loader, directory: str, unused: frozenset = frozenset()):
        """Load the model in `directory`. Every weight is present, and only `unused` is left over."""
        model, report = loader.from_pretrained(directory, output_loading_info=True)
        self.assertFalse(report["missing_keys"] | report["mismatched_keys"])
        self.assertEqual(report["unexpected_keys"], unused)
        return model.eval()

    @parameterized.expand([case for case in CASES if case[-1] != "AutoModel" and case[1] != "qwen3_next"])
    def test_trainer_resumes_from_what_is_saved(self, _, family, composite, unfused, auto_name):
        """Trainer loads the saved file by `load_state_dict(..., strict=False)`."""
        auto_class = getattr(transformers, auto_name)
        with tempfile.TemporaryDirectory() as directory, torch.no_grad(), transformers_packed.registered():
            source(family, composite).save_pretrained(f"{directory}/base", save_original_format=unfused)
            trained, resumed = (auto_class.from_pretrained(f"{directory}/base") for _ in range(2))
            for parameter in trained.parameters():
                parameter.add_(1)
            trained.save_pretrained(f"{directory}/checkpoint")
            saved = load_file(f"{directory}/checkpoint/model.safetensors")
            loaded = resumed.load_state_dict({**saved, "other": torch.ones(1)}, strict=False)
            self.assertEqual((loaded.missing_keys, loaded.unexpected_keys), ([], ["other"]))
            for name, weight in trained.state_dict().items():
                self.assertTrue(torch.equal(resumed.state_dict()[name], weight), name)
            names = [name for name in saved if name not in trained.state_dict()]
            self.assertEqual(bool(names), unfused or (composite and auto_name == "AutoModelForCausalLM"))
            if names:
                part = {name: weight for name, weight in saved.items() if name != names[0]}
                with self.assertRaisesRegex(ValueError, f"got a part of them, without {names[0]}"):
                    resumed.load_state_dict(part, strict=False)

    @parameterized.expand(CASES)
    def test_shards_go_both_ways(self, _, family, composite, unfused, auto_name):
        builtin = source(family, composite)
        batch = {"input_ids": documents()[-1][None]}
        if composite and auto_name != "AutoModelForCausalLM":
            batch = alone_batch(FEATURE)
        auto_class = getattr(transformers, auto_name)
        # A base model ignores the weights of the head.
        unused = {"lm_head.weight"} if auto_name == "AutoModel" else set()
        with tempfile.TemporaryDirectory() as directory, torch.no_grad():
            stored = store(builtin, f"{directory}/builtin", unfused)
            self.assertGreater(len(set(stored.values())), 5)
            self.assertEqual(any(".experts.0." in name for name in stored), unfused)
            self.assertEqual(any(".experts." in name for name in stored), family != "qwen3_5")
            expected = (builtin.model if auto_name == "AutoModel" else builtin)(**batch)[0]

            with transformers_packed.registered():
                model = self.load(auto_class, f"{directory}/builtin", unused)
            self.assertIn("", ours(model))
            # All modules are ours, so nothing is left to convert.
            self.assertEqual(ours(transformers_packed.patch_model(copy.deepcopy(model))), ours(model))
            self.assertLess(relative_error(model(**batch)[0], expected), 1e-5)

            # Our class saves the same as the stock class, and the stock class can load it.
            again = store(model, f"{directory}/ours", unfused)
            builtin_class = getattr(BUILTINS[family], type(model).__name__)
            twin = self.load(builtin_class, f"{directory}/builtin", unused)
            self.assertEqual(again, store(twin, f"{directory}/twin", unfused))
            back = self.load(builtin_class, f"{directory}/ours")
            self.assertEqual(ours(back), set())
            self.assertLess(relative_error(back(**batch)[0], expected), 1e-5)

    @parameterized.expand([("qwen3_next", False), ("qwen3_5_moe", True)])
    def test_experts_in_a_fresh_process(self, family, composite):
        """Router logits, expert kernels and isolation are the same if no stock mixture of experts ran before."""
        builtin = source(family, composite)
        code = (
            "import sys, torch, transformers, transformers_packed\n"
            "folder, auto_name = sys.argv[1:]\n"
            "transformers_packed.register()\n"
            "model = getattr(transformers, auto_name).from_pretrained(folder).eval()\n"
            "experts = [model.config.get_text_config()._experts_implementation]\n"
            "with torch.no_grad():\n"
            "    output = model(**torch.load(f'{folder}/batch.pt'), output_router_logits=True)\n"
            "model.set_experts_implementation('batched_mm')\n"
            "experts.append(model.config.get_text_config()._experts_implementation)\n"
            "torch.save([type(model).__module__, experts, output.logits, output.router_logits], f'{folder}/result.pt')\n"
        )
        with tempfile.TemporaryDirectory() as directory, torch.no_grad():
            store(builtin, directory, unfused=True)
            torch.save(packed_batch(documents()), f"{directory}/batch.pt")
            script = Path(directory, "script.py")
            script.write_text(code)
            (process,) = run_script(
                script, directory, "AutoModelForImageTextToText" if composite else "AutoModelForCausalLM"
            )
            self.assertEqual(process.status, 0, process.stderr)
            module, experts, logits, routers = torch.load(f"{directory}/result.pt")
            outputs = [builtin(row[None], output_router_logits=True) for row in documents()]
        self.assertEqual(module, modeling_module(family).__name__)
        # Ours replaces the default of Transformers.
        self.assertEqual(experts, ["transformers_packed", "batched_mm"])
        self.assertLess(relative_error(logits[0], torch.cat([x.logits[0] for x in outputs])), 1e-5)
        for got, *want in zip(routers, *(x.router_logits for x in outputs), strict=True):
            self.assertLess(relative_error(got, torch.cat(want)), 1e-5)
