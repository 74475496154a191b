// Preloaded into a process, counts its changes to files below a directory: it writes them to a log,
// or kills the process before the n-th of them. Armed by `shim_arm`, never by the environment, so
// that a process that has imported everything may fork and arm only its child.
//
// A log line is "<what> <path>", tabs between, and a second path for names that move. A change of a
// file or a name is logged when it is done, a sync when it begins: a sync covers what was logged
// before it.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static char root[PATH_MAX];
static int log_fd = -1;
static long kill_at;  // 1 is the first event; 0: never
static atomic_long events;

void shim_arm(const char *directory, long n, const char *log) {
  if (log_fd >= 0) syscall(SYS_close, log_fd);
  log_fd = -1;
  if (log)
    log_fd = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  kill_at = n;
  atomic_store(&events, 0);
  snprintf(root, sizeof root, "%s", directory);
}

long shim_events(void) { return atomic_load(&events); }

static int below(const char *path) {
  size_t n = strlen(root);
  return n && !strncmp(path, root, n);
}

static int path_of_fd(int fd, char *out) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, out, PATH_MAX - 1);
  if (n < 0) return 0;
  out[n] = 0;
  return below(out);
}

static int path_at(int dir, const char *path, char *out) {
  char base[PATH_MAX] = "";
  if (!root[0]) return 0;
  if (path[0] == '/') {
    snprintf(out, PATH_MAX, "%s", path);
  } else {
    if (dir == AT_FDCWD ? !getcwd(base, sizeof base) : !path_of_fd(dir, base)) return 0;
    if (snprintf(out, PATH_MAX, "%s/%s", base, path) >= PATH_MAX) return 0;
  }
  return below(out);
}

static void event(void) {
  if (atomic_fetch_add(&events, 1) + 1 == kill_at) {
    syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
    for (;;) pause();
  }
}

static void note(const char *what, const char *path, const char *other) {
  char line[2 * PATH_MAX + 64];
  int saved = errno;
  if (log_fd < 0) return;
  int n = snprintf(line, sizeof line, "%s\t%s\t%s\n", what, path, other);
  syscall(SYS_write, log_fd, line, n);
  errno = saved;
}

static int open_file(int dir, const char *path, int flags, mode_t mode) {
  char full[PATH_MAX];
  if ((flags & (O_CREAT | O_TRUNC)) && path_at(dir, path, full)) {
    int is_new = syscall(SYS_faccessat, AT_FDCWD, full, F_OK) != 0;
    event();
    int fd = syscall(SYS_openat, dir, path, flags | O_LARGEFILE, mode);
    if (fd >= 0 && is_new) note("new", full, "");
    if (fd >= 0 && (flags & O_TRUNC)) note("write", full, "");
    return fd;
  }
  return syscall(SYS_openat, dir, path, flags | O_LARGEFILE, mode);
}

#define OPEN(dir)                               \
  mode_t mode = 0;                              \
  if (flags & (O_CREAT | O_TMPFILE)) {          \
    va_list rest;                               \
    va_start(rest, flags);                      \
    mode = va_arg(rest, mode_t);                \
    va_end(rest);                               \
  }                                             \
  return open_file(dir, path, flags, mode);
int open(const char *path, int flags, ...) { OPEN(AT_FDCWD) }
int open64(const char *path, int flags, ...) { OPEN(AT_FDCWD) }
int openat(int dir, const char *path, int flags, ...) { OPEN(dir) }
int openat64(int dir, const char *path, int flags, ...) { OPEN(dir) }

#define WRITE(call)                             \
  char path[PATH_MAX];                          \
  if (fd == log_fd || !root[0] || !path_of_fd(fd, path)) return call; \
  event();                                      \
  ssize_t n = call;                             \
  note("write", path, "");                      \
  return n;
ssize_t write(int fd, const void *data, size_t size) { WRITE(syscall(SYS_write, fd, data, size)) }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
  WRITE(syscall(SYS_pwrite64, fd, data, size, at))
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
  WRITE(syscall(SYS_pwrite64, fd, data, size, at))
}
ssize_t writev(int fd, const struct iovec *data, int count) {
  WRITE(syscall(SYS_writev, fd, data, count))
}
int ftruncate64(int fd, off64_t size) { WRITE(syscall(SYS_ftruncate, fd, size)) }
int ftruncate(int fd, off_t size) { WRITE(syscall(SYS_ftruncate, fd, size)) }

#define SYNC(call)                              \
  char path[PATH_MAX];                          \
  if (!root[0] || !path_of_fd(fd, path)) return call; \
  event();                                      \
  note("sync", path, "");                       \
  return call;
int fsync(int fd) { SYNC(syscall(SYS_fsync, fd)) }
int fdatasync(int fd) { SYNC(syscall(SYS_fdatasync, fd)) }

static int change_name(const char *what, int dir, const char *path, long call, int flags) {
  char full[PATH_MAX];
  int ours = path_at(dir, path, full);
  if (ours) event();
  int result = syscall(call, dir, path, flags);
  if (ours && !result) note(what, full, "");
  return result;
}
int mkdir(const char *path, mode_t mode) {
  return change_name("new", AT_FDCWD, path, SYS_mkdirat, mode);
}
int mkdirat(int dir, const char *path, mode_t mode) {
  return change_name("new", dir, path, SYS_mkdirat, mode);
}
int unlinkat(int dir, const char *path, int flags) {
  return change_name("gone", dir, path, SYS_unlinkat, flags);
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }
int remove(const char *path) { return unlink(path) ? rmdir(path) : 0; }

static int move(const char *what, int from, const char *a, int to, const char *b, long call,
                unsigned flags) {
  char x[PATH_MAX], y[PATH_MAX];
  int ours = path_at(from, a, x) | path_at(to, b, y);
  if (ours) event();
  int result = syscall(call, from, a, to, b, flags);
  if (ours && !result) note(what, x, y);
  return result;
}
int renameat2(int from, const char *a, int to, const char *b, unsigned flags) {
  return move(flags & RENAME_EXCHANGE ? "swap" : "move", from, a, to, b, SYS_renameat2, flags);
}
int renameat(int from, const char *a, int to, const char *b) { return renameat2(from, a, to, b, 0); }
int rename(const char *a, const char *b) { return renameat2(AT_FDCWD, a, AT_FDCWD, b, 0); }
int linkat(int from, const char *a, int to, const char *b, int flags) {
  return move("link", from, a, to, b, SYS_linkat, flags);
}
int link(const char *a, const char *b) { return linkat(AT_FDCWD, a, AT_FDCWD, b, 0); }
