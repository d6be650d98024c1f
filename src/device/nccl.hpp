// SPDX-License-Identifier: Apache-2.0
#pragma once
// NCCL: sends and receives between devices of several hosts. Every call returns at once; what goes on is asked for, so
// that a rank that is gone costs a deadline and not the process.
//
// What is used of it is declared here: the library is loaded (libnccl.so.2) when ranks on several hosts want it. NCCL
// keeps its binary interface within a major version. Where nccl.h is found, tests/device/nccl_declarations.cpp
// compares.

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "src/device/driver_api.hpp"

struct ncclComm;

namespace muster::cuda {

using NcclHandle = ::ncclComm*;

/// ncclResult_t.
enum class NcclStatus : int { success = 0, in_progress = 7 };

inline constexpr int nccl_bytes = 1;  // ncclUint8

struct NcclId {
  char bytes[128];
};

/// ncclConfig_t as it began (2.14): later versions take the fields that it does not have as not set.
struct NcclConfig {
  std::size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 0;
};

/// By NCCL's names without "nccl".
struct NcclFunctions {
  NcclStatus (*version)(int*) = nullptr;
  const char* (*error_string)(NcclStatus) = nullptr;
  NcclStatus (*unique_id)(NcclId*) = nullptr;
  NcclStatus (*init)(NcclHandle*, int, NcclId, int, NcclConfig*) = nullptr;
  NcclStatus (*abort)(NcclHandle) = nullptr;
  NcclStatus (*async_error)(NcclHandle, NcclStatus*) = nullptr;
  NcclStatus (*group_start)() = nullptr;
  NcclStatus (*group_end)() = nullptr;
  NcclStatus (*send)(const void*, std::size_t, int, int, NcclHandle, StreamHandle) = nullptr;
  NcclStatus (*receive)(void*, std::size_t, int, int, NcclHandle, StreamHandle) = nullptr;
};

template <class Functions, class Use>
void for_each_nccl_function(Functions& f, const Use& use) {
  use("ncclGetVersion", f.version);
  use("ncclGetErrorString", f.error_string);
  use("ncclGetUniqueId", f.unique_id);
  use("ncclCommInitRankConfig", f.init);
  use("ncclCommAbort", f.abort);
  use("ncclCommGetAsyncError", f.async_error);
  use("ncclGroupStart", f.group_start);
  use("ncclGroupEnd", f.group_end);
  use("ncclSend", f.send);
  use("ncclRecv", f.receive);
}

/// Null, and why in `reason`, where NCCL is not there or is older than 2.14. Thread-safe; loaded once.
const NcclFunctions* find_nccl(std::string* reason = nullptr) noexcept;
/// "2.21.5".
std::string nccl_version();
/// A new one. Throws Error(io).
NcclId make_nccl_id();

/// This rank's end of a communicator. Its end aborts what is under way, without the others.
class Communicator {
 public:
  /// Begins to meet the others; `device` must be current. Throws Error(io).
  Communicator(int size, int rank, const NcclId& id);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  /// Whether what was begun (the meeting, a batch) has come into the stream. Throws Error(io) where it has failed.
  [[nodiscard]] bool is_ready() const;

  /// The sends and receives that `add` makes are one batch. Not in the stream before is_ready(): nothing may be put
  /// there until then.
  template <class Add>
  void batch(const Add& add) {
    begin_batch();
    try {
      add();
    } catch (...) {
      leave_batch();
      throw;
    }
    end_batch();
  }
  void send(DevicePointer data, std::uint64_t bytes, int to, StreamHandle stream);
  void receive(DevicePointer data, std::uint64_t bytes, int from, StreamHandle stream);

 private:
  void begin_batch();
  void end_batch();
  /// A batch that stayed open would swallow all that this thread asks of NCCL later, the program's own calls too.
  void leave_batch() noexcept;
  NcclHandle handle_ = nullptr;
};

/// The communicators of a group: one for each set of ranks that has gone by NCCL, made when it first does.
///
///  1. Each sender tells the first rank the number of the communicator that it has for these ranks; 0: none.
///  2. The first rank, when all have told: where all have the number that it has, that one is used; else it makes a new
///     identity under the next number, and says so to all.
///  3. All but those that keep theirs meet under that identity.
/// So whoever has lost its end by a failure is met anew.
class NcclLists {
 public:
  struct Entry {
    std::uint32_t number = 0;
    std::unique_ptr<Communicator> communicator;
  };
  /// Of these ranks, in this order. The reference is good until clear().
  Entry& of(std::span<const int> ranks) { return entries_[std::vector<int>(ranks.begin(), ranks.end())]; }
  /// An exchange has failed: what is under way is aborted.
  void clear() noexcept { entries_.clear(); }

 private:
  std::map<std::vector<int>, Entry> entries_;
};

}  // namespace muster::cuda
