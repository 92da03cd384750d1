"""How a server may be reached: the rule for addresses beyond this machine.

Called by the configurations of orchestrator and agent before anything is opened.
"""

from dataclasses import dataclass

from coslice.errors import ConfigError
from coslice.security.addresses import is_loopback
from coslice.security.files import read_pem, read_secret
from coslice.security.tokens import read_keys


@dataclass(frozen=True)
class Tls:
    """Paths of PEM files. ``ca`` signs the certificates of agents, and those of the servers they dial."""

    cert: str
    key: str
    ca: str


@dataclass(frozen=True)
class Security:
    """Of one server. All empty: loopback and unix sockets only, every local caller is served."""

    tls: Tls | None = None
    token_secret: str | None = None
    """Path of the secret file that tokens are checked with."""
    insecure: bool = False
    """Listen beyond loopback without TLS or tokens: whoever reaches the port does what he wants."""

    def files(self) -> tuple[str, ...]:
        tls = () if self.tls is None else (self.tls.cert, self.tls.key, self.tls.ca)
        return tls if self.token_secret is None else (*tls, self.token_secret)


LOCAL_ONLY = Security()


def make_tls(cert: str | None, key: str | None, ca: str | None) -> Tls | None:
    """All three or none. Raises ``ConfigError`` naming what is missing."""
    given = {"--tls-cert": cert, "--tls-key": key, "--tls-ca": ca}
    missing = [flag for flag, value in given.items() if not value]
    if len(missing) == len(given):
        return None
    if cert is None or key is None or ca is None or missing:
        raise ConfigError(
            f"TLS needs --tls-cert, --tls-key and --tls-ca together; missing: {', '.join(missing)}"
        )
    return Tls(cert, key, ca)


def check(what: str, address: str, host: str, security: Security) -> None:
    """Raise ``ConfigError`` if ``address`` may not be listened on; else see that the files are usable."""
    if security.token_secret is not None:
        read_keys(security.token_secret)
    if security.tls is not None:
        pem_files(security.tls)
    if is_loopback(host) or security.insecure:
        return
    lacking = []
    if security.tls is None:
        lacking.append("--tls-cert, --tls-key and --tls-ca (TLS)")
    if security.token_secret is None:
        lacking.append("--token-secret (a token per job)")
    if lacking:
        raise ConfigError(
            f"the {what} would listen on {address}, which other machines can reach: give "
            f"{' and '.join(lacking)}, or listen on 127.0.0.1, or say --insecure on a network where "
            "everybody may read and do everything. `coslice certs create` and `coslice token secret` make "
            "what is needed",
            data={"listen": address},
        )


def pem_files(tls: Tls) -> tuple[bytes, bytes, bytes]:
    """Key, certificate and CA. Raises ``ConfigError``."""
    return read_secret(tls.key, "TLS key"), read_pem(tls.cert), read_pem(tls.ca)
