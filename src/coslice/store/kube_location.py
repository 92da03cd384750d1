"""Which Kubernetes objects hold the state, as people write it. Opens nothing."""

import re
from urllib.parse import parse_qs, urlsplit

import msgspec

from coslice.errors import ConfigError
from coslice.security.addresses import is_loopback

SCHEME = "kubernetes"
OPTIONS = ("api", "ca", "token_file")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?")


class KubeLocation(msgspec.Struct, frozen=True, kw_only=True):
    """``kubernetes://NAMESPACE[/PREFIX][?api=URL&ca=FILE&token_file=FILE]``; without ``api`` the cluster that
    this pod runs in."""

    namespace: str
    prefix: str
    api: str = ""
    ca: str = ""
    token_file: str = ""

    @property
    def in_the_clear(self) -> bool:
        """Does what is written there cross a network unencrypted?"""
        api = urlsplit(self.api)
        return api.scheme == "http" and not is_loopback(api.hostname or "")


def parse_kubernetes(location: str) -> KubeLocation:
    """Raises ``ConfigError`` saying how it is written."""
    parts = urlsplit(location)
    how = "write kubernetes://NAMESPACE[/PREFIX], in small letters, digits and dashes"
    prefix = parts.path.strip("/") or "coslice"
    if parts.scheme != SCHEME or not _NAME.fullmatch(parts.netloc) or not _NAME.fullmatch(prefix):
        raise ConfigError(f"{location!r} is no place in Kubernetes: {how}")
    given = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    if unknown := sorted(set(given) - set(OPTIONS)):
        raise ConfigError(f"{location!r} has unknown settings {', '.join(unknown)}: {', '.join(OPTIONS)}")
    if given.get("api") and not given["api"].startswith(("http://", "https://")):
        raise ConfigError(f"api={given['api']} is no URL: write https://HOST:PORT")
    return KubeLocation(namespace=parts.netloc, prefix=prefix, **given)
