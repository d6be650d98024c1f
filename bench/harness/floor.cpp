// SPDX-License-Identifier: Apache-2.0
#include "bench/harness/floor.hpp"

#include <fcntl.h>
#include <fmt/core.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <system_error>

#include "bench/harness/copy_kernels.hpp"

namespace bench {

namespace {

using Copy = void (*)(std::byte* target, const std::byte* source, std::size_t bytes);

void copy_memcpy(std::byte* target, const std::byte* source, std::size_t bytes) {
  std::memcpy(target, source, bytes);
}

// Each slot begins on its own page, so that no two senders write to the same page.
std::size_t stride(std::size_t bytes) {
  constexpr std::size_t page = 4096;
  return (bytes + page - 1) / page * page;
}

[[noreturn]] void fail(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

// The new memory of a sender in one repetition.
class FreshMemory {
 public:
  FreshMemory() = default;
  FreshMemory(const FreshMemory&) = delete;
  FreshMemory& operator=(const FreshMemory&) = delete;
  ~FreshMemory() { drop(); }

  void make(std::size_t bytes) {
    descriptor_ = memfd_create("bench-floor", MFD_CLOEXEC);
    if (descriptor_ < 0 || ftruncate(descriptor_, static_cast<off_t>(bytes)) != 0) {
      fail("memfd_create");
    }
  }

  void write(std::span<const std::byte> source) const {
    std::size_t done = 0;
    while (done < source.size()) {
      const ssize_t put = pwrite(descriptor_, source.data() + done, source.size() - done, static_cast<off_t>(done));
      if (put <= 0) {
        fail("pwrite to a memfd");
      }
      done += static_cast<std::size_t>(put);
    }
  }

  void map(std::size_t bytes) {
    void* const at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor_, 0);
    if (at == MAP_FAILED) {
      fail("mmap of a memfd");
    }
    mapped_ = {static_cast<std::byte*>(at), bytes};
  }

  void drop() {
    if (!mapped_.empty()) {
      munmap(mapped_.data(), mapped_.size());
      mapped_ = {};
    }
    if (descriptor_ >= 0) {
      close(descriptor_);
      descriptor_ = -1;
    }
  }

  [[nodiscard]] std::span<std::byte> mapped() const { return mapped_; }
  [[nodiscard]] int descriptor() const { return descriptor_; }

 private:
  int descriptor_ = -1;
  std::span<std::byte> mapped_;
};

constexpr int pid_shift = 32;

// Publishes where the root finds this sender's memory: its pid and descriptor in one word.
void announce(Meeting& meeting, const FreshMemory& memory) {
  meeting.block().number[meeting.rank()] = (std::int64_t{getpid()} << pid_shift) | memory.descriptor();
}

std::uint64_t read_fresh(const Meeting& meeting, std::span<const std::byte> own) {
  std::uint64_t sum = sum_words(own);
  for (int rank = 1; rank < meeting.size(); ++rank) {
    const std::int64_t where = meeting.block().number[rank];
    const std::string path = fmt::format("/proc/{}/fd/{}", where >> pid_shift, where & 0xffffffff);
    const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (descriptor < 0) {
      fail("opening a sender's memory");
    }
    void* const at = mmap(nullptr, own.size(), PROT_READ, MAP_SHARED, descriptor, 0);
    close(descriptor);
    if (at == MAP_FAILED) {
      fail("mapping a sender's memory");
    }
    sum += sum_words({static_cast<const std::byte*>(at), own.size()});
    munmap(at, own.size());
  }
  return sum;
}

}  // namespace

std::size_t floor_memory(int ranks, std::size_t bytes) {
  return static_cast<std::size_t>(ranks - 1) * stride(bytes);
}

std::vector<Contender> floor_contenders(Meeting& meeting, std::span<std::byte> source, std::span<std::byte> area,
                                        const Prefault& prefault) {
  const std::size_t step = stride(source.size());
  // The ranks allocate one after another. Pages that several ranks allocate at once are scattered, and scattered memory
  // is slower to fill.
  for (int rank = 1; rank < meeting.size(); ++rank) {
    if (rank == meeting.rank()) {
      prefault(static_cast<std::size_t>(rank - 1) * step, step);
    }
    meeting.wait();
  }
  if (meeting.is_first()) {
    meeting.block().number[0] = static_cast<std::int64_t>(sum_words(area));
  }
  meeting.wait();

  const auto contender = [&](const char* name, Copy copy) {
    Contender floor;
    floor.name = name;
    floor.move = [&meeting, source, area, step, copy] {
      if (!meeting.is_first()) {
        copy(area.data() + static_cast<std::size_t>(meeting.rank() - 1) * step, source.data(), source.size());
      }
      meeting.wait();
    };
    floor.read = [&meeting, source, area, step] {
      std::uint64_t sum = sum_words(source);
      for (int rank = 1; rank < meeting.size(); ++rank) {
        sum += sum_words(area.subspan(static_cast<std::size_t>(rank - 1) * step, source.size()));
      }
      return sum;
    };
    return floor;
  };
  return {contender("floor-memcpy", copy_memcpy), contender("floor-nontemporal", copy_nontemporal)};
}

std::vector<Contender> fresh_floor_contenders(Meeting& meeting, std::span<std::byte> source) {
  enum class Way { write, mapped, mapped_nontemporal };
  const auto contender = [&](const char* name, Way way) {
    auto memory = std::make_shared<FreshMemory>();
    Contender floor;
    floor.name = name;
    floor.move = [&meeting, source, memory, way] {
      if (!meeting.is_first()) {
        memory->make(source.size());
        if (way == Way::write) {
          memory->write(source);
        } else {
          memory->map(source.size());
          (way == Way::mapped ? copy_memcpy : copy_nontemporal)(memory->mapped().data(), source.data(), source.size());
        }
        announce(meeting, *memory);
      }
      meeting.wait();
    };
    floor.read = [&meeting, source] { return read_fresh(meeting, source); };
    floor.finish = [memory] { memory->drop(); };
    return floor;
  };
  return {contender("fresh-pwrite", Way::write), contender("fresh-mapped", Way::mapped),
          contender("fresh-mapped-nontemporal", Way::mapped_nontemporal)};
}

}  // namespace bench
