"""Tensor dtypes and their names in safetensors."""

from __future__ import annotations

import torch
from torch.nn.parameter import is_lazy

from headway.checkpoint.format.manifest import METADATA
from headway.errors import UsageError

BY_NAME = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
    "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn, "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in BY_NAME.items()}


def check(name: str, tensor: torch.Tensor) -> None:
    """Raises `UsageError` if a checkpoint cannot hold the tensor `name`."""
    if name == METADATA:
        raise UsageError(f"{name!r} is a name that safetensors reserves: rename that part of the state")
    if found := problem(tensor):
        kind, advice = found
        raise UsageError(f"{name!r} is a {kind}, which a checkpoint cannot hold: {advice}")


def problem(tensor: torch.Tensor) -> tuple[str, str] | None:
    """Returns which kind of tensor this is, and what to do, if a checkpoint cannot hold it; None if it can."""
    if is_lazy(tensor):
        return "parameter without a shape", "call the model once before you save it"
    if tensor.is_meta:
        return "meta tensor", "give it values"
    if tensor.is_nested:
        return "nested tensor", "save its values and offsets"
    if tensor.layout is not torch.strided:
        return f"{tensor.layout} tensor", "convert it to a dense tensor"
    if tensor.dtype not in NAMES:
        return f"tensor of {tensor.dtype}", "convert it to another type"
    return None
