// SPDX-License-Identifier: Apache-2.0
#include "src/cuda/ipc.hpp"

#include <fmt/core.h>

#include <algorithm>

#include "muster/error.hpp"

namespace muster::cuda {
namespace {

// Frameworks allocate large blocks, so few allocations are in use at a time.
constexpr std::size_t most_open = 256;

void close_handle(DevicePointer pointer, int device) noexcept {
  on_device_if_there(device, [&](const DriverFunctions& functions) { functions.ipc_close(pointer); });
}

}  // namespace

Exports::FoundBuffer Exports::find(const TensorView& tensor) {
  const Current current(tensor.device().index);
  const Allocation allocation = allocation_of(tensor.data());
  const auto located = locate(tensor.data());
  if (!located) throw Error(ErrorKind::invalid_argument, "tensor: its address is not on a device");
  const std::uint64_t offset = device_pointer(tensor.data()) - allocation.base;
  if (offset > allocation.bytes || tensor.nbytes() > allocation.bytes - offset)
    throw Error(ErrorKind::invalid_argument, fmt::format("a tensor of {} bytes exceeds its allocation on {}",
                                                         tensor.nbytes(), to_string(tensor.device())));
  KnownBuffer& known = known_[allocation.base];
  if (known.base == 0 || known.exported.buffer != located->buffer) {
    IpcHandle handle{};
    check(driver().ipc_export(&handle, allocation.base),
          fmt::format("exporting an allocation of {} bytes on {}", allocation.bytes, to_string(tensor.device())));
    known = {allocation.base, {located->buffer, allocation.bytes, handle}};
  }
  return {known.exported, offset};
}

void Exports::note_told(int first, std::uint64_t buffer) {
  for (const auto& [base, known] : known_)
    if (known.exported.buffer == buffer) told_[first][buffer] = address_of(base);
}

std::vector<std::uint64_t> Exports::take_gone(int first) {
  std::vector<std::uint64_t> gone;
  const auto told = told_.find(first);
  if (told == told_.end()) return gone;
  std::erase_if(told->second, [&](const auto& item) {
    const auto located = locate(item.second);
    if (located && located->buffer == item.first) return false;
    gone.push_back(item.first);
    return true;
  });
  std::erase_if(known_,
                [&](const auto& item) { return std::ranges::find(gone, item.second.exported.buffer) != gone.end(); });
  return gone;
}

DevicePointer OpenedMemory::open(int sender, const ExportedBuffer& exported, int device,
                                 std::span<const DevicePointer> in_use) {
  const Key key{sender, exported.buffer, device};
  auto found = open_.find(key);
  if (found == open_.end()) {
    const Current current(device);
    DevicePointer pointer = 0;
    Status status = driver().ipc_open(&pointer, exported.handle, ipc_lazy_peer_access);
    if (status == Status::already_mapped) {
      // An allocation that the sender has freed, and whose addresses it has reused, is still open.
      close_all_of(sender, in_use);
      status = driver().ipc_open(&pointer, exported.handle, ipc_lazy_peer_access);
    }
    check(status, fmt::format("opening memory of rank {} for cuda:{}", sender, device));
    found = open_.emplace(key, Opened{pointer, 0}).first;
  }
  found->second.used = ++uses_;
  return found->second.pointer;
}

void OpenedMemory::close(int sender, std::span<const std::uint64_t> buffers) noexcept {
  std::erase_if(open_, [&](const auto& item) {
    if (item.first.sender != sender || std::ranges::find(buffers, item.first.buffer) == buffers.end()) return false;
    close_handle(item.second.pointer, item.first.device);
    return true;
  });
}

void OpenedMemory::close_all_of(int sender, std::span<const DevicePointer> but) noexcept {
  std::erase_if(open_, [&](const auto& item) {
    if (item.first.sender != sender || std::ranges::find(but, item.second.pointer) != but.end()) return false;
    close_handle(item.second.pointer, item.first.device);
    return true;
  });
}

void OpenedMemory::close_surplus() noexcept {
  while (open_.size() > most_open) {
    const auto oldest = std::ranges::min_element(open_, {}, [](const auto& item) { return item.second.used; });
    close_handle(oldest->second.pointer, oldest->first.device);
    open_.erase(oldest);
  }
}

void OpenedMemory::close_all() noexcept {
  for (const auto& [key, opened] : open_) close_handle(opened.pointer, key.device);
  open_.clear();
}

}  // namespace muster::cuda
