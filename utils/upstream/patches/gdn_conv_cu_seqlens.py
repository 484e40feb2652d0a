"""Use FLA's convolution if causal-conv1d is not installed."""

import libcst as cst

from ..edits import AlreadyFixed, edit, insert_after
from ..patch import Patch
from ..source import Edited
from .hub_kernels import FILE, ON_ACCELERATOR, WRAPPED, add_functions, defines, insert_before_wrapped, is_export


CONVOLUTION = '''

def _load_fla_convolution() -> Callable | None:
    try:
        return importlib.import_module("fla.modules.causal_conv1d").causal_conv1d
    except Exception:
        return None


def _fla_causal_conv1d(
    convolution: Callable,
    hidden_states: "torch.Tensor",
    weight: "torch.Tensor",
    bias: "torch.Tensor | None" = None,
    activation: str | None = None,
    seq_idx: "torch.Tensor | None" = None,
    cu_seqlens: "torch.Tensor | None" = None,
    cu_seq_lens_q: "torch.Tensor | None" = None,
    **kwargs,
) -> "torch.Tensor | None":
    """
    `causal_conv1d_fn` by FLA, which has the channels last and is told of packed sequences by `cu_seqlens`. `None` for
    what it can't serve.
    """
    cu_seqlens = cu_seq_lens_q if cu_seqlens is None else cu_seqlens
    only_seq_idx = seq_idx is not None and cu_seqlens is None
    if only_seq_idx or activation not in (None, "silu", "swish") or not _on_accelerator(hidden_states):
        return None
    output, _ = convolution(
        hidden_states.transpose(1, 2), weight=weight, bias=bias, activation=activation, cu_seqlens=cu_seqlens
    )
    return output.transpose(1, 2)
'''


def apply_to(module: cst.Module) -> cst.Module:
    if defines(module, "_fla_causal_conv1d"):
        raise AlreadyFixed(f"{FILE} has a convolution of FLA")
    module = add_functions(module, ON_ACCELERATOR + CONVOLUTION)
    module = insert_before_wrapped(
        module,
        """

        # FLA brings a convolution along, for those who do not have `causal_conv1d`
        wants_convolution = func_name == "causal_conv1d_fn" and not is_new_implementation
        fla_convolution = _load_fla_convolution() if wants_convolution else None
        """,
    )
    code = """

        if fla_convolution is not None and not is_torchdynamo_exporting():
            output = _fla_causal_conv1d(fla_convolution, *args, **kwargs)
            if output is not None:
                return output
    """
    return edit(module, WRAPPED, insert_after, "check for torch.export", is_export, code)


def apply(tree: Edited) -> None:
    tree.edit(FILE, apply_to)


PATCH = Patch(
    title="Use FLA's causal convolution where causal-conv1d is not installed",
    summary="Packed training needs causal-conv1d, a compiled extension, beside flash-linear-attention.",
    problem="""\
With flash-linear-attention but without causal-conv1d, whose build needs nvcc, the gated delta rule runs as a
kernel but the convolution in front of it is the torch function. That refuses `seq_idx`; with `cu_seq_lens_q`
alone it runs across the sequences. Trainers built on Transformers replace the convolution by FLA's own for that
reason.""",
    change="""\
Where `causal_conv1d` cannot be imported and FLA can, tensors on an accelerator go through
`fla.modules.causal_conv1d`, with the boundaries from `cu_seqlens` or `cu_seq_lens_q`. Not served, and left to
the torch function: `seq_idx` alone, activations other than SiLU, tensors on a CPU, and export. Decoding
(`causal_conv1d_update`) is not touched.""",
    families="all models with a short convolution, such as Qwen3-Next, Qwen3.5, OLMo-Hybrid, Kimi-Linear, LFM2 and Mamba2",
    issues=("#44717",),
    reproduction="""\
import sys, types
from unittest import mock

import torch
from transformers.integrations import hub_kernels

# A stand-in for FLA, so that this runs without a GPU
def convolution(x, cu_seqlens=None, **kwargs):
    print("FLA is given cu_seqlens =", cu_seqlens)
    return x, None


fla = {"fla": types.ModuleType("fla")}
fla["fla.modules.causal_conv1d"] = types.SimpleNamespace(causal_conv1d=convolution)
with mock.patch.dict(sys.modules, fla):

    @hub_kernels.use_kernel_func_from_hub_with_fallback("causal_conv1d_fn", "causal_conv1d")
    def causal_conv1d_fn(hidden_states, weight, bias=None, activation=None, **kwargs):
        return hidden_states


boundaries = {"seq_idx": torch.tensor([[0, 0, 1]]), "cu_seq_lens_q": torch.tensor([0, 2, 3])}
with mock.patch.object(hub_kernels, "_on_accelerator", lambda *values: True, create=True):
    causal_conv1d_fn(torch.ones(1, 1, 3), torch.ones(1, 4), **boundaries)
""",
    apply=apply,
    beside="tests/kernels/test_fla_convolution.py",
)
