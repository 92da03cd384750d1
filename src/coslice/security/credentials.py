"""What a caller needs to reach a secured orchestrator or agent: whom it trusts, and the token it shows.

Used by the client, by workloads, agents and the command line. Settings come from ``COSLICE_TLS_CA``,
``COSLICE_TLS_CERT``, ``COSLICE_TLS_KEY``, ``COSLICE_TOKEN`` and ``COSLICE_TOKEN_FILE``. With none of them a
connection is plain, as on loopback. Files are read at each connection, so they can be replaced meanwhile.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from coslice.errors import ConfigError
from coslice.security.addresses import is_loopback
from coslice.security.files import read_pem, read_secret

if TYPE_CHECKING:  # loaded only once there is somebody to dial
    import grpc
    import grpc.aio

Options = Sequence[tuple[str, int | str]]


@dataclass(frozen=True, kw_only=True)
class Credentials:
    ca: str = ""
    """Path of the CA that signed the server's certificate; empty with ``cert``: the system's CAs."""
    cert: str = ""
    key: str = ""
    token: str = field(default="", repr=False)
    token_file: str = ""

    @property
    def encrypted(self) -> bool:
        return bool(self.ca or self.cert)

    def channel(self, address: str, options: Options = ()) -> "grpc.Channel":
        """Raises ``ConfigError`` for files that cannot be read."""
        import grpc

        if not self.encrypted:
            return grpc.insecure_channel(address, options=options)
        return grpc.secure_channel(address, self._tls(), options=options)

    def aio_channel(self, address: str, options: Options = ()) -> "grpc.aio.Channel":
        import grpc.aio

        if not self.encrypted:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, self._tls(), options=options)

    def metadata(self, address: str) -> tuple[tuple[str, str], ...]:
        """What goes with each call. Raises ``ConfigError`` rather than send a token in the clear."""
        token = self.token
        if self.token_file:
            token = read_secret(self.token_file, "token file").decode("ascii", "replace").strip()
        if not token:
            return ()
        if not (token.isascii() and token.isprintable() and " " not in token):
            raise ConfigError("the token holds characters that no token has: is COSLICE_TOKEN right?")
        if not self.encrypted and not address.startswith("unix:"):
            host = address.rpartition(":")[0].strip("[]")
            if not is_loopback(host):
                raise ConfigError(
                    f"the token would travel to {address} in the clear: say with COSLICE_TLS_CA which CA "
                    "signed the server's certificate"
                )
        return (("authorization", f"Bearer {token}"),)

    def check(self, address: str) -> None:
        """Raise ``ConfigError`` for what is wrong with them, here and now."""
        self.metadata(address)
        if self.encrypted:
            self._tls()

    def _tls(self) -> "grpc.ChannelCredentials":
        import grpc

        if bool(self.cert) != bool(self.key):
            raise ConfigError("COSLICE_TLS_CERT and COSLICE_TLS_KEY belong together: set both or neither")
        return grpc.ssl_channel_credentials(
            read_pem(self.ca) if self.ca else None,
            read_secret(self.key, "TLS key") if self.key else None,
            read_pem(self.cert) if self.cert else None,
        )


PLAIN = Credentials()


def credentials_from(env: Mapping[str, str]) -> Credentials:
    return Credentials(
        ca=env.get("COSLICE_TLS_CA", ""),
        cert=env.get("COSLICE_TLS_CERT", ""),
        key=env.get("COSLICE_TLS_KEY", ""),
        token=env.get("COSLICE_TOKEN", "").strip(),
        token_file=env.get("COSLICE_TOKEN_FILE", ""),
    )
