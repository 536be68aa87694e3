"""Lark for the model's own format: tags between control tokens, which stand in a grammar by id and never as text."""

from collections.abc import Mapping

from perilune.grammar.spec import literal
from perilune.text.tokenizer import Tokenizer

# at most four digits, so that no call consists of its number
INDEX = "/[1-9][0-9]{0,3}/"
ANY_TEXT = "/(?s:.*)/"


class Markup:
    """Writes tags as sequences of Lark items."""

    def __init__(self, tokenizer: Tokenizer):
        self.opener, self.closer, self.sep = (
            f"<[{token_id}]>" for token_id in (tokenizer.open_id, tokenizer.close_id, tokenizer.sep_id)
        )

    def open_tag(self, tag: str, attributes: Mapping[str, str] | None = None) -> str:
        """`<|open|>tag key="value"<|sep|>`"""
        return f"{self.opener} {self.opened(tag, attributes)}"

    def opened(self, tag: str, attributes: Mapping[str, str] | None = None) -> str:
        """What follows `<|open|>`."""
        text = tag + "".join(f' {key}="{escape(value)}"' for key, value in (attributes or {}).items())
        return f"{literal(text)} {self.sep}"

    def close_tag(self, tag: str) -> str:
        """`<|close|>tag<|sep|>`"""
        return f"{self.closer} {literal(tag)} {self.sep}"


def escape(value: str) -> str:
    """The value of an attribute as the model writes it."""
    return value.replace("&", "&amp;").replace('"', "&quot;")
