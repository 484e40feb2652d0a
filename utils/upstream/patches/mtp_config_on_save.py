"""Make `save_pretrained` declare no layers of multi-token prediction that the checkpoint does not have."""

import libcst as cst

from ..edits import AlreadyFixed, code_of, edit, edit_calls, find, insert_before
from ..patch import Patch
from ..source import Edited


METHOD = """
    def _get_config_to_save(self, state_dict: dict | None = None) -> PreTrainedConfig:
        \"\"\"
        The config of a checkpoint with these weights. Models that leave out the multi-token prediction (MTP) layers of
        a checkpoint save none, and the saved config must not declare them: inference engines would look for them.
        \"\"\"
        text_config = self.config.get_text_config(decoder=True)
        # The layers come after those of the main model, or under a name of their own
        patterns = []
        for pattern in self._keys_to_ignore_on_load_unexpected or ():
            layer = re.search(r"\\.(\\d+)", pattern)
            is_mtp = "mtp" in pattern if layer is None else int(layer.group(1)) >= text_config.num_hidden_layers
            if is_mtp:
                patterns.append(pattern)
        keys = [name for name, _ in self.named_parameters()] if state_dict is None else state_dict
        if not patterns or any(re.search(pattern, key) for pattern in patterns for key in keys):
            return self.config

        config = copy.deepcopy(self.config)
        declared = [
            (part, name)
            for part in (config, config.get_text_config(decoder=True))
            for name in ("num_mtp_layers", "mtp_num_hidden_layers")
            if getattr(part, name, None)
        ]
        for part, name in declared:
            setattr(part, name, 0)
        if declared:
            logger.warning_once(
                "The config declares multi-token prediction (MTP) layers, but the model has no weights of them. The "
                "saved config declares none. To keep them, copy their weights from the original checkpoint."
            )
        return config

"""


def apply_to(module: cst.Module) -> cst.Module:
    path = "PreTrainedModel.save_pretrained"
    if "_get_config_to_save" in code_of(find(module, path)):
        raise AlreadyFixed("save_pretrained looks for the declared MTP layers")
    new = "model_to_save._get_config_to_save(state_dict).save_pretrained"
    module = edit(
        module,
        path,
        edit_calls,
        "model_to_save.config.save_pretrained",
        lambda call: call.with_changes(func=cst.parse_expression(new)),
    )
    return edit(
        module,
        "PreTrainedModel",
        insert_before,
        "save_pretrained",
        lambda s: isinstance(s, cst.FunctionDef) and s.name.value == "save_pretrained",
        METHOD,
    )


def apply(tree: Edited) -> None:
    tree.edit("modeling_utils.py", apply_to)


PATCH = Patch(
    title="Do not declare MTP layers in the config of a checkpoint without them",
    summary="A saved checkpoint declares MTP layers whose weights were left out, and vLLM does not start with it.",
    problem="""\
Many models leave out the weights of multi-token prediction layers on load, without a word: these weights match
`_keys_to_ignore_on_load_unexpected`. `save_pretrained` writes the other weights and a config that still declares the
layers (`mtp_num_hidden_layers: 1` in Qwen3.5). With speculative decoding vLLM then stops at start-up because weights
are missing, and SGLang drafts with weights that were never set. After a fine-tune, nothing says why.""",
    change="""\
`save_pretrained` saves a number of zero, in the config and in the config of the text model, if the model leaves out
MTP weights on load and none of the saved weights is one. A warning says so once. The config in memory stays as it is,
so `MtpModel` can still load the layers from the original checkpoint. The field is `num_mtp_layers`, under the name
that `attribute_map` gives, or `mtp_num_hidden_layers`.

Fields under other names stay, because a few models read them: Nemotron-H Omni builds a norm if
`num_nextn_predict_layers` is set.""",
    families="Qwen3.5, Qwen3.5-MoE, DeepSeek-V3, GLM-4.5, Mellum and others that leave out MTP layers",
    issues=("#40968",),
    reproduction="""\
import json, os, tempfile
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

config = Qwen3_5TextConfig(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, head_dim=16, layer_types=["full_attention"], mtp_num_hidden_layers=1,
)
folder = tempfile.mkdtemp()
Qwen3_5ForCausalLM(config).save_pretrained(folder)
with open(os.path.join(folder, "config.json")) as file:
    print("declared layers:", json.load(file)["mtp_num_hidden_layers"], "files:", sorted(os.listdir(folder)))
""",
    apply=apply,
    beside="tests/utils/test_modeling_utils.py",
)
