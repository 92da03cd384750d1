/* The imaginary node that the fake libcuda.so.1, libnvidia-ml.so.1 and cuda-checkpoint share.
 *
 * $COSLICE_FAKE_CUDA names a folder:
 *   shm      this state, mapped by every process of the node
 *   config   key=value lines, read again on every use (see config_* below for the keys)
 *   faults   what is to go wrong: lines "OP PID KIND [ARG] [COUNT]" (see find_fault)
 *   log      one line for every call of the checkpoint API
 *   xid      lines "DEVICE CODE": Xid events, appended by tests
 *   release  while it exists, calls that hang return
 *   idle     while it exists, work on the devices (cuFakeWork) ends
 *
 * One process of the node = one slot. Its device memory is real memory of that process; a thread in it (the
 * "restore thread") does the copying, so a stopped process hangs its caller, as with the real driver.
 */
#ifndef COSLICE_FAKE_H
#define COSLICE_FAKE_H
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MAX_PROCS 64
#define MAX_DEVICES 16
#define MAGIC 0x636f736c69636532ull

enum { RUNNING = 0, LOCKED = 1, CHECKPOINTED = 2, FAILED = 3 };
enum { CMD_NONE = 0, CMD_CHECKPOINT = 1, CMD_RESTORE = 2 };

struct slot {
  int32_t pid;
  int32_t restore_tid;
  uint64_t start;
  int32_t state;
  int32_t locking;   /* a lock is being taken: new calls of the process wait */
  int32_t inside;    /* calls of the process that are in the driver now */
  int32_t poisoned;  /* for good */
  int32_t managed;   /* has allocated managed memory */
  int32_t probe;     /* initialised, but never made a context */
  int32_t command, answered;
  int32_t result;
  int32_t map[MAX_DEVICES];         /* argument of a restore: old device -> new device */
  uint64_t bytes[MAX_DEVICES];      /* on the device now */
  uint64_t saved[MAX_DEVICES];      /* in host memory, while checkpointed */
};

struct node {
  uint64_t magic;
  pthread_mutex_t mutex;
  uint32_t changed;                 /* futex: counts changes */
  uint32_t poisonings;              /* processes ever destroyed by a restore */
  uint64_t random;
  uint64_t calls;
  struct slot slots[MAX_PROCS];
};

static struct node *node;
static char folder[900];

static inline uint64_t now_us(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1000000ull + t.tv_nsec / 1000;
}

static inline void file_name(char *out, size_t size, const char *name) {
  snprintf(out, size, "%s/%s", folder, name);
}

static inline int exists(const char *name) {
  char path[1024];
  file_name(path, sizeof path, name);
  return access(path, F_OK) == 0;
}

/* Text of a config key (of a device: "key.N" wins over "key"); returns fallback if it is not set. */
static inline const char *config_text(const char *key, int device, const char *fallback) {
  static __thread char value[256];
  char path[1024], line[512], special[64];
  const char *found = NULL;
  snprintf(special, sizeof special, "%s.%d", key, device);
  file_name(path, sizeof path, "config");
  FILE *file = fopen(path, "re");
  if (!file) return fallback;
  while (fgets(line, sizeof line, file)) {
    char *equals = strchr(line, '=');
    if (!equals) continue;
    *equals = 0;
    equals[1 + strcspn(equals + 1, "\n")] = 0;
    int exact = device >= 0 && strcmp(line, special) == 0;
    if (exact || (!found && strcmp(line, key) == 0)) {
      snprintf(value, sizeof value, "%s", equals + 1);
      found = value;
      if (exact) break;
    }
  }
  fclose(file);
  return found ? found : fallback;
}

static inline uint64_t config_number(const char *key, int device, uint64_t fallback) {
  const char *text = config_text(key, device, NULL);
  return text ? strtoull(text, NULL, 0) : fallback;
}

static inline int device_count(void) { return (int)config_number("devices", -1, 1); }
static inline uint64_t capacity(int device) { return config_number("capacity", device, 1ull << 30); }

/* Field 22 of /proc/PID/stat; 0 if there is no such process, or it is a zombie. */
static inline uint64_t start_time(int pid) {
  char path[64], text[1024];
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  ssize_t n = read(fd, text, sizeof text - 1);
  close(fd);
  if (n <= 0) return 0;
  text[n] = 0;
  char *p = strrchr(text, ')'), state;
  unsigned long long start = 0;
  if (!p || sscanf(p + 2, "%c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %*u %*u %*d %*d %*d %*d %*d %*d %llu",
                   &state, &start) != 2) return 0;
  return state == 'Z' || state == 'X' ? 0 : start;
}

/* A process that is killed while it waits here may take another's wake-up with it: nobody sleeps for long. */
static inline void lock_node(void) {
  for (int result = ETIMEDOUT; result == ETIMEDOUT;) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += 20 * 1000 * 1000;
    if (until.tv_nsec >= 1000 * 1000 * 1000) until.tv_sec++, until.tv_nsec -= 1000 * 1000 * 1000;
    result = pthread_mutex_timedlock(&node->mutex, &until);
    if (result == EOWNERDEAD) pthread_mutex_consistent(&node->mutex);
  }
}

static inline void unlock_node(void) { pthread_mutex_unlock(&node->mutex); }

static inline void announce(void) {
  __atomic_add_fetch(&node->changed, 1, __ATOMIC_SEQ_CST);
  syscall(SYS_futex, &node->changed, FUTEX_WAKE, 1 << 20, NULL, NULL, 0);
}

/* Call with the node locked; returns with it locked, after a change or after 20 ms. */
static inline void await_change(void) {
  uint32_t seen = __atomic_load_n(&node->changed, __ATOMIC_SEQ_CST);
  unlock_node();
  struct timespec wait = {0, 20 * 1000 * 1000};
  syscall(SYS_futex, &node->changed, FUTEX_WAIT, seen, &wait, NULL, 0);
  lock_node();
}

/* Frees the slots of processes that have ended. Node locked. */
static inline void reap(void) {
  for (int i = 0; i < MAX_PROCS; i++)
    if (node->slots[i].pid && start_time(node->slots[i].pid) != node->slots[i].start)
      memset(&node->slots[i], 0, sizeof node->slots[i]);
}

static inline struct slot *find_slot(int pid) {
  for (int i = 0; i < MAX_PROCS; i++)
    if (node->slots[i].pid == pid) return &node->slots[i];
  return NULL;
}

static inline uint64_t used_on(int device) {
  uint64_t used = config_number("reserved", device, 0);
  for (int i = 0; i < MAX_PROCS; i++)
    if (node->slots[i].pid) used += node->slots[i].bytes[device];
  return used;
}

/* Maps the node; 0 if there is none. */
static inline int open_node(void) {
  if (node) return 1;
  const char *where = getenv("COSLICE_FAKE_CUDA");
  if (!where) return 0;
  snprintf(folder, sizeof folder, "%s", where);
  char path[1024];
  file_name(path, sizeof path, "shm");
  int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0) return 0;
  flock(fd, LOCK_EX);
  struct stat status;
  if (fstat(fd, &status) || (status.st_size == 0 && ftruncate(fd, sizeof(struct node)))) {
    close(fd);
    return 0;
  }
  struct node *mapped = mmap(NULL, sizeof(struct node), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (mapped != MAP_FAILED && mapped->magic != MAGIC) {
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&mapped->mutex, &attributes);
    mapped->random = config_number("seed", -1, 1) * 0x9e3779b97f4a7c15ull + 1;
    mapped->magic = MAGIC;
  }
  flock(fd, LOCK_UN);
  close(fd);
  if (mapped == MAP_FAILED) return 0;
  node = mapped;
  return 1;
}

static inline void write_log(const char *format, ...) {
  char path[1024], text[512];
  va_list args;
  va_start(args, format);
  int n = vsnprintf(text, sizeof text - 1, format, args);
  va_end(args);
  if (config_number("log", -1, 1) == 0) return;
  text[n++] = '\n';
  file_name(path, sizeof path, "log");
  int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  if (fd >= 0) {
    if (write(fd, text, n) < 0) {}
    close(fd);
  }
}

struct fault {
  char kind[16];
  long arg;
};

static inline uint64_t draw(void) {
  uint64_t x = node->random;
  x ^= x << 13, x ^= x >> 7, x ^= x << 17;
  return node->random = x;
}

/* The first line of "faults" that is about this call; a COUNT is used up. Node locked.
 * KIND: error N (before anything is done) · after N (done, and N is returned all the same) · flake K (one call
 * in K fails, before or after it is done) · hang · die (the target is killed) · poison · sleep MS · hold MS
 * (time spent in the call, as a copy would) · init N. OP "*" and PID "*" match all.  */
static inline int find_fault(const char *op, int pid, struct fault *fault) {
  char path[1024], text[8192], rest[8192] = "", line[256];
  file_name(path, sizeof path, "faults");
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  ssize_t n = read(fd, text, sizeof text - 1);
  close(fd);
  text[n > 0 ? n : 0] = 0;
  int found = 0, rewrite = 0;
  for (char *p = text; *p;) {
    size_t length = strcspn(p, "\n");
    char on[32] = "", who[32] = "", kind[16] = "";
    long arg = 0, count = -1;
    snprintf(line, sizeof line, "%.*s", (int)length, p);
    int fields = sscanf(line, "%31s %31s %15s %ld %ld", on, who, kind, &arg, &count);
    int mine = !found && fields >= 3 && (strcmp(on, op) == 0 || strcmp(on, "*") == 0) &&
               (strcmp(who, "*") == 0 || atoi(who) == pid);
    if (mine && strcmp(kind, "flake") == 0 && (arg <= 0 || draw() % (uint64_t)arg)) mine = 0;
    if (mine) {
      found = 1;
      snprintf(fault->kind, sizeof fault->kind, "%s", kind);
      fault->arg = arg;
      if (fields == 5) rewrite = 1;
    }
    if (mine && fields == 5) {
      if (count > 1)
        snprintf(rest + strlen(rest), sizeof rest - strlen(rest), "%s %s %s %ld %ld\n", on, who, kind, arg, count - 1);
    } else if (length) {
      snprintf(rest + strlen(rest), sizeof rest - strlen(rest), "%s\n", line);
    }
    p += length + (p[length] == '\n');
  }
  if (rewrite && (fd = open(path, O_WRONLY | O_TRUNC | O_CLOEXEC)) >= 0) {
    if (write(fd, rest, strlen(rest)) < 0) {}
    close(fd);
  }
  return found;
}

static inline void sleep_ms(long ms) {
  struct timespec wait = {ms / 1000, (ms % 1000) * 1000000};
  nanosleep(&wait, NULL);
}

static inline void device_uuid(int device, unsigned char out[16]) {
  memset(out, 0, 16);
  memcpy(out, "coslice-fake", 12);
  out[15] = (unsigned char)device;
}
#endif
