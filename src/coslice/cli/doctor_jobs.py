"""Checks of what runs: the orchestrator, the agent and who registered with it, inference servers."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import grpc

from coslice.cli.doctor_facts import Finding, Level, Machine, Program
from coslice.cli.rpc import agent_status, group_status
from coslice.errors import ConfigError, CosliceError, OrchestratorUnreachable
from coslice.workload.listening import listener

Check = Callable[[Machine], Iterator[Finding]]


def job_checks(orchestrator: str, agent: str, endpoints: Sequence[str]) -> list[Check]:
    def the_orchestrator(machine: Machine) -> Iterator[Finding]:
        yield check_orchestrator(orchestrator)

    def the_agent(machine: Machine) -> Iterator[Finding]:
        yield from check_agent(agent)

    def the_endpoints(machine: Machine) -> Iterator[Finding]:
        for url in endpoints:
            yield check_endpoint(url)

    return [the_orchestrator, the_agent, engines, the_endpoints]


def check_orchestrator(address: str) -> Finding:
    """Malformed addresses are a ``ConfigError``."""
    try:
        state = group_status(address)
    except OrchestratorUnreachable as error:
        return _nobody("orchestrator", address, str(error))
    except ConfigError:
        raise
    except CosliceError as error:
        return Finding(
            check="orchestrator",
            level=Level.PROBLEM,
            text=str(error),
            fix="as it says: check address and token",
        )
    names = ", ".join(group.group for group in state.groups) or "none yet"
    missing = [f"{node.node} of {g.group}" for g in state.groups for node in g.nodes if not node.attached]
    if missing:
        return Finding(
            check="orchestrator",
            level=Level.WARNING,
            text=f"answers at {address}, but no agent is attached for {', '.join(missing)}",
            fix="start `coslice agent` there, or look at its log",
        )
    return Finding(check="orchestrator", level=Level.OK, text=f"answers at {address}; groups: {names}")


def check_agent(address: str) -> Iterator[Finding]:
    try:
        node = agent_status(address)
    except grpc.RpcError as error:
        yield _nobody("agent", address, str(error.code().name))
        return
    jobs = ", ".join(sorted({member.job for member in node.members})) or "none"
    text = f"{node.node} answers at {address}; registered jobs: {jobs}"
    yield Finding(check="agent", level=Level.OK, text=text)
    if node.orchestrator and not node.attached:
        yield Finding(
            check="agent",
            level=Level.PROBLEM,
            text=f"it dials {node.orchestrator}, and is not attached",
            fix="start the orchestrator there, or start the agent with the right --orchestrator",
        )
    for member in node.members:
        if not member.connected:
            yield Finding(
                check="agent",
                level=Level.WARNING,
                text=f"process {member.pid} of {member.job} has registered and lost its channel",
                fix="it comes back by itself unless it is stopped or stuck: look at the process",
            )


def _nobody(what: str, address: str, error: str) -> Finding:
    """Nobody of ours: is the port another's, or free?"""
    port = int(address.rpartition(":")[2]) if address.rpartition(":")[2].isdigit() else 0
    holder = listener(port) if port else None
    if holder is not None:
        return Finding(
            check=what,
            level=Level.PROBLEM,
            text=f"port {port} is taken by process {holder}, which is no {what} of coslice ({error})",
            fix=f"stop it, or start the {what} on another port (--listen)",
        )
    return Finding(
        check=what,
        level=Level.NOTE,
        text=f"none answers at {address}",
        fix="`coslice up` starts one"
        if what == "orchestrator"
        else "`coslice up` or `coslice agent` starts one",
    )


def engines(machine: Machine) -> Iterator[Finding]:
    """Servers that run here, by their command lines."""
    for program in machine.processes():
        words = program.command
        line = " ".join(words)
        if _is(words, "vllm.entrypoints.openai.api_server") or _starts(words, "vllm", "serve"):
            yield from _vllm(program, line)
        elif _is(words, "sglang.launch_server") or _starts(words, "sglang", "serve"):
            yield from _sglang(program, line)


def _vllm(program: Program, line: str) -> Iterator[Finding]:
    name = f"vLLM (pid {program.pid})"
    lacking = []
    if "--enable-sleep-mode" not in line:
        lacking.append("--enable-sleep-mode")
    if program.env.get("VLLM_SERVER_DEV_MODE") != "1":
        lacking.append("VLLM_SERVER_DEV_MODE=1 in its environment")
    if lacking:
        yield Finding(
            check="engine",
            level=Level.WARNING,
            text=f"{name} cannot be put to sleep over HTTP",
            fix=f"start it with {' and '.join(lacking)}",
        )
    elif _listens_everywhere(program.command):
        yield Finding(
            check="engine",
            level=Level.WARNING,
            text=f"{name} offers its development routes to the whole network, and they ask for no password",
            fix="start it with --host 127.0.0.1",
        )
    else:
        yield Finding(check="engine", level=Level.OK, text=f"{name} can sleep")


def _sglang(program: Program, line: str) -> Iterator[Finding]:
    name = f"SGLang (pid {program.pid})"
    if "--enable-memory-saver" not in line:
        yield Finding(
            check="engine",
            level=Level.WARNING,
            text=f"{name} cannot give memory up, and would say that it did",
            fix="start it with --enable-memory-saver",
        )
        return
    if "--enable-weights-cpu-backup" not in line:
        yield Finding(
            check="engine",
            level=Level.WARNING,
            text=f"{name} would drop its weights",
            fix="start it with --enable-weights-cpu-backup, unless the job pushes new weights itself",
        )
    for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in program.env.get(variable, "").lower().replace(" ", ""):
            yield Finding(
                check="engine",
                level=Level.PROBLEM,
                text=f"{name} runs with expandable_segments:True, whose memory cannot be given up",
                fix=f"start it without {variable}",
            )
    nodes = _value(program.command, "--nnodes")
    if nodes.isdigit() and int(nodes) > 1 and program.env.get("NCCL_GRAPH_REGISTER") != "0":
        yield Finding(
            check="engine",
            level=Level.PROBLEM,
            text=f"{name} spans {nodes} nodes, and graphs that NCCL registered do not survive a release",
            fix="start it with NCCL_GRAPH_REGISTER=0 in its environment",
        )


def check_endpoint(url: str) -> Finding:
    """Ask a server whether it can sleep, as the agent does before it puts it to sleep. Moves nothing."""
    from coslice.agent.backends.app_endpoint_dialects import detect
    from coslice.agent.backends.app_endpoint_http import EngineHttp, NoAnswer
    from coslice.agent.backends.app_endpoint_probe import Unwell, generate
    from coslice.agent.backends.base import MoveError
    from coslice.agent.endpoints import parse_endpoint

    endpoint = parse_endpoint(url)

    async def ask() -> str:
        http = EngineHttp(endpoint)
        try:
            dialect = await detect(http, "", {})
            await dialect.check((), discard=False)
            golden = await generate(http, timeout=30.0)
            return f"{dialect.name} {dialect.version} at {url} can sleep, and generates ({golden.text!r})"
        finally:
            await http.close()

    try:
        return Finding(check="engine", level=Level.OK, text=asyncio.run(ask()))
    except (MoveError, Unwell, NoAnswer) as error:
        return Finding(
            check="engine",
            level=Level.PROBLEM,
            text=f"{url}: {error}",
            fix="as it says; see docs/backends.md",
        )


def _is(words: Sequence[str], module: str) -> bool:
    return any(first == "-m" and second == module for first, second in pairwise(words))


def _starts(words: Sequence[str], program: str, verb: str) -> bool:
    """``vllm serve``, also as ``python /usr/bin/vllm serve``."""
    return any(
        first.rpartition("/")[2] == program and second == verb for first, second in pairwise(words[:3])
    )


def _value(words: Sequence[str], flag: str) -> str:
    for first, second in zip(words, [*words[1:], ""], strict=False):
        if first == flag:
            return second
        if first.startswith(f"{flag}="):
            return first.partition("=")[2]
    return ""


def _listens_everywhere(words: Sequence[str]) -> bool:
    """vLLM's default is every address."""
    return _value(words, "--host") in ("", "0.0.0.0", "::")
