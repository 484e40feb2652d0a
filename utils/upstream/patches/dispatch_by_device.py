"""Run tensors on a CPU through the torch path, independent of installed packages."""

import libcst as cst

from ..edits import (
    AlreadyFixed,
    TargetChanged,
    assigns,
    code_of,
    edit,
    edit_statements,
    insert_before,
    insert_first,
    names_in,
)
from ..patch import Patch
from ..source import Edited
from .hub_kernels import FILE, ON_ACCELERATOR, WRAPPED, add_functions, is_call, is_export, is_refusal


KERNEL = "is_new_implementation"


class _Rename(cst.CSTTransformer):
    def leave_Name(self, original_node, updated_node):
        return updated_node.with_changes(value="run_kernel") if updated_node.value == KERNEL else updated_node


def chooses(statement: cst.BaseStatement) -> bool:
    """Match statements that choose between kernel and torch function, except the warning about a missing kernel."""
    warns = "warning_once" in code_of(statement)
    return KERNEL in names_in(statement) and not is_export(statement) and not warns


def apply_to(module: cst.Module) -> cst.Module:
    module = add_functions(module, ON_ACCELERATOR)

    def dispatch(function: cst.FunctionDef) -> cst.FunctionDef:
        if "run_kernel" in names_in(function):
            raise AlreadyFixed(f"{FILE} looks at the device")
        # The refusal of boundaries in torch functions identifies the expected version of this function.
        if not any(is_refusal(s) for s in function.body.body) or not is_call(function.body.body[-1]):
            raise TargetChanged(f"expected `{WRAPPED}` to refuse packed sequences and to call the implementation")
        count = sum(chooses(s) for s in function.body.body)
        function = edit_statements(function, f"uses of {KERNEL}", chooses, lambda s: [s.visit(_Rename())], count)
        function = insert_before(
            function,
            "filter of the keyword arguments",
            lambda s: assigns("kwargs")(s) and isinstance(s.body[0].value, cst.DictComp),
            f"""

            if {KERNEL} and not run_kernel:
                return torch_function(*args, **kwargs)
            """,
        )
        return insert_first(
            function,
            f"""
            # Kernels need an accelerator: tensors elsewhere take the torch path, whatever is installed
            run_kernel = {KERNEL} and _on_accelerator(*args, *kwargs.values())
            """,
        )

    return edit(module, WRAPPED, dispatch)


def apply(tree: Edited) -> None:
    tree.edit(FILE, apply_to)


PATCH = Patch(
    title="Choose between kernels and torch functions by the device of the tensors",
    summary="With flash-linear-attention and triton installed, a model on the CPU crashes.",
    problem="""\
Whether a kernel or the torch function runs is decided when a modeling file is imported, by what can be
imported. So in an environment with flash-linear-attention (or causal-conv1d, mamba-ssm), a model that is on the
CPU hands its tensors to a kernel and crashes, with triton for example with `RuntimeError: 0 active drivers
([])`. That happens to tests on machines without a GPU, too.""",
    change="""\
The decision is made at the call: a kernel runs when one of the tensors is on an accelerator. On the CPU the
torch function runs as if the package were not installed, with the same refusal of packed sequences. The check
reads `device.type`, which is static under `torch.compile`. Hub kernels, which replace the decorated function,
and export are not touched.""",
    families="all models with linear attention, state spaces or short convolutions",
    issues=(),
    reproduction="""\
import sys, types
from unittest import mock

import torch
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback


def kernel(x):
    raise RuntimeError("0 active drivers")


with mock.patch.dict(sys.modules, {"gpu_package": types.SimpleNamespace(double=kernel)}):

    @use_kernel_func_from_hub_with_fallback("double", "gpu_package")
    def double(x):
        return 2 * x


print(double(torch.ones(1)))
""",
    apply=apply,
    beside="tests/kernels/test_dispatch_by_device.py",
)
