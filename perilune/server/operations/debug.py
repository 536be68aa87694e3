"""What the engine holds, for whoever looks for a leak; only where the server was told to show it."""

import asyncio

from fastapi import APIRouter, Response

from perilune.engine.client import EngineClient
from perilune.errors import RequestError
from perilune.server.reading.body import json_response

# between two steps the engine answers at once
ANSWER_TIMEOUT_S = 10.0


def debug_routes(client: EngineClient) -> APIRouter:
    """`GET /debug/cache`: usage of the cache, every live request with its blocks and slot, the states that are kept for
    others, those used last, and the tiers.
    """
    router = APIRouter()

    @router.get("/debug/cache")
    async def cache() -> Response:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                holdings = await client.inspect()
        except TimeoutError as error:
            message = f"the engine has been in one step for more than {ANSWER_TIMEOUT_S:g} s; try again later"
            raise RequestError(message, status=503, code="engine_busy") from error
        return json_response(holdings)

    return router
