"""Which requests are past their time. Knows ids and times only."""


class Deadlines:
    """Deadlines by request id, on the clock of whoever asks."""

    def __init__(self) -> None:
        self._by_id: dict[str, float] = {}
        # no later than the earliest of them, so that most questions are answered by one comparison
        self._earliest_s = float("inf")

    def add(self, request_id: str, deadline_s: float) -> None:
        self._by_id[request_id] = deadline_s
        self._earliest_s = min(self._earliest_s, deadline_s)

    def remove(self, request_id: str) -> None:
        """Forget a request, which need not have had a deadline."""
        self._by_id.pop(request_id, None)

    def passed(self, now_s: float) -> list[str]:
        """The ids whose deadline has come."""
        if now_s < self._earliest_s:
            return []
        self._earliest_s = min((later for later in self._by_id.values() if later > now_s), default=float("inf"))
        return [request_id for request_id, deadline_s in self._by_id.items() if deadline_s <= now_s]
