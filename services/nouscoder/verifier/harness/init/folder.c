/* /tmp, the working directory of a submission's runs, and /program, which holds its compiled program.
 *
 * INVARIANT: after `clean`, /tmp holds only the files that every run starts with: main.py, or links to the compiled
 * program. A candidate cannot have changed them, nor made another file: its inode number would tell the next run.
 */
#include "init.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static const unsigned long FLAGS = MS_NOSUID | MS_NODEV;

static void mount_tmpfs(struct session *s, const char *target, const char *more) {
    char options[256];
    snprintf(options, sizeof options, "size=%" PRIu64 ",nr_inodes=%" PRIu64 ",%s", s->settings->tmp_bytes,
             s->settings->tmp_inodes, more);
    if (mount("tmpfs", target, "tmpfs", FLAGS, options)) fail(s, "mount tmpfs on %s: %s", target, strerror(errno));
}

void mount_work(struct session *s) { mount_tmpfs(s, "/tmp", "mode=1777"); }

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

static void write_sources(struct session *s, const char *folder, mode_t mode) {
    write_file(s, folder, s->name, mode, s->source, s->program.source_bytes);
    for (uint32_t i = 0; i < s->program.num_files; i++)
        write_file(s, folder, s->files[i].name, mode, s->files[i].bytes, s->files[i].num_bytes);
}

bool is_source(struct session *s, const char *name) {
    if (!strcmp(name, s->name)) return true;
    for (uint32_t i = 0; i < s->program.num_files; i++)
        if (!strcmp(name, s->files[i].name)) return true;
    return false;
}

/* The next inode number of /tmp, which is then used. 0 without O_TMPFILE (gVisor). */
static uint64_t next_inode(void) {
    struct stat file;
    int fd = open("/tmp", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (fd < 0) return 0;
    bool known = !fstat(fd, &file);
    close(fd);
    return known ? file.st_ino : 0;
}

void place_script(struct session *s) {
    s->num_names = (int)s->program.num_files + 1;
    s->names = room_for((size_t)s->num_names * sizeof *s->names);
    s->names[0] = (char *)s->name;
    for (int i = 1; i < s->num_names; i++) s->names[i] = (char *)s->files[i - 1].name;
    write_sources(s, "/tmp", 0444);
    s->last_inode = s->settings->gvisor ? 0 : next_inode();
}

void open_program(struct session *s) {
    mount_tmpfs(s, "/program", s->settings->two_users ? "mode=755,uid=1000,gid=1000" : "mode=755,uid=0,gid=0");
    write_sources(s, "/program", s->program.has_compiler ? 0444 : 0555); /* the files may be compiled programs */
}

static void fill(struct session *s) {
    if (!s->program.is_command) {
        write_sources(s, "/tmp", 0444);
        return;
    }
    for (int i = 0; i < s->num_names; i++) {
        char target[512], path[512];
        snprintf(target, sizeof target, "/program/%.255s", s->names[i]);
        snprintf(path, sizeof path, "/tmp/%.255s", s->names[i]);
        if (symlink(target, path)) fail(s, "%s: %s", path, strerror(errno));
    }
}

static void remount_work(struct session *s) {
    if (umount2("/tmp", MNT_DETACH)) fail(s, "umount /tmp: %s", strerror(errno));
    mount_work(s);
    fill(s);
    s->last_inode = s->settings->gvisor ? 0 : next_inode();
}

struct listing list(struct session *s, int at, const char *folder) {
    struct listing made = {.fd = openat(at, folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC)};
    if (made.fd < 0) fail(s, "%s: %s", folder, strerror(errno));
    return made;
}

/* The next name without "." and "..", NULL at the end. Not by readdir(3), which needs the C heap (storage.c). */
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

/* Take the files of a folder away from the candidate: gVisor lets an owner change rights and times on a read-only mount,
 * and the next test could read them. No process of the candidate runs. */
static void take_over(struct session *s, int at, const char *folder, int depth) {
    enum { MAX_DEPTH = 16 };
    struct stat about;
    struct listing files = list(s, at, folder);
    if (fchown(files.fd, 0, 0)) fail(s, "%s: %s", folder, strerror(errno));
    for (const char *name; (name = next_name(&files));) {
        fchownat(files.fd, name, 0, 0, AT_SYMLINK_NOFOLLOW);
        bool is_folder = !fstatat(files.fd, name, &about, AT_SYMLINK_NOFOLLOW) && S_ISDIR(about.st_mode);
        if (is_folder && depth < MAX_DEPTH) take_over(s, files.fd, name, depth + 1);
    }
    close(files.fd);
}

void seal_program(struct session *s) {
    if (s->settings->gvisor) take_over(s, AT_FDCWD, "/program", 0);
    if (mount("tmpfs", "/program", "", FLAGS | MS_REMOUNT | MS_RDONLY, NULL))
        fail(s, "/program cannot be made read-only: %s", strerror(errno));
    struct listing files = list(s, AT_FDCWD, "/program");
    for (const char *name; (name = next_name(&files));) {
        s->names = allocated(realloc(s->names, sizeof *s->names * (size_t)(s->num_names + 1)));
        s->names[s->num_names++] = allocated(strdup(name));
    }
    close(files.fd);
    remount_work(s);
}

static bool is_expected(struct session *s, const char *name) {
    for (int i = 0; i < s->num_names; i++)
        if (!strcmp(s->names[i], name)) return true;
    return false;
}

void clean(struct session *s) {
    if (!s->settings->two_users) { /* the candidate has init's user, so it could have changed these files */
        remount_work(s);
        return;
    }
    struct listing files = list(s, AT_FDCWD, "/tmp");
    int num_expected = 0;
    bool other = false;
    for (const char *name; !other && (name = next_name(&files));) {
        if (is_expected(s, name))
            num_expected++;
        else
            other = true;
    }
    close(files.fd);
    uint64_t inode = s->settings->gvisor || other ? 0 : next_inode();
    bool made_others = inode && inode != s->last_inode + 1;
    s->last_inode = inode;
    if (other || made_others || num_expected != s->num_names) remount_work(s);
}
