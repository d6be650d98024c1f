// SPDX-License-Identifier: Apache-2.0
#pragma once
// What is used of NCCL, declared here: the library is loaded (libnccl.so.2) when ranks on several hosts want it. NCCL
// keeps its binary interface within a major version. Where nccl.h is found, tests/device/nccl_declarations.cpp
// compares.

#include <cstddef>

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

}  // namespace muster::cuda
