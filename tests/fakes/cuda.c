/* A fake libcuda.so.1: the checkpoint API of the CUDA driver, and as much of memory management as a small job
 * needs. The state machine is the documented one; see fake.h for what can be made to go wrong. */
#include "fake.h"

typedef int CUresult;
enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NO_DEVICE = 100, INVALID_CONTEXT = 201,
       NOT_FOUND = 500, OPERATING_SYSTEM = 304, ILLEGAL_STATE = 401, NOT_READY = 600, NOT_SUPPORTED = 801,
       UNKNOWN = 999 };

struct allocation {
  uint64_t address, size;
  int device;
  void *host;                        /* its copy while it is checkpointed */
  struct allocation *next;
};

static struct allocation *allocations;
static pthread_mutex_t mine = PTHREAD_MUTEX_INITIALIZER;
static int initialised, have_context[MAX_DEVICES];
static __thread int current_device;
static struct slot *self;

/* ── the target's side ──────────────────────────────────────────────────── */

static CUresult save_all(void) {
  for (struct allocation *a = allocations; a; a = a->next) {
    a->host = malloc(a->size);
    if (!a->host) return OUT_OF_MEMORY;
    memcpy(a->host, (void *)a->address, a->size);
    /* The pages go, the address stays reserved: touching it now is an error, as on a device. */
    if (mmap((void *)a->address, a->size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) ==
        MAP_FAILED) return UNKNOWN;
  }
  return OK;
}

static CUresult load_all(void) {
  for (struct allocation *a = allocations; a; a = a->next) {
    if (mmap((void *)a->address, a->size, PROT_READ | PROT_WRITE,
             MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED) return OUT_OF_MEMORY;
    memcpy((void *)a->address, a->host, a->size);
    free(a->host);
    a->host = NULL;
    a->device = self->map[a->device];
  }
  return OK;
}

static void *restore_thread(void *unused) {
  (void)unused;
  lock_node();
  self->restore_tid = (int)syscall(SYS_gettid);
  announce();
  for (;;) {
    while (self->command == CMD_NONE) await_change();
    int command = self->command;
    unlock_node();
    CUresult result = command == CMD_CHECKPOINT ? save_all() : load_all();
    lock_node();
    self->result = result;
    self->command = CMD_NONE;
    self->answered = 1;
    announce();
  }
  return NULL;
}

static CUresult join_node(void) {
  pthread_mutex_lock(&mine);
  if (!self) {
    pthread_t thread;
    pthread_attr_t attributes;
    lock_node();
    reap();
    struct slot *free_slot = NULL;
    for (int i = 0; i < MAX_PROCS && !free_slot; i++)
      if (!node->slots[i].pid) free_slot = &node->slots[i];
    if (!free_slot) {
      unlock_node();
      pthread_mutex_unlock(&mine);
      return OUT_OF_MEMORY;
    }
    free_slot->start = start_time(getpid());
    free_slot->pid = getpid();
    free_slot->probe = 1;
    for (int d = 0; d < MAX_DEVICES; d++) free_slot->map[d] = d;
    self = free_slot;
    unlock_node();
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    sigset_t all, before; /* signals are the program's own business, not this thread's */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&thread, &attributes, restore_thread, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) {
      pthread_mutex_unlock(&mine);
      return UNKNOWN;
    }
    lock_node();
    while (!self->restore_tid) await_change();
    unlock_node();
  }
  pthread_mutex_unlock(&mine);
  return OK;
}

/* Every call of the process waits here while the process is locked or checkpointed. */
static CUresult enter(void) {
  if (!initialised) return NOT_INITIALIZED;
  CUresult result = join_node();
  if (result) return result;
  lock_node();
  while (self->state != RUNNING || self->locking) await_change();
  self->inside++;
  unlock_node();
  return OK;
}

static CUresult leave(CUresult result) {
  lock_node();
  self->inside--;
  announce();
  unlock_node();
  return result;
}

CUresult cuInit(unsigned flags) {
  (void)flags;
  if (!open_node()) return NO_DEVICE;
  struct fault fault;
  lock_node();
  int broken = find_fault("init", getpid(), &fault);
  unlock_node();
  if (broken && strcmp(fault.kind, "error") == 0) return (CUresult)fault.arg;
  initialised = 1;
  return OK;
}

CUresult cuDriverGetVersion(int *version) {
  if (!open_node()) return NO_DEVICE;
  *version = (int)config_number("cuda_version", -1, 13040);
  return OK;
}

static int visible(int ordinal) { /* CUDA_VISIBLE_DEVICES as a list of numbers */
  const char *list = getenv("CUDA_VISIBLE_DEVICES");
  if (!list) return ordinal < device_count() ? ordinal : -1;
  for (; ordinal > 0 && list; ordinal--) list = strchr(list, ',') ? strchr(list, ',') + 1 : NULL;
  return list && *list >= '0' && *list <= '9' && atoi(list) < device_count() ? atoi(list) : -1;
}

CUresult cuDeviceGetCount(int *count) {
  if (!initialised) return NOT_INITIALIZED;
  for (*count = 0; visible(*count) >= 0; ++*count) {}
  return OK;
}

CUresult cuDeviceGet(int *device, int ordinal) {
  if (!initialised) return NOT_INITIALIZED;
  *device = visible(ordinal);
  return *device >= 0 ? OK : 101;
}

CUresult cuDeviceGetName(char *name, int size, int device) {
  snprintf(name, size, "%s", config_text("name", device, "Fake GPU"));
  return OK;
}

CUresult cuDeviceTotalMem_v2(size_t *bytes, int device) {
  *bytes = capacity(device);
  return OK;
}

CUresult cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
  device_uuid(device, uuid);
  return OK;
}

static CUresult make_context(int device) {
  if (have_context[device]) return OK;
  uint64_t size = config_number("context_bytes", device, 1 << 20);
  lock_node();
  reap();
  CUresult result = used_on(device) + size > capacity(device) ? OUT_OF_MEMORY : OK;
  if (!result) self->bytes[device] += size, self->probe = 0, have_context[device] = 1;
  unlock_node();
  return result;
}

CUresult cuDevicePrimaryCtxRetain(void **context, int device) {
  CUresult result = enter();
  if (result) return result;
  *context = (void *)(intptr_t)(device + 1);
  return leave(make_context(device));
}

CUresult cuCtxSetCurrent(void *context) {
  current_device = context ? (int)(intptr_t)context - 1 : 0;
  return initialised ? OK : NOT_INITIALIZED;
}

CUresult cuCtxSynchronize(void) {
  CUresult result = enter();
  return result ? result : leave(OK);
}

static CUresult allocate(uint64_t *address, size_t size) {
  int device = current_device;
  CUresult result = make_context(device);
  if (result) return result;
  uint64_t room = (size + 4095) / 4096 * 4096;
  lock_node();
  reap();
  if (used_on(device) + room > capacity(device)) result = OUT_OF_MEMORY;
  else self->bytes[device] += room;
  unlock_node();
  if (result) return result;
  void *memory = mmap(NULL, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  struct allocation *a = calloc(1, sizeof *a);
  *a = (struct allocation){(uint64_t)memory, room, device, NULL, allocations};
  *address = a->address;
  pthread_mutex_lock(&mine);
  allocations = a;
  pthread_mutex_unlock(&mine);
  return OK;
}

CUresult cuMemAlloc_v2(uint64_t *address, size_t size) {
  CUresult result = enter();
  return result ? result : leave(allocate(address, size));
}

CUresult cuMemAllocManaged(uint64_t *address, size_t size, unsigned flags) {
  (void)flags;
  CUresult result = enter();
  if (result) return result;
  self->managed = 1;
  return leave(allocate(address, size));
}

CUresult cuMemFree_v2(uint64_t address) {
  CUresult result = enter();
  if (result) return result;
  pthread_mutex_lock(&mine);
  struct allocation **p = &allocations;
  while (*p && (*p)->address != address) p = &(*p)->next;
  struct allocation *a = *p;
  if (a) *p = a->next;
  pthread_mutex_unlock(&mine);
  if (!a) return leave(INVALID_VALUE);
  munmap((void *)a->address, a->size);
  lock_node();
  self->bytes[a->device] -= a->size;
  unlock_node();
  free(a);
  return leave(OK);
}

CUresult cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t size) {
  CUresult result = enter();
  if (result) return result;
  memcpy((void *)to, from, size);
  return leave(OK);
}

CUresult cuMemcpyDtoH_v2(void *to, uint64_t from, size_t size) {
  CUresult result = enter();
  if (result) return result;
  memcpy(to, (void *)from, size);
  return leave(OK);
}

CUresult cuMemsetD8_v2(uint64_t to, unsigned char value, size_t size) {
  CUresult result = enter();
  if (result) return result;
  memset((void *)to, value, size);
  return leave(OK);
}

CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
  CUresult result = enter();
  if (result) return result;
  lock_node();
  reap();
  *total = capacity(current_device);
  uint64_t used = used_on(current_device);
  *free_bytes = used < *total ? *total - used : 0;
  unlock_node();
  return leave(OK);
}

/* Not in CUDA: work on the device, which a lock has to wait for, until the file "idle" exists. */
CUresult cuFakeWork(void) {
  CUresult result = enter();
  if (result) return result;
  while (!exists("idle")) sleep_ms(5);
  return leave(OK);
}

/* ── the agent's side ───────────────────────────────────────────────────── */

static CUresult invent(void) {
  static const CUresult some[] = {UNKNOWN, OPERATING_SYSTEM, ILLEGAL_STATE, INVALID_VALUE};
  return some[draw() % 4];
}

/* Faults before the work. Node locked. 1: return *result now. *after: return that when the work is done. */
static int faulty(const char *op, int pid, CUresult *result, CUresult *after) {
  struct fault fault;
  *after = OK;
  if (!find_fault(op, pid, &fault)) return 0;
  if (strcmp(fault.kind, "error") == 0) return *result = (CUresult)fault.arg, 1;
  if (strcmp(fault.kind, "after") == 0) return *after = (CUresult)fault.arg, 0;
  if (strcmp(fault.kind, "flake") == 0) {
    if (draw() % 2) return *after = invent(), 0;
    return *result = strcmp(op, "lock") == 0 && draw() % 2 ? NOT_READY : invent(), 1;
  }
  if (strcmp(fault.kind, "die") == 0) {
    kill(pid, SIGKILL);
    return *result = OPERATING_SYSTEM, 1;
  }
  if (strcmp(fault.kind, "poison") == 0) {
    struct slot *slot = find_slot(pid);
    if (slot) slot->poisoned = 1, slot->state = FAILED;
    return *result = UNKNOWN, 1;
  }
  if (strcmp(fault.kind, "sleep") == 0) {
    unlock_node();
    sleep_ms(fault.arg);
    lock_node();
    return 0;
  }
  if (strcmp(fault.kind, "hang") == 0) {
    unlock_node();
    while (!exists("release")) sleep_ms(5);
    lock_node();
    return 0;
  }
  return 0;
}

/* The slot of a pid, as the driver looks a process up: a thread's id is as good as its process's. */
static CUresult look_up(int pid, struct slot **slot) {
  char path[64], line[128];
  *slot = NULL;
  snprintf(path, sizeof path, "/proc/%d/status", pid);
  FILE *file = fopen(path, "re");
  if (!file) return INVALID_VALUE;
  int group = pid;
  while (fgets(line, sizeof line, file))
    if (sscanf(line, "Tgid: %d", &group) == 1) break;
  fclose(file);
  *slot = find_slot(group);
  if (*slot && (*slot)->start != start_time(group)) {
    reap();
    *slot = NULL;
  }
  return *slot ? OK : NOT_INITIALIZED;
}

static CUresult finish(const char *op, int pid, CUresult result) {
  node->calls++;
  unlock_node();
  write_log("%llu %d %s %d %d", (unsigned long long)now_us(), getpid(), op, pid, result);
  return result;
}

static CUresult begin(const char *op, int pid, struct slot **slot, CUresult *after, int *over) {
  CUresult result = OK;
  *over = 1;
  if (!open_node()) return NO_DEVICE;
  lock_node();
  write_log("%llu %d begin-%s %d", (unsigned long long)now_us(), getpid(), op, pid);
  if (faulty(op, pid, &result, after)) return finish(op, pid, result);
  result = look_up(pid, slot);
  if (result) return finish(op, pid, result);
  *over = 0;
  return OK;
}

CUresult cuCheckpointProcessGetState(int pid, int *state) {
  struct slot *slot;
  CUresult after;
  int over;
  CUresult result = begin("state", pid, &slot, &after, &over);
  if (over) return result;
  *state = slot->state;
  return finish("state", pid, after);
}

CUresult cuCheckpointProcessGetRestoreThreadId(int pid, int *tid) {
  struct slot *slot;
  CUresult after;
  int over;
  CUresult result = begin("tid", pid, &slot, &after, &over);
  if (over) return result;
  *tid = slot->restore_tid;
  return finish("tid", pid, slot->probe ? NOT_INITIALIZED : after);
}

struct lock_args { unsigned timeout_ms, reserved; uint64_t rest[7]; };

CUresult cuCheckpointProcessLock(int pid, struct lock_args *args) {
  struct slot *slot;
  CUresult after;
  int over;
  CUresult result = begin("lock", pid, &slot, &after, &over);
  if (over) return result;
  if (slot->poisoned || slot->state != RUNNING || slot->locking) return finish("lock", pid, ILLEGAL_STATE);
  if (slot->probe) return finish("lock", pid, NOT_INITIALIZED);
  uint64_t start = slot->start, deadline = args && args->timeout_ms ? now_us() + args->timeout_ms * 1000ull : 0;
  slot->locking = 1;
  while (slot->inside > 0 && !(deadline && now_us() >= deadline)) {
    await_change();
    reap();
    if (slot->pid == 0 || slot->start != start) return finish("lock", pid, OPERATING_SYSTEM);
  }
  slot->locking = 0;
  int busy = slot->inside > 0;
  if (!busy) slot->state = LOCKED;
  announce();
  return finish("lock", pid, busy ? NOT_READY : after);
}

/* Have the target's thread do it; waits as long as that takes, for ever if it is stopped. Node locked. */
static CUresult ask(struct slot *slot, int command) {
  uint64_t start = slot->start;
  slot->answered = 0;
  slot->command = command;
  announce();
  while (!slot->answered) {
    await_change();
    reap();
    if (slot->start != start) return OPERATING_SYSTEM;
  }
  return slot->result;
}

CUresult cuCheckpointProcessCheckpoint(int pid, void *args) {
  (void)args;
  struct slot *slot;
  CUresult after;
  int over;
  CUresult result = begin("checkpoint", pid, &slot, &after, &over);
  if (over) return result;
  if (slot->poisoned || slot->state != LOCKED) return finish("checkpoint", pid, ILLEGAL_STATE);
  if (slot->managed || config_number("no_checkpoint", -1, 0)) return finish("checkpoint", pid, NOT_SUPPORTED);
  result = ask(slot, CMD_CHECKPOINT);
  if (!slot->pid) return finish("checkpoint", pid, OPERATING_SYSTEM);
  if (result) {
    slot->state = FAILED;
    return finish("checkpoint", pid, result);
  }
  for (int d = 0; d < MAX_DEVICES; d++) slot->saved[d] = slot->bytes[d], slot->bytes[d] = 0;
  for (int d = 0; d < MAX_DEVICES; d++) slot->map[d] = d;
  slot->state = CHECKPOINTED;
  announce();
  return finish("checkpoint", pid, after);
}

struct gpu_pair { unsigned char from[16], to[16]; };
struct restore_args { struct gpu_pair *pairs; unsigned count; char rest[52]; };

static int device_of(const unsigned char uuid[16]) {
  unsigned char known[16];
  for (int d = 0; d < device_count(); d++) {
    device_uuid(d, known);
    if (memcmp(known, uuid, 16) == 0) return d;
  }
  return -1;
}

/* The map has to name every device that the driver shows, each once on either side. */
static int read_map(struct slot *slot, struct restore_args *args) {
  int seen_from = 0, seen_to = 0;
  for (int d = 0; d < MAX_DEVICES; d++) slot->map[d] = d;
  if (!args || !args->count) return 1;
  for (unsigned i = 0; i < args->count; i++) {
    int from = device_of(args->pairs[i].from), to = device_of(args->pairs[i].to);
    if (from < 0 || to < 0) return 0;
    slot->map[from] = to;
    seen_from |= 1 << from, seen_to |= 1 << to;
  }
  int all = (1 << device_count()) - 1;
  return seen_from == all && seen_to == all;
}

CUresult cuCheckpointProcessRestore(int pid, struct restore_args *args) {
  struct slot *slot;
  CUresult after;
  int over;
  CUresult result = begin("restore", pid, &slot, &after, &over);
  if (over) return result;
  if (slot->poisoned) return finish("restore", pid, OPERATING_SYSTEM);
  if (slot->state != CHECKPOINTED) return finish("restore", pid, ILLEGAL_STATE);
  if (!read_map(slot, args)) return finish("restore", pid, INVALID_VALUE);
  reap();
  for (int d = 0; d < MAX_DEVICES; d++)
    if (used_on(slot->map[d]) + slot->saved[d] > capacity(slot->map[d]) && slot->saved[d]) {
      slot->poisoned = 1; /* for good: the driver does not roll back, and every later call fails */
      node->poisonings++;
      return finish("restore", pid, OUT_OF_MEMORY);
    }
  uint64_t taken[MAX_DEVICES] = {0};
  for (int d = 0; d < MAX_DEVICES; d++) taken[slot->map[d]] += slot->saved[d];
  for (int d = 0; d < MAX_DEVICES; d++) slot->bytes[d] = taken[d];
  result = ask(slot, CMD_RESTORE);
  if (!slot->pid) return finish("restore", pid, OPERATING_SYSTEM);
  if (result) {
    slot->poisoned = 1;
    node->poisonings++;
    slot->state = FAILED;
    return finish("restore", pid, result);
  }
  memset(slot->saved, 0, sizeof slot->saved);
  slot->state = LOCKED;
  announce();
  return finish("restore", pid, after);
}

CUresult cuCheckpointProcessUnlock(int pid, void *args) {
  (void)args;
  struct slot *slot;
  CUresult after;
  int over;
  CUresult result = begin("unlock", pid, &slot, &after, &over);
  if (over) return result;
  if (slot->poisoned || slot->state != LOCKED) return finish("unlock", pid, ILLEGAL_STATE);
  slot->state = RUNNING;
  announce();
  return finish("unlock", pid, after);
}

/* ── names ──────────────────────────────────────────────────────────────── */

static const struct { int code; const char *name, *text; } errors[] = {
    {OK, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM", "OS call failed or operation not supported on this OS"},
    {ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

CUresult cuGetErrorName(CUresult code, const char **out) {
  for (unsigned i = 0; i < sizeof errors / sizeof *errors; i++)
    if (errors[i].code == code) return *out = errors[i].name, OK;
  return INVALID_VALUE;
}

CUresult cuGetErrorString(CUresult code, const char **out) {
  for (unsigned i = 0; i < sizeof errors / sizeof *errors; i++)
    if (errors[i].code == code) return *out = errors[i].text, OK;
  return INVALID_VALUE;
}

#define SYMBOL(name, version, function) {name, version, (void *)function}
static const struct { const char *name; int version; void *function; } symbols[] = {
    SYMBOL("cuInit", 2000, cuInit),
    SYMBOL("cuDriverGetVersion", 2020, cuDriverGetVersion),
    SYMBOL("cuGetErrorName", 6000, cuGetErrorName),
    SYMBOL("cuGetErrorString", 6000, cuGetErrorString),
    SYMBOL("cuDeviceGet", 2000, cuDeviceGet),
    SYMBOL("cuDeviceGetCount", 2000, cuDeviceGetCount),
    SYMBOL("cuDeviceGetName", 2000, cuDeviceGetName),
    SYMBOL("cuDeviceTotalMem", 3020, cuDeviceTotalMem_v2),
    SYMBOL("cuDeviceGetUuid", 11040, cuDeviceGetUuid_v2),
    SYMBOL("cuDevicePrimaryCtxRetain", 7000, cuDevicePrimaryCtxRetain),
    SYMBOL("cuCtxSetCurrent", 4000, cuCtxSetCurrent),
    SYMBOL("cuCtxSynchronize", 2000, cuCtxSynchronize),
    SYMBOL("cuMemAlloc", 3020, cuMemAlloc_v2),
    SYMBOL("cuMemAllocManaged", 6000, cuMemAllocManaged),
    SYMBOL("cuMemFree", 3020, cuMemFree_v2),
    SYMBOL("cuMemcpyHtoD", 3020, cuMemcpyHtoD_v2),
    SYMBOL("cuMemcpyDtoH", 3020, cuMemcpyDtoH_v2),
    SYMBOL("cuMemsetD8", 3020, cuMemsetD8_v2),
    SYMBOL("cuMemGetInfo", 3020, cuMemGetInfo_v2),
    SYMBOL("cuCheckpointProcessGetState", 12080, cuCheckpointProcessGetState),
    SYMBOL("cuCheckpointProcessGetRestoreThreadId", 12080, cuCheckpointProcessGetRestoreThreadId),
    SYMBOL("cuCheckpointProcessLock", 12080, cuCheckpointProcessLock),
    SYMBOL("cuCheckpointProcessCheckpoint", 12080, cuCheckpointProcessCheckpoint),
    SYMBOL("cuCheckpointProcessRestore", 12080, cuCheckpointProcessRestore),
    SYMBOL("cuCheckpointProcessUnlock", 12080, cuCheckpointProcessUnlock),
};

CUresult cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
  (void)flags, (void)status; /* status is NULL in cuda-bindings */
  int driver = open_node() ? (int)config_number("cuda_version", -1, 13040) : 13040;
  *function = NULL;
  for (unsigned i = 0; i < sizeof symbols / sizeof *symbols; i++)
    if (strcmp(symbols[i].name, name) == 0 && symbols[i].version <= version && symbols[i].version <= driver)
      return *function = symbols[i].function, OK;
  return NOT_FOUND;
}
