"""Pass the keyword arguments of a model's forward on to the layers that mix along the sequence."""

from functools import partial

import libcst as cst

from ..edits import (
    AlreadyFixed,
    TargetChanged,
    add_argument,
    calls_in,
    code_of,
    edit,
    edit_calls,
    edit_statements,
    find,
    has_argument,
    names_in,
    statements,
)
from ..patch import Patch
from ..source import Edited, parse
from .hub_kernels import isolates


# By file, the methods with the calls that get `**kwargs`.
CALLS = {
    "models/mamba2/modeling_mamba2.py": {"Mamba2ForCausalLM.forward": "self.backbone"},
    **dict.fromkeys(
        ("models/jamba/modular_jamba.py", "models/jamba/modeling_jamba.py"),
        {"JambaMambaMixer.forward": "mamba_selective_scan", "JambaMambaDecoderLayer.forward": "self.mamba"},
    ),
    "models/zamba/modeling_zamba.py": {"ZambaMambaMixer.forward": "mamba_selective_scan"},
    "models/mamba/modeling_mamba.py": {
        "MambaMixer.forward": "mamba_selective_scan",
        "MambaBlock.forward": "self.mixer",
        "MambaModel.forward": "mixer_block",
        "MambaForCausalLM.forward": "self.backbone",
    },
    "models/falcon_mamba/modular_falcon_mamba.py": {"FalconMambaMixer.forward": "mamba_selective_scan"},
    "models/falcon_mamba/modeling_falcon_mamba.py": {
        "FalconMambaMixer.forward": "mamba_selective_scan",
        "FalconMambaBlock.forward": "self.mixer",
        "FalconMambaModel.forward": "mixer_block",
        "FalconMambaForCausalLM.forward": "self.backbone",
    },
}
# This fused kernel replaces the convolution and the scan, and does not support sequence boundaries.
FUSED = "mamba_inner_fn"
PACKED = """
# The fused kernel is not told of packed sequences
packed = any(kwargs.get(name) is not None for name in ("cu_seqlens", "cu_seq_lens_q", "seq_idx"))
"""


def hand_over(callee: str, function: cst.FunctionDef) -> cst.FunctionDef:
    if function.params.star_kwarg is None:
        raise TargetChanged(f"expected `**kwargs` of `{function.name.value}`")
    return edit_calls(function, callee, lambda call: add_argument(call, "**kwargs"))


def convolve_with_kwargs(function: cst.FunctionDef) -> cst.FunctionDef:
    """Pass all boundaries to the convolution of Zamba, as in the other models, instead of `seq_idx` alone."""

    def change(call):
        kept = [arg for arg in call.args if arg.keyword is None or arg.keyword.value != "seq_idx"]
        if len(kept) == len(call.args):
            raise TargetChanged("expected an argument `seq_idx` of `causal_conv1d_fn`")
        return add_argument(call.with_changes(args=kept), "**kwargs")

    return edit_calls(function, "causal_conv1d_fn", change)


def skip_fused(function: cst.FunctionDef) -> cst.FunctionDef:
    def change(statement):
        test = cst.BooleanOperation(left=statement.test, operator=cst.And(), right=cst.parse_expression("not packed"))
        return [*statements(PACKED), statement.with_changes(test=test)]

    return edit_statements(
        function,
        f"condition of {FUSED}",
        lambda s: isinstance(s, cst.If) and FUSED in names_in(s) and "self.training" in code_of(s.test),
        change,
    )


def apply(tree: Edited) -> None:
    done = [
        all(has_argument(call, "**kwargs") for call in calls_in(find(parse(tree.read(file)), path), callee))
        for file, calls in CALLS.items()
        for path, callee in calls.items()
    ]
    if all(done):
        raise AlreadyFixed("all of these models hand their kwargs on")
    for file, calls in CALLS.items():
        for path, callee in calls.items():
            tree.edit(file, lambda module, p=path, c=callee: edit(module, p, partial(hand_over, c)))
            if calls_in(find(parse(tree.read(file)), path), FUSED):
                tree.edit(file, lambda module, p=path: edit(module, p, skip_fused))
            if path.startswith("Zamba"):
                tree.edit(file, lambda module, p=path: edit(module, p, convolve_with_kwargs))
    isolates(tree, "zamba")


PATCH = Patch(
    title="Hand the boundaries of packed sequences on to the Mamba layers of five models",
    summary="The boundaries that a batch comes with are dropped on the way to the Mamba layers, without a word.",
    problem="""\
`Mamba2ForCausalLM` does not hand its keyword arguments to the backbone, Jamba not from the decoder layer to the
mixer, Mamba and Falcon-Mamba neither from the model to the blocks nor from the blocks to the mixers, and none
of them nor Zamba to the scan. So `seq_idx` and `cu_seq_lens_q` from the collator never arrive: the convolution
and the state run across packed sequences, with kernels and without, and nothing is reported. Bamba, Falcon-H1,
Nemotron-H and Zamba2 hand them on.""",
    change="""\
The calls in between get `**kwargs`. In Mamba and Falcon-Mamba a packed row skips the fused `mamba_inner_fn`,
which takes no boundaries. Where the kernels are missing, a packed batch now is the same error as in the other
models (gdn-torch-path-packed makes it run). mamba-ssm's `selective_scan_fn`, of Mamba, Falcon-Mamba, Jamba and
Zamba, takes no boundaries either: with that kernel the convolution keeps sequences apart now, and the state
only together with gdn-torch-path-packed.""",
    families="Mamba2, Jamba, Mamba, Falcon-Mamba, Zamba",
    issues=("#35861", "#35941"),
    reproduction="""\
import torch
from transformers import Mamba2Config, Mamba2ForCausalLM
from transformers.models.mamba2 import modeling_mamba2


def kernel(hidden_states, *args, seq_idx=None, **kwargs):
    print("the convolution is given seq_idx =", seq_idx)
    return hidden_states


modeling_mamba2.causal_conv1d_fn = kernel
modeling_mamba2.mamba2_split_conv1d_scan_combined = lambda *args, **kwargs: None
modeling_mamba2.mamba2_chunk_scan = lambda hidden_states, *args, **kwargs: hidden_states
config = Mamba2Config(
    vocab_size=8, hidden_size=16, num_heads=4, head_dim=8, n_groups=1, state_size=8, num_hidden_layers=1
)
Mamba2ForCausalLM(config)(torch.tensor([[1, 2, 3]]), seq_idx=torch.tensor([[0, 0, 1]]), use_cache=False)
""",
    apply=apply,
    beside="tests/models/mamba2/test_modeling_mamba2.py and those of the other models",
)
