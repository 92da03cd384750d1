"""The wire of llm-d's rl-time-slicing, as it was read from its interface files: ours has the same names,
numbers, types and labels, and shares a process with their Python client.
"""

import subprocess
import sys
from collections.abc import Iterator

import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, FileDescriptor
from grpc_health.v1 import health_pb2

from coslice.wire.upstream import snapshot_agent_pb2 as agent
from coslice.wire.upstream import timeslice_orchestrator_pb2 as orchestrator

ORCHESTRATOR = """
AcquireRequest: 1 job_id string, 2 group_id string
AcquireResponse: 1 success bool, 2 waited_ms int64, 3 context_restored bool
YieldRequest: 1 job_id string, 2 group_id string
YieldResponse: 1 success bool, 2 pending_waiters int64, 3 snapshot_deferred bool
ListGroupsRequest:
ListGroupsResponse: 1 group_ids string repeated
GetGroupStatusRequest: 1 group_id string
GetGroupStatusResponse: 1 group GroupStatus, 2 agent_job_states SnapshotAgentJobState repeated
GroupStatus: 1 group_id string, 2 group_state GroupStatus.State, 3 state_timestamp
    google.protobuf.Timestamp, 4 locking_job string, 5 active_job string, 6 waiter_queue_depth int64, 7
    loaded_job string
SnapshotAgentJobState: 1 agent string, 2 job_state SnapshotAgentJobState.State, 3 job_id string
"""

ORCHESTRATOR_ENUMS = """
GroupStatus.State: 0 STATE_UNSPECIFIED, 1 STATE_UNKNOWN, 2 STATE_IDLE, 3 STATE_IDLE_YIELDED, 4
    STATE_LOCKED, 5 STATE_SWITCHING
SnapshotAgentJobState.State: 0 STATE_UNSPECIFIED, 1 STATE_IDLE, 2 STATE_RUNNING, 3 STATE_TRANSITIONING, 4
    STATE_SAVED, 5 STATE_FAULTED
"""

AGENT = """
ProcessTarget: 1 pids int32 repeated
CudaBackendConfig: 1 explicit_target ProcessTarget
DirectMemoryBackendConfig: 1 explicit_target ProcessTarget
TpuBackendConfig: 1 explicit_target ProcessTarget
AppEndpointConfig: 1 app App, 2 endpoints string repeated, 3 mode SuspendMode, 4 tags string repeated
AppChannelConfig: 1 mode SuspendMode, 2 tags string repeated
MemoryRegion: 1 pid int32, 2 address uint64, 3 size_bytes uint64
MemoryRegionsBackendConfig: 1 regions MemoryRegion repeated, 2 snapshot_name string
BackendConfig: 1 cuda CudaBackendConfig oneof backend, 2 app_endpoint AppEndpointConfig oneof backend, 3
    app_channel AppChannelConfig oneof backend, 4 direct_memory DirectMemoryBackendConfig oneof backend, 5
    memory_regions MemoryRegionsBackendConfig oneof backend, 6 tpu TpuBackendConfig oneof backend
WorkloadCapabilities: 1 supported_modes SuspendMode repeated, 2 default_mode SuspendMode, 3 tags string
    repeated
RegisterWorkload: 1 job_id string, 2 group string, 3 capabilities WorkloadCapabilities
CommandResult: 1 command_id string, 2 ok bool, 3 error string
WorkloadMessage: 1 register RegisterWorkload oneof message, 2 result CommandResult oneof message
SnapshotCommand: 1 mode SuspendMode, 2 tags string repeated
RestoreCommand: 1 tags string repeated
AgentCommand: 1 command_id string, 2 snapshot SnapshotCommand oneof command, 3 restore RestoreCommand
    oneof command
SnapshotRequest: 1 job_id string, 2 group string, 3 backend Backend, 4 backend_config BackendConfig
SnapshotResponse: 1 operation_id string
RestoreRequest: 1 job_id string, 2 group string, 3 backend Backend, 4 backend_config BackendConfig
RestoreResponse: 1 operation_id string
GetOperationRequest: 1 operation_id string
GetOperationResponse: 1 status OperationStatus, 2 storage_bytes int64 optional, 3 snapshot_device_bytes
    int64 optional, 4 elapsed_ms int64, 5 error string optional
StatusRequest:
JobStatus: 1 job_id string, 2 state JobState
AcceleratorStatus: 1 id string, 2 memory_used_bytes int64, 3 memory_total_bytes int64
StatusResponse: 1 job_statuses JobStatus repeated, 2 accelerator_statuses AcceleratorStatus repeated
"""

AGENT_ENUMS = """
Backend: 0 BACKEND_UNSPECIFIED, 1 BACKEND_CUDA
App: 0 APP_UNSPECIFIED, 1 APP_VLLM, 2 APP_SGLANG
SuspendMode: 0 SUSPEND_MODE_UNSPECIFIED, 1 SUSPEND_MODE_OFFLOAD, 2 SUSPEND_MODE_DISCARD
OperationStatus: 0 OPERATION_STATUS_UNSPECIFIED, 1 OPERATION_STATUS_PENDING, 2 OPERATION_STATUS_COMPLETE,
    3 OPERATION_STATUS_FAILED
JobState: 0 JOB_STATE_UNSPECIFIED, 1 JOB_STATE_IDLE, 2 JOB_STATE_RUNNING, 3 JOB_STATE_TRANSITIONING, 4
    JOB_STATE_SAVED, 5 JOB_STATE_FAULTED
"""

METHODS = {
    "timeslice_orchestrator.v1alpha1.TimeSliceOrchestratorService": {
        f"{name}: {name}Request -> {name}Response"
        for name in ("Acquire", "Yield", "ListGroups", "GetGroupStatus")
    },
    "snapshot_agent.v1alpha1.SnapshotAgentService": {
        *(
            f"{name}: {name}Request -> {name}Response"
            for name in ("Snapshot", "Restore", "GetOperation", "Status")
        ),
        "WorkloadChannel: stream WorkloadMessage -> stream AgentCommand",
    },
}


def rows(text: str) -> dict[str, list[str]]:
    joined = text.replace("\n    ", " ").strip().splitlines()
    parts = (line.partition(":") for line in joined)
    return {name: [part.strip() for part in fields.split(",") if part] for name, _, fields in parts}


def short(full_name: str, file: FileDescriptor) -> str:
    return full_name.removeprefix(f"{file.package}.")


def field(of: FieldDescriptor) -> str:
    file = of.containing_type.file
    words = {getattr(FieldDescriptor, f"TYPE_{name.upper()}"): name for name in SCALARS}
    kind = of.message_type or of.enum_type
    row = f"{of.number} {of.name} {short(kind.full_name, file) if kind else words[of.type]}"
    if of.is_repeated:
        return f"{row} repeated"
    oneof = of.containing_oneof
    if oneof is None:
        return row
    return f"{row} optional" if oneof.name.startswith("_") else f"{row} oneof {oneof.name}"


SCALARS = ("bool", "int32", "int64", "uint64", "string")


def enums_of(file: FileDescriptor) -> Iterator[EnumDescriptor]:
    yield from file.enum_types_by_name.values()
    for message in file.message_types_by_name.values():
        yield from message.enum_types


@pytest.mark.parametrize(
    ("file", "messages", "enums"),
    [
        (orchestrator.DESCRIPTOR, ORCHESTRATOR, ORCHESTRATOR_ENUMS),
        (agent.DESCRIPTOR, AGENT, AGENT_ENUMS),
    ],
    ids=["orchestrator", "agent"],
)
def test_names_numbers_types_and_labels_are_theirs(file: FileDescriptor, messages: str, enums: str) -> None:
    def fields(message: Descriptor) -> list[str]:
        return [field(each) for each in message.fields]

    assert {name: fields(found) for name, found in file.message_types_by_name.items()} == rows(messages)
    found = {
        short(enum.full_name, file): [f"{v.number} {v.name}" for v in enum.values] for enum in enums_of(file)
    }
    assert found == rows(enums)


@pytest.mark.parametrize("file", [orchestrator.DESCRIPTOR, agent.DESCRIPTOR], ids=["orchestrator", "agent"])
def test_methods_are_theirs(file: FileDescriptor) -> None:
    (service,) = file.services_by_name.values()
    found = {
        f"{method.name}: {'stream ' * method.client_streaming}{method.input_type.name}"
        f" -> {'stream ' * method.server_streaming}{method.output_type.name}"
        for method in service.methods
    }
    assert found == METHODS[service.full_name]


def test_what_runs_inside_a_job_shares_its_process_with_their_client() -> None:
    """Theirs puts these messages, and those of gRPC's health service, into the process's pool under names of
    its own: whoever adds them once more fails."""
    theirs = {
        "timeslice/orchestrator/_generated/timeslice_orchestrator.proto": orchestrator.DESCRIPTOR,
        "timeslice/snapshot_agent/snapshot_agent.proto": agent.DESCRIPTOR,
        "health.proto": health_pb2.DESCRIPTOR,
    }
    files = []
    for name, descriptor in theirs.items():
        file = descriptor_pb2.FileDescriptorProto.FromString(descriptor.serialized_pb)
        file.name = name
        files.append(file.SerializeToString())
    program = f"""
from google.protobuf import descriptor_pool, timestamp_pb2
for file in {files!r}:
    descriptor_pool.Default().AddSerializedFile(file)
import coslice, coslice.workload, coslice.agent.client, coslice.client.link, coslice.client.aio_link
import coslice.client.phases, coslice.integrations.slime, coslice.integrations.verl
"""
    subprocess.run([sys.executable, "-c", program], check=True)
