import pytest

from perilune.errors import RequestError
from perilune.sampling.params import MAX_STOP_LENGTH, MAX_STOP_STRINGS, SamplingParams

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", value) for value in (-0.1, NAN, INF, -INF, True, "1", None, 10**400)],
        *[("top_p", value) for value in (0, -1, 1.0001, NAN, INF, True, None)],
        *[("top_k", value) for value in (-1, 1.0, True, None, "5")],
        *[("min_p", value) for value in (-0.01, 1.01, NAN, False)],
        *[("repetition_penalty", value) for value in (0, -1, 0.001, 101, NAN, INF)],
        *[("presence_penalty", value) for value in (-2.1, 2.1, NAN, True)],
        *[("frequency_penalty", value) for value in (-2.1, 2.1, NAN, "0")],
        *[("logit_bias", value) for value in ({-1: 1.0}, {"1": 1.0}, {True: 1.0}, [1], None)],
        *[("logit_bias", {1: value}) for value in (NAN, INF, 101, True)],
        ("logit_bias", dict.fromkeys(range(1025), 1.0)),
        *[("seed", value) for value in (1.0, True, 2**63, -(2**63) - 1, "7")],
        *[("max_tokens", value) for value in (0, -1, 1.5, True)],
        *[("stop", value) for value in ("text", ("",), (1,), ("x" * (MAX_STOP_LENGTH + 1),), None)],
        ("stop", ("x",) * (MAX_STOP_STRINGS + 1)),
        *[("stop_token_ids", value) for value in (5, (-1,), (1.0,), (True,), range(129))],
        *[("ignore_eos", value) for value in (1, "yes", None)],
        *[("logprobs", value) for value in (-1, 21, True, 1.0)],
        *[("prompt_logprobs", value) for value in (-1, 21, True)],
    ],
)
def test_a_wrong_value_is_refused_under_its_field(field, value):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert caught.value.status == 400
    assert field in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0},
        {"temperature": 100.0},
        {"top_p": 1e-9},
        {"top_k": 10**9},
        {"min_p": 1},
        {"repetition_penalty": 0.01},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"logit_bias": {0: -100, 7: 100.0}},
        {"seed": -(2**63)},
        {"seed": 2**63 - 1},
        {"max_tokens": 1},
        {"stop": ("x" * MAX_STOP_LENGTH,) * MAX_STOP_STRINGS},
        {"stop_token_ids": (0,)},
        {"logprobs": 0, "prompt_logprobs": 20},
    ],
)
def test_the_edges_are_allowed(fields):
    params = SamplingParams(**fields)
    assert all(getattr(params, name) == value for name, value in fields.items())


def test_lists_are_kept_as_tuples_and_the_bias_is_a_copy():
    bias = {1: 2.0}
    params = SamplingParams(stop=["a", "b"], stop_token_ids=[3], logit_bias=bias)
    bias[1] = 9.0
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("a", "b"), (3,), {1: 2.0})
