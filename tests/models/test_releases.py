"""Private parts of other libraries: the one file that names them, and what it says about each."""

import ast
import importlib
import inspect
import pkgutil
import sys
import unittest
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

import transformers_packed
from transformers_packed import patch_model
from transformers_packed.models import releases


SRC = Path(transformers_packed.__file__).parent
HOME = "models/releases.py"
# PyTorch's, which the ops and the copies of a model's state cannot do without. Tests run on each release of `setup.py`.
TORCH = set(
    "_C _autograd _dynamo _inductor _are_functorch_transforms_active _get_current_graph_task_keep_graph "
    "_top_saved_tensors_default_hooks _foreach_add_ _foreach_copy_ _foreach_mul _scaled_mm _scaled_mm_v2 "
    "_scaled_grouped_mm _scaled_grouped_mm_v2 _unsafe_view _version "
    "_is_view _base _local_tensor _buffers _modules _parameters _compiled_call_impl _orig_mod _DropoutNd _NormBase "
    "_forward_hooks _forward_pre_hooks _backward_hooks _backward_pre_hooks _forward_pre_hooks_with_kwargs "
    "_post_accumulate_grad_hooks _get_name _pytree _to_copy _make_wrapper_subclass _schema _state_dict_hooks "
    "_disabled_torch_function_impl _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward "
    "_SetExcludeDispatchKeyGuard _is_exporting_flag".split()
)
# What has another way without it, by the code that has it or sets these attributes, and what happens without.
OPTIONAL = {
    "transformers:Trainer._set_signature_columns_if_needed": "_signature_columns",
    # A batch has the rows of the arguments, and a loss is taken for a shifted one.
    "transformers:Trainer.__init__": "_train_batch_size _loss_shifts_labels",
    "transformers:TrainingArguments": "_n_gpu",  # `train` beside unused GPUs is an error
    "transformers:PreTrainedModel._no_split_modules": "",  # FSDP2 gathers all of a teacher at once
    "transformers:PreTrainedModel._supports_flash_attn": "",  # `doctor` does not advise to use FlashAttention
    "transformers:PreTrainedConfig": "_commit_hash",  # configurations are saved with the revision
    # No graph is recorded, and layers of families without classes of their own raise an error when they run again.
    "transformers:PreTrainedModel._set_gradient_checkpointing": "_gradient_checkpointing_func",
    "transformers.integrations.moe:use_experts_implementation": "_apply_gate",  # Transformers' experts run
    # The convolution of the n-grams reads the document before.
    "transformers.models.qwen4_exp.modeling_qwen4_exp:Qwen4ExpTextPLELayer._short_conv": "",
    # Adapters and hooks on `dt_proj` have no effect, as in other families.
    "transformers.models.jamba.modeling_jamba:JambaMambaMixer": "_is_quantized",
    "transformers.quantizers.base:HfQuantizer._dequantize": "",  # experts stay in 4 bit
    # Weights of a quantized checkpoint require gradients, which nothing computes.
    "transformers.quantizers.base:HfQuantizer._process_model_after_weight_loading": "",
    # `device_map="auto"` counts 16 bits for each weight.
    "transformers.quantizers.base:HfQuantizer._process_model_before_weight_loading": "",
    # `patch_model` refuses a `device_map`, and reference models in mixed precision.
    "accelerate.hooks:add_hook_to_module": "_hf_hook _old_forward",
    "accelerate:Accelerator": "_original_forward _is_accelerate_prepared",
    # Models that change are saved twice, and the loader of a tried evaluation stays listed.
    "accelerate:Accelerator.__init__": "_models _dataloaders",
    "transformers:PreTrainedModel._hf_peft_config_loaded": "",  # heads beside Transformers' adapters are not saved
    # DDP raises an error for weights in FP8 where its backend cannot send them.
    "torch.nn.parallel:DistributedDataParallel.__init__": "_ddp_params_and_buffers_to_ignore",
    "peft:PeftModel._get_base_model_class": "",  # saved adapters may name our class
    "peft.tuners.lora.layer:ParamWrapper": "_did_swap_in_out_features",  # PEFT's forward runs
    "trl:SFTTrainer.__init__": "_is_vision_dataset",  # the error names the collator, not the images
    "trl:GRPOTrainer._get_per_token_logps_and_entropies": "",  # no check of the first step
    "trl:DistillationTrainer._compute_loss": "",  # TRL's own products
    "trl.trainer.distillation_trainer:_chunked_divergence_loss": "",
    "trl:DPOTrainer.__init__": "_metrics",  # the check compares the loss alone
    "trl.trainer.utils:_ChunkedLogProbFunction": "",  # TRL's own scores
    "trl.trainer.utils:add_fused_lm_head": "",  # `patch_model` refuses models with TRL's forward
}
PARTS = dict.fromkeys((*releases.MODELS, *releases.TRAINING), "") | OPTIONAL
# One file for each other library: what it names there has a fallback or is fixed by the library's interface.
OTHERS = {
    ("data/dataset.py", "_indices"),  # datasets
    ("data/dataset.py", "_fingerprint"),
    ("data/streaming.py", "_ex_iterable"),
    ("data/tables.py", "_indices"),
    ("cli/options.py", "_actions"),  # argparse
    ("cli/process.py", "_exit"),  # os
    # Settings that every modeling file of Transformers reads from its configuration, and the ops too.
    ("foreign.py", "_attn_implementation"),
    ("foreign.py", "_experts_implementation"),
    ("ops/backends/flash_qla_kernels.py", "_exit"),
    ("ops/backends/flash_qla.py", "_flash_qla_prepared_varlen"),
    ("ops/compilations.py", "_bench"),  # Triton
}


# Attributes of this package on modules of others, by text.
OURS = {"_float8_from", "_derived"}
# Ends of the names of ops.
SUFFIXES = {"_linear", "_lora"}
_COMPARE = ("endswith", "startswith")


def _is_private(name) -> bool:
    return isinstance(name, str) and name.isidentifier() and name.startswith("_") and not name.endswith("__")


def _own_names(trees) -> set[str]:
    """The names that this package defines: functions, classes, variables, arguments and attributes of its objects."""
    names = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            names.add(node.attr)
    return names


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def _used_names(tree: ast.Module):
    """Private names that code reads: attributes, imports, and texts that name one. Parts of texts name none.

    A method may call what it overrides: `test_overridden_methods_are_listed` looks at the method.
    """
    parts = set()
    for node in ast.walk(tree):
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(node, ast.JoinedStr) or getattr(called, "attr", "") in _COMPARE:
            parts |= {id(part) for part in ast.walk(node) if isinstance(part, ast.Constant)}
        elif isinstance(node, ast.FunctionDef) and _is_private(node.name):
            parts |= {id(part) for part in ast.walk(node) if getattr(part, "attr", None) == node.name}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in parts:
            yield node.attr
        elif isinstance(node, ast.Constant) and id(node) not in parts:
            yield node.value
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (alias.name for alias in node.names)


def _listed() -> set[str]:
    """The private names that are listed."""
    names = {name for part, sets in PARTS.items() for name in (*part.partition(":")[2].split("."), *sets.split())}
    return {name for name in names if _is_private(name)}


class PrivatePartsTest(unittest.TestCase):
    def test_one_file_names_them(self):
        trees = {str(path.relative_to(SRC)): ast.parse(path.read_text(encoding="utf-8")) for path in SRC.rglob("*.py")}
        own, listed, others = _own_names(trees.values()) | OURS | SUFFIXES, _listed(), set()
        for file, tree in trees.items():
            # The plugins of other frameworks name the private parts of their own framework.
            if file == HOME or file.startswith("integrations/"):
                continue
            for name in filter(_is_private, _used_names(tree)):
                if name in listed or name not in own | TORCH:
                    others.add((file, name))
        self.assertEqual(others, OTHERS)

    def test_the_one_file_lists_what_it_names(self):
        tree = ast.parse((SRC / HOME).read_text(encoding="utf-8"))
        names = set(filter(_is_private, _used_names(tree))) - _own_names([tree])
        self.assertEqual(names - _listed(), set())

    def test_overridden_methods_are_listed(self):
        others = set()
        for info in pkgutil.walk_packages(transformers_packed.__path__, "transformers_packed."):
            # The last one registers our classes.
            if info.name.endswith(("__main__", ".bench_arm", ".auto")) or ".integrations" in info.name:
                continue
            for cls in vars(importlib.import_module(info.name)).values():
                if inspect.isclass(cls) and cls.__module__ == info.name:
                    ours, theirs = [], []
                    for base in cls.__mro__:
                        (ours if base.__module__.startswith("transformers_packed") else theirs).append(base)
                    stock = (base for base in theirs if base.__module__.startswith(("transformers.", "trl.", "peft.")))
                    known = {name for base in stock for name in vars(base)}
                    names = {name for base in ours for name in vars(base) if _is_private(name) and name in known}
                    # Transformers keeps answers on the class when they are first asked for, and Python those of abstract classes.
                    others |= {name for name in names if not name.endswith(("_cached_value", "_abc_impl"))}
        self.assertEqual(others - _listed(), set())

    def test_this_release_has_them(self):
        for part, sets in PARTS.items():
            module, _, name = part.partition(":")
            # Optional libraries, and families that earlier releases lack.
            package = (
                module.rpartition(".")[0] if module.startswith("transformers.models.") else module.partition(".")[0]
            )
            if find_spec(package) is None:
                continue
            with self.subTest(part):
                found = attrgetter(name)(importlib.import_module(module))
                for attribute in sets.split():
                    self.assertIn(attribute, inspect.getsource(found))

    def test_what_is_missing_is_named(self):
        with self.assertRaisesRegex(ImportError, r"lacks transformers.Trainer._no_such_method.*>=5.16.1,<6"):
            releases.check_names(("transformers:Trainer._no_such_method",))

    def test_without_optional_parts(self):
        trainer = SimpleNamespace(args=SimpleNamespace(train_batch_size=3))
        self.assertEqual((releases.rows_per_batch(trainer), releases.shifts_labels(trainer)), (3, True))
        self.assertEqual((releases.token_logps(trainer), releases.training_metrics(trainer)), (None, {}))
        self.assertEqual((releases.dataloaders_of(trainer), releases.has_images(trainer)), ([], False))
        layer = torch.nn.Linear(1, 1)
        self.assertIsNone(releases.checkpoint_of(layer))
        self.assertFalse(
            releases.undo_prepare(layer) or releases.has_hooks(layer) or releases.has_swapped_features(layer)
        )


class NewerReleasesTest(unittest.TestCase):
    def test_a_newer_release_warns_once(self):
        config = Qwen3_5TextConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=4)
        releases.logger.warning_once.cache_clear()
        self.addCleanup(releases.logger.warning_once.cache_clear)
        with mock.patch.object(sys.modules["transformers"], "__version__", "5.99.0.dev0"):
            with self.assertLogs(releases.logger, "WARNING") as logs:
                models = [patch_model(Qwen3_5ForCausalLM(config)) for _ in range(2)]
        self.assertEqual(len(logs.output), 1)
        self.assertIn("transformers 5.99.0.dev0 is newer than 5.24", logs.output[0])
        row = {"input_ids": torch.ones(1, 4, dtype=torch.long), "cu_seqlens": torch.tensor([0, 1, 4])}
        self.assertEqual(models[0](**row).logits.shape, (1, 4, 64))

    def test_tested_releases_do_not_warn(self):
        for library, tested in releases.TESTED.items():
            with mock.patch.dict("sys.modules", {library: mock.Mock(__version__=f"{tested}.7")}):
                with self.assertNoLogs(releases.logger, "WARNING"):
                    releases.check_names(())
