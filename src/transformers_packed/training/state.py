"""Put back what the code of users keeps in Python: on Trainers, callbacks, modules, datasets, and in their own functions.

[`same_state`] follows references from a Trainer, notes what it finds, and puts it back into the same objects. So whoever
else refers to one of them sees the old value too. It notes

* the content of containers, arrays, tensors of moderate size, files that can seek, and generators of random numbers;
* the attributes of objects of the user's classes, of Trainers, callbacks, collators and datasets, and of modules;
* the gradients of parameters, and the values of parameters that belong to no model;
* the variables that functions refer to: closures, and globals of the user's modules; and attributes of the user's classes.

Objects of other libraries remain as they are, since they may belong to threads, processes or devices. Tokenizers,
processors, optimizers, the weights of models and the caches of this package that rows fill are not noted either. `left`
names what was found and cannot be put back.
"""

import io
import logging
import operator
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import cache, partial
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

from ..errors import described
from ..models.cuda_graphs import LayerGraphs
from ..ops.host_weights import HostTensors
from ..ops.offload import HostCheckpoints


# What rows fill: buffers for copies, pinned pages, and recordings. A copy of such an object is empty (`__reduce__`). They may
# be large, and have tensors with the memory of weights.
_CACHES = HostCheckpoints, HostTensors, LayerGraphs
# Values without parts that can change.
_ATOMS = frozenset((int, float, complex, str, bytes, bool, type(None), range, slice, torch.dtype, torch.device))
# Values that are not followed.
_SKIPPED = (
    np.generic,
    Enum,
    ModuleType,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    torch.optim.Optimizer,
    logging.Logger,
    Path,
    *_CACHES,
)
# Copies of containers that are no lists.
_COPIES: dict[type, type] = {dict: dict, set: set, bytearray: bytes}
# Packages whose objects are noted beside those of the user.
_FOLLOWED = ("transformers", "trl", "peft", "datasets", "collections", "types", "transformers_packed")
# Of larger containers the elements are data. They are not followed, as those beyond the last number of a root's.
_LARGE, _MOST = 10_000, 1_000_000
_MOST_OF_DATA = 50_000
# Bytes of a tensor or an array that is copied, and of all of them.
_COPIED, _COPIED_IN_ALL = 2**26, 2**28

# Where paths into datasets begin.
DATA = "dataset"
Found = tuple[Any, str]


class State:
    """What was noted.

    Attributes:
        left (`list[str]`):
            What cannot be put back, such as `counter (count)`.
    """

    def __init__(self, kept: Iterable[torch.Tensor] = ()):
        self.left: list[str] = []
        self._undo: list[Callable[[], Any]] = []
        self._bytes = 0
        # Objects that are noted stay alive, so that no other one gets their number.
        self._seen: dict[int, Any] = {}
        self._values_of_others = {id(x) for x in kept}

    def note(self, roots: Iterable[Found], most: int = _MOST) -> bool:
        """Note what these values refer to, the closest first. Returns whether this is everything, or `most` values."""
        waiting = deque(roots)
        while waiting:
            value, path = waiting.popleft()
            if id(value) in self._seen or isinstance(value, _SKIPPED):
                continue
            self._seen[id(value)] = value
            for part in self._note_one(value, path):
                if not most:
                    return False
                most -= 1
                if type(part[0]) not in _ATOMS:
                    waiting.append(part)
        return True

    def put_back(self) -> None:
        for undo in reversed(self._undo):
            try:
                undo()
            except Exception as error:
                # What follows goes back all the same.
                self.left.append(described(error))

    def _note_one(self, value: Any, path: str) -> Iterable[Found]:
        """Note a value, and return its parts."""
        for kinds, note in _KINDS:
            if isinstance(value, kinds):
                return note(self, value, path)
        # Other libraries derive classes from Trainer too.
        if any(_is_followed(base.__module__) for base in type(value).__mro__):
            return self._object(value, path)
        if isinstance(value, Iterator):
            # Its next value cannot be returned.
            self.left.append(f"{path} ({type(value).__name__})")
        return ()

    def _container(self, value: Any, path: str) -> Iterable[Found]:
        copy: Any = next((kind for mutable, kind in _COPIES.items() if isinstance(value, mutable)), list)
        before = copy(value)

        def undo() -> None:
            if not _is_same(value, before):
                value.clear()
                getattr(value, "update" if isinstance(value, dict | set) else "extend")(before)

        self._undo.append(undo)
        parts: Iterable = before.values() if isinstance(before, dict) else before
        yield from self._elements(parts, path)
        # Classes derived from containers may have attributes.
        if type(value).__module__ != "builtins" and _is_followed(type(value).__module__):
            yield from self._object(value, path)

    def _elements(self, value: Any, path: str) -> Iterable[Found]:
        return ((x, path) for x in value) if len(value) <= _LARGE else ()

    def _object(self, value: Any, path: str) -> Iterable[Found]:
        """The attributes of an object, and the class if it is the user's."""
        if hasattr(value, "__dict__"):
            yield from self._attributes(vars(value), path)
        slots = [name for base in type(value).__mro__ for name in _slots(base)]
        if slots:
            change = partial(object.__setattr__, value), partial(object.__delattr__, value)
            before = self._note_names(
                path, lambda: {name: getattr(value, name) for name in slots if hasattr(value, name)}, *change
            )
            yield from _named(before, path)
        yield from ((base, path) for base in type(value).__mro__)

    def _attributes(
        self, values: dict[str, Any], path: str, chosen: Callable[[str], bool] = lambda name: True
    ) -> Iterable[Found]:
        """The variables of a namespace with these names."""
        # A generic alias has the namespace of its class, which nobody can change.
        change = partial(operator.setitem, values), partial(operator.delitem, values)
        before = self._note_names(path, lambda: {name: x for name, x in values.items() if chosen(name)}, *change)
        return _named(before, path)

    def _note_names(
        self, path: str, read: Callable[[], dict[str, Any]], put: Callable, delete: Callable
    ) -> dict[str, Any]:
        """Note the names that `read` returns, with their values, and return them."""
        before = read()
        files = [x for x in before.values() if isinstance(x, io.IOBase) and not x.closed]

        def undo() -> None:
            if any(file.closed for file in files):
                # The file that is open now belongs to the other values of now.
                self.left.append(f"{path} (a file that was closed)")
                return
            now = read()
            for name in now.keys() - before.keys():
                delete(name)
            for name, x in before.items():
                if name not in now or now[name] is not x:
                    put(name, x)

        self._undo.append(undo)
        return before

    def _module(self, value: torch.nn.Module, path: str) -> Iterable[Found]:
        if isinstance(value, PreTrainedModel):
            self._values_of_others.update(map(id, value.parameters()))
        # FSDP exchanges parameters.
        yield from self._attributes(vars(value), path, lambda name: name not in ("_parameters", "_modules"))
        yield from _named({**value._parameters, **value._modules}, path)
        yield from ((base, path) for base in type(value).__mro__)

    def _tensor(self, value: torch.Tensor, path: str) -> Iterable[Found]:
        if value.is_leaf and value.requires_grad:
            gradient, value.grad = value.grad, None
            self._undo.append(partial(setattr, value, "grad", gradient))
            self._hooks(value)
        plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout == torch.strided
        if not plain or value.is_meta or value.is_inference() or id(value) in self._values_of_others:
            return ()
        version, content = value._version, self._copy(value, value.nbytes, lambda: value.detach().clone())

        def undo() -> None:
            if content is None:
                if value._version != version:
                    self.left.append(f"{path} ({value.nbytes / 2**20:,.0f} MiB)")
            elif value.shape != content.shape:
                value.data = content
            elif not torch.equal(value, content):
                value.data.copy_(content)

        self._undo.append(undo)
        return _named(vars(value), path)

    def _hooks(self, value: torch.Tensor) -> None:
        """The hooks of a gradient. What was noted of their owner would have it register them once more."""
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            before = dict(getattr(value, name) or ())

            def undo(name: str = name, before: dict[int, Callable] = before) -> None:
                hooks = getattr(value, name)
                if hooks is not None and not _is_same(hooks, before):
                    hooks.clear()
                    hooks.update(before)

            self._undo.append(undo)

    def _array(self, value: np.ndarray, path: str) -> Iterable[Found]:
        content = self._copy(value, value.nbytes, value.copy) if value.flags.writeable else None
        if content is not None:
            self._undo.append(lambda: np.copyto(value, content))
        return self._elements(value.flat, path) if value.dtype == object else ()

    def _copy(self, value: Any, size: int, copy: Callable[[], Any]) -> Any:
        """A copy, or `None` of what is large."""
        if size > _COPIED or self._bytes + size > _COPIED_IN_ALL:
            return None
        self._bytes += size
        return copy()

    def _file(self, value: io.IOBase, path: str) -> Iterable[Found]:
        if not value.closed and value.readable():
            try:
                at = value.tell()
                self._undo.append(lambda: value.closed or value.seek(at))
            except OSError:
                self.left.append(f"{path} ({type(value).__name__})")
        return ()

    def _random(self, value: Any, path: str) -> Iterable[Found]:
        for get, restore in (("get_state", "set_state"), ("getstate", "setstate")):
            if hasattr(value, get):
                self._undo.append(partial(getattr(value, restore), getattr(value, get)()))
                return ()
        bits = getattr(value, "bit_generator", value)
        self._undo.append(partial(setattr, bits, "state", bits.state))
        return ()

    def _cell(self, value: CellType, path: str) -> Iterable[Found]:
        try:
            before = value.cell_contents
        except ValueError:
            # Nothing is assigned yet.
            return
        self._undo.append(partial(setattr, value, "cell_contents", before))
        yield before, path

    def _function(self, value: FunctionType, path: str) -> Iterable[Found]:
        # Many losses and hooks are functions that count in a variable around them, and only their cells lead to it.
        yield from self._attributes(vars(value), path)
        yield from ((cell, path) for cell in value.__closure__ or ())
        yield from ((x, path) for x in (value.__defaults__, value.__kwdefaults__))
        if not is_of_user(value.__module__):
            return
        names = _names_in(value.__code__)
        modules = [x for name in names if isinstance(x := value.__globals__.get(name), ModuleType)]
        for variables in (value.__globals__, *(vars(x) for x in modules if is_of_user(x.__name__))):
            yield from self._attributes(variables, path, names.__contains__)

    def _class(self, value: type, path: str) -> Iterable[Found]:
        if not is_of_user(value.__module__):
            return
        change = partial(setattr, value), partial(delattr, value)
        self._note_names(
            path, lambda: {name: x for name, x in vars(value).items() if not name.startswith("__")}, *change
        )
        for name, x in vars(value).items():
            yield getattr(x, "__func__", getattr(x, "fget", x)), f"{path}.{name}"


# How a value is noted, by its class. The first that fits.
_KINDS: tuple[tuple[Any, Callable[[State, Any, str], Iterable[Found]]], ...] = (
    (torch.nn.Module, State._module),
    (torch.Tensor, State._tensor),
    (np.ndarray, State._array),
    ((dict, list, set, deque, bytearray), State._container),
    ((tuple, frozenset), State._elements),
    (
        (torch.Generator, random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator),
        State._random,
    ),
    (io.IOBase, State._file),
    (CellType, State._cell),
    (FunctionType, State._function),
    (MethodType, lambda state, value, path: ((value.__self__, path), (value.__func__, path))),
    (partial, lambda state, value, path: ((x, path) for x in (value.func, value.args, value.keywords))),
    (type, State._class),
)


@contextmanager
def same_state(
    *roots: Any, data: Iterable[Any] = (), kept: Iterable[torch.Tensor] = (), but: Iterable[Any] = ()
) -> Iterator[State]:
    """Put back what changes meanwhile in everything that `roots` and `data` refer to.

    Args:
        roots (`Any`):
            Trainers, models, or anything else.
        data (`Iterable`):
            Datasets. Their samples are not followed, but for the first few.
        kept (`Iterable[torch.Tensor]`):
            Tensors whose values do not change, or which somebody else puts back.
        but (`Iterable`):
            What is not followed.
    """
    state, datasets = State(kept), list(data)
    state._seen.update({id(x): x for x in (*datasets, *but)})
    try:
        if not state.note((root, "") for root in roots):
            state.left.append(f"what is beyond the first {_MOST:,} values")
        for dataset in datasets:
            state._seen.pop(id(dataset), None)
            state.note([(dataset, DATA)], _MOST_OF_DATA)
        yield state
    finally:
        state.put_back()


def _named(values: dict[str, Any], path: str) -> Iterable[Found]:
    return ((x, f"{path}.{name}" if path else name) for name, x in values.items())


def _is_same(value: Any, before: Any) -> bool:
    """Whether a container has the same elements in the same order."""
    if len(value) != len(before):
        return False
    if isinstance(value, dict):
        pairs = zip(value.items(), before.items(), strict=True)
        return all(a is b and x is y for (a, x), (b, y) in pairs)
    if isinstance(value, set | bytearray):
        return value == before
    return all(x is y for x, y in zip(value, before, strict=True))


def _slots(kind: type) -> list[str]:
    names = vars(kind).get("__slots__", ())
    names = [names] if isinstance(names, str) else list(names)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _names_in(code: CodeType) -> set[str]:
    """The names that code refers to, in the functions inside it too."""
    inner = (_names_in(x) for x in code.co_consts if isinstance(x, CodeType))
    return set(code.co_names).union(*inner)


@cache
def _is_followed(module: str) -> bool:
    """Whether the attributes of objects are noted whose class is of this module."""
    return module.partition(".")[0] in _FOLLOWED or module.startswith("torch.utils.data.") or is_of_user(module)


@cache
def is_of_user(module: str | None) -> bool:
    """Whether a module belongs to no library: it is a program, or its file is where nothing is installed.

    Functions of strings and methods of built-in objects have none, and may be of the user.
    """
    if module is None:
        return True
    name = module.partition(".")[0]
    if name == "__main__":
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None or name == "transformers_packed" or name in sys.stdlib_module_names:
        return False
    depth = module.count(".") + (Path(file).stem == "__init__")
    return not _has_libraries(Path(file).parents[depth])


@cache
def _has_libraries(folder: Path) -> bool:
    """Whether packages are installed in a folder. Those that can be edited have their records elsewhere."""
    return any(folder.glob("*.dist-info"))
