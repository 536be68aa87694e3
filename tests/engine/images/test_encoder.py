"""Which pictures go through the tower, and which of their embeddings are kept."""

from types import SimpleNamespace

import torch

from perilune.config.media import MediaConfig
from perilune.engine.images.encoder import ImageEncoder
from tests.engine.test_images import request


class CountingTower:
    """Rows that name their picture, and what each call was given."""

    def __init__(self):
        self.calls = []

    def pieces(self, patches, grids):
        self.calls.append(grids)
        yield
        return torch.cat([torch.full((rows * columns // 4, 8), float(rows)) for _, rows, columns in grids])


def step(*requests):
    return [
        SimpleNamespace(
            request=SimpleNamespace(message=item), num_computed_tokens=0, seq_len=length, num_scheduled_tokens=length
        )
        for item in requests
        for length in [len(item.prompt_token_ids)]
    ]


def images_of(*requests):
    return [image for item in requests for image in item.images]


def embed_all(encoder, images):
    while awaited := [image for image in images if not encoder.is_embedded(image)]:
        encoder.embed(awaited, 0.0)


def test_pictures_of_several_requests_go_through_the_tower_together():
    tower = CountingTower()
    encoder = ImageEncoder(tower, MediaConfig(), torch.float32, cache_bytes=10**6)
    requests = [request("a", 2, (1, 4, 6)), request("b", 3), request("c", 1, (2, 2, 2), 1)]
    embed_all(encoder, images_of(*requests))
    rows, embeddings = encoder.rows(step(*requests))
    assert tower.calls == [[(1, 4, 6), (1, 2, 2)]]
    assert rows.tolist() == [2, 3, 4, 5, 6, 7, 12]
    assert embeddings[:, 0].tolist() == [4.0] * 6 + [2.0]


def test_the_same_picture_twice_in_a_step_is_embedded_once():
    tower = CountingTower()
    encoder = ImageEncoder(tower, MediaConfig(), torch.float32, cache_bytes=10**6)
    rows, _ = encoder.rows(step(request("a", (1, 2, 2), 1, (1, 2, 2)), request("b", (1, 2, 2))))
    assert tower.calls == [[(1, 2, 2)]]
    assert rows.tolist() == [0, 2, 3]


def test_the_pictures_used_last_are_kept_within_the_bound():
    tower = CountingTower()
    picture_bytes = 1 * 8 * 4
    encoder = ImageEncoder(tower, MediaConfig(), torch.float32, cache_bytes=2 * picture_bytes)
    for seed in (1, 2, 1, 3, 1):  # 3 drives out 2, which was used before 1
        encoder.rows(step(request("a", (seed, 2, 2))))
        assert encoder.kept_bytes <= 2 * picture_bytes
    assert len(tower.calls) == 3
    encoder.rows(step(request("a", (2, 2, 2))))
    assert len(tower.calls) == 4


def test_many_pictures_go_through_the_tower_in_groups(monkeypatch):
    monkeypatch.setattr("perilune.engine.images.encoder.PATCHES_AT_ONCE", 10)
    tower = CountingTower()
    encoder = ImageEncoder(tower, MediaConfig(), torch.float32, cache_bytes=10**6)
    embed_all(encoder, images_of(request("a", *((seed, 2, 2) for seed in range(5)), (9, 4, 4))))
    assert [len(grids) for grids in tower.calls] == [2, 2, 1, 1]


def test_a_step_without_pictures_asks_nothing():
    encoder = ImageEncoder(CountingTower(), MediaConfig(), torch.float32, cache_bytes=10**6)
    assert encoder.rows(step(request("a", 3))) is None


def test_what_was_begun_goes_on_in_the_next_call():
    tower = CountingTower()
    encoder = ImageEncoder(tower, MediaConfig(), torch.float32, cache_bytes=10**6)
    (image,) = images_of(request("a", (1, 4, 6)))
    encoder.embed([image], 0.0)
    assert not encoder.is_embedded(image)
    encoder.embed([image], 0.0)
    assert encoder.is_embedded(image)
    assert len(tower.calls) == 1


def test_a_picture_that_a_step_needs_and_nobody_embedded_is_embedded_in_it():
    tower = CountingTower()
    encoder = ImageEncoder(tower, MediaConfig(), torch.float32, cache_bytes=10**6)
    rows, embeddings = encoder.rows(step(request("a", 1, (1, 4, 6))))
    assert rows.tolist() == [1, 2, 3, 4, 5, 6]
    assert embeddings.shape == (6, 8)


def test_small_pictures_are_embedded_while_a_large_one_is_on_its_way(monkeypatch):
    monkeypatch.setattr("perilune.engine.images.encoder.LARGE_PATCHES", 10)

    class SlowTower(CountingTower):
        """Takes as many pieces as a picture has patches."""

        def pieces(self, patches, grids):
            for _ in range(len(patches)):
                yield
            return (yield from super().pieces(patches, grids))

    encoder = ImageEncoder(SlowTower(), MediaConfig(), torch.float32, cache_bytes=10**6)
    large, *small = images_of(request("a", (1, 20, 20)), *(request(str(seed), (seed, 2, 2)) for seed in (2, 3, 4)))
    encoder.embed([large], 0.0)
    for image in small:
        for _ in range(20):
            awaited = [x for x in (large, image) if not encoder.is_embedded(x)]
            encoder.embed(awaited, 0.0)
        assert encoder.is_embedded(image)
        assert not encoder.is_embedded(large)
    embed_all(encoder, [large])
    assert encoder.num_computed == 4, "nothing was begun twice"
    assert encoder.rows(step(request("a", (1, 20, 20))))[1].shape == (100, 8)
