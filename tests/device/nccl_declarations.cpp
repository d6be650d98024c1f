// SPDX-License-Identifier: Apache-2.0
// Compares src/cuda/nccl.hpp with NVIDIA's nccl.h. A difference is a compile error.

#include <nccl.h>

#include <cstddef>

#include "src/cuda/nccl.hpp"
#include "tests/device/declarations.hpp"

namespace muster::cuda {
namespace {

using Ours = NcclFunctions;
#define SAME(member, function) static_assert(test::Alike<decltype(Ours::member)::Pointer, decltype(&::function)>::value)
SAME(version, ncclGetVersion);
SAME(error_string, ncclGetErrorString);
SAME(unique_id, ncclGetUniqueId);
SAME(init, ncclCommInitRankConfig);
SAME(abort, ncclCommAbort);
SAME(finalize, ncclCommFinalize);
SAME(destroy, ncclCommDestroy);
SAME(async_error, ncclCommGetAsyncError);
SAME(group_start, ncclGroupStart);
SAME(group_end, ncclGroupEnd);
SAME(send, ncclSend);
SAME(receive, ncclRecv);
SAME(all_reduce, ncclAllReduce);
SAME(reduce, ncclReduce);
SAME(broadcast, ncclBroadcast);
SAME(all_gather, ncclAllGather);
SAME(reduce_scatter, ncclReduceScatter);
#undef SAME

static_assert(static_cast<int>(NcclStatus::success) == ncclSuccess);
static_assert(static_cast<int>(NcclStatus::in_progress) == ncclInProgress);
#define SAME_TYPE(type, theirs) static_assert(static_cast<int>(NcclType::type) == theirs)
SAME_TYPE(i8, ncclInt8);
SAME_TYPE(u8, ncclUint8);
SAME_TYPE(i32, ncclInt32);
SAME_TYPE(u32, ncclUint32);
SAME_TYPE(i64, ncclInt64);
SAME_TYPE(u64, ncclUint64);
SAME_TYPE(f16, ncclFloat16);
SAME_TYPE(f32, ncclFloat32);
SAME_TYPE(f64, ncclFloat64);
SAME_TYPE(bf16, ncclBfloat16);
#undef SAME_TYPE
static_assert(static_cast<int>(NcclOp::sum) == ncclSum);
static_assert(static_cast<int>(NcclOp::product) == ncclProd);
static_assert(static_cast<int>(NcclOp::max) == ncclMax);
static_assert(static_cast<int>(NcclOp::min) == ncclMin);
static_assert(static_cast<int>(NcclOp::average) == ncclAvg);
static_assert(sizeof(NcclId) == sizeof(ncclUniqueId));
static_assert(NcclConfig{}.version == NCCL_VERSION(2, 14, 0));
// Older headers have the number only in the initializer.
constexpr ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
static_assert(NcclConfig{}.magic == theirs.magic);
static_assert(offsetof(NcclConfig, size) == offsetof(ncclConfig_t, size));
static_assert(offsetof(NcclConfig, magic) == offsetof(ncclConfig_t, magic));
static_assert(offsetof(NcclConfig, version) == offsetof(ncclConfig_t, version));
static_assert(offsetof(NcclConfig, blocking) == offsetof(ncclConfig_t, blocking));
static_assert(sizeof(NcclConfig) <= sizeof(ncclConfig_t));

}  // namespace
}  // namespace muster::cuda
