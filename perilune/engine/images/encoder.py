"""The rows that stand for pictures in a step: computed by the model's tower between steps, kept in a bounded cache.

M rows of width D for all pictures that a step touches; a step may touch a part of a picture only.
"""

import time
from collections import OrderedDict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from perilune.config.media import MediaConfig
from perilune.engine.batch import ScheduledSequence
from perilune.ops.threads import torch_stands_back
from perilune.text.images.picture import ImageInput
from perilune.text.images.pixels import normalised

# Patches of several small pictures go through the tower together up to so many; a larger picture goes alone.
PATCHES_AT_ONCE = 16384
# A picture of more patches is large: small ones do not wait for it, since the time grows with the square.
LARGE_PATCHES = 4096


class Tower(Protocol):
    """What makes embeddings of patches."""

    def pieces(self, patches: Tensor, grids: Sequence[tuple[int, int, int]]) -> Generator[None, None, Tensor]:
        """patches [L, 3, P, P] of pictures with grids (1, rows, columns) -> [M, D], with breaks."""


@dataclass(frozen=True)
class _Job:
    """Pictures on their way through the tower."""

    images: Sequence[ImageInput]
    pieces: Generator[None, None, Tensor]


class ImageEncoder:
    """Embeds pictures between steps and keeps the latest embeddings, by content, up to `cache_bytes` bytes.

    The picture used last stays even if it alone is larger, so that a prompt that is computed in pieces embeds its
    picture once. What a step needs and is not there is computed in it.
    """

    def __init__(self, tower: Tower, config: MediaConfig, dtype: torch.dtype, *, cache_bytes: int):
        self._tower = tower
        self._config = config
        self._dtype = dtype
        self._cache_bytes = cache_bytes
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        self._jobs: dict[bool, _Job] = {}  # by whether they are of a large picture
        self._is_turn_of_large = False
        self.num_computed = 0

    @property
    def kept_bytes(self) -> int:
        """Bytes of the embeddings that are kept."""
        return sum(rows.nbytes for rows in self._kept.values())

    def is_embedded(self, image: ImageInput) -> bool:
        """Whether the embeddings of a picture are there."""
        return image.digest in self._kept

    def embed(self, awaited: Sequence[ImageInput], budget_s: float) -> None:
        """Work on these pictures for about `budget_s` seconds: small ones together, in turn with one large one.

        What was begun goes on in the next call, unless nobody awaits it any more.
        """
        deadline = time.monotonic() + budget_s
        with torch_stands_back(), torch.inference_mode():
            self._take_up({image.digest: image for image in awaited})
            while self._jobs:
                self._is_turn_of_large = not self._is_turn_of_large
                is_large = self._is_turn_of_large if len(self._jobs) == 2 else next(iter(self._jobs))
                job = self._jobs.pop(is_large)
                if not self._go_on(job):
                    self._jobs[is_large] = job
                if time.monotonic() > deadline:
                    return

    def _take_up(self, awaited: Mapping[bytes, ImageInput]) -> None:
        """Give up jobs that nobody awaits, and begin one of each kind where there is none."""
        for is_large in (False, True):
            images = [x for x in awaited.values() if (x.patches.shape[0] > LARGE_PATCHES) is is_large]
            job = self._jobs.get(is_large)
            if job is not None and not any(image.digest in awaited for image in job.images):
                del self._jobs[is_large]
            if images and is_large not in self._jobs:
                self._jobs[is_large] = self._begin(next(_groups(images)))

    def _begin(self, images: Sequence[ImageInput]) -> _Job:
        patches = [torch.from_numpy(normalised(image.patches, self._config)).to(self._dtype) for image in images]
        grids = [(1, image.rows, image.columns) for image in images]
        return _Job(images, self._tower.pieces(torch.cat(patches), grids))

    def _go_on(self, job: _Job) -> bool:
        """Do one piece of a job; whether that was the last one."""
        try:
            next(job.pieces)
        except StopIteration as end:
            # copies, so that each picture's rows can be dropped alone
            pieces = [piece.clone() for piece in end.value.split([image.num_tokens for image in job.images])]
            self.num_computed += len(job.images)
            # the first last, so that it is there for its request whatever the others drive out
            for image, piece in reversed(list(zip(job.images, pieces, strict=True))):
                self._keep(image.digest, piece)
            return True
        return False

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
        for image in images:
            if image.digest not in found:
                if not self.is_embedded(image):
                    self._finish([image])
                found[image.digest] = self._kept[image.digest]
                self._kept.move_to_end(image.digest)
        return found

    def _finish(self, images: Sequence[ImageInput]) -> None:
        with torch_stands_back(), torch.inference_mode():
            job = self._begin(images)
            while not self._go_on(job):
                pass

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


def _groups(images: Iterable[ImageInput]) -> Iterator[list[ImageInput]]:
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
