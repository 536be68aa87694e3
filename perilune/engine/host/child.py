"""One engine process as its server sees it: started, spoken to, waited for."""

import json
import logging
import signal
import socket
import subprocess
import sys
import threading
from queue import SimpleQueue

from perilune.engine.host.wire import EngineSpec, Failed, Pipe, Ready
from perilune.errors import EngineError

_LOG = logging.getLogger(__name__)

# the child imports from where we do, whatever the directory and the environment say
_PROGRAM = (
    "import sys, json; sys.path[:] = json.loads(sys.argv[2]); "
    "from perilune.engine.host.worker import main; main(int(sys.argv[1]))"
)


class EngineChild:
    """An engine process, from its start on. The end of this process, however it comes, ends the child."""

    def __init__(self, spec: EngineSpec):
        ours, theirs = socket.socketpair()
        with theirs:
            # a new program, never a fork: threads and their locks do not survive one
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), json.dumps(sys.path), "perilune-engine"],
                pass_fds=[theirs.fileno()],
            )
        self.pipe = Pipe(ours.detach())
        self._outbox: SimpleQueue[object | None] = SimpleQueue()
        # an event loop must not wait for a child that reads nothing
        self._sender = threading.Thread(target=self._send_all, name="perilune-outbox", daemon=True)
        self._sender.start()
        self.send(spec)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self) -> Ready:
        """Blocks; what kept the child from serving is raised here, EngineError where it could not even say it."""
        message = self.pipe.receive()
        if isinstance(message, Ready):
            return message
        code = self.join(None)
        if isinstance(message, Failed):
            raise message.error
        raise EngineError(f"the engine process {describe_exit(code)} before it was ready; what it said is above")

    def send(self, message: object) -> None:
        """Queue a message; to a child that is gone it is lost."""
        self._outbox.put(message)

    def join(self, timeout_s: float | None) -> int:
        """The exit code, after killing a child that has not ended in time; leaves nothing behind."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._outbox.put(None)
        return code

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """Give back the pipe; only after `join`, and by the thread that receives."""
        self._sender.join()
        self.pipe.close()

    def _send_all(self) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                self.pipe.send(message)
            except OSError:
                # whoever receives notices the end and deals with it
                continue
            except Exception:
                # a fault of ours, which must not leave a request waiting for ever
                _LOG.exception("%s cannot be sent to the engine", type(message).__name__)
                self.kill()


def describe_exit(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
