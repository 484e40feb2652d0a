"""What this package changes in other libraries for longer than a call, in four tables.

[`FOR_MODELS`] and [`FOR_ADAPTERS`] are installed while a module has a class of ours, while our classes are registered, and
while one of them is loaded: [`hold`] and [`release`] keep count. [`REGISTERED`] is, with a hook of PyTorch, what `register`
installs. [`READING`] is installed while a checkpoint loads. After uninstalling, nothing differs from before.
`foreign.swapped` has other values for one call.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from threading import RLock
from typing import Any
from weakref import WeakSet

from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle

from ..foreign import MISSING, names_of, put
from .family import PATCHED, Own
from .mtp import loading_head, saving_head
from .releases import BASE_CLASS, forget_recorders, registered_classes
from .versions import supports_other_families


# The `experts_implementation` of this package.
EXPERTS = "transformers_packed"
# Methods of quantized checkpoints whose weights our models load in their bits.
CHECKPOINTS = ("compressed-tensors", "modelopt", "awq", "gptq", "auto-round")
_PACKAGE = __name__.partition(".")[0]


class Table:
    """Other values for names in mappings and classes of other libraries.

    Args:
        rows (`Callable`):
            Returns the rows: a mapping or a class, a name in it, and its value.
    """

    def __init__(self, rows: Callable[[], Iterator[tuple[Any, Any, Any]]]):
        self.rows = rows
        self.installed: list[tuple[Any, Any, Any, Any]] = []

    def install(self) -> None:
        for target, name, value in () if self.installed else self.rows():
            self.installed.append((target, name, value, names_of(target).get(name, MISSING)))
            put(target, name, value)

    def uninstall(self) -> None:
        """Put back what was there before. What somebody else has put in our place since stays."""
        for target, name, value, before in reversed(self.installed):
            if names_of(target).get(name) is value:
                put(target, name, before)
        self.installed = []


def _for_models() -> Iterator[tuple[Any, Any, Any]]:
    moe = import_module("transformers.integrations.moe")
    fp8 = import_module("transformers.integrations.finegrained_fp8")
    quantizers = import_module("transformers.quantizers.auto").AUTO_QUANTIZER_MAPPING
    # Configurations name our op for experts, and Transformers looks the name up in each forward.
    yield moe.ALL_EXPERTS_FUNCTIONS, EXPERTS, late("experts").experts_forward
    # Experts of an FP8 checkpoint look up the same name in a table of their own.
    yield fp8.ALL_FP8_EXPERTS_FUNCTIONS, EXPERTS, late("experts").experts_forward
    # The experts of our models load in 4 bit. Other models are quantized as before.
    yield quantizers, "bitsandbytes_4bit", late("experts_quantizer").ExpertsQuantizer


def _for_adapters() -> Iterator[tuple[Any, Any, Any]]:
    cls: Any = getattr(sys.modules.get("peft.peft_model"), "PeftModel", None)
    if cls is None:
        return
    # Without a task type, a saved adapter names the class of its model, and AutoPeftModel imports it from Transformers.
    if hasattr(cls, BASE_CLASS):
        yield cls, BASE_CLASS, _naming_stock_classes(getattr(cls, BASE_CLASS))
    # PEFT saves and loads the tensors of adapters alone, and no head of multi-token prediction beside them.
    yield cls, "save_pretrained", saving_head(cls.save_pretrained)
    yield cls, "load_adapter", loading_head(cls.load_adapter)


def _registered() -> Iterator[tuple[Any, Any, Any]]:
    # The Auto classes build our models. Their own `register` refuses configurations of Transformers before 5.20.
    for auto, config, ours in late("generic").auto_entries(*(PATCHED if supports_other_families() else (Own,))):
        yield registered_classes(auto), config, ours


def _reading() -> Iterator[tuple[Any, Any, Any]]:
    auto = import_module("transformers.quantizers.auto")
    # Before 5.21, the quantizer raises an error: Transformers would load some of them without their scales.
    for method in CHECKPOINTS:
        yield auto.AUTO_QUANTIZATION_CONFIG_MAPPING, method, late("checkpoint_quantizer").CheckpointConfig
        yield auto.AUTO_QUANTIZER_MAPPING, method, late("checkpoint_quantizer").CheckpointQuantizer


FOR_MODELS, FOR_ADAPTERS, REGISTERED = Table(_for_models), Table(_for_adapters), Table(_registered)
# While a model of ours is loaded.
READING = Table(_reading)
_hooks: list[RemovableHandle] = []
_owners: WeakSet[Any] = WeakSet()
_readers: WeakSet[Any] = WeakSet()
_lock = RLock()


def late(name: str) -> Any:
    """Import a module late, because it imports the ops, and this one."""
    return import_module(f"{__package__}.{name}")


def _naming_stock_classes(original: Callable) -> Callable:
    @wraps(original)
    def base_model_class(self: Any, *args: Any, **kwargs: Any) -> type:
        classes = original(self, *args, **kwargs).__mro__
        return next(x for x in classes if x.__module__.partition(".")[0] != _PACKAGE)

    return base_model_class


def hold(owner: Any) -> None:
    """Install what models need until `owner` is released or gone. PEFT's part follows once PEFT was imported."""
    with _lock:
        _owners.add(owner)
        FOR_MODELS.install()
        FOR_ADAPTERS.install()


def release(owner: Any) -> None:
    """Uninstall what models need with the last owner. Owners that are gone count until another one is released."""
    with _lock:
        _owners.discard(owner)
        if not _owners:
            FOR_ADAPTERS.uninstall()
            FOR_MODELS.uninstall()
            # Transformers adds the classes of models, also when it creates one.
            forget_recorders(_PACKAGE)


class _Load:
    """The owner while models are loaded."""


@contextmanager
def held() -> Iterator[None]:
    """Install what models need while a block runs that creates some."""
    owner = _Load()
    hold(owner)
    try:
        yield
    finally:
        release(owner)


@contextmanager
def reading_checkpoints() -> Iterator[None]:
    """Let weights of quantized checkpoints load in their bits. Transformers has other layers for them, or none.

    Other threads that load a checkpoint meanwhile get the same.
    """
    owner = _Load()
    with _lock:
        _readers.add(owner)
        READING.install()
    try:
        yield
    finally:
        with _lock:
            _readers.discard(owner)
            if not _readers:
                READING.uninstall()


def is_registered() -> bool:
    return bool(REGISTERED.installed)


def install_registration() -> None:
    """Install [`REGISTERED`], and what models need."""
    REGISTERED.install()
    if not _hooks:
        # A stock class that creates its text model by an Auto class gets one of ours, and must become ours itself.
        _hooks.append(register_module_module_registration_hook(late("registry").complete))
    hold(REGISTERED)


def unregister() -> None:
    """Undo `register`, so that the Auto classes build the stock models. Has no effect without a registration."""
    REGISTERED.uninstall()
    while _hooks:
        _hooks.pop().remove()
    release(REGISTERED)
