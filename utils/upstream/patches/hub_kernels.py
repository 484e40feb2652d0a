"""Shared by the patches of `integrations/hub_kernels.py`: matchers for the decorator that selects implementations."""

import libcst as cst
import libcst.matchers as m

from ..edits import assigns, code_of, edit, edit_statements, insert_before, names_in, statements
from ..source import Edited, parse


FILE = "integrations/hub_kernels.py"
DECORATOR = "use_kernel_func_from_hub_with_fallback"
INNER = f"{DECORATOR}.decorator"
WRAPPED = f"{INNER}.wrapped"

# Several patches insert this function.
ON_ACCELERATOR = '''

def _on_accelerator(*values) -> bool:
    """Whether one of the values is a tensor on a device that kernels run on."""
    return any(isinstance(x, torch.Tensor) and x.device.type not in ("cpu", "meta", "mps") for x in values)
'''


def defines(module: cst.Module, name: str) -> bool:
    return any(isinstance(s, cst.FunctionDef) and s.name.value == name for s in module.body)


def add_functions(module: cst.Module, code: str) -> cst.Module:
    """Insert those functions before the decorator that the module does not define yet."""
    new = [s for s in statements(code) if not defines(module, s.name.value)]
    return edit_statements(
        module,
        f"function {DECORATOR}",
        lambda s: isinstance(s, cst.FunctionDef) and s.name.value == DECORATOR,
        lambda s: [*new, s],
    )


def is_refusal(statement: cst.BaseStatement) -> bool:
    """Match the `if` that raises an error for boundaries in torch functions."""
    if not isinstance(statement, cst.If) or not m.findall(statement.body, m.Raise()):
        return False
    return {"cu_seqlens", "seq_idx"} <= {s.evaluated_value for s in m.findall(statement.test, m.SimpleString())}


def is_export(statement: cst.BaseStatement) -> bool:
    """Match the `if` that selects the torch function during export."""
    return isinstance(statement, cst.If) and "is_torchdynamo_exporting" in names_in(statement.test)


def is_call(statement: cst.BaseStatement) -> bool:
    """Match the last statement, the call of the implementation."""
    call = m.Return(value=m.Call(func=m.Name("implementation")))
    return m.matches(statement, m.SimpleStatementLine(body=[call]))


def insert_before_wrapped(module: cst.Module, code: str) -> cst.Module:
    """Insert code into the decorator, before the function that it returns."""
    match = lambda s: isinstance(s, cst.FunctionDef) and s.name.value == "wrapped"  # noqa: E731
    return edit(module, INNER, insert_before, "def wrapped", match, code)


def isolates(tree: Edited, model: str) -> None:
    """Mark a model as free of layers that mix sequences. Without gdn-torch-path-packed this does nothing."""
    if not defines(parse(tree.read(FILE)), "_run_per_sequence"):
        return

    def remove(statement):
        value = statement.body[0].value
        kept = [e for e in value.elements if code_of(e.value) != f'"{model}"']
        return [statement.with_deep_changes(value, elements=kept)]

    name = "_MIXES_SEQUENCES"
    tree.edit(FILE, lambda module: edit_statements(module, f"{name} = ...", assigns(name), remove))
