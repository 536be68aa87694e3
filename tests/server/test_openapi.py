"""Requests made up from the OpenAPI document never make the server fail."""

import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error

EXAMPLES = 15


def test_no_request_that_fits_the_document_is_a_fault_of_the_server(serve):
    server = serve()
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    posts = [result.ok() for result in schema.get_all_operations() if not result.ok().path.startswith("/metrics")]
    assert {"/v1/chat/completions", "/v1/responses", "/v1/messages"} <= {operation.path for operation in posts}
    for operation in posts:

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def ask(case):
            case.call_and_validate(checks=[not_a_server_error])

        ask()
