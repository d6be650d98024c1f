// SPDX-License-Identifier: Apache-2.0
#include "src/cuda/driver.hpp"

#include <dlfcn.h>
#include <fmt/core.h>
#define XXH_INLINE_ALL
#include <xxhash.h>

#include <array>
#include <mutex>
#include <vector>

#include "muster/error.hpp"
#include "src/base/fork_mutex.hpp"
#include "src/os/process.hpp"

namespace muster::cuda {
namespace {

constexpr const char* forked =
    "CUDA: using a device in a forked process: the parent had already used CUDA. Start the process with exec or spawn";

struct Loaded {
  DriverFunctions functions;
  bool is_ready = false;
  std::int64_t pid = 0;
};

Status start(const DriverFunctions& functions, int& devices) {
  const Status status = functions.init(0);
  return status == Status::success ? functions.device_count(&devices) : status;
}

/// Fills `loaded`. Returns why the driver cannot be used, or an empty string.
std::string load(Loaded& loaded) {
  const Missing missing = find_functions("libcuda.so.1", loaded.functions);
  if (!missing.library.empty())
    return fmt::format(
        "the CUDA driver does not exist on this host ({}). Install NVIDIA's driver, or use a host that has it; start a "
        "container with its devices",
        missing.library);
  if (!missing.function.empty())
    return fmt::format("the CUDA driver does not have the function {}: it is older than version 11. Update the driver",
                       missing.function);
  int devices = 0;
  if (const Status status = start(loaded.functions, devices); status != Status::success) {
    // cuInit returns this in a child of a process that has used CUDA without Muster.
    if (status == Status::not_initialized) return forked;
    const char* name = nullptr;
    loaded.functions.error_name(status, &name);
    return fmt::format("the CUDA driver does not start ({}). Check that nvidia-smi works on this host",
                       name == nullptr ? fmt::format("error {}", static_cast<int>(status)) : name);
  }
  if (devices == 0) return "the CUDA driver has no device for this process. Check CUDA_VISIBLE_DEVICES";
  loaded.pid = os::process_id();
  loaded.is_ready = true;
  return {};
}

int device_handle(int device) {
  if (device < 0 || device >= device_count())
    throw Error(ErrorKind::invalid_argument,
                fmt::format("device cuda:{} does not exist: this process sees {} devices", device, device_count()));
  int handle = 0;
  check(driver().device_get(&handle, device), fmt::format("finding cuda:{}", device));
  return handle;
}

}  // namespace

Missing find_functions(const char* library_name, FunctionTable& table) {
  Missing missing;
  void* library = ::dlopen(library_name, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* words = ::dlerror();
    missing.library = words == nullptr ? library_name : words;
    return missing;
  }
  for (FunctionTable::ApiEntry* entry = table.last; entry != nullptr; entry = entry->next)
    if ((entry->address = ::dlsym(library, entry->name)) == nullptr) missing.function = entry->name;
  return missing;
}

const DriverFunctions* find_driver(std::string* reason) noexcept {
  // These remain valid during exit, because neither has a destructor that does anything.
  static ForkMutex mutex;
  static Loaded loaded;
  std::string why;
  try {
    const std::lock_guard lock(mutex);
    if (!loaded.is_ready) why = load(loaded);
    if (loaded.is_ready) {
      if (loaded.pid == os::process_id()) return &loaded.functions;
      why = forked;
    }
    if (reason != nullptr) *reason = std::move(why);
  } catch (const std::exception&) {
    // Out of memory: the reason stays empty.
  }
  return nullptr;
}

const DriverFunctions& driver() {
  std::string reason;
  const DriverFunctions* found = find_driver(&reason);
  if (found == nullptr)
    throw Error(ErrorKind::unsupported,
                reason.empty() ? "the CUDA driver cannot be used. Check that nvidia-smi works on this host" : reason);
  return *found;
}

std::string words_of(Status status) {
  const char* name = nullptr;
  const char* words = nullptr;
  if (const DriverFunctions* functions = find_driver()) {
    functions->error_name(status, &name);
    functions->error_string(status, &words);
  }
  if (name == nullptr) return fmt::format("CUDA error {}", static_cast<int>(status));
  return words == nullptr ? std::string(name) : fmt::format("{}: {}", name, words);
}

void check(Status status, std::string_view attempted) {
  if (status == Status::success) return;
  throw Error(status == Status::out_of_memory ? ErrorKind::out_of_space : ErrorKind::io,
              fmt::format("CUDA: {}: {}", attempted, words_of(status)));
}

int device_count() {
  int count = 0;
  check(driver().device_count(&count), "counting the CUDA devices");
  return count;
}

Context primary_context(int device) {
  static ForkMutex mutex;
  static auto* const contexts = new std::vector<Context>;  // not destroyed at exit
  const int handle = device_handle(device);
  const std::lock_guard lock(mutex);
  const auto at = static_cast<std::size_t>(device);
  if (contexts->size() <= at) contexts->resize(at + 1);
  Context& context = (*contexts)[at];
  if (context == nullptr) check(driver().primary_context(&context, handle), fmt::format("opening cuda:{}", device));
  return context;
}

std::uint64_t device_identity(int device) {
  Uuid uuid{};
  check(driver().device_uuid(&uuid, device_handle(device)), fmt::format("reading the UUID of cuda:{}", device));
  const std::uint64_t hash = XXH3_64bits(uuid.bytes, sizeof uuid.bytes) >> 16;
  return hash == 0 ? 1 : hash;
}

std::string device_name(int device) {
  std::array<char, 128> name{};
  check(driver().device_name(name.data(), static_cast<int>(name.size()) - 1, device_handle(device)),
        fmt::format("reading the name of cuda:{}", device));
  return name.data();
}

std::uint64_t device_memory(int device) {
  std::size_t bytes = 0;
  check(driver().device_total_memory(&bytes, device_handle(device)),
        fmt::format("reading the memory size of cuda:{}", device));
  return bytes;
}

std::uint64_t device_max_pitch_bytes(int device) {
  int bytes = 0;
  check(driver().device_attribute(&bytes, device_max_pitch, device_handle(device)),
        fmt::format("reading the limits of cuda:{}", device));
  return static_cast<std::uint64_t>(bytes);
}

std::optional<int> current_device() {
  Context context = nullptr;
  if (driver().current_context(&context) != Status::success || context == nullptr) return std::nullopt;
  int handle = 0;
  if (driver().current_device(&handle) != Status::success) return std::nullopt;
  for (int device = 0; device < device_count(); ++device)
    if (device_handle(device) == handle) return device;
  return std::nullopt;
}

BesideCaptures::BesideCaptures() noexcept : mode_(capture_mode_relaxed) {
  if (const DriverFunctions* functions = find_driver()) functions->exchange_capture_mode(&mode_);
}

BesideCaptures::~BesideCaptures() {
  if (const DriverFunctions* functions = find_driver()) functions->exchange_capture_mode(&mode_);
}

Current::Current(int device) {
  check(driver().push_context(primary_context(device)), fmt::format("making cuda:{} current", device));
}

Current::Current(Context context) {
  check(driver().push_context(context), "making the device of a context current");
}

Current::~Current() {
  Context context = nullptr;
  if (const DriverFunctions* functions = find_driver()) functions->pop_context(&context);
}

std::optional<Located> locate(const void* address) {
  const DriverFunctions& functions = driver();
  const DevicePointer pointer = device_pointer(address);
  unsigned type = 0;
  const BesideCaptures beside;
  std::optional<Current> current;
  Status asked = functions.pointer_attribute(&type, pointer_memory_type, pointer);
  if (asked == Status::invalid_context) {
    // The thread has no current device. Addresses are unique across devices, so any device is suitable.
    current.emplace(0);
    asked = functions.pointer_attribute(&type, pointer_memory_type, pointer);
  }
  // The driver returns this for an unknown address.
  if (asked == Status::invalid_value) return std::nullopt;
  check(asked, "reading the location of an address");
  if (type != memory_device) return std::nullopt;
  unsigned managed = 0;
  if (functions.pointer_attribute(&managed, pointer_is_managed, pointer) == Status::success && managed != 0)
    return std::nullopt;
  Located located;
  check(functions.pointer_attribute(&located.device, pointer_device_ordinal, pointer),
        "reading the device of an address");
  unsigned long long buffer = 0;
  check(functions.pointer_attribute(&buffer, pointer_buffer_id, pointer), "reading the allocation of an address");
  located.buffer = buffer;
  unsigned exportable = 0;
  // Older drivers do not have this attribute. Then an export shows whether it is possible.
  const Status status = functions.pointer_attribute(&exportable, pointer_is_exportable, pointer);
  located.is_exportable = status != Status::success || (exportable & 0xff) != 0;
  return located;
}

Located locate(const TensorView& tensor) {
  const auto located = locate(static_cast<const void*>(tensor.data()));
  if (!located)
    throw Error(ErrorKind::invalid_argument, fmt::format("tensor of shape {}: its device is {}, but its address is not "
                                                         "on a device. Use cuda_view() to make its view",
                                                         to_string(tensor.shape()), to_string(tensor.device())));
  if (located->device != tensor.device().index)
    throw Error(
        ErrorKind::invalid_argument,
        fmt::format(
            "tensor of shape {}: its device is {}, but its address is on cuda:{}. Use cuda_view() to make its view",
            to_string(tensor.shape()), to_string(tensor.device()), located->device));
  return *located;
}

Allocation allocation_of(const void* address) {
  Allocation allocation;
  check(driver().address_range(&allocation.base, &allocation.bytes, device_pointer(address)),
        "reading the bounds of an allocation on a device");
  return allocation;
}

}  // namespace muster::cuda
