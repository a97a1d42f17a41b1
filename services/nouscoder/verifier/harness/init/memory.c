/* Measures the memory of a run's whole process tree while it runs, because rlimits bound one process and not the sum.
 *
 * A measurement costs a few system calls per process and happens every MEASURE_EVERY_MS, so short tests are never
 * measured. In that time two cores can fill a few hundred MiB more than the limit. Of shared mappings only the largest
 * counts. The proc mount used here shows every process of the namespace, and candidates cannot reach it.
 *
 * gVisor counts only what a process itself has touched, so a mapping whose pages a dead child has touched, or a file in
 * tmpfs, belongs to nobody. There the growth of the whole sandbox counts too: it serves one submission at a time, and a
 * runner pod that exceeds its limit is killed with the sentry. A run may hold what a control group would allow it
 * (sandbox/session.py): its limit, its output, and OWN_BYTES for what the slot does meanwhile. In a dialogue the
 * partner shares the sandbox, so the growth says nothing about one program and does not count.
 */
#include "init.h"

#include <ctype.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const uint64_t OWN_BYTES = 48ull << 20;

void open_meminfo(struct session *s) {
    s->meminfo_fd = -1;
    if (!s->settings->gvisor) return;
    s->meminfo_fd = openat(s->proc_fd, "meminfo", O_RDONLY | O_CLOEXEC);
    if (s->meminfo_fd < 0) fail(s, "the memory of the sandbox cannot be read");
    s->meminfo_fd = move_up(s->meminfo_fd);
}

/* What all private and shared mappings and all tmpfs of this gVisor sandbox hold [bytes], each page once. Freed memory
 * leaves this sum at once, but MemFree later. Returns 0 in other kernels. */
static uint64_t sandbox_bytes(struct session *s) {
    char text[2048];
    if (s->meminfo_fd < 0) return 0;
    ssize_t n = pread(s->meminfo_fd, text, sizeof text - 1, 0);
    text[n > 0 ? n : 0] = 0;
    const char *line = strstr(text, "AnonPages:");
    if (!line) fail(s, "the memory of the sandbox cannot be read");
    return 1024 * strtoull(line + strlen("AnonPages:"), NULL, 10);
}

/* Called last before the process of a run gets to run. The input of the run is then in memory. */
void note_memory_before(struct session *s, struct run *run) { run->before_bytes = sandbox_bytes(s); }

/* By how much the sandbox has grown since the run began, if that is more than the run may hold, else 0 [bytes]. */
static uint64_t excess_growth(struct session *s, struct run *run) {
    uint64_t now = sandbox_bytes(s);
    if (now < run->before_bytes) run->before_bytes = now; /* what an earlier submission held was just freed */
    uint64_t grown = now - run->before_bytes;
    return grown > run->program->memory_bytes + run->program->output_bytes + OWN_BYTES ? grown : 0;
}

/* Private and shared memory of a process [pages]. Returns false when the process has ended. */
static bool read_memory(struct session *s, const char *pid, uint64_t *own, uint64_t *shared) {
    char path[32], text[256];
    snprintf(path, sizeof path, "%.20s/statm", pid);
    int fd = openat(s->proc_fd, path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0) return false;
    text[n] = 0;
    unsigned long long size, resident, common;
    if (sscanf(text, "%llu %llu %llu", &size, &resident, &common) != 3) return false;
    *own = resident > common ? resident - common : 0;
    *shared = common;
    return true;
}

void measure_memory(struct session *s, struct run *run) {
    if (!s->is_measured) {
        s->is_measured = true; /* an executed program shares no pages with init */
        if (!s->program.is_command && !read_memory(s, "1", &s->own_private, &s->own_shared))
            fail(s, "the memory of process 1 cannot be read");
    }
    struct listing processes = list(s, s->proc_fd, ".");
    uint64_t private = 0, shared = 0;
    for (const char *name; (name = next_name(&processes));) {
        uint64_t own, common;
        if (!isdigit((unsigned char)name[0]) || !strcmp(name, "1")) continue;
        if (!read_memory(s, name, &own, &common)) continue;
        if (own > s->own_private) private += own - s->own_private;
        if (common > s->own_shared && common - s->own_shared > shared) shared = common - s->own_shared;
    }
    close(processes.fd);
    uint64_t bytes = (private + shared) * (uint64_t)sysconf(_SC_PAGESIZE);
    uint64_t grown = run->turns ? 0 : excess_growth(s, run);
    if (grown > bytes) bytes = grown;
    if (bytes > run->peak_bytes) run->peak_bytes = bytes;
}
