// SPDX-License-Identifier: Apache-2.0
#pragma once
// NCCL: sends, receives and collectives between devices. Every call returns at once and its state is polled, so that a
// dead rank causes a timeout instead of a hang.
//
// The part of NCCL that Muster uses is declared here. The library (libnccl.so.2) is loaded when ranks need it. NCCL
// keeps its binary interface within a major version. If nccl.h is available, tests/device/nccl_declarations.cpp
// compares these declarations with it.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "muster/group.hpp"
#include "src/cuda/driver_api.hpp"

struct ncclComm;

namespace muster::cuda {

using NcclHandle = ::ncclComm*;

/// ncclResult_t
enum class NcclStatus : int { success = 0, in_progress = 7 };

/// ncclDataType_t
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
/// ncclRedOp_t
enum class NcclOp : int { sum = 0, product = 1, max = 2, min = 3, average = 4 };
/// How NCCL reduces elements.
struct NcclReduction {
  NcclType type;
  NcclOp op;
  std::uint64_t element_bytes;
};

struct NcclId {
  char bytes[128];
};

/// ncclConfig_t in its first version (2.14). Later versions treat the fields that it does not have as unset.
struct NcclConfig {
  std::size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 0;
};

/// The functions of NCCL, named without their prefix "nccl".
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

/// Returns null, and sets `reason`, if NCCL is missing or older than 2.14. Thread-safe. The library is loaded once.
const NcclFunctions* find_nccl(std::string* reason = nullptr) noexcept;
/// Returns a version such as "2.21.5".
std::string nccl_version();
/// Returns a new ID. Throws Error(io).
NcclId make_nccl_id();

/// This rank's end of a communicator. Unless it has been closed, its destructor aborts the work in progress without the
/// other ranks.
class Communicator {
 public:
  /// Begins to connect to the other ranks. The device must be current. Throws Error(io).
  Communicator(int size, int rank, const NcclId& id);
  ~Communicator();
  Communicator& operator=(Communicator&&) = delete;

  /// Returns whether the last operation (the connection, a batch) is in the stream. Throws Error(io) if it has failed.
  [[nodiscard]] bool is_ready() const;

  /// Makes one batch of all calls by `add` to communicators of this thread. The batch is in the streams when is_ready()
  /// returns true for each communicator. Nothing else may be put into the streams before.
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

  // Collectives over all ranks. `in` and `out` may be the same. `bytes` is the size of `in`; for reduce_scatter(), of
  // `out`.

  void all_reduce(DevicePointer in, DevicePointer out, std::uint64_t bytes, const NcclReduction& what,
                  StreamHandle stream);
  void reduce_scatter(DevicePointer in, DevicePointer out, std::uint64_t bytes, const NcclReduction& what,
                      StreamHandle stream);
  /// `out` is used only on the root.
  void reduce(DevicePointer in, DevicePointer out, std::uint64_t bytes, const NcclReduction& what, int root,
              StreamHandle stream);
  /// `in` is used only on the root.
  void broadcast(DevicePointer in, DevicePointer out, std::uint64_t bytes, int root, StreamHandle stream);
  void all_gather(DevicePointer in, DevicePointer out, std::uint64_t bytes, StreamHandle stream);

  /// Begins an orderly end. is_ready() returns true when no rank has work in progress.
  void begin_close();
  /// Called after the orderly end: the destructor then does not abort.
  void note_closed() noexcept { is_closed_ = true; }

 private:
  static void begin_batch();
  static void end_batch();
  /// Ends an open batch. Otherwise it would collect all later NCCL calls of this thread, including those of the
  /// program.
  static void leave_batch() noexcept;
  NcclHandle handle_ = nullptr;
  bool is_closed_ = false;
};

/// Runs NCCL operations after all ranks have agreed to them. If a rank fails here, the other ranks wait in the middle
/// of the operation, and NCCL reports that late or never. So the group fails at once. `others` take part. After a
/// failure `drop` is called: it must abort the work in progress, which would never end.
void by_nccl_or_fail(Group& group, std::span<const int> others, const WaitOptions& options,
                     const std::function<void()>& work, const std::function<void()>& drop);

/// The communicators of a group: one for each set of ranks that has used NCCL, created at the first use.
///
///  1. Each sender sends the root the number of its communicator for these ranks, or 0 if it has none.
///  2. The root compares the numbers of all ranks. If all have the root's number, that communicator is used. Otherwise
///     the root makes a new NCCL ID with the next number, and sends it to all ranks.
///  3. All ranks whose communicator is not kept create a new one with that ID.
/// So ranks that have lost their end after a failure are connected again.
class NcclLists {
 public:
  struct NcclEntry {
    std::uint32_t number = 0;
    std::unique_ptr<Communicator> communicator;
  };
  /// Returns the entry for these ranks, in this order. The reference is valid until clear().
  NcclEntry& of(std::span<const int> ranks) { return entries_[std::vector<int>(ranks.begin(), ranks.end())]; }
  /// Called when an exchange has failed: aborts the work in progress.
  void clear() noexcept { entries_.clear(); }

 private:
  std::map<std::vector<int>, NcclEntry> entries_;
};

}  // namespace muster::cuda
