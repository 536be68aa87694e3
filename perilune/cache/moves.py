"""Copies within the cache that must happen before a step computes anything, in order; ids only."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CopyBlock:
    """Copy all rows of a block to another."""

    source: int
    target: int


@dataclass(frozen=True)
class CopyState:
    """Copy the state in a slot to another."""

    source: int
    target: int


Move = CopyBlock | CopyState
