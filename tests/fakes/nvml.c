/* A stand-in for libnvidia-ml.so.1 with its real ABI: the symbols that autotune calls, scripted by a file.
 *
 * FAKE_NVML names a text file of "KEY VALUE" lines, read anew at every call, so that a test can change it:
 *   init CODE, count N, driver VERSION, and for GPU I: I.uuid, I.name, I.memory_mib, I.used_mib, I.base_mj,
 *   I.counter_mw (the counter's slope), I.since_s (when it was at base_mj; else: when the library was loaded), clock FILE
 *   (holds three doubles: pace, ahead, ceiling; time is CLOCK_MONOTONIC * pace + ahead up to the ceiling), I.power_mw, I.module_mw, I.temp, I.bits, I.mig, I.limit_mw, I.pids (comma separated), I.flat 1,
 *   I.node N (of its CPUs and PCI bridge), I.cpus MASK, I.links A,B (GPUs that NVLink joins it to),
 *   I.error.energy|fields|temp|bits|limit|mig|pids CODE (the NVML return code of that call).
 * Without the variable nvmlInit answers "driver not loaded".
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef int nvmlReturn_t;
typedef struct { int index; } *nvmlDevice_t;
typedef union {
    double dVal; int sVal; unsigned int uiVal; unsigned long ulVal; unsigned long long ullVal; long long sllVal;
    unsigned short usVal;
} nvmlValue_t;
typedef struct {
    unsigned int fieldId, scopeId;
    long long timestamp, latencyUsec;
    unsigned int valueType;
    nvmlReturn_t nvmlReturn;
    nvmlValue_t value;
} nvmlFieldValue_t;
typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct {
    unsigned int pid;
    unsigned long long usedGpuMemory;
    unsigned int gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_t;

enum { OK = 0, UNINITIALIZED = 1, INVALID = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
       DRIVER_NOT_LOADED = 9 };

static struct { int index; } devices[64];
static double started;

static int lookup(const char *key, char *value, size_t size) {
    const char *path = getenv("FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[512];
    size_t length = strlen(key);
    int found = 0;
    if (!file) return 0;
    while (fgets(line, sizeof line, file))
        if (!strncmp(line, key, length) && line[length] == ' ') {
            line[strcspn(line, "\n")] = 0;
            snprintf(value, size, "%s", line + length + 1);
            found = 1;
        }
    fclose(file);
    return found;
}

static double now(void) {
    struct timespec t;
    char path[512];
    double real, told[3] = {1, 0, INFINITY};
    FILE *file = lookup("clock", path, sizeof path) ? fopen(path, "rb") : NULL;
    if (file) {
        if (fread(told, sizeof *told, 3, file) != 3) told[0] = 1, told[1] = 0, told[2] = INFINITY;
        fclose(file);
    }
    clock_gettime(CLOCK_MONOTONIC, &t);
    real = (t.tv_sec + t.tv_nsec / 1e9) * told[0] + told[1];
    return real < told[2] ? real : told[2];
}

static int of(nvmlDevice_t device, const char *what, char *value, size_t size) {
    char key[64];
    snprintf(key, sizeof key, "%d.%s", device->index, what);
    return lookup(key, value, size);
}

static double number(nvmlDevice_t device, const char *what, double otherwise) {
    char value[64];
    return of(device, what, value, sizeof value) ? atof(value) : otherwise;
}

static nvmlReturn_t error(nvmlDevice_t device, const char *call) {
    char key[64];
    snprintf(key, sizeof key, "error.%s", call);
    return (nvmlReturn_t)number(device, key, OK);
}

nvmlReturn_t nvmlInitWithFlags(unsigned int flags) {
    char value[64];
    (void)flags;
    if (!getenv("FAKE_NVML")) return DRIVER_NOT_LOADED;
    if (!started) started = now();
    return lookup("init", value, sizeof value) ? atoi(value) : OK;
}

nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
nvmlReturn_t nvmlShutdown(void) { return OK; }

const char *nvmlErrorString(nvmlReturn_t code) {
    static char text[64];
    switch (code) {
        case NOT_SUPPORTED: return "Not Supported";
        case NOT_FOUND: return "Not Found";
        case DRIVER_NOT_LOADED: return "Driver Not Loaded";
        case 15: return "GPU is lost";
        case 16: return "GPU requires restart";
    }
    snprintf(text, sizeof text, "error %d", code);
    return text;
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count) {
    char value[64];
    *count = lookup("count", value, sizeof value) ? (unsigned int)atoi(value) : 1;
    return OK;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
    unsigned int count;
    nvmlDeviceGetCount_v2(&count);
    if (index >= count || index >= 64) return INVALID;
    devices[index].index = (int)index;
    *device = (nvmlDevice_t)&devices[index];
    return OK;
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length) {
    return of(device, "uuid", uuid, length) ? OK : NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length) {
    return of(device, "name", name, length) ? OK : NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    double total = number(device, "memory_mib", -1);
    if (total < 0) return NOT_SUPPORTED;
    memory->total = (unsigned long long)(total * 1048576);
    memory->used = (unsigned long long)(number(device, "used_mib", 0) * 1048576);
    memory->free = memory->total - memory->used;
    return OK;
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length) {
    return lookup("driver", version, length) ? OK : NOT_SUPPORTED;
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    unsigned int count, i;
    char mine[96];
    nvmlDeviceGetCount_v2(&count);
    for (i = 0; i < count; i++)
        if (nvmlDeviceGetHandleByIndex_v2(i, device) == OK && nvmlDeviceGetUUID(*device, mine, sizeof mine) == OK
            && !strcmp(mine, uuid))
            return OK;
    return NOT_FOUND;
}

nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending) {
    nvmlReturn_t code = error(device, "mig");
    *current = *pending = (unsigned int)number(device, "mig", 0);
    return code;
}

nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t device, unsigned long long *energy) {
    nvmlReturn_t code = error(device, "energy");
    double elapsed = number(device, "flat", 0) ? 0 : now() - number(device, "since_s", started);
    if (code == OK)
        *energy = (unsigned long long)(number(device, "base_mj", 1e6) + elapsed * number(device, "counter_mw", 3e5));
    return code;
}

nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values) {
    nvmlReturn_t code = error(device, "fields");
    int i;
    for (i = 0; i < count; i++) {
        double power = number(device, values[i].scopeId == 1 ? "module_mw" : "power_mw", -1);
        values[i].valueType = 1;
        values[i].timestamp = (long long)(now() * 1e6);
        values[i].nvmlReturn = values[i].fieldId == 186 && values[i].scopeId < 2 && power >= 0 ? OK : NOT_SUPPORTED;
        values[i].value.ullVal = 0;
        values[i].value.uiVal = power > 0 ? (unsigned int)power : 0;
    }
    return code;
}

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, int sensor, unsigned int *degrees) {
    (void)sensor;
    *degrees = (unsigned int)number(device, "temp", 50);
    return error(device, "temp");
}

nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, unsigned long long *bits) {
    *bits = (unsigned long long)number(device, "bits", 0);
    return error(device, "bits");
}

nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t device, unsigned int *limit) {
    *limit = (unsigned int)number(device, "limit_mw", 7e5);
    return error(device, "limit");
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index) {
    *index = (unsigned int)device->index;
    return OK;
}

nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t a, nvmlDevice_t b, int *level) {
    char value[64];
    if (!of(a, "node", value, sizeof value)) return NOT_SUPPORTED;
    *level = number(a, "node", 0) == number(b, "node", 0) ? 30 : 50;
    return OK;
}

nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t a, nvmlDevice_t b, int kind, int *status) {
    char list[256] = "", *part;
    if (kind != 2 || !of(a, "links", list, sizeof list)) return NOT_SUPPORTED;
    *status = 5;
    for (part = strtok(list, ","); part; part = strtok(NULL, ","))
        if (atoi(part) == b->index) *status = 0;
    return OK;
}

nvmlReturn_t nvmlDeviceGetCpuAffinity(nvmlDevice_t device, unsigned int words, unsigned long *set) {
    char value[64];
    if (!of(device, "cpus", value, sizeof value)) return NOT_SUPPORTED;
    memset(set, 0, words * sizeof *set);
    set[0] = strtoul(value, NULL, 0);
    return OK;
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count,
                                                     nvmlProcessInfo_t *processes) {
    nvmlReturn_t code = error(device, "pids");
    char list[256] = "", *part;
    unsigned int n = 0, room = processes ? *count : 0;
    if (code != OK) return code;
    of(device, "pids", list, sizeof list);
    for (part = strtok(list, ","); part; part = strtok(NULL, ",")) {
        if (n < room) {
            memset(&processes[n], 0, sizeof processes[n]);
            processes[n].pid = (unsigned int)atoi(part);
        }
        n++;
    }
    *count = n;
    return n > room ? INSUFFICIENT_SIZE : OK;
}
