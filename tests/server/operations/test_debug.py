import asyncio

from perilune.errors import RequestError
from perilune.server.settings import ServerSettings
from tests.server.conftest import END


def test_what_is_held_is_shown_only_where_asked_for(serve):
    assert serve().http.get("/debug/cache").status_code == 404
    server = serve("hello" + END, settings=ServerSettings(has_debug_routes=True))
    assert server.http.get("/debug/cache").json() == {"usage": {"blocks_used": 0}, "requests": []}


def test_it_needs_the_key(serve):
    server = serve(settings=ServerSettings(has_debug_routes=True, api_key="k"))
    assert server.http.get("/debug/cache").status_code == 401
    assert server.http.get("/debug/cache", headers={"x-api-key": "k"}).status_code == 200


def test_an_engine_that_cannot_say_is_a_503(serve):
    server = serve(settings=ServerSettings(has_debug_routes=True))

    async def refuse():
        raise RequestError("the engine is stopped", status=503, code="engine_unavailable")

    server.engine.inspect = refuse
    assert server.http.get("/debug/cache").status_code == 503


def test_an_engine_that_does_not_answer_is_busy(serve, monkeypatch):
    monkeypatch.setattr("perilune.server.operations.debug.ANSWER_TIMEOUT_S", 0.01)
    server = serve(settings=ServerSettings(has_debug_routes=True))
    server.engine.inspect = lambda: asyncio.sleep(60)
    response = server.http.get("/debug/cache")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_busy")
