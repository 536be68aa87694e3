"""Ops and their implementations: a name, a reference, and faster versions that may refuse a call with a reason.

`resolve` asks the backends in a fixed order and remembers the first that accepts a key; the hot path is one dictionary
look-up. `explain` prints every candidate with its reason, so that nothing optional disappears silently.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch

from perilune import ops
from perilune.errors import BackendError

P = ParamSpec("P")
R = TypeVar("R")

BACKEND_ORDER = ("triton", "native", "inductor", "reference")


class OpKey(NamedTuple):
    """What an implementation may base its refusal on: device, dtypes, static sizes, need of a gradient.

    A tuple, because one is made and looked up at every call of an op.
    """

    device: str
    dtypes: tuple[torch.dtype, ...]
    sizes: tuple[int, ...]
    needs_grad: bool


def tensor_key(*tensors: torch.Tensor | None, sizes: Iterable[int] = ()) -> OpKey:
    """Builds the key of a call from its tensors; `None` stands for an absent optional tensor."""
    dtypes, needs_grad, may_need_grad = [], False, torch.is_grad_enabled()
    for tensor in tensors:
        if tensor is not None:
            dtypes.append(tensor.dtype)
            needs_grad = needs_grad or (may_need_grad and tensor.requires_grad)
    first = tensors[0]
    assert first is not None, "the first tensor tells the device"
    device = "cpu" if first.is_cpu else first.device.type
    return OpKey(device, tuple(dtypes), tuple(sizes), needs_grad)


@dataclass(frozen=True)
class Implementation(Generic[P, R]):
    """One backend's version of an op; `supports` returns a reason to refuse, or None."""

    backend: str
    call: Callable[P, R]
    supports: Callable[[OpKey], str | None]


@dataclass(frozen=True)
class Candidate:
    """One line of `Op.explain`: a backend, and why it refuses (None where it is willing)."""

    backend: str
    refusal: str | None
    is_chosen: bool


class Op(Generic[P, R]):
    """A named operation with a reference in plain torch. Calling it runs the best willing implementation."""

    def __init__(self, name: str, reference: Callable[P, R], key: Callable[P, OpKey]):
        self.name = name
        self.reference = reference
        self.key = key
        self._implementations: dict[str, Implementation[P, R]] = {
            "reference": Implementation("reference", reference, lambda _: None)
        }
        self._forced: str | None = None
        self._resolved: dict[OpKey, Callable[P, R]] = {}
        if name in _OPS:
            raise AssertionError(f"op {name} is declared twice")
        _OPS[name] = self

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        key = self.key(*args, **kwargs)
        call = self._resolved.get(key)
        if call is None:
            call = self._resolved[key] = self._choose(key).call
        return call(*args, **kwargs)

    def register(self, backend: str, call: Callable[P, R], supports: Callable[[OpKey], str | None]) -> None:
        """Adds a backend's implementation; the choice for keys seen so far is made anew."""
        if backend not in BACKEND_ORDER or backend in self._implementations:
            raise AssertionError(f"op {self.name}: backend {backend} is unknown or registered twice")
        self._implementations[backend] = Implementation(backend, call, supports)
        self._resolved.clear()

    @property
    def backends(self) -> tuple[str, ...]:
        """Names of its implementations in the order they are asked, the reference last."""
        return tuple(implementation.backend for implementation in self._ordered())

    def implementation(self, backend: str) -> Implementation[P, R] | None:
        """A backend's implementation, or None where the op has none by it."""
        return self._implementations.get(backend)

    def force(self, backend: str | None) -> None:
        """Lets only `backend` serve this op (None lifts it). Raises BackendError where the op has no such backend."""
        if backend is not None and backend not in self._implementations:
            raise BackendError(
                f"op {self.name} has no {backend!r} implementation; choose one of {', '.join(self._implementations)}"
            )
        self._forced = backend
        self._resolved.clear()

    def backend(self, key: OpKey) -> str:
        """The backend that serves calls with `key`; BackendError where none does."""
        return self._choose(key).backend

    def explain(self, key: OpKey) -> list[Candidate]:
        """All candidates for `key` in the order they are asked, with the reason of each refusal."""
        found: list[Candidate] = []
        for implementation in self._ordered():
            refusal = implementation.supports(key)
            if self._forced is not None and implementation.backend != self._forced:
                refusal = refusal or f"the configuration names {self._forced}"
            is_chosen = refusal is None and not any(candidate.is_chosen for candidate in found)
            found.append(Candidate(implementation.backend, refusal, is_chosen))
        return found

    def _ordered(self) -> list[Implementation[P, R]]:
        return [self._implementations[backend] for backend in BACKEND_ORDER if backend in self._implementations]

    def _choose(self, key: OpKey) -> Implementation[P, R]:
        candidates = self.explain(key)
        for candidate in candidates:
            if candidate.is_chosen:
                return self._implementations[candidate.backend]
        reasons = "; ".join(f"{candidate.backend}: {candidate.refusal}" for candidate in candidates)
        raise BackendError(f"no implementation of op {self.name} accepts {key}: {reasons}")


_OPS: dict[str, "Op[..., Any]"] = {}


def all_ops() -> Mapping[str, "Op[..., Any]"]:
    """Every declared op by name."""
    return _OPS


def apply_overrides(overrides: Mapping[str, str]) -> None:
    """Forces ops to backends as the engine configuration names them, frees the others; raises BackendError."""
    ops.load_all()  # an op is declared when its module is first imported, which may not have happened yet
    for name in overrides:
        if name not in _OPS:
            raise BackendError(f"unknown op {name!r} in the ops override; known: {', '.join(sorted(_OPS))}")
    for name, op in _OPS.items():
        op.force(overrides.get(name))
