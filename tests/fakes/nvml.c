/* A fake libnvidia-ml.so.1 over the node of fake.h: a process is listed while it is running or locked, and
 * vanishes once it is checkpointed, as on real drivers. Fault OP "nvml" (error N, hang) hits the queries. */
#include "fake.h"

typedef int nvmlReturn_t;
enum { SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6,
       INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, TIMEOUT = 10, UNKNOWN = 999 };
typedef void *nvmlDevice_t;

static int device_of(nvmlDevice_t handle) { return (int)(intptr_t)handle - 1; }

static nvmlReturn_t check(void) {
  struct fault fault;
  if (!open_node()) return DRIVER_NOT_LOADED;
  lock_node();
  int broken = find_fault("nvml", 0, &fault);
  unlock_node();
  if (broken && strcmp(fault.kind, "error") == 0) return (nvmlReturn_t)fault.arg;
  if (broken && strcmp(fault.kind, "hang") == 0)
    while (!exists("release")) sleep_ms(5);
  return SUCCESS;
}

nvmlReturn_t nvmlInit_v2(void) { return open_node() ? SUCCESS : DRIVER_NOT_LOADED; }
nvmlReturn_t nvmlInitWithFlags(unsigned flags) { (void)flags; return nvmlInit_v2(); }
nvmlReturn_t nvmlShutdown(void) { return SUCCESS; }

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned size) {
  snprintf(version, size, "%s", config_text("driver", -1, "595.71.05"));
  return SUCCESS;
}

nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version) {
  *version = (int)config_number("cuda_version", -1, 13040);
  return SUCCESS;
}
nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version) { return nvmlSystemGetCudaDriverVersion(version); }

const char *nvmlErrorString(nvmlReturn_t code) {
  return code == SUCCESS ? "Success" : code == DRIVER_NOT_LOADED ? "Driver Not Loaded"
       : code == NOT_SUPPORTED ? "Not Supported" : code == TIMEOUT ? "Timeout" : "Unknown Error";
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count) {
  nvmlReturn_t result = check();
  if (result) return result;
  *count = (unsigned)device_count();
  return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *handle) {
  if ((int)index >= device_count()) return INVALID_ARGUMENT;
  *handle = (nvmlDevice_t)(intptr_t)(index + 1);
  return SUCCESS;
}

static void uuid_text(int device, char *out, unsigned size) {
  unsigned char u[16];
  device_uuid(device, u);
  snprintf(out, size, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", u[0], u[1], u[2],
           u[3], u[4], u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned size) {
  uuid_text(device_of(device), uuid, size);
  return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *handle) {
  char known[96];
  for (int d = 0; d < device_count(); d++) {
    uuid_text(d, known, sizeof known);
    if (strcmp(known, uuid) == 0) return *handle = (nvmlDevice_t)(intptr_t)(d + 1), SUCCESS;
  }
  return NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned size) {
  snprintf(name, size, "%s", config_text("name", device_of(device), "Fake GPU"));
  return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t device, unsigned *mode) {
  *mode = (unsigned)config_number("persistence", device_of(device), 1);
  return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *current, unsigned *pending) {
  *current = *pending = (unsigned)config_number("mig", device_of(device), 0);
  return SUCCESS;
}

nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, int type, int counter, unsigned long long *count) {
  (void)counter;
  *count = config_number(type == 1 ? "ecc_uncorrected" : "ecc_corrected", device_of(device), 0);
  return SUCCESS;
}

struct utilisation { unsigned gpu, memory; };
nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, struct utilisation *rates) {
  rates->gpu = (unsigned)config_number("utilisation", device_of(device), 0), rates->memory = 0;
  return SUCCESS;
}

static void memory_of(int device, unsigned long long *total, unsigned long long *used) {
  lock_node();
  reap();
  *total = capacity(device);
  *used = used_on(device);
  unlock_node();
}

struct memory { unsigned long long total, free, used; };
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, struct memory *out) {
  nvmlReturn_t result = check();
  if (result) return result;
  memory_of(device_of(device), &out->total, &out->used);
  out->free = out->used < out->total ? out->total - out->used : 0;
  return SUCCESS;
}

struct memory_v2 { unsigned version; unsigned long long total, reserved, free, used; };
nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, struct memory_v2 *out) {
  nvmlReturn_t result = check();
  if (result) return result;
  memory_of(device_of(device), &out->total, &out->used);
  out->reserved = 0;
  out->free = out->used < out->total ? out->total - out->used : 0;
  return SUCCESS;
}

struct process { unsigned pid; unsigned long long bytes; unsigned instance, compute_instance; };

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count, struct process *out) {
  nvmlReturn_t result = check();
  if (result) return result;
  int d = device_of(device);
  unsigned room = *count, n = 0;
  lock_node();
  reap();
  for (int i = 0; i < MAX_PROCS; i++) {
    struct slot *slot = &node->slots[i];
    if (!slot->pid || slot->state == CHECKPOINTED || (!slot->bytes[d] && !(slot->probe && d == 0))) continue;
    if (out && n < room) out[n] = (struct process){(unsigned)slot->pid, slot->bytes[d], ~0u, ~0u};
    n++;
  }
  unlock_node();
  *count = n;
  return n > room ? INSUFFICIENT_SIZE : SUCCESS;
}

nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t device, unsigned *count, struct process *out) {
  (void)device, (void)out;
  *count = 0;
  return SUCCESS;
}

/* Config "mps" is the pid of a client of the CUDA Multi-Process Service. */
nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count, struct process *out) {
  unsigned pid = (unsigned)config_number("mps", device_of(device), 0), room = *count;
  *count = pid ? 1 : 0;
  if (pid && room < 1) return INSUFFICIENT_SIZE;
  if (pid && out) out[0] = (struct process){pid, 0, ~0u, ~0u};
  return SUCCESS;
}

/* ── events: lines of the file "xid", from the end at the time the set is made ── */

struct event_set { long offset; };
struct event { nvmlDevice_t device; unsigned long long type, data; unsigned instance, compute_instance; };

nvmlReturn_t nvmlEventSetCreate(struct event_set **set) {
  char path[1024];
  if (!open_node()) return DRIVER_NOT_LOADED;
  struct stat status;
  file_name(path, sizeof path, "xid");
  *set = calloc(1, sizeof **set);
  (*set)->offset = stat(path, &status) ? 0 : status.st_size;
  return SUCCESS;
}

nvmlReturn_t nvmlEventSetFree(struct event_set *set) { return free(set), SUCCESS; }

nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, struct event_set *set) {
  (void)device, (void)types, (void)set;
  return config_number("no_events", -1, 0) ? NOT_SUPPORTED : SUCCESS;
}

nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types) {
  (void)device;
  *types = config_number("no_events", -1, 0) ? 0 : 0xf;
  return SUCCESS;
}

nvmlReturn_t nvmlEventSetWait_v2(struct event_set *set, struct event *out, unsigned timeout_ms) {
  uint64_t deadline = now_us() + timeout_ms * 1000ull;
  char path[1024], line[128];
  file_name(path, sizeof path, "xid");
  do {
    FILE *file = fopen(path, "re");
    int device, code;
    if (file) {
      fseek(file, set->offset, SEEK_SET);
      if (fgets(line, sizeof line, file) && strchr(line, '\n')) {
        set->offset = ftell(file);
        fclose(file);
        if (sscanf(line, "%d %d", &device, &code) == 2) {
          *out = (struct event){(nvmlDevice_t)(intptr_t)(device + 1), 8 /* XidCriticalError */, code, ~0u, ~0u};
          return SUCCESS;
        }
        continue;
      }
      fclose(file);
    }
    sleep_ms(10);
  } while (now_us() < deadline);
  return TIMEOUT;
}
