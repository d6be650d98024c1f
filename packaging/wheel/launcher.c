// SPDX-License-Identifier: Apache-2.0
// The command `muster` of a wheel. It finds the package beside its own folder and runs the program in it. A Python
// script would take longer to start than most commands run.
#include <errno.h>
#include <glob.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

// Relative to the folder of this program: an environment or a prefix; Debian's Python; `pip install --target`.
static const char* const places[] = {
    "../lib*/python3*/site-packages/muster/muster",
    "../lib*/python3*/dist-packages/muster/muster",
    "../muster/muster",
};

int main(int count, char** arguments) {
  (void)count;
  char folder[PATH_MAX];
  const ssize_t length = readlink("/proc/self/exe", folder, sizeof folder - 1);
  if (length <= 0) {
    fprintf(stderr, "muster: cannot find its own folder by /proc/self/exe: %s. Mount /proc, or run python3 -m muster\n",
            strerror(errno));
    return 1;
  }
  folder[length] = '\0';
  *strrchr(folder, '/') = '\0';
  for (size_t i = 0; i < sizeof places / sizeof *places; ++i) {
    char pattern[PATH_MAX];
    glob_t found;
    if ((size_t)snprintf(pattern, sizeof pattern, "%s/%s", folder, places[i]) >= sizeof pattern) continue;
    if (glob(pattern, 0, NULL, &found) != 0) continue;
    // The newest of several Pythons. Their packages are equal, because an installer replaces this file, too.
    execv(found.gl_pathv[found.gl_pathc - 1], arguments);
    fprintf(stderr, "muster: cannot run '%s': %s. Install the wheel again\n", found.gl_pathv[found.gl_pathc - 1],
            strerror(errno));
    return 1;
  }
  fprintf(stderr,
          "muster: '%s' has no Python package muster beside it. Run python3 -m muster, or install the wheel again\n",
          folder);
  return 1;
}
