// Preloaded into a process, counts its changes to files below a directory, or its reads too: it
// writes the changes to a log, kills or stops the process at the n-th event, or has it fail. Armed by
// `shim_arm` and `shim_fault`, never by the environment, so that a process that has imported
// everything may fork and arm only its child.
//
// A log line is "<what> <path> <more>", tabs between. `more` is the second path where a name moves,
// the new size where a file is cut, and "<offset> <size> <where>" where it is written: the bytes are
// then in a second log, from `where` on. A change of a file or a name is logged when it is done, a
// sync when it begins: a sync covers what was logged before it.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <dirent.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

// TEAR: half a write, then kill. STOP: SIGSTOP; after SIGCONT the event takes place.
enum { NEVER, KILL, TEAR, FAIL_ONCE, FAIL_FROM, STOP };

static char root[PATH_MAX];
static int log_fd = -1, data_fd = -1;
static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
static int kind, counts_reads, error_number;
static long at;  // 1 is the first event
static atomic_long events;

// Room below the root, in blocks as file systems give it: for a file's bytes, one for a directory.
enum { BLOCK = 4096 };
static long long room = -1;  // bytes; -1: no end of it
static pthread_mutex_t room_lock = PTHREAD_MUTEX_INITIALIZER;

static int log_to(int old, const char *path) {
  if (old >= 0) syscall(SYS_close, old);
  if (!path) return -1;
  return syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
}

void shim_arm(const char *directory, const char *log, const char *data) {
  log_fd = log_to(log_fd, log);
  data_fd = log_to(data_fd, data);
  kind = NEVER;
  counts_reads = 0;
  room = -1;
  atomic_store(&events, 0);
  snprintf(root, sizeof root, "%s", directory);
}

// What happens at the n-th event from now on: of the changes, or of the reads and changes.
void shim_fault(int new_kind, long n, int number, int reads) {
  kind = new_kind;
  at = n;
  error_number = number;
  counts_reads = reads;
  atomic_store(&events, 0);
}

// How many bytes may still be taken below the root; what is freed there can be taken again.
void shim_room(long long bytes) { room = bytes; }

long shim_events(void) { return atomic_load(&events); }

// For the log: a mark of the caller's own, such as that a save was acknowledged.
void shim_mark(const char *text);

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

static void die(void) {
  syscall(SYS_kill, syscall(SYS_getpid), SIGKILL);
  for (;;) pause();
}

// Counts an event. Returns whether it fails; errno says how.
static int event(void) {
  if (kind == TEAR) return 0;
  long n = atomic_fetch_add(&events, 1) + 1;
  if (kind == KILL && n == at) die();
  if (kind == STOP && n == at) syscall(SYS_kill, syscall(SYS_getpid), SIGSTOP);
  if ((kind == FAIL_ONCE && n == at) || (kind == FAIL_FROM && n >= at)) {
    errno = error_number;
    return 1;
  }
  return 0;
}

// A full disk lets files be deleted.
static int event_of_removal(void) { return error_number == ENOSPC && kind > TEAR ? 0 : event(); }

static int read_event(void) { return counts_reads && event(); }

static int is_torn(size_t size) {
  return kind == TEAR && size > 1 && atomic_fetch_add(&events, 1) + 1 == at;
}

static void note(const char *what, const char *path, const char *other) {
  char line[2 * PATH_MAX + 64];
  int saved = errno;
  if (log_fd < 0) return;
  int n = snprintf(line, sizeof line, "%s\t%s\t%s\n", what, path, other);
  syscall(SYS_write, log_fd, line, n);
  errno = saved;
}

void shim_mark(const char *text) { note("mark", text, ""); }

static void note_write(const char *path, off64_t offset, const struct iovec *parts, ssize_t size) {
  char more[96];
  if (log_fd < 0 || size < 0) return;
  int saved = errno;
  pthread_mutex_lock(&log_lock);
  off64_t where = data_fd < 0 ? 0 : syscall(SYS_lseek, data_fd, 0, SEEK_END);
  ssize_t left = size;
  for (; data_fd >= 0 && left > 0; parts++) {
    size_t some = parts->iov_len < (size_t)left ? parts->iov_len : (size_t)left;
    for (size_t done = 0; done < some;)
      done += syscall(SYS_write, data_fd, (char *)parts->iov_base + done, some - done);
    left -= some;
  }
  snprintf(more, sizeof more, "%lld %zd %lld", (long long)offset, size, (long long)where);
  note("write", path, more);
  pthread_mutex_unlock(&log_lock);
  errno = saved;
}

static long long blocks(long long size) { return (size + BLOCK - 1) / BLOCK * BLOCK; }

// What a name holds that nothing else holds.
static long long held_by(int dir, const char *path) {
  struct stat status;
  if (room < 0 || syscall(SYS_newfstatat, dir, path, &status, AT_SYMLINK_NOFOLLOW)) return 0;
  if (S_ISDIR(status.st_mode)) return BLOCK;
  return status.st_nlink == 1 ? blocks(status.st_size) : 0;
}

static void give_back(long long bytes) {
  pthread_mutex_lock(&room_lock);
  if (room >= 0) room += bytes;
  pthread_mutex_unlock(&room_lock);
}

// Takes room, or fails with ENOSPC.
static int take(long long bytes) {
  int full;
  pthread_mutex_lock(&room_lock);
  full = room >= 0 && bytes > room;
  if (room >= 0 && !full) room -= bytes;
  pthread_mutex_unlock(&room_lock);
  if (full) errno = ENOSPC;
  return !full;
}

static long long size_of(int fd) {
  struct stat status;
  return syscall(SYS_fstat, fd, &status) ? 0 : status.st_size;
}

// How much of a write there is room for, which is taken; -1 if for nothing.
static ssize_t fitting(int fd, off64_t from, size_t size) {
  long long end = from + size, held;
  if (room < 0) return size;
  pthread_mutex_lock(&room_lock);
  held = blocks(size_of(fd));
  if (blocks(end) > held + room) end = held + room / BLOCK * BLOCK;
  if (end > from && blocks(end) > held) room -= blocks(end) - held;
  pthread_mutex_unlock(&room_lock);
  if (end > from) return end - from;
  errno = ENOSPC;
  return -1;
}

static int open_file(int dir, const char *path, int flags, mode_t mode) {
  char full[PATH_MAX];
  int changes = flags & (O_CREAT | O_TRUNC);
  if ((changes || counts_reads) && path_at(dir, path, full)) {
    int is_new = (flags & O_CREAT) && syscall(SYS_faccessat, AT_FDCWD, full, F_OK) != 0;
    if (changes ? event() : read_event()) return -1;
    long long cut = flags & O_TRUNC ? held_by(dir, path) : 0;
    int fd = syscall(SYS_openat, dir, path, flags | O_LARGEFILE, mode);
    if (fd >= 0) give_back(cut);
    if (fd >= 0 && is_new) note("new", full, "file");
    if (fd >= 0 && (flags & O_TRUNC)) note("cut", full, "0");
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

static ssize_t write_parts(int fd, const struct iovec *parts, int count, off64_t offset) {
  char path[PATH_MAX];
  int here = offset < 0;
#define DO(parts, count) \
  (here ? syscall(SYS_writev, fd, parts, count) : syscall(SYS_pwritev, fd, parts, count, offset, 0))
  if (fd == log_fd || fd == data_fd || !root[0] || !path_of_fd(fd, path)) return DO(parts, count);
  size_t size = 0;
  for (int i = 0; i < count; i++) size += parts[i].iov_len;
  if (event()) return -1;
  if (is_torn(size)) {
    struct iovec half = {parts[0].iov_base, (parts[0].iov_len + 1) / 2};
    DO(&half, 1);
    die();
  }
  off64_t from = here ? syscall(SYS_lseek, fd, 0, SEEK_CUR) : offset;
  ssize_t fits = fitting(fd, from, size);
  if (fits < 0) return -1;
  struct iovec some[count];
  if ((size_t)fits < size) {  // as much as there is room for, as file systems do
    int used = 0;
    for (ssize_t left = fits; left > 0; used++) {
      some[used] = parts[used];
      if (some[used].iov_len > (size_t)left) some[used].iov_len = left;
      left -= some[used].iov_len;
    }
    parts = some;
    count = used;
  }
  ssize_t n = DO(parts, count);
  note_write(path, from, parts, n);
  return n;
}
ssize_t write(int fd, const void *data, size_t size) {
  struct iovec part = {(void *)data, size};
  return write_parts(fd, &part, 1, -1);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) {
  struct iovec part = {(void *)data, size};
  return write_parts(fd, &part, 1, offset);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
  return pwrite64(fd, data, size, offset);
}
ssize_t writev(int fd, const struct iovec *parts, int count) {
  return write_parts(fd, parts, count, -1);
}
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t offset) {
  return write_parts(fd, parts, count, offset);
}
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset) {
  return write_parts(fd, parts, count, offset);
}
int ftruncate64(int fd, off64_t size) {
  char path[PATH_MAX], text[32];
  if (!root[0] || !path_of_fd(fd, path)) return syscall(SYS_ftruncate, fd, size);
  if (event()) return -1;
  long long more = blocks(size) - blocks(size_of(fd));
  if (more > 0 && !take(more)) return -1;
  int result = syscall(SYS_ftruncate, fd, size);
  if (!result && more < 0) give_back(-more);
  snprintf(text, sizeof text, "%lld", (long long)size);
  if (!result) note("cut", path, text);
  return result;
}
int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }

#define SYNC(call)                              \
  char path[PATH_MAX];                          \
  if (!root[0] || !path_of_fd(fd, path)) return call; \
  if (event()) return -1;                       \
  note("sync", path, "");                       \
  return call;
int fsync(int fd) { SYNC(syscall(SYS_fsync, fd)) }
int fdatasync(int fd) { SYNC(syscall(SYS_fdatasync, fd)) }

static int change_name(const char *what, int dir, const char *path, long call, int flags) {
  char full[PATH_MAX];
  int ours = path_at(dir, path, full);
  int removes = call == SYS_unlinkat;
  if (ours && (removes ? event_of_removal() : event())) return -1;
  long long held = ours && removes ? held_by(dir, path) : 0;
  if (ours && !removes && !take(BLOCK)) return -1;
  int result = syscall(call, dir, path, flags);
  if (ours && removes && !result) give_back(held);
  if (ours && !removes && result) give_back(BLOCK);
  if (ours && !result) note(what, full, call == SYS_mkdirat ? "dir" : "");
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
int remove(const char *path) { return unlink(path) && errno == EISDIR ? rmdir(path) : 0; }

static int move(const char *what, int from, const char *a, int to, const char *b, long call,
                unsigned flags) {
  char x[PATH_MAX], y[PATH_MAX];
  int ours = path_at(from, a, x) | path_at(to, b, y);
  if (ours && event()) return -1;
  long long held = ours && !flags && call == SYS_renameat2 ? held_by(to, b) : 0;
  int result = syscall(call, from, a, to, b, flags);
  if (ours && !result) give_back(held);
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

// Reads. `event` sees them only when they are asked for.

#define READ(call)                              \
  char path[PATH_MAX];                          \
  if (counts_reads && root[0] && path_of_fd(fd, path) && read_event()) return -1; \
  return call;
ssize_t read(int fd, void *to, size_t size) { READ(syscall(SYS_read, fd, to, size)) }
ssize_t pread64(int fd, void *to, size_t size, off64_t offset) {
  READ(syscall(SYS_pread64, fd, to, size, offset))
}
ssize_t pread(int fd, void *to, size_t size, off_t offset) { return pread64(fd, to, size, offset); }
ssize_t readv(int fd, const struct iovec *to, int count) { READ(syscall(SYS_readv, fd, to, count)) }
ssize_t preadv64(int fd, const struct iovec *to, int count, off64_t offset) {
  READ(syscall(SYS_preadv, fd, to, count, offset, 0))
}
ssize_t preadv(int fd, const struct iovec *to, int count, off_t offset) {
  return preadv64(fd, to, count, offset);
}
int fstatat64(int dir, const char *path, struct stat64 *to, int flags) {
  char full[PATH_MAX];
  int ours = path[0] ? path_at(dir, path, full) : path_of_fd(dir, full);
  if (counts_reads && ours && read_event()) return -1;
  return syscall(SYS_newfstatat, dir, path, to, flags);
}
int fstatat(int dir, const char *path, struct stat *to, int flags) {
  return fstatat64(dir, path, (struct stat64 *)to, flags);
}
int stat64(const char *path, struct stat64 *to) { return fstatat64(AT_FDCWD, path, to, 0); }
int stat(const char *path, struct stat *to) { return fstatat(AT_FDCWD, path, to, 0); }
int lstat64(const char *path, struct stat64 *to) {
  return fstatat64(AT_FDCWD, path, to, AT_SYMLINK_NOFOLLOW);
}
int lstat(const char *path, struct stat *to) {
  return fstatat(AT_FDCWD, path, to, AT_SYMLINK_NOFOLLOW);
}
int fstat64(int fd, struct stat64 *to) { return fstatat64(fd, "", to, AT_EMPTY_PATH); }
int fstat(int fd, struct stat *to) { return fstatat(fd, "", to, AT_EMPTY_PATH); }
DIR *opendir(const char *path) {
  static DIR *(*next)(const char *);
  char full[PATH_MAX];
  if (!next) next = dlsym(RTLD_NEXT, "opendir");
  if (counts_reads && path_at(AT_FDCWD, path, full) && read_event()) return NULL;
  return next(path);
}
struct dirent64 *readdir64(DIR *dir) {
  static struct dirent64 *(*next)(DIR *);
  char full[PATH_MAX];
  if (!next) next = dlsym(RTLD_NEXT, "readdir64");
  if (counts_reads && root[0] && path_of_fd(dirfd(dir), full) && read_event()) return NULL;
  return next(dir);
}
