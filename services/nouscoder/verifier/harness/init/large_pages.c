/* Moves the memory of the zygote to large pages, once, before it makes sandboxes.
 *
 * Every sandbox and every test is a fork of the zygote. The kernel copies and removes the map of a large page in one step,
 * also when 4 KiB of it are written later; that of small pages and of files page by page. So a fork with its exit takes a
 * third less CPU time. If the kernel has no large pages to give, nothing is moved: small copies would cost more.
 *
 * INVARIANT: afterwards each address has the same contents and the same protection as before, except that the constants
 * of files are executable too. Nothing is both writable and executable that was not before.
 */
#include "init.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { LARGE_BYTES = 2 << 20, MAX_PARTS = 512, MAPS_BYTES = 1 << 18, ARENA_BYTES = 1 << 20, MOST_BYTES = 64 << 20 };

/* A part of the address space, with its protection after the move. */
struct part {
    char *first, *end;
    int protection;
    bool of_python; /* only Python programs need it */
};

static struct part parts[MAX_PARTS];
static int num_moved;
static uint64_t moved_file_bytes;

uint64_t own_file_bytes(void) { return moved_file_bytes; }

void drop_interpreter(void) {
    for (int i = 0; i < num_moved; i++)
        if (parts[i].of_python) munmap(parts[i].first, (size_t)(parts[i].end - parts[i].first));
    num_moved = 0;
}

/* The interpreter's library and modules, or an arena of its allocator, which maps them in units of ARENA_BYTES. */
static bool is_of_python(const char *name, const char *first, const char *end) {
    bool has_own_data = first <= (char *)parts && (char *)parts < end;
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
        struct part *last_part = num_parts ? &parts[num_parts - 1] : NULL;
        if (last_part && last_part->end == first && last_part->protection == protection &&
            last_part->of_python == found.of_python) {
            last_part->end = last;
            continue;
        }
        if (num_parts == MAX_PARTS) return -1;
        parts[num_parts++] = found;
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

/* Between the copy of a part and its replacement only the stack is written to, which is in no part. */
static bool move(const struct part *part, char *copy) {
    size_t size = (size_t)(part->end - part->first);
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
    for (int i = 0; i < num_parts; i++) size += (size_t)(parts[i].end - parts[i].first);
    size = (size + LARGE_BYTES - 1) / LARGE_BYTES * LARGE_BYTES;
    /* More than that is libraries of preloaded modules: every slot would hold a copy. */
    char *image = size && size <= MOST_BYTES ? large_pages(size) : NULL, *copy = image;
    if (!image) return 0;
    bool moved = true;
    for (int i = 0; moved && i < num_parts; i++) {
        moved = move(&parts[i], copy);
        copy += parts[i].end - parts[i].first;
    }
    munmap(image, size); /* what is left of it */
    if (moved) num_moved = num_parts;
    moved_file_bytes = private_bytes() - held;
    return moved;
}
