"""Numbered seats and who holds none of them: free lists of block and slot ids. No tokens, no bytes, no owners."""


class IdPool:
    """Hands out the ids 0 to `num_ids - 1`, the one freed last first."""

    def __init__(self, num_ids: int):
        self.num_ids = num_ids
        self._free = list(range(num_ids - 1, -1, -1))
        self._is_free = [True] * num_ids

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_ids - len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` free ids, or None, with nothing taken, when fewer are free."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        for taken_id in taken:
            self._is_free[taken_id] = False
        return taken

    def give_back(self, ids: list[int]) -> None:
        """Free ids that were taken."""
        for freed_id in ids:
            assert not self._is_free[freed_id], f"id {freed_id} is freed twice"
            self._is_free[freed_id] = True
            self._free.append(freed_id)

    def check_integrity(self, held: list[int]) -> None:
        """Assert that `held`, the ids of all owners, and the free ids are each id exactly once."""
        assert len(held) == len(set(held)), "an id is held twice"
        assert len(held) == self.num_used, f"{len(held)} ids are held and {self.num_used} are in use"
        assert not any(self._is_free[held_id] for held_id in held), "a held id is free"
        assert all(self._is_free[free_id] for free_id in self._free), "the free list holds a taken id"
