"""State of a callback: as JSON for a checkpoint and back, and the search for state that no checkpoint would hold."""

from __future__ import annotations

import base64
import sys
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from headway.data.workers.user_failure import is_user_file

DTYPES = {
    str(dtype): dtype
    for dtype in (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    )
}
"""Types of tensors that a state may hold."""
# Deeper parts of an object are compared by identity.
MAX_DEPTH = 6


def encode_state(value: Any, path: str = "state") -> Any:
    """Returns a state as JSON from which `decode_state` makes an equal one: tuples, arrays and tensors come back too.

    Raises:
        TypeError: it holds something else; the message says where.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [encode_state(one, f"{path}[{index}]") for index, one in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": [encode_state(one, f"{path}[{index}]") for index, one in enumerate(value)]}
    # JSON would turn the key 3 into "3", and the state would come back as another one.
    if type(value) is dict and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: encode_state(one, f"{path}[{key!r}]") for key, one in value.items()}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        array = np.asarray(value)
        return {"$array": [array.dtype.str, list(array.shape), base64.b64encode(array.tobytes()).decode()]}
    if isinstance(value, torch.Tensor) and str(value.dtype) in DTYPES:
        data = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {"$tensor": [str(value.dtype), list(value.shape), base64.b64encode(data).decode()]}
    if isinstance(value, dict):
        raise TypeError(f"{path} is a {type(value).__name__} that is not a plain dict with strings as keys")
    raise TypeError(f"{path} is a {type(value).__name__}, which no checkpoint holds")


def decode_state(value: Any) -> Any:
    """Returns the state that `encode_state` encoded. Raises ValueError, KeyError or TypeError: it is damaged."""
    if isinstance(value, list):
        return [decode_state(one) for one in value]
    if not isinstance(value, dict):
        return value
    if "$tuple" in value:
        return tuple(decode_state(one) for one in value["$tuple"])
    if "$array" in value:
        name, shape, data = value["$array"]
        dtype = np.dtype(name)
        # An object array from a foreign file would hold addresses.
        if dtype.kind not in "biuf":
            raise ValueError(f"{name!r} is no type of an array")
        return np.frombuffer(base64.b64decode(data), dtype).reshape(shape).copy()
    if "$tensor" in value:
        name, shape, data = value["$tensor"]
        buffer = bytearray(base64.b64decode(data))
        if not buffer:
            return torch.empty(shape, dtype=DTYPES[name])
        return torch.frombuffer(buffer, dtype=torch.uint8).view(DTYPES[name]).reshape(shape)
    return {key: decode_state(one) for key, one in value.items()}


def fingerprint_attributes(callback: Any) -> dict[str, Any]:
    """Returns a value for each attribute of a callback that changes when the attribute does. It reads no device."""
    attributes: dict[str, Any] = {}
    # A list on the class is shared by all objects of it, and as much a state as an attribute.
    for kind in reversed(type(callback).__mro__):
        shared = {name: value for name, value in vars(kind).items() if isinstance(value, list | dict | set | deque)}
        attributes |= {name: value for name, value in shared.items() if not name.startswith("__")}
    attributes |= getattr(callback, "__dict__", {})
    return {name: _fingerprint(value, 0) for name, value in attributes.items()}


def _fingerprint(value: Any, depth: int) -> Any:
    if isinstance(value, float):
        # NaN is not equal to itself.
        return repr(value)
    if value is None or isinstance(value, bool | int | str | bytes):
        return type(value), value
    if isinstance(value, torch.Tensor):
        return id(value), value._version
    if isinstance(value, np.ndarray):
        return value.shape, value.tobytes()
    if depth < MAX_DEPTH:
        if isinstance(value, Mapping):
            return [(_fingerprint(key, depth + 1), _fingerprint(one, depth + 1)) for key, one in value.items()]
        if isinstance(value, list | tuple | deque):
            return [_fingerprint(one, depth + 1) for one in value]
        if isinstance(value, set | frozenset):
            return len(value), hash(frozenset(value))
        # An object of the user's own, such as a running mean.
        if _is_users(value):
            return {name: _fingerprint(one, depth + 1) for name, one in vars(value).items()}
    return id(value)


def _is_users(value: Any) -> bool:
    if isinstance(value, type | torch.nn.Module) or not hasattr(value, "__dict__"):
        return False
    module = sys.modules.get(type(value).__module__)
    file = getattr(module, "__file__", None)
    return file is not None and is_user_file(file)
