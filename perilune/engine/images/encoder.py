"""The rows that stand for pictures in a step: taken from a bounded cache, or computed by the model's tower.

M rows of width D for all pictures that a step touches; a step may touch a part of a picture only.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from perilune.config.media import MediaConfig
from perilune.engine.batch import ScheduledSequence
from perilune.text.images.picture import ImageInput
from perilune.text.images.pixels import normalised

# Patches of several small pictures go through the tower together up to so many; a larger picture goes alone.
PATCHES_AT_ONCE = 16384


class Tower(Protocol):
    """What makes embeddings of patches."""

    def __call__(self, patches: Tensor, grids: Sequence[tuple[int, int, int]]) -> Tensor:
        """patches [L, 3, P, P] of pictures with grids (1, rows, columns) -> [M, D]."""


class ImageEncoder:
    """Embeds the pictures of steps and keeps the latest embeddings, by content, up to `cache_bytes` bytes.

    The picture used last stays even if it alone is larger, so that a prompt that is computed in pieces embeds its
    picture once.
    """

    def __init__(self, tower: Tower, config: MediaConfig, dtype: torch.dtype, *, cache_bytes: int):
        self._tower = tower
        self._config = config
        self._dtype = dtype
        self._cache_bytes = cache_bytes
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self.num_hits = 0
        self.num_computed = 0

    @property
    def kept_bytes(self) -> int:
        """Bytes of the embeddings that are kept."""
        return sum(rows.nbytes for rows in self._kept.values())

    def rows(self, sequences: Sequence[ScheduledSequence]) -> tuple[Tensor, Tensor] | None:
        """(token rows of the step [M] int64, embeddings [M, D]) of all pictures in it; None without any."""
        pieces = list(_pieces(sequences))
        if not pieces:
            return None
        found = self._embeddings(image for _, image, _, _ in pieces)
        places = [torch.arange(row, row + end - first) for row, _, first, end in pieces]
        return torch.cat(places), torch.cat([found[image.digest][first:end] for _, image, first, end in pieces])

    def _embeddings(self, images: Iterable[ImageInput]) -> dict[bytes, Tensor]:
        found: dict[bytes, Tensor] = {}
        missing: dict[bytes, ImageInput] = {}
        for image in images:
            if image.digest in self._kept:
                found[image.digest] = self._kept[image.digest]
                self.num_hits += 1
            else:
                missing[image.digest] = image
        for group in _groups(missing.values()):
            found |= self._compute(group)
        for digest, rows in found.items():
            self._keep(digest, rows)
        return found

    def _compute(self, images: Sequence[ImageInput]) -> dict[bytes, Tensor]:
        patches = [torch.from_numpy(normalised(image.patches, self._config)).to(self._dtype) for image in images]
        rows_MD = self._tower(torch.cat(patches), [(1, image.rows, image.columns) for image in images])
        self.num_computed += len(images)
        # copies, so that each picture's rows can be dropped alone
        pieces = [piece.clone() for piece in rows_MD.split([image.num_tokens for image in images])]
        return {image.digest: piece for image, piece in zip(images, pieces, strict=True)}

    def _keep(self, digest: bytes, rows: Tensor) -> None:
        self._kept[digest] = rows
        self._kept.move_to_end(digest)
        total = self.kept_bytes
        while total > self._cache_bytes and len(self._kept) > 1:
            total -= self._kept.popitem(last=False)[1].nbytes


def _pieces(sequences: Sequence[ScheduledSequence]) -> Iterable[tuple[int, ImageInput, int, int]]:
    """(first row in the step, picture, its first and end embedding) of every piece of a picture in the step."""
    start = 0
    for sequence in sequences:
        begin, end = sequence.num_computed_tokens, sequence.seq_len
        for image in sequence.request.message.images:
            first, last = max(begin, image.start), min(end, image.end)
            if first < last:
                yield start + first - begin, image, first - image.start, last - image.start
        start += sequence.num_scheduled_tokens


def _groups(images: Iterable[ImageInput]) -> Iterable[list[ImageInput]]:
    group: list[ImageInput] = []
    num_patches = 0
    for image in images:
        if group and num_patches + image.patches.shape[0] > PATCHES_AT_ONCE:
            yield group
            group, num_patches = [], 0
        group.append(image)
        num_patches += image.patches.shape[0]
    if group:
        yield group
