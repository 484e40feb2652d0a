"""What commands check before torch is imported, which takes seconds: packages, the model and the data."""

import socket
import time
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from ..data.records.files import find_file, read_file
from ..errors import alternatives, input_error
from ..models.optimizers import OPTIMIZERS
from .env import version


LOCAL_OR_HUB = "a local directory or a model on the Hub"
# Why there is no model of a name, and the fix.
INVALID = "the name is not valid on the Hub", "Check the path."
UNREACHABLE = "the Hub could not be reached", "Check the name and the connection."
OFFLINE = "no such model in the cache (HF_HUB_OFFLINE is set)", "Unset it to download."
# Transformers' names of attention, and the package that one needs.
_ATTENTION = dict.fromkeys(("sdpa", "eager", "flex_attention"), "")
_ATTENTION |= {f"flash_attention_{n}": f"flash-attn{suffix}" for n, suffix in ((2, ""), (3, "-3"), (4, "-4"))}
# A connection that fails later is slow, and may work.
_AT_ONCE = 1.0


def check_packages(settings: Namespace) -> None:
    """Raise an `ImportError` for an option whose package is not installed, or a `ValueError` for unknown attention."""
    check_attention(getattr(settings, "attn", None))
    needed = [(settings.lora, "--lora", "peft"), (settings.load_in_4bit, "--load-in-4bit", "bitsandbytes")]
    if name := getattr(settings, "optim", None):
        package = OPTIMIZERS[name].package
        needed.append((package != "torch", f"--optim {name}", package))
    for requested, option, package in needed:
        if requested and find_spec(package) is None:
            raise ImportError(f"{option} needs {package}: pip install {package}")


def check_attention(name: str | None) -> None:
    """Raise a `ValueError` for an unknown attention implementation, or an `ImportError` if its package is not installed."""
    # A name with a slash is a kernel on the Hub.
    if name is None or "/" in name:
        return
    if name not in _ATTENTION:
        fix = f"Choose {alternatives(list(_ATTENTION))}."
        raise input_error("a known attention implementation", repr(name), fix, option="--attn")
    # With `kernels`, Transformers downloads FlashAttention.
    if (package := _ATTENTION[name]) and not (version(package) or version("kernels")):
        raise ImportError(f"--attn {name} needs {package}: pip install {package}")


def check_source(option: str, source: str) -> None:
    """Raise an `OSError` for a path that does not exist, and for a model that can neither be downloaded nor is in the cache."""
    if Path(source).exists() or not (why := _why_absent(source)):
        return
    got, fix = f"{source!r}: no such local directory, and {why[0]}", why[1]
    raise OSError(str(input_error(LOCAL_OR_HUB, got, fix, option=option)))


def _why_absent(name: str) -> tuple[str, str] | None:
    """Why no model has this name and the fix, or `None` if only a download can tell."""
    # Names have at most one slash, and none in front.
    if name.count("/") > 1 or name.startswith(("/", ".", "~")) or "\\" in name:
        return INVALID
    from huggingface_hub import constants, is_offline_mode, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        # An adapter has an error of its own later.
        if any(isinstance(try_to_load_from_cache(name, file), str) for file in ("config.json", "adapter_config.json")):
            return None
    except HFValidationError:
        return INVALID
    if is_offline_mode():
        return OFFLINE
    return UNREACHABLE if _fails_at_once(constants.ENDPOINT) else None


def _fails_at_once(url: str) -> bool:
    """Whether there is no connection to a server, where a download would be repeated for a minute."""
    parts = urlsplit(url)
    if not parts.hostname or getproxies().keys() & {parts.scheme, "all"}:
        return False
    start = time.monotonic()
    try:
        port = parts.port or {"http": 80}.get(parts.scheme, 443)
        socket.create_connection((parts.hostname, port), timeout=_AT_ONCE).close()
    except OSError:
        # The error is that of one address, and another one may have been slow.
        return time.monotonic() - start < _AT_ONCE
    return False


def check_data(data: str) -> None:
    """Raise the error of a file that is not there, or whose first record cannot be read. A JSON array is read later."""
    path = find_file(data)
    if path is None:
        return
    with path.open("rb") as file:
        is_array = file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
    if not is_array:
        next(read_file(path), None)
