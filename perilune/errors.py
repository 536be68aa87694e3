"""The error family: every failure that a person or a client can cause is one of these.

A message says what was given, what is allowed and what to do. `assert` is for our own mistakes.
"""


class PeriluneError(Exception):
    """Base of every error that perilune reports on purpose."""


class ConfigError(PeriluneError):
    """A model or engine setting is unknown, missing, or has a value that is not supported."""


class CheckpointError(PeriluneError):
    """A checkpoint directory is incomplete, damaged, or holds something unexpected."""


class CapacityError(PeriluneError):
    """The work does not fit the memory or the limits this process was started with."""


class BackendError(PeriluneError):
    """No implementation of an op accepts this call, or a required one is absent."""


class EngineError(PeriluneError):
    """The process of the engine ended before it could serve."""


class PeerError(PeriluneError):
    """Another rank of a parallel group ended, or did not come in time; the group cannot go on."""


class RequestError(PeriluneError):
    """A request cannot be served as asked.

    `param` names the field of the request; `status` is the HTTP status a server answers with;
    `code` is a short machine-readable word for the OpenAI error shape. After `retry_after_s` seconds it may be served.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
        retry_after_s: int | None = None,
    ):
        super().__init__(message)
        self.param = param
        self.status = status
        self.code = code
        self.retry_after_s = retry_after_s
