/* What init keeps: its own buffers, the folders of a submission, and the files that it sends to the gateway. */
#include "folder.h"
#include "stream.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

/* What init keeps: frames, names, reports. Small things are in buffers of this library, not in the C heap.
 *
 * INVARIANT: a buffer is zero when it is given out and after it has been given back.
 *
 * After a fork, gVisor copies up to 2 MiB of the heap at the first write. The data of this library is far smaller.
 */

enum { NUM_BUFFERS = 8, BUFFER_BYTES = 8192 };

static char buffers[NUM_BUFFERS][BUFFER_BYTES] __attribute__((aligned(16)));
static bool is_taken[NUM_BUFFERS];

/* Zeroed memory. Fails when there is none. */
void *room_for(size_t num_bytes) {
    for (int i = 0; num_bytes <= BUFFER_BYTES && i < NUM_BUFFERS; i++) {
        if (is_taken[i]) continue;
        is_taken[i] = true;
        return buffers[i];
    }
    return allocated(calloc(1, num_bytes ? num_bytes : 1));
}

/* Overwrite the first `num_bytes`, all that were used, and free the memory. */
void give_back(void *memory, size_t num_bytes) {
    if (!memory) return;
    explicit_bzero(memory, num_bytes);
    char *at = memory;
    if (at < buffers[0] || at >= buffers[NUM_BUFFERS])
        free(memory);
    else
        is_taken[(size_t)(at - buffers[0]) / BUFFER_BYTES] = false;
}

/* The same contents with room for twice as many bytes. */
void *doubled(void *memory, size_t num_bytes) {
    void *wider = room_for(2 * num_bytes);
    memcpy(wider, memory, num_bytes);
    give_back(memory, num_bytes);
    return wider;
}

/* /tmp, the working directory of a submission's runs; the files of a run; and /program, which holds the program.
 *
 * INVARIANT: each run gets a new /tmp, with the files that every run of the submission starts with and with its input and
 * output, which have no names. Nothing in it tells how many runs were before: a file system numbers its inodes, and keeps
 * the times of its files. /tmp/NAME is a source, or a link to it in /program/source. What a compiler makes is in
 * /program/made, so it has no name of a user's file.
 *
 * There is one file system a run, because to unmount one takes the kernel 25 to 180 us. That of the first run is kept
 * until a second one begins, if it is small: the submission may have one test only. In gVisor there is a second one
 * for input and output, which /tmp hides: gVisor has no files without names, and no mount there changes its size.
 */

enum { MAX_MADE_FILES = 1000 }; /* with folders; program.c says so */
static const unsigned long FLAGS = MS_NOSUID | MS_NODEV;

static void mount_tmpfs(struct session *s, const char *target, uint64_t num_inodes, const char *more) {
    char options[256];
    snprintf(options, sizeof options, "size=%" PRIu64 ",nr_inodes=%" PRIu64 ",%s", s->settings->tmp_bytes, num_inodes,
             more);
    if (mount("tmpfs", target, "tmpfs", FLAGS, options)) fail(s, "mount tmpfs on %s: %s", target, strerror(errno));
}

void mount_work(struct session *s) {
    if (s->settings->gvisor) {
        if (mount("tmpfs", "/tmp", "tmpfs", FLAGS, "mode=700")) fail(s, "mount tmpfs on /tmp: %s", strerror(errno));
        s->files_dir = open("/tmp", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        if (s->files_dir < 0) fail(s, "/tmp: %s", strerror(errno));
        s->files_dir = move_up(s->files_dir);
    }
    mount_tmpfs(s, "/tmp", s->settings->tmp_inodes, "mode=1777");
}

static void unmount_work(struct session *s) {
    if (s->settings->gvisor) close(s->files_dir);
    for (int i = s->settings->gvisor ? 2 : 1; i; i--)
        if (umount2("/tmp", MNT_DETACH)) fail(s, "umount /tmp: %s", strerror(errno));
}

/* A fresh file without a name, which cannot get one either, so that no data passes from one run to the next. */
int unlinked_file(struct session *s) {
    int fd = -1;
    if (!s->settings->gvisor) {
        fd = open("/tmp", O_TMPFILE | O_EXCL | O_RDWR | O_CLOEXEC, 0666);
    } else {
        fd = openat(s->files_dir, "new", O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0666);
        if (fd >= 0 && unlinkat(s->files_dir, "new", 0)) fail(s, "a file of a run: %s", strerror(errno));
    }
    if (fd < 0) fail(s, "a file of a run: %s", strerror(errno));
    return move_up(fd);
}

/* Make room in /tmp for a large input, beside what the program may write there. */
void widen_work(struct session *s, uint32_t num_input_bytes) {
    enum { SMALL_BYTES = 1 << 20 };
    char options[64];
    if (num_input_bytes <= SMALL_BYTES || s->settings->gvisor) return;
    snprintf(options, sizeof options, "size=%" PRIu64, s->settings->tmp_bytes + num_input_bytes);
    if (mount("tmpfs", "/tmp", "tmpfs", FLAGS | MS_REMOUNT, options)) fail(s, "the size of /tmp: %s", strerror(errno));
}

void write_file(struct session *s, const char *folder, const char *name, mode_t mode, const void *bytes,
                size_t num_bytes) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
    if (fd < 0) fail(s, "%s: %s", path, strerror(errno));
    const char *at = bytes;
    while (num_bytes) {
        ssize_t n = write(fd, at, num_bytes);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) fail(s, "%s: %s", path, strerror(errno));
        at += n;
        num_bytes -= (size_t)n;
    }
    close(fd);
}

/* Whether /tmp holds so much that it must not be kept until the submission ends, while the next one begins. gVisor does
 * not say so. */
bool work_holds_much(void) {
    enum { SMALL_BLOCKS = 256, SMALL_FILES = 64 };
    struct statvfs about;
    return statvfs("/tmp", &about) || !about.f_files || about.f_blocks - about.f_bfree > SMALL_BLOCKS ||
           about.f_files - about.f_ffree > SMALL_FILES;
}

static uint32_t num_sources(const struct session *s) { return s->program.num_files - s->program.num_made; }

static void write_files(struct session *s, const char *folder, uint32_t first, uint32_t end, mode_t mode) {
    for (uint32_t i = first; i < end; i++)
        write_file(s, folder, s->files[i].name, mode, s->files[i].bytes, s->files[i].num_bytes);
}

static void write_sources(struct session *s, const char *folder) {
    write_file(s, folder, s->name, 0444, s->source, s->program.source_bytes);
    write_files(s, folder, 0, num_sources(s), 0444);
}

void place_script(struct session *s) { write_sources(s, "/tmp"); }

/* A folder of the candidate, for its compiler. */
static void make_folder(struct session *s, const char *path) {
    if (mkdir(path, 0755) || (s->settings->two_users && chown(path, CANDIDATE_ID, CANDIDATE_ID)))
        fail(s, "%s: %s", path, strerror(errno));
}

void open_program(struct session *s) {
    /* Beside what the compiler makes: three folders, the source, the files, and one file that is too many. */
    mount_tmpfs(s, "/program", MAX_MADE_FILES + 5 + s->program.num_files, "mode=755");
    make_folder(s, SOURCES);
    make_folder(s, MADE);
    write_sources(s, SOURCES);
    write_files(s, MADE, num_sources(s), s->program.num_files, 0555);
}

static void link_source(struct session *s, const char *name) {
    char target[512], path[512];
    snprintf(target, sizeof target, SOURCES "/%.255s", name);
    snprintf(path, sizeof path, "/tmp/%.255s", name);
    if (symlink(target, path)) fail(s, "%s: %s", path, strerror(errno));
}

void clean(struct session *s) {
    unmount_work(s);
    mount_work(s);
    if (!s->program.is_command) {
        place_script(s);
        return;
    }
    link_source(s, s->name);
    for (uint32_t i = 0; i < num_sources(s); i++) link_source(s, s->files[i].name);
}

struct listing list(struct session *s, int at, const char *folder) {
    struct listing made = {.fd = openat(at, folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC)};
    if (made.fd < 0) fail(s, "%s: %s", folder, strerror(errno));
    return made;
}

/* The next name without "." and "..", NULL at the end. Not by readdir(3), which needs the C heap. */
const char *next_name(struct listing *l) {
    enum { LENGTH_AT = 16, NAME_AT = 19 }; /* in struct linux_dirent64 */
    for (;;) {
        if (l->at >= l->num_bytes) {
            l->at = 0;
            l->num_bytes = syscall(SYS_getdents64, l->fd, l->bytes, sizeof l->bytes);
            if (l->num_bytes <= 0) return NULL;
        }
        const char *entry = l->bytes + l->at;
        uint16_t length;
        memcpy(&length, entry + LENGTH_AT, sizeof length);
        l->at += length;
        if (strcmp(entry + NAME_AT, ".") && strcmp(entry + NAME_AT, "..")) return entry + NAME_AT;
    }
}

/* Whether a folder holds at most MAX_MADE_FILES files, `num_files` counts them, and no folder is deeper than MAX_DEPTH.
 * In gVisor also take them away from the candidate: an owner may change rights and times there on a read-only mount, and
 * the next test could read them. No process of the candidate runs. */
static bool settle(struct session *s, int at, const char *folder, int depth, int *num_files) {
    enum { MAX_DEPTH = 16 };
    struct stat about;
    struct listing files = list(s, at, folder);
    bool settled = depth <= MAX_DEPTH;
    if (s->settings->gvisor && fchown(files.fd, 0, 0)) fail(s, "%s: %s", folder, strerror(errno));
    for (const char *name; settled && (name = next_name(&files));) {
        if (s->settings->gvisor) fchownat(files.fd, name, 0, 0, AT_SYMLINK_NOFOLLOW);
        settled = ++*num_files <= MAX_MADE_FILES;
        bool is_folder = !fstatat(files.fd, name, &about, AT_SYMLINK_NOFOLLOW) && S_ISDIR(about.st_mode);
        if (settled && is_folder) settled = settle(s, files.fd, name, depth + 1, num_files);
    }
    close(files.fd);
    return settled;
}

/* Whether no further file fits into /program. gVisor does not say so. */
bool program_is_full(void) {
    struct statvfs about;
    return !statvfs("/program", &about) && about.f_files && !about.f_ffree;
}

/* Make the compiled program read-only. Returns false when the compiler made too many files. */
bool seal_program(struct session *s) {
    int num_files = -3 - (int)s->program.num_files; /* the two folders, the source and the files are init's own */
    if (!settle(s, AT_FDCWD, "/program", 0, &num_files)) return false;
    if (mount("tmpfs", "/program", "", FLAGS | MS_REMOUNT | MS_RDONLY, NULL))
        fail(s, "/program cannot be made read-only: %s", strerror(errno));
    clean(s);
    return true;
}

/* Files of a run or of a compiler, sent to the gateway.
 *
 * INVARIANT: no other process of the submission is alive, so a file does not change while it is sent. Only regular files
 * are opened, and no link is followed.
 */

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
