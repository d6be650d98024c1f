// SPDX-License-Identifier: Apache-2.0
// Decisions of the device route that need no device: the method by which a sender's tensors reach the root's device,
// and the strides that a device can copy.

#include "doctest/doctest.h"
#include "muster/cuda.hpp"
#include "src/cuda/copy_queue.hpp"
#include "src/cuda/transfer_method.hpp"
#include "tests/support/thrown.hpp"

using namespace muster;
using namespace muster::cuda;

namespace {

/// A rank that could use every method.
DeviceFacts able(std::uint64_t device) {
  DeviceFacts facts;
  facts.is_known = facts.has_tensors = facts.is_exportable = facts.is_contiguous = facts.has_nccl = true;
  facts.destination = Destination::device;
  facts.device = device;
  return facts;
}

DeviceFacts here(std::uint64_t device) {
  DeviceFacts facts = able(device);
  facts.sees_first = true;
  return facts;
}

using Ways = std::vector<TransferMethod>;

TensorView strided(DType dtype, Shape shape, Strides strides) {
  return {dtype, std::move(shape), reinterpret_cast<const void*>(0x1000), std::move(strides), {Device::Kind::cuda, 0}};
}

}  // namespace

TEST_CASE("facts are restored from a record") {
  for (unsigned bits = 0; bits < 128; ++bits) {
    for (const TransferMethod forced :
         {TransferMethod::nothing, TransferMethod::staging, TransferMethod::ipc, TransferMethod::nccl}) {
      DeviceFacts facts;
      facts.is_known = (bits & 1) != 0;
      facts.destination = (bits & 2) != 0 ? Destination::device : Destination::host;
      facts.has_tensors = (bits & 4) != 0;
      facts.sees_first = (bits & 8) != 0;
      facts.is_exportable = (bits & 16) != 0;
      facts.is_contiguous = (bits & 32) != 0;
      facts.has_nccl = (bits & 64) != 0;
      facts.forced = forced;
      facts.device = 0xfedcba987654;
      gather::ExchangeRecord record;
      put_facts(facts, record);
      CHECK(get_facts(record) == facts);
    }
  }
  CHECK(get_facts(gather::ExchangeRecord{}) == DeviceFacts{});
}

TEST_CASE("tensors whose destination is the host are staged, whatever else is possible") {
  std::vector<DeviceFacts> facts{able(1), here(2), able(3)};
  for (DeviceFacts& each : facts) each.destination = Destination::host;
  CHECK(choose_ways(facts) == Ways{TransferMethod::nothing, TransferMethod::staging, TransferMethod::staging});
}

TEST_CASE("ranks without tensors use no method, and do not affect the others") {
  DeviceFacts nobody;
  CHECK(choose_ways(std::vector{nobody, nobody}) == Ways{TransferMethod::nothing, TransferMethod::nothing});
  CHECK(choose_ways(std::vector{able(1), nobody, here(2)}) ==
        Ways{TransferMethod::nothing, TransferMethod::nothing, TransferMethod::ipc});
  // The root has no facts: IPC is tried, and NCCL is not used.
  CHECK(choose_ways(std::vector{nobody, here(2), able(3)}) ==
        Ways{TransferMethod::nothing, TransferMethod::ipc, TransferMethod::staging});
}

TEST_CASE("ranks on the root's host use IPC, also on one device") {
  CHECK(choose_ways(std::vector{able(1), here(1), here(1)}) ==
        Ways{TransferMethod::nothing, TransferMethod::ipc, TransferMethod::ipc});
  DeviceFacts pool = here(2);
  pool.is_exportable = false;
  CHECK(choose_ways(std::vector{able(1), pool, here(3)}) ==
        Ways{TransferMethod::nothing, TransferMethod::staging, TransferMethod::ipc});
}

TEST_CASE("ranks on other hosts use NCCL if all have it and a separate device") {
  CHECK(choose_ways(std::vector{able(1), here(1), able(2), able(3)}) ==
        Ways{TransferMethod::nothing, TransferMethod::ipc, TransferMethod::nccl, TransferMethod::nccl});
  // Two ranks on one device, which NCCL refuses.
  CHECK(choose_ways(std::vector{able(1), able(2), able(2)}) ==
        Ways{TransferMethod::nothing, TransferMethod::staging, TransferMethod::staging});
  CHECK(choose_ways(std::vector{able(2), able(2)}) == Ways{TransferMethod::nothing, TransferMethod::staging});
  for (const bool has_nccl : {false, true}) {
    std::vector<DeviceFacts> facts{able(1), able(2), able(3)};
    facts[2].has_nccl = has_nccl;
    facts[2].is_contiguous = !has_nccl;
    CHECK(choose_ways(facts) == Ways{TransferMethod::nothing, TransferMethod::staging, TransferMethod::staging});
  }
  std::vector<DeviceFacts> facts{able(1), able(2)};
  facts[0].has_nccl = false;
  CHECK(choose_ways(facts) == Ways{TransferMethod::nothing, TransferMethod::staging});
}

TEST_CASE("a forced method is used or refused, on all ranks alike") {
  const auto forced = [](std::vector<DeviceFacts> facts, TransferMethod way) {
    for (DeviceFacts& each : facts) each.forced = way;
    return facts;
  };
  CHECK(choose_ways(forced({able(1), here(2), able(3)}, TransferMethod::staging)) ==
        Ways{TransferMethod::nothing, TransferMethod::staging, TransferMethod::staging});
  CHECK(choose_ways(forced({able(1), here(2)}, TransferMethod::ipc)) ==
        Ways{TransferMethod::nothing, TransferMethod::ipc});
  test::words_of(ErrorKind::unsupported, [&] { (void)choose_ways(forced({able(1), able(2)}, TransferMethod::ipc)); });
  CHECK(choose_ways(forced({able(1), here(2), able(3)}, TransferMethod::nccl)) ==
        Ways{TransferMethod::nothing, TransferMethod::nccl, TransferMethod::nccl});
  test::words_of(ErrorKind::unsupported, [&] { (void)choose_ways(forced({able(1), here(1)}, TransferMethod::nccl)); });
  std::vector<DeviceFacts> differ = forced({able(1), here(2)}, TransferMethod::ipc);
  differ[1].forced = TransferMethod::nccl;
  test::words_of(ErrorKind::rank_mismatch, [&] { (void)choose_ways(differ); });
  differ = {able(1), here(2)};
  differ[1].destination = Destination::host;
  test::words_of(ErrorKind::rank_mismatch, [&] { (void)choose_ways(differ); });
}

TEST_CASE("strides that a device copies in one operation") {
  CHECK(pitched(strided(DType::f32, {4, 6}, {})) == Pitched{96, 1, 96});
  CHECK(pitched(strided(DType::f32, {4, 6}, {8, 1})) == Pitched{24, 4, 32});          // rows with gaps
  CHECK(pitched(strided(DType::bf16, {4, 6}, {24, 2})) == std::nullopt);              // gaps in two dimensions
  CHECK(pitched(strided(DType::bf16, {4, 6}, {12, 2})) == Pitched{2, 24, 4});         // every second element
  CHECK(pitched(strided(DType::f32, {2, 3, 5}, {24, 8, 1})) == Pitched{20, 6, 32});   // rows of two dimensions
  CHECK(pitched(strided(DType::f32, {2, 3, 5}, {32, 8, 1})) == std::nullopt);         // the gaps are unequal
  CHECK(pitched(strided(DType::f32, {2, 3, 5}, {32, 5, 1})) == Pitched{60, 2, 128});  // inner dimensions without gaps
  CHECK(pitched(strided(DType::f32, {6, 4}, {1, 6})) == std::nullopt);                // a transpose
  CHECK(pitched(strided(DType::f32, {4, 6}, {-6, 1})) == std::nullopt);
  CHECK(pitched(strided(DType::f32, {4, 6}, {0, 1})) == std::nullopt);
  CHECK(pitched(strided(DType::f32, {4, 1, 6}, {8, 77, 1})) == Pitched{24, 4, 32});
  CHECK_THROWS_AS(require_pitched(strided(DType::f32, {6, 4}, {1, 6})), Error);
}

TEST_CASE("without a driver, an error reports which component is missing") {
  if (cuda_available()) return;
  CHECK_FALSE(cuda_unavailable_reason().empty());
  const int number = 1;
  CHECK_THROWS_WITH_AS(cuda_view(DType::i32, {1}, &number), cuda_unavailable_reason().c_str(), Error);
  CHECK_THROWS_AS(cuda_allocate(DType::u8, {4}, 0), Error);
  CHECK(query_cuda().unavailable_reason == cuda_unavailable_reason());
  CHECK(query_cuda().driver.empty());
  // Tensors in host memory do not need one.
  const TensorView view(DType::i32, {1}, &number);
  CHECK(bitwise_equal(copy_to_host(view), view));
}
