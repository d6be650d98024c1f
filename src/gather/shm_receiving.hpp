// SPDX-License-Identifier: Apache-2.0
#pragma once
// The first rank's side of an exchange over shared memory (shm_protocol.hpp).

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "src/gather/route.hpp"
#include "src/gather/shm_protocol.hpp"

namespace muster::gather {

class ShmReceiving {
 public:
  ShmReceiving(const Call& call, ShmState& state);
  /// `takes`, where given: the ranks whose bytes come this way; all others' entries stay empty.
  void move(std::span<const Record> records, ExchangeReport& report, const std::function<bool(int)>& takes = {});
  void commit() noexcept;
  std::vector<std::optional<Config>> deliver();

 private:
  [[nodiscard]] std::vector<std::byte> take(int sender, const Record& record);
  [[nodiscard]] std::vector<std::byte> written_message(int sender, const Record& record);
  std::shared_ptr<shm::RemoteSegment> segment(int sender, std::uint64_t place);
  void unpack(std::size_t position, const Record& record, std::span<const std::byte> message, ExchangeReport& report);

  const Call& call_;
  ShmState& state_;
  std::vector<std::optional<Config>> entries_;
  std::vector<std::pair<std::shared_ptr<shm::RemoteSegment>, std::uint64_t>> in_use_;
};

}  // namespace muster::gather
