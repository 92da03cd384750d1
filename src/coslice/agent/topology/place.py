"""Which cluster's labels are followed, as people write it. Opens nothing."""

from urllib.parse import parse_qs, urlsplit

from coslice.errors import ConfigError
from coslice.store.kube_location import OPTIONS, KubeLocation

KUBERNETES, SLURM = "kubernetes", "slurm"


def parse_place(text: str) -> KubeLocation:
    """``kubernetes``: the cluster that this pod runs in; or ``kubernetes?api=URL[&ca=FILE&token_file=FILE]``.
    Raises ``ConfigError``."""
    parts = urlsplit(text)
    given = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    if parts.path != KUBERNETES or parts.netloc or set(given) - set(OPTIONS):
        raise ConfigError(
            f"--topology {text!r}: write slurm, {KUBERNETES} or {KUBERNETES}?api=URL&ca=FILE&token_file=FILE"
        )
    return KubeLocation(namespace="all", prefix="none", **given)
