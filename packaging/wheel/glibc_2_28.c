// SPDX-License-Identifier: Apache-2.0
// Symbols of glibc versions after 2.28 that libstdc++.a of GCC 12 and Muster refer to. Each linked file gets its own.
// Three of the functions call that of a newer glibc if there is one.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#pragma GCC visibility push(hidden)

// False is always correct: reference counts are then atomic.
char __libc_single_threaded = 0;

uint32_t arc4random(void) {
  uint32_t number = 0;
  ssize_t got = 0;
  do got = getrandom(&number, sizeof number, 0);
  while (got < 0 && errno == EINTR);
  if (got != (ssize_t)sizeof number) abort();
  return number;
}

pid_t gettid(void) {
  return (pid_t)syscall(SYS_gettid);
}

// Muster prints numbers instead of missing names.
const char* strerrorname_np(int number) {
  const char* (*const newer)(int) = (const char* (*)(int))dlsym(RTLD_DEFAULT, "strerrorname_np");
  return newer == NULL ? NULL : newer(number);
}

const char* sigabbrev_np(int number) {
  const char* (*const newer)(int) = (const char* (*)(int))dlsym(RTLD_DEFAULT, "sigabbrev_np");
  return newer == NULL ? NULL : newer(number);
}

int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const struct timespec* end) {
  typedef int (*wait)(pthread_cond_t*, pthread_mutex_t*, clockid_t, const struct timespec*);
  static _Atomic(wait) newer;
  static atomic_int is_looked_up;
  if (!is_looked_up) {
    newer = (wait)dlsym(RTLD_DEFAULT, "pthread_cond_clockwait");
    is_looked_up = 1;
  }
  const wait found = newer;
  if (found != NULL) return found(condition, mutex, clock, end);
  if (clock == CLOCK_REALTIME) return pthread_cond_timedwait(condition, mutex, end);
  // An adjustment of the system clock moves the end of this one wait.
  struct timespec now;
  struct timespec until;
  clock_gettime(clock, &now);
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += end->tv_sec - now.tv_sec;
  until.tv_nsec += end->tv_nsec - now.tv_nsec;
  if (until.tv_nsec < 0) {
    until.tv_nsec += 1000000000;
    --until.tv_sec;
  } else if (until.tv_nsec >= 1000000000) {
    until.tv_nsec -= 1000000000;
    ++until.tv_sec;
  }
  return pthread_cond_timedwait(condition, mutex, &until);
}
