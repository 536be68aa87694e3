import pytest

from perilune.engine.request import GenerateRequest, Request, check_request
from perilune.errors import RequestError
from perilune.sampling.params import SamplingParams


def message(prompt=(1, 2, 3), **params):
    return GenerateRequest("r", tuple(prompt), SamplingParams(**params))


def refusal(request):
    with pytest.raises(RequestError) as caught:
        check_request(request, vocab_size=10, max_model_len=8)
    return caught.value


def test_a_fitting_request_is_accepted():
    check_request(message(range(7), stop_token_ids=(9,), logit_bias={0: 1.0}), vocab_size=10, max_model_len=8)


def test_a_prompt_that_leaves_no_room_for_an_answer_is_refused_with_given_and_limit():
    error = refusal(message([1] * 8))
    assert (error.param, error.code, error.status) == ("prompt", "context_length_exceeded", 400)
    assert "has 8 tokens" in str(error)
    assert "context is 8 tokens" in str(error)


def test_the_remedy_for_a_long_prompt_is_true():
    error = refusal(message([1] * 20))
    remedy = int(str(error).rsplit("at most ", 1)[1].split()[0])
    check_request(message([1] * remedy), vocab_size=10, max_model_len=8)
    refusal(message([1] * (remedy + 1)))


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (message([]), "prompt"),
        (message([1, 10]), "prompt"),
        (message([-1]), "prompt"),
        (message(stop_token_ids=(10,)), "stop_token_ids"),
        (message(logit_bias={11: 1.0}), "logit_bias"),
    ],
)
def test_ids_outside_the_vocabulary_and_empty_prompts_name_their_field(request_, param):
    assert refusal(request_).param == param


def test_counters_of_a_request_follow_its_tokens():
    request = Request(message([4, 5, 6]), arrival_index=0, arrival_s=0.0, max_total_tokens=8, seed=1)
    assert (request.num_prompt_tokens, request.num_output_tokens, request.num_pending_tokens) == (3, 0, 3)
    request.num_computed_tokens = 3
    request.token_ids.append(7)
    assert (request.num_tokens, request.output_token_ids, request.num_pending_tokens) == (4, [7], 1)
