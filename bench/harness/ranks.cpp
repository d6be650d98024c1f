// SPDX-License-Identifier: Apache-2.0
#include "bench/harness/ranks.hpp"

#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <fstream>
#include <new>
#include <string>
#include <system_error>
#include <vector>

namespace bench {

Mapping::Mapping(std::size_t bytes, Kind kind) {
  if (kind == Kind::shared) {
    descriptor_ = memfd_create("bench", MFD_CLOEXEC);
    if (descriptor_ < 0 || ftruncate(descriptor_, static_cast<off_t>(bytes)) != 0) {
      throw std::system_error(errno, std::generic_category(), "bench: shared memory");
    }
  }
  const int flags = kind == Kind::shared ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
  void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, descriptor_, 0);
  if (at == MAP_FAILED) {
    throw std::bad_alloc();
  }
  bytes_ = {static_cast<std::byte*>(at), bytes};
}

Mapping::~Mapping() {
  munmap(bytes_.data(), bytes_.size());
  if (descriptor_ >= 0) {
    close(descriptor_);
  }
}

void Mapping::prefault(std::size_t offset, std::size_t length) const {
  static const std::vector<std::byte> ones(std::size_t{16} << 20, std::byte{1});
  for (std::size_t done = 0; done < length;) {
    const std::size_t piece = std::min(length - done, ones.size());
    const ssize_t put = pwrite(descriptor_, ones.data(), piece, static_cast<off_t>(offset + done));
    if (put <= 0) {
      throw std::system_error(errno, std::generic_category(), "bench: writing into shared memory");
    }
    done += static_cast<std::size_t>(put);
  }
  std::memset(bytes_.data() + offset, 1, length);
}

bool run_ranks(int size, const std::function<void(Meeting&)>& body) {
  const Mapping memory(sizeof(MeetingBlock), Mapping::Kind::shared);
  auto* const block = new (memory.bytes().data()) MeetingBlock{};
  std::fflush(nullptr);

  std::vector<pid_t> ranks;
  const pid_t parent = getpid();
  for (int rank = 0; rank < size; ++rank) {
    const pid_t pid = fork();
    if (pid < 0) {
      std::perror("bench: cannot fork a rank");
      break;
    }
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() != parent) {
        _exit(1);
      }
      int status = 0;
      try {
        Meeting meeting(*block, rank, size);
        body(meeting);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "bench: rank %d: %s\n", rank, error.what());
        status = 1;
      }
      std::fflush(nullptr);
      _exit(status);
    }
    ranks.push_back(pid);
  }

  bool good = static_cast<int>(ranks.size()) == size;
  const auto kill_all = [&ranks] {
    for (const pid_t pid : ranks) {
      kill(pid, SIGKILL);
    }
  };
  if (!good) {
    kill_all();
  }
  while (!ranks.empty()) {
    int status = 0;
    const pid_t ended = wait(&status);
    if (ended < 0) {
      break;
    }
    std::erase(ranks, ended);
    if (status != 0 && good) {
      good = false;
      std::fprintf(stderr, "bench: a rank ended with status %d, signal %d\n", WEXITSTATUS(status),
                   WIFSIGNALED(status) ? WTERMSIG(status) : 0);
      kill_all();
    }
  }
  return good;
}

std::uint64_t available_memory() {
  std::ifstream file("/proc/meminfo");
  std::string key;
  std::uint64_t kib = 0;
  std::string unit;
  while (file >> key >> kib) {
    if (key == "MemAvailable:") {
      return kib << 10;
    }
    std::getline(file, unit);
  }
  return 0;
}

}  // namespace bench
