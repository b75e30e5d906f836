"""A process that has loaded the program already, and forks for each start: loading torch takes longer than most tests.

`Warm` is the tests' side. The other side is this file, run as a program: it loads everything once, and for each order
that comes through its socket forks a child, which gets arguments, environment, streams and working directory of its
own, and runs the script as Python would run it. What a test does to such a child is done to a real process.
"""

import contextlib
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

PROJECT = Path(__file__).resolve().parent.parent
# In the environment of all that the tests start: FOLDER/PID. of the process that tests, and the number of the test. The
# file of that name lists the test's forks, which show their server's environment, and so no number.
MARK = "STARTED_BY_TESTS"
# Where torchrun starts its ranks.
LAUNCHER = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
LOADS = 120.0  # seconds until the server must have loaded everything


class Child:
    """A start of the program, with as much of `subprocess.Popen` as the tests use."""

    def __init__(self, args: Sequence[str], connection: socket.socket):
        self.args, self._connection = args, connection
        self._connection.settimeout(LOADS)
        self.pid = int(connection.recv(20))
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, as subprocess has it; TimeoutExpired where it doesn't come in time."""
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                told = self._connection.recv(20)
            except TimeoutError:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0) from None
            self.returncode = int(told or -signal.SIGKILL)  # nothing: the server is gone, and its children with it
            self._connection.close()
        return self.returncode

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(timeout=0.001)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it, and all that it has started in its session."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


class Warm:
    """The tests' side: starts children. All of them end with the process that has made this, even if it is killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ours, theirs = socket.socketpair()
        with theirs:
            subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=PROJECT,
                env={**os.environ, MARK: all_of(os.environ[MARK])},  # of no test: it outlives this one
            )

    def start(self, args: Sequence[str], env: dict[str, str], cwd: str | Path, streams: Sequence[int]) -> Child:
        """Start `python ARGS...` in a child, the first of a session of its own.

        Args:
            args: a script with its arguments; or -c, a program and its arguments; or -m and a module.
            env: its environment.
            cwd: its working directory.
            streams: file numbers of its standard input, output and error.
        """
        ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)  # what is sent at once comes at once
        order = {"args": [*args], "env": env, "cwd": str(cwd)}
        with theirs, tempfile.TemporaryFile() as file:  # an order can be longer than a message
            file.write(json.dumps(order).encode())
            file.flush()
            with self._lock:
                socket.send_fds(self._ours, [b"!"], [theirs.fileno(), file.fileno(), *streams])
        return Child([sys.executable, *args], ours)

    def run(
        self, args: Sequence[str], env: dict[str, str], cwd: str | Path, stdin: str = "", timeout: float | None = None
    ) -> subprocess.CompletedProcess[str]:
        """`subprocess.run` with captured output."""
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            given.write(stdin.encode())
            given.seek(0)
            child = self.start(args, env, cwd, [given.fileno(), out.fileno(), err.fileno()])
            try:
                code = child.wait(timeout)
            finally:
                child.kill()
            return subprocess.CompletedProcess(child.args, code, _text(out), _text(err))


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", "replace").replace("\r\n", "\n")


def all_of(mark: str) -> str:
    """What the marks of all tests of a process begin with."""
    folder, _, name = mark.rpartition("/")
    return f"{folder}/{name.partition('.')[0]}."


def enlist(mark: str, pid: int) -> None:
    """Put a fork on its test's list."""
    with open(mark, "a") as forks:
        forks.write(f"{pid}\n")


def end_all(mark: str) -> None:
    """Kill what a test has started, and has not ended; on Linux, which shows the environment of processes."""
    forks = Path(mark).read_text().split() if Path(mark).is_file() else []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # not ours, or gone
            shown = (place / "environ").read_bytes()
            if place.name in forks and f"{MARK}={all_of(mark)}".encode() in shown:
                os.killpg(int(place.name), signal.SIGKILL)
            elif f"{MARK}={mark}".encode() in shown and int(place.name) != os.getpid():
                os.kill(int(place.name), signal.SIGKILL)


# ------------------------------------------------------------------------------------ the server


def load() -> None:
    """All that a start of any of the programs loads."""
    sys.path.insert(0, str(PROJECT))
    for name in (
        *("tensorboard.backend.event_processing.event_accumulator", "torch.utils.tensorboard", "torch._dynamo"),
        *("torch.distributed.run", "main", "generate", "look", "export", "report", "saving.base", "large.machines"),
    ):
        importlib.import_module(name)


def serve(orders: socket.socket) -> None:
    """Fork for each order, until the tests' side is closed; then end all children."""
    parent = os.getppid()
    load()
    running: dict[int, socket.socket] = {}  # by process: where its end is told
    woken, wake = socket.socketpair()
    for end in (woken, wake):
        end.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with selectors.DefaultSelector() as selector:
        selector.register(orders, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if woken in ready:
                woken.recv(1 << 16)
                tell_ends(running)
            if orders in ready:
                message, files, _, _ = socket.recv_fds(orders, 1, 8)
                if not message:
                    break
                teller = socket.socket(fileno=files[0])
                with open(files[1], "rb") as file:
                    file.seek(0)
                    order = json.load(file)
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    selector.close()
                    for inherited in (woken, wake, orders, teller, *running.values()):
                        inherited.close()
                    os.setsid()
                    become(order, files[2:])
                for number in files[2:]:
                    os.close(number)
                running[pid] = teller
                enlist(order["env"][MARK], pid)
                teller.send(str(pid).encode())
    for pid in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    if os.getppid() != parent:  # the tests were killed, and can't clear away what they have started otherwise
        end_all(os.environ[MARK])


def tell_ends(running: dict[int, socket.socket]) -> None:
    """Tell the tests which children have ended, and how."""
    for pid in [*running]:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            with running.pop(pid) as teller, contextlib.suppress(OSError):  # nobody waits any more
                teller.send(str(os.waitstatus_to_exitcode(status)).encode())


def become(order: dict[str, Any], streams: list[int]) -> None:
    """In the child: run a program as Python would, and end the process as Python would."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["env"])
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    code: Any = 0
    try:
        run(order["args"])
    except SystemExit as request:
        code = request.code
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        sys.stderr.write(f"{code}\n")
        code = 1
    end(code or 0)


class Rank(subprocess.Popen[str]):
    """In the place of `subprocess.Popen` inside torchrun: its ranks are forks of it, which has loaded all they need."""

    def _execute_child(self, args: Sequence[str], *rest: Any) -> None:
        _, _, _, _, _, env, _, _, _, _, _, _, out, _, err, *_ = rest
        begun, begins = os.pipe()
        self.pid, self._child_created = os.fork(), True
        if self.pid:
            os.close(begins)
            os.read(begun, 1)  # from here on, it can be killed with its session
            os.close(begun)
            enlist(env[MARK], self.pid)
            return
        try:
            os.setsid()
            for handled in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # by torchrun, and not by its ranks
                signal.signal(handled, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for stream, number in ((out, 1), (err, 2)):
                if stream >= 0:
                    os.dup2(stream, number)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # torchrun's store among them
            importlib.import_module("distributed")._launcher = os.getppid()  # type: ignore[attr-defined]
            become({"args": args[2:], "env": env, "cwd": os.getcwd()}, [])  # behind "python -u"
        finally:
            os._exit(1)


def run(args: list[str]) -> None:
    """`python ARGS...`: of a command of the project, the module that is loaded already; else the script itself."""
    sys.path[1:1] = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    if args[0] == "-m":
        importlib.import_module(LAUNCHER).Popen = Rank  # type: ignore[attr-defined]
        sys.argv, sys.path[0] = args[1:], ""
        runpy.run_module(args[1], run_name="__main__", alter_sys=True)
        return
    if args[0] == "-c":
        sys.argv = ["-c", *args[2:]]
        sys.path[0] = ""
        exec(compile(args[1], "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})
        return
    script, sys.argv = Path(args[0]).resolve(), [*args]
    command = sys.modules.get(script.stem)
    if script.parent == PROJECT and command is not None:
        from console import environment

        environment.guard()
        command.main()
        return
    sys.path[0] = str(script.parent)
    runpy.run_path(str(script), run_name="__main__")


def end(code: int) -> None:
    """The end of a Python process, without what the server's own modules would do at theirs."""
    import atexit
    import logging
    import threading

    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
