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
#include "init.h"

#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/single_threaded.h>
#include <sys/uio.h>
#include <unistd.h>

const struct settings *nouscoder_image; /* in a process that maps the file, else NULL. It must be in no part */
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
    nouscoder_image = settings;
    return 0;
}

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
    if (!nouscoder_image) return;
    uint64_t num_bytes = all_bytes(nouscoder_image);
    void *made = mmap(NULL, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED) return; /* the child ends at once */
    char *at = copy = made;
    for (uint32_t i = 0; i < nouscoder_image->num_parts; i++)
        at = mempcpy(at, nouscoder_image->parts[i].iov_base, nouscoder_image->parts[i].iov_len);
    if (__libc_single_threaded) take_copy();
}

static void in_parent(void) {
    if (copy) munmap(copy, all_bytes(nouscoder_image));
    copy = NULL;
}

static void in_child(void) {
    if (!nouscoder_image) return;
    if (!copy) _exit(1);
    take_copy();
}

void copy_at_forks(struct session *s) {
    if (pthread_atfork(before_fork, in_parent, in_child)) fail(s, "no memory");
}
