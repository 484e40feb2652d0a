"""What the first import of the package does and does not do. Each check runs in a fork, so that imports are paid once.

The argument is a folder for a pickle.
"""

import importlib
import os
import pickle
import sys
import traceback
from importlib.metadata import version
from pathlib import Path

import torch
from packaging.version import Version


PICKLE = Path(sys.argv[1], "model.pickle")
# These import the ops, and thereby `transformers.modeling_utils`, which imports the compiler of torch.
LATE = (
    ".audit",
    ".models.cuda_graphs",
    ".models.float8",
    ".models.host_experts",
    ".models.host_layers",
    ".models.mtp_head",
)
LATE += (
    ".training.configure",
    ".ops.invariance",
    ".training.callbacks",
    ".training.trainer",
    ".training.verify",
    ".training.warm_up",
)
STOCK = ("modeling_utils", "masking_utils", "cache_utils", "data.data_collator", "trainer", "integrations.hub_kernels")
STOCK += ("models.auto.modeling_auto", "utils.output_capturing", "models.qwen3_5.modeling_qwen3_5")
TINY = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 16}
TINY |= {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "num_key_value_heads": 2}
TINY |= {"linear_key_head_dim": 8, "linear_value_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}


def loads_no_kernels_and_no_models():
    import transformers_packed

    names = [name for name, module in transformers_packed._HOMES.items() if not f".{module}".startswith(LATE)]
    assert len(names) > 15
    for name in names:
        getattr(transformers_packed, name)
    # Before 5.23, the masks of Transformers import torch's compiler, which imports triton.
    earlier = Version(version("transformers")) < Version("5.23")
    kernels = {"fla", "causal_conv1d"} if earlier else {"fla", "causal_conv1d", "triton"}
    assert not kernels & {name.partition(".")[0] for name in sys.modules}
    assert not [name for name in sys.modules if "modeling_qwen3" in name]
    assert not torch.cuda.is_initialized()


def refuses_families_of_a_later_release():
    """In a process that takes this release for an earlier one, after it has imported the package for this release."""
    import transformers

    loads_no_kernels_and_no_models()
    for name in [name for name in sys.modules if name.startswith("transformers_packed")]:
        del sys.modules[name]
    transformers.__version__ = "5.19.0"
    from transformers_packed.models.families import FAMILIES, OWN

    assert [family.name for family in OWN] == ["qwen3_next", "qwen3_5", "qwen3_5_moe"]
    assert FAMILIES["kimi_linear"].apart.why == "its classes need transformers >= 5.20"


def changes_nothing_in_transformers_and_patches():
    """Neither does access to a subpackage by its name. A model is patched if only the package was imported."""
    import transformers

    modules = [importlib.import_module(f"transformers.{name}") for name in STOCK]
    before = [dict(vars(module)) for module in modules]
    import transformers_packed

    for name in ("ops", "parallel", "models", "data", "audit", "training"):
        assert getattr(transformers_packed, name).__path__
    exec("from transformers_packed import *")
    for module, names in zip(modules, before, strict=True):
        assert all(getattr(module, name) is value for name, value in names.items()), module
    assert not transformers.AutoModelForCausalLM._model_mapping._extra_content
    model = transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**TINY))
    transformers_packed.patch_model(model)
    row = {"input_ids": torch.arange(9)[None], "cu_seqlens": torch.tensor([0, 4, 9])}
    together = model(**row).logits
    alone = [model(input_ids=row["input_ids"][:, a:b]).logits for a, b in ((0, 4), (4, 9))]
    assert torch.allclose(together, torch.cat(alone, 1), atol=1e-6)
    PICKLE.write_bytes(pickle.dumps((model, row, together)))


def unpickles_a_patched_model():
    """A pickle loads its classes."""
    model, row, together = pickle.loads(PICKLE.read_bytes())
    assert torch.equal(model(**row).logits, together)


def run(check):
    if not (process := os.fork()):
        try:
            check()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(process, 0)[1]


failed = [run(refuses_families_of_a_later_release)]
# The stock class would call these packages without a GPU.
sys.modules["fla"] = sys.modules["causal_conv1d"] = None
for part in STOCK:
    importlib.import_module(f"transformers.{part}")
failed += [run(changes_nothing_in_transformers_and_patches), run(unpickles_a_patched_model)]
sys.exit(any(failed))
