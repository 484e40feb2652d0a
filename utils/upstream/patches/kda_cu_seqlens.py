"""Pass packed boundaries to Kimi delta attention."""

import libcst as cst

from ..edits import AlreadyFixed, add_argument, calls_in, edit_calls, has_argument, insert_before, names_in
from ..patch import Patch
from ..source import Edited


RULES = ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention")


def hand_over(function: cst.FunctionDef) -> cst.FunctionDef:
    if all(has_argument(call, "cu_seqlens") for call in calls_in(function, RULES[0])):
        raise AlreadyFixed(f"{RULES[0]} is given cu_seqlens")
    function = insert_before(
        function,
        "choice between the recurrent and the chunked form",
        lambda s: isinstance(s, cst.If) and set(RULES) <= names_in(s),
        """

        # The kernels call the boundaries of packed sequences `cu_seqlens`
        cu_seqlens, flash_cu_seqlens = kwargs.pop("cu_seqlens", None), kwargs.pop("cu_seq_lens_q", None)
        cu_seqlens = flash_cu_seqlens if cu_seqlens is None else cu_seqlens
        """,
    )
    for rule in RULES:
        function = edit_calls(function, rule, lambda call: add_argument(call, "cu_seqlens=cu_seqlens"))
    return function


def apply(tree: Edited) -> None:
    tree.edit_callers(RULES[0], hand_over)


PATCH = Patch(
    title="Tell Kimi delta attention where packed sequences begin",
    summary="The state of Kimi delta attention runs on from one packed sequence into the next.",
    problem="""\
Layers with Kimi delta attention hand their `kwargs` to `chunk_kda`. The collator's `cu_seq_lens_q` is not among
the names that FLA's kernel takes, so it is dropped, and the state of one packed sequence goes on into the next
without an error. The gated delta nets rename the argument; these layers do not. (Hub kernels do it themselves.)""",
    change="""\
The layers hand over `cu_seqlens`, from `cu_seqlens` or `cu_seq_lens_q`, as gated delta nets do. The torch
function refuses it, as everywhere: a batch with `cu_seq_lens_q` alone, which ran across its sequences, is an
error now where FLA is not installed. In GLM5-next the indexer of the attention still mixes sequences; that is
another matter.""",
    families="Kimi-Linear, Bailing-Hybrid, GLM5-next",
    issues=("#44717",),
    reproduction="""\
import torch
from transformers import KimiLinearConfig
from transformers.models.kimi_linear import modeling_kimi_linear


def kernel(query, key, value, g, beta, cu_seqlens=None, **kwargs):
    print("the kernel is given cu_seqlens =", cu_seqlens)
    return value, None


modeling_kimi_linear.chunk_kimi_delta_attention = kernel
config = KimiLinearConfig(hidden_size=32, linear_head_dim=8, linear_num_heads=2, num_hidden_layers=1)
block = modeling_kimi_linear.KimiLinearDeltaAttention(config, layer_idx=0)
block(torch.randn(1, 5, 32), cu_seq_lens_q=torch.tensor([0, 2, 5]))
""",
    apply=apply,
    beside="tests/models/kimi_linear/test_modeling_kimi_linear.py",
)
