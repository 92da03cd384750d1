"""``coslice token`` and ``coslice certs``: what a deployment beyond one machine needs, made here.

Nothing of it is kept: tokens are signed, so the secret file is all there is.
"""

import re
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from coslice.core.ids import check_name
from coslice.errors import ConfigError
from coslice.security import tokens
from coslice.security.files import private_directory, write_secret

token_app = typer.Typer(no_args_is_help=True, help="Tokens: who may speak for which job (docs/security.md).")
certs_app = typer.Typer(no_args_is_help=True, help="Certificates for TLS from a CA of one's own.")

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LONGEST_NODE = 255 - len(".pem")
_CA_DAYS, _CERT_DAYS = 3650, 365


def add(app: typer.Typer) -> None:
    app.add_typer(token_app, name="token")
    app.add_typer(certs_app, name="certs")


# ── tokens ─────────────────────────────────────────────────────────────────


@token_app.command("secret")
def secret(
    file: Annotated[Path, typer.Argument(help="The file to make; its owner alone can read it.")],
) -> None:
    """Make a token secret: [b]--token-secret[/b] of the servers, [b]--secret[/b] of [b]token create[/b]."""
    tokens.create_secret(file)
    typer.echo(f"wrote {file}", err=True)


@token_app.command("create")
def create(
    name: Annotated[
        str, typer.Argument(help="The job (or, with --role agent, the node) that it is for.")
    ] = "",
    secret: Annotated[
        Path | None, typer.Option("--secret", metavar="FILE", help="The secret file of the servers.")
    ] = None,
    role: Annotated[
        str,
        typer.Option(
            help="[b]job[/b], [b]agent[/b], [b]read[/b] (status only) or [b]admin[/b] (everything)."
        ),
    ] = tokens.JOB,
    ttl: Annotated[str, typer.Option(metavar="TIME", help="How long it is good: 90m, 12h, 30d.")] = "30d",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write it there, mode 0600, instead of printing it.")
    ] = None,
) -> None:
    """Make a token: give it to the job as [b]COSLICE_TOKEN[/b], or its file as [b]COSLICE_TOKEN_FILE[/b]."""
    token = make_token(name, secret=secret, role=role, ttl=ttl)
    if out is None:
        typer.echo(token)
    else:
        write_secret(out, token.encode() + b"\n")


def make_token(name: str, *, secret: Path | None, role: str, ttl: str) -> str:
    if secret is None:
        raise ConfigError(
            "--secret FILE is missing: the file that the servers have as --token-secret (`coslice token "
            "secret FILE` makes one)"
        )
    if role not in tokens.ROLES:
        raise ConfigError(f"--role {role!r}: choose one of {', '.join(tokens.ROLES)}")
    if role in (tokens.JOB, tokens.AGENT):
        what = "job" if role == tokens.JOB else "node"
        if not name:
            raise ConfigError(f"a token of role {role} is for one {what}: name it")
        try:
            check_name(what, name)
        except ValueError as error:
            raise ConfigError(str(error)) from None
    elif name:
        raise ConfigError(f"a token of role {role} is for no job: leave {name!r} out")
    (key, *_) = tokens.read_keys(secret)
    return tokens.mint(key, role=role, name=name, expires=time.time() + seconds(ttl))


def seconds(text: str) -> int:
    """``90m`` → 5400. Raises ``ConfigError``."""
    found = re.fullmatch(r"([1-9][0-9]{0,8})([smhd])", text)
    if found is None:
        raise ConfigError(f"{text!r} is no time: write 90m, 12h or 30d")
    return int(found[1]) * _UNITS[found[2]]


# ── certificates ───────────────────────────────────────────────────────────


@certs_app.command("create")
def certs(
    folder: Annotated[Path, typer.Argument(help="Where they go; its CA is used again if it is there.")],
    name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST", help="A name or address by which servers are dialled; repeat. Default: this host."
        ),
    ] = None,
    node: Annotated[
        list[str] | None, typer.Option(metavar="NODE", help="A node whose agent gets a certificate; repeat.")
    ] = None,
) -> None:
    """Make a CA, a certificate for the orchestrator ([b]server.pem[/b]) and one for each node's agent."""
    for path in make_certs(folder, names=tuple(name or ()), nodes=tuple(node or ())):
        typer.echo(f"wrote {path}", err=True)


def make_certs(folder: Path, *, names: tuple[str, ...], nodes: tuple[str, ...]) -> list[Path]:
    """The files that were made. Raises ``ConfigError``."""
    for each in nodes:
        try:
            check_name("node", each)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        if len(each) > _LONGEST_NODE:
            raise ConfigError(
                f"{each[:77]}… has {len(each)} characters, and a file that is named after a node has room "
                f"for {_LONGEST_NODE}: let cert-manager make its certificate"
            )
    for each in names:
        if not re.fullmatch(r"[A-Za-z0-9*][A-Za-z0-9.:-]{0,252}", each):
            raise ConfigError(f"{each[:80]!r} is not a host name or address")
    private_directory(folder)
    made: list[Path] = []
    ca, ca_key = folder / "ca.pem", folder / "ca.key"
    if not ca.exists():
        _openssl(
            "req", "-x509", *_new_key(ca_key), "-subj", "/CN=coslice CA", "-days", str(_CA_DAYS), "-out", ca
        )
        made += [ca, ca_key]
    hosts = names or (socket.gethostname(),)
    for label, cn, alternatives in (
        ("server", hosts[0], (*hosts, socket.gethostname())),
        *((node, node, (node, *hosts)) for node in nodes),
    ):
        made += _signed(folder, label, cn, alternatives)
    return made


def _signed(folder: Path, label: str, cn: str, names: tuple[str, ...]) -> list[Path]:
    cert, key = folder / f"{label}.pem", folder / f"{label}.key"
    if cert.exists():
        raise ConfigError(f"{cert} is there already: remove it to make another")
    # A common name has at most 64 characters, and counts as a name: cut short it must be no other node's.
    subject = cn if len(cn) <= 64 else f"cut: {cn[:59]}"
    every = dict.fromkeys((*names, "localhost", "127.0.0.1", "::1"))
    alternatives = ",".join(f"{'IP' if _is_address(name) else 'DNS'}:{name}" for name in every)
    with tempfile.TemporaryDirectory(prefix="coslice-") as scratch:
        request, extensions = Path(scratch) / "request.pem", Path(scratch) / "extensions"
        extensions.write_text(f"subjectAltName={alternatives}\nextendedKeyUsage=serverAuth,clientAuth\n")
        _openssl("req", "-new", *_new_key(key), "-subj", f"/CN={subject}", "-out", request)
        _openssl(
            *("x509", "-req", "-in", request, "-CA", folder / "ca.pem", "-CAkey", folder / "ca.key"),
            *("-set_serial", f"0x{time.time_ns():x}", "-days", str(_CERT_DAYS), "-sha256"),
            *("-extfile", extensions, "-out", cert),
        )
    return [cert, key]


def _new_key(path: Path) -> tuple[str | Path, ...]:
    write_secret(path, b"")  # openssl keeps the mode of a file that is there
    return ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", path)


def _is_address(name: str) -> bool:
    for family in (socket.AF_INET, socket.AF_INET6):
        try:
            socket.inet_pton(family, name)
        except OSError:
            continue
        return True
    return False


def _openssl(*arguments: str | Path) -> None:
    if shutil.which("openssl") is None:
        raise ConfigError(
            "`coslice certs` needs the program openssl: install it, or bring certificates along"
        )
    done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ConfigError(f"openssl {arguments[0]} failed: {done.stderr.strip()[-300:]}")
