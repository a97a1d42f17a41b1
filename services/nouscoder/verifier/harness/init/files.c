/* Files of a run or of a compiler, sent to the gateway.
 *
 * INVARIANT: no other process of the submission is alive, so a file does not change while it is sent. Only regular files
 * are opened, and no link is followed.
 */
#include "init.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_SENT_FILES = 64 };
static const uint32_t NOT_WHOLE = ~0u;
static const int64_t MAX_SENT_BYTES = 16 << 20;

/* A descriptor of a regular file; -1 for anything else. */
static int open_regular(int folder, const char *name, int64_t *num_bytes) {
    struct stat file;
    int fd = openat(folder, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (fd < 0) return -1;
    if (!fstat(fd, &file) && S_ISREG(file.st_mode)) {
        *num_bytes = (int64_t)file.st_size;
        return fd;
    }
    close(fd);
    return -1;
}

/* The length of each file; -1 for one that is not regular, or too large beside those before it. */
static void measure_files(int folder, char **names, uint32_t num_names, int64_t *lengths) {
    int64_t sum = 0;
    for (uint32_t i = 0; i < num_names; i++) {
        int64_t num_bytes = 0;
        int fd = open_regular(folder, names[i], &num_bytes);
        bool fits = fd >= 0 && num_bytes <= MAX_SENT_BYTES - sum;
        if (fd >= 0) close(fd);
        lengths[i] = fits ? num_bytes : -1;
        sum += fits ? num_bytes : 0;
    }
}

/* Append name and contents of a file. Returns the place after them in the buffer, which is sent whenever it is full. */
static char *put_file(struct session *s, int folder, const char *name, int64_t num_bytes, char *buffer, char *at,
                      size_t size) {
    int64_t again = 0;
    size_t num_name = strlen(name);
    if ((size_t)(buffer + size - at) < num_name + 8) {
        send_bytes(s, buffer, (size_t)(at - buffer));
        at = buffer;
    }
    put_32(&at, (uint32_t)num_name);
    memcpy(at, name, num_name);
    at += num_name;
    put_32(&at, (uint32_t)num_bytes);
    int fd = open_regular(folder, name, &again);
    if (fd < 0 || again != num_bytes) fail(s, "a file changed while it was sent");
    at = buffer + send_file(s, fd, 0, (uint64_t)num_bytes, buffer, (size_t)(at - buffer), size);
    close(fd);
    return at;
}

/* Send a text of at most 2 KB, and those of the named files that are regular, as long as they have at most
 * MAX_SENT_BYTES together. With `whole`, none is sent when one would be missing. */
void send_files(struct session *s, enum kind kind, const char *text, size_t num_text, const char *path, char **names,
                uint32_t num_names, bool whole) {
    static char buffer[1 << 16];
    int64_t lengths[MAX_SENT_FILES];
    bool complete = num_names <= MAX_SENT_FILES;
    if (!complete) num_names = whole ? 0 : MAX_SENT_FILES;
    int folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0) fail(s, "%s: %s", path, strerror(errno));
    measure_files(folder, names, num_names, lengths);
    for (uint32_t i = 0; i < num_names; i++) complete = complete && lengths[i] >= 0;
    bool none = whole && !complete;
    uint32_t num_sent = 0;
    size_t total = 8 + num_text;
    for (uint32_t i = 0; i < num_names && !none; i++) {
        if (lengths[i] < 0) continue;
        num_sent++;
        total += 8 + strlen(names[i]) + (size_t)lengths[i];
    }
    char *at = buffer + put_header(buffer, kind, total);
    put_32(&at, (uint32_t)num_text);
    if (num_text) memcpy(at, text, num_text);
    at += num_text;
    put_32(&at, none ? NOT_WHOLE : num_sent);
    for (uint32_t i = 0; i < num_names && !none; i++)
        if (lengths[i] >= 0) at = put_file(s, folder, names[i], lengths[i], buffer, at, sizeof buffer);
    send_bytes(s, buffer, (size_t)(at - buffer));
    close(folder);
    explicit_bzero(buffer, total + 5 < sizeof buffer ? total + 5 : sizeof buffer);
}
