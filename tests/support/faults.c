/* Faults of a disk, one at a chosen system call: preloaded into the processes under test.

   A process arms it (tests/support/faults.py) with a folder, an action and a number. Calls that change
   something below the folder are counted; the call of that number fails, is cut short, kills the
   process or interrupts it. `count` writes a line for every call; `record` writes all that a
   power cut could undo (tests/chaos/power.py), and kills after that number of calls. Unarmed, every call goes straight to the kernel.
*/
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum action { NONE, COUNT, RECORD, EIO_BEFORE, EIO_AFTER, FULL, SHORT, KILL_BEFORE, KILL_HALF, KILL_AFTER, INTERRUPT };
static const char *const NAMES[] = {"", "count", "record", "eio", "late", "full", "short", "kill-before", "kill-half", "kill-after", "interrupt"};

static volatile int armed = NONE;
static char folder[PATH_MAX];
static long target, seen;
static int report = -1, fired;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* The call under way: its name, its file, and what a failure leaves of it. */
struct call { const char *name, *path; int action, locked; };

static void put(const void *data, size_t size) {
    while (size) {
        long done = syscall(SYS_write, report, data, size);
        if (done <= 0) return;
        data = (const char *)data + done, size -= done;
    }
}

static void say(const char *form, ...) {
    char line[3 * PATH_MAX];
    va_list values;
    va_start(values, form);
    int size = vsnprintf(line, sizeof line, form, values);
    va_end(values);
    put(line, size);
}

int spile_faults_arm(const char *under, const char *action, long nth, const char *to) {
    report = syscall(SYS_openat, AT_FDCWD, to, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    snprintf(folder, sizeof folder, "%s", under);
    target = nth, seen = 0, fired = 0;
    for (int found = COUNT; found <= INTERRUPT; found++)
        if (!strcmp(action, NAMES[found])) return armed = found, 0;
    return -1;
}

void spile_faults_note(const char *text) {
    if (armed != RECORD) return;
    pthread_mutex_lock(&lock);
    say("N\t%s\n", text);
    pthread_mutex_unlock(&lock);
}

static const char *path_at(char *out, int at, const char *path) {
    char name[64];
    long size = 0;
    if (path && path[0] == '/') return path;
    if (at == AT_FDCWD) snprintf(name, sizeof name, "/proc/self/cwd");
    else snprintf(name, sizeof name, "/proc/self/fd/%d", at);
    size = syscall(SYS_readlinkat, AT_FDCWD, name, out, PATH_MAX - 1);
    if (size < 0) size = 0;
    out[size] = 0;
    if (path) snprintf(out + size, PATH_MAX - size, "/%s", path);
    return out;
}

static int inside(const char *path) {
    size_t size = strlen(folder);
    return !strncmp(path, folder, size) && (path[size] == '/' || !path[size]);
}

static void die(void) {
    syscall(SYS_kill, getpid(), SIGKILL);
    for (;;) pause();
}

/* What is to happen to a call: an action if it is the one, else nothing. */
static struct call begin(const char *name, const char *path) {
    struct call call = {name, path, NONE, 0};
    int action = armed;
    if (action == NONE || !inside(path)) return call;
    if (action == RECORD) {
        pthread_mutex_lock(&lock);
        call.locked = 1, call.action = RECORD, seen++;
        return call;
    }
    long number = __atomic_add_fetch(&seen, 1, __ATOMIC_SEQ_CST);
    if (action == COUNT) say("%s\t%s\n", name, path);
    else if (number == target) {
        say("%s\t%s\n", name, path);
        call.action = action;
        if (action == FULL) fired = 1;
    } else if (fired && strcmp(name, "unlink") && strcmp(name, "sync"))
        call.action = FULL; /* a full disk stays full */
    if (call.action == KILL_BEFORE) die();
    if (call.action == INTERRUPT) syscall(SYS_kill, getpid(), SIGINT);
    return call;
}

static int fails(const struct call *call) {
    if (call->action == EIO_BEFORE) return errno = EIO, 1;
    if (call->action == FULL) return errno = ENOSPC, 1;
    return 0;
}

static long end(struct call *call, long result) {
    int error = errno;
    if (call->action == KILL_AFTER || (call->locked && seen == target)) die();
    if (call->locked) pthread_mutex_unlock(&lock);
    if (call->action == EIO_AFTER && result >= 0) return errno = EIO, -1;
    errno = error;
    return result;
}

static unsigned long inode(int fd, const char *path) {
    struct stat found;
    int missing = path ? lstat(path, &found) : fstat(fd, &found);
    return missing ? 0 : found.st_ino;
}

/* -- writing ------------------------------------------------------------------------------- */

static ssize_t written(int fd, const void *data, size_t size, off_t at) {
    char held[PATH_MAX];
    if (armed == NONE) goto plain;
    struct call call = begin("write", path_at(held, fd, NULL));
    if (call.action == RECORD) {
        struct stat found;
        int append = fcntl(fd, F_GETFL) & O_APPEND;
        off_t from = at >= 0 ? at : append && !fstat(fd, &found) ? found.st_size : lseek(fd, 0, SEEK_CUR);
        long done = at < 0 ? syscall(SYS_write, fd, data, size) : syscall(SYS_pwrite64, fd, data, size, at);
        if (done > 0) say("W\t%lu\t%ld\t%ld\n", inode(fd, NULL), (long)from, done), put(data, done);
        return end(&call, done);
    }
    int half = call.action == SHORT || call.action == KILL_HALF || (call.action == FULL && seen == target);
    if (half && size > 1) {
        long done = at < 0 ? syscall(SYS_write, fd, data, size / 2) : syscall(SYS_pwrite64, fd, data, size / 2, at);
        if (call.action == KILL_HALF) die();
        return done;
    }
    if (call.action == KILL_HALF) die();
    if (fails(&call)) return -1;
    return end(&call, at < 0 ? syscall(SYS_write, fd, data, size) : syscall(SYS_pwrite64, fd, data, size, at));
plain:
    return at < 0 ? syscall(SYS_write, fd, data, size) : syscall(SYS_pwrite64, fd, data, size, at);
}

static ssize_t gathered(int fd, const struct iovec *parts, int count, off_t at) {
    if (armed == NONE)
        return at < 0 ? syscall(SYS_writev, fd, parts, count) : syscall(SYS_pwritev, fd, parts, count, at, 0);
    size_t size = 0, filled = 0;
    for (int i = 0; i < count; i++) size += parts[i].iov_len;
    char *joined = malloc(size ? size : 1);
    for (int i = 0; i < count; filled += parts[i++].iov_len) memcpy(joined + filled, parts[i].iov_base, parts[i].iov_len);
    ssize_t done = written(fd, joined, size, at);
    int error = errno;
    free(joined);
    errno = error;
    return done;
}

ssize_t write(int fd, const void *data, size_t size) { return written(fd, data, size, -1); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { return written(fd, data, size, at); }
ssize_t pwrite64(int fd, const void *data, size_t size, off_t at) { return written(fd, data, size, at); }
ssize_t writev(int fd, const struct iovec *parts, int count) { return gathered(fd, parts, count, -1); }
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t at) { return gathered(fd, parts, count, at); }
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off_t at) { return gathered(fd, parts, count, at); }

static int resized(int fd, off_t size, int grows) {
    char held[PATH_MAX];
    struct stat found;
    struct call call = begin("truncate", path_at(held, fd, NULL));
    if (fails(&call)) return -1;
    long done = grows ? syscall(SYS_fallocate, fd, 0, 0, size) : syscall(SYS_ftruncate, fd, size);
    if (call.action == RECORD && !done && !fstat(fd, &found)) say("T\t%lu\t%ld\n", found.st_ino, (long)found.st_size);
    return end(&call, done);
}

int ftruncate(int fd, off_t size) { return resized(fd, size, 0); }
int ftruncate64(int fd, off_t size) { return resized(fd, size, 0); }
int posix_fallocate(int fd, off_t at, off_t size) { return resized(fd, at + size, 1) ? errno : 0; }
int posix_fallocate64(int fd, off_t at, off_t size) { return resized(fd, at + size, 1) ? errno : 0; }

/* -- making durable ------------------------------------------------------------------------ */

static int synced(int fd, int number) {
    char held[PATH_MAX];
    struct call call = begin("sync", path_at(held, fd, NULL));
    if (fails(&call)) return -1;
    long done = syscall(number, fd);
    if (call.action == RECORD && !done) say("S\t%lu\n", inode(fd, NULL));
    return end(&call, done);
}

int fsync(int fd) { return synced(fd, SYS_fsync); }
int fdatasync(int fd) { return synced(fd, SYS_fdatasync); }

/* -- names ---------------------------------------------------------------------------------- */

static int opened(int at, const char *path, int flags, mode_t mode) {
    char held[PATH_MAX];
    if (armed == NONE || !(flags & (O_CREAT | O_TRUNC)) || (flags & O_TMPFILE) == O_TMPFILE)
        return syscall(SYS_openat, at, path, flags, mode);
    struct call call = begin("create", path_at(held, at, path));
    if (fails(&call)) return -1;
    int there = call.action == RECORD && !faccessat(at, path, F_OK, AT_SYMLINK_NOFOLLOW);
    int fd = syscall(SYS_openat, at, path, flags, mode);
    if (call.action == RECORD && fd >= 0 && !there) say("C\t%lu\t%s\n", inode(fd, NULL), call.path);
    if (call.action == RECORD && fd >= 0 && there && flags & O_TRUNC) say("T\t%lu\t0\n", inode(fd, NULL));
    if (call.action == EIO_AFTER && fd >= 0) close(fd);
    return end(&call, fd);
}

static mode_t mode_of(int flags, va_list values) { return flags & (O_CREAT | O_TMPFILE) ? va_arg(values, mode_t) : 0; }
#define WITH_MODE(call) va_list values; va_start(values, flags); mode_t mode = mode_of(flags, values); va_end(values); return call
int open(const char *path, int flags, ...) { WITH_MODE(opened(AT_FDCWD, path, flags, mode)); }
int open64(const char *path, int flags, ...) { WITH_MODE(opened(AT_FDCWD, path, flags, mode)); }
int openat(int at, const char *path, int flags, ...) { WITH_MODE(opened(at, path, flags, mode)); }
int openat64(int at, const char *path, int flags, ...) { WITH_MODE(opened(at, path, flags, mode)); }
int creat(const char *path, mode_t mode) { return opened(AT_FDCWD, path, O_WRONLY | O_CREAT | O_TRUNC, mode); }

int mkdirat(int at, const char *path, mode_t mode) {
    char held[PATH_MAX];
    struct call call = begin("mkdir", path_at(held, at, path));
    if (fails(&call)) return -1;
    long done = syscall(SYS_mkdirat, at, path, mode);
    if (call.action == RECORD && !done) say("D\t%lu\t%s\n", inode(-1, call.path), call.path);
    return end(&call, done);
}

static int named(const char *kind, int from_at, const char *from, int to_at, const char *to, int flags) {
    char held[PATH_MAX], second[PATH_MAX];
    int links = !strcmp(kind, "link");
    const char *source = path_at(second, from_at, from);
    struct call call = begin(kind, path_at(held, to_at, to));
    if (fails(&call)) return -1;
    long done = links ? syscall(SYS_linkat, from_at, from, to_at, to, flags)
                      : syscall(SYS_renameat2, from_at, from, to_at, to, flags);
    if (call.action == RECORD && !done) say("%s\t%s\t%s\n", links ? "L" : "R", source, call.path);
    return end(&call, done);
}

static int removed(int at, const char *path, int flags) {
    char held[PATH_MAX];
    struct call call = begin("unlink", path_at(held, at, path));
    if (call.action != FULL && fails(&call)) return -1;
    long done = syscall(SYS_unlinkat, at, path, flags);
    if (call.action == RECORD && !done) say("U\t%s\n", call.path);
    return end(&call, done);
}

int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }
int link(const char *from, const char *to) { return named("link", AT_FDCWD, from, AT_FDCWD, to, 0); }
int linkat(int a, const char *from, int b, const char *to, int flags) { return named("link", a, from, b, to, flags); }
int rename(const char *from, const char *to) { return named("rename", AT_FDCWD, from, AT_FDCWD, to, 0); }
int renameat(int a, const char *from, int b, const char *to) { return named("rename", a, from, b, to, 0); }
int renameat2(int a, const char *from, int b, const char *to, unsigned flags) { return named("rename", a, from, b, to, flags); }
int unlink(const char *path) { return removed(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return removed(AT_FDCWD, path, AT_REMOVEDIR); }
int unlinkat(int at, const char *path, int flags) { return removed(at, path, flags); }
