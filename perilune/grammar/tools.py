"""Tool calls in the model's own format as Lark rules, the arguments of each held to the schema of its tool."""

from collections import Counter
from collections.abc import Mapping, Sequence

from llguidance import LLMatcher

from perilune.errors import RequestError
from perilune.grammar.markup import INDEX, Markup, escape
from perilune.grammar.schema.plain import plain_schema
from perilune.grammar.schema.rule import Schema, check_schema, json_rule
from perilune.grammar.schema.values import CannotSpell, Scope, Value, any_value, not_one_of, values_of
from perilune.grammar.spec import Part, literal
from perilune.text.prompt.tools import Tool

# what only a schema kept as a whole can say of the arguments
_WHOLE = {"allOf", "anyOf", "oneOf", "not", "if", "then", "else", "enum", "const", "$ref", "$dynamicRef"}
_WHOLE |= {"patternProperties", "propertyNames", "minProperties", "maxProperties", "dependentRequired"}
_WHOLE |= {"dependentSchemas", "dependencies", "unevaluatedProperties"}
# what schemas inside may refer to, or are read by
_DEFINITIONS = ("$defs", "definitions", "$id", "$schema")
_ADVICE = "; change the schema, or set strict to false to leave the arguments of this tool free"


class ToolRules:
    """Collects the rules of the tools channel; `rules` and `parts` grow with each tool."""

    def __init__(self, markup: Markup):
        self.rules: list[str] = []
        self.parts: list[Part] = []
        self._markup = markup
        self._named: dict[str, str] = {}
        self._written: Counter[str] = Counter()

    def add(self, tools: Sequence[Tool], *, is_demanded: bool, is_single: bool) -> str:
        """Rules for calls of `tools`; returns the items that follow `<|open|>` to open, fill and close the channel.

        Arguments are held to their schema where the tool is strict, and where a call `is_demanded` unless the tool
        says that it is not strict. RequestError for what is no schema of arguments.
        """
        calls = []
        for index, tool in enumerate(tools):
            is_strict = is_held_to_schema(tool, is_demanded=is_demanded)
            arguments = self._arguments(tool, index) if is_strict else self._dynamic(f"any_{index}", any_value(), ())
            calls.append(f"call_{index}")
            head = literal(f'call tool="{escape(tool.name)}" index="')
            opened = f"{self._markup.opener} {head} {INDEX} {literal(chr(34))} {self._markup.sep}"
            self.rules.append(f"call_{index}: {opened} {arguments} {self._markup.close_tag('call')}")
        self.rules.append(f"call: {' | '.join(calls)}")
        return f"{self._markup.opened('tools')} {'call' if is_single else 'call+'} {self._markup.close_tag('tools')}"

    def _arguments(self, tool: Tool, index: int) -> str:
        schema, field = parameters(tool)
        check_schema(schema, field)
        schema = plain_schema(schema)
        if schema.get("type", "object") != "object":
            raise RequestError(
                f"{field}.type is {schema['type']!r}; the arguments of a call are an object", param=f"{field}.type"
            )
        self.parts.append(Part(field, LLMatcher.grammar_from_lark(f"start: {json_rule(schema)}"), _ADVICE))
        num_rules, named = len(self.rules), dict(self._named)
        try:
            return self._elements(schema, f"arg_{index}", field)
        except CannotSpell:
            del self.rules[num_rules:]
            self._named = named
        # the model's form for arguments that are one piece of JSON
        opened = self._markup.open_tag("json", {"type": "object"})
        self.rules.append(f"json_{index}: {json_rule({**schema, 'type': 'object'})}")
        return f"{opened} json_{index} {self._markup.close_tag('json')}"

    def _elements(self, schema: Schema, prefix: str, field: str) -> str:
        """The arguments one by one: those declared in their order, then others where the schema speaks of them."""
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if _WHOLE & schema.keys() or not isinstance(properties, Mapping) or not isinstance(required, list):
            raise CannotSpell
        if any(name not in properties for name in required):
            raise CannotSpell
        definitions = {key: schema[key] for key in _DEFINITIONS if key in schema}
        scope = Scope(definitions, self._written, field)
        items = []
        for number, (name, value) in enumerate(properties.items()):
            rule = f"{prefix}_{number}"
            options = [self._argument(rule, name, option) for option in values_of(value, scope)]
            self.rules.append(f"{rule}: {' | '.join(options)}")
            items.append(rule if name in required else f"{rule}?")
        more = schema.get("additionalProperties", None if "properties" in schema else True)
        if more is not None and more is not False:
            items.append(self._dynamic(f"{prefix}_more", values_of(more, scope), tuple(properties)))
        return " ".join(items)

    def _argument(self, rule: str, name: str, value: Value) -> str:
        opened = self._markup.open_tag("argument", {"key": name, "type": value.type})
        return f"{opened} {self._value(value)} {self._markup.close_tag('argument')}"

    def _dynamic(self, rule: str, values: Sequence[Value], taken: Sequence[str]) -> str:
        """Any number of arguments with keys of the model's own choice, except `taken`."""
        key = self._name(not_one_of(taken), is_terminal=True)
        options = []
        for value in values:
            kind = literal(f'" type="{value.type}"')
            head = f"{self._markup.opener} {literal('argument key=' + chr(34))} {key} {kind} {self._markup.sep}"
            options.append(f"{head} {self._value(value)} {self._markup.close_tag('argument')}")
        self.rules.append(f"{rule}: {' | '.join(options)}")
        return f"{rule}*"

    def _value(self, value: Value) -> str:
        return self._name(value.rule, is_terminal=value.is_terminal)

    def _name(self, expression: str, *, is_terminal: bool) -> str:
        """The name of the rule for an expression, which many arguments may share."""
        name = self._named.get(expression)
        if name is None:
            name = f"{'T' if is_terminal else 'value'}_{len(self._named)}"
            self._named[expression] = name
            self.rules.append(f"{name}: {expression}")
        return name


def is_held_to_schema(tool: Tool, *, is_demanded: bool) -> bool:
    """Whether the arguments of `tool` must obey its schema; said by `strict`, else true where a call is demanded."""
    strict = _function(tool).get("strict")
    return is_demanded if strict is None else strict is True


def parameters(tool: Tool) -> tuple[Schema, str]:
    """The schema of the arguments and the field where it stands; a tool without one takes none."""
    schema = _function(tool).get("parameters")
    field = f"{tool.field}.parameters"
    if schema is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}, field
    assert isinstance(schema, Mapping)
    return schema, field


def _function(tool: Tool) -> Mapping[str, object]:
    function = tool.spec["function"]
    assert isinstance(function, Mapping)
    return function
