// SPDX-License-Identifier: Apache-2.0
#pragma once
// NCCL: sends and receives between devices, and collectives of them. Every call returns at once; what goes on is asked
// for, so that a rank that is gone costs a deadline and not the process.
//
// What is used of it is declared here: the library is loaded (libnccl.so.2) when ranks want it. NCCL keeps its binary
// interface within a major version. Where nccl.h is found, tests/device/nccl_declarations.cpp compares.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "muster/sync_group.hpp"
#include "src/device/driver_api.hpp"

struct ncclComm;

namespace muster::cuda {

using NcclHandle = ::ncclComm*;

/// ncclResult_t.
enum class NcclStatus : int { success = 0, in_progress = 7 };

/// ncclDataType_t.
enum class NcclType : int {
  i8 = 0,
  u8 = 1,
  i32 = 2,
  u32 = 3,
  i64 = 4,
  u64 = 5,
  f16 = 6,
  f32 = 7,
  f64 = 8,
  bf16 = 9,
};
/// ncclRedOp_t.
enum class NcclOp : int { sum = 0, product = 1, max = 2, min = 3, average = 4 };
/// What becomes of elements.
struct NcclReduction {
  NcclType type;
  NcclOp op;
  std::uint64_t element_bytes;
};

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
struct NcclFunctions : FunctionTable {
  Function<NcclStatus(int*)> version{*this, "ncclGetVersion"};
  Function<const char*(NcclStatus)> error_string{*this, "ncclGetErrorString"};
  Function<NcclStatus(NcclId*)> unique_id{*this, "ncclGetUniqueId"};
  Function<NcclStatus(NcclHandle*, int, NcclId, int, NcclConfig*)> init{*this, "ncclCommInitRankConfig"};
  Function<NcclStatus(NcclHandle)> abort{*this, "ncclCommAbort"};
  Function<NcclStatus(NcclHandle)> finalize{*this, "ncclCommFinalize"};
  Function<NcclStatus(NcclHandle)> destroy{*this, "ncclCommDestroy"};
  Function<NcclStatus(NcclHandle, NcclStatus*)> async_error{*this, "ncclCommGetAsyncError"};
  Function<NcclStatus()> group_start{*this, "ncclGroupStart"};
  Function<NcclStatus()> group_end{*this, "ncclGroupEnd"};
  Function<NcclStatus(const void*, std::size_t, NcclType, int, NcclHandle, StreamHandle)> send{*this, "ncclSend"};
  Function<NcclStatus(void*, std::size_t, NcclType, int, NcclHandle, StreamHandle)> receive{*this, "ncclRecv"};
  Function<NcclStatus(const void*, void*, std::size_t, NcclType, NcclOp, NcclHandle, StreamHandle)> all_reduce{
      *this, "ncclAllReduce"};
  Function<NcclStatus(const void*, void*, std::size_t, NcclType, NcclOp, int, NcclHandle, StreamHandle)> reduce{
      *this, "ncclReduce"};
  Function<NcclStatus(const void*, void*, std::size_t, NcclType, int, NcclHandle, StreamHandle)> broadcast{
      *this, "ncclBroadcast"};
  Function<NcclStatus(const void*, void*, std::size_t, NcclType, NcclHandle, StreamHandle)> all_gather{*this,
                                                                                                       "ncclAllGather"};
  Function<NcclStatus(const void*, void*, std::size_t, NcclType, NcclOp, NcclHandle, StreamHandle)> reduce_scatter{
      *this, "ncclReduceScatter"};
};

/// Null, and why in `reason`, where NCCL is not there or is older than 2.14. Thread-safe; loaded once.
const NcclFunctions* find_nccl(std::string* reason = nullptr) noexcept;
/// "2.21.5".
std::string nccl_version();
/// A new one. Throws Error(io).
NcclId make_nccl_id();

/// This rank's end of a communicator. Its destructor aborts what is under way, without the others, unless it has been
/// closed.
class Communicator {
 public:
  /// Begins to meet the others; the device must be current. Throws Error(io).
  Communicator(int size, int rank, const NcclId& id);
  ~Communicator();
  Communicator& operator=(Communicator&&) = delete;

  /// Whether what was begun (the meeting, a batch) has come into the stream. Throws Error(io) where it has failed.
  [[nodiscard]] bool is_ready() const;

  /// What `add` asks of this thread's communicators is one batch. Not in the streams before is_ready() of each: nothing
  /// may be put there until then.
  template <class Add>
  static void batch(const Add& add) {
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

  // Of all ranks. `in` and `out` may be the same. `bytes` are those of `in`; of reduce_scatter() those of `out`.

  void all_reduce(DevicePointer in, DevicePointer out, std::uint64_t bytes, const NcclReduction& what,
                  StreamHandle stream);
  void reduce_scatter(DevicePointer in, DevicePointer out, std::uint64_t bytes, const NcclReduction& what,
                      StreamHandle stream);
  /// `out` counts on root.
  void reduce(DevicePointer in, DevicePointer out, std::uint64_t bytes, const NcclReduction& what, int root,
              StreamHandle stream);
  /// `in` counts on root.
  void broadcast(DevicePointer in, DevicePointer out, std::uint64_t bytes, int root, StreamHandle stream);
  void all_gather(DevicePointer in, DevicePointer out, std::uint64_t bytes, StreamHandle stream);

  /// Begins to end it in order: is_ready() says when nothing of it is under way on any rank.
  void begin_close();
  /// After that: its destructor ends it without an abort.
  void note_closed() noexcept { is_closed_ = true; }

 private:
  static void begin_batch();
  static void end_batch();
  /// A batch that stayed open would swallow all that this thread asks of NCCL later, the program's own calls too.
  static void leave_batch() noexcept;
  NcclHandle handle_ = nullptr;
  bool is_closed_ = false;
};

/// Runs what ranks do by NCCL once all have agreed to. Who fails there leaves the others in the middle of it, and NCCL
/// tells them late or never: the failure is the group's, at once. `others` take part. `drop` is called then: it has to
/// abort what is under way, which would never end.
void by_nccl_or_fail(SyncGroup& group, std::span<const int> others, const WaitOptions& options,
                     const std::function<void()>& work, const std::function<void()>& drop);

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
