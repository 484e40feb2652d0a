"""Return `cu_seqlens` from the collator, and accept it as an argument of the linear-attention blocks."""

import libcst as cst

from ..edits import (
    AlreadyFixed,
    add_argument,
    add_parameters,
    assigns,
    assigns_attribute,
    code_of,
    document,
    edit,
    edit_calls,
    edit_statements,
    find,
    insert_after,
    insert_first,
    parameters,
    replace_argument,
)
from ..patch import Patch
from ..source import Edited


RULES = ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
CONVOLUTION = "causal_conv1d_fn"


def collator(module: cst.Module) -> cst.Module:
    path = "DataCollatorWithFlattening"
    if "return_cu_seqlens" in parameters(find(module, f"{path}.__init__")):
        raise AlreadyFixed(f"{path} has return_cu_seqlens")
    entry = """
        return_cu_seqlens (`bool`, *optional*, defaults to `False`):
            Whether to return `cu_seqlens`, int32 of shape `[num_sequences + 1]`: where each sequence starts, and
            the end of the last one. It is what linear attention kernels take.
    """
    module = edit(module, path, document, "return_seq_idx", entry)
    module = edit(module, f"{path}.__init__", add_parameters, "return_cu_seqlens=False")
    what, match = "assignment of return_seq_idx", assigns_attribute("return_seq_idx")
    code = "self.return_cu_seqlens = return_cu_seqlens"
    module = edit(module, f"{path}.__init__", insert_after, what, match, code)
    code = """

        if self.return_cu_seqlens:
            batch["cu_seqlens"] = np.cumsum([0] + [len(sample["input_ids"]) for sample in features]).tolist()
    """
    loop = lambda s: isinstance(s, cst.For) and code_of(s.iter) == "enumerate(features)"  # noqa: E731
    return edit(module, f"{path}.__call__", insert_after, "loop over the features", loop, code)


def keywords(module: cst.Module) -> cst.Module:
    entry = """
        cu_seqlens (`torch.IntTensor`, *optional*):
            Cumulative sequence lengths of a flattened packed batch, for linear attention.
    """
    module = edit(module, "TransformersKwargs", document, "seq_idx", entry)
    field = lambda s: code_of(s).strip().startswith("seq_idx:")  # noqa: E731
    code = "cu_seqlens: torch.IntTensor | None"
    module = edit(module, "TransformersKwargs", insert_after, "the field seq_idx", field, code)

    # A vision tower would take the text's `cu_seqlens` for its own.
    def add_element(statement):
        names = statement.body[0].value
        new = cst.Element(cst.SimpleString('"cu_seqlens"'))
        return [statement.with_deep_changes(names, elements=[*names.elements, new])]

    name = "_FLASH_VARLEN_KWARGS"
    return edit_statements(module, f"{name} = ...", assigns(name), add_element)


def block(function: cst.FunctionDef) -> cst.FunctionDef:
    """Edit the forward of a gated delta net."""
    function = add_parameters(
        function, "seq_idx: torch.IntTensor | None = None", "cu_seqlens: torch.IntTensor | None = None"
    )
    function = insert_first(
        function,
        """
        # Boundaries of packed sequences, from the linear attention or from the flash attention kwargs
        flash_cu_seqlens = kwargs.pop("cu_seq_lens_q", None)
        cu_seqlens = flash_cu_seqlens if cu_seqlens is None else cu_seqlens
        """,
    )

    def hand_over(call):
        return add_argument(add_argument(call, "seq_idx=seq_idx"), "cu_seqlens=cu_seqlens")

    function = edit_calls(function, CONVOLUTION, hand_over)
    for rule in RULES:
        function = edit_calls(function, rule, lambda call: replace_argument(call, "cu_seqlens", "cu_seqlens"))
    return edit_calls(function, RULES[0], lambda call: add_argument(call, "seq_idx=seq_idx"))


def apply(tree: Edited) -> None:
    tree.edit("data/data_collator.py", collator)
    tree.edit("utils/generic.py", keywords)
    tree.edit_callers(RULES[0], block)


PATCH = Patch(
    summary="The collator gives linear attention its boundaries only as FlashAttention arguments, under another name.",
    title="Let DataCollatorWithFlattening return cu_seqlens, and make boundaries arguments of gated delta nets",
    problem="""\
The gated delta rule is told where packed sequences begin by `cu_seq_lens_q`, an argument of FlashAttention that
the layer takes out of its `kwargs` and renames. Who trains with SDPA has to ask the collator for four
FlashAttention arguments to get that one. Passing the kernels' own name, `cu_seqlens`, raises `TypeError: got
multiple values for keyword argument`.""",
    change="""\
`DataCollatorWithFlattening(return_cu_seqlens=True)` returns `cu_seqlens`; the default is False and changes
nothing. `TransformersKwargs` lists it. The forward of each gated delta net names `seq_idx` and `cu_seqlens` in
its signature, hands both to the convolution and the delta rule, and still takes `cu_seq_lens_q` when
`cu_seqlens` is not given. Methods that compute image or video features drop an unprefixed `cu_seqlens`, as they
do with the FlashAttention arguments, because a vision tower would take the text's boundaries for those of its
images.

To check in review: hub kernels that replace a whole `GatedDeltaNet` layer are compared with its signature, so
they need the two arguments as well.""",
    families="all models (collator); Qwen3-Next, Qwen3.5, Qwen3.5-MoE, Qwen4-exp, OLMo-Hybrid (blocks)",
    issues=("#44717", "#45034"),
    reproduction="""\
from transformers import DataCollatorWithFlattening

collator = DataCollatorWithFlattening(return_cu_seqlens=True)
print(collator([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}])["cu_seqlens"])
""",
    apply=apply,
    beside="tests/trainer/test_data_collator.py and tests/models/qwen3_next/test_modeling_qwen3_next.py",
)
