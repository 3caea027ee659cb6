#include "launcher.h"
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void (*on_failure)(int error, const char *text);

void fail(const char *format, ...) {
    int error = errno;
    char text[896];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    on_failure(error, text);
    abort();
}

void fail_fs(int context, const char *what) {
    int error = errno;
    char reason[512];
    ssize_t length = read(context, reason, sizeof reason - 1);
    reason[length > 0 ? length : 0] = 0;
    errno = error;
    fail("%s%s%s", what, *reason ? ": " : "", reason);
}

void write_file(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0) fail("open %s", path);
    if (write(fd, text, strlen(text)) < 0) fail("write %s", path);
    close(fd);
}

bool try_write(const char *path, const char *text) {
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    bool done = fd >= 0 && write(fd, text, strlen(text)) >= 0;
    if (fd >= 0) close(fd);
    return done;
}
