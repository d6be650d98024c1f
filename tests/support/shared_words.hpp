// SPDX-License-Identifier: Apache-2.0
#pragma once
// Counters in memory that a test shares with the ranks that it forks later.

#include <sys/mman.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <new>
#include <stdexcept>

namespace muster::test {

class SharedWords {
 public:
  static constexpr std::size_t count = 64;

  SharedWords() {
    void* memory = ::mmap(nullptr, sizeof(Words), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("no shared memory");
    words_ = new (memory) Words();
  }
  SharedWords(const SharedWords&) = delete;
  SharedWords& operator=(const SharedWords&) = delete;
  ~SharedWords() { ::munmap(words_, sizeof(Words)); }

  std::atomic<std::uint64_t>& operator[](int index) { return words_->at(static_cast<std::size_t>(index)); }

 private:
  using Words = std::array<std::atomic<std::uint64_t>, count>;
  Words* words_;
};

}  // namespace muster::test
