"""Pass the position ids, which mark packed sequences, to the attention of GraniteMoeHybrid."""

import libcst as cst

from ..edits import (
    AlreadyFixed,
    add_argument,
    assigns,
    calls_in,
    code_of,
    edit,
    edit_calls,
    edit_statements,
    find,
    has_argument,
)
from ..patch import Patch
from ..source import Edited
from .hub_kernels import isolates


FORWARD = "GraniteMoeHybridModel.forward"
FILES = [f"models/granitemoehybrid/{kind}_granitemoehybrid.py" for kind in ("modular", "modeling")]


def hand_over(function: cst.FunctionDef) -> cst.FunctionDef:
    def add_entry(statement):
        entries = statement.body[0].value
        last = entries.elements[-1]
        new = last.with_changes(key=cst.SimpleString('"position_ids"'), value=cst.Name("position_ids"))
        return [statement.with_deep_changes(entries, elements=[*entries.elements, new])]

    function = edit_statements(
        function,
        "mask_kwargs = {...}",
        lambda s: assigns("mask_kwargs")(s) and isinstance(s.body[0].value, cst.Dict),
        add_entry,
    )
    return edit_calls(function, "decoder_layer", lambda call: add_argument(call, "position_ids=position_ids"))


def apply_to(module: cst.Module) -> cst.Module:
    forward = find(module, FORWARD)
    if '"position_ids": position_ids' in code_of(forward) and all(
        has_argument(call, "position_ids") for call in calls_in(forward, "decoder_layer")
    ):
        raise AlreadyFixed(f"{FORWARD} hands position_ids to its masks and layers")
    return edit(module, FORWARD, hand_over)


def apply(tree: Edited) -> None:
    for file in FILES:
        tree.edit(file, apply_to)
    isolates(tree, "granitemoehybrid")


PATCH = Patch(
    title="Hand position_ids to the masks and layers of GraniteMoeHybrid",
    summary="Attention layers see across packed sequences, because no mask knows the position ids.",
    problem="""\
`GraniteMoeHybridModel.forward` takes `position_ids` but uses them for rotary embeddings only. Its masks are
made without them, so the detection of packed sequences, which other models have for SDPA, eager and flex
attention, never runs, and full attention looks at every earlier sequence of the row. FlashAttention is not
given them either and depends on `cu_seq_lens_q`.""",
    change="""\
`position_ids` goes into the arguments of the masks and to the decoder layers, as in Bamba and Jamba.""",
    families="GraniteMoeHybrid",
    issues=("#39194",),
    reproduction="""\
import torch
from transformers import DataCollatorWithFlattening, GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

torch.manual_seed(0)
config = GraniteMoeHybridConfig(
    vocab_size=64, hidden_size=32, intermediate_size=32, shared_intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=2, num_local_experts=0, layer_types=["full_attention"] * 2,
    initializer_range=0.2, mamba_n_heads=4,
)
model = GraniteMoeHybridForCausalLM(config).eval()
first, second = torch.randint(1, 64, (2, 5)).tolist()
batch = DataCollatorWithFlattening()([{"input_ids": first}, {"input_ids": second}])
logits = model(**batch, use_cache=False).logits[0, 5:]
alone = model(torch.tensor([second]), use_cache=False).logits[0]
print("largest difference to the sequence alone:", f"{(logits - alone).abs().max().item():.0e}")
""",
    apply=apply,
    beside="tests/models/granitemoehybrid/test_modeling_granitemoehybrid.py",
)
