from perilune.text.channels import Call, CallPart, Channel, Delta, Transcript, collect, merge_deltas


def test_neighbours_of_one_channel_are_joined_with_their_ids() -> None:
    deltas = [
        Delta(Channel.REASONING, "a", (1,)),
        Delta(Channel.REASONING, "b", (2, 3)),
        Delta(Channel.CONTENT, "c", (4,)),
        Delta(Channel.CONTENT, "d", (), is_resent=True),
        Delta(Channel.CONTENT, "e", (5,)),
    ]
    assert merge_deltas(deltas) == [Delta(Channel.REASONING, "ab", (1, 2, 3)), *deltas[2:]]


def part(text: str, *token_ids: int, index: int = 0, name: str | None = None, is_end: bool = False) -> Delta:
    return Delta(Channel.TOOLS, text, token_ids, call=CallPart(index, name, is_end))


def test_pieces_of_one_call_are_joined_except_the_first() -> None:
    first, second = part("", 1, name="f"), part("", 5, index=1, name="g")
    deltas = [first, part("{", 2), part("}", 3, 4, is_end=True), second, part("{}", 6, index=1, is_end=True)]
    assert merge_deltas(deltas) == [first, part("{}", 2, 3, 4, is_end=True), second, deltas[-1]]


def test_a_transcript_holds_the_calls_that_ended() -> None:
    deltas = [
        part("", 1, name="f"),
        part('{"a": ', 2),
        Delta(Channel.MARKUP, "", (3,)),
        part("1}", 4, is_end=True),
        part("", 5, index=1, name="g"),
        part('{"b', 6, index=1),
    ]
    assert collect(deltas) == Transcript(calls=(Call("f", '{"a": 1}'),))


def test_a_transcript_adds_up_reasoning_and_content() -> None:
    deltas = [
        Delta(Channel.REASONING, "a", (1,)),
        Delta(Channel.MARKUP, "", (2, 3)),
        Delta(Channel.CONTENT, "b", (4,)),
        Delta(Channel.CONTENT, "c", (5,)),
    ]
    assert collect(deltas) == Transcript("a", "bc", (1,), (4, 5))


def test_text_without_channels_is_content() -> None:
    assert collect([Delta(Channel.TEXT, "a", (1,))]) == Transcript("", "a", (), (1,))


def test_text_sent_again_as_content_is_no_longer_reasoning() -> None:
    deltas = [
        Delta(Channel.REASONING, "a", (1,)),
        Delta(Channel.CONTENT, "a", (), is_resent=True),
        Delta(Channel.CONTENT, "b", (2,)),
    ]
    assert collect(deltas) == Transcript("", "ab", (), (1, 2))
