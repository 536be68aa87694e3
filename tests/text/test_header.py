import pytest

from perilune.text.header import MAX_HEADER_BYTES, MAX_NAMED_HEADER_BYTES, Header


def header(text: str, is_open: bool = True) -> Header:
    return Header(is_open, [], bytearray(text.encode()))


def test_attributes_are_unescaped_quotes_first() -> None:
    attributes = header('argument key="a&quot;b&amp;c&amp;quot;&lt;\n" type="string"').attributes
    assert attributes == {"key": 'a"b&c&quot;&lt;\n', "type": "string"}


@pytest.mark.parametrize("text", ["call tool=f", "call", 'call tool "f"', "call tool='f'", 'call tool="f'])
def test_what_is_no_attribute_is_passed_over(text: str) -> None:
    assert header(text).attributes == {}


def test_the_order_of_attributes_does_not_matter() -> None:
    assert header('call index="1" tool="f"').attributes == header('call tool="f" index="1"').attributes


@pytest.mark.parametrize(
    ("text", "is_open", "with_sep", "without_sep"),
    [
        ("think", False, "think", "think"),
        ("think x", False, None, None),
        ("note", True, None, None),
        ('call tool="f"', True, "call", "call"),
        ("call me", True, "call", None),
        ('call tool="f"{}', True, "call", None),
    ],
)
def test_without_its_separator_a_tag_must_be_well_formed(
    text: str, is_open: bool, with_sep: str | None, without_sep: str | None
) -> None:
    assert header(text, is_open).tag(has_sep=True) == with_sep
    assert header(text, is_open).tag(has_sep=False) == without_sep


@pytest.mark.parametrize("cut", range(len('call tool="get" index="1"')))
def test_every_beginning_of_a_tag_can_become_one(cut: int) -> None:
    assert header('call tool="get" index="1"'[:cut]).can_become_tag


@pytest.mark.parametrize("text", ["cat", "call me late", "<b>", 'call tool="f" {'])
def test_other_text_cannot_become_a_tag(text: str) -> None:
    assert not header(text).can_become_tag


def test_only_names_may_be_long() -> None:
    assert not header("x" * MAX_HEADER_BYTES).is_too_long
    assert header("x" * (MAX_HEADER_BYTES + 1)).is_too_long
    name = 'argument key="' + "x" * MAX_HEADER_BYTES
    assert not header(name).is_too_long
    assert header(name, is_open=False).is_too_long
    assert header(name + "x" * MAX_NAMED_HEADER_BYTES).is_too_long
