// SPDX-License-Identifier: Apache-2.0
#include "src/multihost/transport.hpp"

#include <thread>

#include "src/os/clock.hpp"

namespace muster::multihost {

PendingTransfer& PendingTransfer::operator=(PendingTransfer&& other) noexcept {
  if (this != &other) {
    if (operation_) operation_->abandon();
    operation_ = std::move(other.operation_);
  }
  return *this;
}

PendingTransfer::~PendingTransfer() {
  if (operation_) operation_->abandon();
}

bool PendingTransfer::test() {
  if (operation_ && operation_->test()) operation_.reset();
  return operation_ == nullptr;
}

bool PendingTransfer::is_over() noexcept {
  try {
    return test();
  } catch (const std::exception&) {
    return false;
  }
}

void PendingTransfer::wait(std::chrono::milliseconds longest, const std::string& late) {
  const auto deadline = os::Clock::now() + longest;
  while (!test()) {
    if (os::Clock::now() > deadline) throw Error(ErrorKind::timeout, late);
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

void PendingTransfer::cancel() noexcept {
  if (operation_ && operation_->cancel()) operation_.reset();
}

PendingTransfer Transport::send_copy(int to, int tag, std::span<const std::byte> bytes, SendEnd finished) {
  const auto copy = std::make_shared<const std::vector<std::byte>>(bytes.begin(), bytes.end());
  return send(to, tag, *copy, copy, finished);
}

}  // namespace muster::multihost
