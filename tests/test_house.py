"""The import order of the package's layers, and the absence of hidden lookups."""

import ast
import unittest
from fnmatch import fnmatch
from pathlib import Path


ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "transformers_packed"

# Imports of our own modules inside functions: (file, imported module), with the reason.
LATE_IMPORTS = (
    ("ops/*", "ops.backends.*"),  # kernels of optional packages
    ("cli/*", "*"),  # the parser runs before torch is imported
    ("training/losses.py", "ops"),  # the compiler of torch, for one kind of head
    ("models/trl_head.py", "ops"),  # the compiler of torch, for models that a trainer of TRL has changed
    ("models/packed_model.py", "models.checkpointing"),  # the compiler of torch, for options of checkpointing
    ("models/quantized_weights.py", "ops.dequantization"),  # the compiler of torch, for experts in 4 bit
    ("models/versions.py", "ops.dispatch"),  # the compiler of torch, for compiled models
    ("models/masks.py", "ops.autograd"),  # the compiler of torch, for masks in transforms
)
# Ways to read state that was not passed as an argument.
HIDDEN = {
    "_getframe",
    "currentframe",
    "f_locals",
    "__closure__",
    "cell_contents",
    "getclosurevars",
    "__code__",
    "co_consts",
}
# Each exception has a comment in the code that explains why no simpler way works.
EXCEPTIONS = {
    ("models/replacements.py", "__class__"),
    ("models/releases.py", "getclosurevars"),
    ("models/releases.py", "__code__"),
    *(("training/state.py", name) for name in ("__closure__", "cell_contents", "__code__", "co_consts")),
}


# The functions that change objects of other libraries, beside calls of `swapped`: (file, function).
CHANGES = {
    # The tables, and the classes and attributes of the modules of a model, which `unpatch_model` puts back.
    ("foreign.py", "put"),
    ("models/replacements.py", "become"),
    ("models/replacements.py", "apply_changes"),
    # What the user asks for: switches and marks of layers, heads, checkpoints, weights in 4 bit, their dequantization, and
    # weights that stay in host memory.
    ("models/registry.py", "set_switches"),
    ("models/packed_model.py", "Switch.__set__"),
    ("models/packed_model.py", "Switch.__delete__"),
    ("models/checkpointing.py", "enable"),
    ("models/checkpointing.py", "_host_of"),
    ("models/float8.py", "use_float8"),
    ("ops/invariance.py", "_allow"),
    ("models/mtp_head.py", "MtpHead.__init__"),
    ("models/mtp_head.py", "add_mtp"),
    ("models/releases.py", "wrap_checkpoints"),
    ("models/host_parameters.py", "keep_in_place"),
    ("models/host_parameters.py", "move_linears_to_host"),
    ("models/quantized_weights.py", "set_weights"),
    ("models/quantized_weights.py", "dequantize"),
    # Attributes of a copy, of our own functions and of our own tensor, which FlashQLA reads.
    ("models/quantization.py", "_with_skipped_modules"),
    ("models/trl_head.py", "beside_trl"),
    ("models/versions.py", "with_signature"),
    ("ops/autograd.py", "first_order.decorate"),
    ("ops/backends/flash_qla.py", "_prepared"),
    # A Trainer, which `undo` and the contexts of the check put back.
    ("training/apply.py", "apply"),
    ("training/apply.py", "_undo_changes"),
    ("training/losses.py", "set_loss_normalization"),
    ("training/callbacks/verify.py", "VerifyCallback._refuse"),
    ("training/callbacks/verify.py", "_evaluate"),
    ("training/restore.py", "in_dtype"),
    ("training/restore.py", "replace_collator"),
    # Forwards that accelerate prepared, around another use of them.
    ("models/releases.py", "prepare_again"),
    # Plugins of other frameworks, and what other packages undo.
    ("integrations/ms_swift/packed_hooks.py", "_replace"),
    ("integrations/stock_methods.py", "Framework._restore"),
    # The process of a command.
    ("cli/__init__.py", "_run"),
    ("cli/arms.py", ""),
}


def _files():
    for path in sorted(SRC.rglob("*.py")):
        if not path.name.startswith("modeling_"):
            yield str(path.relative_to(SRC)), ast.parse(path.read_text(encoding="utf-8"))


def _late_imports(name: str, tree: ast.Module):
    package = ["transformers_packed", *Path(name).parent.parts]
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.ImportFrom) and node.level:
                target = package[: len(package) - node.level + 1] + (node.module or "").split(".")
                yield ".".join(filter(None, target[1:]))
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers_packed"):
                yield node.module.removeprefix("transformers_packed.")


def _root(node: ast.AST) -> str | None:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return getattr(node, "id", None)


def _changes_of_others(tree: ast.Module):
    """The functions that change what they import from other libraries, or names of objects that are not their own."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    imports = [node for node in imports if not getattr(node, "level", 0)]
    theirs = {alias.asname or alias.name.partition(".")[0] for node in imports for alias in node.names}
    waiting = [(node, "") for node in tree.body]
    while waiting:
        node, function = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            function = f"{function}.{node.name}".lstrip(".")
        waiting += [(child, function) for child in ast.iter_child_nodes(node)]
        targets, called = [], None
        if isinstance(node, ast.Assign | ast.Delete):
            targets = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            targets = [node.target]
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
        changed = [x for x in targets if isinstance(x, ast.Attribute | ast.Subscript)]
        text = ast.unparse(node.args[0]) if called in ("setattr", "delattr") else called or ""
        if any(_root(x) in theirs or ast.unparse(x).startswith("vars(") for x in changed):
            own = all(ast.unparse(x).startswith("vars(self)") for x in changed)
        elif called in ("setattr", "delattr"):
            own = text == "self"
        else:
            registers = text.endswith(".register") and _root(node.func) in theirs
            own = not registers and not (text.startswith("vars(") and text.endswith((".update", ".pop")))
            own = own or text.startswith("vars(self)")
        if not own:
            yield function


class HouseTest(unittest.TestCase):
    def test_own_modules_are_imported_inside_functions_only_where_listed(self):
        found = [(name, target) for name, tree in _files() for target in _late_imports(name, tree)]
        allowed = lambda name, target: any(fnmatch(name, f) and fnmatch(target, t) for f, t in LATE_IMPORTS)  # noqa: E731
        self.assertEqual([pair for pair in found if not allowed(*pair)], [])
        for listed in LATE_IMPORTS:
            self.assertTrue(any(fnmatch(n, listed[0]) and fnmatch(t, listed[1]) for n, t in found), listed)

    def test_nothing_looks_into_frames_closures_or_code_or_changes_a_class(self):
        found = set()
        for name, tree in _files():
            for node in ast.walk(tree):
                attribute = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", None)
                if isinstance(node, ast.FunctionDef | ast.Constant):
                    attribute = node.name if isinstance(node, ast.FunctionDef) else node.value
                if attribute in HIDDEN or attribute == "__class__":
                    found.add((name, attribute))
        self.assertEqual(found, EXCEPTIONS)

    def test_other_libraries_are_changed_only_where_listed(self):
        found = {(name, function) for name, tree in _files() for function in _changes_of_others(tree)}
        self.assertEqual(found, CHANGES)
