"""Make `MtpModel` find and run the layer of multi-token prediction of Qwen3-Next, Qwen3.5 and Qwen3.5-MoE."""

import libcst as cst
import libcst.matchers as m

from ..edits import (
    AlreadyFixed,
    assigns,
    code_of,
    document,
    edit,
    edit_statements,
    find,
    insert_after,
    insert_before,
    insert_first,
    statements,
)
from ..patch import Patch
from ..source import Edited


QWEN3_NEXT = "models/qwen3_next/configuration_qwen3_next.py", "Qwen3NextConfig"
# The file from a modular one, its class, and what removes an inherited field in the modular file.
FAMILIES = {
    "qwen3_5": ("Qwen3_5TextConfig", "router_aux_loss_coef"),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", "mlp_only_layers"),
}
# Derives from the configuration of Qwen3.5-MoE.
DERIVED = "models/qwen4_exp/configuration_qwen4_exp.py", "Qwen4ExpTextConfig"

LAYER_TYPES = """

    @property
    def mtp_layer_types(self):
        return ["full_attention"] * self.num_mtp_layers
"""


def names(name: str) -> str:
    return f'attribute_map = {{"num_mtp_layers": "{name}"}}'


def is_function(name: str):
    return lambda statement: isinstance(statement, cst.FunctionDef) and statement.name.value == name


def is_field(name: str):
    field = m.AnnAssign(target=m.Name(name))
    return lambda statement: m.matches(statement, m.SimpleStatementLine(body=[field]))


def configure(node: cst.ClassDef, name: str) -> cst.ClassDef:
    """Map the number of layers to its name in released configurations, and add the types of the layers."""
    node = insert_after(node, "model_type", assigns("model_type"), names(name))
    return insert_after(node, "__post_init__", is_function("__post_init__"), LAYER_TYPES)


def configure_qwen3_next(node: cst.ClassDef) -> cst.ClassDef:
    node = configure(node, "num_nextn_predict_layers")
    node = insert_after(node, "eos_token_id", is_field("eos_token_id"), "num_mtp_layers: int = 1")
    text = """
        num_mtp_layers (`int`, *optional*, defaults to 1):
            Number of multi-token prediction (MTP) layers in the checkpoint. Released checkpoints have one.
    """
    return document(node, "mlp_only_layers", text)


def configure_modular(node: cst.ClassDef, last: str) -> cst.ClassDef:
    node = insert_after(node, "model_type", assigns("model_type"), names("mtp_num_hidden_layers"))
    # Only the configurations of checkpoints with such a layer have this field.
    return insert_after(node, last, assigns(last), "num_mtp_layers = AttributeError()")


def edit_weights(function: cst.FunctionDef) -> cst.FunctionDef:
    code = """
        # The main model may leave out other parts as well, e.g. a vision tower
        if match_object is None and "mtp" not in pattern:
            continue
    """
    append = "final_mtp_patterns.append(pattern)"
    return insert_before(function, append, lambda s: code_of(s).strip() == append, code)


def edit_forward(function: cst.FunctionDef) -> cst.FunctionDef:
    def is_code(code):
        return lambda statement: code_of(statement).strip() == code

    none, start = "loss = None", "loss = None if labels is None else 0.0"
    function = edit_statements(function, none, is_code(none), lambda _: statements(start))
    roll = "position_ids = torch.cat([position_ids[:, 1:], position_ids[:, -1:] + 1], dim=-1)"
    return edit_statements(function, roll, is_code(roll), lambda _: statements(roll.replace("[:, ", "[..., ")))


def edit_layer(function: cst.FunctionDef) -> cst.FunctionDef:
    code = """
        # With multimodal RoPE, the positions of the text come first if there are four rows, as in the main model
        text_position_ids = position_ids
        if position_ids is not None and position_ids.ndim == 3:
            has_text = position_ids.shape[0] == 4
            text_position_ids = position_ids[0] if has_text else None
            position_ids = position_ids[1:] if has_text else position_ids
    """
    function = insert_first(function, code)
    made = m.Call(func=m.Attribute(attr=m.Name("create_masks_for_mtp_layer")))
    run = m.Call(func=m.Subscript(value=m.Attribute(attr=m.Name("layers"))))
    calls = [*m.findall(function, made), *m.findall(function, run)]

    def give_text(call):
        return call.with_changes(
            args=[
                arg.with_changes(value=cst.Name("text_position_ids"))
                if m.matches(arg.value, m.Name("position_ids"))
                else arg
                for arg in call.args
            ]
        )

    for call in calls:
        function = function.deep_replace(call, give_text(call))
    return function


def apply_to_layers(module: cst.Module) -> cst.Module:
    module = edit(module, "MtpModel.get_mtp_weights_regex", edit_weights)
    module = edit(module, "MtpModel.forward", edit_forward)
    return edit(module, "MtpModel.forward_layer", edit_layer)


def apply(tree: Edited) -> None:
    path, name = QWEN3_NEXT
    if "num_mtp_layers" in code_of(find(cst.parse_module(tree.read(path)), name)):
        raise AlreadyFixed(f"{name} has num_mtp_layers")
    tree.edit("modeling_layers.py", apply_to_layers)
    tree.edit(path, lambda module: edit(module, name, configure_qwen3_next))
    for family, (cls, last) in FAMILIES.items():
        folder = f"models/{family}"
        tree.edit(
            f"{folder}/modular_{family}.py", lambda module, c=cls, at=last: edit(module, c, configure_modular, at)
        )
        tree.edit(
            f"{folder}/configuration_{family}.py",
            lambda module, c=cls: edit(module, c, configure, "mtp_num_hidden_layers"),
        )
    path, derived = DERIVED
    tree.edit(path, lambda module: edit(module, derived, configure, "mtp_num_hidden_layers"))


PATCH = Patch(
    title="Let MtpModel load and run the MTP layer of Qwen3-Next, Qwen3.5 and Qwen3.5-MoE",
    summary="`MtpModel` does not find the MTP layer of these models, and its loss is an error.",
    problem="""\
Released checkpoints of Qwen3-Next, Qwen3.5 and Qwen3.5-MoE have one layer of multi-token prediction, `mtp.*`. The
conversions of `MtpModel` already fit its weights, but the configs have neither `num_mtp_layers` nor
`mtp_layer_types`, so `get_mtp_config` raises. In the text models, `MtpModel` also takes `^model.visual.*` for a
pattern of MTP weights, because it is in `_keys_to_ignore_on_load_unexpected`, and reads the whole vision tower.
Positions of multimodal RoPE, with three or four rows, are cut along the batch. With `labels` every model raises a
`TypeError`, because the loss is added to `None`.""",
    change="""\
`num_mtp_layers` is `mtp_num_hidden_layers` in Qwen3.5 and `num_nextn_predict_layers` in Qwen3-Next, as released
configs name it. Released configs of Qwen3-Next leave it out, so its default is 1, as for DeepSeek-V3 and GLM-4.5.
Configs of Qwen3.5 without a layer stay without the field. `mtp_layer_types` is full attention. `MtpModel` takes
patterns of a layer number or of `mtp` only, cuts positions along the sequence, gives the rows of multimodal RoPE to
the rotary embedding and the positions of the text to the mask and the layer, and starts its loss at zero. As before,
`labels` are those of the next token: `labels[:, t]` follows `input_ids[:, t]`.

`generate(use_mtp=True)` still refuses these models: their recurrent states cannot go back to an earlier token.
Qwen4-Exp inherits the property, and has no such layer as long as its config does not declare one.""",
    families="Qwen3-Next, Qwen3.5, Qwen3.5-MoE; the loss and the patterns for all models with `MtpModel`",
    issues=("#46229", "#45638", "#45637"),
    reproduction="""\
import os, tempfile
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.modeling_layers import MtpModel

config = Qwen3_5TextConfig(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=2, head_dim=16, layer_types=["full_attention"], mtp_num_hidden_layers=1,
)
folder = tempfile.mkdtemp()
Qwen3_5ForCausalLM(config).save_pretrained(folder)
config.save_pretrained(folder)
path = os.path.join(folder, "model.safetensors")
weights = load_file(path)
layer = {name.replace("model.", "mtp."): x.clone() for name, x in weights.items() if name.startswith("model.layers.0.")}
norms = {f"mtp.{name}.weight": torch.zeros(32) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
save_file(weights | layer | norms | {"mtp.fc.weight": torch.randn(32, 64)}, path, {"format": "pt"})
mtp = MtpModel.from_pretrained(Qwen3_5ForCausalLM.from_pretrained(folder))
print("MTP layers:", mtp.num_mtp_layers)
""",
    apply=apply,
    beside="tests/generation/test_utils.py",
)
