"""SIGHUP: files that a server checks callers with are read again while it runs. Real processes."""

import asyncio
import errno
import fcntl
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import grpc
import pytest

from coslice.cli.serving import Serving, follow
from coslice.errors import ConfigError
from coslice.observe.board import Board
from coslice.observe.http import HttpServer
from coslice.security.credentials import Credentials
from coslice.security.listening import Security, Tls
from coslice.security.served import Served
from coslice.security.tokens import READ, create_secret, mint, read_keys
from coslice.wire.v1 import coslice_pb2 as pb
from coslice.wire.v1 import coslice_pb2_grpc as rpc

COSLICE = (sys.executable, "-m", "coslice.cli.main")
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("COSLICE_")}
BOUND = 60.0


needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates need openssl")


def make_certificate(folder: Path) -> Tls:
    """Its own CA."""
    folder.mkdir(exist_ok=True)
    key, cert = str(folder / "server.key"), str(folder / "server.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-keyout", key, "-out", cert, "-days", "2", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-addext", "subjectAltName=DNS:localhost"], check=True, capture_output=True)
    os.chmod(key, 0o600)
    return Tls(cert=cert, key=key, ca=cert)


def replace(old: Path, new: Path) -> None:
    old.write_bytes(new.read_bytes())


def answer(address: str, ca: Path, secret: Path) -> grpc.StatusCode:
    """What one who trusts that CA and has a token of that secret's first key gets."""
    token = mint(read_keys(secret)[0], role=READ, name="", expires=time.time() + 600)
    credentials = Credentials(ca=str(ca), token=token)
    with credentials.channel(address) as channel:
        try:
            rpc.OrchestratorStub(channel).GetStatus(
                pb.GetStatusRequest(), timeout=BOUND, metadata=credentials.metadata(address)
            )
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK


@needs_openssl
def test_secret_and_certificates_are_read_again_and_bad_ones_change_nothing(tmp_path: Path) -> None:
    live, other = make_certificate(tmp_path / "live"), make_certificate(tmp_path / "other")
    first, second, secret = tmp_path / "first", tmp_path / "second", tmp_path / "secret"
    for path in (first, second, secret):
        create_secret(path)
    replace(first, secret)
    old_ca = tmp_path / "old.pem"
    replace(old_ca, Path(live.ca))
    command = [*COSLICE, "orchestrator", "--json", "--state", str(tmp_path / "state")]
    command += ["--listen", "localhost:0", "--listen-agents", "localhost:0", "--token-secret", str(secret)]
    command += ["--tls-cert", live.cert, "--tls-key", live.key, "--tls-ca", live.ca]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    up = subprocess.Popen(command, text=True, env=ENVIRONMENT, start_new_session=True, **pipes)

    def hang_up() -> str:
        up.send_signal(signal.SIGHUP)
        assert up.stderr is not None
        return next(line for line in up.stderr if "SIGHUP" in line)

    try:
        assert up.stdout is not None
        at = json.loads(up.stdout.readline())["orchestrator"]
        assert answer(at, old_ca, first) is grpc.StatusCode.OK
        assert answer(at, old_ca, second) is grpc.StatusCode.UNAUTHENTICATED
        replace(secret, second)
        for name in ("cert", "key"):
            replace(Path(getattr(live, name)), Path(getattr(other, name)))
        assert "read again: token secret, TLS certificates. Options" in hang_up()
        new_ca = Path(other.ca)
        assert answer(at, new_ca, second) is grpc.StatusCode.OK
        assert answer(at, new_ca, first) is grpc.StatusCode.UNAUTHENTICATED
        assert answer(at, old_ca, second) is grpc.StatusCode.UNAVAILABLE
        secret.write_text("no key\n")
        assert "nothing is changed" in hang_up()
        assert answer(at, new_ca, second) is grpc.StatusCode.OK
    finally:
        up.terminate()
        try:
            up.communicate(timeout=BOUND)
        finally:
            up.kill()
    assert up.returncode == 0


@needs_openssl
def test_a_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    one, other = make_certificate(tmp_path / "one"), make_certificate(tmp_path / "other")
    served = Served(one, None)
    assert served.read() == ("TLS certificates",)
    assert served.read() == ()
    replace(Path(one.key), Path(other.key))
    with pytest.raises(ConfigError, match="no certificate with its key"):
        served.read()
    replace(Path(one.cert), Path(other.cert))
    assert served.read() == ("TLS certificates",)


def test_it_ends_with_its_terminal(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [*COSLICE, "orchestrator", "--json", "--listen", "127.0.0.1:0", "--state", str(tmp_path / "s")]

    def take_terminal() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        command, stdin=theirs, stdout=subprocess.PIPE, env=ENVIRONMENT, preexec_fn=take_terminal
    )
    try:
        os.close(theirs)
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["ready"]
        process.send_signal(signal.SIGHUP)  # the terminal is there: files are read again
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        os.close(ours)
        assert process.wait(BOUND) == 0
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


class _Reads:
    """A part that takes the secret as it is then, or not."""

    def __init__(self, secret: Path) -> None:
        self.secret, self.read, self.tried = secret, asyncio.Queue[bytes](), asyncio.Queue[bytes]()

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def reload(self) -> tuple[str, ...]:
        content = self.secret.read_bytes()
        self.tried.put_nowait(content)
        if content == b"broken":
            raise ConfigError("no token secret")
        if content == b"full":
            raise OSError(errno.ENOSPC, "No space left on device")
        self.read.put_nowait(content)
        return ("token secret",)


async def test_a_secret_that_is_replaced_is_read_again_without_a_signal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As a kubelet does it: the folder that a link points to becomes another. One that cannot be used, or is
    gone for a while, changes nothing, and the next one is read."""

    def renew(name: str) -> None:
        (tmp_path / name).mkdir()
        (tmp_path / name / "secret").write_text(name)
        (tmp_path / "new").symlink_to(name)
        (tmp_path / "new").rename(tmp_path / "data")

    renew("first")
    secret = tmp_path / "secret"
    secret.symlink_to("data/secret")
    part = _Reads(secret)
    files = Security(token_secret=str(secret)).files()
    following = asyncio.create_task(follow(Serving((), (part,), None, files), asyncio.Lock(), look_s=0.005))
    try:
        async with asyncio.timeout(BOUND):
            assert await part.tried.get() == b"first"
            for name in ("second", "broken", "full", "third"):
                renew(name)
                assert await part.tried.get() == name.encode()
        assert [part.read.get_nowait() for _ in range(3)] == [b"first", b"second", b"third"]
        assert "nothing is changed: no token secret" in caplog.text
        assert "nothing is changed: [Errno 28]" in caplog.text
    finally:
        following.cancel()


@needs_openssl
async def test_certificates_that_change_while_they_are_read_are_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any other would end the process that follows them."""
    live = make_certificate(tmp_path / "live")
    server = HttpServer(Board(), "localhost:0", Security(tls=live))
    await server.start()

    def read(_: Served) -> tuple[str, ...]:
        Path(live.key).write_text("half a key")
        return ()

    try:
        monkeypatch.setattr(Served, "read", read)
        with pytest.raises(ConfigError, match="cannot be used"):
            server.reload()
    finally:
        await server.stop()
