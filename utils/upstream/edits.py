"""Structural edits of Python source with LibCST: find a function, a statement or a call, and add or replace code.

Code outside of an edit keeps its bytes. Each search expects a number of matches. Any other number means that the target
has changed since the patch was written, and raises [`TargetChanged`].
"""

import textwrap
from collections.abc import Callable

import libcst as cst
import libcst.matchers as m


class TargetChanged(Exception):
    """The code to change is missing or not in the expected form."""


class AlreadyFixed(Exception):
    """The code already has the fix of the patch."""


def code_of(node: cst.CSTNode) -> str:
    return cst.Module([]).code_for_node(node)


def names_in(node: cst.CSTNode) -> set[str]:
    return {name.value for name in m.findall(node, m.Name())}


def statements(code: str) -> list[cst.BaseStatement]:
    """Parse code to statements, with its comments and blank lines. The code starts on the line after the quotes."""
    # The leading `pass` attaches comments to the first statement instead of the module.
    body = cst.parse_module("pass\n" + textwrap.dedent(code.removeprefix("\n"))).body[1:]
    # Blank lines inside a block would be indented otherwise.
    return [
        s.with_changes(leading_lines=[x if x.comment else x.with_changes(indent=False) for x in s.leading_lines])
        for s in body
    ]


def find(node: cst.Module | cst.ClassDef | cst.FunctionDef, path: str) -> cst.ClassDef | cst.FunctionDef:
    """Find the class or function at a path such as `Class.method` or `function.inner`."""
    for name in path.split("."):
        body = node.body if isinstance(node, cst.Module) else node.body.body
        found = [s for s in body if isinstance(s, cst.ClassDef | cst.FunctionDef) and s.name.value == name]
        if len(found) != 1:
            raise TargetChanged(f"expected one `{path}`, found {len(found)}")
        node = found[0]
    return node


def edit(module: cst.Module, path: str, change: Callable, *arguments) -> cst.Module:
    """Apply `change` with its other `arguments` to the class or function at `path`."""
    target = find(module, path)
    return module.deep_replace(target, change(target, *arguments))


class _EditStatements(cst.CSTTransformer):
    def __init__(self, match, replace):
        self.match, self.replace, self.count = match, replace, 0

    def _edited(self, body):
        result = []
        for statement in body:
            if self.match(statement):
                self.count += 1
                result += self.replace(statement)
            else:
                result.append(statement)
        return result

    def leave_IndentedBlock(self, original_node, updated_node):
        return updated_node.with_changes(body=self._edited(updated_node.body))

    def leave_Module(self, original_node, updated_node):
        return updated_node.with_changes(body=self._edited(updated_node.body))


def edit_statements(node, what: str, match: Callable, replace: Callable, count: int = 1):
    """Replace every statement in `node`, at any depth, for which `match` is true, by a list of statements."""
    transformer = _EditStatements(match, replace)
    node = node.visit(transformer)
    if transformer.count != count:
        raise TargetChanged(f"expected {count} of {what}, found {transformer.count}")
    return node


def insert_before(node, what: str, match: Callable, code: str):
    return edit_statements(node, what, match, lambda statement: [*statements(code), statement])


def insert_after(node, what: str, match: Callable, code: str, count: int = 1):
    return edit_statements(node, what, match, lambda statement: [statement, *statements(code)], count)


def insert_first(function: cst.FunctionDef, code: str) -> cst.FunctionDef:
    """Insert statements and a blank line at the top of a function, after its docstring."""
    body = list(function.body.body)
    place = int(m.matches(body[0], m.SimpleStatementLine(body=[m.Expr(value=m.SimpleString())])))
    first = body[place].with_changes(leading_lines=[cst.EmptyLine(indent=False), *body[place].leading_lines])
    body[place:] = [*statements(code), first, *body[place + 1 :]]
    return function.with_changes(body=function.body.with_changes(body=body))


def assigns(name: str) -> Callable:
    """Create a matcher for `name = ...`."""
    assign = m.Assign(targets=[m.AssignTarget(target=m.Name(name))])
    return lambda statement: m.matches(statement, m.SimpleStatementLine(body=[assign]))


def assigns_attribute(name: str) -> Callable:
    """Create a matcher for `something.name = ...`."""
    assign = m.Assign(targets=[m.AssignTarget(target=m.Attribute(attr=m.Name(name)))])
    return lambda statement: m.matches(statement, m.SimpleStatementLine(body=[assign]))


def calls_in(node: cst.CSTNode, function: str) -> list[cst.Call]:
    """Find the calls of a function by its text, such as `self.backbone`."""
    return [call for call in m.findall(node, m.Call()) if code_of(call.func) == function]


def callers(module: cst.Module, function: str) -> list[str]:
    """List the paths of the methods that call a function."""
    classes = [node for node in module.body if isinstance(node, cst.ClassDef)]
    methods = [(node, s) for node in classes for s in node.body.body if isinstance(s, cst.FunctionDef)]
    return [f"{node.name.value}.{method.name.value}" for node, method in methods if calls_in(method, function)]


def edit_calls(node, function: str, change: Callable, count: int = 1):
    """Apply `change` to each call of a function."""
    calls = calls_in(node, function)
    if len(calls) != count:
        raise TargetChanged(f"expected {count} calls of `{function}`, found {len(calls)}")
    for call in calls:
        node = node.deep_replace(call, change(call))
    return node


def has_argument(call: cst.Call, argument: str) -> bool:
    """Check whether a call has an argument `name` or `**name`."""
    if argument.startswith("**"):
        return any(arg.star == "**" and code_of(arg.value) == argument[2:] for arg in call.args)
    return any(arg.keyword is not None and arg.keyword.value == argument for arg in call.args)


def add_argument(call: cst.Call, code: str) -> cst.Call:
    """Add an argument to a call in the layout of the others. Any argument except `**kwargs` goes before `**kwargs`."""
    new = cst.parse_expression(f"f({code})").args[0]
    args = list(call.args)
    place = next((i for i, arg in enumerate(args) if arg.star == "**"), len(args))
    if place < len(args):
        args.insert(place, new.with_changes(comma=args[place - 1].comma))
    else:
        # The last argument may end with a comma and a newline, or with nothing. The one before it has the separator.
        separator = args[-2].comma if len(args) > 1 else cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
        args = [*args[:-1], args[-1].with_changes(comma=separator), new.with_changes(comma=args[-1].comma)]
    return call.with_changes(args=args)


def replace_argument(call: cst.Call, keyword: str, value: str) -> cst.Call:
    """Replace the value of a keyword argument of a call."""
    if not has_argument(call, keyword):
        raise TargetChanged(f"expected an argument `{keyword}` of `{code_of(call.func)}`")
    args = [
        arg.with_changes(value=cst.parse_expression(value))
        if arg.keyword is not None and arg.keyword.value == keyword
        else arg
        for arg in call.args
    ]
    return call.with_changes(args=args)


def add_parameters(function: cst.FunctionDef, *codes: str) -> cst.FunctionDef:
    """Add parameters to a function before its `**kwargs`."""
    if function.params.star_kwarg is None:
        raise TargetChanged(f"expected `**kwargs` of `{function.name.value}`")
    # Keyword-only parameters come between the others and `**kwargs`.
    kind = "kwonly_params" if function.params.kwonly_params else "params"
    params = list(getattr(function.params, kind))
    for code in codes:
        new = cst.parse_statement(f"def f({code}): pass").params.params[0]
        params.append(new.with_changes(comma=params[-1].comma))
    return function.with_changes(params=function.params.with_changes(**{kind: params}))


def parameters(function: cst.FunctionDef) -> list[str]:
    params = function.params
    return [p.name.value for p in (*params.posonly_params, *params.params, *params.kwonly_params)]


def document(node, after: str, text: str):
    """Add an entry to the docstring of a class or function, after the entry that starts with the word `after`."""
    first = node.body.body[0]
    if not m.matches(first, m.SimpleStatementLine(body=[m.Expr(value=m.SimpleString())])):
        raise TargetChanged(f"expected a docstring of `{node.name.value}`")
    string = first.body[0].value
    lines = string.value.split("\n")
    starts = [i for i, line in enumerate(lines) if line.split("(")[0].strip() == after]
    if len(starts) != 1:
        raise TargetChanged(f"expected one entry `{after}` in the docstring of `{node.name.value}`")
    depth = len(lines[starts[0]]) - len(lines[starts[0]].lstrip())
    end = starts[0] + 1
    while end < len(lines) and lines[end].strip() and len(lines[end]) - len(lines[end].lstrip()) > depth:
        end += 1
    lines[end:end] = textwrap.indent(textwrap.dedent(text).strip("\n"), " " * depth).split("\n")
    return node.deep_replace(string, string.with_changes(value="\n".join(lines)))
