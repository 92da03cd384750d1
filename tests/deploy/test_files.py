"""Units, Slurm scripts and images: what their tools find wrong, and whether coslice takes their commands."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from coslice.cli.main import app

DEPLOY = Path(__file__).parents[2] / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
SCRIPTS = sorted((DEPLOY / "slurm").iterdir())
IMAGES = sorted((DEPLOY / "docker").glob("*.Dockerfile"))


def commands(file: Path) -> list[list[str]]:
    """Each call of ``coslice`` in it."""
    text = re.sub(r"\\\n\s*", " ", file.read_text())
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    found = []
    for line in lines:
        if match := re.search(r"\bcoslice ((?:orchestrator|agent|run|certs|token) .*)", line):
            words = shlex.split(re.split(r" &|'|\)$", match[1])[0])
            words = [word.replace("${nodes[@]/#/--node=}", "--node=n") for word in words]
            found.append([word for word in words if word != "$OPTIONS"])
    return found


@pytest.mark.parametrize(
    "file", [*UNITS, DEPLOY / "slurm" / "coslice.sbatch"], ids=lambda file: str(file.name)
)
def test_coslice_takes_the_commands(file: Path) -> None:
    found = commands(file)
    assert found
    for words in found:
        command = typer.main.get_command(app)
        while hasattr(command, "commands"):
            command, words = command.commands[words[0]], words[1:]
        command.make_context("coslice", list(words))


def test_images_start_what_there_is() -> None:
    for file in IMAGES:
        text = file.read_text()
        (entry,) = re.findall(r"^ENTRYPOINT (.*)$", text, flags=re.M)
        (words,) = re.findall(r"^CMD (.*)$", text, flags=re.M)
        assert entry == '["coslice"]'
        name, *rest = re.findall(r'"([^"]+)"', words)
        typer.main.get_command(app).commands[name].make_context(name, rest)  # type: ignore[attr-defined]


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: str(file.name))
def test_scripts_are_bash(file: Path) -> None:
    subprocess.run(("bash", "-n", str(file)), check=True)


def test_the_epilog_removes_the_folder_of_its_own_job_only(tmp_path: Path) -> None:
    text = (DEPLOY / "slurm" / "epilog.sh").read_text().replace("/tmp/", f"{tmp_path}/")
    for name in ("coslice-ann-7", "coslice-ann-77", "coslice-bob-7"):
        (tmp_path / name).mkdir()
    env = {"PATH": "/usr/bin:/bin", "SLURM_JOB_USER": "ann", "SLURM_JOB_ID": "7"}
    subprocess.run(("bash", "-c", text), check=True, env=env)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["coslice-ann-77", "coslice-bob-7"]
    for broken in ({"SLURM_JOB_ID": "../7"}, {"SLURM_JOB_ID": ""}, {"SLURM_JOB_USER": ""}):
        assert subprocess.run(("bash", "-c", text), check=False, env={**env, **broken}).returncode


@pytest.mark.parametrize("file", UNITS, ids=lambda file: str(file.name))
def test_units_are_what_systemd_takes(file: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd here")
    done = subprocess.run(
        ("systemd-analyze", "verify", str(file)), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.helm
@pytest.mark.parametrize("file", IMAGES, ids=lambda file: str(file.name))
def test_images_pass_the_linter(file: Path) -> None:
    linter = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if linter is None:
        pytest.skip("there is no hadolint: make test-helm installs one")
    done = subprocess.run((linter, str(file)), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
