"""Units, Slurm scripts and images: what their tools find wrong, and whether coslice takes their commands."""

import configparser
import os
import re
import shlex
import shutil
import signal
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
            words = [word.replace("${#nodes[@]}", "2") for word in words]
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


@pytest.mark.parametrize(
    ("asked", "checked"),
    [
        ("coslice", True),
        ("h100,coslice", True),
        ("h100&coslice", True),
        ("[coslice*2&h100*4]", True),
        ("(coslice|h100)", True),
        ("", False),
        ("(null)", False),
        ("no-coslice", False),
        ("coslice2|h100", False),
    ],
)
def test_the_prolog_asks_for_the_agent_of_jobs_that_want_it(
    asked: str, checked: bool, tmp_path: Path
) -> None:
    """Slurm hands it the expression as it was written, and no PATH."""
    text = (DEPLOY / "slurm" / "prolog.sh").read_text().replace("PATH=", f"PATH={tmp_path}:")
    _fake(tmp_path, systemctl="exit 3")
    done = subprocess.run(
        ("/bin/bash", "-c", text),
        env={"SLURM_JOB_CONSTRAINTS": asked, "SLURMD_NODENAME": "n7", "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "n7" in done.stderr) == (int(checked), checked)
    _fake(tmp_path, systemctl="exit 0")
    assert (
        subprocess.run(
            ("/bin/bash", "-c", text), env={"SLURM_JOB_CONSTRAINTS": asked}, check=False
        ).returncode
        == 0
    )


def _fake(folder: Path, **programs: str) -> None:
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)


SRUN = """while [[ $1 == --* ]]; do [[ $1 == --ntasks=1 ]] && nodes=n1; shift; done
for node in ${nodes:-n1 n2}; do SLURMD_NODENAME=$node "$@" & tasks+=("$!"); done
for task in "${tasks[@]}"; do wait "$task" || code=$?; done
exit "${code:-0}"
"""
COSLICE = """case "$1 $2" in
    "certs create") [[ ! -e $3 ]] && mkdir "$3" ;;
    "token secret") [[ ! -e $3 ]] && touch "$3" ;;
    "token create") echo "token of $3" ;;
    orchestrator*) exec /bin/sleep 60 ;;
    agent*) [[ -z ${BROKEN:-} ]] && echo "$SLURMD_NODENAME" >>"$LOG.agents" && exec /bin/sleep 60 ;;
    status*) [[ $COSLICE_TOKEN == *--role ]] && sed 's/.*/"attached": true/' "$LOG.agents" ;;
    run*)
        echo "$SLURMD_NODENAME|$3|$COSLICE_TOKEN|$COSLICE_INCARNATION|${*: -2}" >>"$LOG"
        [[ $3 != "${FAILS:-}" ]]
        ;;
esac
"""


def _sbatch(tmp_path: Path, **environment: str) -> tuple[int, str]:
    """The script as Slurm runs it on n1 of n1 and n2; with it end the steps that are left."""
    tools = tmp_path / "bin"
    tools.mkdir(exist_ok=True)
    _fake(tools, srun=SRUN, coslice=COSLICE, scontrol="echo n1; echo n2", scancel="kill -9 $PPID")
    _fake(tools, sleep="exec /bin/sleep 0.02")
    (tmp_path / "log.agents").write_text("")
    env = {
        "PATH": f"{tools}:/usr/bin:/bin",
        "LOG": str(tmp_path / "log"),
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "COSLICE_STATE": str(tmp_path / "a state folder"),
        **environment,
    }
    script = str(DEPLOY / "slurm" / "coslice.sbatch")
    with subprocess.Popen(
        ("bash", script), env=env, start_new_session=True, stderr=subprocess.PIPE, text=True
    ) as job:
        try:
            job.wait(60)
        finally:
            os.killpg(job.pid, signal.SIGKILL)
        assert job.stderr is not None
        return job.returncode, job.stderr.read()


def test_an_allocation_runs_its_jobs_on_all_nodes_and_ends_as_they_end(tmp_path: Path) -> None:
    """Requeued, it begins anew in the same folder."""
    for fails, status in (("", 0), ("a", 1)):
        code, said = _sbatch(tmp_path, FAILS=fails)
        assert code == status, said
    lines = [line.split("|") for line in (tmp_path / "log").read_text().splitlines()]
    starts = {(job, incarnation) for _, job, _, incarnation, _ in lines}
    assert len(starts) == 4, "two starts of each of two jobs, whichever node they are seen on"
    assert sorted(node for node, *_ in lines) == ["n1"] * 4 + ["n2"] * 4
    assert {(job, token, end) for _, job, token, _, end in lines} == {
        (job, f"token of {job}", f"python train_{job}.py") for job in "ab"
    }


def test_an_allocation_whose_agents_do_not_start_ends(tmp_path: Path) -> None:
    code, said = _sbatch(tmp_path, BROKEN="yes")
    assert code == 1
    assert "a step of its own has ended" in said
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize("file", UNITS, ids=lambda file: str(file.name))
def test_units_are_what_systemd_takes(file: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd here")
    done = subprocess.run(
        ("systemd-analyze", "verify", str(file)), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("file", UNITS, ids=lambda file: str(file.name))
def test_units_come_back_however_often_they_end(file: Path) -> None:
    """systemd gives up a unit that fails five times in ten seconds, unless it is told not to."""
    unit = configparser.RawConfigParser(strict=False)
    unit.read_string(re.sub(r"\\\n\s*", " ", file.read_text()))
    assert (unit["Unit"]["StartLimitIntervalSec"], unit["Service"]["Restart"]) == ("0", "always")
    assert unit["Service"]["ExecReload"] == "/bin/kill -HUP $MAINPID"


@pytest.mark.helm
@pytest.mark.parametrize("file", IMAGES, ids=lambda file: str(file.name))
def test_images_pass_the_linter(file: Path) -> None:
    linter = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if linter is None:
        pytest.skip("there is no hadolint: make test-helm installs one")
    done = subprocess.run((linter, str(file)), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
