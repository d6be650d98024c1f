// SPDX-License-Identifier: Apache-2.0
#include "src/device/driver.hpp"

#include <dlfcn.h>
#include <fmt/core.h>

#include <mutex>

#include "muster/error.hpp"
#include "src/os/process.hpp"

namespace muster::cuda {
namespace {

constexpr const char* library_name = "libcuda.so.1";
constexpr const char* forked =
    "this process was forked from one that had used CUDA: its devices cannot be reached from here, start it anew";

struct Loaded {
  DriverFunctions functions;
  bool is_ready = false;
  std::int64_t pid = 0;
};

Status start(const DriverFunctions& functions, int& devices) {
  const Status status = functions.init(0);
  return status == Status::success ? functions.device_count(&devices) : status;
}

/// Fills `loaded`; returns why it cannot be used.
std::string load(Loaded& loaded) {
  void* library = ::dlopen(library_name, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* words = ::dlerror();
    return fmt::format(
        "there is no CUDA driver here ({}): install NVIDIA's, or run where one is; in a container, start it "
        "with its devices",
        words == nullptr ? library_name : words);
  }
  std::string missing;
  for_each_function(loaded.functions, [&](const char* name, auto& function) {
    void* symbol = ::dlsym(library, name);
    if (symbol == nullptr && missing.empty()) missing = name;
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(symbol);
  });
  if (!missing.empty())
    return fmt::format("the CUDA driver has no function {}: it is older than version 11, update it", missing);
  int devices = 0;
  if (const Status status = start(loaded.functions, devices); status != Status::success) {
    // What cuInit says in a child of a process that has used CUDA without us.
    if (status == Status::not_initialized) return forked;
    const char* name = nullptr;
    loaded.functions.error_name(status, &name);
    return fmt::format("the CUDA driver does not start ({}): see whether nvidia-smi works here",
                       name == nullptr ? fmt::format("error {}", static_cast<int>(status)) : name);
  }
  if (devices == 0) return "the CUDA driver has no device for this process: look at CUDA_VISIBLE_DEVICES";
  loaded.pid = os::process_id();
  loaded.is_ready = true;
  return {};
}

}  // namespace

const DriverFunctions* find_driver(std::string* reason) noexcept {
  // There at exit, too: neither has anything to destroy.
  static std::mutex mutex;
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
  if (found == nullptr) throw Error(ErrorKind::unsupported, reason.empty() ? "the CUDA driver cannot be used" : reason);
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
  throw Error(status == Status::out_of_memory ? ErrorKind::no_space : ErrorKind::io,
              fmt::format("{}: {}", attempted, words_of(status)));
}

}  // namespace muster::cuda
