"""Outputs that hold tool calls, and what is in them."""

from dataclasses import dataclass, field

from perilune.text.channels import Channel

from .test_parser import MESSAGE_END, RESPONSE, RESPONSE_END, THINK_END, TOOLS_END, C, E, O, S

CALL_END = f"{C}call{S}"
CUT, NATURAL = "length", "stop"


def argument(key: str, kind: str | None, text: str) -> str:
    attributes = f'key="{key}"' if kind is None else f'key="{key}" type="{kind}"'
    return f"{O}argument {attributes}{S}{text}{C}argument{S}"


def call(name: str, *children: str, index: int = 1) -> str:
    return f'{O}call tool="{name}" index="{index}"{S}{"".join(children)}{CALL_END}'


def tools(*calls: str) -> str:
    return f"{O}tools{S}{''.join(calls)}{TOOLS_END}{MESSAGE_END}"


ONE = ("f", '{"x": "1"}')
X = argument("x", "string", "1")
CALL = call("f", X)
CUT_CALL = f'{O}call tool="g" index="2"{S}{O}argument key="y" type="string"{S}ab'


@dataclass(frozen=True)
class Vector:
    name: str
    output: str
    reasoning: str
    content: str
    calls: list[tuple[str, str]] = field(default_factory=list)
    finish: str = NATURAL
    start: Channel = Channel.REASONING


# as they are numbered in section 5.4 of the description of the format
PUBLISHED = [
    Vector("1", f"a{THINK_END}{RESPONSE}b{RESPONSE_END}{MESSAGE_END}", "a", "b"),
    Vector("2", f"{O}think{S}a{THINK_END}{RESPONSE}b{RESPONSE_END}{MESSAGE_END}", "a", "b"),
    Vector("3", f"a{tools(CALL)}", "a", "", [ONE]),
    Vector("4", f"a{C}think{RESPONSE}b{RESPONSE_END}{MESSAGE_END}", "a", "b"),
    Vector("5", f"b{RESPONSE_END}{MESSAGE_END}", "", "b"),
    Vector("6", "abc", "abc", "", finish=CUT),
    Vector("7", f"{RESPONSE}b{RESPONSE_END}{MESSAGE_END}", "", "b"),
    Vector("8", f"{THINK_END}{RESPONSE}b", "", "b", finish=CUT),
    Vector("9", THINK_END + tools(call("f", argument("k", "number", "1e2x"))), "", "", [("f", '{"k": "1e2x"}')]),
    Vector("10", f"{THINK_END}{O}tools{S}{CALL}{CUT_CALL}", "", "", [ONE], CUT),
    Vector(
        "11",
        THINK_END + tools(call("f", argument("a&quot;b&amp;c", "null", "null"))),
        "",
        "",
        [("f", r'{"a\"b&c": null}')],
    ),
    # 12 has ids that no text stands for: see below
    Vector("13", f"b{RESPONSE_END}{tools(CALL)}", "", "b", [ONE], start=Channel.CONTENT),
    Vector("14", THINK_END + tools(call("f"), call("f", index=2)), "", "", [("f", "{}"), ("f", "{}")]),
    Vector("15", THINK_END + tools(f'{O}call index="1"{S}{X}{CALL_END}', call("f", X, index=2)), "", "", [ONE]),
]

VECTORS = [
    *PUBLISHED,
    Vector("no think closer, response, call", f"a{RESPONSE}b{RESPONSE_END}{tools(CALL)}", "a", "b", [ONE]),
    Vector("thinking skipped before a call", f"b{RESPONSE_END}{tools(CALL)}", "", "b", [ONE]),
    Vector("tools opener skipped", f"a{THINK_END}{CALL}{MESSAGE_END}", "a", "", [ONE]),
    Vector("tools opener skipped in the reasoning", f"a{CALL}{TOOLS_END}{MESSAGE_END}", "a", "", [ONE]),
    Vector("started in the tools channel", f"{CALL}{TOOLS_END}{MESSAGE_END}", "", "", [ONE], start=Channel.TOOLS),
    Vector("text around calls", f"{THINK_END}{RESPONSE}b{O}tools{S}\n{CALL}x{TOOLS_END} c{E}", "", "b c", [ONE]),
    Vector("text around arguments", THINK_END + tools(call("f", "x", X, "\n")), "", "", [ONE]),
    Vector(
        "calls in two channels",
        f"{O}tools{S}{CALL}{TOOLS_END}{O}tools{S}{call('g')}{TOOLS_END}{E}",
        "",
        "",
        [ONE, ("g", "{}")],
    ),
    Vector("argument not closed", tools(f'{O}call tool="f"{S}{O}argument key="x"{S}1{CALL_END}'), "", "", [ONE]),
    Vector(
        "argument not closed before the next",
        tools(call("f", f'{O}argument key="x"{S}1', X)),
        "",
        "",
        [("f", '{"x": "1", "x": "1"}')],
    ),
    Vector("call not closed before the next", tools(f'{O}call tool="f"{S}{X}', CALL), "", "", [ONE, ONE]),
    Vector(
        "argument and call not closed", tools(f'{O}call tool="f"{S}{O}argument key="x"{S}1', CALL), "", "", [ONE, ONE]
    ),
    Vector("nothing closed", f'{O}tools{S}{O}call tool="f"{S}{O}argument key="x"{S}1{E}', "", "", [ONE]),
    Vector("nothing closed but the message", f'{O}tools{S}{O}call tool="f"{S}{X}{MESSAGE_END}', "", "", [ONE]),
    Vector("tools not closed", f"{O}tools{S}{CALL}{MESSAGE_END}", "", "", [ONE]),
    Vector("call not closed before the response", f'{O}tools{S}{O}call tool="f"{S}{X}{RESPONSE}b{E}', "", "b", [ONE]),
    Vector("call not closed before more tools", f'{O}tools{S}{O}call tool="f"{S}{X}{tools(CALL)}', "", "", [ONE, ONE]),
    Vector(
        "separators missing",
        f'{O}tools{O}call tool="f"{O}argument key="x"{S}1{C}argument{C}call{C}tools{E}',
        "",
        "",
        [ONE],
    ),
    Vector("cut after the only call", f"{O}tools{S}{CALL}", "", "", [ONE], CUT),
    Vector("cut in the only call", f"{O}tools{S}{CUT_CALL}", "", "", finish=CUT),
    Vector("cut in the name", f'{O}tools{S}{CALL}{O}call tool="get', "", "", [ONE], CUT),
    Vector("cut after the name", f'{O}tools{S}{CALL}{O}call tool="get"', "", "", [ONE], CUT),
    Vector("cut in the closer of the call", f'{O}tools{S}{O}call tool="f"{S}{X}{C}call', "", "", [ONE], CUT),
    Vector("no type", tools(call("f", argument("x", None, "1"))), "", "", [ONE]),
    Vector("unknown tag in an argument", tools(call("f", argument("x", "string", f"{O}b{S}1{C}b{S}"))), "", "", [ONE]),
    Vector(
        "channel tags in an argument",
        tools(call("f", argument("x", "string", f"{O}think{S}1{C}response{S}"))),
        "",
        "",
        [ONE],
    ),
    Vector("control token in an argument", tools(call("f", argument("x", "string", "[UNK]1[BOS]"))), "", "", [ONE]),
    Vector(
        "whitespace in an argument",
        tools(call("f", argument("x", "string", " \n1\t"))),
        "",
        "",
        [("f", r'{"x": " \n1\t"}')],
    ),
    Vector("braces in an argument", tools(call("f", argument("x", "string", "}{"))), "", "", [("f", '{"x": "}{"}')]),
    Vector("json block", tools(call("f", f'{O}json type="object"{S}{{"x":"1"}}{C}json{S}')), "", "", [ONE]),
    Vector("json block that is no JSON", tools(call("f", f"{O}json{S}{{x}}{C}json{S}")), "", "", [("f", "{x}")]),
    Vector("json block not closed", tools(f'{O}call tool="f"{S}{O}json{S}{{"x":"1"}}'), "", "", [ONE]),
    Vector("json block before an argument", tools(call("f", f"{O}json{S}{{}}{C}json{S}", X)), "", "", [ONE]),
    Vector("json block not closed before an argument", tools(call("f", f'{O}json{S}{{"y":1}}', X)), "", "", [ONE]),
    Vector("json block after an argument", tools(call("f", X, f"{O}json{S}{{}}{C}json{S}")), "", "", [ONE]),
    Vector(
        "long names",
        tools(call("n" * 9000, argument("k" * 9000, "null", "null"))),
        "",
        "",
        [("n" * 9000, f'{{"{"k" * 9000}": null}}')],
    ),
]
