"""The files that one server checks its callers with and shows itself with: read when it starts, and again
when it is told to (SIGHUP).

New tokens are checked against the keys of the last reading; new connections get its certificates. What is
open stays open: a stream that began with a key that is gone now ends only by itself.
"""

import ssl

import grpc

from coslice.errors import ConfigError
from coslice.security.listening import Tls, pem_files
from coslice.security.tokens import read_keys


class Served:
    """``read`` before anything else."""

    def __init__(self, tls: Tls | None, token_secret: str | None) -> None:
        self._tls, self._token_secret = tls, token_secret
        self.keys: tuple[bytes, ...] = ()
        """Empty: no tokens are asked for."""
        self._pem: tuple[bytes, bytes, bytes] | None = None

    def read(self) -> tuple[str, ...]:
        """What is other than before. All or nothing: raises ``ConfigError`` for files that cannot be used,
        and keeps what it had."""
        keys = read_keys(self._token_secret) if self._token_secret is not None else ()
        pem = pem_files(self._tls) if self._tls is not None else None
        if self._tls is not None and pem != self._pem:
            _check_pair(self._tls)
        changed = [
            name
            for name, new, old in (("token secret", keys, self.keys), ("TLS certificates", pem, self._pem))
            if new != old
        ]
        self.keys, self._pem = keys, pem
        return tuple(changed)

    def credentials(self, *, ask_client: bool) -> grpc.ServerCredentials:
        """``ask_client``: only callers with a certificate signed by the CA (gRPC cannot just ask)."""

        def now() -> grpc.ServerCertificateConfiguration:
            assert self._pem is not None, "read() comes first, and there is TLS"
            key, cert, ca = self._pem
            return grpc.ssl_server_certificate_configuration([(key, cert)], ca if ask_client else None)

        return grpc.dynamic_ssl_server_credentials(now(), now, ask_client)


def _check_pair(tls: Tls) -> None:
    """A key that is not the certificate's would end every connection from now on."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tls.cert, tls.key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"{tls.cert} and {tls.key} are no certificate with its key: {error}") from None
