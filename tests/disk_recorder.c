/* Records what a process does to the files below a directory, in order. Preload it; see tests/power_loss.py.

   RECORD_ROOT is the directory, RECORD_LOG the file that gets the records. A record is a header and two byte strings
   (paths, or a path and data). Flushes are recorded and not carried out: nothing is lost here by leaving them out. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define MOST 65536
#define MAX_PATH 4096

struct header {
    uint8_t op;
    int32_t fd;
    int64_t at;
    uint32_t first, second;
} __attribute__((packed));

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char followed[MOST];
static const char *root;
static size_t root_size;
static int log_fd = -1;

static void begin(void) {
    pthread_mutex_lock(&lock);
    if (log_fd == -1) {
        const char *path = getenv("RECORD_LOG");
        root = getenv("RECORD_ROOT");
        log_fd = -2;
        if (path && root) {
            root_size = strlen(root);
            log_fd = (int)syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        }
    }
}

static long end(long result) {
    int kept = errno;
    pthread_mutex_unlock(&lock);
    errno = kept;
    return result;
}

static void put(char op, int fd, int64_t at, const void *first, size_t m, const void *second, size_t n) {
    int kept = errno;
    struct header header = {(uint8_t)op, fd, at, (uint32_t)m, (uint32_t)n};
    struct iovec pieces[3] = {{&header, sizeof header}, {(void *)first, m}, {(void *)second, n}};
    if (log_fd >= 0 && syscall(SYS_writev, log_fd, pieces, 3) != (long)(sizeof header + m + n)) abort();
    errno = kept;
}

/* The whole path of a name; 0 if it is not below the root. */
static int whole(int dir, const char *name, char *out) {
    char link[64];
    out[0] = 0;
    if (log_fd < 0 || !name) return 0;
    if (name[0] == '/') {
        snprintf(out, MAX_PATH, "%s", name);
    } else {
        snprintf(link, sizeof link, dir == AT_FDCWD ? "/proc/self/cwd" : "/proc/self/fd/%d", dir);
        ssize_t size = syscall(SYS_readlinkat, AT_FDCWD, link, out, MAX_PATH - 1);
        if (size < 0) return 0;
        snprintf(out + size, MAX_PATH - (size_t)size, "/%s", name);
    }
    return !strncmp(out, root, root_size) && (out[root_size] == '/' || !out[root_size]);
}

static int opening(int dir, const char *name, int flags, mode_t mode) {
    char path[MAX_PATH];
    begin();
    int fd = (int)syscall(SYS_openat, dir, name, flags, mode);
    if (fd >= 0 && fd < MOST) {
        followed[fd] = (char)whole(dir, name, path);
        if (followed[fd]) put('o', fd, flags, path, strlen(path), "", 0);
    }
    return (int)end(fd);
}

#define MODE(flags, last) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | __O_TMPFILE)) { \
        va_list rest; \
        va_start(rest, last); \
        mode = va_arg(rest, mode_t); \
        va_end(rest); \
    }

int open(const char *name, int flags, ...) { MODE(flags, flags) return opening(AT_FDCWD, name, flags, mode); }
int open64(const char *name, int flags, ...) { MODE(flags, flags) return opening(AT_FDCWD, name, flags, mode); }
int openat(int dir, const char *name, int flags, ...) { MODE(flags, flags) return opening(dir, name, flags, mode); }
int openat64(int dir, const char *name, int flags, ...) { MODE(flags, flags) return opening(dir, name, flags, mode); }
int creat(const char *name, mode_t mode) { return opening(AT_FDCWD, name, O_WRONLY | O_CREAT | O_TRUNC, mode); }

static int is_followed(int fd) { return fd >= 0 && fd < MOST && followed[fd]; }

int close(int fd) {
    begin();
    if (is_followed(fd)) {
        put('c', fd, 0, "", 0, "", 0);
        followed[fd] = 0;
    }
    return (int)end(syscall(SYS_close, fd));
}

ssize_t write(int fd, const void *data, size_t size) {
    if (!is_followed(fd)) return syscall(SYS_write, fd, data, size);
    begin();
    long done = syscall(SYS_write, fd, data, size);
    if (done > 0) put('w', fd, syscall(SYS_lseek, fd, 0, SEEK_CUR) - done, "", 0, data, (size_t)done);
    return end(done);
}

static ssize_t writing(int fd, const void *data, size_t size, off_t at) {
    begin();
    long done = syscall(SYS_pwrite64, fd, data, size, at);
    if (done > 0 && is_followed(fd)) put('w', fd, at, "", 0, data, (size_t)done);
    return end(done);
}

ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { return writing(fd, data, size, at); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) { return writing(fd, data, size, at); }

static int cutting(int fd, off_t size) {
    begin();
    long done = syscall(SYS_ftruncate, fd, size);
    if (!done && is_followed(fd)) put('t', fd, size, "", 0, "", 0);
    return (int)end(done);
}

int ftruncate(int fd, off_t size) { return cutting(fd, size); }
int ftruncate64(int fd, off64_t size) { return cutting(fd, size); }

static int flushing(int fd) {
    if (!is_followed(fd)) return 0;
    begin();
    put('f', fd, 0, "", 0, "", 0);
    return (int)end(0);
}

int fsync(int fd) { return flushing(fd); }
int fdatasync(int fd) { return flushing(fd); }

static int naming(char op, long done, int from_dir, const char *from, int to_dir, const char *to) {
    char one[MAX_PATH], other[MAX_PATH];
    int is_one = whole(from_dir, from, one), is_other = whole(to_dir, to, other);
    if (!done && (is_one || is_other)) put(op, 0, 0, one, strlen(one), other, strlen(other));
    return (int)end(done);
}

int renameat(int from_dir, const char *from, int to_dir, const char *to) {
    begin();
    return naming('r', syscall(SYS_renameat2, from_dir, from, to_dir, to, 0), from_dir, from, to_dir, to);
}
int rename(const char *from, const char *to) { return renameat(AT_FDCWD, from, AT_FDCWD, to); }

int linkat(int from_dir, const char *from, int to_dir, const char *to, int flags) {
    begin();
    return naming('l', syscall(SYS_linkat, from_dir, from, to_dir, to, flags), from_dir, from, to_dir, to);
}
int link(const char *from, const char *to) { return linkat(AT_FDCWD, from, AT_FDCWD, to, 0); }

int unlinkat(int dir, const char *name, int flags) {
    begin();
    return naming('u', syscall(SYS_unlinkat, dir, name, flags), dir, name, dir, NULL);
}
int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }

int mkdirat(int dir, const char *name, mode_t mode) {
    begin();
    return naming('d', syscall(SYS_mkdirat, dir, name, mode), dir, name, dir, NULL);
}
int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }
