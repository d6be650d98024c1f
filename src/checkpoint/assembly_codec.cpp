// SPDX-License-Identifier: Apache-2.0
// A process's work as bytes, for the way from the first process to the others. Both are of one build: the version was
// compared when they met.

#include <cstring>
#include <string>
#include <type_traits>

#include "muster/error.hpp"
#include "src/checkpoint/assembly_plan.hpp"

namespace muster {
namespace {

class Writing {
 public:
  template <class T>
  void put(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    const auto part = std::as_bytes(std::span(&value, 1));
    bytes_.insert(bytes_.end(), part.begin(), part.end());
  }
  template <class T>
  void put_all(const std::vector<T>& values) {
    put(static_cast<std::uint64_t>(values.size()));
    for (const T& value : values) put(value);
  }
  std::vector<std::byte> take() { return std::move(bytes_); }

 private:
  std::vector<std::byte> bytes_;
};

class Reading {
 public:
  explicit Reading(std::span<const std::byte> bytes) : bytes_(bytes) {}
  template <class T>
  void get(T& value) {
    if (bytes_.size() < sizeof value) refuse();
    std::memcpy(&value, bytes_.data(), sizeof value);
    bytes_ = bytes_.subspan(sizeof value);
  }
  /// Each has `least` bytes at least: no count makes this allocate more than the message is long.
  std::uint64_t count(std::size_t least) {
    std::uint64_t count = 0;
    get(count);
    if (count > bytes_.size() / least) refuse();
    return count;
  }
  template <class T>
  void get_all(std::vector<T>& values) {
    values.resize(count(sizeof(T)));
    for (T& value : values) get(value);
  }
  void end() const {
    if (!bytes_.empty()) refuse();
  }

 private:
  [[noreturn]] static void refuse() { throw Error(ErrorKind::corrupt, "the work of a process is garbled"); }
  std::span<const std::byte> bytes_;
};

/// All of a step that has a fixed size.
struct StepHead {
  StepKind kind;
  std::uint8_t has_gaps;
  std::uint32_t file;
  std::uint64_t offset;
  std::uint64_t bytes;
  std::uint32_t writer;
  std::uint32_t turn;
  std::uint32_t contributors;
};

}  // namespace

std::vector<std::byte> encode_work(const ProcessWork& work) {
  Writing out;
  out.put(work.turns);
  out.put(work.written);
  out.put(static_cast<std::uint64_t>(work.steps.size()));
  for (const Step& step : work.steps) {
    out.put(StepHead{step.kind, step.has_gaps, step.file, step.offset, step.bytes, step.writer, step.turn,
                     step.contributors});
    out.put_all(step.copies);
    out.put_all(step.senders);
    out.put(static_cast<std::uint64_t>(step.reductions.size()));
    for (const ReduceStep& reduction : step.reductions) {
      out.put(reduction.combine);
      out.put(reduction.dtype);
      out.put(reduction.to);
      out.put(reduction.bytes);
      out.put_all(reduction.from);
    }
  }
  return out.take();
}

ProcessWork decode_work(std::span<const std::byte> bytes) {
  Reading in(bytes);
  ProcessWork work;
  in.get(work.turns);
  in.get(work.written);
  work.steps.resize(in.count(sizeof(StepHead)));
  for (Step& step : work.steps) {
    StepHead head{};
    in.get(head);
    step = {head.kind, head.has_gaps,     head.file, head.offset, head.bytes, head.writer,
            head.turn, head.contributors, {},        {},          {}};
    in.get_all(step.copies);
    in.get_all(step.senders);
    step.reductions.resize(in.count(2));
    for (ReduceStep& reduction : step.reductions) {
      in.get(reduction.combine);
      in.get(reduction.dtype);
      in.get(reduction.to);
      in.get(reduction.bytes);
      in.get_all(reduction.from);
    }
  }
  in.end();
  return work;
}

}  // namespace muster
