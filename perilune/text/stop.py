"""Stop strings over text that arrives in pieces."""

from collections import deque
from dataclasses import dataclass, field

from perilune.errors import RequestError


@dataclass
class _Node:
    depth: int
    children: dict[str, "_Node"] = field(default_factory=dict)
    fallback: "_Node | None" = None
    match: str | None = None


class StopMatcher:
    """Finds the stop string that ends first; of several ending together, the longest.

    Holds back exactly the longest tail that a stop string could begin with. One automaton (Aho-Corasick) serves all
    strings, so the cost per character does not depend on how many there are or how the text was split.
    """

    def __init__(self, stop: tuple[str, ...]):
        if any(not text for text in stop):
            raise RequestError("a stop string is empty; leave it out instead", param="stop")
        self._root = _build(stop)
        self._node = self._root
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that is now safe to show, and the stop string if one is complete (what follows it is discarded)."""
        text = self._held + text
        node = self._node
        for position in range(len(self._held), len(text)):
            node = _step(self._root, node, text[position])
            if node.match is not None:
                self._node, self._held = self._root, ""
                return text[: position + 1 - len(node.match)], node.match
        border = len(text) - node.depth
        self._node, self._held = node, text[border:]
        return text[:border], None

    def flush(self) -> str:
        """The text still held back, no stop string having been completed."""
        held, self._held, self._node = self._held, "", self._root
        return held


def _step(root: _Node, node: _Node, character: str) -> _Node:
    while character not in node.children:
        if node.fallback is None:
            return root
        node = node.fallback
    return node.children[character]


def _build(stop: tuple[str, ...]) -> _Node:
    root = _Node(0)
    for text in stop:
        node = root
        for character in text:
            node = node.children.setdefault(character, _Node(node.depth + 1))
        node.match = text
    queue = deque([root])
    while queue:
        parent = queue.popleft()
        for character, child in parent.children.items():
            child.fallback = root if parent.fallback is None else _step(root, parent.fallback, character)
            child.match = child.match or child.fallback.match
            queue.append(child)
    return root
