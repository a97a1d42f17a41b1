/* The warm interpreter: its memory, and its loop, which makes a sandbox for each submission. */
#include "zygote.h"
#include "folder.h"
#include "stream.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/single_threaded.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

/* Moves the memory of the zygote to large pages, once, before it makes sandboxes.
 *
 * Every sandbox and every test is a fork of the zygote. The kernel copies and removes the map of a large page in one step,
 * also when 4 KiB of it are written later; that of small pages and of files page by page. So a fork with its exit takes a
 * third less CPU time. If the kernel has no large pages to give, nothing is moved: small copies would cost more.
 *
 * INVARIANT: afterwards each address has the same contents and the same protection as before, except that the constants
 * of files are executable too. Nothing is both writable and executable that was not before.
 */

enum { LARGE_BYTES = 2 << 20, MAX_PARTS = 512, MAPS_BYTES = 1 << 18, ARENA_BYTES = 1 << 20, MOST_BYTES = 64 << 20 };

/* A part of the address space, with its protection after the move. */
struct part {
    char *first, *end;
    int protection;
    bool of_python; /* only Python programs need it */
};

static struct part areas[MAX_PARTS];
static int num_moved;
static uint64_t moved_file_bytes;

uint64_t own_file_bytes(void) { return moved_file_bytes; }

void drop_interpreter(void) {
    for (int i = 0; i < num_moved; i++)
        if (areas[i].of_python) munmap(areas[i].first, (size_t)(areas[i].end - areas[i].first));
    num_moved = 0;
}

/* The interpreter's library and modules, or an arena of its allocator, which maps them in units of ARENA_BYTES. */
static bool is_of_python(const char *name, const char *first, const char *end) {
    bool has_own_data = first <= (char *)areas && (char *)areas < end;
    if (!name) return end - first >= ARENA_BYTES && !has_own_data;
    if (*name != '/') return false;
    const char *file = strrchr(name, '/') + 1;
    return !strncmp(file, "libpython", 9) || strstr(name, "/lib-dynload/");
}

/* The text of a file of /proc. Nothing is allocated here, because the list of mappings must stay true. */
static bool read_text(const char *path, char *text, size_t room) {
    size_t used = 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return false;
    for (ssize_t n; used < room - 1 && (n = read(fd, text + used, room - 1 - used)) > 0;) used += (size_t)n;
    close(fd);
    text[used] = 0;
    return used > 0 && used < room - 1;
}

/* The parts to move: the readable private mappings, without the stack and the kernel's own. The constants of a library
 * become executable, so that they are one part with its code. Returns the number of parts, -1 without. */
static int find_parts(void) {
    char text[MAPS_BYTES];
    int num_parts = 0;
    /* A main program that holds the interpreter also holds what libc needs, so it could not be dropped for commands. */
    if (!read_text("/proc/self/maps", text, sizeof text) || !strstr(text, "/libpython")) return -1;
    for (char *line = text, *end; (end = strchr(line, '\n')); line = end + 1) {
        *end = 0;
        char *rights, *name = strpbrk(line, "/[");
        char *first = (char *)strtoull(line, &rights, 16), *last = (char *)strtoull(rights + 1, &rights, 16);
        bool is_special = name && (!strncmp(name, "[stack", 6) || !strncmp(name, "[v", 2));
        if (rights[1] != 'r' || rights[4] != 'p' || is_special) continue;
        bool is_code = rights[3] == 'x' || (name && *name == '/' && rights[2] != 'w');
        int protection = PROT_READ | (rights[2] == 'w' ? PROT_WRITE : 0) | (is_code ? PROT_EXEC : 0);
        struct part found = {first, last, protection, is_of_python(name, first, last)};
        struct part *last_part = num_parts ? &areas[num_parts - 1] : NULL;
        if (last_part && last_part->end == first && last_part->protection == protection &&
            last_part->of_python == found.of_python) {
            last_part->end = last;
            continue;
        }
        if (num_parts == MAX_PARTS) return -1;
        areas[num_parts++] = found;
    }
    return num_parts;
}

/* What this process holds that is no page of a file [bytes]. */
static uint64_t private_bytes(void) {
    char text[128], *at;
    if (!read_text("/proc/self/statm", text, sizeof text)) return 0;
    strtoull(text, &at, 10);
    uint64_t resident = strtoull(at, &at, 10), of_files = strtoull(at, NULL, 10);
    return (resident - of_files) * (uint64_t)sysconf(_SC_PAGESIZE);
}

/* `size` bytes in large pages, which are a multiple of LARGE_BYTES. NULL when the kernel gives fewer than three quarters. */
static char *large_pages(size_t size) {
    char *room = mmap(NULL, size + LARGE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (room == MAP_FAILED) return NULL;
    size_t before = (LARGE_BYTES - (uintptr_t)room % LARGE_BYTES) % LARGE_BYTES;
    char *image = room + before;
    if (before) munmap(room, before);
    munmap(image + size, LARGE_BYTES - before);
    madvise(image, size, MADV_HUGEPAGE);
    uint64_t held = private_bytes();
    for (size_t at = 0; at < size; at += LARGE_BYTES) *(volatile char *)(image + at) = 0; /* a small page, or a large one */
    if (private_bytes() >= held + size / 4 * 3) return image;
    munmap(image, size);
    return NULL;
}

static size_t size_of(const struct part *part) { return (size_t)(part->end - part->first); }

/* Where a part begins in the image, whose first `used` bytes are taken. Parts are packed, but one that spans a whole
 * large page keeps its position in it, so that the page stays one entry of the map until it is written to. */
static size_t place_of(const struct part *part, size_t used) {
    uintptr_t first = (uintptr_t)part->first, page = (first + LARGE_BYTES - 1) / LARGE_BYTES * LARGE_BYTES;
    if (page + LARGE_BYTES > (uintptr_t)part->end) return used;
    return used + (first - used) % LARGE_BYTES;
}

/* Between the copy of a part and its replacement only the stack is written to, which is in no part. */
static bool move(const struct part *part, char *copy) {
    size_t size = size_of(part);
    memcpy(copy, part->first, size);
    if (part->protection & PROT_EXEC) __builtin___clear_cache(copy, copy + size);
    return !mprotect(copy, size, part->protection) &&
           syscall(SYS_mremap, copy, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, part->first) != -1;
}

/* Called in the zygote, which has one thread. Returns whether everything was moved; it works in any case. */
int nouscoder_use_large_pages(void) {
    size_t size = 0;
    uint64_t held = private_bytes();
    int num_parts = find_parts();
    for (int i = 0; i < num_parts; i++) size = place_of(&areas[i], size) + size_of(&areas[i]);
    size = (size + LARGE_BYTES - 1) / LARGE_BYTES * LARGE_BYTES;
    /* More than that is libraries of preloaded modules: every slot would hold a copy. */
    char *image = size && size <= MOST_BYTES ? large_pages(size) : NULL;
    if (!image) return 0;
    bool moved = true;
    size_t at = 0;
    for (int i = 0; moved && i < num_parts; i++) {
        at = place_of(&areas[i], at);
        moved = move(&areas[i], image + at);
        at += size_of(&areas[i]);
    }
    munmap(image, size); /* what is left of it */
    if (moved) num_moved = num_parts;
    moved_file_bytes = private_bytes() - held;
    return moved;
}

/* The memory of a Python candidate in gVisor: one copy of init's, in pages that all tests use one after the other.
 *
 * INVARIANT: when candidate code runs, every byte of the shared file has been overwritten by the memory of this process.
 * No process that maps the file is alive before that, because a run starts only when no other is.
 *
 * After a fork, gVisor copies memory at the first write: 2 MiB at a time, to pages that the host must first allocate and
 * later free. That is nine tenths of the cost of a short test. Copying all of it to pages that exist takes a fifth.
 *
 * The mapping is shared, so a fork of the program itself must give the child a copy. glibc calls the handlers below for
 * every fork(), but not for vfork() and posix_spawn(), whose child shares all memory until it executes a program.
 */

const struct settings *nouscoder_image; /* NULL where no process maps the file. It must be in no part */
static char *copy;                      /* of all parts, between the handlers */

static uint64_t all_bytes(const struct settings *settings) {
    uint64_t sum = 0;
    for (uint32_t i = 0; i < settings->num_parts; i++) sum += settings->parts[i].iov_len;
    return sum;
}

/* Called in a fresh fork. Writes to no memory but the stack, which is no part. */
int own_image(struct session *s) {
    const struct settings *settings = s->settings;
    const struct iovec *parts = settings->parts;
    if (!settings->num_parts) return 0;
    ssize_t num_written = pwritev(settings->image, parts, (int)settings->num_parts, 0);
    if (num_written < 0 || (uint64_t)num_written != all_bytes(settings)) return -1;
    off_t offset = 0;
    for (uint32_t i = 0; i < settings->num_parts; i++) {
        void *made = mmap(parts[i].iov_base, parts[i].iov_len, PROT_READ | PROT_WRITE,
                          MAP_SHARED | MAP_FIXED | MAP_POPULATE, settings->image, offset);
        if (made == MAP_FAILED) return -1;
        offset += (off_t)parts[i].iov_len;
    }
    return 0;
}

/* Whether this process maps the file, which init does not. Neither init nor a candidate notes that after a fork: the
 * first byte that it writes to the data of this library would copy all of it. */
static bool has_image(void) { return nouscoder_image && getpid() != 1; }

/* Put the copy in the place of the file's pages. */
static void take_copy(void) {
    char *at = copy;
    for (uint32_t i = 0; i < nouscoder_image->num_parts; i++) {
        const struct iovec *part = &nouscoder_image->parts[i];
        if (mremap(at, part->iov_len, part->iov_len, MREMAP_MAYMOVE | MREMAP_FIXED, part->iov_base) != part->iov_base)
            _exit(1);
        at += part->iov_len;
    }
    copy = NULL;
    nouscoder_image = NULL;
}

/* A process with one thread takes the copy itself, so that its next forks cost nothing more. With several, another one
 * could write to memory that has just been copied, so the child takes it. */
static void before_fork(void) {
    if (!has_image()) return;
    uint64_t num_bytes = all_bytes(nouscoder_image);
    void *made = mmap(NULL, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *at = copy = made;
    if (made == MAP_FAILED) return; /* the child ends at once */
    for (uint32_t i = 0; i < nouscoder_image->num_parts; i++)
        at = mempcpy(at, nouscoder_image->parts[i].iov_base, nouscoder_image->parts[i].iov_len);
    if (__libc_single_threaded) take_copy();
}

static void in_parent(void) {
    if (!copy) return;
    if (copy != MAP_FAILED) munmap(copy, all_bytes(nouscoder_image));
    copy = NULL;
}

static void in_child(void) {
    if (!copy) return;
    if (copy == MAP_FAILED) _exit(1);
    take_copy();
}

void copy_at_forks(struct session *s) {
    nouscoder_image = s->settings;
    if (pthread_atfork(before_fork, in_parent, in_child)) fail(s, "no memory");
}

/* The loop of the warm interpreter: it makes a sandbox for each submission, and the next one while one is in use.
 *
 * INVARIANT: this process never reads a submission, so no data of one can reach the processes of the next.
 *
 * It is written in C because each page that Python code touches here would be copied after every fork.
 */

/* Of the interpreter that loads this library. */
extern void *PyExc_OSError;
extern void *PyErr_SetFromErrnoWithFilename(void *type, const char *filename);

/* A sandbox. It is set up at once, and in use from `begin` to the end of its submission. */
struct sandbox {
    pid_t pid;
    int orders, report; /* pipes to and from it */
    const char *failed; /* the step that failed, with errno; else NULL */
};

/* Wait until all its processes have ended. Exits if it failed. */
static void reap(const struct sandbox *sandbox) {
    int status;
    while (waitpid(sandbox->pid, &status, 0) < 0)
        if (errno != EINTR) _exit(1);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != EXIT_ENDED)
        _exit(WIFEXITED(status) && WEXITSTATUS(status) == EXIT_STREAM_CLOSED ? 0 : 1);
}

static char read_report(const struct sandbox *sandbox) {
    char report = IS_FRESH;
    ssize_t n;
    while ((n = read(sandbox->report, &report, 1)) < 0 && errno == EINTR) {
    }
    if (n != 1) reap(sandbox);
    return report;
}

/* Give it the stream once it is set up. From then on it also exits if this process is killed. */
static void begin(const struct sandbox *sandbox, char network) {
    read_report(sandbox);
    if (!write_all(sandbox->orders, &network, 1)) reap(sandbox);
    close(sandbox->orders);
}

/* Wait until it has released the stream. Its namespaces may still be shutting down. */
static char await_release(const struct sandbox *sandbox) {
    char network = read_report(sandbox);
    close(sandbox->report);
    return network;
}

static bool write_file_of(pid_t pid, const char *name, const char *text) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/%s", (int)pid, name);
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    bool well = fd >= 0 && write_all(fd, text, strlen(text));
    int number = errno;
    if (fd >= 0) close(fd);
    errno = number;
    return well;
}

/* Map the users of its fresh namespaces. */
static bool admit(const struct settings *settings, pid_t pid) {
    const char *map = settings->id_map;
    return !map || (write_file_of(pid, "setgroups", "deny") && write_file_of(pid, "uid_map", map) &&
                    write_file_of(pid, "gid_map", map));
}

/* Fork into new namespaces; the child is process 1 of a new pid namespace.
 *
 * This bypasses the fork hooks of glibc and the interpreter, so the child must not call abort() or create threads.
 * Processes that the child forks are normal again. The interpreter's hooks would copy a hundred pages (0.4 ms) to reset
 * the locks of other threads. Here there is only one thread, which holds the interpreter lock before and after the fork.
 * `candidate.after_fork` does the part of the hooks that a program can observe. */
static pid_t fork_into(uint64_t namespaces) {
    return (pid_t)syscall(SYS_clone, (long)(namespaces | SIGCHLD), 0L, 0L, 0L, 0L);
}

/* Make a sandbox. Returns the assignment in a candidate's process, else NULL. */
static void *stand_by(const struct settings *settings, struct sandbox *made) {
    int orders[2], report[2];
    *made = (struct sandbox){0};
    if (pipe2(orders, O_CLOEXEC) || pipe2(report, O_CLOEXEC)) {
        made->failed = "pipe";
        return NULL;
    }
    made->pid = fork_into(settings->namespaces);
    if (made->pid == 0) {
        close(orders[1]);
        close(report[0]);
        return nouscoder_init(settings, orders[0], report[1]);
    }
    made->orders = orders[1];
    made->report = report[0];
    if (made->pid < 0)
        made->failed = "clone";
    else if (!admit(settings, made->pid))
        made->failed = "the users of new namespaces";
    close(orders[0]);
    close(report[1]);
    if (!made->failed && !write_all(made->orders, "1", 1)) reap(made);
    return NULL;
}

/* Serve until the stream closes, which ends this process. Returns the assignment in a candidate's process. Returns NULL
 * with a Python exception (OSError) when a step fails. */
void *nouscoder_serve(const struct settings *given) {
    /* Copies: drop_interpreter unmaps the originals, and each process that read them would have a page fault. */
    static struct settings own;
    static struct iovec parts[MAX_PARTS];
    const struct settings *settings = &own;
    own = *given;
    own.num_parts = own.num_parts < MAX_PARTS ? own.num_parts : MAX_PARTS;
    if (own.num_parts) own.parts = memcpy(parts, own.parts, own.num_parts * sizeof *parts);
    struct sandbox last = {0}, current, following;
    char network = IS_FRESH;
    void *assignment = stand_by(settings, &current);
    const char *failed = current.failed;
    while (!assignment && !failed) {
        begin(&current, network);
        assignment = stand_by(settings, &following);
        if (assignment || (failed = following.failed)) break;
        if (last.pid) reap(&last);
        network = await_release(&current);
        if (network == IS_USED && !settings->gvisor && !new_network()) failed = "unshare";
        last = current;
        current = following;
    }
    return assignment ? assignment : PyErr_SetFromErrnoWithFilename(PyExc_OSError, failed);
}
