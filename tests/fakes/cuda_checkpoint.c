/* A fake cuda-checkpoint binary over the fake libcuda: the flags and words of the real one. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern int cuInit(unsigned), cuCheckpointProcessGetState(int, int *), cuCheckpointProcessGetRestoreThreadId(int, int *),
    cuCheckpointProcessLock(int, void *), cuCheckpointProcessCheckpoint(int, void *),
    cuCheckpointProcessRestore(int, void *), cuCheckpointProcessUnlock(int, void *),
    cuGetErrorString(int, const char **);

struct lock_args { unsigned timeout_ms, reserved; unsigned long long rest[7]; };
struct gpu_pair { unsigned char from[16], to[16]; };
struct restore_args { struct gpu_pair *pairs; unsigned count; char rest[52]; };

static int read_uuid(const char *text, unsigned char out[16]) {
  if (strncmp(text, "GPU-", 4) == 0) text += 4;
  for (int i = 0; i < 16; i++) {
    unsigned byte;
    if (*text == '-') text++;
    if (sscanf(text, "%2x", &byte) != 1) return 0;
    out[i] = (unsigned char)byte;
    text += 2;
  }
  return 1;
}

int main(int argc, char **argv) {
  const char *action = NULL, *map = NULL;
  int pid = 0, timeout = 0, state, tid, result;
  for (int i = 1; i < argc; i++) {
    const char *value = i + 1 < argc ? argv[i + 1] : "";
    if (!strcmp(argv[i], "--get-state")) action = "state";
    else if (!strcmp(argv[i], "--get-restore-tid")) action = "tid";
    else if (!strcmp(argv[i], "--action")) action = value, i++;
    else if (!strcmp(argv[i], "--pid")) pid = atoi(value), i++;
    else if (!strcmp(argv[i], "--timeout")) timeout = atoi(value), i++;
    else if (!strcmp(argv[i], "--device-map")) map = value, i++;
    else return fprintf(stderr, "unknown option %s\n", argv[i]), 2;
  }
  if (!action || !pid) return fprintf(stderr, "usage: --action A --pid P | --get-state --pid P\n"), 2;
  if ((result = cuInit(0))) goto failed;
  if (!strcmp(action, "state")) {
    static const char *names[] = {"running", "locked", "checkpointed", "failed"};
    if (!(result = cuCheckpointProcessGetState(pid, &state))) puts(names[state]);
  } else if (!strcmp(action, "tid")) {
    if (!(result = cuCheckpointProcessGetRestoreThreadId(pid, &tid))) printf("%d\n", tid);
  } else if (!strcmp(action, "lock")) {
    struct lock_args args = {.timeout_ms = (unsigned)timeout};
    result = cuCheckpointProcessLock(pid, &args);
  } else if (!strcmp(action, "checkpoint")) {
    result = cuCheckpointProcessCheckpoint(pid, NULL);
  } else if (!strcmp(action, "restore")) {
    struct gpu_pair pairs[16];
    struct restore_args args = {.pairs = pairs};
    for (char *part = map ? strtok(strdup(map), ",") : NULL; part; part = strtok(NULL, ",")) {
      char *equals = strchr(part, '=');
      if (!equals || args.count == 16) return fprintf(stderr, "malformed device map\n"), 2;
      *equals = 0;
      if (!read_uuid(part, pairs[args.count].from) || !read_uuid(equals + 1, pairs[args.count].to))
        return fprintf(stderr, "malformed device map\n"), 2;
      args.count++;
    }
    result = cuCheckpointProcessRestore(pid, &args);
  } else if (!strcmp(action, "unlock")) {
    result = cuCheckpointProcessUnlock(pid, NULL);
  } else {
    return fprintf(stderr, "unknown action %s\n", action), 2;
  }
  if (!result) return 0;
failed:;
  const char *text = "unrecognized error";
  cuGetErrorString(result, &text);
  fprintf(stderr, "Could not %s process %d: \"%s\"\n", action, pid, text);
  return 1;
}
