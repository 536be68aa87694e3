"""The compiled core: imports it, chooses its instruction set, and says why it is absent where it is.

The only module that imports the extension. Implementations in `ops/*/native.py` pass it addresses and sizes.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from perilune import env
from perilune.errors import BackendError
from perilune.ops.registry import Op, OpKey

P = ParamSpec("P")
R = TypeVar("R")

# perilune.h, enum Type
TYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.float8_e4m3fn: 3}
MXFP4_CODE = 4
ACTIVATIONS = (torch.float32, torch.bfloat16)
# Kernels take rows whose length is a multiple of this.
MULTIPLE = 16

_core: Any = None
_absence: str | None = None
try:
    from perilune import _native as _compiled
except ImportError as error:
    _absence = (
        f"the native core is not built ({error}); install a C++17 compiler and install perilune again "
        "(pip install --force-reinstall --no-deps)"
    )
else:
    _core = _compiled


@cache
def core() -> Any:
    """The extension, with the instruction set that PERILUNE_ISA names; BackendError where there is none."""
    if _absence is not None:
        raise BackendError(_absence)
    wanted = env.isa()
    if wanted is not None and not _core.use_isa(wanted):
        raise BackendError(
            f"{env.ISA.name} is {wanted!r}; this processor offers {', '.join(_core.available_isas())}: "
            "name one of these, or unset it for the widest"
        )
    return _core


def absence() -> str | None:
    """Why there is no native core, or None where there is one."""
    return _absence


def refusal(key: OpKey, *, multiples: tuple[int, ...] = ()) -> str | None:
    """What every native implementation refuses: another device, gradients, sizes it has no kernel for."""
    if _absence is not None:
        return _absence
    if key.device != "cpu":
        return f"runs on the cpu, not on {key.device}"
    if key.needs_grad:
        return "has no gradient"
    odd = [size for size in multiples if size % MULTIPLE]
    return f"sizes must be multiples of {MULTIPLE}, not {odd}" if odd else None


def refuse_types(key: OpKey, *allowed: tuple[torch.dtype, ...]) -> str | None:
    """Refuses dtypes; `allowed` says for each tensor of the key what it may be."""
    for dtype, choices in zip(key.dtypes, allowed, strict=True):
        if dtype not in choices:
            return f"{dtype} is none of {', '.join(map(str, choices))}"
    return None


def register(op: Op[P, R], call: Callable[P, R], supports: Callable[[OpKey], str | None]) -> None:
    """Adds the native implementation of an op."""
    op.register("native", call, supports)


def address(tensor: Tensor | None) -> int:
    """Where a contiguous tensor's elements lie; 0 for an absent one."""
    return 0 if tensor is None else tensor.data_ptr()


def code(tensor: Tensor) -> int:
    """The core's number of a tensor's element type."""
    return TYPE_CODES[tensor.dtype]
