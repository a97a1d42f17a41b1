/* Measures the memory of a run's whole process tree while it runs, because rlimits bound one process and not the sum.
 *
 * A measurement costs a few system calls per process and happens every MEASURE_EVERY_MS, so short tests are never
 * measured. In that time two cores can fill a few hundred MiB more than the limit. Of shared mappings only the largest
 * counts. The proc mount used here shows every process of the namespace, and candidates cannot reach it.
 */
#include "init.h"

#include <ctype.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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
    if (bytes > run->peak_bytes) run->peak_bytes = bytes;
}
