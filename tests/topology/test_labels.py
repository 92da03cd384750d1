"""What labels say, and which processes are a pod's: pure, and on a made-up /proc."""

from pathlib import Path

from coslice.agent.topology.labels import View, view
from coslice.agent.topology.pods import main_processes
from coslice.core.ids import GroupId, JobId

UID = "0f8fad5b-d9cb-469f-a165-70867728950e"
MAIN, SIDECAR, PAUSE = "a" * 64, "b" * 64, "c" * 64


def node(**labels: str) -> dict:
    return {"metadata": {"name": "n1", "labels": labels}}


def pod(
    uid: str = UID, *, job: str = "a", group: str = "train", phase: str = "Running", running=(MAIN,)
) -> dict:
    labels = {"timeslice.io/job-id": job, "timeslice.io/group": group}
    statuses = [{"containerID": f"containerd://{each}", "state": {"running": {}}} for each in running]
    statuses.append({"containerID": f"containerd://{'d' * 64}", "state": {"terminated": {"exitCode": 0}}})
    return {
        "metadata": {
            "uid": uid,
            "namespace": "rl",
            "name": "p",
            "labels": {k: v for k, v in labels.items() if v},
        },
        "status": {"phase": phase, "containerStatuses": statuses},
    }


def test_node_labels_name_the_groups() -> None:
    labels = {
        "group.timeslice.io/train": "true",
        "group.timeslice.io/sample": "true",
        "group.timeslice.io/old": "false",
        "group.timeslice.io/": "true",
        "kubernetes.io/hostname": "n1",
    }
    assert view(node(**labels), []).groups == {GroupId("train"), GroupId("sample")}
    assert view(None, []) == View()


def test_a_pod_counts_with_both_labels_until_it_ends() -> None:
    pods = [
        pod("2"),
        pod("1", job="b"),
        pod("3", phase="Succeeded"),
        pod("4", phase="Failed"),
        pod("5", job=""),
        pod("6", group=""),
        pod("7", group="-not-a-name-/"),
    ]
    found = view(node(), pods).pods
    assert [(each.uid, each.job, each.group, each.name) for each in found] == [
        ("1", JobId("b"), GroupId("train"), "rl/p"),
        ("2", JobId("a"), GroupId("train"), "rl/p"),
    ]
    assert found[0].containers == {MAIN}, "a container that ended has no process"


def process(proc: Path, pid: int, started: int, container: str, uid: str = UID, state: str = "S") -> None:
    folder = proc / str(pid)
    folder.mkdir()
    slice_ = f"kubepods-burstable-pod{uid.replace('-', '_')}.slice"
    (folder / "cgroup").write_text(f"0::/../../{slice_}/cri-containerd-{container}.scope\n")
    fields = [state, "1", *["0"] * 17, str(started), *["0"] * 5]
    (folder / "stat").write_text(f"{pid} (python) {' '.join(fields)}\n")
    (folder / "status").write_text(f"Name:\tpython\nTgid:\t{pid}\nNSpid:\t{pid}\n")


def test_the_oldest_process_of_each_running_container_is_its_main_one(tmp_path: Path) -> None:
    process(tmp_path, 400, 90, MAIN)
    process(tmp_path, 300, 91, MAIN)  # a child, or a shell that somebody opened in it
    process(tmp_path, 500, 95, SIDECAR)
    process(tmp_path, 200, 80, PAUSE)
    process(tmp_path, 600, 70, MAIN, uid="0f8fad5b-d9cb-469f-a165-70867728950f")
    process(tmp_path, 700, 60, MAIN, state="Z")
    (tmp_path / "self").mkdir()
    pods = view(node(), [pod(running=(MAIN, SIDECAR))]).pods
    assert main_processes(pods, proc=tmp_path) == {UID: {400: 90, 500: 95}}
    assert main_processes(view(node(), [pod(running=())]).pods, proc=tmp_path) == {}
