"""Griffe extension: turn the docstrings of this package, in Hugging Face's grammar, into Markdown.

`mkdocs.yml` registers it. A section (`Args:`, `Returns:`, ...) becomes a bold title with a list, a reference in brackets
a link to the API reference, and an example with prompts a console session.
"""

import re
from collections.abc import Iterator

import griffe


NAMES = {"Args": "Parameters", "Keyword Args": "Keyword parameters", "Attributes": "Attributes"}
TITLES = NAMES | {title: title for title in ("Returns", "Yields", "Raises", "Example")}
# A parameter or attribute, such as "    name (`int`, *optional*): what it does"; several names may share a line.
NAMED = re.compile(r" {4}(\*{0,2}\w+(?:, \*{0,2}\w+)*)( \(.*\))?:(.*)")
RAISED = re.compile(r" {4}(`\w+`:.*)")
REFERENCE = re.compile(r"\[`(~?)([\w.]+)`\](?![\[(])")
# Public names of these packages have a place in the API reference under this path.
PACKAGES = ("", "ops.", "parallel.")


def to_markdown(text: str, link=lambda name: None) -> tuple[str, list[str]]:
    """A docstring as Markdown, and the names that it documents; `link` gives the full path of a public name."""
    lines, names, section, fenced = [], [], None, False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
            while not fenced and not lines[-1].strip():
                lines.pop()
        if not fenced and line.endswith(":") and line[:-1] in TITLES:
            section = line[:-1]
            lines += [f"**{TITLES[section]}**"] + [""] * (section != "Example")
        elif fenced or not section or section == "Example":
            lines.append(line)
        elif line and not line.startswith(" "):
            section = None
            lines.append(line)
        elif section in NAMES and (item := NAMED.fullmatch(line)):
            names += (these := item[1].split(", "))
            lines.append(f"- {', '.join(f'**`{name}`**' for name in these)}{item[2] or ''}:{item[3]}")
        elif section == "Raises" and (item := RAISED.fullmatch(line)):
            lines.append(f"- {item[1]}")
        elif section in ("Returns", "Yields"):
            lines.append(line.removeprefix("    "))
        else:
            lines.append(f"    {line.strip()}".rstrip())

    def resolve(match: re.Match) -> str:
        shown = match[2].rpartition(".")[2] if match[1] else match[2]
        path = link(match[2])
        return f"[`{shown}`][{path}]" if path else f"`{shown}`"

    text = re.sub(r"```python(\n\s*>>>)", r"```pycon\1", "\n".join(lines))
    return REFERENCE.sub(resolve, text), names


class HuggingFaceDocstrings(griffe.Extension):
    """Rewrites all docstrings of a package, and warns of documented parameters that the signature lacks."""

    def on_package(self, *, pkg: griffe.Module, **kwargs) -> None:
        """Rewrite the docstrings of one package, once it has been read."""
        for obj in objects(pkg):
            if obj.docstring is None:
                continue
            obj.docstring.value, names = to_markdown(obj.docstring.value, lambda name: public_path(pkg, name))
            known = known_names(obj)
            for name in names:
                if known is not None and name.lstrip("*") not in known:
                    griffe.docstring_warning(
                        obj.docstring, 0, f"{name!r} is documented, but no parameter of {obj.path}"
                    )
        # `ops.glu` is the function, not the module of the same name that it comes from.
        for module in [obj for obj in objects(pkg) if obj.is_module]:
            found = {name: x for name in exports_of(module) if (x := module.members.get(name)) is not None}
            for alias in [x for x in found.values() if x.is_alias]:
                # By a path through a module that is hidden from now on.
                alias.resolve_target()
            for name, hidden in found.items():
                if not hidden.is_alias and hidden.is_module:
                    module.set_member(name, griffe.Alias(name, hidden[name], parent=module))


def objects(obj: griffe.Object) -> Iterator[griffe.Object]:
    """An object and all that it contains."""
    yield obj
    for member in list(obj.members.values()):
        if not member.is_alias:
            yield from objects(member)


def exports_of(module: griffe.Module) -> set[str]:
    """The public names of a module: its `__all__`, or what a package imports from its own modules."""
    imports = {name: path for name, path in module.imports.items() if path.startswith(f"{module.path}.")}
    return set(module.exports or (name for name, path in imports.items() if path != f"{module.path}.{name}"))


def public_path(package: griffe.Module, name: str) -> str | None:
    """Where the API reference has `name`, such as "glu" or "AuditReport.plot"; `None` if it is not public."""
    name = name.removeprefix(f"{package.path}.")
    for prefix in PACKAGES:
        module = package[prefix.rstrip(".")] if prefix else package
        head, _, member = name.removeprefix(prefix).partition(".")
        if head in exports_of(module) and (not member or member in module[head].members):
            return f"{module.path}.{name.removeprefix(prefix)}"
    return None


def known_names(obj: griffe.Object) -> set[str] | None:
    """The parameters, and the fields of a class; `None` where classes of another package may add some."""
    names = {parameter.name.lstrip("*") for parameter in getattr(obj, "parameters", ())}
    classes = [obj, *obj.mro()] if obj.is_class else []
    if any(len(cls.resolved_bases) < len(cls.bases) for cls in classes):
        return None
    return names.union(*(cls.members for cls in classes))
